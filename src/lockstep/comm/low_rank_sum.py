"""The sum over all shards as matrices of low rank (PowerSGD, Vogels et al. 2019), with the same bits on any workers.

Note [Low rank]
The gradient of a weight, a matrix M of n x m, is approximated by P Q^T, with P of n x r and Q of m x r. Both are linear
in M if the other one is given: P = M Q for the Q of the step before, its columns made orthonormal; then Q = M^T P. So
the P of the sum over all shards is the sum of theirs, and the same holds for Q. Each is computed for every shard, and
added along the tree (comm/tree_order.py), as gradients are. Only these sums travel: (n + m) r instead of n m numbers.

What an approximation lacks is added to the gradients of the next step (step/residuals.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lockstep import _torch, faults
from lockstep.comm.compressed_sum import run_on_current_stream
from lockstep.comm.shard_sum import Scale, ShardSum, SumBuffers
from lockstep.comm.tree_order import Subtree, TreeAccumulator

ALIGN: Final = 16  # elements
SMALLEST_NORM: Final = 1e-30  # of a column that counts


class Factors(NamedTuple):
    """The approximation of a matrix: left @ right.T."""

    left: Tensor
    right: Tensor


@dataclass
class LowRankBuffers:
    """Memory of one sum.

    rows         the gradients of each shard of this worker. `LowRankSum.run` multiplies them by the scale, and adds
                 the residuals
    matrices     those that are compressed, for each shard; parts of `rows`, as are these:
    rest         for each shard, all that is sent as it is, flat
    total        of the matrices, and of the rest, where the result is written
    residuals    what is added to the matrices of each shard; None: nothing
    projections  from which the columns of the first product are made: one for each matrix
    scale        returns by what gradients are multiplied: the weights of global batches differ, and residuals are kept
    factors      the result: of each matrix; set by `LowRankSum.run`
    """

    rows: Tensor  # [shards, numel]
    matrices: list[list[Tensor]]
    rest: list[Tensor]
    total: list[Tensor]
    total_rest: Tensor
    lefts: SumBuffers  # all P of a shard in one row, and then the rest
    rights: SumBuffers
    shards: Sequence[int] = ()
    residuals: Sequence[Sequence[Tensor | None]] = ()
    projections: Sequence[Tensor] = ()
    scale: Scale = field(default=lambda: 1.0)
    factors: list[Factors] = field(default_factory=list)
    sent: Any = None
    started_s: float = 0.0

    @property
    def sent_bytes(self) -> int:
        return self.lefts.rows.nbytes + self.rights.rows.nbytes


class LowRankSum:
    """Sums over all shards of a global batch, as matrices of low rank. See Note [Low rank]."""

    def __init__(self, sum_: ShardSum, rank: int) -> None:
        self._sum, self._rank = sum_, rank

    def allocate(
        self, rows: Tensor, matrices: list[list[Tensor]], rest: list[Tensor], total: list[Tensor], total_rest: Tensor
    ) -> LowRankBuffers:
        """Allocate the buffers of a sum of these matrices and flat tensors. See `LowRankBuffers`."""
        left = sum(self._size(len(one)) for one in total) + total_rest.numel()
        right = sum(self._size(one.shape[1]) for one in total)
        lefts, rights = (self._sum.allocate(max(numel, 1), torch.float32) for numel in (left, right))
        return LowRankBuffers(rows, matrices, rest, total, total_rest, lefts, rights)

    def buffer_bytes(self, buffers: LowRankBuffers) -> int:
        """Return the memory of the products."""
        return sum(self._sum.buffer_bytes(one, without_result=False) for one in (buffers.lefts, buffers.rights))

    def _size(self, rows: int) -> int:
        """Return the elements of a product with so many rows: the next one begins at a multiple of 64 bytes."""
        return -(-rows * self._rank // ALIGN) * ALIGN

    def run(self, buffers: LowRankBuffers) -> Tensor:
        """Compute the sum in a job of `ShardSum.submit`; all workers call it together. Returns the rest."""
        written = [buffers.rows, *buffers.total, buffers.total_rest, buffers.lefts.rows, buffers.rights.rows]
        run_on_current_stream(written, lambda: self._run(buffers))
        return buffers.total_rest

    def _run(self, buffers: LowRankBuffers) -> None:
        buffers.rows.mul_(buffers.scale())
        for matrices, residuals in zip(buffers.matrices, buffers.residuals, strict=True):
            both = [(m.view(-1), one) for m, one in zip(matrices, residuals, strict=True) if one is not None]
            if both:
                _torch.foreach_add_([matrix for matrix, _ in both], [residual for _, residual in both])
        projections = [orthonormal(one) for one in buffers.projections]
        widths = [len(one) for one in buffers.total]

        def write_lefts(row: Tensor, n: int) -> None:
            for matrix, columns, out in zip(buffers.matrices[n], projections, self._cut(row, widths), strict=True):
                torch.mm(matrix, columns, out=out)
            row[row.numel() - buffers.rest[n].numel() :].copy_(buffers.rest[n])

        sums = self._add(buffers, buffers.lefts, write_lefts)
        lefts = [orthonormal(one) for one in self._cut(sums, widths)]
        rest = sums[sum(map(self._size, widths)) :]
        faults.at("exchange")
        widths = [one.shape[1] for one in buffers.total]

        def write_rights(row: Tensor, n: int) -> None:
            for matrix, columns, out in zip(buffers.matrices[n], lefts, self._cut(row, widths), strict=True):
                torch.mm(matrix.t(), columns, out=out)

        sums = self._add(buffers, buffers.rights, write_rights) if widths else sums
        # Copies: the rows are written again in the next step, and the factors are kept.
        buffers.factors = [
            Factors(left, right.clone()) for left, right in zip(lefts, self._cut(sums, widths), strict=True)
        ]
        for factors, out in zip(buffers.factors, buffers.total, strict=True):
            torch.mm(factors.left, factors.right.t(), out=out)
        buffers.total_rest.copy_(rest[: len(buffers.total_rest)])

    def _add(self, buffers: LowRankBuffers, sums: SumBuffers, write: Callable[[Tensor, int], None]) -> Tensor:
        """Return the sum over all shards of what `write` writes into a row for each shard of this worker."""

        def add(left: Tensor, right: Tensor) -> Tensor:
            return left.add_(right)

        accumulator = TreeAccumulator(self._sum.shards, add)
        for n, shard in enumerate(buffers.shards):
            row = torch.zeros(sums.numel, dtype=torch.float32, device=sums.rows.device)
            write(row, n)
            accumulator.push(Subtree(shard, 1), row)
        for row, (_, value) in zip(sums.rows, accumulator.pending, strict=True):
            row[: sums.numel].copy_(value)
        return self._sum.compute(sums)

    def _cut(self, flat: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Return the matrices of these numbers of rows, which are one after the other in `flat`."""
        ends = accumulate(map(self._size, widths))
        starts = [end - self._size(width) for end, width in zip(ends, widths, strict=True)]
        pairs = zip(starts, widths, strict=True)
        return [flat[at : at + width * self._rank].view(width, self._rank) for at, width in pairs]


def orthonormal(columns: Tensor) -> Tensor:
    """Return the columns made orthonormal, from left to right; a column of zeros stays one."""
    done = columns.clone()
    for n in range(done.shape[1]):
        column = done[:, n]
        for _ in range(2):  # once more, for the digits that were lost where a column was nearly in the span
            if n:
                before = done[:, :n]
                column.sub_(before @ (before.t() @ column))
        norm = column.norm()
        column.mul_(torch.where(norm <= SMALLEST_NORM, 0.0, 1.0 / norm))  # NaN if it is not finite
    return done
