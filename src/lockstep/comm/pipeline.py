"""Collectives over several hosts: legs inside the hosts, legs between them, and chunks that follow each other closely.

Note [Columns]
The i-th workers of all hosts are column i. An all-reduce has three legs: inside each host every worker gets the sum of
one slice; in column i the sums of slice i are reduced over the hosts; inside each host everybody gets all slices. So of
a message, 2(H-1)/H leave each of H hosts, however many workers it has. Around a ring of N workers, 2(N-1)/N would.

Note [Turns]
The way of one chunk is a generator. At every `yield` its bytes are on the network, and the other chunks have their
turn; the youngest first, so that something new is under way before we wait for something old. Who does what when
depends on the number of chunks alone, so all workers call the collectives of a part in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lockstep.comm.host_groups import Kind, Native, Part, Scratch, goes_round, nothing
from lockstep.comm.host_layout import Layout, chunk_bytes, cut
from lockstep.comm.shm.reduce_ops import Reduction

# If the workers of a host together send no more than this, a hop more costs more time than the bytes that it saves
# (measured at 1 Gbit/s).
SMALL_BYTES = 128 << 10
_NARROW = (torch.bfloat16, torch.float16)


class Columns:
    """Called by one thread at a time. Tensors are flat and contiguous."""

    def __init__(self, layout: Layout, *, local: Part, across: Part, flat: Part, exact: bool) -> None:
        self.layout, self.local, self.across, self.flat = layout, local, across, flat
        self.exact = exact
        self._scratch = Scratch()

    @property
    def _hosts(self) -> int:
        return len(self.layout.hosts)

    def _is_small(self, tensor: Tensor) -> bool:
        return tensor.nbytes * self.layout.carriers <= SMALL_BYTES

    # ---- all-reduce --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, how: Reduction) -> None:
        how.prepare(tensor)
        in_one_go = self._hosts == 1 and isinstance(self.local, Native)
        if in_one_go or self._is_small(tensor):
            self._all_reduce_small(tensor, how)
            return
        pieces = self._hosts * self.layout.carriers
        step = _round_up(-(-chunk_bytes(tensor.nbytes, pieces) // tensor.itemsize), pieces)
        take_turns(self._all_reduce_chunk(tensor[span], how) for span in cut(tensor.numel(), step))

    def _all_reduce_small(self, tensor: Tensor, how: Reduction) -> None:
        """The fewest hops: the sum of our host, then all of it in every column."""
        kind, layout = _kind_of(how), self.layout
        whole = self._borrow(tensor, tensor.numel())
        self.local.all_reduce_small(whole, kind)()
        if layout.carries:
            self.across.all_reduce_small(whole, kind)()
        if len(layout.neighbours) > layout.carriers:
            self.local.broadcast(whole, 0)()
        _average(whole, how)
        self._give_back(whole, tensor)

    def _all_reduce_chunk(self, chunk: Tensor, how: Reduction) -> Iterator[None]:
        kind, layout = _kind_of(how), self.layout
        whole = self._borrow(chunk, _round_up(chunk.numel(), self._hosts * layout.carriers))
        slices = whole.view(layout.carriers, -1)
        self._sum_up(slices, kind)
        yield from self._reduce_between_hosts(slices, how)
        self._hand_out(slices)
        self._give_back(whole, chunk)

    def _reduce_between_hosts(self, slices: Tensor, how: Reduction) -> Iterator[None]:
        """Slice i of carrier i becomes the sum of all hosts."""
        kind, layout, finish = _kind_of(how), self.layout, nothing
        mine = slices[layout.local_rank].view(self._hosts, -1) if layout.carries else None
        if not self.exact and goes_round(slices.dtype, kind):
            if mine is not None:
                finish = self.across.all_reduce(mine, kind)
            yield
            yield  # twice: the network has another chunk in hand while we wait for this one
            finish()
            if mine is not None:
                _average(mine, how)
            return
        if mine is not None:
            finish = self.across.reduce_scatter(mine, kind)
        yield
        yield
        finish()
        if mine is not None:
            _average(mine[layout.host], how)
            finish = self.across.all_gather(mine)
        yield
        yield
        finish()

    # ---- broadcast ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """One copy goes to each host."""
        carriers = self.layout.carriers
        if self._hosts == 1 or self._is_small(tensor):
            self._broadcast_small(tensor, root)
            return
        step = _round_up(-(-chunk_bytes(tensor.nbytes, carriers) // tensor.itemsize), carriers)
        take_turns(self._broadcast_chunk(tensor[span], root) for span in cut(tensor.numel(), step))

    def _broadcast_small(self, tensor: Tensor, root: int) -> None:
        layout, source = self.layout, self.layout.host_of(root)
        if layout.host == source:
            self.local.broadcast(tensor, layout.neighbours.index(root))()
        if layout.carries:
            self.across.broadcast(tensor, source)()
        if layout.host != source and len(layout.neighbours) > layout.carriers:
            self.local.broadcast(tensor, 0)()

    def _broadcast_chunk(self, chunk: Tensor, root: int) -> Iterator[None]:
        layout, source = self.layout, self.layout.host_of(root)
        if layout.host == source:
            self.local.broadcast(chunk, layout.neighbours.index(root))()
        whole = self._borrow(chunk, _round_up(chunk.numel(), layout.carriers), widen=False)
        slices = whole.view(layout.carriers, -1)
        finish = self.across.broadcast(slices[layout.local_rank], source) if layout.carries else nothing
        yield
        yield
        finish()
        if layout.host != source:
            self._hand_out(slices)
        self._give_back(whole, chunk)

    # ---- all-gather and reduce-scatter -------------------------------------------------------------------------------

    def all_gather(self, whole: Tensor, mine: Tensor) -> None:
        rows = whole.view(self.layout.size, -1)
        if not self.layout.even:
            rows[self.layout.rank].copy_(mine)
            self.flat.all_gather(rows)()
            return
        step = -(-chunk_bytes(whole.nbytes, self.layout.size) // (whole.itemsize * self.layout.size))
        take_turns(self._all_gather_chunk(rows[:, span], mine[span]) for span in cut(mine.numel(), step))

    def _all_gather_chunk(self, rows: Tensor, mine: Tensor) -> Iterator[None]:
        layout = self.layout
        buffer = self._scratch.take(rows.numel(), mine).view(layout.carriers, self._hosts, -1)
        column = buffer[layout.local_rank]
        column[layout.host].copy_(mine)
        finish = self.across.all_gather(column)
        yield
        yield
        finish()
        self.local.all_gather(buffer.flatten(1))()
        for host, ranks in enumerate(layout.hosts):
            for local_rank, rank in enumerate(ranks):
                rows[rank].copy_(buffer[local_rank, host])
        self._scratch.give(buffer)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, how: Reduction) -> None:
        if not self.layout.even:
            copy = whole.clone()
            self.all_reduce(copy, how)
            mine.copy_(copy.view(self.layout.size, -1)[self.layout.rank])
            return
        rows = whole.view(self.layout.size, -1)
        step = -(-chunk_bytes(whole.nbytes, self.layout.size) // (whole.itemsize * self.layout.size))
        take_turns(self._reduce_scatter_chunk(mine[span], rows[:, span], how) for span in cut(mine.numel(), step))

    def _reduce_scatter_chunk(self, mine: Tensor, rows: Tensor, how: Reduction) -> Iterator[None]:
        kind, layout = _kind_of(how), self.layout
        like = self._wide(mine)
        buffer = self._scratch.take(rows.numel(), like).view(layout.carriers, self._hosts, -1)
        for host, ranks in enumerate(layout.hosts):
            for local_rank, rank in enumerate(ranks):
                buffer[local_rank, host].copy_(rows[rank])
        how.prepare(buffer)
        self.local.reduce_scatter(buffer.flatten(1), kind)()
        column = buffer[layout.local_rank]
        finish = self.across.reduce_scatter(column, kind)
        yield
        yield
        finish()
        _average(column[layout.host], how)
        mine.copy_(column[layout.host])
        self._scratch.give(buffer)

    # ---- legs inside the host ----------------------------------------------------------------------------------------

    def _sum_up(self, slices: Tensor, kind: Kind) -> None:
        """Slice i of carrier i becomes the sum of our host."""
        if len(slices) == self.local.size:
            self.local.reduce_scatter(slices, kind)()
        else:
            for root, each in enumerate(slices):
                self.local.reduce(each, kind, root)()

    def _hand_out(self, slices: Tensor) -> None:
        """Everybody gets what carrier i has in slice i."""
        if len(slices) == self.local.size:
            self.local.all_gather(slices)()
        else:
            for root, each in enumerate(slices):
                self.local.broadcast(each, root)()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _wide(self, tensor: Tensor) -> Tensor:
        """An empty tensor of the dtype in which to reduce."""
        return tensor.new_empty(0, dtype=torch.float32 if self.exact and tensor.dtype in _NARROW else tensor.dtype)

    def _borrow(self, tensor: Tensor, numel: int, *, widen: bool = True) -> Tensor:
        """The tensor itself if it will do, else a longer or wider copy."""
        like = self._wide(tensor) if widen else tensor
        if numel == tensor.numel() and like.dtype == tensor.dtype:
            return tensor
        copy = self._scratch.take(numel, like)
        copy[: tensor.numel()].copy_(tensor)
        copy[tensor.numel() :].zero_()
        return copy

    def _give_back(self, copy: Tensor, tensor: Tensor) -> None:
        if copy is not tensor:
            tensor.copy_(copy[: tensor.numel()])
            self._scratch.give(copy)


class Staged:
    """The same for GPU tensors through host memory, where there is nothing better."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def all_reduce(self, tensor: Tensor, how: Reduction) -> None:
        host = tensor.cpu()
        self._columns.all_reduce(host, how)
        tensor.copy_(host)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        host = tensor.cpu()
        self._columns.broadcast(host, root)
        tensor.copy_(host)

    def all_gather(self, whole: Tensor, mine: Tensor) -> None:
        host = torch.empty(whole.numel(), dtype=whole.dtype)
        self._columns.all_gather(host, mine.cpu())
        whole.copy_(host)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, how: Reduction) -> None:
        host = torch.empty(mine.numel(), dtype=mine.dtype)
        self._columns.reduce_scatter(host, whole.cpu(), how)
        mine.copy_(host)


def take_turns(ways: Iterable[Iterator[None]]) -> None:
    """Note [Turns]. One more way is begun in each round."""
    to_come, under_way = iter(ways), list[Iterator[None]]()
    while True:
        begun = next(to_come, None)
        if begun is not None:
            under_way.insert(0, begun)
        elif not under_way:
            return
        under_way = [way for way in under_way if _goes_on(way)]


def _goes_on(way: Iterator[None]) -> bool:
    try:
        next(way)
        return True
    except StopIteration:
        return False


def _kind_of(how: Reduction) -> Kind:
    """What is done to pairs of operands; factors come before, averages after."""
    return Kind.SUM if how.kind in (Kind.AVG, Kind.PREMUL_SUM) else how.kind


def _average(total: Tensor, how: Reduction) -> None:
    if how.kind == Kind.AVG:
        whole_numbers = not (total.dtype.is_floating_point or total.dtype.is_complex)
        total.div_(how.size, rounding_mode="trunc" if whole_numbers else None)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
