"""Shared parts of the two sums of gradients with error feedback: by low rank, and by top-k.

What the compression of a gradient lacks is kept (step/residuals.py), and added to that of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.comm.compressed_sum import Scale
from lockstep.comm.shard_sum import ShardSum, SumBuffers
from lockstep.comm.tree_order import Subtree, TreeAccumulator, one_by_one


@dataclass(kw_only=True)
class FeedbackBuffers:
    """Memory of one sum.

    rows        the gradients of each shard of this worker. The sum multiplies them by the scale, and adds the residuals
    parts       those that are compressed, for each shard; parts of `rows`, as is
    rest        for each shard, all that is sent as it is, flat
    total_rest  where the sum of the rest is written
    shards      the numbers of this worker's shards
    residuals   what is added to the parts of each shard; None: nothing
    scale       returns by what gradients are multiplied: the weights of global batches differ, and residuals are kept
    """

    rows: Tensor  # [shards, numel]
    parts: list[list[Tensor]]
    rest: list[Tensor]
    total_rest: Tensor
    shards: Sequence[int] = ()
    residuals: Sequence[Sequence[Tensor | None]] = ()
    scale: Scale = field(default=lambda: 1.0)
    sent: Any = None
    started_s: float = 0.0

    def scale_and_add_residuals(self) -> None:
        self.rows.mul_(self.scale())
        for parts, residuals in zip(self.parts, self.residuals, strict=True):
            both = [(part.view(-1), one) for part, one in zip(parts, residuals, strict=True) if one is not None]
            if both:
                _torch.foreach_add_([part for part, _ in both], [residual for _, residual in both])


def sum_over_shards(
    sum_: ShardSum, sums: SumBuffers, shards: Sequence[int], write: Callable[[Tensor, int], None]
) -> Tensor:
    """Return the sum over all shards of what `write` writes into a row for each of `shards`, those of this worker.

    Part of a job of `ShardSum.submit`; all workers call it together.
    """

    def add(left: Tensor, right: Tensor) -> Tensor:
        return left.add_(right)

    accumulator = TreeAccumulator(sum_.shards, one_by_one(add))
    for n, shard in enumerate(shards):
        row = torch.zeros(sums.numel, dtype=torch.float32, device=sums.rows.device)
        write(row, n)
        accumulator.push(Subtree(shard, 1), row)
    for row, (_, value) in zip(sums.rows, accumulator.pending, strict=True):
        row[: sums.numel].copy_(value)
    return sum_.compute(sums)
