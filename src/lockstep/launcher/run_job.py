"""Runs a job from its first process to its exit status: with a fixed number of workers, or elastic."""

from __future__ import annotations

from contextlib import ExitStack

from lockstep.elastic.host_agent import ElasticCrew
from lockstep.launcher.job import Job, reserve_port
from lockstep.launcher.parent_watch import Guardian, adopt_orphans
from lockstep.launcher.supervisor import Crew


def supervise(job: Job) -> int:
    """Run the job to its end and return the exit status for the launcher. The folder for the logs must exist.

    Must be called from the main thread, and with no other one running: signals arrive there, the workers are forked
    there, and the kernel takes the end of the forking thread for the launcher's death (PR_SET_PDEATHSIG).
    """
    adopt_orphans()
    with ExitStack() as stack:
        guardian = stack.enter_context(Guardian(job.id))
        port = stack.enter_context(reserve_port())
        crew = stack.enter_context(Crew(job, guardian) if job.elastic is None else ElasticCrew(job, guardian))
        crew.start(port)
        crew.watch()
    return crew.report()
