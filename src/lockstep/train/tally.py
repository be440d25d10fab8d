"""What all workers have to know of a step: one small sum, under way while the last backward pass runs.

Every worker fills in its own fields of a table of zeros, and the tables are added up: so all have the same table. It
holds loss and weight of every shard, who asks to stop or has run out of data, how large everybody's batch is and
whether it ends an epoch, and which buffers changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.exact import ShardSum
from lockstep.data.batches import Batch

LOSS, WEIGHT = 0, 1  # of a shard
STOP, ENDED, SAMPLES, ENDS_EPOCH = 0, 1, 2, 3  # of a worker


@dataclass(frozen=True)
class Outcome:
    """Of one step, the same on all workers."""

    loss_sum: float
    weight: float
    bad_shards: list[int]  # whose loss is not a finite number
    bad_weights: dict[int, float]  # by shard: negative, or not a finite number
    stop: list[int]  # ranks that ask to stop
    ended: list[int]  # ranks that have no more data
    samples: list[int]  # of the global batch, as each rank has it
    ends_epoch: list[bool]  # as each rank has it
    changed: Tensor  # [shard, buffer]

    @property
    def loss(self) -> float:
        """The mean over the global batch."""
        return self.loss_sum / self.weight if self.weight else math.nan


class Tally:
    """The table of one step."""

    def __init__(self, sum_: ShardSum, *, buffers: int, loss_scale: float = 1.0) -> None:
        shards, workers = sum_.shards, sum_.size
        self._sum, self._rank = sum_, sum_.group.rank()
        self._sizes = [shards * 2, workers * 4, shards * buffers]
        self._table = torch.zeros(sum(self._sizes), dtype=torch.float64, device=sum_.device)
        by_shard, by_rank, changed = torch.split(self._table, self._sizes)
        self._by_shard = by_shard.view(shards, 2)
        self._by_rank = by_rank.view(workers, 4)
        self._changed = changed.view(shards, buffers)
        self._noted: list[tuple[int, Tensor, float | Tensor]] = []
        self._pending: Any = None
        self._loss_scale = loss_scale

    def note(self, shard: int, loss: Tensor, weight: float | Tensor, changed: list[bool]) -> None:
        self._noted.append((shard, loss.detach(), weight))
        if any(changed):
            self._changed[shard] = torch.tensor(changed, dtype=torch.float64)

    def send(self, batch: Batch | None, *, stop: bool = False) -> None:
        """`stop`: we ask everybody to end here. No batch: we have no more data."""
        if self._noted:
            shards = [shard for shard, _, _ in self._noted]
            self._by_shard[shards, LOSS] += torch.stack([loss for _, loss, _ in self._noted]).double()
            self._by_shard[shards, WEIGHT] += self._column([weight for _, _, weight in self._noted])
        samples, ends_epoch = (batch.count, batch.ends_epoch) if batch is not None else (0, False)
        self._by_rank[self._rank] = torch.tensor([stop, batch is None, samples, ends_epoch], dtype=torch.float64)
        self._pending = self._sum.add_up(self._table)

    def _column(self, values: Sequence[Any]) -> Tensor:
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack([torch.as_tensor(value, device=self._table.device).double() for value in values])
        return torch.tensor(values, dtype=torch.float64).to(self._table.device)

    def scale(self) -> float | Tensor:
        """What the sum of gradients is multiplied by. To be asked for when the table has come.

        A GPU is not waited for: there it is a tensor.
        """
        weight = self._by_shard[:, WEIGHT].sum() * self._loss_scale
        if self._table.is_cuda:
            return weight.reciprocal().float()
        total = float(weight)
        return 1.0 / total if total else math.nan

    def outcome(self) -> Outcome:
        """Wait for the table, and read it."""
        self._sum.wait(self._pending, "the sum of losses and weights")
        table = self._table.cpu()
        by_shard, by_rank, changed = torch.split(table, self._sizes)
        by_shard, by_rank = by_shard.view(self._by_shard.shape), by_rank.view(self._by_rank.shape)
        weights: list[float] = by_shard[:, WEIGHT].tolist()
        return Outcome(
            loss_sum=float(by_shard[:, LOSS].sum()),
            weight=float(by_shard[:, WEIGHT].sum()),
            bad_shards=[s for s, loss in enumerate(by_shard[:, LOSS].tolist()) if not math.isfinite(loss)],
            bad_weights={s: weight for s, weight in enumerate(weights) if not 0 <= weight < math.inf},
            stop=_who(by_rank[:, STOP]),
            ended=_who(by_rank[:, ENDED]),
            samples=[int(count) for count in by_rank[:, SAMPLES].tolist()],
            ends_epoch=[bool(ends) for ends in by_rank[:, ENDS_EPOCH].tolist()],
            changed=changed.view(self._changed.shape),
        )


def _who(votes: Tensor) -> list[int]:
    return [rank for rank, vote in enumerate(votes.tolist()) if vote]
