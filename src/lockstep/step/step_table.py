"""What all workers have to know of a step: one small all-reduce, which runs during the last backward pass.

Every worker fills in its own fields of a table of zeros, and the tables are added up, so all workers have the same
table. It holds the loss and weight of every shard; for every worker the number of its step, whether it asks to stop or
has run out of data, the size of its batch, whether that ends an epoch, a digest of its samples, how fast it was in an
earlier step (shard_balance.py), and a report on earlier steps (step_observer.py); and which buffers changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import agreement
from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch
from lockstep.step.loss_check import ShardLoss
from lockstep.step.shard_balance import StepSpeed
from lockstep.trace.step_observer import NO_REPORT, REPORT_FIELDS

# Columns of a shard. The last two are the fingerprint of its samples, in two halves of 32 bits.
LOSS, WEIGHT, HIGH, LOW = range(4)
# Columns of a worker. Its report takes all the rest.
NUMBER, PART, STOP, ENDED, SAMPLES, ENDS_EPOCH, MOVE, SAVE, CONTENT_HIGH, CONTENT_LOW, SPEED = range(11)
REPORT = SPEED + len(StepSpeed._fields)


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
    save: bool  # what rank 0 asks
    ended: list[int]  # ranks that have no more data
    numbers: list[int]  # the step that each rank takes
    parts: list[int]  # the optimiser of that step, by rank
    samples: list[int]  # size of the global batch, as each rank has it
    ends_epoch: list[bool]  # as each rank has it
    content: list[int]  # 64-bit digest of the global batch, by rank; 0 on a rank that did not compute it
    changed: list[list[float]]  # [shard][buffer]
    fingerprint: int  # of all samples of the batch (data/ledger.py)
    speeds: list[StepSpeed]  # by rank, in earlier steps
    reports: list[list[float]]  # by rank, on earlier steps
    metrics: dict[str, tuple[float, float]]  # of the loss function, by name: (sum, weight) over all shards

    @property
    def loss(self) -> float:
        """Mean loss over the global batch."""
        return self.loss_sum / self.weight if self.weight else math.nan


class StepTable:
    """The table of one step: add the shards of this worker, `send` it, and read its `outcome`."""

    def __init__(self, sum_: ShardSum, *, buffers: int, loss_scale: float = 1.0, part: int = 0) -> None:
        """`part`: the number of the optimiser, if there are several."""
        self._sum, self._rank, self._part = sum_, sum_.group.rank(), part
        self._buffers, self._loss_scale = buffers, loss_scale
        self._added: list[tuple[int, ShardLoss, list[int]]] = []
        self._names: Sequence[str] = ()
        self._shapes: list[tuple[int, int]] = []
        self._table = torch.zeros(0)
        self._pending: Any = None
        self.sent: Any = None  # on a GPU: the event after which the sum was started
        self._scale: float | Tensor | None = None

    def _rows(self, table: list[float]) -> list[list[list[float]]]:
        """[shard, (loss, weight, samples)], [rank, (stop, ended, ...)], [shard, changed buffers], [shard, metrics]"""
        found, first = [], 0
        for rows, width in self._shapes:
            found.append([table[first + n * width : first + (n + 1) * width] for n in range(rows)])
            first += rows * width
        return found

    def add_shard(self, shard: int, loss: ShardLoss, changed: list[int]) -> None:
        """Add what the loss function returned for a shard. `changed`: by buffer, whether the shard changed it."""
        self._added.append((shard, ShardLoss(loss.total.detach(), loss.weight, loss.metrics), changed))

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
        save: bool = False,
        speed: StepSpeed = StepSpeed(),  # noqa: B008  (immutable)
        report: Sequence[float] = NO_REPORT,
        names: Sequence[str] = (),
    ) -> None:
        """Start the sum of the tables.

        batch             None if this worker has no more data
        stop, move, save  what this worker asks of all workers: see `StepRequests`
        names             names of the metrics; equal on all workers
        """
        shards, self._names = self._sum.shards, names
        by_rank_shape = (self._sum.size, REPORT + REPORT_FIELDS)
        self._shapes = [(shards, 4), by_rank_shape, (shards, self._buffers), (shards, 2 * len(names))]
        # Filled in as a list, which is fast; values that a GPU has computed are added on the device. From memory that
        # is not pinned, the copy to a GPU would wait until everything before it is computed.
        starts = [0, *itertools.accumulate(math.prod(shape) for shape in self._shapes)]
        values, device = [0.0] * starts[-1], self._sum.device
        for one in batch.shards if batch is not None else ():
            first = 4 * one.number
            values[first + HIGH], values[first + LOW] = one.samples >> 32, one.samples & 0xFFFFFFFF
        number, samples, ends_epoch, content = (
            (batch.number, batch.count, batch.ends_epoch, batch.content) if batch is not None else (0, 0, False, 0)
        )
        asks = [number, self._part, stop, batch is None, samples, ends_epoch, move, save]
        mine = [*asks, content >> 32, content & 0xFFFFFFFF, *speed, *report]
        first = starts[1] + self._rank * len(mine)
        values[first : first + len(mine)] = mine
        late: list[tuple[int, Tensor]] = []  # (place, value on a GPU)
        for shard, loss, which in self._added:
            first = starts[2] + shard * self._buffers
            values[first : first + len(which)] = which
            found = [(4 * shard + LOSS, loss.total), (4 * shard + WEIGHT, loss.weight)]
            first = starts[3] + shard * 2 * len(names)
            found += enumerate((part for name in names for part in loss.metrics[name]), first)
            for place, value in found:
                if isinstance(value, Tensor) and value.is_cuda:
                    late.append((place, value))
                else:
                    values[place] = float(value) + 0.0  # not -0.0, to which a sum of several workers would not lead
        self._table = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._table = self._table.to(device, non_blocking=True)
        for place, value in late:
            self._table[place] += value
        self.sent = torch.cuda.current_stream().record_event() if self._table.is_cuda else None
        self._pending = self._sum.start_small_sum(self._table)

    def scale(self) -> float | Tensor:
        """Return the factor of the sum of gradients. To be called once the table has arrived.

        On a GPU it is a tensor, so that the host does not wait.
        """
        if self._scale is None:
            weight = self._table[WEIGHT : 4 * self._sum.shards : 4].sum() * self._loss_scale
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
            self._sum.wait_for_values(self._pending, "the sum of losses and weights")
            table = self._table.cpu()
        by_shard, by_rank, changed, metrics = self._rows(table.tolist())
        losses, weights = table[LOSS : 4 * len(by_shard) : 4].sum(), table[WEIGHT : 4 * len(by_shard) : 4].sum()
        return StepOutcome(
            loss_sum=float(losses),
            weight=float(weights),
            bad_shards=[s for s, row in enumerate(by_shard) if not math.isfinite(row[LOSS])],
            bad_weights={s: row[WEIGHT] for s, row in enumerate(by_shard) if not 0 <= row[WEIGHT] < math.inf},
            stop=int(max(row[STOP] for row in by_rank)),
            stop_asked_by=[rank for rank, row in enumerate(by_rank) if row[STOP]],
            move=int(max(row[MOVE] for row in by_rank)),
            save=bool(by_rank[0][SAVE]),
            ended=[rank for rank, row in enumerate(by_rank) if row[ENDED]],
            numbers=[int(row[NUMBER]) for row in by_rank],
            parts=[int(row[PART]) for row in by_rank],
            samples=[int(row[SAMPLES]) for row in by_rank],
            ends_epoch=[bool(row[ENDS_EPOCH]) for row in by_rank],
            content=[_word(row[CONTENT_HIGH], row[CONTENT_LOW]) for row in by_rank],
            changed=changed,
            fingerprint=sum(_word(row[HIGH], row[LOW]) for row in by_shard) % 2**64,
            speeds=[StepSpeed(*row[SPEED:REPORT]) for row in by_rank],
            reports=[row[REPORT:] for row in by_rank],
            metrics={
                name: (_exact_sum(row[2 * n] for row in metrics), _exact_sum(row[2 * n + 1] for row in metrics))
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


def _exact_sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs
        return math.nan


def _word(high: float, low: float) -> int:
    """Join the halves of a 64-bit integer."""
    return (int(high) << 32) + int(low)
