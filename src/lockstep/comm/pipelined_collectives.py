"""Collectives over several hosts: phases inside the hosts, phases between them, pipelined over chunks.

Note [Columns]
The i-th workers of all hosts are column i. An all-reduce has three phases: inside each host every worker gets the sum
of one slice; in column i the sums of slice i are reduced over the hosts; inside each host every worker gets all slices.
So each of H hosts sends 2(H-1)/H of a message, however many workers it has. In a ring of N workers it would send
2(N-1)/N.

Note [Interleaving]
The processing of one chunk is a generator. At every `yield` its bytes are on the network, and the other chunks are
advanced, the newest first, so that new data is sent before this worker waits for old data. The order depends on the
number of chunks alone, so all workers call the collectives of a subgroup in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lockstep.comm import host_groups
from lockstep.comm.host_groups import HostLayout, NativeSubgroup, OpType, Subgroup, chunk_bytes, no_op, split_range
from lockstep.comm.scratch_buffers import ScratchBuffers
from lockstep.comm.shm.reduce_ops import Reduction

# If the workers of a host together send no more than this, an additional hop takes longer than the bytes that it saves
# (measured at 1 Gbit/s).
SMALL_BYTES = 128 << 10
_HALF_DTYPES = (torch.bfloat16, torch.float16)


class PipelinedCollectives:
    """See the notes above. Not thread-safe. Tensors are flat and contiguous, and collectives are in place.

    local   the subgroup of this host
    across  the subgroup of this worker's column
    flat    all workers
    exact   add in the order of the tree over hosts too, and reduce half-precision floats in float32
    """

    def __init__(self, layout: HostLayout, *, local: Subgroup, across: Subgroup, flat: Subgroup, exact: bool) -> None:
        self.layout, self.local, self.across, self.flat = layout, local, across, flat
        self.exact, self._hosts = exact, len(layout.hosts)
        self._scratch = ScratchBuffers()

    def _is_small(self, tensor: Tensor) -> bool:
        return tensor.nbytes * self.layout.num_columns <= SMALL_BYTES

    # ---- all-reduce --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        reduction.prepare(tensor)
        is_local = self._hosts == 1 and isinstance(self.local, NativeSubgroup)
        if is_local or self._is_small(tensor):
            self._all_reduce_small(tensor, reduction)
            return
        step = _chunk_numel(tensor, self._hosts * self.layout.num_columns)
        run_interleaved(self._all_reduce_chunk(tensor[span], reduction) for span in split_range(tensor.numel(), step))

    def _all_reduce_small(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce with the fewest hops: inside the host, then the whole tensor in every column."""
        op, layout = _op_type(reduction), self.layout
        whole = self._working_copy(tensor, tensor.numel())
        self.local.all_reduce_small(whole, op)()
        if layout.has_column:
            self.across.all_reduce_small(whole, op)()
        if len(layout.local_ranks) > layout.num_columns:
            self.local.broadcast(whole, 0)()
        _average(whole, reduction)
        self._store_result(whole, tensor)

    def _all_reduce_chunk(self, chunk: Tensor, reduction: Reduction) -> Iterator[None]:
        op, layout = _op_type(reduction), self.layout
        whole = self._working_copy(chunk, _round_up(chunk.numel(), self._hosts * layout.num_columns))
        slices = whole.view(layout.num_columns, -1)
        self._reduce_within_host(slices, op)
        yield from self._reduce_between_hosts(slices, reduction)
        self._gather_within_host(slices)
        self._store_result(whole, chunk)

    def _reduce_between_hosts(self, slices: Tensor, reduction: Reduction) -> Iterator[None]:
        """Reduce slice i of each host's i-th worker over all hosts."""
        op, layout, finish = _op_type(reduction), self.layout, no_op
        mine = slices[layout.local_rank].view(self._hosts, -1) if layout.has_column else None
        if not self.exact and host_groups.ring_can_reduce(slices.dtype, op):
            if mine is not None:
                finish = self.across.all_reduce(mine, op)
            yield
            yield  # twice, so that the network has another chunk to send while this worker waits for this one
            finish()
            if mine is not None:
                _average(mine, reduction)
            return
        if mine is not None:
            finish = self.across.reduce_scatter(mine, op)
        yield
        yield
        finish()
        if mine is not None:
            _average(mine[layout.host], reduction)
            finish = self.across.all_gather(mine)
        yield
        yield
        finish()

    # ---- broadcast ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Send one copy to each host."""
        if self._hosts == 1 or self._is_small(tensor):
            self._broadcast_small(tensor, root)
            return
        step = _chunk_numel(tensor, self.layout.num_columns)
        run_interleaved(self._broadcast_chunk(tensor[span], root) for span in split_range(tensor.numel(), step))

    def _broadcast_small(self, tensor: Tensor, root: int) -> None:
        layout, source = self.layout, self.layout.host_of(root)
        if layout.host == source:
            self.local.broadcast(tensor, layout.local_ranks.index(root))()
        if layout.has_column:
            self.across.broadcast(tensor, source)()
        if layout.host != source and len(layout.local_ranks) > layout.num_columns:
            self.local.broadcast(tensor, 0)()

    def _broadcast_chunk(self, chunk: Tensor, root: int) -> Iterator[None]:
        layout, source = self.layout, self.layout.host_of(root)
        if layout.host == source:
            self.local.broadcast(chunk, layout.local_ranks.index(root))()
        whole = self._working_copy(chunk, _round_up(chunk.numel(), layout.num_columns), widen=False)
        slices = whole.view(layout.num_columns, -1)
        finish = self.across.broadcast(slices[layout.local_rank], source) if layout.has_column else no_op
        yield
        yield
        finish()
        if layout.host != source:
            self._gather_within_host(slices)
        self._store_result(whole, chunk)

    # ---- all-gather and reduce-scatter -------------------------------------------------------------------------------

    def all_gather(self, whole: Tensor, mine: Tensor) -> None:
        rows = whole.view(self.layout.size, -1)
        if not self.layout.is_even:
            rows[self.layout.rank].copy_(mine)
            self.flat.all_gather(rows)()
            return
        step = _chunk_numel(whole, self.layout.size) // self.layout.size
        run_interleaved(self._all_gather_chunk(rows[:, span], mine[span]) for span in split_range(mine.numel(), step))

    def _all_gather_chunk(self, rows: Tensor, mine: Tensor) -> Iterator[None]:
        layout = self.layout
        buffer = self._scratch.acquire(rows.numel(), mine).view(layout.num_columns, self._hosts, -1)
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
        self._scratch.release(buffer)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, reduction: Reduction) -> None:
        if not self.layout.is_even:
            copy = whole.clone()
            self.all_reduce(copy, reduction)
            mine.copy_(copy.view(self.layout.size, -1)[self.layout.rank])
            return
        rows = whole.view(self.layout.size, -1)
        step = _chunk_numel(whole, self.layout.size) // self.layout.size
        run_interleaved(
            self._reduce_scatter_chunk(mine[span], rows[:, span], reduction) for span in split_range(mine.numel(), step)
        )

    def _reduce_scatter_chunk(self, mine: Tensor, rows: Tensor, reduction: Reduction) -> Iterator[None]:
        op, layout = _op_type(reduction), self.layout
        like = self._like_for_reduction(mine)
        buffer = self._scratch.acquire(rows.numel(), like).view(layout.num_columns, self._hosts, -1)
        for host, ranks in enumerate(layout.hosts):
            for local_rank, rank in enumerate(ranks):
                buffer[local_rank, host].copy_(rows[rank])
        reduction.prepare(buffer)
        self.local.reduce_scatter(buffer.flatten(1), op)()
        column = buffer[layout.local_rank]
        finish = self.across.reduce_scatter(column, op)
        yield
        yield
        finish()
        _average(column[layout.host], reduction)
        mine.copy_(column[layout.host])
        self._scratch.release(buffer)

    # ---- phases inside the host --------------------------------------------------------------------------------------

    def _reduce_within_host(self, slices: Tensor, op: OpType) -> None:
        """Reduce slice i over the workers of this host, into the tensor of its i-th worker."""
        if len(slices) == self.local.size:
            self.local.reduce_scatter(slices, op)()
        else:
            for root, each in enumerate(slices):
                self.local.reduce(each, op, root)()

    def _gather_within_host(self, slices: Tensor) -> None:
        """Copy slice i of the i-th worker of this host to all its workers."""
        if len(slices) == self.local.size:
            self.local.all_gather(slices)()
        else:
            for root, each in enumerate(slices):
                self.local.broadcast(each, root)()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _like_for_reduction(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor of the dtype in which to reduce."""
        return tensor.new_empty(0, dtype=torch.float32 if self.exact and tensor.dtype in _HALF_DTYPES else tensor.dtype)

    def _working_copy(self, tensor: Tensor, numel: int, *, widen: bool = True) -> Tensor:
        """Return the tensor itself if it has the right size and dtype, else a padded or wider copy."""
        like = self._like_for_reduction(tensor) if widen else tensor
        if numel == tensor.numel() and like.dtype == tensor.dtype:
            return tensor
        copy = self._scratch.acquire(numel, like)
        copy[: tensor.numel()].copy_(tensor)
        copy[tensor.numel() :].zero_()
        return copy

    def _store_result(self, copy: Tensor, tensor: Tensor) -> None:
        """Copy the result back if `copy` is not the tensor itself, and release the buffer."""
        if copy is not tensor:
            tensor.copy_(copy[: tensor.numel()])
            self._scratch.release(copy)


class StagedCollectives:
    """Collectives on GPU tensors, staged through host memory where NCCL cannot be used."""

    def __init__(self, collectives: PipelinedCollectives) -> None:
        self._collectives = collectives

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        host = tensor.cpu()
        self._collectives.all_reduce(host, reduction)
        tensor.copy_(host)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        host = tensor.cpu()
        self._collectives.broadcast(host, root)
        tensor.copy_(host)

    def all_gather(self, whole: Tensor, mine: Tensor) -> None:
        host = torch.empty(whole.numel(), dtype=whole.dtype)
        self._collectives.all_gather(host, mine.cpu())
        whole.copy_(host)

    def reduce_scatter(self, mine: Tensor, whole: Tensor, reduction: Reduction) -> None:
        host = torch.empty(mine.numel(), dtype=mine.dtype)
        self._collectives.reduce_scatter(host, whole.cpu(), reduction)
        mine.copy_(host)


def run_interleaved(chunks: Iterable[Iterator[None]]) -> None:
    """Run all generators to their end. One more is started in each round. See Note [Interleaving]."""
    waiting, active = iter(chunks), list[Iterator[None]]()
    while True:
        started = next(waiting, None)
        if started is not None:
            active.insert(0, started)
        elif not active:
            return
        active = [chunk for chunk in active if _advance(chunk)]


def _advance(chunk: Iterator[None]) -> bool:
    """Run a generator to its next `yield`; return whether there was one."""
    try:
        next(chunk)
        return True
    except StopIteration:
        return False


def _op_type(reduction: Reduction) -> OpType:
    """Return the operation on pairs of operands: PREMUL_SUM multiplies before it, AVG divides after it."""
    return OpType.SUM if reduction.kind in (OpType.AVG, OpType.PREMUL_SUM) else reduction.kind


def _average(total: Tensor, reduction: Reduction) -> None:
    if reduction.kind == OpType.AVG:
        whole_numbers = not (total.dtype.is_floating_point or total.dtype.is_complex)
        total.div_(reduction.size, rounding_mode="trunc" if whole_numbers else None)


def _chunk_numel(tensor: Tensor, pieces: int) -> int:
    """Return the number of elements of a chunk, if each chunk is divided into so many pieces of equal size."""
    return _round_up(-(-chunk_bytes(tensor.nbytes, pieces) // tensor.itemsize), pieces)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
