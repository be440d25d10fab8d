"""One step of training, from the batch to the new weights. It calls all other parts of a step, in order.

The result depends only on the weights, the state of the optimiser, the seed, the number of the step and the global
batch: every shard has its own samples and its own random numbers, and the gradients of the shards are added up along
one fixed tree, whichever worker computed them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import faults
from lockstep.data.batches import Batch, Shard
from lockstep.errors import PeerLostError
from lockstep.seed import derive_seed, preserve_random_state, seed_all
from lockstep.step import loss_check, step_check
from lockstep.step.buffer_changes import NewValue
from lockstep.step.captured_shard import CapturedShard, ShardPass
from lockstep.step.loss_check import ShardLoss, parse_loss
from lockstep.step.run_options import OnNonFinite
from lockstep.step.step_table import StepOutcome, StepTable, agree_on_metrics, describe_odd_metrics
from lockstep.step.step_types import Loss, Result, StepContext, StepRequests, Stop, Update
from lockstep.trace.metrics import Mean


def take_step(t: StepContext, loss: Loss, batch: Batch, requests: StepRequests = StepRequests()) -> Result:  # noqa: B008  (frozen)
    """Take one step; all workers call it together. Either all of them apply the step, or none does."""
    observer = t.observer.active
    observer.lap("between")
    t.is_exchanging = False
    table = StepTable(t.sum, buffers=len(t.buffers), loss_scale=t.loss_scale.value, part=t.part)
    t.gradients.begin(batch.number)
    t.graphs.begin_step()
    is_first = t.part == 0  # the noise of the gradient is that of the first optimiser
    t.gradients.on_gradients = observer.begin_step(batch.number) if is_first else None
    t.sum.is_timed = observer.is_detailed
    t.buffers.begin()
    with preserve_random_state(t.sum.device, is_seeded=True), t.sum.in_step(), without_gradients(t.frozen):
        t.audit.begin(batch, t.sum, partial(compute_again, t, loss, batch))
        with t.meter.measure(sum(shard.count for shard in batch.shards), t.waited_for_weights_s):
            compute_gradients(t, loss, batch, table, requests)
        outcome, waited_s = finish_exchange(t, loss, batch, table)

    faults.at("reduced")
    if is_first:
        t.balance.add_step(outcome.speeds)
    waits = t.options.on_nonfinite is OnNonFinite.SKIP or t.loss_scale.is_dynamic
    scattered = t.gradients.scattered
    check = step_check.check_gradients(
        t.leaves, outcome, t.options, wait=waits, shares=t.sum.shares, scattered=scattered
    )
    t.norm_check.defer(batch.number, check.norm if not waits else None, t.options, t.leaves)
    if is_first:
        observer.add_gradient(check.norm if check.finite else None, batch.count, t.loss_scale.value)
    is_bad = not check.finite and (bool(outcome.bad_shards) or not t.loss_scale.may_be_too_large)
    if is_bad:
        with preserve_random_state(t.sum.device), without_gradients(t.frozen):
            t.audit.check_nonfinite(batch, t.sum, partial(compute_again, t, loss, batch))
    buffers = t.buffers.gather(outcome.changed, t.sum.merge_counts(batch.counts), t.sum) if check.finite else []
    requests.commit()  # up to here the step can be repeated
    faults.at("committed")
    if is_bad:
        step_check.stop_or_skip(check, batch, t.options)
    apply(t, make_update(t, batch, buffers, finite=check.finite, bad_loss=bool(outcome.bad_shards)))
    rounding_error = t.gradients.rounding_error()
    return Result(
        number=batch.number,
        loss=outcome.loss,
        weight=outcome.weight,
        norm=check.norm,
        skipped=not check.finite,
        stop_asked_by=tuple(outcome.stop_asked_by),
        waited_s=waited_s,
        stop=Stop(outcome.stop),
        move=outcome.move,
        save=outcome.save,
        samples=outcome.fingerprint,
        metrics={name: Mean(*pair) for name, pair in outcome.metrics.items()},
        rounding_error=rounding_error if check.finite else None,
    )


# -- compute -----------------------------------------------------------------------------------------------------------


def compute_gradients(t: StepContext, loss: Loss, batch: Batch, table: StepTable, requests: StepRequests) -> None:
    """Run forward and backward for each shard of this worker. Buckets are sent during the last backward pass."""
    observer = t.observer.active
    seeds = [seed_of(t, batch, shard) for shard in batch.shards]  # at once: between two passes caches are cold
    for shard, seed in zip(batch.shards, seeds, strict=True):
        is_last = shard is batch.shards[-1]
        requests.check_left()
        faults.at("forward")
        graph = find_graph(t, loss, batch, shard, seed)
        if shard.count:
            one = forward(t, loss, batch, shard, seed) if graph is None else graph.forward(shard.data, seed)
            table.add_shard(shard.number, one, t.buffers.collect(shard.number))
        observer.lap("forward", shard.number)
        if is_last:
            begin_exchange(t, batch, table, requests)
        if shard.count:
            if graph is None:
                backward(t, one.total)
                t.graphs.end_eager_pass()
            else:
                before = torch.cuda.current_stream().record_event()
                graph.backward()
                if is_last:
                    t.gradients.take_replayed(graph, before)
            t.buffers.rewind()
            del one  # the nodes of its autograd graph remember the stream of this pass
        if not is_last:
            t.gradients.add_shard(shard.number, graph)
            if graph is not None:
                graph.release()
            observer.end_shard(table.weight_of(shard.number), shard.count)
        observer.lap("backward", shard.number)
    t.gradients.send_rest()
    observer.lap("backward")


def forward(t: StepContext, loss: Loss, batch: Batch, shard: Shard, seed: int) -> ShardLoss:
    """Run the loss function on a shard, with the random numbers of this step and shard."""
    seed_all(seed, t.sum.device)
    with t.audit.recording(shard), t.graphs.watching():
        one = run_loss(t, loss, shard.data)
    is_first_step = batch.number == 0 or (t.part > 0 and not has_stepped(t))
    if is_first_step and shard.count > 1 and not t.is_loss_checked:
        t.is_loss_checked = True
        refuse_mean_loss(t, loss, shard, one)
    return one


def has_stepped(t: StepContext) -> bool:
    """Whether the optimiser has a state already."""
    return bool(t.optimizer.state) if t.sharded_state is None else t.sharded_state.parts.has_stepped(t.part)


def without_gradients(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
    """Let these parameters require no gradient in this context: those of other optimisers than the one that steps."""
    return requiring_gradients(parameters, required=False)


@contextmanager
def requiring_gradients(parameters: Sequence[nn.Parameter], *, required: bool = True) -> Iterator[None]:
    """Let these parameters require gradients in this context, or not."""
    was = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(required)
        yield
    finally:
        for parameter, required in zip(parameters, was, strict=True):
            parameter.requires_grad_(required)


def run_loss(t: StepContext, loss: Loss, data: Any) -> ShardLoss:
    with t.options.precision.autocast(t.sum.device):
        return parse_loss(loss(t.model, data))


def seed_of(t: StepContext, batch: Batch, shard: Shard) -> int:
    return derive_seed(t.seed, "shard", batch.number, shard.number, *([t.part] if t.part else []))


def find_graph(t: StepContext, loss: Loss, batch: Batch, shard: Shard, seed: int) -> CapturedShard | None:
    """Return the captured pass for this shard; None: run it eagerly (captured_shard.py)."""
    t.audit.stop_recording()
    if not t.graphs.is_enabled or shard.count == 0 or t.audit.is_owned_task(shard.number) or batch.number == 0:
        return None
    one = ShardPass(
        run=partial(run_loss, t, loss),
        data=shard.data,
        seed=seed,
        leaves=t.leaves,
        buffers=t.buffers,
        scaled=t.loss_scale.scaled,
        scale=t.loss_scale.value,
        is_sent=bool(t.gradients.buckets),
    )
    return t.graphs.find(loss, one, batch.number)


def backward(t: StepContext, total: Tensor) -> None:
    t.loss_scale.scaled(total).backward()  # type: ignore[no-untyped-call]


def refuse_mean_loss(t: StepContext, loss: Loss, shard: Shard, returned: ShardLoss) -> None:
    """Raise ValueError if the loss function returned a mean as a sum: see Note [A mean passed off as a sum]."""

    def evaluate(data: Any) -> ShardLoss:
        seed_all(derive_seed(t.seed, "shard", 0, shard.number), t.sum.device)
        return run_loss(t, loss, data)

    if loss_check.may_be_mean(returned.total):
        with preserve_random_state(t.sum.device):
            loss_check.refuse_mean(evaluate, t.model, shard.data, shard.count)


# -- exchange ----------------------------------------------------------------------------------------------------------


def begin_exchange(t: StepContext, batch: Batch, table: StepTable, requests: StepRequests) -> None:
    """Send the table before the last backward pass, so that the weight of the global batch is known when the first
    bucket arrives. From here on the step cannot be repeated by this worker alone."""
    faults.at("table")
    if t.weights is not None:
        t.weights.finish()
    t.is_exchanging = True
    names = metric_names(t, table)
    table.send(
        batch,
        stop=requests.stop,
        move=requests.move,
        save=requests.save,
        speed=t.meter.read(),
        report=t.observer.active.pop_report(),
        names=names,
    )
    drop_update(t)  # the gradients of this step overwrite those of the previous one
    t.gradients.begin_last_shard(batch.shards[-1].number, table.scale)


def metric_names(t: StepContext, table: StepTable) -> tuple[str, ...]:
    """Return the names of the metrics of the loss function. The workers agree on them in their first step together."""
    mine = table.metric_names
    if t.metric_names is None:
        t.metric_names = agree_on_metrics(t.sum, mine)
    if mine is not None and tuple(mine) != t.metric_names:
        raise ValueError(describe_odd_metrics(t.metric_names, mine))
    return t.metric_names


def finish_exchange(t: StepContext, loss: Loss, batch: Batch, table: StepTable) -> tuple[StepOutcome, float]:
    """Wait until the sums of all workers have arrived. Returns the summed table, and how many seconds this took.

    Raises UnevenDataError, DesyncError or ValueError, on all workers, if their batches do not fit together.
    """
    observer, shard = t.observer.active, batch.shards[-1]
    faults.at("waiting")
    began_s = time.perf_counter()
    outcome = table.outcome()
    step_check.refuse_bad_data(outcome, batch.number)
    with t.sum.on_side_stream(table.sent):
        t.norm_check.check()
        observer.add_reports(outcome.reports)
    t.gradients.finish()
    t.sum.wait_on_device("the sums of gradients")
    waited_s = time.perf_counter() - began_s
    observer.lap("wait")
    observer.end_shard(table.weight_of(shard.number), shard.count)
    observer.add_buckets(t.gradients.buckets.times)
    t.audit.compare(batch, t.sum, partial(compute_again, t, loss, batch))
    t.is_exchanging = False
    return outcome, waited_s


def compute_again(
    t: StepContext, loss: Loss, batch: Batch, shard: Shard, recording: AbstractContextManager[None]
) -> Tensor:
    """Compute the loss and gradients of a shard of another worker, for the comparison with those that it computes."""
    seed_all(seed_of(t, batch, shard), t.sum.device)
    with recording:
        one = run_loss(t, loss, shard.data)
    backward(t, one.total)
    t.buffers.rewind()
    return one.total.detach()


# -- apply -------------------------------------------------------------------------------------------------------------


def make_update(t: StepContext, batch: Batch, buffers: Sequence[NewValue], *, finite: bool, bad_loss: bool) -> Update:
    """Collect what the step changes. The gradients are included only where another worker may have to get them."""
    gradients = [leaf.parameter.grad for leaf in t.leaves] if t.keeps_update else []
    return Update(
        number=batch.number,
        part=t.part,
        index=t.applied_steps,
        ends_epoch=batch.ends_epoch,
        finite=finite,
        bad_loss=bad_loss,
        buffers=buffers,
        gradients=gradients,
        versions=[0 if gradient is None else gradient._version for gradient in gradients],
        digests=t.gradient_writes.digests(gradients) if t.keeps_update else None,
        compressed_gradients=t.gradients.buckets.compressed_gradients() if finite else {},
    )


def apply(t: StepContext, update: Update) -> None:
    """Change buffers, weights, the state of the optimiser and the loss scale. Waits for no other worker.

    If the state is distributed, this changes the worker's own part of the weights; the others follow in an exchange.
    """
    t.buffers.apply(update.buffers)
    if update.finite:
        faults.at("optimizer")
        t.gradients.keep_residuals(update.number, update.compressed_gradients)
        with step_check.learning_rate(t.large_batch, update.number):
            if t.sharded_state is None:
                t.optimizer.step()
            else:
                scattered = t.gradients.scattered
                t.sharded_state.step(t.part, None if scattered is None else scattered.parts_of(update.number))
    if not update.bad_loss:  # a loss is not scaled
        t.loss_scale.update(finite=update.finite)
    t.last.update = update if t.keeps_update else None


def drop_update(t: StepContext) -> None:
    """Wait until all workers have applied the previous step, and drop its update.

    Raises PeerLostError if that cannot be known.
    """
    last = t.last.update
    if last is not None:
        if last.receipt is None:
            raise PeerLostError(f"the group of workers failed after step {last.number}")
        t.gradient_writes.were_found = t.gradient_writes.were_found or not last.is_intact
        last.receipt.wait()
    t.last.update = None
