"""The training loop of a run: batches are handed out, steps taken, and the work shared out when workers change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from enum import Enum
from functools import partial
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep import faults
from lockstep.data.batches import Batch, Batches, Position
from lockstep.data.reader import DataError
from lockstep.ddp.state_digest import named_state
from lockstep.errors import DivergenceError, LockstepError
from lockstep.seed import mix, sow
from lockstep.train import determinism, step_check
from lockstep.train.collective_calls import say
from lockstep.train.evaluation import evaluate_for_witness
from lockstep.train.loop_check import LoopCheck, describe_untrained
from lockstep.train.progress import Progress
from lockstep.train.replica_check import ReplicaCheck
from lockstep.train.run_directory import pending_stops, write_stop
from lockstep.train.session import Session
from lockstep.train.state_transfer import apply_sent_step, encode_update, hand_over, refuse_other_state
from lockstep.train.step import Loss, Plan, Result, Stop, Training, Wishes, take_step
from lockstep.train.step_table import Tally, agree_on_metrics
from lockstep.train.trained_parameters import (
    Basis,
    describe,
    describe_nothing_to_train,
    facts_of,
    follow_trainable,
    introduce,
    share_out,
    sight_of,
)
from lockstep.world.world import World

SAVE_AFTER_ERROR_S: Final = 120.0


class LoopStage(Enum):
    """Where the program is: before, in or behind the loop over `run.train`."""

    BEFORE = "before"
    RUNNING = "running"
    ENDED = "ended"  # all that was trained is saved


@final
class TrainLoop:
    """One loop over the batches of a plan, and what it does when the workers change (elastic_calls.py)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.plan: Plan | None = None
        self.training: Training | None = None
        self.progress = Progress()
        self._check: LoopCheck | None = None
        self._stage = LoopStage.BEFORE
        self._steps: int | None = None  # after which to end
        self._generation = 0  # how often the work was shared out
        self._parted_s: float | None = None  # since when there is no generation
        self._applied = -1  # steps in our state
        self._resumed_at = 0  # steps in it when the loop began
        self._is_applying = False  # a step that is half done cannot be saved
        self._here = Position()  # of the batch that was handed out last
        self._in_hand = False  # the program has that batch, and may yet take it
        self._fetched_again: Batch | None = None  # the same batch, as the workers that there are now share it
        self._batch_versions: list[int] = []  # how often its tensors had been written when it was handed out
        self._is_batch_changed = False  # by the program, before it took the step
        self._handed_out = 0  # the generation in which it was
        self._coming: Generator[Batch, None, None]
        self._loss: Loss | None = None  # of the last step, for `lockstep certify`

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

    def run(self, plan: Plan, steps: int | None) -> Iterator[Batch]:
        """Hand out the batches of the plan, from where the last run ended."""
        session, self.plan, self._steps = self._session, plan, steps
        session.calls.limit(plan.batches.settings.shards)
        if plan.synced and session.exact and session.calls.is_elastic:
            raise LockstepError(determinism.describe_synced(plan.synced[0]))
        self._refuse_unsavable(plan)
        self._resume(plan)
        if self.training is None:
            self._share_out(plan)
        check = self._check = LoopCheck(plan.model, plan.optimizer, plan.leaves)
        self._introduce(plan)
        if session.checkpoints.was_stopped:
            self._stage = LoopStage.ENDED
            return
        yield from self._hand_out(plan, check)
        if session.witness is not None:
            if session.directory is not None:
                self.end()
            if self._loss is not None and not session.witness.is_part:
                evaluate_for_witness(session, session.witness, plan.model, self._loss, plan.batches)
            raise SystemExit(0)  # the rest of the program is not asked for
        self.end()
        if session.stops.agreed is Stop.SIGNAL and session.options.exit_on_interrupt:
            raise session.stops.exit()

    def _refuse_unsavable(self, plan: Plan) -> None:
        """Not at the first checkpoint, nor when the first worker is lost, but now."""
        if self._session.directory is not None or self._session.calls.is_elastic:
            self._session.checkpoints.refuse_unsavable(plan)

    def _resume(self, plan: Plan) -> None:
        """From where the last run in this directory ended; or where the others are, if they are in the loop."""
        session = self._session

        def resume() -> None:
            compare = partial(session.call_check.compare, "resuming")
            tells = session.options.progress
            step = session.checkpoints.resume(plan, compare, writes=session.is_main, tells=tells)
            if step is not None:
                session.chronicle.event("resumed", text=f"from the checkpoint of step {step}")
            self._applied = plan.batches.position.number

        session.calls.make("resuming", resume, begins_loop=True)
        self._resumed_at = plan.batches.position.number
        session.checkpoints.saving.begin(self._resumed_at)

    def _introduce(self, plan: Plan) -> None:
        """Say what is trained, from where on; or why nothing is."""
        session, options = self._session, self._session.options
        is_shown = "LOCKSTEP_VIEW" in os.environ and options.trace  # in the launcher's picture (report/live_view.py)
        speaks = lambda: session.is_main and options.progress  # noqa: E731  (another worker may become rank 0)
        steps = self._steps or plan.batches.steps_in_all
        self.progress = Progress(steps=steps, speaks=speaks, is_shown=is_shown)
        if session.is_main:
            nothing = describe_nothing_to_train(plan, self._steps, was_stopped=session.checkpoints.was_stopped)
            if nothing is not None:
                say(nothing)
            elif options.progress:
                say(introduce(plan, Basis(options, session.seed, session.exact), session.world))
        self._tell_untrained(plan)

    def _hand_out(self, plan: Plan, check: LoopCheck) -> Iterator[Batch]:
        batches, session, steps = plan.batches, self._session, self._steps
        self._stage = LoopStage.RUNNING
        with closing(iter(batches)) as self._coming:  # or its loaders would end whenever it is collected
            while not self._should_stop and (steps is None or batches.position.number < steps):
                session.calls.begin_step(batches.position.number)
                self._handed_out, self._here = self._generation, batches.position
                session.observer.top(batches.position.number)
                batch = next(self._coming, None)
                session.observer.data_came()
                if batch is None:
                    session.calls.make("the end of the data", lambda: self._agree_on_end(batches))
                    break
                self._in_hand, self._fetched_again = True, None
                self._batch_versions = versions_of(batch) if session.calls.is_elastic else []
                session.calls.hand_out()
                check.hand_out(batch.number)
                sow(mix(session.seed, "loop", batch.number), session.device)
                yield batch
                check.end_iteration()
                self._in_hand = False
                is_due = session.checkpoints.saving.is_due(batch.number, ends_epoch=batch.ends_epoch)
                if is_due and not self._should_stop:
                    self.save(plan)

    def end(self, *, is_stopped: bool = False) -> None:
        """Save what was trained, all workers together. `is_stopped`: the program has left the loop for good."""
        plan, session = self.plan, self._session
        assert plan is not None
        self._stage, here = LoopStage.ENDED, self.position(plan)
        session.observer.end_loop()
        self.progress.end(here.number)
        if not session.checkpoints.saving.has(here.number):
            self.save(plan)
        directory, tells = session.directory, self._should_stop and session.is_main
        if directory is None:
            if tells:
                say(f"interrupted at step {here.number}; nothing is saved, since this Run has no directory")
            return

        def keep() -> None:
            session.checkpoints.keep_last(plan, here, session.calls.check_left)
            if is_stopped:
                write_stop(directory, here.number)

        session.calls.make("the last checkpoint", lambda: session.once.run(keep))
        if tells and not is_stopped:
            say(f"saved at step {here.number}; the same command continues")

    def save_after(self, error: BaseException) -> None:
        """Keep what was trained when an exception leaves the loop: rank 0 writes a checkpoint, without the others.

        Not after errors of ours, which may mean that the state is wrong or that others are ahead; nor in the middle of
        the optimiser's step.
        """
        plan, session, directory = self.plan, self._session, self._session.directory
        is_ours = isinstance(error, LockstepError) and not isinstance(error, DataError)
        if plan is None or directory is None or not self.is_running or is_ours or self._is_applying:
            return
        if not session.is_main or self._applied <= self._resumed_at or not session.calls.may_commit():
            return
        end_s, here = time.monotonic() + SAVE_AFTER_ERROR_S, self.position(plan)

        def go_on() -> None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"it was not written within {SAVE_AFTER_ERROR_S:.0f} s")

        try:
            session.checkpoints.keep_last(plan, here, go_on)
            if isinstance(error, SystemExit) and not error.code:
                if session.once.do_all_leave():  # else the others go on, and this worker is missed
                    write_stop(directory, here.number)
            elif isinstance(error, Exception):
                pending_stops.add(directory, here.number, error)
            say(f"saved at step {here.number}, where the program left the loop ({type(error).__name__})")
        except Exception as problem:
            say(f"what was trained up to step {here.number} could not be saved: {type(problem).__name__}: {problem}")

    def close(self) -> None:
        """Release what belongs to this worker alone."""
        if self._check is not None:
            self._check.close()
        if self.training is not None:
            self.training.sum.close()

    # -- positions and checkpoints -----------------------------------------------------------------------------------

    def position(self, plan: Plan) -> Position:
        """Of the next step that is to be taken: that of the batch in hand, unless it has been."""
        return self._here if self._in_hand and self._applied <= self._here.number else plan.batches.position

    def save(self, plan: Plan) -> None:
        self._session.checkpoints.save(plan, self.position(plan), writes=self._session.is_main)

    def whereabouts(self) -> dict[str, Any]:
        """For the card of a run that failed."""
        return {} if self.plan is None else {"step": self._here.number, "epoch": self._here.epoch}

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, plan: Plan, loss: Loss, batch: Batch) -> Result:
        """See `Run.step`."""
        session, check = self._session, self._check
        assert check is not None
        check.begin_step(batch, tells=session.is_main)
        self._is_batch_changed = session.calls.is_elastic and versions_of(batch) != self._batch_versions
        if check.has_other_parameters:
            self._follow_trainable(plan, check)
        check.is_stepping = True
        try:
            take = partial(self._take, plan, loss, batch)
            result = session.calls.make("run.step", take, encode=Result.plain, decode=Result.of, may_repeat=True)
        except BaseException as error:
            check.note_failure(error)
            self._end_failed_step(error)
            raise
        finally:
            check.is_stepping = False
        check.end_step()
        self._start_receipt()
        if self._applied == self._resumed_at + 1:  # the optimiser has a state now
            self._refuse_unsavable(plan)
        session.stops.agreed = max(session.stops.agreed, result.stop)
        if result.move:
            session.calls.move_at_next_step(result.move)
        session.checkpoints.ledger.note(
            batch.number,
            epoch=batch.epoch,
            samples=batch.count,
            fingerprint=result.samples,
            seen=batch.seen,
            writes=session.is_main,
        )
        session.calls.make("the comparison of replicas", lambda: self._compare_replicas(batch.number))
        if session.witness is not None:
            self._loss = loss
            state = partial(named_state, plan.model, plan.optimizer)
            session.witness.note_step(batch.number, result.loss, state, writes=session.is_main)
        if result.metrics:
            session.chronicle.log(batch.number + 1, result.metrics, writes=session.is_main)
        self.progress.step(result, epoch=batch.epoch, samples=batch.count, waited_for_data_s=plan.batches.wait_s)
        facts = partial(facts_of, plan, result)
        session.observer.stepped(batch.number, result.loss, samples=batch.count, epoch=batch.epoch, facts=facts)
        return result

    def _end_failed_step(self, error: BaseException) -> None:
        """A step that failed has not changed the buffers; and if gradients were being exchanged, no call can follow."""
        training = self.training
        if training is not None:
            training.running.abandon()
            # Errors of ours are raised by all workers at the same place, so that their calls still fit together.
            if training.is_exchanging and isinstance(error, Exception) and not isinstance(error, LockstepError):
                self._session.calls.failed = error

    def _take(self, plan: Plan, loss: Loss, batch: Batch) -> Result:
        session, training = self._session, self.training
        assert training is not None
        if self._handed_out != self._generation:  # the workers are others by now, and so are our shards
            if self._is_batch_changed:
                raise LockstepError(
                    f"the program has changed the samples of batch {batch.number} in its loop, and a worker "
                    "was lost, so that they are shared out anew, without the change. Change samples in collate_fn, or "
                    "in the loss function"
                )
            plan.batches.seek(Position(batch.epoch, batch.step, batch.number))
            self._handed_out, self._fetched_again = self._generation, next(self._coming, None)
            assert self._fetched_again is not None
        if self._fetched_again is not None:
            batch = self._fetched_again
        if plan.synced and session.world.size > 1:
            determinism.refuse_empty_shards(plan.synced[0], batch, training.sum.shares, exact=session.exact)
        if batch.number < self._applied and session.calls.is_elastic:
            raise DivergenceError(
                f"step {batch.number} would be applied twice, after step {self._applied - 1}; report this"
            )
        calls = session.calls
        wishes = Wishes(session.stops.asked, calls.wants_to_move, self._commit, calls.check_left)
        result = take_step(training, loss, batch, wishes)
        self._end_applying(plan, batch.number, ends_epoch=batch.ends_epoch, skipped=result.skipped)
        faults.at("applied")
        return result

    def _end_applying(self, plan: Plan, number: int, *, ends_epoch: bool, skipped: bool) -> None:
        if plan.schedule is not None and (ends_epoch if plan.interval == "epoch" else not skipped):
            plan.schedule.step()
        self._applied, self._is_applying = number + 1, False

    def _start_receipt(self) -> None:
        """Learn, by the time of the next backward pass, that all workers have applied this step (`Update`)."""
        training = self.training
        assert training is not None
        if training.newest is not None and training.newest.receipt is None:
            with suppress(Exception):  # the group has failed; so will the next call, which is made again then
                training.newest.receipt = training.sum.start_receipt()

    def _commit(self) -> None:
        self._session.calls.check_commit()
        self._is_applying = True

    def _follow_trainable(self, plan: Plan, check: LoopCheck) -> None:
        """The program has frozen or unfrozen parameters, or given some to the optimiser: this step trains what is
        trainable now."""
        self._session.agree("run.step: what is trained", follow_trainable(plan))
        is_current = self._handed_out == self._generation  # no worker was lost meanwhile
        self._drop_training(clears_gradients=True)
        self._share_out(plan)
        if is_current:
            self._handed_out = self._generation
        check.follow(plan.leaves)
        self._tell_untrained(plan)

    def _tell_untrained(self, plan: Plan) -> None:
        untrained = describe_untrained(plan.leaves, plan.optimizer)
        if untrained is not None and self._session.is_main:
            say(untrained)

    def _compare_replicas(self, number: int) -> None:
        training = self.training
        assert training is not None
        faults.at("compared")
        with self._session.call_check.explains("the comparison of replicas"):
            self._replica_check.after_step(
                number, lambda: named_state(training.model, training.optimizer) | training.running.past()
            )

    def _agree_on_end(self, batches: Batches) -> None:
        """A stream may end at any time, but for all workers at the same."""
        training = self.training
        if batches.steps_in_all is not None or training is None:
            return
        if training.metric_names is None:
            training.metric_names = agree_on_metrics(training.sum, None)
        tally = Tally(training.sum, buffers=len(training.running))
        tally.send(None, names=training.metric_names)
        step_check.refuse_bad_data(tally.outcome(), batches.position.number)

    # -- another generation of workers (elastic_calls.py) --------------------------------------------------------------

    def gather(self, world: World) -> dist.ProcessGroup:
        return self._session.gather(world)

    def part(self) -> None:
        self._parted_s, self._session.chronicle.state = time.monotonic(), "recovering"
        self._drop_training(clears_gradients=self._check is not None and self._check.is_stepping)

    def _drop_training(self, *, clears_gradients: bool) -> None:
        """What depends on the workers and on the parameters that are trained is built anew after this.

        clears_gradients  not between two steps, where the program may look at those of the last one. A parameter that
                          is frozen must not keep its gradient, which the optimiser would use in every step.
        """
        if self.training is not None:
            self.training.running.abandon()
            if clears_gradients:
                self.training.gradients.begin()
            self.training.gradients.stop()  # should a traceback still hold it
            self.training.sum.close()

    def settle(self) -> None:
        chronicle = self._session.chronicle
        if self.plan is not None:
            self._share_out(self.plan)
        if self._parted_s is not None:
            chronicle.event("recovery", took_s=time.monotonic() - self._parted_s)
            self._parted_s, chronicle.state = None, "training"

    @property
    def applied(self) -> int:
        return self._applied

    def send_step(self, source: int, then: Callable[[], None]) -> None:
        plan, session, training = self.plan, self._session, self.training
        assert plan is not None
        mine = None
        if session.world.rank == source:
            assert training is not None
            mine = encode_update(self._applied - 1, training)
        sent = hand_over(session.group, session.device, source, mine)
        if self._applied < 0 or self._applied == sent["number"] + 1:
            return  # a newcomer, or it has applied the step
        if self._applied != sent["number"]:
            raise DivergenceError(f"this worker has applied {self._applied} steps, and gets step {sent['number']}")
        assert training is not None
        update = apply_sent_step(training, sent)
        self._end_applying(plan, update.number, ends_epoch=update.ends_epoch, skipped=not update.finite)
        then()
        faults.at("restored")

    def send_state(self, source: int, then: Callable[[], None]) -> None:
        plan, session = self.plan, self._session
        assert plan is not None
        is_source, is_new, mine = session.world.rank == source, self._applied < 0, None
        if is_source:
            session.checkpoints.ledger.write()  # a worker that gets our state does not know what came before it
            mine = session.checkpoints.state(plan)
        state = hand_over(session.group, session.device, source, mine)
        if is_new:
            session.checkpoints.restore(plan, state)
            self._applied = state["batches"]["number"]
            then()
            faults.at("restored")
        # Other survivors are not compared: they may be before the end of their loop body.
        compared = named_state(plan.model, plan.optimizer) if is_source or is_new else None
        refuse_other_state(session.group, session.device, source, compared, self._applied)

    def _share_out(self, plan: Plan) -> None:
        """The work of a step, among the workers that there are now."""
        session, world, settings = self._session, self._session.world, plan.batches.settings
        basis = Basis(session.options, session.seed, session.exact)
        training = self.training = share_out(plan, basis, world, session.group, session.observer)
        training.keeps_update = session.calls.is_elastic and world.size > 1
        session.observer.share_out(
            lambda: describe(plan, training),
            sees=sight_of(plan, world),
            generation=session.calls.generation,
            first=plan.batches.position.number,
            rank=world.rank,
            size=world.size,
            backend=world.backend,
            shards=settings.shards,
            global_batch_size=settings.global_batch_size,
            steps=self._steps or plan.batches.steps_in_all,
        )
        self._replica_check = ReplicaCheck(session.group, session.device, every=session.options.check_every)
        session.checkpoints.ledger.share_out(world.size)
        self._generation += 1


def versions_of(batch: Batch) -> list[int]:
    """How often the tensors of a batch have been written, in its order."""
    return [leaf._version for shard in batch.shards for leaf in tree_leaves(shard.data) if isinstance(leaf, Tensor)]
