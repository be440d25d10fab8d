"""The training loop of a run: yields the batches, takes the steps, and saves at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from enum import Enum
from functools import partial
from typing import Any, Final, final

import torch.distributed as dist

from lockstep import faults
from lockstep.checkpoint.store import SUSPECT
from lockstep.comm import abortable_wait
from lockstep.data.batches import Batch, Batches, Position
from lockstep.data.reader import DataError
from lockstep.errors import DivergenceError, LockstepError
from lockstep.recovery.collective_calls import print_message
from lockstep.recovery.run_directory import pending_stops, write_shards, write_stop
from lockstep.seed import derive_seed, seed_all
from lockstep.step import determinism, step_check
from lockstep.step.compiled_model import is_compiled
from lockstep.step.shard_graphs import ShardGraphs
from lockstep.step.step import take_step
from lockstep.step.step_table import StepTable, agree_on_metrics
from lockstep.step.step_types import Loss, Result, StepRequests, Stop, TrainingPlan
from lockstep.train import sharded_training
from lockstep.train.evaluation import evaluate_for_state_log
from lockstep.train.loop_check import LoopCheck, versions_of, warn_untrained
from lockstep.train.loop_state import WorkerState
from lockstep.train.optimizer_set import OptimizerSet, parts_of
from lockstep.train.progress import Progress
from lockstep.train.run_state import is_batch_done
from lockstep.train.session import Session
from lockstep.train.training_plan import (
    RunConfig,
    describe_nothing_to_train,
    describe_start,
    last_facts,
    update_trainable,
)

TOLD_WITHIN_S: Final = 5.0  # until all workers know that some of them are wrong


class LoopStage(Enum):
    """Where the program is: before, in or after the loop over `run.train`."""

    BEFORE = "before"
    RUNNING = "running"
    ENDED = "ended"  # all that was trained is saved


@final
class TrainLoop:
    """One loop over the batches of a plan. Its workers may change (loop_state.py)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.state = WorkerState(session, is_stepping=lambda: self._check is not None and self._check.is_stepping)
        self.progress = Progress()
        self._check: LoopCheck | None = None
        self._stage = LoopStage.BEFORE
        self._resumed_at = 0  # number of applied steps when the loop began
        self._here = Position()  # of the batch that was yielded last
        self._in_hand = False  # the program has that batch, and may still take the step
        self._is_save_asked = False  # by the program, in the body of the loop: see `save`
        self._fetched_again: Batch | None = None  # the same batch with the shards of the current workers
        self._batch_versions: list[int] = []  # of its tensors when it was yielded: see `versions_of`
        self._is_batch_changed = False  # the program wrote to it before it took the step
        self._assignment = 0  # `WorkerState.assignments` when it was fetched
        self._steps_before = 0  # number of steps that were applied with earlier batches
        self._restored = 0  # steps with that batch that are in the checkpoint
        self._batches: Generator[Batch, None, None]
        self._loss: Loss | None = None  # the loss function of the last step, for `lockstep certify`

    @property
    def plan(self) -> TrainingPlan | None:
        """What is trained; None before the loop."""
        return self.state.plan

    @property
    def is_running(self) -> bool:
        return self._stage is LoopStage.RUNNING

    @property
    def has_begun(self) -> bool:
        return self._stage is not LoopStage.BEFORE

    @property
    def _should_stop(self) -> bool:
        return self._session.stops.agreed is not Stop.NO

    # -- begin and end -----------------------------------------------------------------------------------------------

    def run(self, plan: TrainingPlan, steps: int | None) -> Iterator[Batch]:
        """Yield the batches of the plan, from where the last run ended."""
        session, self.state.plan, self.state.step_limit = self._session, plan, steps
        session.calls.announce_training(plan.batches.settings.shards, compiles=is_compiled(plan.model))
        if plan.synced and session.exact and session.calls.is_elastic:
            raise LockstepError(determinism.describe_synced(plan.synced[0]))
        capture = session.options.capture
        plan.graphs = ShardGraphs.on_device(
            session.device, plan.model, capture, exact=session.exact, announce=session.announce
        )
        if isinstance(plan.optimizer, OptimizerSet) and plan.graphs.is_enabled:
            plan.graphs.refuse("the run has several optimizers")
        if plan.synced and plan.graphs.is_enabled:
            plan.graphs.refuse(f"{plan.synced[0]} is a SyncBatchNorm, which communicates in the forward pass")
        sharded_training.shard_optimizer(session, plan)
        self._refuse_unsavable(plan)
        self._resume(plan)
        if self.state.context is None:
            self.state.assign_shards(plan)
        if session.directory is not None and session.is_main:
            write_shards(session.directory, plan.batches.settings.shards)
        check = self._check = LoopCheck(plan.model, plan.optimizer, plan.leaves, plan.group_sizes)
        plan.group_sizes = plan.group_sizes or check.group_sizes()
        self._print_start(plan)
        if session.checkpoints.was_stopped:
            self._stage = LoopStage.ENDED
            return
        yield from self._yield_batches(plan, check)
        if session.state_log is None or session.directory is not None:
            self.end()
        if session.state_log is not None and self._loss is not None and not session.state_log.is_part:
            evaluate_for_state_log(session, session.state_log, plan.model, self._loss, plan.batches)
        if session.is_trial:
            raise SystemExit(0)  # the rest of the program is not needed
        if session.stops.agreed is Stop.SIGNAL and session.options.exit_on_interrupt:
            raise session.stops.exit()
        sharded_training.compute_digest(session, plan)

    def _refuse_unsavable(self, plan: TrainingPlan) -> None:
        """Raise now, not at the first checkpoint or the first lost worker, if the state cannot be saved."""
        if self._session.directory is not None or self._session.calls.is_elastic:
            self._session.checkpoints.refuse_unsavable(plan)

    def _resume(self, plan: TrainingPlan) -> None:
        """Restore the state where the last run in this directory ended, or where the other workers are in the loop."""
        session = self._session

        def resume() -> None:
            sharded_training.assign_first(session, plan)
            compare, announce = partial(session.call_check.compare, "resuming"), session.options.progress
            step = session.checkpoints.resume(plan, compare, writes=session.is_main, announce=announce)
            if self.state.context is not None:  # built when these workers came together, before the state was restored
                self.state.rebuild_context(plan)
            if step is not None:
                session.trace_writer.event("resumed", text=f"from the checkpoint of step {step}")
            self.state.applied_steps = plan.batches.position.number

        session.calls.make("resuming", resume, begins_loop=True)
        self._resumed_at = plan.batches.position.number
        session.checkpoints.begin(plan)

    def _print_start(self, plan: TrainingPlan) -> None:
        """Print what is trained, and from which step on; or why nothing is."""
        session, options = self._session, self._session.options
        is_shown = session.settings.view and options.trace  # in the live view (report/live_view.py)
        is_printing = lambda: session.is_main and options.progress  # noqa: E731  (another worker may become rank 0)
        steps = self.state.step_limit or plan.batches.steps_in_all
        self.progress = Progress(steps=steps, is_printing=is_printing, is_shown=is_shown)
        if session.is_main:
            nothing = describe_nothing_to_train(
                plan, self.state.step_limit, was_stopped=session.checkpoints.was_stopped
            )
            if nothing is not None:
                print_message(nothing)
            elif options.progress:
                print_message(describe_start(plan, RunConfig(options, session.seed, session.exact), session.world))
        if self._session.is_main:
            warn_untrained(plan.leaves, plan.optimizer)

    def _yield_batches(self, plan: TrainingPlan, check: LoopCheck) -> Iterator[Batch]:
        batches, session, steps = plan.batches, self._session, self.state.step_limit
        self._stage = LoopStage.RUNNING
        with closing(iter(batches)) as self._batches:  # or its loaders would run until it is garbage-collected
            while not self._should_stop and (steps is None or batches.position.number < steps):
                session.calls.begin_step(batches.position.number)
                self.state.prepare_step(plan)
                self._assignment, self._here = self.state.assignments, batches.position
                session.observer.begin_iteration(batches.position.number)
                batch = next(self._batches, None)
                session.observer.end_data_wait()
                if batch is None:
                    session.calls.make("the end of the data", lambda: self._agree_on_end(batches))
                    break
                self._in_hand, self._fetched_again = True, None
                self._restored = len(plan.finished)
                self._steps_before = self.state.applied_steps - self._restored
                self._batch_versions = versions_of(batch) if session.calls.is_elastic else []
                session.calls.hand_out()
                check.hand_out(batch.number)
                seed_all(derive_seed(session.seed, "loop", batch.number), session.device)
                yield batch
                check.end_iteration()
                if plan.finished and not is_batch_done(plan):
                    self._record_samples(plan, batch)
                asked = self.state.end_batch(plan, ends_epoch=batch.ends_epoch)
                sharded_training.prepare_for_move(session, plan)
                self._in_hand, asked_here, self._is_save_asked = False, self._is_save_asked, False
                is_due = sharded_training.is_save_due(session, plan, batch, asked=asked)
                if (is_due or asked_here) and not self._should_stop:
                    self.save(plan)

    def end(self, *, is_stopped: bool = False) -> None:
        """Save what was trained, all workers together. `is_stopped`: the program has left the loop for good."""
        plan, session = self.plan, self._session
        assert plan is not None
        self._stage, here = LoopStage.ENDED, self.position(plan)
        session.observer.end_loop()
        self.progress.end(here.number)
        if not plan.is_distributed and not session.checkpoints.is_saved(plan, here):
            self.save(plan)  # a distributed state is saved below: on whether it is saved, workers may not agree
        directory, prints = session.directory, self._should_stop and session.is_main
        if directory is None:
            if prints:
                print_message(f"interrupted at step {here.number}; nothing is saved, since this Run has no directory")
            return

        def keep() -> None:
            note_end = partial(write_stop, directory, here.number) if is_stopped else lambda: None
            sharded_training.save_last(session, plan, here, note_end)

        session.calls.make("the last checkpoint", keep)
        if prints and not is_stopped and session.checkpoints.is_on_disk(plan, here):
            print_message(f"saved at step {here.number}; the same command continues")
        elif prints and not is_stopped:
            print_message(f"step {here.number} could not be saved; the same command continues from the last checkpoint")

    def save_after(self, error: BaseException) -> None:
        """Save what was trained when an exception leaves the loop: rank 0 writes a checkpoint, without the others.

        Not after errors of Lockstep, which may mean that the state is wrong or that other workers are ahead; and not in
        the middle of the optimiser's step.
        """
        plan, session, directory = self.plan, self._session, self._session.directory
        is_ours = isinstance(error, LockstepError) and not isinstance(error, DataError)
        if plan is None or directory is None or not self.is_running or is_ours or self.state.is_applying:
            return
        if not session.is_main or self.state.applied_steps <= self._resumed_at or not session.calls.may_commit():
            return
        here = self.position(plan)

        def note_stop() -> None:
            if isinstance(error, SystemExit) and not error.code:
                if session.on_one.do_all_leave():  # if not, the others continue, and this worker counts as lost
                    write_stop(directory, here.number)
            elif isinstance(error, Exception):
                pending_stops.add(directory, here.number, error)

        session.checkpoints.save_alone(plan, here, f"the program left the loop ({type(error).__name__})", note_stop)

    def close(self) -> None:
        """Release what belongs to this worker alone."""
        if self._check is not None:
            self._check.close()
        if (context := self.state.context) is not None:
            context.sum.close()

    # -- positions and checkpoints -----------------------------------------------------------------------------------

    def position(self, plan: TrainingPlan) -> Position:
        """Position of the next step: that of the current batch, unless all optimisers have taken their step."""
        return self._here if self._in_hand and not is_batch_done(plan) else plan.batches.position

    def save(self, plan: TrainingPlan) -> None:
        """Save the state; in the body of the loop when that has ended: a resumed run does not begin in the middle."""
        if self._in_hand and self.is_running:
            self._is_save_asked = True
            return
        sharded_training.save(self._session, plan, self.position(plan), self._session.checkpoints.save)

    def save_best(self, plan: TrainingPlan, metric: float, mode: str) -> bool:
        """See `Run.save_best`."""
        if is_better := self._session.checkpoints.is_best(metric, mode):
            sharded_training.save(self._session, plan, self.position(plan), self._session.checkpoints.save_best)
        return is_better

    def whereabouts(self) -> dict[str, Any]:
        """Position of the loop, for the failure report."""
        return {} if self.plan is None else {"step": self._here.number, "epoch": self._here.epoch}

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, plan: TrainingPlan, loss: Loss, batch: Batch, part: int) -> Result:
        """See `Run.step`. `part` is the number of the optimiser."""
        try:
            return self._step(plan, loss, batch, part)
        except DivergenceError as error:
            if error.wrong_ranks is not None and plan.audits.every:
                self._go_back(error.wrong_ranks, str(error))
            raise

    def _go_back(self, wrong_ranks: Sequence[int], why: str) -> None:
        """Set unverified checkpoints aside after workers computed wrongly. In an elastic run, end this process: others
        start in its place, from the last verified checkpoint, but not on the machines that are wrong."""
        session = self._session

        def set_aside() -> None:
            with suppress(Exception):  # until all workers know the error; one that has ended knows it
                abortable_wait.done_within(session.group.barrier(dist.BarrierOptions()), TOLD_WITHIN_S)
            moved = session.checkpoints.set_aside_unverified() if session.is_main else []
            if moved:
                numbers = ", ".join(map(str, moved))
                print_message(f"the checkpoints of steps {numbers} may be wrong, and are in {SUSPECT}/ now")
            session.trace_writer.event("corruption", text=why)

        session.calls.restart(why, set_aside, is_wrong=session.world.rank in wrong_ranks)

    def _step(self, plan: TrainingPlan, loss: Loss, batch: Batch, part: int) -> Result:
        session, check = self._session, self._check
        assert check is not None
        check.begin_step(batch, part, warns=session.is_main)
        is_first = len(plan.finished) == self._restored
        if part in plan.finished:  # it is in the checkpoint, which was saved in the middle of this batch
            check.end_step(part)
            return plan.finished[part]
        self._is_batch_changed = session.calls.is_elastic and versions_of(batch) != self._batch_versions
        if check.has_other_parameters:
            self._update_trainable(plan, check)
        check.is_stepping = True
        try:
            self.state.compare_losses(plan, loss, batch)
            what = f"run.step of optimizer {part}" if part else "run.step"
            make = partial(session.calls.make, encode=Result.to_json, decode=Result.from_json)
            take = partial(self._take_step, plan, loss, batch, part)
            result = make(what, take, may_repeat=True, reads_weights=False)
        except BaseException as error:
            check.note_failure(part, error)
            self._end_failed_step(error)
            raise
        finally:
            check.is_stepping = False
        check.end_step(part)
        plan.finished[part] = result
        plan.tuner.add_error(batch.number, result.rounding_error)
        self.state.start_receipt()
        sharded_training.exchange_weights(session, plan, part)
        if self.state.applied_steps <= self._resumed_at + len(parts_of(plan.optimizer)):  # it has a state now
            self._refuse_unsavable(plan)
        session.stops.agreed = max(session.stops.agreed, result.stop)
        if result.move:
            session.calls.move_at_next_step(result.move)
        if is_batch_done(plan):
            self._record_samples(plan, batch)
        compare = partial(self.state.compare_replicas, batch.number)
        if session.calls.make("the comparison of replicas", compare, reads_weights=False):
            session.checkpoints.verified_steps = batch.number  # not what is saved now, before the next round
        if session.state_log is not None:
            self._loss = loss
            log = partial(session.state_log.log_step, batch.number, result.loss)
            if not is_first:
                log = partial(session.state_log.log_evaluation, what, {"loss": [result.loss]})
            sharded_training.log_state(session, plan, log)
        if result.metrics:
            session.trace_writer.log(batch.number + 1, result.metrics, writes=session.is_main)
        if is_first:
            self.progress.step(result, epoch=batch.epoch, samples=batch.count, waited_for_data_s=plan.batches.wait_s)
            facts = partial(last_facts, plan, result)
            session.observer.end_step(batch.number, result.loss, samples=batch.count, epoch=batch.epoch, facts=facts)
        else:
            session.observer.end_further_step()
        return result

    def _record_samples(self, plan: TrainingPlan, batch: Batch) -> None:
        session, result = self._session, next(iter(plan.finished.values()))  # all have the same samples
        session.checkpoints.ledger.record(
            batch.number,
            epoch=batch.epoch,
            samples=batch.count,
            fingerprint=result.samples,
            seen=batch.seen,
            writes=session.is_main,
        )

    def _end_failed_step(self, error: BaseException) -> None:
        """Restore the buffers after a failed step. If it failed in the exchange of gradients, no call can follow."""
        context = self.state.abort_step(error)
        # Errors of Lockstep are raised by all workers at the same place, so that their calls still match.
        is_ours = isinstance(error, LockstepError)
        if context is not None and context.is_exchanging and isinstance(error, Exception) and not is_ours:
            self._session.calls.failed = error

    def _take_step(self, plan: TrainingPlan, loss: Loss, batch: Batch, part: int) -> Result:
        session, context = self._session, self.state.begin_step(part)
        if self._assignment != self.state.assignments:  # the workers have changed, and with them the shards of this one
            if self._is_batch_changed:
                raise LockstepError(
                    f"the program has changed the samples of batch {batch.number} in its loop, and a worker "
                    "was lost, so that they are shared out anew, without the change. Change samples in collate_fn, or "
                    "in the loss function"
                )
            plan.batches.seek(Position(batch.epoch, batch.step, batch.number))
            self._assignment, self._fetched_again = self.state.assignments, next(self._batches, None)
            assert self._fetched_again is not None
        if self._fetched_again is not None:
            batch = self._fetched_again
        if plan.synced and session.world.size > 1:
            determinism.refuse_empty_shards(plan.synced[0], batch, context.sum.shares, exact=session.exact)
        if self.state.applied_steps != self._steps_before + len(plan.finished) and session.calls.is_elastic:
            raise DivergenceError(
                f"step {batch.number} would be applied twice: this worker has applied {self.state.applied_steps} steps "
                f"in all, and {self._steps_before} with earlier batches; report this"
            )
        calls, save = session.calls, session.checkpoints.saver.is_time_over()
        requests = StepRequests(session.stops.asked, calls.wants_to_move, self.state.commit, calls.check_left, save)
        versions = versions_of(batch) if isinstance(plan.optimizer, OptimizerSet) else []
        with session.step_stream.active():
            result = take_step(context, loss, batch, requests)
        if versions and versions != versions_of(batch):
            raise LockstepError(
                f"the loss function of optimizer {part} has changed the samples of batch {batch.number} in place. The "
                "other optimizers would see the change, but not after a resume in the middle of the batch; work on a "
                "copy, or change samples in collate_fn"
            )
        self.state.end_step(plan, part, ends_epoch=batch.ends_epoch, skipped=result.skipped)
        plan.finished[part] = result
        faults.at("applied")
        return result

    def _update_trainable(self, plan: TrainingPlan, check: LoopCheck) -> None:
        """Train what is trainable now: the program froze or unfroze parameters, or added some to the optimiser."""
        session = self._session
        for parameter in plan.model.parameters():  # now: in a call below the workers may change, and with them contexts
            parameter.grad = None
        session.agree("run.step: what is trained", update_trainable(plan))
        session.calls.make("run.step: what is kept", lambda: sharded_training.assign_optimizer(session, plan))
        is_current = self._assignment == self.state.assignments  # no worker was lost meanwhile
        self.state.rebuild_context(plan)
        if is_current:
            self._assignment = self.state.assignments
        check.follow(plan.leaves)
        plan.group_sizes = check.group_sizes()
        if self._session.is_main:
            warn_untrained(plan.leaves, plan.optimizer)

    def _agree_on_end(self, batches: Batches) -> None:
        """Check that a stream has ended on all workers; raises UnevenDataError if not. It may end at any step."""
        context = self.state.context
        if batches.steps_in_all is not None or context is None:
            return
        if context.metric_names is None:
            context.metric_names = agree_on_metrics(context.sum, None)
        table = StepTable(context.sum, buffers=len(context.buffers))
        table.send(None, names=context.metric_names)
        step_check.refuse_bad_data(table.outcome(), batches.position.number)
