"""The collectives: who copies what where, and in which phases.

All tensors here are flat and contiguous. A tensor that lies in group memory is read and written by the peers where it
is. Anything else goes through the staging slots: every worker has `SLOTS` of them, and deposits one round of data in
each.

Note [Sections]
In a reduction every worker owns one section of the result. It alone reads that section of every operand, adds them up
in the one order (comm/tree.py) and writes the sum to everybody. So all workers have the same bits, each byte is read
once, and nobody ever writes where another writes.

Note [Slots]
A worker may deposit round k+1 while slower peers still read round k, and in a reduction they write back into its
slot. A slot is used again SLOTS = 4 rounds later. By then its owner has been through two more phases, and so has
everybody: all reads and writes of the old round are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from lockstep.comm.shm.reduce import Reduction
from lockstep.comm.shm.team import NOTHING_WANTED, Call, Team

SLOTS: Final = 4
SMALL_BYTES: Final = 64 << 10
ALIGN: Final = 64
MOST_CELLS: Final = 1024

_DTYPES: Final = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=lambda dtype: str(dtype))
)


def dtype_code(dtype: torch.dtype) -> int:
    """A number that means this dtype on every worker."""
    return _DTYPES.index(dtype)


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
        if tensor is None or tensor.nbytes <= SMALL_BYTES:
            return -1
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
        self.team.say(Call("reduce_scatter", same))
        self.memory.await_phase(self.memory.arrive())
        self.team.hear()
        self._reduce_staged(sections, out, how, receivers=())

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
        """All operands lie in group memory: add up where they are."""
        memory, me, size = self.memory, self.team.rank, self.team.size
        begin, end = min(me * per, tensor.numel()), min((me + 1) * per, tensor.numel())
        if end > begin:
            at, length = begin * tensor.itemsize, (end - begin) * tensor.itemsize
            rows = [memory.shared(rank, offsets[rank] + at, length).view(tensor.dtype) for rank in range(size)]
            how.run(rows, rows[me], free=[True] * size)
            for rank in range(size):
                if rank != me:
                    rows[rank].copy_(rows[me])
        memory.await_phase(memory.arrive())

    def _reduce_staged(
        self, sections: Sequence[torch.Tensor], out: torch.Tensor, how: Reduction, *, receivers: Sequence[int]
    ) -> None:
        """Rounds of three parts: bring the others' sections, reduce one's own, fetch the results (if a receiver)."""
        memory, me = self.memory, self.team.rank
        itemsize = out.itemsize
        share = memory.section_bytes
        step = share // itemsize
        rounds = -(-max(section.numel() for section in sections) // step)
        fetch = me in receivers

        def cell(owner: int, rank: int, round_: int, numel: int) -> torch.Tensor:
            start = rank * share
            return memory.slot(owner, self._rounds + round_)[start : start + numel * itemsize].view(out.dtype)

        def bring(round_: int) -> int:
            for rank, section in enumerate(sections):
                piece = section[round_ * step : (round_ + 1) * step]
                if rank != me and piece.numel():
                    cell(me, rank, round_, piece.numel()).copy_(piece)
            return memory.arrive()

        def reduce(round_: int) -> int:
            mine = sections[me][round_ * step : (round_ + 1) * step]
            target = out[round_ * step : (round_ + 1) * step]
            if mine.numel():
                operands = [cell(rank, me, round_, mine.numel()) for rank in range(len(sections))]
                staged, operands[me] = list(operands), mine
                free = [True] * len(sections)
                free[me] = target.data_ptr() == mine.data_ptr()
                how.run(operands, target, free=free)
                for rank in receivers:
                    if rank != me:
                        staged[rank].copy_(target)
            return memory.arrive()

        def take(round_: int) -> None:
            for rank, section in enumerate(sections):
                piece = section[round_ * step : (round_ + 1) * step]
                if rank != me and piece.numel():
                    piece.copy_(cell(me, rank, round_, piece.numel()))

        brought = [bring(round_) for round_ in range(min(2, rounds))]
        reduced: list[int] = []
        for round_ in range(rounds):
            memory.await_phase(brought[round_])
            reduced.append(reduce(round_))
            if round_ + 2 < rounds:
                brought.append(bring(round_ + 2))
            if round_ > 0:
                memory.await_phase(reduced[round_ - 1])
                if fetch:
                    take(round_ - 1)
        if rounds:
            memory.await_phase(reduced[-1])
            if fetch:
                take(rounds - 1)
        self._rounds += rounds


_PERSONAL: Final = ("scatter", "all_to_all")


def _length(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
