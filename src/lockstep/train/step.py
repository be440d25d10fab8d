"""One step of training, from the batch to the new weights: the table of contents of the library.

What comes out depends on the weights, the state of the optimiser, the seed, the number of the step and the global
batch, and on nothing else: every shard has its own samples and its own random numbers, and the gradients of the shards
are added up along one tree, on whichever worker they were computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep import faults
from lockstep.comm.exact_sum import Receipt, ShardSum
from lockstep.data.batches import Batch, Batches, Shard
from lockstep.ddp.replica import Leaf
from lockstep.ddp.state_digest import cheap_digests
from lockstep.errors import PeerLostError
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train import loss_check, step_check
from lockstep.train.buffer_exchange import NewBuffer, NewNumber, RunningState
from lockstep.train.loss_check import ShardLoss, checked
from lockstep.train.metrics import Mean
from lockstep.train.options import OnNonFinite, Options
from lockstep.train.precision import LossScale
from lockstep.train.recompute_check import Audit
from lockstep.train.schedule import LargeBatch
from lockstep.train.shard_gradients import Gradients
from lockstep.train.step_check import LastNorm
from lockstep.train.step_observer import Observer
from lockstep.train.step_table import Tally, agree_on_metrics, describe_odd_metrics

LOOKED_AT_FIRST: Final = 3  # steps: see `GradientWrites`
LOOKED_AT_EVERY: Final = 64

Loss = Callable[[Any, Any], Any]  # (model, batch) -> (sum of the losses, their weight[, metrics])


@dataclass
class Plan:
    """What is trained, and on what: all that does not depend on who the workers are."""

    model: nn.Module
    leaves: list[Leaf]
    optimizer: torch.optim.Optimizer
    batches: Batches
    loss_scale: LossScale
    synced: list[str]  # layers that are SyncBatchNorm
    large_batch: LargeBatch | None
    schedule: Any = None
    interval: str = "step"  # what the schedule counts: "step" or "epoch"
    settings: dict[str, Any] = field(default_factory=dict)  # as the program gave them: see `settings_of` in plan.py
    last_norm: LastNorm = field(default_factory=LastNorm)
    gradient_writes: GradientWrites = field(default_factory=lambda: GradientWrites())


@dataclass
class Training:
    """What a step works on."""

    model: nn.Module
    leaves: list[Leaf]
    optimizer: torch.optim.Optimizer
    sum: ShardSum
    gradients: Gradients
    running: RunningState
    loss_scale: LossScale
    audit: Audit
    observer: Observer
    options: Options
    seed: int
    large_batch: LargeBatch | None = None
    last_norm: LastNorm = field(default_factory=LastNorm)
    gradient_writes: GradientWrites = field(default_factory=lambda: GradientWrites())
    metric_names: tuple[str, ...] | None = None  # that the loss function returns; None until the first step
    is_loss_checked: bool = False  # whether it returns a sum
    is_exchanging: bool = False  # in the middle of a step that cannot be taken again
    keeps_update: bool = False  # workers may be lost, and one that missed a step gets it from one that did not
    newest: Update | None = None  # what the last step has changed, until all workers are known to have applied it


class Stop(IntEnum):
    """Whether to end after a step. The strongest wish of any worker counts."""

    NO = 0
    ASKED = 1  # by the program
    SIGNAL = 2  # from outside: the run is to go on some other time


@dataclass
class Update:
    """What one step changes, equal on all workers: a worker that has missed the step applies it from this."""

    number: int
    ends_epoch: bool
    finite: bool  # otherwise the weights stay as they are
    bad_loss: bool  # a loss was not finite, which the loss scale is not to blame for
    buffers: Sequence[NewBuffer | NewNumber]  # of `RunningState.gather`
    gradients: Sequence[Tensor | None]  # by parameter, as the optimiser gets them
    versions: Sequence[int]  # of the gradients
    digests: Sequence[int] | None = None  # of the gradients, in some steps
    receipt: Receipt | None = None  # that all workers have applied it

    @property
    def is_intact(self) -> bool:
        """Whether neither the optimiser nor the program has written to the gradients since, as far as is known."""
        pairs = zip(self.gradients, self.versions, strict=True)
        if not all(gradient is None or gradient._version == version for gradient, version in pairs):
            return False
        return self.digests is None or cheap_digests(g for g in self.gradients if g is not None) == self.digests


@final
class GradientWrites:
    """Does the optimiser, or the program, write to gradients through `.data`, which torch does not count?

    Looked for by value in the first steps, and now and then: before the step is applied, and when it is dropped.
    """

    def __init__(self) -> None:
        self.were_found = False
        self._steps = 0

    def digests(self, gradients: Sequence[Tensor | None]) -> list[int] | None:
        """Of the gradients of this step, if it is one of those that are looked at."""
        self._steps += 1
        if self.were_found or (self._steps > LOOKED_AT_FIRST and self._steps % LOOKED_AT_EVERY):
            return None
        return cheap_digests(gradient for gradient in gradients if gradient is not None)


@dataclass(frozen=True)
class Wishes:
    """What this worker asks of the others in this step."""

    stop: Stop = Stop.NO
    move: int = 0  # the generation of workers that is to end after this step; 0: none
    commit: Callable[[], None] = lambda: None  # asked before anything is changed for good; raises if that must not be
    go_on: Callable[[], None] = lambda: None  # asked before each shard; raises if the step is of no use any more


@dataclass(frozen=True)
class Result:
    """Of one step, the same on all workers, but for `waited_s`."""

    number: int
    loss: float  # mean over the global batch
    weight: float
    norm: float | Tensor | None
    skipped: bool  # something was not finite, and the weights stayed as they were
    stop_asked_by: tuple[int, ...]  # ranks
    waited_s: float  # for the others, after our own backward pass
    stop: Stop = Stop.NO
    move: int = 0
    samples: int = 0  # fingerprint of those of the global batch (data/ledger.py)
    metrics: Mapping[str, Mean] = field(default_factory=dict)  # that the loss function returned, over the global batch

    def plain(self) -> dict[str, Any]:
        metrics = {name: [mean.sum, mean.weight] for name, mean in self.metrics.items()}
        return asdict(replace(self, metrics={})) | {"norm": self.grad_norm, "metrics": metrics}

    @staticmethod
    def of(plain: dict[str, Any]) -> Result:
        by, stop = tuple(plain["stop_asked_by"]), Stop(plain["stop"])
        metrics = {name: Mean(*pair) for name, pair in plain["metrics"].items()}
        return Result(**(plain | {"stop_asked_by": by, "stop": stop, "metrics": metrics}))

    @property
    def grad_norm(self) -> float | None:
        """The norm before clipping; None if it was not computed. On a GPU this waits for it."""
        return None if self.norm is None else float(self.norm)


def take_step(t: Training, loss: Loss, batch: Batch, wishes: Wishes = Wishes()) -> Result:  # noqa: B008  (frozen)
    """All workers together: either all take the step, or none does."""
    see = t.observer.of_step
    see.lap("between")
    t.is_exchanging = False
    tally = Tally(t.sum, buffers=len(t.running), loss_scale=t.loss_scale.value)
    t.gradients.begin()
    t.gradients.seen_by, t.sum.is_timed = see.begin(batch.number), see.looks_closely
    t.running.begin()
    with kept_random_state(t.sum.device), t.sum.in_step():
        for shard in batch.shards:
            is_last = shard is batch.shards[-1]
            wishes.go_on()
            faults.at("forward")
            if shard.count:
                one = forward(t, loss, batch, shard)
                tally.note(shard.number, one, t.running.take(shard.number))
            see.lap("forward", shard.number)
            if is_last:
                faults.at("table")
                t.is_exchanging = True
                # So all know the weight of the global batch when the first bucket comes.
                names = metric_names(t, tally)
                tally.send(batch, stop=wishes.stop, move=wishes.move, told=see.tell(), names=names)
                drop_update(t)  # the gradients of this step overwrite those of the last
                t.gradients.listen(shard.number, tally.scale)
            if shard.count:
                backward(t, one.total)  # buckets leave during the last of these
                t.running.rewind()
            if not is_last:
                t.gradients.keep(shard.number)
                see.end_shard(one.weight if shard.count else 0.0, shard.count)
            see.lap("backward", shard.number)
        t.gradients.send_rest()
        see.lap("backward")
        faults.at("waiting")
        at = time.perf_counter()
        outcome = tally.outcome()
        step_check.refuse_bad_data(outcome, batch.number)
        with t.sum.aside(tally.sent):
            t.last_norm.check(t.leaves)
            see.hear(outcome.told)
        t.gradients.finish()
        waited_s = time.perf_counter() - at
        see.lap("wait")
        see.end_shard(one.weight if shard.count else 0.0, shard.count)
        see.travelled(t.gradients.travels)
        t.audit.compare(batch, t.sum, lambda shard: run_again(t, loss, batch, shard))
        t.is_exchanging = False

    faults.at("reduced")
    skips = t.options.on_nonfinite is OnNonFinite.SKIP or t.loss_scale.is_dynamic
    look = step_check.look_at_gradients(t.leaves, outcome, t.options, wait=skips, shares=t.sum.shares)
    t.last_norm.keep(batch.number, look.norm if not skips else None, t.options)
    see.reduced(look.norm if look.finite else None, batch.count, t.loss_scale.value)
    buffers = t.running.gather(outcome.changed, t.sum.as_run(batch.counts), t.sum) if look.finite else []
    wishes.commit()  # up to here all that was done can be done again
    faults.at("committed")
    if not look.finite and (outcome.bad_shards or not t.loss_scale.may_be_too_large):
        step_check.stop_or_skip(look, batch, t.options)
    gradients = [leaf.parameter.grad for leaf in t.leaves] if t.keeps_update else []
    update = Update(
        number=batch.number,
        ends_epoch=batch.ends_epoch,
        finite=look.finite,
        bad_loss=bool(outcome.bad_shards),
        buffers=buffers,
        gradients=gradients,
        versions=[0 if gradient is None else gradient._version for gradient in gradients],
        digests=t.gradient_writes.digests(gradients) if t.keeps_update else None,
    )
    apply(t, update)
    return Result(
        number=batch.number,
        loss=outcome.loss,
        weight=outcome.weight,
        norm=look.norm,
        skipped=not look.finite,
        stop_asked_by=tuple(outcome.stop_asked_by),
        waited_s=waited_s,
        stop=Stop(outcome.stop),
        move=outcome.move,
        samples=outcome.fingerprint,
        metrics={name: Mean(*pair) for name, pair in outcome.metrics.items()},
    )


def apply(t: Training, update: Update) -> None:
    """Change buffers, weights, the state of the optimiser and the loss scale: nothing here waits for other workers."""
    t.running.finish(update.buffers)
    if update.finite:
        faults.at("optimizer")
        with step_check.learning_rate(t.large_batch, update.number):
            t.optimizer.step()
    if not update.bad_loss:  # a loss is not scaled
        t.loss_scale.update(finite=update.finite)
    t.newest = update if t.keeps_update else None


def drop_update(t: Training) -> None:
    """Forget what the last step has changed, as soon as all workers have applied it.

    Raises PeerLostError if that cannot be known.
    """
    if t.newest is not None:
        if t.newest.receipt is None:
            raise PeerLostError(f"the group of workers failed after step {t.newest.number}")
        t.gradient_writes.were_found = t.gradient_writes.were_found or not t.newest.is_intact
        t.newest.receipt.wait()
    t.newest = None


def forward(t: Training, loss: Loss, batch: Batch, shard: Shard) -> ShardLoss:
    sow(mix(t.seed, "shard", batch.number, shard.number), t.sum.device)
    with t.options.precision.autocast(t.sum.device), t.audit.listening(batch, shard.number):
        one = checked(loss(t.model, shard.data))
    if batch.number == 0 and shard.count > 1 and not t.is_loss_checked:
        t.is_loss_checked = True
        refuse_mean_loss(t, loss, shard, one)
    return one


def backward(t: Training, total: Tensor) -> None:
    t.loss_scale.scaled(total).backward()  # type: ignore[no-untyped-call]


def run_again(t: Training, loss: Loss, batch: Batch, shard: Shard) -> None:
    backward(t, forward(t, loss, batch, shard).total)
    t.running.rewind()


def metric_names(t: Training, tally: Tally) -> tuple[str, ...]:
    """Of what the loss function returns beside the loss. The workers agree on them in their first step together."""
    mine = tally.metric_names
    if t.metric_names is None:
        t.metric_names = agree_on_metrics(t.sum, mine)
    if mine is not None and tuple(mine) != t.metric_names:
        raise ValueError(describe_odd_metrics(t.metric_names, mine))
    return t.metric_names


def refuse_mean_loss(t: Training, loss: Loss, shard: Shard, returned: ShardLoss) -> None:
    """Raise ValueError if the loss function returned a mean as a sum: see Note [A mean passed off as a sum]."""

    def evaluate(data: Any) -> ShardLoss:
        sow(mix(t.seed, "shard", 0, shard.number), t.sum.device)
        with t.options.precision.autocast(t.sum.device):
            return checked(loss(t.model, data))

    if loss_check.may_be_mean(returned.total):
        with kept_random_state(t.sum.device):
            loss_check.refuse_mean(evaluate, t.model, shard.data, shard.count)
