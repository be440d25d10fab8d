"""Makes the load requests of a sample order, and runs torch's DataLoader and its processes to load them.

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
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep import _torch
from lockstep._torch import raise_if_worker_failed, remove_worker_pids, set_worker_pids
from lockstep.data.ledger import fingerprint
from lockstep.data.packed_batch import FdChannel, PackedBatch, pack, set_own_channel
from lockstep.data.reader import DataError, LoadFailure, LoadRequest
from lockstep.data.sample_order import Division, Order, Position, SamplerOrder, Shuffled, count_steps, positions_from

_PR_SET_PDEATHSIG: Final = 1
_LOST_PHRASES: Final = ("exited unexpectedly", "is killed by signal")
COMPARED_SAMPLES: Final = 4  # samples whose content all workers compare, in one batch after each start
CHECK_EVERY_S: Final = 1.0  # how often DataLoader checks whether its processes are alive


# ---- requests --------------------------------------------------------------------------------------------------------


def plan_requests(
    order: Order, start: Position, epochs: int | None, division: Division, *, size: int, is_compared: bool = False
) -> Iterator[LoadRequest | LoadFailure]:
    """Yield every request from `start` on. An error of the order ends them, as a LoadFailure after earlier batches.

    is_compared  the step compares the order between workers; for orders that are not Lockstep's own
    """
    is_alone = len(division.mine) == division.shards
    try:
        for position, ends_epoch in positions_from(order, start, epochs):
            samples = batch_samples(order, position, size)
            request = make_request(samples, position, division, ends_epoch=ends_epoch)
            # One batch compares the content of samples; if the order is compared, that is the second batch.
            if position.number == start.number + is_compared and not is_alone:
                count = min(COMPARED_SAMPLES, len(samples))  # evenly spaced
                yield replace(request, compared=tuple(samples[n * len(samples) // count] for n in range(count)))
            else:
                yield replace(request, content=fingerprint(samples) or 1) if is_compared else request
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else DataError
        # A new exception, because it is sent to a loader process and back, and not every exception can be pickled.
        yield LoadFailure(kind(f"{type(order).__name__}, as order of the samples: {error}"), error)


def make_request(samples: Sequence[int], position: Position, division: Division, *, ends_epoch: bool) -> LoadRequest:
    shards = tuple((number, samples[places.start : places.stop]) for number, places in division.of(len(samples)))
    return LoadRequest(position, ends_epoch, len(samples), division.shards, shards)


def batch_samples(order: Order, position: Position, size: int) -> list[int]:
    """Return the sample numbers of a batch. Raises ValueError if the order returns anything that the dataset lacks."""
    who = f"{type(order).__name__}.batch(epoch={position.epoch}, step={position.step})"
    given = order.batch(position.epoch, position.step)
    try:
        samples = list(map(operator.index, given.tolist() if hasattr(given, "tolist") else given))
    except TypeError as error:
        raise ValueError(f"{who} must be a list of sample numbers, not {given!r}") from error
    if not samples:
        raise ValueError(f"{who} has no samples; every batch has one at least")
    if min(samples) < 0 or max(samples) >= size:
        wrong = next(sample for sample in samples if not 0 <= sample < size)
        raise ValueError(f"{who} contains sample {wrong}; the dataset has samples 0 to {size - 1}")
    return samples


def choose_order(
    dataset: Any, global_batch_size: int, drop_last: bool, *, seed: int, order: Order | Sampler[Any] | None
) -> Order | None:
    """Return the sample order for this dataset; None for a stream, which has its own.

    Raises ValueError if `dataset` is not a dataset, or if `order` does not fit it.
    """
    kind = type(dataset).__name__
    refuse_loader(dataset)
    # torch gives every dataset, iterable ones too, a __getitem__ that fails.
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        _check_stream(dataset, order)
        return None
    if order is None:
        if len(dataset) < global_batch_size:
            raise ValueError(
                f"the dataset ({kind}) has {len(dataset)} samples, fewer than one global batch of {global_batch_size}; "
                "use a smaller global_batch_size"
            )
        order = Shuffled(len(dataset), global_batch_size, seed, drop_last)
    if isinstance(order, Sampler):
        order = SamplerOrder(order, global_batch_size, seed, drop_last)
    _check_order(order, dataset, global_batch_size, drop_last)
    return order


def refuse_loader(dataset: Any) -> None:
    """Raise ValueError for a DataLoader: it is iterable, and would be taken for a stream of whole batches."""
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "a DataLoader where a dataset belongs: give `loader.dataset`; Lockstep makes the batches, shuffles and "
            "deals them out (the options of a loader are called num_workers=, collate_fn= and drop_last= here, and its "
            "sampler order=)"
        )


def _check_order(order: Order, dataset: Any, global_batch_size: int, drop_last: bool) -> None:
    if not isinstance(order, Order):
        raise ValueError(
            f"order={order!r} is no torch Sampler, and has no steps(epoch) and batch(epoch, step); see "
            "lockstep.data.sample_order.Order"
        )
    kind, size = type(order).__name__, len(dataset)
    # These attributes of an order are optional.
    if (its_batch := getattr(order, "global_batch_size", global_batch_size)) != global_batch_size:
        raise ValueError(
            f"{kind} has batches of {its_batch}, but global_batch_size={global_batch_size}; make them equal"
        )
    if (its_size := getattr(order, "size", size)) > size:
        raise ValueError(f"{kind} is an order of {its_size} samples, but the dataset has {size}; make them equal")
    if drop_last and not getattr(order, "drop_last", False):
        raise ValueError(
            f"drop_last=True with {kind}, which makes the batches and keeps them all; give it to the order"
        )
    count_steps(order, 0)
    batch_samples(order, Position(), size)


def _check_stream(dataset: Any, order: Order | Sampler[Any] | None) -> None:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__iter__"):
        raise ValueError(
            f"a {kind} is no dataset: it needs __getitem__ and __len__ (map-style), or __iter__ (iterable)"
        )
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"a {kind} can be iterated over only once, and not be resumed; "
            "give an object whose __iter__ starts from the beginning each time"
        )
    if order is not None:
        raise ValueError(f"order={order!r} for a {kind}: an iterable dataset has the order it comes in; leave it out")


# ---- loader processes ------------------------------------------------------------------------------------------------

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
    is_gpu = how.device.type == "cuda"
    with torch.cuda.device(how.device) if is_gpu else nullcontext():  # memory is pinned for the device that is current
        batches: Any = iter(loader)
    if getattr(batches, "_worker_pids_set", False):
        remove_worker_pids(id(batches))
        batches._worker_pids_set = False  # otherwise it would remove them again when it ends
    return cast(Iterator[PackedBatch], batches)


def _explain(error: Exception, how: LoaderSettings, codes: Collection[int]) -> str:
    who = f"rank {how.rank}: loading with {how.num_workers} loader processes failed: {type(error).__name__}: {error}"
    status = f" (exit status {', '.join(map(str, sorted(codes)))})" if codes else ""
    if "timed out" in str(error):
        return f"{who}{status}; the dataset hangs or is very slow: raise timeout_s, or try num_workers=0 to see where"
    advice = "use a smaller num_workers= or prefetch_factor="
    return f"{who}{status}; if a process was killed, the machine may be short of memory: {advice}"


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
