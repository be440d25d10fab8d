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
from typing import Final

import torch
from torch import Tensor

from lockstep.comm.shm.memory import PAGE
from lockstep.comm.shm.phases import NOTHING_WANTED, Call, GroupSync
from lockstep.comm.shm.reduce_ops import Reduction
from lockstep.errors import SharedMemoryFullError

SLOTS: Final = 4
# Each worker has a section of a slot. Smaller slots make staging no faster: data from another core is not in the cache
# anyway, and every round has a fixed cost.
SLOT_BYTES: Final = 4 << 20
LEAST_SECTION_BYTES: Final = 64 << 10  # a small reduction must fit into one slot, and smaller ones are all overhead
SMALL_BYTES: Final = 64 << 10
BLOCK_BYTES: Final = 2 << 20  # of all rows together; fits in a cache, where copying is three times as fast
ALIGN: Final = 64
MAX_CELLS: Final = 1024
_PER_RANK: Final = ("scatter", "all_to_all")

Parts = Sequence[Tensor | None]  # one for each rank

_DTYPES: Final = {
    dtype: code
    for code, dtype in enumerate(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
}


def reduction_key(op: Reduction, dtype: torch.dtype, *rest: int) -> tuple[int, ...]:
    """What must be equal on all workers of a reduction."""
    return (op.code, _DTYPES[dtype], *rest)


def describe_move(
    name: str, same: tuple[int, ...], to_all: Tensor | None, to_each: Parts, into: Parts, offset: int = -1
) -> Call:
    """The call of a `move` with these arguments."""
    if to_each:
        lengths = tuple([0 if part is None else part.numel() for part in to_each])
    else:
        lengths = (0 if to_all is None else to_all.numel(),) * len(into)
    expects = tuple([NOTHING_WANTED if target is None else target.numel() for target in into])
    return Call(name, same, lengths, expects, offset)


def reserve_slots(sync: GroupSync) -> int:
    """Reserve this worker's slots, smaller ones where shared memory is scarce. Returns the bytes of a section."""
    section = SLOT_BYTES // sync.size
    available = sync.segment.available_bytes()
    if available is not None:  # half of it for the slots of all workers; the rest is for later allocations
        section = min(section, available // 2 // (SLOTS * sync.size**2))
    section = max(section // ALIGN * ALIGN, LEAST_SECTION_BYTES)
    while True:
        try:
            sync.segment.reserve(sync.layout.end, SLOTS * section * sync.size, "the staging slots of a group")
            return section
        except SharedMemoryFullError:
            if section // 2 < LEAST_SECTION_BYTES:
                raise
            section = section // 2 // ALIGN * ALIGN


def heap_start(sync: GroupSync, section_bytes: int) -> int:
    return -(-(sync.layout.end + SLOTS * section_bytes * sync.size) // PAGE) * PAGE


class Collectives:
    """The collectives of one group on host memory. Called by the executor, one at a time.

    Behind the control block of a worker's segment are its staging slots, then the heap.
    """

    def __init__(self, sync: GroupSync, section_bytes: int) -> None:
        self.sync, self.section_bytes = sync, section_bytes
        self._segments = sync.segments
        start, slot_bytes = sync.layout.end, section_bytes * sync.size
        self._slots = [
            [segment.bytes[start + i * slot_bytes : start + (i + 1) * slot_bytes] for i in range(SLOTS)]
            for segment in self._segments
        ]
        self._rounds = 0  # rounds staged so far; equal on all workers
        self._cells: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._sections: dict[torch.dtype, list[list[tuple[Tensor, ...]]]] = {}
        self._is_own = [rank == sync.rank for rank in range(sync.size)]

    def wait_for_result(self) -> None:
        """Later operations see the result. In host memory there is nothing to wait for."""

    def _slot(self, rank: int, round_: int) -> Tensor:
        return self._slots[rank][round_ % SLOTS]

    def _shared(self, rank: int, offset: int, size: int) -> Tensor:
        return self._segments[rank].bytes[offset : offset + size]

    # ---- copies -----------------------------------------------------------------------------------------------------

    def move(
        self, name: str, *, into: Parts, same: tuple[int, ...] = (), to_all: Tensor | None = None, to_each: Parts = ()
    ) -> None:
        """Send `to_all` to all ranks or `to_each[r]` to rank r, and write what rank r sends into `into[r]`.

        All tensors are bytes. At most one of `to_all` and `to_each` is given; none, if this worker sends nothing.
        """
        sync, me, size = self.sync, self.sync.rank, self.sync.size
        offset = -1 if to_all is None else self._direct(to_all)
        call = describe_move(name, same, to_all, to_each, into, offset)
        sync.publish_call(call)
        share = self.section_bytes
        span = share if to_each else share * size  # bytes of one source that fit into one slot
        phase = self._stage(to_all if offset < 0 else None, to_each, 0, span)
        sync.await_phase(phase)
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
                        target.copy_(self._shared(rank, calls[rank].offset, target.numel()))
                else:
                    piece = target[round_ * span : (round_ + 1) * span]
                    if piece.numel():
                        start = me * share if per_rank else 0
                        piece.copy_(self._slot(rank, self._rounds + round_)[start : start + piece.numel()])
            if round_ + 1 < rounds:
                sync.await_phase(phase)
        self._rounds += max(1, rounds)
        if direct:
            sync.await_phase(sync.arrive())

    def _stage(self, to_all: Tensor | None, to_each: Parts, round_: int, span: int) -> int:
        """Write this round of the data into this worker's slot, and arrive. Returns the phase."""
        me, slot = self.sync.rank, None
        for rank, source in enumerate(to_each or (to_all,)):
            if source is None or (to_each and rank == me):
                continue
            piece = source[round_ * span : (round_ + 1) * span]
            if piece.numel():
                slot = self._slot(me, self._rounds + round_) if slot is None else slot
                slot[rank * span : rank * span + piece.numel()].copy_(piece)
        return self.sync.arrive()

    def _direct(self, first: Tensor, *others: Tensor) -> int:
        """Offset at which the peers can read these sections themselves; -1 if they are small, apart, or elsewhere."""
        size = first.nbytes
        for section in others:
            if section.data_ptr() != first.data_ptr() + size:
                return -1
            size += section.nbytes
        offset = self.sync.segment.offset_of(first) if size > SMALL_BYTES else None
        return -1 if offset is None else offset

    def share(self, mine: Tensor, found: list[Tensor]) -> None:
        """Wait until all workers have written their bytes, and append those of each rank to `found`, without a copy.

        Nothing is appended, on all workers, unless all are in group memory.
        """
        offset = self.sync.segment.offset_of(mine)
        call = Call("share", (mine.numel(),), offset=-1 if offset is None else offset)
        calls = self.sync.exchange_calls(call)
        if all(peer.offset >= 0 for peer in calls):
            found += [self._shared(rank, peer.offset, mine.numel()) for rank, peer in enumerate(calls)]

    def barrier(self, name: str = "barrier") -> None:
        self.sync.exchange_calls(Call(name))

    # ---- reductions -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Reduction, *, root: int | None = None) -> None:
        """Reduce `tensor` over all workers, in place. With `root`, only that rank's tensor is changed."""
        me, size = self.sync.rank, self.sync.size
        name = "all_reduce" if root is None else "reduce"
        same = reduction_key(op, tensor.dtype, tensor.numel(), -1 if root is None else root)
        if op.factor is not None:
            tensor = op.prepare(tensor, copy=root not in (None, me))
        if tensor.nbytes <= SMALL_BYTES:
            self.sync.publish_call(Call(name, same))
            self._reduce_small(tensor, op, wanted=root in (None, me))
            return
        offset = self._direct(tensor) if root is None else -1
        calls = self.sync.exchange_calls(Call(name, same, offset=offset))
        per = -(-tensor.numel() // size)
        per = -(-per // ALIGN) * ALIGN
        if all(peer.offset >= 0 for peer in calls):
            self._reduce_direct(tensor, op, [peer.offset for peer in calls], per)
        else:
            sections = [tensor[k * per : (k + 1) * per] for k in range(size)]
            out = sections[me] if root in (None, me) else torch.empty_like(sections[me])
            self._reduce_staged(sections, out, op, receivers=range(size) if root is None else (root,))

    def reduce_scatter(self, sections: Sequence[Tensor], out: Tensor, op: Reduction) -> None:
        """Reduce all workers' `sections[r]`, where r is this worker's rank, into `out`. Sections stay unchanged."""
        same = reduction_key(op, out.dtype, *(section.numel() for section in sections))
        sections = [op.prepare(section, copy=True) for section in sections]
        calls = self.sync.exchange_calls(Call("reduce_scatter", same, offset=self._direct(*sections)))
        if all(peer.offset >= 0 for peer in calls):
            before = sum(section.nbytes for section in sections[: self.sync.rank])
            rows = self._shared_rows([peer.offset + before for peer in calls], out)
            self._reduce_blocks(rows, out, op, free=[False] * self.sync.size)
            self.sync.await_phase(self.sync.arrive())
        else:
            self._reduce_staged(sections, out, op, receivers=())

    def _reduce_small(self, tensor: Tensor, op: Reduction, *, wanted: bool) -> None:
        """One phase: each worker stages its whole tensor, and adds up those of all workers itself."""
        sync, me = self.sync, self.sync.rank
        cells = self._small_cells(tensor)
        if tensor.numel():
            cells[me].copy_(tensor)
        sync.await_phase(sync.arrive())
        sync.read_calls()
        if wanted and tensor.numel():
            cells[me] = tensor
            op.run(cells, tensor, free=self._is_own)
        self._rounds += 1

    def _small_cells(self, tensor: Tensor) -> list[Tensor]:
        """The beginning of each rank's slot as a view like `tensor`. Cached: making views takes longer than adding."""
        slot = self._rounds % SLOTS
        key = (slot, tensor.numel(), tensor.dtype)
        cells = self._cells.get(key)
        if cells is None:
            if len(self._cells) >= MAX_CELLS:
                self._cells.clear()
            slots = [self._slot(rank, slot) for rank in range(self.sync.size)]
            with torch.inference_mode(False):  # the views are used by later calls, too
                cells = self._cells[key] = [s[: tensor.nbytes].view(tensor.dtype) for s in slots]
        return list(cells)

    def _reduce_direct(self, tensor: Tensor, op: Reduction, offsets: Sequence[int], per: int) -> None:
        """All operands are in group memory: add them up in place, and write the sum to all workers."""
        me, size = self.sync.rank, self.sync.size
        mine = tensor[me * per : (me + 1) * per]
        if mine.numel():
            rows = self._shared_rows([offset + me * per * tensor.itemsize for offset in offsets], mine)
            self._reduce_blocks(rows, rows[me], op, free=[True] * size, copy_to=[r for r in range(size) if r != me])
        self.sync.await_phase(self.sync.arrive())

    def _shared_rows(self, offsets: Sequence[int], like: Tensor) -> list[Tensor]:
        return [self._shared(rank, offset, like.nbytes).view(like.dtype) for rank, offset in enumerate(offsets)]

    def _reduce_blocks(
        self, rows: Sequence[Tensor], out: Tensor, op: Reduction, *, free: Sequence[bool], copy_to: Sequence[int] = ()
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
        self, sections: Sequence[Tensor], out: Tensor, op: Reduction, *, receivers: Sequence[int]
    ) -> None:
        """Rounds of three parts: stage the peers' sections, reduce the own one, fetch the results (if a receiver)."""
        sync, me, first = self.sync, self.sync.rank, self._rounds
        step = self.section_bytes // out.itemsize
        pieces, targets = [torch.split(section, step) for section in sections], torch.split(out, step)
        rounds = max(-(-section.numel() // step) for section in sections)
        cells = self._section_cells(out.dtype)
        peers = [rank for rank in range(len(sections)) if rank != me]
        in_place = out.data_ptr() == sections[me].data_ptr()
        free = [rank != me or in_place for rank in range(len(sections))]

        def cell(owner: int, rank: int, round_: int, like: Tensor) -> Tensor:
            whole = cells[owner][(first + round_) % SLOTS][rank]
            return whole if whole.numel() == like.numel() else whole[: like.numel()]

        def stage(round_: int) -> int:
            for rank in peers:
                if round_ < len(pieces[rank]):
                    piece = pieces[rank][round_]
                    cell(me, rank, round_, piece).copy_(piece)
            return sync.arrive()

        def reduce(round_: int) -> int:
            if round_ < len(pieces[me]):
                mine, target = pieces[me][round_], targets[round_]
                staged = [cell(rank, me, round_, mine) for rank in range(len(sections))]
                operands = [*staged[:me], mine, *staged[me + 1 :]]
                op.run(operands, target, free=free)
                for rank in receivers:
                    if rank != me:
                        staged[rank].copy_(target)
            return sync.arrive()

        def fetch(round_: int) -> None:
            for rank in peers if me in receivers else ():
                if round_ < len(pieces[rank]):
                    piece = pieces[rank][round_]
                    piece.copy_(cell(me, rank, round_, piece))

        staged_phases = [stage(round_) for round_ in range(min(2, rounds))]
        reduced: list[int] = []
        for round_ in range(rounds):
            sync.await_phase(staged_phases[round_])
            reduced.append(reduce(round_))
            if round_ + 2 < rounds:
                staged_phases.append(stage(round_ + 2))
            if round_ > 0:
                sync.await_phase(reduced[round_ - 1])
                fetch(round_ - 1)
        if rounds:
            sync.await_phase(reduced[-1])
            fetch(rounds - 1)
        self._rounds += rounds

    def _section_cells(self, dtype: torch.dtype) -> list[list[tuple[Tensor, ...]]]:
        """Views `[owner][slot][rank]` of the sections of all slots. Cached, like the small cells."""
        if dtype not in self._sections:
            size = self.sync.size
            with torch.inference_mode(False):
                self._sections[dtype] = [
                    [self._slot(owner, slot).view(dtype).view(size, -1).unbind() for slot in range(SLOTS)]
                    for owner in range(size)
                ]
        return self._sections[dtype]
