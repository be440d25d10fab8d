"""Collectives on host memory: what each worker copies in each phase.

All tensors here are flat and contiguous. A tensor in group memory is read and written by the peers in place. All other
data passes through the staging slots: every worker has `SLOTS` of them, and writes one round of data into each.

Note [Sections]
In a reduction every worker owns one section of the result. It alone reads that section of every operand, adds them up
in a fixed order (comm/tree_order.py) and writes the sum to all workers. So all workers have the same bits, each byte is
read once, and no two workers write to the same place.

Note [Slots]
A worker may write round k+1 while slower peers still read round k, and in a reduction they write back into its slot.
A slot is used again SLOTS = 4 rounds later. By then all workers have completed two more phases, so all reads and writes
of the old round are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from lockstep.comm.shm.phases import NOTHING_WANTED, Call, GroupSync
from lockstep.comm.shm.reduce_ops import Reduction

SLOTS: Final = 4
SMALL_BYTES: Final = 64 << 10
BLOCK_BYTES: Final = 2 << 20  # of all rows together; fits in a cache, where copying is three times as fast
ALIGN: Final = 64
MAX_CELLS: Final = 1024

_DTYPES: Final = {
    dtype: code
    for code, dtype in enumerate(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
}


def dtype_code(dtype: torch.dtype) -> int:
    """A number for this dtype; equal on all workers."""
    return _DTYPES[dtype]


class CollectiveMemory(Protocol):
    """Memory that a collective works in: staging slots and shared tensors of all workers, and their phases."""

    section_bytes: int  # bytes of a staging slot for each rank

    def slot(self, rank: int, round_: int) -> torch.Tensor: ...
    def shared(self, rank: int, offset: int, size: int) -> torch.Tensor: ...
    def offset_of(self, tensor: torch.Tensor) -> int | None: ...
    def arrive(self) -> int: ...
    def await_phase(self, phase: int) -> None: ...


class Collectives:
    """The collectives of one group on host memory. Called by the executor, one at a time."""

    def __init__(self, sync: GroupSync, memory: CollectiveMemory) -> None:
        self.sync, self.memory = sync, memory
        self._rounds = 0  # rounds staged so far; equal on all workers
        self._cells: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        self._sections: dict[torch.dtype, list[list[tuple[torch.Tensor, ...]]]] = {}
        self._is_own = [rank == sync.rank for rank in range(sync.size)]

    def wait_for_result(self) -> None:
        """Later operations see the result. In host memory there is nothing to wait for."""

    # ---- copies -----------------------------------------------------------------------------------------------------

    def move(
        self,
        name: str,
        *,
        same: tuple[int, ...] = (),
        to_all: torch.Tensor | None = None,
        to_each: Sequence[torch.Tensor | None] = (),
        into: Sequence[torch.Tensor | None],
    ) -> None:
        """Send `to_all` to all ranks or `to_each[r]` to rank r, and write what rank r sends into `into[r]`.

        All tensors are bytes. At most one of `to_all` and `to_each` is given; none, if this worker sends nothing.
        """
        sync, memory, me, size = self.sync, self.memory, self.sync.rank, self.sync.size
        offset = self._direct(to_all)
        lengths = tuple(numel_of(t) for t in to_each) if to_each else (numel_of(to_all),) * size
        expects = tuple(NOTHING_WANTED if target is None else target.numel() for target in into)
        call = Call(name, same, lengths, expects, offset)
        sync.publish_call(call)
        share = memory.section_bytes
        span = share if to_each else share * size  # bytes of one source that fit into one slot
        phase = self._stage(to_all if offset < 0 else None, to_each, 0, span)
        memory.await_phase(phase)
        calls = sync.read_calls()
        sync.check_lengths(call)
        direct = any(peer.offset >= 0 for peer in calls)
        per_rank = name in _PER_RANK
        span = share if per_rank else share * size
        rounds = max((-(-peer.length // span) for peer in calls if peer.offset < 0), default=0)
        for round_ in range(max(1, rounds)):
            if round_ + 1 < rounds:
                phase = self._stage(to_all if offset < 0 else None, to_each, round_ + 1, span)
            for rank, target in enumerate(into):
                if target is None or target.numel() == 0:
                    continue
                if rank == me:
                    if round_ == 0:
                        own = to_each[me] if to_each else to_all
                        if own is not None and own.data_ptr() != target.data_ptr():
                            target.copy_(own)
                elif calls[rank].offset >= 0:
                    if round_ == 0:
                        target.copy_(memory.shared(rank, calls[rank].offset, target.numel()))
                else:
                    piece = target[round_ * span : (round_ + 1) * span]
                    if piece.numel():
                        start = me * share if per_rank else 0
                        piece.copy_(memory.slot(rank, self._rounds + round_)[start : start + piece.numel()])
            if round_ + 1 < rounds:
                memory.await_phase(phase)
        self._rounds += max(1, rounds)
        if direct:
            memory.await_phase(memory.arrive())

    def _stage(
        self, to_all: torch.Tensor | None, to_each: Sequence[torch.Tensor | None], round_: int, span: int
    ) -> int:
        """Write this round of the data into this worker's slot, and arrive. Returns the phase."""
        me, slot = self.sync.rank, None
        for rank, source in enumerate(to_each or (to_all,)):
            if source is None or (to_each and rank == me):
                continue
            piece = source[round_ * span : (round_ + 1) * span]
            if piece.numel():
                slot = self.memory.slot(me, self._rounds + round_) if slot is None else slot
                slot[rank * span : rank * span + piece.numel()].copy_(piece)
        return self.memory.arrive()

    def _direct(self, tensor: torch.Tensor | None) -> int:
        """Offset at which the peers can read `tensor` itself, or -1 if it has to be staged."""
        return -1 if tensor is None or tensor.nbytes <= SMALL_BYTES else self._offset(tensor)

    def _offset(self, tensor: torch.Tensor) -> int:
        offset = self.memory.offset_of(tensor)
        return -1 if offset is None else offset

    def barrier(self, name: str = "barrier") -> None:
        self.sync.publish_call(Call(name))
        self.memory.await_phase(self.memory.arrive())
        self.sync.read_calls()

    # ---- reductions -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, *, root: int | None = None) -> None:
        """Reduce `tensor` over all workers, in place. With `root`, only that rank's tensor is changed."""
        me, size = self.sync.rank, self.sync.size
        name = "all_reduce" if root is None else "reduce"
        same = (op.code, dtype_code(tensor.dtype), tensor.numel(), -1 if root is None else root)
        if op.factor is not None:
            if root is not None and me != root:
                tensor = tensor.clone()
            op.prepare(tensor)
        if tensor.nbytes <= SMALL_BYTES:
            self.sync.publish_call(Call(name, same))
            self._reduce_small(tensor, op, wanted=root in (None, me))
            return
        offset = self._direct(tensor) if root is None else -1
        self.sync.publish_call(Call(name, same, offset=offset))
        self.memory.await_phase(self.memory.arrive())
        calls = self.sync.read_calls()
        per = -(-tensor.numel() // size)
        per = -(-per // ALIGN) * ALIGN
        if all(peer.offset >= 0 for peer in calls):
            self._reduce_direct(tensor, op, [peer.offset for peer in calls], per)
        else:
            sections = [tensor[k * per : (k + 1) * per] for k in range(size)]
            out = sections[me] if root in (None, me) else torch.empty_like(sections[me])
            self._reduce_staged(sections, out, op, receivers=range(size) if root is None else (root,))

    def reduce_scatter(self, sections: Sequence[torch.Tensor], out: torch.Tensor, op: Reduction) -> None:
        """Reduce all workers' `sections[r]`, where r is this worker's rank, into `out`. Sections stay unchanged."""
        same = (op.code, dtype_code(out.dtype), *(section.numel() for section in sections))
        if op.factor is not None:
            sections = [section.clone() for section in sections]
            for section in sections:
                op.prepare(section)
        offset = self._direct_sections(sections)
        self.sync.publish_call(Call("reduce_scatter", same, offset=offset))
        self.memory.await_phase(self.memory.arrive())
        calls = self.sync.read_calls()
        if all(peer.offset >= 0 for peer in calls):
            before = sum(section.nbytes for section in sections[: self.sync.rank])
            rows = self._shared_rows([peer.offset + before for peer in calls], out)
            self._reduce_blocks(rows, out, op, free=[False] * self.sync.size)
            self.memory.await_phase(self.memory.arrive())
        else:
            self._reduce_staged(sections, out, op, receivers=())

    def _direct_sections(self, sections: Sequence[torch.Tensor]) -> int:
        """Offset of the sections if they are adjacent in group memory, else -1."""
        ends = [section.data_ptr() + section.nbytes for section in sections]
        if any(end != section.data_ptr() for end, section in zip(ends, sections[1:], strict=False)):
            return -1
        return -1 if sum(section.nbytes for section in sections) <= SMALL_BYTES else self._offset(sections[0])

    def _reduce_small(self, tensor: torch.Tensor, op: Reduction, *, wanted: bool) -> None:
        """One phase: each worker stages its whole tensor, and adds up those of all workers itself."""
        memory, me = self.memory, self.sync.rank
        cells = self._small_cells(tensor)
        if tensor.numel():
            cells[me].copy_(tensor)
        memory.await_phase(memory.arrive())
        self.sync.read_calls()
        if wanted and tensor.numel():
            cells[me] = tensor
            op.run(cells, tensor, free=self._is_own)
        self._rounds += 1

    def _small_cells(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The beginning of each rank's slot as a view like `tensor`. Cached: making views takes longer than adding."""
        slot = self._rounds % SLOTS
        key = (slot, tensor.numel(), tensor.dtype)
        cells = self._cells.get(key)
        if cells is None:
            if len(self._cells) >= MAX_CELLS:
                self._cells.clear()
            slots = [self.memory.slot(rank, slot) for rank in range(self.sync.size)]
            with torch.inference_mode(False):  # the views are used by later calls, too
                cells = self._cells[key] = [s[: tensor.nbytes].view(tensor.dtype) for s in slots]
        return list(cells)

    def _reduce_direct(self, tensor: torch.Tensor, op: Reduction, offsets: Sequence[int], per: int) -> None:
        """All operands are in group memory: add them up in place, and write the sum to all workers."""
        me, size = self.sync.rank, self.sync.size
        mine = tensor[me * per : (me + 1) * per]
        if mine.numel():
            rows = self._shared_rows([offset + me * per * tensor.itemsize for offset in offsets], mine)
            self._reduce_blocks(rows, rows[me], op, free=[True] * size, copy_to=[r for r in range(size) if r != me])
        self.memory.await_phase(self.memory.arrive())

    def _shared_rows(self, offsets: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
        shared = self.memory.shared
        return [shared(rank, offset, like.nbytes).view(like.dtype) for rank, offset in enumerate(offsets)]

    def _reduce_blocks(
        self,
        rows: Sequence[torch.Tensor],
        out: torch.Tensor,
        op: Reduction,
        *,
        free: Sequence[bool],
        copy_to: Sequence[int] = (),
    ) -> None:
        """Reduce `rows` into `out` and copy it to the rows `copy_to`; block by block, while a block is in the cache."""
        if not out.numel():
            return
        step = BLOCK_BYTES // len(rows) // out.itemsize
        blocks = [torch.split(row, step) for row in rows]
        for i, target in enumerate(torch.split(out, step)):
            operands = [row_blocks[i] for row_blocks in blocks]
            op.run(operands, target, free=free)
            for rank in copy_to:
                operands[rank].copy_(target)

    def _reduce_staged(
        self, sections: Sequence[torch.Tensor], out: torch.Tensor, op: Reduction, *, receivers: Sequence[int]
    ) -> None:
        """Rounds of three parts: stage the peers' sections, reduce the own one, fetch the results (if a receiver)."""
        memory, me, first = self.memory, self.sync.rank, self._rounds
        step = memory.section_bytes // out.itemsize
        pieces, targets = [torch.split(section, step) for section in sections], torch.split(out, step)
        rounds = max(-(-section.numel() // step) for section in sections)
        cells = self._section_cells(out.dtype)
        peers = [rank for rank in range(len(sections)) if rank != me]
        in_place = out.data_ptr() == sections[me].data_ptr()
        free = [rank != me or in_place for rank in range(len(sections))]

        def cell(owner: int, rank: int, round_: int, like: torch.Tensor) -> torch.Tensor:
            whole = cells[owner][(first + round_) % SLOTS][rank]
            return whole if whole.numel() == like.numel() else whole[: like.numel()]

        def stage(round_: int) -> int:
            for rank in peers:
                if round_ < len(pieces[rank]):
                    piece = pieces[rank][round_]
                    cell(me, rank, round_, piece).copy_(piece)
            return memory.arrive()

        def reduce(round_: int) -> int:
            if round_ < len(pieces[me]):
                mine, target = pieces[me][round_], targets[round_]
                staged = [cell(rank, me, round_, mine) for rank in range(len(sections))]
                operands = [*staged[:me], mine, *staged[me + 1 :]]
                op.run(operands, target, free=free)
                for rank in receivers:
                    if rank != me:
                        staged[rank].copy_(target)
            return memory.arrive()

        def fetch(round_: int) -> None:
            for rank in peers if me in receivers else ():
                if round_ < len(pieces[rank]):
                    piece = pieces[rank][round_]
                    piece.copy_(cell(me, rank, round_, piece))

        staged_phases = [stage(round_) for round_ in range(min(2, rounds))]
        reduced: list[int] = []
        for round_ in range(rounds):
            memory.await_phase(staged_phases[round_])
            reduced.append(reduce(round_))
            if round_ + 2 < rounds:
                staged_phases.append(stage(round_ + 2))
            if round_ > 0:
                memory.await_phase(reduced[round_ - 1])
                fetch(round_ - 1)
        if rounds:
            memory.await_phase(reduced[-1])
            fetch(rounds - 1)
        self._rounds += rounds

    def _section_cells(self, dtype: torch.dtype) -> list[list[tuple[torch.Tensor, ...]]]:
        """Views `[owner][slot][rank]` of the sections of all slots. Cached, like the small cells."""
        if dtype not in self._sections:
            memory, size = self.memory, self.sync.size
            with torch.inference_mode(False):
                self._sections[dtype] = [
                    [memory.slot(owner, slot).view(dtype).view(size, -1).unbind() for slot in range(SLOTS)]
                    for owner in range(size)
                ]
        return self._sections[dtype]


_PER_RANK: Final = ("scatter", "all_to_all")


def numel_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
