"""`lockstep.launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import LockstepError, WorldError
from lockstep.launcher.exit_policy import count_workers
from lockstep.launcher.job import Job, count_cores, count_gpus, reserve_port, worker_env
from lockstep.launcher.parent_watch import Guardian
from lockstep.world.environment import detect

T = TypeVar("T")


def launch(fn: Callable[..., T], *args: Any, workers: int | None = None) -> T:
    """Run `fn(*args)` on several workers of this machine, and return what it returns on rank 0.

    workers  how many; as `lockstep run` chooses if left out: one per GPU, without a GPU one per core, at most four

    For notebooks and scripts: the workers are forks of this process, so `fn` may be defined in a cell, and may use
    all that is there. What it changes stays in the workers; only its result comes back. That is pickled: numbers,
    text, tensors (on the CPU then), a state dict, lists and dicts of these, objects of classes that are known here.

    The output of the workers is shown as it comes. If one fails, the others are stopped, and WorkerFailedError has the
    traceback of the first. Ctrl-C, or the notebook's stop button, ends them all. They never outlive this process.
    """
    number = _check(fn, workers)
    # Before the fork, so that it is imported once and not by every worker.
    import torch  # noqa: F401

    import lockstep.train.run  # noqa: F401
    from lockstep.notebook.workers import Crew

    _refuse_state_that_cannot_be_forked()
    job, cores = Job((), number, Path(os.devnull)), count_cores()
    with ExitStack() as stack:
        guardian = stack.enter_context(Guardian())
        port = stack.enter_context(reserve_port())
        crew = stack.enter_context(Crew(guardian))

        environments = [worker_env(os.environ, rank=rank, job=job, port=port, cores=cores) for rank in range(number)]
        for env in environments:
            del env["LOCKSTEP_RUN_DIR"]  # there are no logs
        crew.start(partial(fn, *args), environments)
        crew.watch()
        result: T = crew.result()
        return result


def _check(fn: object, workers: object) -> int:
    if sys.platform != "linux":
        raise LockstepError(
            f"lockstep.launch forks this process, which works on Linux only, and this is {sys.platform}; put the "
            "function into a script, and start that with `lockstep run`"
        )
    if not callable(fn):
        raise TypeError(f"lockstep.launch takes a function and its arguments, and {fn!r} is not a function")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool)):
        raise TypeError(f"workers={workers!r} must be a whole number, or None")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be 1 or more")
    if (where := _already_a_worker()) is not None:
        raise LockstepError(
            f"lockstep.launch was called inside a worker ({where}): the workers would multiply; call the function "
            "itself here, or start this program with plain `python`"
        )
    return workers or count_workers(os.environ, gpus=count_gpus(), cores=count_cores())


def _already_a_worker() -> str | None:
    """Who says so. A world of one (a notebook under srun, say) is no worker."""
    if "LOCKSTEP_RUN_DIR" in os.environ:
        return "`lockstep run` has started it"
    try:
        place = detect(os.environ)
    except WorldError:
        return None  # left over from something else; workers get their own
    if place is None or (place.size == 1 and place.source != "RANK/WORLD_SIZE"):
        return None
    return f"{place.source} says rank {place.rank} of {place.size}"


def _refuse_state_that_cannot_be_forked() -> None:
    import torch
    import torch.distributed as dist

    cuda: Any = torch.cuda  # is_initialized has no types
    if cuda.is_initialized():
        raise LockstepError(
            "CUDA is in use in this process already, and does not work in a fork of it; restart the kernel, and "
            "make models and tensors on the GPU inside of the function only"
        )
    if dist.is_available() and dist.is_initialized():
        raise LockstepError(
            "this process is in a process group already (lockstep.init() or a lockstep.Run was called here), which "
            "its forks cannot share; call torch.distributed.destroy_process_group() first, or restart the kernel"
        )
