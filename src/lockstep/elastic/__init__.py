"""Membership and recovery: what happens when a worker is lost, or when the number of workers changes.

`host_agent` notices the loss, `membership` derives the next generation from the records in the control store, and
`generation_groups` aborts the process groups inside the survivors. They continue in `lockstep.recovery.elastic_calls`.
"""
