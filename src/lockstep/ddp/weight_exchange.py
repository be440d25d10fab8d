"""Sends the weights that each worker has updated to all others.

Pieces are collected in buckets, which are gathered, so that all workers send at the same time. If each worker is on a
host of its own, large pieces are sent from where they are. Between workers of one host they are broadcast from there:
a copy costs more; and so they are if one worker has most of them. On GPUs that are connected by `shm`, all pieces are
broadcast at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import _torch
from lockstep.comm.abortable_wait import wait
from lockstep.comm.register_backends import backend_name
from lockstep.ddp.optimizer_cells import Piece, flat_view

ALIGN_BYTES: Final = 16
DIRECT_BYTES: Final = 256 * 1024  # pieces of this size are broadcast, within a host
SENT_BYTES: Final = 64 * 1024  # pieces of this size are sent from where they are, from host to host
MAX_PADDING: Final = (
    1.5  # bytes that are gathered over those that are needed: broadcasts take twice as long between hosts
)
IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
TAG: Final = 4096  # no other messages of a group have it
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
        sends: bool = False,
        has_own: Callable[[Tensor, Piece], bool] = lambda _parameter, _piece: False,
    ) -> None:
        """
        pieces        of each parameter, with the worker that sends it
        bucket_bytes  how much is gathered at once
        spans_hosts   whether the workers are on several hosts
        sends         whether pieces are sent to one worker after the other, which needs a backend with sends and a host
                      for each worker; such waits cannot be aborted
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
        self._start_coalesced: list[tuple[torch.device, Callable[[], Any]]] = []
        for (device, _), chunks in coalesced.items():
            start = own_group.prepare_broadcasts([chunk for _, chunk in chunks], [owner for owner, _ in chunks])
            self._start_coalesced.append((device, start))
        self._buckets = [
            bucket
            for by_rank in by_device.values()
            for bucket in _make_buckets(by_rank, group.rank(), bucket_bytes, sends=sends)
        ]

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
        return -(-max(self._ends.get(parameter, [0])) // self._buckets[0].most_bytes) if self._buckets else 0

    def run(self, on_arrival: Callable[[], None] = lambda: None) -> None:
        """Overwrite all pieces with those of their owners. While a bucket is sent, the one before it is copied out.

        on_arrival  called after each bucket, in the order of the parameters
        """
        coalesced = [(device, start()) for device, start in self._start_coalesced]
        works = deque[tuple[Tensor, Any]]()
        for owner, memory in self._large:  # a process group may need as much memory again for what is on its way
            works.append((memory, self._group.broadcast([memory], _from(owner))))
            if sum(sent.nbytes for sent, _ in works) > IN_FLIGHT_BYTES:
                self._finish(*works.popleft())
        last: tuple[_Bucket, list[Any]] | None = None
        for bucket in self._buckets:
            work = bucket.start(self._group)
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

    def _finish(self, memory: Tensor, work: Any) -> None:
        wait(self._group, work, memory.device, WHERE)


def _is_even(pieces: Mapping[Tensor, list[Piece]], size: int) -> bool:
    """Return whether the owners have about as much each. A gather sends as much from each as the largest one has."""
    sent_bytes = [0] * size
    for parameter, owned in pieces.items():
        for piece in owned:
            sent_bytes[piece.owner] += piece.numel * parameter.element_size()
    return size * max(sent_bytes) <= MAX_PADDING * sum(sent_bytes)


def _from(owner: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = owner, 0
    return options


class _Bucket:
    """New weights that are exchanged at once: views of parameters, by the rank that sends them.

    most_bytes  of each worker in a bucket
    memory      A buffer of bytes for what is sent and received. Two buckets in flight use different buffers.
    sends       whether large views are sent from where they are
    """

    def __init__(self, by_rank: list[list[Tensor]], rank: int, most_bytes: int, memory: Tensor, *, sends: bool) -> None:
        self.most_bytes, self._sends, self._rank = most_bytes, sends, rank
        self.views = [view for one in by_rank for view in one]
        others = [other for other in range(len(by_rank)) if other != rank]
        self._large = [[view for view in one if sends and view.nbytes >= SENT_BYTES] for one in by_rank]
        packed = [[view for view in one if not sends or view.nbytes < SENT_BYTES] for one in by_rank]
        self._packed_bytes = [sum(map(_padded_bytes, views)) for views in packed]
        width = max(self._packed_bytes)
        self._sent, self._received = memory[:width], memory[width : (1 + len(by_rank)) * width]
        self._rows = self._received.view(len(by_rank), width)
        self._own, self._own_copies = packed[rank], _slices(packed[rank], self._sent)
        self._targets = [view for other in others for view in packed[other]]
        self._sources = [piece for other in others for piece in _slices(packed[other], self._rows[other])]

    def start(self, group: dist.ProcessGroup) -> list[Any]:
        if self._own:
            _torch.foreach_copy_(self._own_copies, self._own)
        if not self._sends:
            return [group._allgather_base(self._received, self._sent)]
        others = [(self._rank + n) % len(self._large) for n in range(1, len(self._large))]
        arriving = [(one, other) for other in others for one in self._messages(other, self._rows[other])]
        leaving = [(one, other) for one in self._messages(self._rank, self._sent) for other in others]
        works = [group.recv([one], other, TAG) for one, other in arriving]
        return works + [group.send([one], other, TAG) for one, other in leaving]

    def _messages(self, rank: int, packed: Tensor) -> list[Tensor]:
        """Return what a worker sends to each other one: large views, and the memory of the others."""
        size = self._packed_bytes[rank]
        return [packed[:size], *self._large[rank]] if size else self._large[rank]

    def finish(self, group: dist.ProcessGroup, works: list[Any]) -> None:
        for work in works:
            if self._sends:
                work.wait()  # no time limit: if one expires, Gloo closes all connections
            else:
                wait(group, work, self._sent.device, WHERE)
        if self._targets:
            _torch.foreach_copy_(self._targets, self._sources)


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


def _make_buckets(by_rank: list[list[Tensor]], rank: int, bucket_bytes: int, *, sends: bool) -> Iterator[_Bucket]:
    """Yield buckets in which each worker sends as much as any other, as far as it has it."""
    views = [view for one in by_rank for view in one]
    if not views:
        return
    most = max(sum(map(_padded_bytes, one)) for one in by_rank)
    width = max(ALIGN_BYTES, min(bucket_bytes // len(by_rank) // ALIGN_BYTES * ALIGN_BYTES, most))
    buffers = [torch.zeros((1 + len(by_rank)) * width, dtype=torch.uint8, device=views[0].device)]
    if most > width:
        buffers.append(torch.zeros_like(buffers[0]))
    queues = [_in_chunks(one, width) for one in by_rank]
    for n, chunks in enumerate(itertools.zip_longest(*queues, fillvalue=[])):
        yield _Bucket([list(one) for one in chunks], rank, width, buffers[n % len(buffers)], sends=sends)


def _in_chunks(views: list[Tensor], width: int) -> Iterator[list[Tensor]]:
    """Yield lists of views with `width` bytes in all, cutting views where needed; the last list may have fewer."""
    chunk, room = list[Tensor](), width
    for view in views:
        while view.numel():
            count = room // view.element_size()
            chunk.append(view[:count])
            view, room = view[count:], room - _padded_bytes(chunk[-1])
            if room == 0:
                yield chunk
                chunk, room = [], width
    if chunk:
        yield chunk
