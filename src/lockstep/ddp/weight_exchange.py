"""Sends the weights that each worker has updated to all others.

Pieces are collected in buckets, which are gathered, so that all workers send at the same time. Between workers of one
host large pieces are broadcast from where they are: a copy costs more; and so they are if one worker has most of them.
On GPUs that are connected by `shm`, all pieces are broadcast at once. If each worker is on a host of its own, what is
sent are the differences from the old weights, without loss (comm/delta_codec.py), if this turns out to be faster.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import _torch
from lockstep.comm import delta_codec
from lockstep.comm.abortable_wait import wait
from lockstep.comm.agreement import is_even
from lockstep.comm.register_backends import backend_name
from lockstep.ddp.optimizer_cells import Piece, flat_view

ALIGN_BYTES: Final = 16
DIRECT_BYTES: Final = 256 * 1024  # pieces of this size are broadcast, within a host
IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
TAG: Final = 4096  # no other messages of a group have it
HEADER_BYTES: Final = ALIGN_BYTES  # of a message
TRIALS: Final = 3  # exchanges that send weights, and differences, before the faster of both is chosen
TRIED_EVERY: Final = 1000  # exchanges: how large differences are depends on the learning rate
WHERE: Final = "the exchange of new weights"


class WeightExchange:
    """Exchanges the pieces of parameters between their owners. All workers make the same calls."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        pieces: Mapping[Tensor, list[Piece]],
        bucket_bytes: int,
        *,
        spans_hosts: bool,
        first_bytes: int | None = None,
        sends: bool = False,
        has_own: Callable[[Tensor, Piece], bool] = lambda _parameter, _piece: False,
    ) -> None:
        """
        pieces        of each parameter, with the worker that sends it
        bucket_bytes  how much is gathered at once
        first_bytes   the size of the first bucket; each is twice as large as the one before, up to `bucket_bytes`.
                      None: all have that size
        spans_hosts   whether the workers are on several hosts
        sends         whether pieces are sent to one worker after the other, or differences: see `copy_old_weights`.
                      It needs a backend with sends and a host for each worker; such waits cannot be aborted
        has_own       whether this worker has computed a piece itself, too, so that it is not overwritten: what an
                      exchange that is aborted writes is garbage
        """
        self._group = group
        self._pointers = {parameter: parameter.data_ptr() for parameter in pieces}
        self._ends: dict[Tensor, list[int]] = {}  # of the parameters, by owner: bytes up to the end of their pieces
        self._large: list[tuple[int, Tensor]] = []  # the owner, and the memory
        by_device: dict[torch.device, list[list[Tensor]]] = {}  # pieces of each worker that are gathered
        coalesced: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}  # the owner, and the memory
        scratch: dict[torch.device, Tensor] = {}  # in which pieces arrive that this worker has itself
        gathers = spans_hosts and (sends or _is_even(pieces, group.size()))
        sent_bytes = [0] * group.size()
        most_bytes = max(bucket_bytes, DIRECT_BYTES) // ALIGN_BYTES * ALIGN_BYTES
        for parameter, owned in pieces.items():
            if (flat := flat_view(parameter)) is not None:  # None: it has no elements
                by_rank = by_device.setdefault(parameter.device, [[] for _ in range(group.size())])
                is_coalesced = parameter.is_cuda and backend_name(group, parameter.device) == "shm"
                for piece in owned:
                    memory = flat[piece.start : piece.stop].view(torch.uint8)
                    for chunk in torch.split(memory, most_bytes):
                        if piece.owner != group.rank() and has_own(parameter, piece):
                            if len(scratch.get(chunk.device, ())) < len(chunk):
                                scratch[chunk.device] = torch.empty_like(chunk)
                            chunk = scratch[chunk.device][: len(chunk)]
                        if is_coalesced:
                            together = coalesced.setdefault((chunk.device, flat.dtype), [])
                            together.append((piece.owner, chunk.view(flat.dtype)))
                        elif len(memory) >= DIRECT_BYTES and not gathers:
                            self._large.append((piece.owner, chunk))
                        else:
                            by_rank[piece.owner].append(chunk.view(flat.dtype))
                            sent_bytes[piece.owner] += _padded_bytes(chunk)
                            self._ends.setdefault(parameter, [0] * group.size())[piece.owner] = sent_bytes[piece.owner]
        own_group: Any = group
        self._start_coalesced: list[tuple[torch.device, Callable[..., Any]]] = []
        for (device, _), chunks in coalesced.items():
            start = own_group.prepare_broadcasts([chunk for _, chunk in chunks], [owner for owner, _ in chunks])
            self._start_coalesced.append((device, start))
        self._buckets = [
            bucket
            for by_rank in by_device.values()
            for bucket in _make_buckets(by_rank, group.rank(), first_bytes or bucket_bytes, bucket_bytes, sends=sends)
        ]
        self._bucket_ends = list(itertools.accumulate(bucket.most_bytes for bucket in self._buckets))
        self._choice = DifferenceTrial() if sends and delta_codec.can_encode() else None
        self._has_old = False

    def copy_old_weights(self) -> None:
        """Copy the weights that this worker sends, so that the next exchange can send differences from them.

        Called right before the step that changes them, when all workers have the same weights. Nothing is copied if
        differences are not to be sent.
        """
        self._has_old = self._choice is not None and self._choice.wants_differences
        for bucket in self._buckets:
            if isinstance(bucket, _SentBucket):
                bucket.copy_old_weights() if self._has_old else bucket.drop_old_weights()

    def has_moved(self, parameters: Iterable[Tensor]) -> bool:
        """Whether these are other parameters, or have other memory, than when this object was made."""
        return self._pointers != {parameter: parameter.data_ptr() for parameter in parameters}

    @property
    def parameters(self) -> Iterable[Tensor]:
        return self._pointers.keys()

    def views(self) -> Iterator[Tensor]:
        """Yield all views of parameters that this object keeps."""
        yield from (memory for _, memory in self._large)
        for bucket in self._buckets:
            yield from bucket.views

    def buckets_until(self, parameter: Tensor) -> int:
        """Return how many buckets have arrived when a parameter is complete: the number that `run` counts."""
        if self._large or self._start_coalesced or len({parameter.device for parameter in self._pointers}) > 1:
            return len(self._buckets) + 1  # they are complete at the end
        needed = max(self._ends.get(parameter, [0]))
        return bisect.bisect_left(self._bucket_ends, needed) + 1 if needed else 0

    def run(self, on_arrival: Callable[[], None] = lambda: None, *, queues: bool = False) -> None:
        """Overwrite all pieces with those of their owners. While a bucket is sent, the one before it is copied out.

        on_arrival  called after each bucket, in the order of the parameters
        queues      on GPUs that are connected by `shm` only the current stream waits for what this sends and receives.
                    If a worker is lost meanwhile, PeerLostError is raised in this thread at any time after the call
        """
        began_s, has_old, self._has_old = time.perf_counter(), self._has_old, False
        coalesced = [(device, start(queues=queues)) for device, start in self._start_coalesced]
        works = deque[tuple[Tensor, Any]]()
        for owner, memory in self._large:  # a process group may need as much memory again for what is on its way
            works.append((memory, self._group.broadcast([memory], _from(owner))))
            if sum(sent.nbytes for sent, _ in works) > IN_FLIGHT_BYTES:
                self._finish(*works.popleft())
        last: tuple[_Bucket | _SentBucket, list[Any]] | None = None
        for bucket in self._buckets:
            work = bucket.start(self._group, as_differences=has_old)
            if last is not None:
                last[0].finish(self._group, last[1])
                on_arrival()
            last = bucket, work
        if last is not None:
            last[0].finish(self._group, last[1])
            on_arrival()
        for memory, work in works:
            self._finish(memory, work)
        for device, work in coalesced:
            wait(self._group, work, device, WHERE)
        if self._choice is not None:
            self._choice.note(time.perf_counter() - began_s, as_differences=has_old)

    def _finish(self, memory: Tensor, work: Any) -> None:
        wait(self._group, work, memory.device, WHERE)


