"""The sum over all shards as matrices of low rank (PowerSGD, Vogels et al. 2019), with the same bits on any workers.

Note [Low rank]
The gradient of a weight, a matrix M of n x m, is approximated by P Q^T, with P of n x r and Q of m x r. Both are linear
in M if the other one is given: P = M Q for the Q of the step before, its columns made orthonormal; then Q = M^T P. So
the P of the sum over all shards is the sum of theirs, and the same holds for Q. Each is computed for every shard, and
added along the tree (comm/tree_order.py), as gradients are. Only these sums travel: (n + m) r instead of n m numbers.

What an approximation lacks is added to the gradients of the next step (step/residuals.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lockstep import faults
from lockstep.comm.compressed_sum import run_on_current_stream
from lockstep.comm.error_feedback import FeedbackBuffers, sum_over_shards
from lockstep.comm.shard_sum import ShardSum, SumBuffers

ALIGN: Final = 16  # elements
SMALLEST_NORM: Final = 1e-30  # of a column that counts
LEAST_REDUCTION: Final = 2  # a gradient is compressed if so many times fewer numbers are sent


@dataclass(frozen=True)
class LowRank:
    """The gradient of every weight is sent as a matrix of this rank."""

    rank: int

    def compresses(self, parameter: Tensor) -> bool:
        """Whether the gradient of a parameter is compressed; if not, it is sent as it is."""
        if parameter.dim() < 2 or not parameter.numel() or not parameter.is_floating_point():
            return False
        rows = matrix_rows(parameter)
        return LEAST_REDUCTION * self.rank * (rows + parameter.numel() // rows) <= parameter.numel()

    def describe(self) -> str:
        return f"PowerSGD of rank {self.rank}"


def matrix_rows(parameter: Tensor) -> int:
    """Return the number of rows of the matrix as which a gradient is compressed, in the order of memory."""
    outermost = max(range(parameter.dim()), key=lambda dim: (parameter.stride(dim), -dim))
    return parameter.shape[outermost]


class Factors(NamedTuple):
    """The approximation of a matrix: left @ right.T."""

    left: Tensor
    right: Tensor


@dataclass(kw_only=True)
class LowRankBuffers(FeedbackBuffers):
    """Memory of one sum. What is compressed are matrices.

    total        of each matrix, where the result is written
    lefts        all P of a shard in one row, and then the rest; `rights`: all Q
    projections  from which the columns of the first product are made: one for each matrix
    factors      the result: of each matrix; set by `LowRankSum.run`
    """

    total: list[Tensor]
    lefts: SumBuffers
    rights: SumBuffers
    projections: Sequence[Tensor] = ()
    factors: list[Factors] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        return self.lefts.rows.nbytes + self.rights.rows.nbytes


class LowRankSum:
    """Sums over all shards of a global batch, as matrices of low rank. See Note [Low rank]."""

    def __init__(self, sum_: ShardSum, method: LowRank) -> None:
        self._sum, self._rank = sum_, method.rank

    def allocate(
        self, rows: Tensor, parts: list[list[Tensor]], rest: list[Tensor], total_rest: Tensor, *, total: list[Tensor]
    ) -> LowRankBuffers:
        """Allocate the buffers of a sum of these matrices and flat tensors. See `LowRankBuffers`."""
        left = sum(self._size(len(one)) for one in total) + total_rest.numel()
        right = sum(self._size(one.shape[1]) for one in total)
        lefts, rights = (self._sum.allocate(max(numel, 1), torch.float32) for numel in (left, right))
        return LowRankBuffers(
            rows=rows, parts=parts, rest=rest, total_rest=total_rest, total=total, lefts=lefts, rights=rights
        )

    def buffer_bytes(self, buffers: LowRankBuffers) -> int:
        """Return the memory of the products."""
        return sum(self._sum.buffer_bytes(one, without_result=False) for one in (buffers.lefts, buffers.rights))

    def _size(self, rows: int) -> int:
        """Return the elements of a product with so many rows: the next one begins at a multiple of 64 bytes."""
        return -(-rows * self._rank // ALIGN) * ALIGN

    def run(self, buffers: LowRankBuffers) -> None:
        """Compute the sum in a job of `ShardSum.submit`; all workers call it together."""
        written = [buffers.rows, *buffers.total, buffers.total_rest, buffers.lefts.rows, buffers.rights.rows]
        run_on_current_stream(written, lambda: self._run(buffers))

    def _run(self, buffers: LowRankBuffers) -> None:
        buffers.scale_and_add_residuals()
        projections = [orthonormal(one) for one in buffers.projections]
        widths = [len(one) for one in buffers.total]

        def write_lefts(row: Tensor, n: int) -> None:
            for matrix, columns, out in zip(buffers.parts[n], projections, self._cut(row, widths), strict=True):
                torch.mm(matrix, columns, out=out)
            row[row.numel() - buffers.rest[n].numel() :].copy_(buffers.rest[n])

        sums = sum_over_shards(self._sum, buffers.lefts, buffers.shards, write_lefts)
        lefts = [orthonormal(one) for one in self._cut(sums, widths)]
        rest = sums[sum(map(self._size, widths)) :]
        faults.at("exchange")
        widths = [one.shape[1] for one in buffers.total]

        def write_rights(row: Tensor, n: int) -> None:
            for matrix, columns, out in zip(buffers.parts[n], lefts, self._cut(row, widths), strict=True):
                torch.mm(matrix.t(), columns, out=out)

        if widths:
            sums = sum_over_shards(self._sum, buffers.rights, buffers.shards, write_rights)
        # Copies: the rows are written again in the next step, and the factors are kept.
        buffers.factors = [
            Factors(left, right.clone()) for left, right in zip(lefts, self._cut(sums, widths), strict=True)
        ]
        for factors, out in zip(buffers.factors, buffers.total, strict=True):
            torch.mm(factors.left, factors.right.t(), out=out)
        buffers.total_rest.copy_(rest[: len(buffers.total_rest)])

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
