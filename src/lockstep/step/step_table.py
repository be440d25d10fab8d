"""What all workers have to know of a step: one small all-reduce, which runs during the last backward pass.

Every worker fills in its own fields of a table of zeros, and the tables are added up, so all workers have the same
table. It holds the loss and weight of every shard; for every worker the number of its step, whether it asks to stop or
has run out of data, the size of its batch, whether that ends an epoch, a digest of its samples, and a report on earlier
steps (step_observer.py); and which buffers changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import agreement
from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch
from lockstep.step.loss_check import ShardLoss
from lockstep.trace.step_observer import NO_REPORT, REPORT_FIELDS

# Columns of a shard. The last two are the fingerprint of its samples, in two halves of 32 bits.
LOSS, WEIGHT, HIGH, LOW = range(4)
# Columns of a worker. Its report takes all the rest.
NUMBER, STOP, ENDED, SAMPLES, ENDS_EPOCH, MOVE, CONTENT_HIGH, CONTENT_LOW, REPORT = range(9)


@dataclass(frozen=True)
class StepOutcome:
    """The sum of all tables of one step; equal on all workers."""

    loss_sum: float
    weight: float
    bad_shards: list[int]  # shards whose loss is not a finite number
    bad_weights: dict[int, float]  # by shard: negative, or not a finite number
    stop: int  # the strongest request of any worker (`Stop`)
    stop_asked_by: list[int]  # ranks that asked to stop
    move: int  # see `StepRequests`
    ended: list[int]  # ranks that have no more data
    numbers: list[int]  # the step that each rank takes
    samples: list[int]  # size of the global batch, as each rank has it
    ends_epoch: list[bool]  # as each rank has it
    content: list[int]  # 64-bit digest of the global batch, by rank; 0 on a rank that did not compute it
    changed: Tensor  # [shard, buffer]
    fingerprint: int  # of all samples of the batch (data/ledger.py)
    reports: list[list[float]]  # by rank, on earlier steps
    metrics: dict[str, tuple[float, float]]  # of the loss function, by name: (sum, weight) over all shards

    @property
    def loss(self) -> float:
        """Mean loss over the global batch."""
        return self.loss_sum / self.weight if self.weight else math.nan


class StepTable:
    """The table of one step: add the shards of this worker, `send` it, and read its `outcome`."""

    def __init__(self, sum_: ShardSum, *, buffers: int, loss_scale: float = 1.0) -> None:
        self._sum, self._rank = sum_, sum_.group.rank()
        self._buffers, self._loss_scale = buffers, loss_scale
        self._added: list[tuple[int, ShardLoss, list[int]]] = []
        self._names: Sequence[str] = ()
        self._shapes: list[tuple[int, int]] = []
        self._table = torch.zeros(0)
        self._pending: Any = None
        self.sent: Any = None  # on a GPU: the event after which the sum was started
        self._scale: float | Tensor | None = None

    def _parts(self, table: Tensor) -> list[Tensor]:
        """[shard, (loss, weight, samples)], [rank, (stop, ended, ...)], [shard, changed buffers], [shard, metrics]"""
        parts = torch.split(table, [math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def add_shard(self, shard: int, loss: ShardLoss, changed: list[int]) -> None:
        """Add what the loss function returned for a shard. `changed`: by buffer, whether the shard changed it."""
        self._added.append((shard, replace(loss, total=loss.total.detach()), changed))

    def weight_of(self, shard: int) -> float | Tensor:
        """Weight of a shard of this worker; 0 if it has no samples."""
        return next((loss.weight for number, loss, _ in self._added if number == shard), 0.0)

    @property
    def metric_names(self) -> list[str] | None:
        """Names of the metrics that the loss function returned; None if this worker had no samples in this step.

        Raises ValueError if they are not the same for all shards.
        """
        names = [sorted(loss.metrics) for _, loss, _ in self._added]
        odd = next((one for one in names if one != names[0]), None)
        if odd is not None:
            raise ValueError(describe_odd_metrics(names[0], odd))
        return names[0] if names else None

    def send(
        self,
        batch: Batch | None,
        *,
        stop: int = 0,
        move: int = 0,
        report: Sequence[float] = NO_REPORT,
        names: Sequence[str] = (),
    ) -> None:
        """Start the sum of the tables.

        batch       None if this worker has no more data
        stop, move  what this worker asks of all workers: see `StepRequests`
        names       names of the metrics; equal on all workers
        """
        shards, self._names = self._sum.shards, names
        by_rank_shape = (self._sum.size, REPORT + REPORT_FIELDS)
        self._shapes = [(shards, 4), by_rank_shape, (shards, self._buffers), (shards, 2 * len(names))]
        # Filled in on the host, which is fast; values that a GPU has computed are added on the device. From memory
        # that is not pinned, the copy to a GPU would wait until everything before it is computed.
        numel, is_pinned = sum(math.prod(shape) for shape in self._shapes), self._sum.device.type == "cuda"
        self._table = torch.zeros(numel, dtype=torch.float64, pin_memory=is_pinned)
        by_shard, by_rank, changed, _ = self._parts(self._table)
        number, samples, ends_epoch = (
            (batch.number, batch.count, batch.ends_epoch) if batch is not None else (0, 0, False)
        )
        for one in batch.shards if batch is not None else ():
            by_shard[one.number, HIGH] = one.samples >> 32
            by_shard[one.number, LOW] = one.samples & 0xFFFFFFFF
        content = batch.content if batch is not None else 0
        mine = [number, stop, batch is None, samples, ends_epoch, move, content >> 32, content & 0xFFFFFFFF, *report]
        by_rank[self._rank] = torch.tensor(mine, dtype=torch.float64)
        for shard, loss, which in self._added:
            if any(which):
                changed[shard] = torch.tensor(which, dtype=torch.float64)
            if not isinstance(loss.weight, Tensor):
                by_shard[shard, WEIGHT] = loss.weight
        self._table = self._table.to(self._sum.device, non_blocking=True)
        by_shard, _, _, metrics = self._parts(self._table)
        for shard, loss, _ in self._added:
            by_shard[shard, LOSS] += loss.total
            if isinstance(loss.weight, Tensor):
                by_shard[shard, WEIGHT] += loss.weight
            for n, value in enumerate(part for name in names for part in loss.metrics[name]):
                metrics[shard, n] += value
        self.sent = torch.cuda.current_stream().record_event() if self._table.is_cuda else None
        self._pending = self._sum.start_small_sum(self._table)

    def scale(self) -> float | Tensor:
        """Return the factor of the sum of gradients. To be called once the table has arrived.

        On a GPU it is a tensor, so that the host does not wait.
        """
        if self._scale is None:
            weight = self._parts(self._table)[0][:, WEIGHT].sum() * self._loss_scale
            if weight.is_cuda:
                self._scale = weight.reciprocal().float()
            else:
                total = float(weight)
                self._scale = 1.0 / total if total else math.nan
        return self._scale

    def outcome(self) -> StepOutcome:
        """Wait for the sum of the tables, and read it."""
        self._sum.wait(self._pending, "the sum of losses and weights")
        with self._sum.on_side_stream(self.sent):
            self._sum.wait(self._pending, "the sum of losses and weights")
            by_shard, by_rank, changed, metrics = self._parts(self._table.cpu())
        weights: list[float] = by_shard[:, WEIGHT].tolist()
        return StepOutcome(
            loss_sum=float(by_shard[:, LOSS].sum()),
            weight=float(by_shard[:, WEIGHT].sum()),
            bad_shards=[s for s, loss in enumerate(by_shard[:, LOSS].tolist()) if not math.isfinite(loss)],
            bad_weights={s: weight for s, weight in enumerate(weights) if not 0 <= weight < math.inf},
            stop=int(by_rank[:, STOP].max()),
            stop_asked_by=_ranks_with(by_rank[:, STOP]),
            move=int(by_rank[:, MOVE].max()),
            ended=_ranks_with(by_rank[:, ENDED]),
            numbers=[int(number) for number in by_rank[:, NUMBER].tolist()],
            samples=[int(count) for count in by_rank[:, SAMPLES].tolist()],
            ends_epoch=[bool(ends) for ends in by_rank[:, ENDS_EPOCH].tolist()],
            content=_words(by_rank[:, CONTENT_HIGH], by_rank[:, CONTENT_LOW]),
            changed=changed,
            fingerprint=sum(_words(by_shard[:, HIGH], by_shard[:, LOW])) % 2**64,
            reports=by_rank[:, REPORT:].tolist(),
            metrics={
                name: (_exact_sum(metrics[:, 2 * n]), _exact_sum(metrics[:, 2 * n + 1]))
                for n, name in enumerate(self._names)
            },
        )


def agree_on_metrics(sum_: ShardSum, mine: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the metrics; a collective call. `mine`: those of this worker; None if it had no samples.

    Raises ValueError, on all workers, if two workers have different names.
    """
    told = agreement.gather_values(sum_.group, mine, device=sum_.device)
    names = [one for one in told if one is not None] or [[]]
    odd = next((one for one in names if one != names[0]), None)
    if odd is not None:
        raise ValueError(describe_odd_metrics(names[0], odd))
    return tuple(names[0])


def describe_odd_metrics(some: Sequence[str], others: Sequence[str]) -> str:
    return (
        f"the loss function returned the metrics {', '.join(some) or '(none)'} for one shard and "
        f"{', '.join(others) or '(none)'} for another; a metric is there always or never: use a weight of 0 where it "
        "has no value"
    )


def _exact_sum(values: Tensor) -> float:
    try:
        return math.fsum(values.tolist())
    except (ValueError, OverflowError):  # infinities of both signs
        return math.nan


def _ranks_with(votes: Tensor) -> list[int]:
    return [rank for rank, vote in enumerate(votes.tolist()) if vote]


def _words(high: Tensor, low: Tensor) -> list[int]:
    """Join the halves of 64-bit integers."""
    return [(int(a) << 32) + int(b) for a, b in zip(high.tolist(), low.tolist(), strict=True)]
