"""Gradients that are reduce-scattered: each worker gets the sums of those elements only whose weights it updates.

Used with a sharded optimiser between hosts, where it saves half of the bytes. The parameters have no `.grad` then.
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


@final
class ScatteredGradients:
    """The gradients of this worker's parts of the parameters, in one step."""

    def __init__(self, state: ShardedState, leaves: Sequence[Leaf], sum_: ShardSum) -> None:
        self._state, self._leaves, self._sum = state, list(leaves), sum_
        self._rank = sum_.group.rank()
        self.parts: PartGradients = {}  # without those of parameters that no shard has used
        self._squares: dict[Tensor, float] = {}  # the squared norms of this worker's own parts of parameters

    def clear(self) -> None:
        """Drop the gradients of the step before."""
        self.parts.clear()
        self._squares.clear()

    def _places(self, parameters: Sequence[Tensor], align: int, rank: int) -> Iterator[tuple[int, Piece, int]]:
        """Yield the pieces whose gradients a worker needs: the number of the parameter, the piece, and its size."""
        for number, parameter in enumerate(parameters):
            for piece in self._state.pieces_needed(parameter, rank):
                yield number, piece, -(-piece.stop // align) * align - piece.start

    def sections(self, parameters: Sequence[Tensor], offsets: Sequence[int], align: int) -> list[list[range]]:
        """Return, by rank, which elements of a bucket each worker needs.

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

    def keep(self, parameters: Sequence[Tensor], used: Sequence[bool], section: Tensor, align: int) -> None:
        """Keep the gradients of a bucket, of which `section` has those that this worker needs."""
        at = 0
        for number, piece, size in self._places(parameters, align, self._rank):
            if used[number]:
                parameter, part = parameters[number], section[at : at + piece.numel]
                self.parts[parameter, piece.start] = part = part.to(parameter.dtype)
                if piece.owner == self._rank and part.numel():  # now, while the next bucket is on its way
                    square = float(torch.linalg.vector_norm(part)) ** 2
                    self._squares[parameter] = self._squares.get(parameter, 0.0) + square
            at += size

    def norm(self) -> tuple[float, str | None]:
        """Return the norm of the gradient of all workers, and the name of a parameter with an element that is not
        finite. A collective call.

        It is added up by parts, so its last digits depend on the workers: it must not be used to clip gradients.
        """
        squares = torch.tensor([self._squares.get(leaf.parameter, 0.0) for leaf in self._leaves], dtype=torch.float64)
        self._sum.wait_for_values(self._sum.start_small_sum(squares), "the norm of the gradient")
        bad = [leaf.name for leaf, square in zip(self._leaves, squares.tolist(), strict=True) if not square < torch.inf]
        return float(squares.sum().sqrt()), bad[0] if bad else None
