"""torch's DataLoader, asked for one worker's part of a batch at a time, and its processes.

Note [Nobody stays]
Loader processes end when the generator is closed, which happens when the consumer stops iterating, raises, or is
collected. If this process is killed the kernel kills them (PR_SET_PDEATHSIG). torch's own watchdog takes five seconds,
and can wait forever on a full pipe that sibling processes hold open.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.data.parcel import Parcel, pack
from lockstep.data.reader import DataError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Loading:
    """How batches are loaded."""

    loaders: int
    ahead: int
    pin: bool
    timeout_s: float
    rank: int
    device: torch.device
    hide_worker_info: bool


def load(reader: Any, jobs: Iterable[Any], how: Loading) -> Generator[Parcel, None, None]:
    """`reader[job]` for every job, in order, each in a parcel."""
    options: dict[str, Any] = {}
    if how.loaders > 0:
        options = {
            "num_workers": how.loaders,
            "prefetch_factor": max(1, -(-how.ahead // how.loaders)),
            "timeout": how.timeout_s,
            "worker_init_fn": partial(_settle, _whom_to_follow(), how.hide_worker_info),
        }
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_size=None,
        sampler=jobs,
        collate_fn=pack if how.loaders > 0 else Parcel,
        pin_memory=how.pin,
        generator=torch.Generator(),  # else starting would draw from the global one
        **options,
    )
    with _current(how.device):  # memory is pinned for the device that is current now
        parcels = iter(loader)
    try:
        while True:
            try:
                parcel = next(parcels, None)
            except Exception as error:  # of DataLoader itself: what the dataset raises comes as a Failure
                raise DataError(_explain(error, how)) from error
            if parcel is None:
                return
            yield parcel
    finally:
        # Not left to the garbage collector: a traceback may hold the iterator for long.
        stop = getattr(parcels, "_shutdown_workers", None)
        if stop is not None:
            stop()


def _explain(error: Exception, how: Loading) -> str:
    who = f"rank {how.rank}: loading with {how.loaders} loader processes failed: {type(error).__name__}: {error}"
    if "timed out" in str(error):
        return f"{who}; the dataset hangs or is very slow: raise timeout_s, or try loaders=0 to see where"
    return f"{who}; if a process was killed, the machine may be short of memory: use fewer loaders or less ahead"


def _whom_to_follow() -> int | None:
    """The process with which a loader process has to end; None where the kernel would not tell it rightly."""
    # A signal is sent when the thread that forked ends, so that must be the main one. And the child of a fork server
    # follows that, which ends with us by itself.
    in_main_thread = threading.current_thread() is threading.main_thread()
    by_us = torch.multiprocessing.get_start_method() != "forkserver"
    return os.getpid() if sys.platform == "linux" and in_main_thread and by_us else None


def _settle(parent: int | None, hide_worker_info: bool, _loader: int) -> None:
    """First thing in a loader process. Torch has set the number of threads to one already."""
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before that; neither the kernel nor torch's watchdog would notice any more
            os._exit(1)
    if hide_worker_info:
        # Most iterable datasets split themselves by it. See Note [Everybody reads everything].
        torch.utils.data._utils.worker._worker_info = None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