def _is_even(pieces: Mapping[Tensor, list[Piece]], size: int) -> bool:
    """Whether the owners have about as much each."""
    sent_bytes = [0] * size
    for parameter, owned in pieces.items():
        for piece in owned:
            sent_bytes[piece.owner] += piece.numel * parameter.element_size()
    return is_even(sent_bytes)


def _from(owner: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = owner, 0
    return options


@final
class DifferenceTrial:
    """Whether an exchange takes less time if differences are sent: both are tried, now and then. Each worker chooses
    alone."""

    def __init__(self) -> None:
        self._times_s: dict[bool, list[float]] = {False: [], True: []}  # of exchanges without and with differences
        self._count = 0  # exchanges since the trial began

    @property
    def wants_differences(self) -> bool:
        without, with_them = self._times_s[False], self._times_s[True]
        if min(len(without), len(with_them)) < TRIALS:
            return len(with_them) < len(without)
        return statistics.median(with_them) < statistics.median(without)

    def note(self, took_s: float, *, as_differences: bool) -> None:
        self._count += 1
        if self._count > TRIED_EVERY:
            self._times_s, self._count = {False: [], True: []}, 0
        times_s = self._times_s[as_differences]
        if len(times_s) < TRIALS:
            times_s.append(took_s)


class _Bucket:
    """New weights that are gathered at once: views of parameters, by the rank that sends them.

    most_bytes  of each worker in a bucket
    memory      A buffer of bytes for what is sent and received. Two buckets in flight use different buffers.
    """

    def __init__(self, by_rank: list[list[Tensor]], rank: int, most_bytes: int, memory: Tensor) -> None:
        self.most_bytes = most_bytes
        self.views = [view for one in by_rank for view in one]
        others = [other for other in range(len(by_rank)) if other != rank]
        width = max(sum(map(_padded_bytes, views)) for views in by_rank)
        self._sent, self._received = memory[:width], memory[width : (1 + len(by_rank)) * width]
        rows = self._received.view(len(by_rank), width)
        self._own, self._own_copies = by_rank[rank], _slices(by_rank[rank], self._sent)
        self._targets = [view for other in others for view in by_rank[other]]
        self._sources = [piece for other in others for piece in _slices(by_rank[other], rows[other])]

    @staticmethod
    def memory_bytes(by_rank: list[list[Tensor]]) -> int:
        return (1 + len(by_rank)) * max(sum(map(_padded_bytes, views)) for views in by_rank)

    def start(self, group: dist.ProcessGroup, *, as_differences: bool) -> list[Any]:
        if self._own:
            _torch.foreach_copy_(self._own_copies, self._own)
        return [group._allgather_base(self._received, self._sent)]

    def finish(self, group: dist.ProcessGroup, works: list[Any]) -> None:
        for work in works:
            wait(group, work, self._sent.device, WHERE)
        if self._targets:
            _torch.foreach_copy_(self._targets, self._sources)


class _SentBucket:
    """New weights that each worker sends to one other worker after the other, in a message that says whether it has
    differences.

    Messages are shorter than the memory into which they are received; Gloo allows that.
    """

    def __init__(self, by_rank: list[list[Tensor]], rank: int, most_bytes: int, memory: Tensor) -> None:
        self.most_bytes, self._rank, self._by_rank = most_bytes, rank, by_rank
        self.views = [view for one in by_rank for view in one]
        sizes = [_message_bytes(views) for views in by_rank]
        self._messages = torch.split(memory[: sum(sizes)], sizes)
        self._old: list[Tensor] = []

    @staticmethod
    def memory_bytes(by_rank: list[list[Tensor]]) -> int:
        return sum(map(_message_bytes, by_rank))

    def drop_old_weights(self) -> None:
        self._old = []

    def copy_old_weights(self) -> None:
        own = self._by_rank[self._rank]
        self._old = self._old or [torch.empty_like(view) for view in own]
        if own:
            _torch.foreach_copy_(self._old, own)

    def start(self, group: dist.ProcessGroup, *, as_differences: bool) -> list[Any]:
        size = len(self._by_rank)
        others = [(self._rank + n) % size for n in range(1, size)]
        works = [group.recv([self._messages[other]], other, TAG) for other in others if self._by_rank[other]]
        if self._by_rank[self._rank]:
            message = self._messages[self._rank][: self._write(as_differences)]
            works += [group.send([message], other, TAG) for other in others]
        return works

    def _write(self, as_differences: bool) -> int:
        """Write this worker's message; return its length."""
        message, at = self._messages[self._rank], HEADER_BYTES
        message[0] = int(as_differences)
        for number, view in enumerate(self._by_rank[self._rank]):
            if as_differences and delta_codec.can_be_encoded(view):
                at += delta_codec.encode(self._old[number], view, message[at:])
            else:
                message[at : at + view.nbytes].copy_(view.view(torch.uint8))
                at += _even(view.nbytes)
        return at

    def finish(self, group: dist.ProcessGroup, works: list[Any]) -> None:
        for work in works:
            work.wait()  # no time limit: if one expires, Gloo closes all connections
        for rank, views in enumerate(self._by_rank):
            if rank != self._rank and views:
                self._read(self._messages[rank], views)

    def _read(self, message: Tensor, views: list[Tensor]) -> None:
        has_differences, at = bool(message[0]), HEADER_BYTES
        for view in views:
            if has_differences and delta_codec.can_be_encoded(view):
                at += delta_codec.decode(message[at:], view)
            else:
                view.view(torch.uint8).copy_(message[at : at + view.nbytes])
                at += _even(view.nbytes)


def _even(count: int) -> int:
    return count + count % 2


def _message_bytes(views: list[Tensor]) -> int:
    """Return how long the message with these views is at most, a multiple of ALIGN_BYTES."""
    most = sum(max(_even(view.nbytes), delta_codec.most_bytes(view.numel())) for view in views)
    return -(-(HEADER_BYTES + most) // ALIGN_BYTES) * ALIGN_BYTES


def _padded_bytes(view: Tensor) -> int:
    """Return the size of a view in a buffer, in which every view begins at a multiple of its element size."""
    return -(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _slices(views: list[Tensor], memory: Tensor) -> list[Tensor]:
    """Return consecutive slices of `memory`, one for each view, with its size and dtype."""
    found, start = list[Tensor](), 0
    for view in views:
        found.append(memory[start : start + view.nbytes].view(view.dtype))
        start += _padded_bytes(view)
    return found


def _make_buckets(
    by_rank: list[list[Tensor]], rank: int, first_bytes: int, bucket_bytes: int, *, sends: bool
) -> Iterator[_Bucket | _SentBucket]:
    """Yield buckets in which each worker sends as much as any other, as far as it has it."""
    if not any(by_rank):
        return
    kind = _SentBucket if sends else _Bucket
    most = max(sum(map(_padded_bytes, one)) for one in by_rank)
    widths, total_bytes = list[int](), min(first_bytes, bucket_bytes)
    while sum(widths) < most:
        widths.append(max(ALIGN_BYTES, min(total_bytes // len(by_rank) // ALIGN_BYTES * ALIGN_BYTES, most)))
        total_bytes = min(2 * total_bytes, bucket_bytes)
    queues = [_in_chunks(one, widths) for one in by_rank]
    chunks = [[list(one) for one in of_ranks] for of_ranks in itertools.zip_longest(*queues, fillvalue=[])]
    device = next(view.device for one in by_rank for view in one)
    size = max(map(kind.memory_bytes, chunks))
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(chunks)))]
    for n, (of_ranks, width) in enumerate(zip(chunks, widths, strict=True)):
        yield kind(of_ranks, rank, width, buffers[n % len(buffers)])


def _in_chunks(views: list[Tensor], widths: Iterable[int]) -> Iterator[list[Tensor]]:
    """Yield lists of views with so many bytes each, cutting views where needed; the last list may have fewer."""
    left = iter(widths)
    chunk, room = list[Tensor](), next(left)
    for view in views:
        while view.numel():
            count = room // view.element_size()
            chunk.append(view[:count])
            view, room = view[count:], room - _padded_bytes(chunk[-1])
            if room == 0:
                yield chunk
                chunk, room = [], next(left, 0)
    if chunk:
        yield chunk
