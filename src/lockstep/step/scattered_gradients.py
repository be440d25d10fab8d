"""Gradients that are reduce-scattered: each worker gets the sums of those elements only whose weights it updates.

Used with a sharded optimiser between hosts, where it saves half of the bytes. The parameters have no `.grad` then.

Note [A step that a worker has missed]
In an elastic run a worker may have applied a step when another one is lost, while a third one has not. No worker
could send that one the gradients, since none has all of them. But it has its own: a step is applied only after its
gradient was checked, by a sum over all workers, which each of them begins when its gradients have arrived. So a worker
that has missed a step applies it with the gradients that it has kept, and is told the rest (state_transfer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.shard_sum import ShardSum
from lockstep.ddp.optimizer_cells import PartGradients, Piece
from lockstep.ddp.replica import Leaf
from lockstep.ddp.sharded_state import ShardedState
from lockstep.errors import DivergenceError


@final
class ScatteredGradients:
    """The gradients of this worker's parts of the parameters, in one step."""

    def __init__(self, state: ShardedState, leaves: Sequence[Leaf], sum_: ShardSum) -> None:
        self._state, self._leaves, self._sum = state, list(leaves), sum_
        self.buddies = state.buddies
        rank = sum_.group.rank()
        # Whose parts this worker updates: its own, and those of which it has a copy.
        self._updated = [rank] if self.buddies is None else [rank, self.buddies.index(rank)]
        self.parts: PartGradients = {}  # without those of parameters that no shard has used
        self.step: int | None = None  # of which these are the gradients; None: they have not all arrived
        self._squares: dict[Tensor, float] = {}  # the squared norms of this worker's own parts of parameters

    def clear(self) -> None:
        """Drop the gradients of the step before."""
        self.step = None
        self.parts.clear()
        self._squares.clear()

    def _places(self, parameters: Sequence[Tensor], align: int, rank: int) -> Iterator[tuple[int, Piece, int]]:
        """Yield the pieces that a worker owns: the number of the parameter, the piece, and its size in a section."""
        for number, parameter in enumerate(parameters):
            for piece in self._state.pieces[parameter]:
                if piece.owner == rank:
                    yield number, piece, -(-piece.stop // align) * align - piece.start

    def sections(self, parameters: Sequence[Tensor], offsets: Sequence[int], align: int) -> list[list[range]]:
        """Return, by rank, which elements of a bucket belong to the parts of each worker.

        offsets  of the parameters in the bucket
        align    every piece begins at a multiple of so many elements
        """
        return [
            [
                range(offsets[number] + piece.start, offsets[number] + piece.start + size)
                for number, piece, size in self._places(parameters, align, rank)
            ]
            for rank in range(self._sum.size)
        ]

    def keep(self, parameters: Sequence[Tensor], used: Sequence[bool], sections: Sequence[Tensor], align: int) -> None:
        """Keep the gradients of a bucket: of this worker's parts, and of those of which it has copies.

        used  by parameter, whether a shard has used it
        """
        for owner, section in zip(self._updated, sections, strict=True):
            at = 0
            for number, piece, size in self._places(parameters, align, owner):
                if used[number]:
                    parameter, part = parameters[number], section[at : at + piece.numel]
                    self.parts[parameter, piece.start] = part = part.to(parameter.dtype)
                    if section is sections[0] and part.numel():  # now, while the next bucket is on its way
                        square = float(torch.linalg.vector_norm(part)) ** 2
                        self._squares[parameter] = self._squares.get(parameter, 0.0) + square
                at += size

    def parts_of(self, step: int) -> PartGradients:
        """Return the gradients of a step. Raises DivergenceError if they are not here."""
        if self.step != step:
            raise DivergenceError(
                f"this worker has gradients of step {self.step}, and applies step {step}; report this"
            )
        return self.parts

    def norm(self) -> tuple[float, str | None]:
        """Return the norm of the gradient of all workers, and the name of a parameter with an element that is not
        finite. A collective call.

        It is added up by parts, so its last digits depend on the workers: it must not be used to clip gradients.
        """
        squares = torch.tensor([self._squares.get(leaf.parameter, 0.0) for leaf in self._leaves], dtype=torch.float64)
        self._sum.wait_for_values(self._sum.start_small_sum(squares), "the norm of the gradient")
        bad = [leaf.name for leaf, square in zip(self._leaves, squares.tolist(), strict=True) if not square < torch.inf]
        return float(squares.sum().sqrt()), bad[0] if bad else None
