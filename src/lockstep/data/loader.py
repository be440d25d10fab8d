"""Runs torch's DataLoader, which loads one worker's part of a batch at a time, and manages its processes.

Note [Loader processes do not outlive the worker]
Loader processes end when the generator is closed, which happens when the consumer stops iterating, raises, or is
garbage-collected. If this process is killed, the kernel kills them (PR_SET_PDEATHSIG). torch's own watchdog takes five
seconds, and can wait forever on a full pipe that sibling processes hold open.

Note [Garbage collection after a fork]
A forked process has its parent's objects but not its threads. If the garbage collector destroyed an unreachable process
group among them, the destructor would wait for threads that do not exist, or crash. So a loader process never collects
objects of its parent.

Note [When the loss of a loader process is raised]
When a loader process dies, torch's SIGCHLD handler raises wherever the program happens to be: perhaps in the middle of
a step, which would then fail on this worker. So the processes are registered with torch only while this process waits
for one of them: there, the batch can be loaded again.
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
from torch.utils.data import DataLoader

from lockstep import _torch
from lockstep._torch import raise_if_worker_failed, remove_worker_pids, set_worker_pids
from lockstep.data.fd_channel import FdChannel, set_own_channel
from lockstep.data.packed_batch import PackedBatch, pack
from lockstep.data.reader import DataError

_PR_SET_PDEATHSIG: Final = 1
_LOST_PHRASES: Final = ("exited unexpectedly", "is killed by signal")
CHECK_EVERY_S: Final = 1.0  # how often DataLoader checks whether its processes are alive

_gc_was_enabled: list[bool] = []  # before the fork that is in progress


def _disable_gc() -> None:
    _gc_was_enabled.append(gc.isenabled())
    gc.disable()


def _restore_gc() -> None:
    if _gc_was_enabled.pop():
        gc.enable()


def _freeze_and_restore_gc() -> None:
    gc.freeze()
    _restore_gc()


# Freezing in the child is not enough: other handlers that run there after a fork might trigger a collection before it.
os.register_at_fork(before=_disable_gc, after_in_parent=_restore_gc, after_in_child=_freeze_and_restore_gc)


class LoaderLostError(DataError):
    """A loader process has died. Another one can load its batches."""


@dataclass(frozen=True)
class LoaderSettings:
    """How batches are loaded."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    timeout_s: float
    rank: int
    device: torch.device
    hide_worker_info: bool


def load(reader: Any, requests: Iterable[Any], how: LoaderSettings) -> Generator[PackedBatch, None, None]:
    """Yield `reader[request]` for every request, in order, each as a PackedBatch.

    Raises LoaderLostError if a loader process dies, and DataError for other errors of the DataLoader itself.
    """
    with ExitStack() as stack:
        channels = [stack.enter_context(closing(FdChannel())) for _ in range(how.num_workers)]
        batches = _start(reader, requests, how, channels)
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is not None:  # not left to the garbage collector: a traceback may keep the iterator alive for long
            stack.callback(shut_down)
        while True:
            try:
                batch = _next(batches, how)
            except Exception as error:  # from DataLoader itself: errors of the dataset are returned as LoadFailure
                lost = any(phrase in str(error) for phrase in _LOST_PHRASES)
                codes = {one.exitcode for one in getattr(batches, "_workers", ())} - {None}
                raise (LoaderLostError if lost else DataError)(_explain(error, how, codes)) from error
            if batch is None:
                return
            yield batch


def _next(batches: Iterator[PackedBatch], how: LoaderSettings) -> PackedBatch | None:
    """Return the next batch, with many short timeouts: DataLoader checks its processes only when one has passed."""
    end_s = time.monotonic() + how.timeout_s
    with _registered_with_torch(batches):
        while True:
            try:
                return next(batches, None)
            except RuntimeError as error:
                if "timed out after" not in str(error) or time.monotonic() >= end_s:
                    raise


@contextmanager
def _registered_with_torch(batches: Iterator[PackedBatch]) -> Iterator[None]:
    """See Note [When the loss of a loader process is raised]."""
    processes = getattr(batches, "_workers", ())
    if not processes:
        yield
        return
    set_worker_pids(id(batches), tuple(process.pid for process in processes))
    try:
        raise_if_worker_failed()  # the SIGCHLD may have come earlier
        yield
    finally:
        remove_worker_pids(id(batches))


def _start(
    reader: Any, requests: Iterable[Any], how: LoaderSettings, channels: Sequence[FdChannel]
) -> Iterator[PackedBatch]:
    options: dict[str, Any] = {}
    if channels:
        options = {
            "num_workers": how.num_workers,
            "prefetch_factor": how.prefetch_factor,
            "timeout": min(how.timeout_s, CHECK_EVERY_S),
            "worker_init_fn": partial(_init_loader_process, _parent_to_follow(), how.hide_worker_info, channels),
        }
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        collate_fn=pack if channels else PackedBatch,
        pin_memory=how.pin_memory,
        generator=torch.Generator(),  # otherwise starting would draw from the global generator
        **options,
    )
    with _current(how.device):  # memory is pinned for the device that is current now
        batches: Any = iter(loader)
    if getattr(batches, "_worker_pids_set", False):
        remove_worker_pids(id(batches))
        batches._worker_pids_set = False  # otherwise it would remove them again when it ends
    return cast(Iterator[PackedBatch], batches)


def _explain(error: Exception, how: LoaderSettings, codes: Collection[int]) -> str:
    who = f"rank {how.rank}: loading with {how.num_workers} loader processes failed: {type(error).__name__}: {error}"
    if codes:
        who += f" (exit status {', '.join(map(str, sorted(codes)))})"
    if "timed out" in str(error):
        return f"{who}; the dataset hangs or is very slow: raise timeout_s, or try num_workers=0 to see where"
    advice = "use a smaller num_workers= or prefetch_factor="
    return f"{who}; if a process was killed, the machine may be short of memory: {advice}"


def _parent_to_follow() -> int | None:
    """PID of the process with which a loader process has to end; None where PR_SET_PDEATHSIG does not work."""
    # The signal is sent when the forking thread ends, so that must be the main thread. The parent of a loader process
    # that a fork server started is the fork server, which ends with this process by itself.
    in_main_thread = threading.current_thread() is threading.main_thread()
    is_direct_child = torch.multiprocessing.get_start_method() != "forkserver"
    return os.getpid() if sys.platform == "linux" and in_main_thread and is_direct_child else None


def _init_loader_process(
    parent: int | None, hide_worker_info: bool, channels: Sequence[FdChannel], loader: int
) -> None:
    """Called first in a loader process. Torch has already set the number of threads to one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the worker ends its loaders itself
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl: neither the kernel nor torch's watchdog would notice
            os._exit(1)
    set_own_channel(channels[loader])
    if hide_worker_info:
        # Most iterable datasets would split themselves by it. See Note [Every worker reads the whole stream].
        _torch.loader_worker._worker_info = None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
