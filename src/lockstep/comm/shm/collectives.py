"""The collectives: who copies what where, and in which phases.

All tensors here are flat and contiguous. A tensor that lies in group memory is read and written by the peers where it
is. Anything else goes through the staging slots: every worker has `SLOTS` of them, and deposits one round of data in
each.

Note [Sections]
In a reduction every worker owns one section of the result. It alone reads that section of every operand, adds them up
in the one order (comm/tree_order.py) and writes the sum to everybody. So all workers have the same bits, each byte is
read once, and nobody ever writes where another writes.

Note [Slots]
A worker may deposit round k+1 while slower peers still read round k, and in a reduction they write back into its
slot. A slot is used again SLOTS = 4 rounds later. By then its owner has been through two more phases, and so has
everybody: all reads and writes of the old round are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from lockstep.comm.shm.phases import NOTHING_WANTED, Call, Team
from lockstep.comm.shm.reduce_ops import Reduction

SLOTS: Final = 4
SMALL_BYTES: Final = 64 << 10
BLOCK_BYTES: Final = 2 << 20  # of all rows: what stays in a cache, where copying is three times as fast
ALIGN: Final = 64
MOST_CELLS: Final = 1024

_DTYPES: Final = {
    dtype: code
    for code, dtype in enumerate(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
}


def dtype_code(dtype: torch.dtype) -> int:
    """A number that means this dtype on every worker."""
    return _DTYPES[dtype]


class Memory(Protocol):
    """Where the bytes lie: host memory, or that of a GPU."""

    section_bytes: int  # of a staging slot, per rank

    def slot(self, rank: int, round_: int) -> torch.Tensor: ...
    def shared(self, rank: int, offset: int, size: int) -> torch.Tensor: ...
    def offset_of(self, tensor: torch.Tensor) -> int | None: ...
    def arrive(self) -> int: ...
    def await_phase(self, phase: int) -> None: ...


class Collectives:
    """The collectives of one group on one kind of memory. Called by the engine, one at a time."""

    def __init__(self, team: Team, memory: Memory) -> None:
        self.team, self.memory = team, memory
        self._rounds = 0  # staged so far, the same on all workers
        self._cells: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        self._sections: dict[torch.dtype, list[list[tuple[torch.Tensor, ...]]]] = {}
        self._own = [rank == team.rank for rank in range(team.size)]

    def settle(self) -> None:
        """What comes next sees the result. Host memory has it already."""

    # ---- moving -----------------------------------------------------------------------------------------------------

    def move(
        self,
        name: str,
        *,
        same: tuple[int, ...] = (),
        to_all: torch.Tensor | None = None,
        to_each: Sequence[torch.Tensor | None] = (),
        into: Sequence[torch.Tensor | None],
    ) -> None:
        """Send `to_all`, or `to_each` rank its own; `into[r]` becomes what rank r sends us. All are bytes.

        One of `to_all` and `to_each` or neither, if we send nothing.
        """
        team, memory, me, size = self.team, self.memory, self.team.rank, self.team.size
        offset = self._direct(to_all)
        lengths = tuple(_length(t) for t in to_each) if to_each else (_length(to_all),) * size
        expects = tuple(NOTHING_WANTED if target is None else target.numel() for target in into)
        call = Call(name, same, lengths, expects, offset)
        team.say(call)
        share = memory.section_bytes
        span = share if to_each else share * size  # what one slot takes of one stream
        phase = self._deposit(to_all if offset < 0 else None, to_each, 0, span)
        memory.await_phase(phase)
        heard = team.hear()
        team.check_lengths(call)
        direct = any(other.offset >= 0 for other in heard)
        personal = name in _PERSONAL
        span = share if personal else share * size
        rounds = max((-(-other.length // span) for other in heard if other.offset < 0), default=0)
        for round_ in range(max(1, rounds)):
            if round_ + 1 < rounds:
                phase = self._deposit(to_all if offset < 0 else None, to_each, round_ + 1, span)
            for rank, target in enumerate(into):
                if target is None or target.numel() == 0:
                    continue
                if rank == me:
                    if round_ == 0:
                        own = to_each[me] if to_each else to_all
                        if own is not None and own.data_ptr() != target.data_ptr():
                            target.copy_(own)
                elif heard[rank].offset >= 0:
                    if round_ == 0:
                        target.copy_(memory.shared(rank, heard[rank].offset, target.numel()))
                else:
                    piece = target[round_ * span : (round_ + 1) * span]
                    if piece.numel():
                        start = me * share if personal else 0
                        piece.copy_(memory.slot(rank, self._rounds + round_)[start : start + piece.numel()])
            if round_ + 1 < rounds:
                memory.await_phase(phase)
        self._rounds += max(1, rounds)
        if direct:
            memory.await_phase(memory.arrive())

    def _deposit(
        self, to_all: torch.Tensor | None, to_each: Sequence[torch.Tensor | None], round_: int, span: int
    ) -> int:
        """Put this round of what we send into our slot, and say so."""
        me, slot = self.team.rank, None
        for rank, source in enumerate(to_each or (to_all,)):
            if source is None or (to_each and rank == me):
                continue
            piece = source[round_ * span : (round_ + 1) * span]
            if piece.numel():
                slot = self.memory.slot(me, self._rounds + round_) if slot is None else slot
                slot[rank * span : rank * span + piece.numel()].copy_(piece)
        return self.memory.arrive()

    def _direct(self, tensor: torch.Tensor | None) -> int:
        """Where the peers can read `tensor` itself, or -1 if it has to be staged."""
        return -1 if tensor is None or tensor.nbytes <= SMALL_BYTES else self._offset(tensor)

    def _offset(self, tensor: torch.Tensor) -> int:
        offset = self.memory.offset_of(tensor)
        return -1 if offset is None else offset

    def barrier(self, name: str = "barrier") -> None:
        self.team.say(Call(name))
        self.memory.await_phase(self.memory.arrive())
        self.team.hear()

    # ---- reducing ---------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, how: Reduction, *, root: int | None = None) -> None:
        """Everybody's `tensor` becomes their reduction. With `root` only that rank's does, and the others' stay."""
        me, size = self.team.rank, self.team.size
        name = "all_reduce" if root is None else "reduce"
        same = (how.code, dtype_code(tensor.dtype), tensor.numel(), -1 if root is None else root)
        if how.factor is not None:
            if root is not None and me != root:
                tensor = tensor.clone()
            how.prepare(tensor)
        if tensor.nbytes <= SMALL_BYTES:
            self.team.say(Call(name, same))
            self._reduce_small(tensor, how, wanted=root in (None, me))
            return
        offset = self._direct(tensor) if root is None else -1
        self.team.say(Call(name, same, offset=offset))
        self.memory.await_phase(self.memory.arrive())
        heard = self.team.hear()
        per = -(-tensor.numel() // size)
        per = -(-per // ALIGN) * ALIGN
        if all(other.offset >= 0 for other in heard):
            self._reduce_direct(tensor, how, [other.offset for other in heard], per)
        else:
            sections = [tensor[k * per : (k + 1) * per] for k in range(size)]
            out = sections[me] if root in (None, me) else torch.empty_like(sections[me])
            self._reduce_staged(sections, out, how, receivers=range(size) if root is None else (root,))

    def reduce_scatter(self, sections: Sequence[torch.Tensor], out: torch.Tensor, how: Reduction) -> None:
        """`out` becomes the reduction of everybody's section that has our rank. The sections stay as they are."""
        same = (how.code, dtype_code(out.dtype), *(section.numel() for section in sections))
        if how.factor is not None:
            sections = [section.clone() for section in sections]
            for section in sections:
                how.prepare(section)
        offset = self._direct_sections(sections)
        self.team.say(Call("reduce_scatter", same, offset=offset))
        self.memory.await_phase(self.memory.arrive())
        heard = self.team.hear()
        if all(other.offset >= 0 for other in heard):
            before = sum(section.nbytes for section in sections[: self.team.rank])
            rows = self._rows([other.offset + before for other in heard], out)
            self._reduce_blocks(rows, out, how, free=[False] * self.team.size)
            self.memory.await_phase(self.memory.arrive())
        else:
            self._reduce_staged(sections, out, how, receivers=())

    def _direct_sections(self, sections: Sequence[torch.Tensor]) -> int:
        """Where the sections lie, if they lie in group memory one behind the other; else -1."""
        ends = [section.data_ptr() + section.nbytes for section in sections]
        if any(end != section.data_ptr() for end, section in zip(ends, sections[1:], strict=False)):
            return -1
        return -1 if sum(section.nbytes for section in sections) <= SMALL_BYTES else self._offset(sections[0])

    def _reduce_small(self, tensor: torch.Tensor, how: Reduction, *, wanted: bool) -> None:
        """One phase: everybody deposits everything, everybody adds everything up."""
        memory, me = self.memory, self.team.rank
        cells = self._small_cells(tensor)
        if tensor.numel():
            cells[me].copy_(tensor)
        memory.await_phase(memory.arrive())
        self.team.hear()
        if wanted and tensor.numel():
            cells[me] = tensor
            how.run(cells, tensor, free=self._own)
        self._rounds += 1

    def _small_cells(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The beginning of everybody's slot, in the shape of `tensor`. Kept: making views takes longer than adding."""
        slot = self._rounds % SLOTS
        key = (slot, tensor.numel(), tensor.dtype)
        cells = self._cells.get(key)
        if cells is None:
            if len(self._cells) >= MOST_CELLS:
                self._cells.clear()
            slots = [self.memory.slot(rank, slot) for rank in range(self.team.size)]
            with torch.inference_mode(False):  # they serve later calls too
                cells = self._cells[key] = [s[: tensor.nbytes].view(tensor.dtype) for s in slots]
        return list(cells)

    def _reduce_direct(self, tensor: torch.Tensor, how: Reduction, offsets: Sequence[int], per: int) -> None:
        """All operands lie in group memory: add up where they are, and write the sum to everybody."""
        me, size = self.team.rank, self.team.size
        mine = tensor[me * per : (me + 1) * per]
        if mine.numel():
            rows = self._rows([offset + me * per * tensor.itemsize for offset in offsets], mine)
            self._reduce_blocks(rows, rows[me], how, free=[True] * size, others=[r for r in range(size) if r != me])
        self.memory.await_phase(self.memory.arrive())

    def _rows(self, offsets: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
        shared = self.memory.shared
        return [shared(rank, offset, like.nbytes).view(like.dtype) for rank, offset in enumerate(offsets)]

    def _reduce_blocks(
        self,
        rows: Sequence[torch.Tensor],
        out: torch.Tensor,
        how: Reduction,
        *,
        free: Sequence[bool],
        others: Sequence[int] = (),
    ) -> None:
        """Block by block, so that what is written to the `others` rows is still in the cache."""
        if not out.numel():
            return
        step = BLOCK_BYTES // len(rows) // out.itemsize
        blocks = [torch.split(row, step) for row in rows]
        for i, target in enumerate(torch.split(out, step)):
            operands = [of_row[i] for of_row in blocks]
            how.run(operands, target, free=free)
            for rank in others:
                operands[rank].copy_(target)

    def _reduce_staged(
        self, sections: Sequence[torch.Tensor], out: torch.Tensor, how: Reduction, *, receivers: Sequence[int]
    ) -> None:
        """Rounds of three parts: bring the others' sections, reduce one's own, fetch the results (if a receiver)."""
        memory, me, first = self.memory, self.team.rank, self._rounds
        step = memory.section_bytes // out.itemsize
        pieces, targets = [torch.split(section, step) for section in sections], torch.split(out, step)
        rounds = max(-(-section.numel() // step) for section in sections)
        cells = self._section_cells(out.dtype)
        others = [rank for rank in range(len(sections)) if rank != me]
        in_place = out.data_ptr() == sections[me].data_ptr()
        free = [rank != me or in_place for rank in range(len(sections))]

        def cell(owner: int, rank: int, round_: int, like: torch.Tensor) -> torch.Tensor:
            whole = cells[owner][(first + round_) % SLOTS][rank]
            return whole if whole.numel() == like.numel() else whole[: like.numel()]

        def bring(round_: int) -> int:
            for rank in others:
                if round_ < len(pieces[rank]):
                    piece = pieces[rank][round_]
                    cell(me, rank, round_, piece).copy_(piece)
            return memory.arrive()

        def reduce(round_: int) -> int:
            if round_ < len(pieces[me]):
                mine, target = pieces[me][round_], targets[round_]
                staged = [cell(rank, me, round_, mine) for rank in range(len(sections))]
                operands = [*staged[:me], mine, *staged[me + 1 :]]
                how.run(operands, target, free=free)
                for rank in receivers:
                    if rank != me:
                        staged[rank].copy_(target)
            return memory.arrive()

        def fetch(round_: int) -> None:
            for rank in others if me in receivers else ():
                if round_ < len(pieces[rank]):
                    piece = pieces[rank][round_]
                    piece.copy_(cell(me, rank, round_, piece))

        brought = [bring(round_) for round_ in range(min(2, rounds))]
        reduced: list[int] = []
        for round_ in range(rounds):
            memory.await_phase(brought[round_])
            reduced.append(reduce(round_))
            if round_ + 2 < rounds:
                brought.append(bring(round_ + 2))
            if round_ > 0:
                memory.await_phase(reduced[round_ - 1])
                fetch(round_ - 1)
        if rounds:
            memory.await_phase(reduced[-1])
            fetch(rounds - 1)
        self._rounds += rounds

    def _section_cells(self, dtype: torch.dtype) -> list[list[tuple[torch.Tensor, ...]]]:
        """[owner][slot][rank]: that part of a slot. Kept, like the small cells."""
        if dtype not in self._sections:
            memory, size = self.memory, self.team.size
            with torch.inference_mode(False):
                self._sections[dtype] = [
                    [memory.slot(owner, slot).view(dtype).view(size, -1).unbind() for slot in range(SLOTS)]
                    for owner in range(size)
                ]
        return self._sections[dtype]


_PERSONAL: Final = ("scatter", "all_to_all")


def _length(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
