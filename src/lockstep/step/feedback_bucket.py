"""Buckets whose gradients are compressed with error feedback: what is not sent is added to those of the next step."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.compressed_sum import Scale
from lockstep.comm.error_feedback import FeedbackBuffers
from lockstep.comm.low_rank_sum import Factors, LowRank, LowRankBuffers, LowRankSum, matrix_rows
from lockstep.comm.shard_sum import ShardSum
from lockstep.comm.top_k_sum import TopK, TopKBuffers, TopKSum
from lockstep.ddp.replica import Leaf
from lockstep.step.residuals import Residuals
from lockstep.step.shard_bucket import ALIGN_BYTES, USED, CompressedBucket

# The parameters whose gradients were compressed in this step and used by a shard, by name; of PowerSGD with the factors
# that were sent, of top-k with None.
CompressedGradients = Mapping[str, Factors | None]


class FeedbackBucket(CompressedBucket):
    """Gradients of which parts are sent (step/residuals.py); small ones, and vectors, are sent as they are.

    A row holds the gradients of a shard, to which the residuals of earlier steps are added when it is sent, and then a
    mark for each that was used. It is read once more when the step is applied.
    """

    buffers: LowRankBuffers | TopKBuffers
    _compressed_sum: Any  # LowRankSum or TopKSum, whichever fits the buffers

    def __init__(self, indices: Sequence[int], leaves: Sequence[Leaf], sum_: ShardSum, residuals: Residuals) -> None:
        compresses = residuals.method.compresses
        indices = sorted(indices, key=lambda i: not compresses(leaves[i].parameter))  # the rest last
        align, count = ALIGN_BYTES // torch.float32.itemsize, len(indices)
        super().__init__(indices, leaves, align)
        self._sum, self._shards, self._residuals = sum_, sum_.own_shards, residuals
        width = self.numel + -(-count // align) * align
        self._memory = torch.zeros(len(self._shards) + 1, width, dtype=torch.float32, device=self.parameters[0].device)
        self.rows, self._total = list(self._memory[:-1]), self._memory[-1]
        self.views, self._total_views = [self.cut(row) for row in self.rows], self.cut(self._total)
        self._compressed = [leaf for leaf in self.leaves if compresses(leaf.parameter)]
        self._rest_at = self.offsets[len(self._compressed)] if len(self._compressed) < count else self.numel
        self._marks = self._total[self.numel : self.numel + count]

    def _parts_of(self, row: Tensor) -> list[Tensor]:
        """Return the compressed gradients of a row, as matrices in the order of memory."""
        pairs = zip((leaf.parameter for leaf in self._compressed), self.offsets, strict=False)
        return [row[at : at + p.numel()].view(matrix_rows(p), -1) for p, at in pairs]

    def start(self, step: int, shards: Sequence[int], scale: Scale) -> None:
        buffers, names = self.buffers, [leaf.name for leaf in self._compressed]
        buffers.shards, buffers.scale = shards, scale
        marks = buffers.rows[:, self.numel : self.numel + len(self.used)]
        marks.fill_(USED) if all(self.used) else marks.copy_(torch.tensor(self.used) * USED)
        buffers.residuals = [[self._residuals.find(shard, name) for name in names] for shard in shards]
        buffers.started_s = time.monotonic()
        buffers.sent = self._sum.submit(lambda: self._run(buffers))

    def _run(self, buffers: FeedbackBuffers) -> Tensor:
        self._compressed_sum.run(buffers)
        return buffers.total_rest

    @property
    def sent_bytes(self) -> int:
        return self.buffers.sent_bytes

    @property
    def buffer_bytes(self) -> int:
        is_result = self.parameters[0].dtype == torch.float32
        of_rows: int = self._memory[int(is_result) :].nbytes
        return of_rows + int(self._compressed_sum.buffer_bytes(self.buffers))

    def result(self, where: str) -> tuple[list[Tensor], Tensor]:
        self._sum.wait(self.buffers.sent, where)
        return self._total_views, self._marks

    def _pieces(self) -> tuple[Tensor, list[list[Tensor]], list[Tensor], Tensor]:
        """Return the rows, what of each is compressed, the rest of each, and where the sum of the rest is written."""
        parts = [self._parts_of(row) for row in self.rows]
        return self._memory[:-1], parts, [row[self._rest_at :] for row in self.rows], self._total[self._rest_at :]

    @property
    def _used_names(self) -> list[str]:
        return [leaf.name for leaf in self._compressed if leaf.parameter.grad is not None]

    @abstractmethod
    def compressed_gradients(self) -> CompressedGradients:
        """Return which gradients were compressed in this step and used by a shard."""

    @abstractmethod
    def keep_residuals(self, compressed_gradients: CompressedGradients) -> None:
        """Keep what was not sent of these gradients, in the shards of this worker, for the next step."""

    def _by_shard(self, number: int) -> dict[int, Tensor]:
        """Return what was compressed of the parameter of this number."""
        return {shard: parts[number] for shard, parts in zip(self._shards, self.buffers.parts, strict=True)}


class LowRankBucket(FeedbackBucket):
    """Gradients that are sent as matrices of low rank (comm/low_rank_sum.py)."""

    buffers: LowRankBuffers

    def __init__(
        self, indices: Sequence[int], leaves: Sequence[Leaf], sum_: ShardSum, residuals: Residuals, method: LowRank
    ) -> None:
        super().__init__(indices, leaves, sum_, residuals)
        self._rank, self._compressed_sum = method.rank, LowRankSum(sum_, method)
        self.buffers = self._compressed_sum.allocate(*self._pieces(), total=self._parts_of(self._total))

    def start(self, step: int, shards: Sequence[int], scale: Scale) -> None:
        columns = [
            (leaf.name, matrix.shape[1]) for leaf, matrix in zip(self._compressed, self.buffers.total, strict=True)
        ]
        self.buffers.projections = [self._residuals.projection(*pair, self._rank) for pair in columns]
        super().start(step, shards, scale)

    def compressed_gradients(self) -> CompressedGradients:
        found = {leaf.name: factors for leaf, factors in zip(self._compressed, self.buffers.factors, strict=False)}
        return {name: found[name] for name in self._used_names if name in found}

    def keep_residuals(self, compressed_gradients: CompressedGradients) -> None:
        for number, leaf in enumerate(self._compressed):
            factors = compressed_gradients.get(leaf.name)
            if factors is not None:
                self._residuals.keep_low_rank(leaf.name, self._by_shard(number), factors)


class TopKBucket(FeedbackBucket):
    """Gradients of which the largest elements are sent (comm/top_k_sum.py)."""

    buffers: TopKBuffers

    def __init__(
        self, indices: Sequence[int], leaves: Sequence[Leaf], sum_: ShardSum, residuals: Residuals, method: TopK
    ) -> None:
        super().__init__(indices, leaves, sum_, residuals)
        self._compressed_sum = TopKSum(sum_, method)
        starts, total = self.offsets[: len(self._compressed)], self._total[: self._rest_at]
        self.buffers = self._compressed_sum.allocate(*self._pieces(), starts=starts, total=total)

    def compressed_gradients(self) -> CompressedGradients:
        return dict.fromkeys(self._used_names)

    def keep_residuals(self, compressed_gradients: CompressedGradients) -> None:
        for row, (positions, _) in zip(self.rows, self.buffers.entries, strict=True):
            row.index_fill_(0, positions.long(), 0.0)  # what was sent
        for number, leaf in enumerate(self._compressed):
            if leaf.name in compressed_gradients:
                self._residuals.keep(leaf.name, self._by_shard(number))


def make_feedback_bucket(
    indices: Sequence[int], leaves: Sequence[Leaf], sum_: ShardSum, residuals: Residuals
) -> FeedbackBucket:
    """Return a bucket whose gradients are compressed by the method of these residuals."""
    if isinstance(residuals.method, LowRank):
        return LowRankBucket(indices, leaves, sum_, residuals, residuals.method)
    return TopKBucket(indices, leaves, sum_, residuals, residuals.method)
