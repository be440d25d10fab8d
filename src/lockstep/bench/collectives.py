"""The collectives that `lockstep bench comm` times: their tensors, the call, and the expected result.

The size of a collective is that of the whole vector: what every worker has before a reduce-scatter and after an
all-gather. Elements are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError

ELEMENT_BYTES = 4
PERIOD = 251  # period of the contents; a prime, so that a piece in the wrong place is detected
PIECE = 2**20  # elements that are filled or compared at a time

# The names since torch 2.13; the old ones warn at every call, which takes time.
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Op(StrEnum):
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Case:
    """One measurement: a collective, a number of workers and a size."""

    op: Op
    workers: int
    size_bytes: int  # as requested; see `whole`

    @property
    def share(self) -> int:
        """Elements of one worker where the vector is split; rounded up, so that all workers have as many."""
        return -(-self.size_bytes // (ELEMENT_BYTES * self.workers))

    @property
    def whole(self) -> int:
        """Elements of the whole vector."""
        if self.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
            return self.share * self.workers
        return self.size_bytes // ELEMENT_BYTES

    @property
    def sent(self) -> int:
        return self.share if self.op is Op.ALL_GATHER else self.whole

    @property
    def received(self) -> int:
        return self.share if self.op is Op.REDUCE_SCATTER else self.whole

    @property
    def in_place(self) -> bool:
        return self.op in (Op.ALL_REDUCE, Op.BROADCAST)

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.op}, {size_text(self.size_bytes)}"


@dataclass(frozen=True)
class CommBuffers:
    """The tensors of one worker for one case."""

    sent: Tensor
    received: Tensor  # the same tensor as `sent` where the collective works in place


def make_buffers(case: Case, allocate: Callable[[int], Tensor]) -> CommBuffers:
    sent = allocate(case.sent)
    return CommBuffers(sent, sent if case.in_place else allocate(case.received))


def make_call(case: Case, buffers: CommBuffers, group: Any) -> Callable[[], object]:
    """Return a function that runs one collective on these tensors, and waits for it as a user does."""
    sent, received = buffers.sent, buffers.received
    calls: dict[Op, Callable[[], object]] = {
        Op.ALL_REDUCE: lambda: dist.all_reduce(sent, group=group),
        Op.REDUCE_SCATTER: lambda: REDUCE_SCATTER(received, sent, group=group),
        Op.ALL_GATHER: lambda: ALL_GATHER(received, sent, group=group),
        Op.BROADCAST: lambda: dist.broadcast(sent, src=0, group=group),
    }
    return calls[case.op]


# ------------------------------------------------------------------------------------------------------ known contents


@cache
def counted(device: torch.device) -> Tensor:
    """0, 1, ... PERIOD - 1, 0, 1, ...; long enough for PIECE elements from any position in the period."""
    return torch.arange(PIECE + PERIOD, device=device).remainder(PERIOD).float()


def contents(rank: int, first: int, like: Tensor) -> Tensor:
    """The elements that a worker sends from position `first` on. Small integers, which fp32 adds without rounding."""
    start = first % PERIOD
    return counted(like.device)[start : start + like.numel()] + rank


def expected(case: Case, rank: int, first: int, like: Tensor) -> Tensor:
    """The elements that a worker must receive from position `first` on, up to the end of that share at most."""
    if case.op is Op.BROADCAST:
        return contents(0, first, like)
    if case.op is Op.ALL_GATHER:
        return contents(first // case.share, first % case.share, like)
    before = rank * case.share if case.op is Op.REDUCE_SCATTER else 0
    return case.workers * contents(0, before + first, like) + case.workers * (case.workers - 1) // 2


def pieces(tensor: Tensor, *, share: int) -> Iterator[tuple[int, Tensor]]:
    """(first position, piece) of all pieces; short, so that checks take little memory, and none across two shares."""
    for start in range(0, tensor.numel(), share):
        end = min(start + share, tensor.numel())
        for first in range(start, end, PIECE):
            yield first, tensor[first : min(first + PIECE, end)]


def fill(buffers: CommBuffers, rank: int) -> None:
    if buffers.received is not buffers.sent:
        buffers.received.fill_(-1)
    for first, piece in pieces(buffers.sent, share=buffers.sent.numel()):
        piece.copy_(contents(rank, first, piece))


def check(case: Case, buffers: CommBuffers, rank: int, *, arm: str) -> None:
    """Raise LockstepError if a result is wrong: the time of a wrong result does not matter."""
    for first, piece in pieces(buffers.received, share=case.share):
        right = expected(case, rank, first, piece)
        if torch.equal(piece, right):
            continue
        wrong = int((piece != right).nonzero()[0, 0])
        raise LockstepError(
            f"{case}: wrong result on {arm}: worker {rank} has {piece[wrong].item():g} at position "
            f"{first + wrong}, and {right[wrong].item():g} is right; no time was taken"
        )


# --------------------------------------------------------------------------------------------------------------- sizes

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Parse `4`, `4B`, `4KiB`, `25MiB` or `1GiB` to bytes. Raises ValueError."""
    number = text.strip().rstrip("BbKkMmGgIi ")
    factor = UNITS.get(text.strip()[len(number) :].strip().lower())
    if not (number.isascii() and number.isdecimal()) or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 4, 4KiB, 25MiB or 1GiB")
    size_bytes = int(number) * factor
    if size_bytes == 0 or size_bytes % ELEMENT_BYTES:
        raise ValueError(f"{text!r} is not a positive multiple of {ELEMENT_BYTES} bytes, and elements are fp32")
    return size_bytes


def size_text(size_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"
