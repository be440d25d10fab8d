"""`lockstep.launch`: runs a function on forked workers of this machine."""

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
from lockstep.launcher.parent_watch import ParentWatch
from lockstep.world.environment import detect

T = TypeVar("T")


def launch(fn: Callable[..., T], *args: Any, workers: int | None = None) -> T:
    """Runs `fn(*args)` on several workers of this machine, and returns what it returns on rank 0.

    workers  how many; by default as `lockstep run` chooses: one per GPU, without a GPU one per core, at most four

    For notebooks and scripts: the workers are forks of this process, so `fn` may be defined in a cell, and may use all
    objects of this process. Its changes stay in the workers; only its result is returned. The result is pickled:
    numbers, text, tensors (moved to the CPU), a state dict, lists and dicts of these, objects of classes known here.

    The output of the workers is shown while they run. If one fails, the others are stopped, and WorkerFailedError has
    the traceback of the first. Ctrl-C, or the notebook's stop button, ends them all. They never outlive this process.
    """
    number = _check(fn, workers)
    # Imported before the fork, so that the workers need not import it.
    import torch  # noqa: F401

    import lockstep.train.run  # noqa: F401
    from lockstep.notebook.workers import NotebookWorkers

    _refuse_state_that_cannot_be_forked()
    job, cores = Job((), number, Path(os.devnull)), count_cores()
    with ExitStack() as stack:
        parent_watch = stack.enter_context(ParentWatch())
        port = stack.enter_context(reserve_port())
        group = stack.enter_context(NotebookWorkers(parent_watch))

        environments = [worker_env(os.environ, rank=rank, job=job, port=port, cores=cores) for rank in range(number)]
        for env in environments:
            del env["LOCKSTEP_RUN_DIR"]  # there is no folder of logs
        group.start(partial(fn, *args), environments)
        group.watch()
        result: T = group.result()
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
    """Returns what says that this process is a worker, or None. A world of one (a notebook under srun) is none."""
    if "LOCKSTEP_RUN_DIR" in os.environ:
        return "`lockstep run` has started it"
    try:
        place = detect(os.environ)
    except WorldError:
        return None  # inconsistent variables of another program; the workers get their own
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
