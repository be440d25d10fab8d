"""torch's DataLoader, asked for one worker's part of a batch at a time, and its processes.

Note [Nobody stays]
Loader processes end when the generator is closed, which happens when the consumer stops iterating, raises, or is
collected. If this process is killed the kernel kills them (PR_SET_PDEATHSIG). torch's own watchdog takes five seconds,
and can wait forever on a full pipe that sibling processes hold open.

Note [What is the parent's]
A forked process has its parent's objects but not its threads. If the garbage collector finds a dead process group
among them, its destructor waits for threads that are not there, or crashes. So nothing of the parent's is collected.

Note [Lost ones are noticed where they are missed]
When a loader process dies, torch's handler of SIGCHLD raises wherever the program happens to be: in the middle of a
step, say, of which this worker would then be the one that failed. So torch knows our processes only while we wait for
one of them, where the error can be healed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids
from torch.utils.data import DataLoader

from lockstep.data.fd_channel import Hatch, use
from lockstep.data.packed_batch import Parcel, pack
from lockstep.data.reader import DataError

_PR_SET_PDEATHSIG: Final = 1
_LOST_PHRASES: Final = ("exited unexpectedly", "is killed by signal")
LOOK_S: Final = 1.0

_collected: list[bool] = []  # before the fork that is under way


def _stop_collecting() -> None:
    _collected.append(gc.isenabled())
    gc.disable()


def _collect_again() -> None:
    if _collected.pop():
        gc.enable()


def _collect_own() -> None:
    gc.freeze()
    _collect_again()


# Not only frozen in the child: what else is called there after a fork might set the collector off before.
os.register_at_fork(before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_collect_own)


class LoaderLost(DataError):
    """A loader process has ended. What it was to load can be loaded by another."""


@dataclass(frozen=True)
class Loading:
    """How batches are loaded."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    timeout_s: float
    rank: int
    device: torch.device
    hide_worker_info: bool


def load(reader: Any, jobs: Iterable[Any], how: Loading) -> Generator[Parcel, None, None]:
    """`reader[job]` for every job, in order, each in a parcel."""
    with ExitStack() as ends:
        parcels = _begin(reader, jobs, how, [ends.enter_context(closing(Hatch())) for _ in range(how.num_workers)])
        stop = getattr(parcels, "_shutdown_workers", None)
        if stop is not None:  # not left to the garbage collector: a traceback may hold the iterator for long
            ends.callback(stop)
        while True:
            try:
                parcel = _next(parcels, how)
            except Exception as error:  # of DataLoader itself: what the dataset raises comes as a Failure
                lost = any(phrase in str(error) for phrase in _LOST_PHRASES)
                codes = {one.exitcode for one in getattr(parcels, "_workers", ())} - {None}
                raise (LoaderLost if lost else DataError)(_explain(error, how, codes)) from error
            if parcel is None:
                return
            yield parcel


def _next(parcels: Iterator[Parcel], how: Loading) -> Parcel | None:
    """DataLoader looks whether its processes live only when its time is over. So it gets a little, again and again."""
    end_s = time.monotonic() + how.timeout_s
    with _noticing(parcels):
        while True:
            try:
                return next(parcels, None)
            except RuntimeError as error:
                if "timed out after" not in str(error) or time.monotonic() >= end_s:
                    raise


@contextmanager
def _noticing(parcels: Iterator[Parcel]) -> Iterator[None]:
    """See Note [Lost ones are noticed where they are missed]."""
    processes = getattr(parcels, "_workers", ())
    if not processes:
        yield
        return
    _set_worker_pids(id(parcels), tuple(process.pid for process in processes))
    try:
        _error_if_any_worker_fails()  # its signal may have come before
        yield
    finally:
        _remove_worker_pids(id(parcels))


def _begin(reader: Any, jobs: Iterable[Any], how: Loading, hatches: Sequence[Hatch]) -> Iterator[Parcel]:
    options: dict[str, Any] = {}
    if hatches:
        options = {
            "num_workers": how.num_workers,
            "prefetch_factor": how.prefetch_factor,
            "timeout": min(how.timeout_s, LOOK_S),
            "worker_init_fn": partial(_settle, _whom_to_follow(), how.hide_worker_info, hatches),
        }
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_size=None,
        sampler=jobs,
        collate_fn=pack if hatches else Parcel,
        pin_memory=how.pin_memory,
        generator=torch.Generator(),  # else starting would draw from the global one
        **options,
    )
    with _current(how.device):  # memory is pinned for the device that is current now
        parcels: Any = iter(loader)
    if getattr(parcels, "_worker_pids_set", False):
        _remove_worker_pids(id(parcels))
        parcels._worker_pids_set = False  # or it would do that itself at its end
    return cast(Iterator[Parcel], parcels)


def _explain(error: Exception, how: Loading, codes: Collection[int]) -> str:
    who = f"rank {how.rank}: loading with {how.num_workers} loader processes failed: {type(error).__name__}: {error}"
    if codes:
        who += f" (exit status {', '.join(map(str, sorted(codes)))})"
    if "timed out" in str(error):
        return f"{who}; the dataset hangs or is very slow: raise timeout_s, or try num_workers=0 to see where"
    advice = "use a smaller num_workers= or prefetch_factor="
    return f"{who}; if a process was killed, the machine may be short of memory: {advice}"


def _whom_to_follow() -> int | None:
    """The process with which a loader process has to end; None where the kernel would not tell it rightly."""
    # A signal is sent when the thread that forked ends, so that must be the main one. And the child of a fork server
    # follows that, which ends with us by itself.
    in_main_thread = threading.current_thread() is threading.main_thread()
    by_us = torch.multiprocessing.get_start_method() != "forkserver"
    return os.getpid() if sys.platform == "linux" and in_main_thread and by_us else None


def _settle(parent: int | None, hide_worker_info: bool, hatches: Sequence[Hatch], loader: int) -> None:
    """First thing in a loader process. Torch has set the number of threads to one already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the worker decides, and ends us
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before that; neither the kernel nor torch's watchdog would notice any more
            os._exit(1)
    use(hatches[loader])
    if hide_worker_info:
        # Most iterable datasets split themselves by it. See Note [Everybody reads everything].
        torch.utils.data._utils.worker._worker_info = None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
