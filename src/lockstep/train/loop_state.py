"""The state of the training on one worker: the steps that are applied to it, and the context of the next step.

When the workers change, the context is built again, and a worker that has missed a step, or that is new, gets what it
needs from another worker (recovery/elastic_calls.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.comm.agreement import gather_values
from lockstep.data.batches import Batch
from lockstep.data.sample_order import Position
from lockstep.ddp.replica import named_state
from lockstep.errors import DivergenceError
from lockstep.recovery.replica_check import ReplicaCheck
from lockstep.recovery.state_transfer import apply_sent_step, broadcast_state, encode_update, refuse_other_state
from lockstep.step.audit import AuditSchedule
from lockstep.step.run_options import GradComm
from lockstep.step.shard_balance import ShardBalance
from lockstep.step.step import drop_update, requiring_gradients
from lockstep.step.step_types import LastUpdate, Loss, StepContext, StepRequests, TrainingPlan
from lockstep.train import sharded_training, training_plan
from lockstep.train.loss_comparison import LossComparison, Movement, losses_of_steps, share_moved, undone
from lockstep.train.optimizer_set import SchedulerSet, parts_of
from lockstep.train.run_state import is_batch_done
from lockstep.train.session import Session
from lockstep.train.training_plan import RunConfig
from lockstep.world.world import World


@final
class WorkerState:
    """The plan, the context of the next step, and the number of applied steps. Implements `GenerationListener`."""

    replica_check: ReplicaCheck

    def __init__(self, session: Session, *, is_stepping: Callable[[], bool]) -> None:
        """`is_stepping`: whether `run.step` is running."""
        self._session, self._is_stepping = session, is_stepping
        self.plan: TrainingPlan | None = None
        self.step_limit: int | None = None  # the loop ends after so many steps
        self.contexts: dict[int, StepContext] = {}  # of each optimiser, by its number
        self.context: StepContext | None = None  # the one of the current or the last step
        self.applied_steps = -1  # of all optimisers; -1: there is no state yet
        self.is_applying = False  # a step is applied in part, and cannot be saved
        self._grad_comm: GradComm | None = None  # of the contexts; a state that is restored may have another one
        self.assignments = 0  # how often the shards were assigned to workers
        self._left_s: float | None = None  # when the last generation ended, until the next one begins

    # -- a step ------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Called before a step is applied. Raises if it must not be applied."""
        self._session.calls.check_commit()
        self.is_applying = True

    def begin_step(self, part: int) -> StepContext:
        """Make the context of this optimiser the current one, and return it.

        Raises ValueError if it has nothing to train.
        """
        if part not in self.contexts:
            raise ValueError(
                f"run.step: optimizer {part} has no parameter that requires a gradient. With several optimizers those "
                "of the others need not be frozen by hand: run.step does it"
            )
        context = self.context = self.contexts[part]
        context.applied_steps = self.applied_steps
        if self.plan is not None and self.plan.residuals is not None:
            self.plan.residuals.keep_only(context.sum.own_shards)
        return context

    def abort_step(self, error: BaseException) -> StepContext | None:
        """Called after a step has failed with this error. Returns its context."""
        context = self.context
        if context is not None:
            context.buffers.abort()
            if context.weights is not None and (note := context.weights.describe_hidden()):
                error.add_note(note)
        return context

    def end_step(self, plan: TrainingPlan, part: int, *, ends_epoch: bool, skipped: bool) -> None:
        """Called after a step of this optimiser was applied."""
        plan.known_digest = None
        if plan.schedule is not None and (ends_epoch if plan.interval == "epoch" else not skipped):
            plan.schedule.step(*([part] if isinstance(plan.schedule, SchedulerSet) else []))
        self.applied_steps, self.is_applying = self.applied_steps + 1, False

    def end_batch(self, plan: TrainingPlan, *, ends_epoch: bool) -> bool:
        """Called when the program asks for the next batch. Returns whether rank 0 has asked to save after this one.

        At the end of an epoch, step the schedulers of optimisers that took no step with the last batch.
        """
        if isinstance(plan.schedule, SchedulerSet) and plan.interval == "epoch" and ends_epoch:
            for part in range(len(parts_of(plan.optimizer))):
                if part not in plan.finished:
                    plan.schedule.step(part)
        asked, plan.finished = any(result.save for result in plan.finished.values()), {}
        plan.known_digest = None  # of new workers, too, none is known
        return asked

    def start_receipt(self) -> None:
        """Start the barrier that shows, by the next backward pass, that all workers have applied this `Update`."""
        context = self.context
        assert context is not None
        update = context.last.update
        if update is not None and update.receipt is None:
            with suppress(Exception):  # the group has failed; the next call fails too, and is then made again
                update.receipt = context.sum.start_barrier()

    def compare_replicas(self, number: int) -> bool:
        """Compare the replicas after step `number`, if it is time to.

        Returns whether the state is verified: all workers have passed an audit in this step, and are equal after it.
        """
        context, plan = self.context, self.plan
        assert context is not None
        assert plan is not None
        faults.at("compared")
        began_s = time.perf_counter()
        with self._session.call_check.explain_errors("the comparison of replicas"):
            self.replica_check.after_step(
                number,
                lambda: self._replicated_state(plan, context, number),
                now=context.audit.is_round,
            )
        if context.audit.is_round:
            plan.audits.comparison_s = time.perf_counter() - began_s
        plan.audits.end_step(is_round=context.audit.is_round)
        return context.audit.is_round and self._session.world.size > 1 and is_batch_done(plan)

    def _replicated_state(self, plan: TrainingPlan, context: StepContext, number: int) -> dict[str, Tensor]:
        """Everything that must be equal on all workers, by name."""
        self._session.calls.finish_weights()
        if plan.sharded_state is not None:
            plan.sharded_state.compare_copies(number, self._session.group, self._session.device)
        found = named_state(context.model, plan.optimizer) | context.buffers.overwritten_digests()
        projections = {} if plan.residuals is None else plan.residuals.state()["projections"]
        return found | {f"projection of {name}": projection for name, projection in projections.items()}

    # -- assignment of shards ----------------------------------------------------------------------------------------

    def assign_shards(self, plan: TrainingPlan, balance: ShardBalance | None = None) -> None:
        """Assign the shards of a step to the current workers, and build the context of this one.

        balance  the assignment that these workers have; None: a new one
        """
        session, world, settings = self._session, self._session.world, plan.batches.settings
        config, plan.audits = self._config, AuditSchedule(session.options.audit_every)
        balance = balance or training_plan.make_shard_balance(plan, config, world.size)
        self._make_contexts(plan, balance, LastUpdate())
        session.observer.set_world(
            lambda: training_plan.describe(plan, self.contexts),
            config=training_plan.observer_config(plan, world),
            generation=session.calls.generation,
            first=plan.batches.position.number,
            rank=world.rank,
            size=world.size,
            backend=world.backend,
            shards=settings.shards,
            global_batch_size=settings.global_batch_size,
            steps=self.step_limit or plan.batches.steps_in_all,
        )
        self.replica_check = ReplicaCheck(session.group, session.device, every=session.options.check_every)
        session.checkpoints.ledger.set_workers(world.size)
        self.assignments += 1

    def rebuild_context(self, plan: TrainingPlan) -> None:
        """Build the context again, for what is trained now, with the shards by which the batch was fetched."""
        assert self.context is not None
        self.drop_context(clears_gradients=True)
        self.assign_shards(plan, self.context.balance)

    def _make_contexts(self, plan: TrainingPlan, balance: ShardBalance, last: LastUpdate) -> None:
        session, world = self._session, self._session.world
        self._grad_comm = plan.tuner.current
        # Autograd remembers the stream of the first hook. What the program has frozen counts from its next step on.
        with session.step_stream.active(), requiring_gradients([leaf.parameter for leaf in plan.leaves]):
            self.contexts = training_plan.assign_shards(
                plan, self._config, world, session.group, session.observer, balance, last
            )
        self.context = next(iter(self.contexts.values()))
        for one in self.contexts.values():
            one.keeps_update = session.calls.is_elastic and world.size > 1

    @property
    def _config(self) -> RunConfig:
        return RunConfig(self._session.options, self._session.seed, self._session.exact)

    def prepare_step(self, plan: TrainingPlan) -> None:
        """Assign the shards anew if some workers are slower than others, and set how gradients are sent.

        Called by all workers between two batches.
        """
        context, session = self.context, self._session
        assert context is not None
        change = context.balance.reassign()
        limit, slowness = session.settings.drop_slower_than, context.balance.slowness(session.world.rank)
        if limit is not None and slowness >= limit:
            session.calls.report_slowness(slowness)
        choice = plan.tuner.prepare(plan.batches.position.number, self._agree_on_largest)
        for kind, text in (("shards", change), ("grad_comm", choice)):
            if text is not None:
                session.trace_writer.event(kind, text=text)
                session.announce(text)
        if plan.residuals is not None and not plan.tuner.current.has_residuals:
            plan.residuals.restore(None)  # after a kind that was used so far
        if change is not None or plan.tuner.current is not self._grad_comm:
            self.drop_context(clears_gradients=False)
            self._make_contexts(plan, context.balance, context.last)

    def compare_losses(self, plan: TrainingPlan, loss: Loss, batch: Batch) -> None:
        """Compare losses with and without compression, if it is time to (loss_comparison.py). Called before a step."""
        session, kind = self._session, plan.tuner.candidate(batch.number)
        if kind is None:
            return
        found = session.calls.make(
            "the comparison of losses",
            lambda: self._try_steps(plan, loss, kind, Position(batch.epoch, batch.step, batch.number)),
            encode=LossComparison.to_json,
            decode=LossComparison.from_json,
        )
        chosen = plan.tuner.conclude(kind, batch.number, is_harmless=found.is_harmless)
        text = f'{found.describe(kind.value)}; grad_comm "{chosen.value}" from step {batch.number + 1} on'
        session.trace_writer.event("grad_comm", text=text)
        session.announce(text)

    def _try_steps(self, plan: TrainingPlan, loss: Loss, kind: GradComm, here: Position) -> LossComparison:
        """Take the same steps without compression and with gradients sent as `kind`, and undo them.

        here  of the batch with which they begin

        A request to stop counts afterwards: a comparison that is made later could come to another conclusion.
        """
        session, requests = self._session, StepRequests(check_left=self._session.calls.check_left)
        exchange = partial(sharded_training.exchange_within_call, session, plan, 0, confirms=False)
        context, sent = self.context, plan.tuner.current
        assert context is not None
        drop_update(context)  # all workers have applied the step before, so no worker needs it any more
        losses, moved, balance = list[list[float]](), list[Movement](), context.balance
        try:
            for plan.tuner.current in (GradComm.FP32, kind):
                self.drop_context(clears_gradients=True)
                self._make_contexts(plan, balance, LastUpdate())
                with session.step_stream.active(), undone(plan) as movement:
                    context = self.begin_step(0)
                    losses.append(losses_of_steps(context, plan.batches, loss, here, requests, exchange))
                    moved.append(movement())
        finally:
            plan.tuner.current = sent
        self.drop_context(clears_gradients=True)
        self._make_contexts(plan, balance, LastUpdate())
        return LossComparison.of(losses[0], losses[1], share_moved(*moved))

    def _agree_on_largest(self, mine: list[float]) -> list[float]:
        """Return the largest of all workers of each of these numbers; the same on all of them, also on newcomers."""
        session = self._session

        def call() -> list[float]:
            rows = gather_values(session.group, mine, device=session.device)
            return [max(times) for times in zip(*rows, strict=True)]

        return session.calls.make("the choice of grad_comm", call)

    def drop_context(self, *, clears_gradients: bool) -> None:
        """Release what depends on the workers and on the trained parameters; `assign_shards` builds it again.

        clears_gradients  False between two steps, where the program may read the gradients of the last one. A parameter
                          that is frozen must not keep its gradient, which the optimiser would use in every step.
        """
        if self.context is not None:
            self.context.buffers.abort()
            for one in self.contexts.values():
                if clears_gradients:
                    one.gradients.clear()
                one.audit.stop_recording()
                one.gradients.stop()  # a traceback may still refer to it
            self.context.sum.close()

    # -- generations of workers (recovery/elastic_calls.py) ---------------------------------------------------------

    def form_group(self, world: World) -> dist.ProcessGroup:
        return self._session.form_group(world)

    def end_generation(self) -> None:
        self._left_s, self._session.trace_writer.state = time.monotonic(), "recovering"
        self.drop_context(clears_gradients=self._is_stepping())

    def begin_generation(self) -> None:
        trace_writer = self._session.trace_writer
        if self.plan is not None:
            plan, size = self.plan, self._session.world.size
            sharded_training.assign_optimizer(self._session, plan)
            shares = training_plan.make_shard_balance(plan, self._config, size).shares
            sharded_training.assign_residuals(self._session, plan, shares)
            self.assign_shards(plan)
        if self._left_s is not None:
            trace_writer.event("recovery", took_s=time.monotonic() - self._left_s)
            self._left_s, trace_writer.state = None, "training"

    def send_step(self, source: int, then: Callable[[], None]) -> None:
        plan, session, context = self.plan, self._session, self.context
        assert plan is not None
        mine = None
        if session.world.rank == source:
            assert context is not None
            mine = encode_update(self.applied_steps - 1, context)
        sent = broadcast_state(session.group, session.device, source, mine)
        if self.applied_steps < 0 or self.applied_steps == sent["index"] + 1:
            return  # this worker is new, or has applied the step
        if self.applied_steps != sent["index"]:
            raise DivergenceError(f"this worker has applied {self.applied_steps} steps, and gets step {sent['index']}")
        update = apply_sent_step(self.begin_step(sent["part"]), sent)
        self.end_step(plan, update.part, ends_epoch=update.ends_epoch, skipped=not update.finite)
        then()
        faults.at("restored")

    def send_state(self, source: int, then: Callable[[], None]) -> None:
        plan, session = self.plan, self._session
        assert plan is not None
        is_source, is_new, mine = session.world.rank == source, self.applied_steps < 0, None
        if is_source:
            session.checkpoints.ledger.write()  # a worker that gets this state does not know the samples before it
            mine = session.checkpoints.state(plan) | {"applied_steps": self.applied_steps}
        state = broadcast_state(session.group, session.device, source, mine)
        if is_new:
            if plan.sharded_state is not None:
                plan.sharded_state.forget()
            session.checkpoints.restore(plan, state)
            self.applied_steps = state["applied_steps"]
            then()
            faults.at("restored")
        # Other workers are not compared: they may not have reached the end of their loop body.
        compared = named_state(plan.model, plan.optimizer) if is_source or is_new else None
        refuse_other_state(session.group, session.device, source, compared, self.applied_steps)
