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

from lockstep import faults
from lockstep.comm.compressed_sum import run_on_current_stream
from lockstep.comm.shard_sum import Scale, ShardSum, SumBuffers
from lockstep.comm.tree_order import Subtree, TreeAccumulator

SMALLEST_NORM: Final = 1e-30  # of a column that counts


class Factors(NamedTuple):
    """The approximation of a matrix: left @ right.T."""

    left: Tensor
    right: Tensor


@dataclass
class LowRankBuffers:
    """Memory of one sum.

    matrices     of each shard of this worker
    rest         of each shard: all that is sent as it is, flat
    total        of the matrices, and of the rest, where the result is written
    projections  from which the columns of the first product are made: one for each matrix
    factors      the result: of each matrix; set by `LowRankSum.run`
    """

    matrices: list[list[Tensor]]
    rest: list[Tensor]
    total: list[Tensor]
    total_rest: Tensor
    lefts: SumBuffers  # all P of a shard in one row, and then the rest
    rights: SumBuffers
    shards: Sequence[int] = ()
    projections: Sequence[Tensor] = ()
    scale: Scale = field(default=lambda: 1.0)
    factors: list[Factors] = field(default_factory=list)
    sent: Any = None
    started_s: float = 0.0

    @property
    def sent_bytes(self) -> int:
        return self.lefts.rows.nbytes + self.rights.rows.nbytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of the products."""
        return self.sent_bytes


class LowRankSum:
    """Sums over all shards of a global batch, as matrices of low rank. See Note [Low rank]."""

    def __init__(self, sum_: ShardSum, rank: int) -> None:
        self._sum, self._rank = sum_, rank

    def allocate(
        self, matrices: list[list[Tensor]], rest: list[Tensor], total: list[Tensor], total_rest: Tensor
    ) -> LowRankBuffers:
        """Allocate the buffers of a sum of these matrices and flat tensors. See `LowRankBuffers`."""
        left = sum(self._rank * len(one) for one in total) + total_rest.numel()
        right = sum(self._rank * one.shape[1] for one in total)
        lefts, rights = (self._sum.allocate(max(numel, 1), torch.float32) for numel in (left, right))
        return LowRankBuffers(matrices, rest, total, total_rest, lefts, rights)

    def run(self, buffers: LowRankBuffers) -> Tensor:
        """Compute the sum in a job of `ShardSum.submit`; all workers call it together. Returns the rest."""
        written = [*buffers.total, buffers.total_rest, buffers.lefts.rows, buffers.rights.rows]
        run_on_current_stream(written, lambda: self._run(buffers))
        return buffers.total_rest

    def _run(self, buffers: LowRankBuffers) -> None:
        projections = [orthonormal(one) for one in buffers.projections]
        widths = [len(one) for one in buffers.total]

        def write_lefts(row: Tensor, n: int) -> None:
            for matrix, columns, out in zip(buffers.matrices[n], projections, self._cut(row, widths), strict=True):
                torch.mm(matrix, columns, out=out)
            row[row.numel() - buffers.rest[n].numel() :].copy_(buffers.rest[n])

        sums = self._add(buffers, buffers.lefts, write_lefts)
        lefts = [orthonormal(one) for one in self._cut(sums, widths)]
        rest = sums[sum(widths) * self._rank :]
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
        scale = buffers.scale()
        for factors, out in zip(buffers.factors, buffers.total, strict=True):
            torch.mm(factors.left, factors.right.t(), out=out).mul_(scale)
        torch.mul(rest[: len(buffers.total_rest)], scale, out=buffers.total_rest)

    def _add(self, buffers: LowRankBuffers, sums: SumBuffers, write: Callable[[Tensor, int], None]) -> Tensor:
        """Return the sum over all shards of what `write` writes into a row for each shard of this worker."""

        def add(left: Tensor, right: Tensor) -> Tensor:
            return left.add_(right)

        accumulator = TreeAccumulator(self._sum.shards, add)
        for n, shard in enumerate(buffers.shards):
            row = torch.empty(sums.numel, dtype=torch.float32, device=sums.rows.device)
            write(row, n)
            accumulator.push(Subtree(shard, 1), row)
        for row, (_, value) in zip(sums.rows, accumulator.pending, strict=True):
            row[: sums.numel].copy_(value)
        return self._sum.compute(sums)

    def _cut(self, flat: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Return the matrices of these numbers of rows, which are one after the other in `flat`."""
        ends, rank = list(accumulate(widths)), self._rank
        return [
            flat[(end - width) * rank : end * rank].view(width, rank) for end, width in zip(ends, widths, strict=True)
        ]


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, computed from left to right; of columns that depend on others, 0."""
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
