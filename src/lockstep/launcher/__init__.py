"""`lockstep run`: starts processes, passes their output on, and ends when they have; no torch.

`run_job` runs a job with a fixed number of workers in `worker_group`, and an elastic one in `elastic/host_agent`, whose
workers are forked by `fork_server`.
"""
