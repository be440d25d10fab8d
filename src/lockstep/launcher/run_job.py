"""Runs a job from its first process to its exit status, with a fixed number of workers or elastic."""

from __future__ import annotations

from contextlib import ExitStack

from lockstep.elastic.host_agent import HostAgent
from lockstep.launcher.job import Job, reserve_port
from lockstep.launcher.parent_watch import ParentWatch, adopt_orphans
from lockstep.launcher.worker_group import WorkerGroup


def run_job(job: Job) -> int:
    """Runs the job to its end and returns the launcher's exit status. The folder of the logs must exist.

    Must be called from the main thread of a process without other threads: signals are handled and workers are forked
    there, and the kernel takes the end of the forking thread for the launcher's death (PR_SET_PDEATHSIG).
    """
    adopt_orphans()
    with ExitStack() as stack:
        parent_watch = stack.enter_context(ParentWatch(job.id))
        port = stack.enter_context(reserve_port())
        workers = stack.enter_context((WorkerGroup if job.elastic is None else HostAgent)(job, parent_watch))
        workers.start(port)
        workers.watch()
    return workers.report()
