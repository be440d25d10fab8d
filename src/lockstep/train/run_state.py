"""The state of a run: what it consists of, when and where it is saved, and from where it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from lockstep import run_files
from lockstep.checkpoint.differences import setting_changes
from lockstep.checkpoint.format import flatten
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import SavedCheckpoint
from lockstep.data.ledger import Ledger
from lockstep.data.sample_order import Position
from lockstep.ddp.optimizer_state import WholeState
from lockstep.ddp.replica import trained_leaves
from lockstep.errors import CheckpointError, LockstepError
from lockstep.recovery.checkpointing import MODEL, BestMetric, CheckpointSaver, State, collect_state, restore_state
from lockstep.recovery.collective_calls import print_message
from lockstep.recovery.module_state import InitialModuleState
from lockstep.recovery.run_directory import read_stop
from lockstep.step.step_types import Result, TrainingPlan
from lockstep.train.optimizer_set import class_names, parts_of
from lockstep.train.training_plan import (
    add_missing_groups,
    group_names,
    modules_in_eval_mode,
    restore_eval_mode,
    restore_trainable,
)

SAVE_ALONE_S: Final = 120.0
BEST: Final = "best"  # the folder of the best checkpoints in a run directory


@dataclass(frozen=True)
class WholeParts:
    """What is distributed over the workers, on the worker that saves it; None if it is not distributed."""

    optimizer: WholeState | None = None
    residuals: Mapping[str, Any] | None = None


@final
class Checkpoints:
    """The checkpoints of a run. One worker, rank 0, writes them: `writes` says whether this is it."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        every: str | int | None = None,
        fence: Callable[[], bool] = lambda: True,
        on_written: Callable[[SavedCheckpoint], None] = lambda _: None,
    ) -> None:
        """
        directory   run directory; None: nothing is saved
        identity    what must not change between the starts of a run, besides what the plan has
        every       steps or a time between two checkpoints; None: after every epoch
        fence       called right before a checkpoint becomes visible; if it returns False the checkpoint is dropped
        on_written  called for each checkpoint that was written, from another thread
        """
        self.directory, self._identity, self._fence = directory, dict(identity or {}), fence
        self.ledger = Ledger(directory)
        self.saver = CheckpointSaver(directory, every, fence, on_written)
        self.registered: dict[str, Any] = {}  # by run.register_state
        self._origins: dict[str, InitialModuleState] = {}  # of the model and registered modules
        self._best = BestMetric()
        self._best_saver: CheckpointSaver | None = None
        self.verified_steps = 0  # the state after so many steps is right (step/audit.py, Note [What an audit shows])
        self.was_stopped = False  # by the program, in an earlier start
        self._saved: tuple[int, int] | None = None  # what was saved or restored last: see `_mark`
        self._resumed_from: tuple[int, int] | None = None  # what the checkpoint holds: see `_mark`
        self.unsaved_step: int | None = None  # where the loop has ended, if its last checkpoint could not be written

    # -- what a state is ---------------------------------------------------------------------------------------------

    def state(self, plan: TrainingPlan, here: Position | None = None, whole: WholeParts | None = None) -> State:
        """Everything that a worker needs to take the step at `here`; None: the next step of the batches.

        whole  what is distributed over the workers; None: without it

        The entry `run` is what must not change between the starts of a run.
        """
        run = {"shards": plan.batches.settings.shards, "optimizer": class_names(plan.optimizer)}
        more: dict[str, Any] = {
            "trainable": [leaf.name for leaf in trained_leaves(plan.model, set())],  # by the next step
            "trained": [leaf.name for leaf in plan.leaves],  # by the step before, as are these groups
            "group_sizes": plan.group_sizes,
            "in_eval_mode": modules_in_eval_mode(plan.model),
            "groups": group_names(plan),
            "settings": plan.settings,
            "best": self._best.state(),
        }
        if plan.audits.every:
            more["verified_steps"] = self.verified_steps
        if (choice := plan.tuner.state()) is not None:
            more["grad_comm"] = choice
        if not is_batch_done(plan):
            more["finished"] = {str(part): result.to_json() for part, result in plan.finished.items()}
        if plan.residuals is not None:
            more["residuals"] = plan.residuals.state() if whole is None else whole.residuals
        optimizer = None if whole is None else whole.optimizer
        things = self._things(plan) | ({} if optimizer is None else {"optimizer": optimizer})
        found = collect_state(things) | {"run": self._identity | run} | more
        return found if here is None else found | {"batches": plan.batches.state(here)}

    def restore(self, plan: TrainingPlan, state: State) -> None:
        """Restore a state that `state` returned."""
        add_missing_groups(plan, state)
        restore_state(self._things(plan), state)
        restore_trainable(plan, state)
        restore_eval_mode(plan.model, state.get("in_eval_mode"))
        if state.get("best") is not None:
            self._best.restore(state["best"])
        plan.tuner.restore(state.get("grad_comm"))
        if plan.residuals is not None:
            plan.residuals.restore(state.get("residuals"))
        # What was computed without audits cannot be checked any more, and counts as right.
        self.verified_steps = state.get("verified_steps", plan.batches.position.number)
        finished = state.get("finished") or {}
        plan.finished = {int(part): Result.from_json(result) for part, result in finished.items()}

    def _things(self, plan: TrainingPlan) -> dict[str, Any]:
        """Everything that has a state, by name."""
        if not self._origins:  # the first call comes before anything is restored
            modules = {name: thing for name, thing in self.registered.items() if isinstance(thing, nn.Module)}
            self._origins = {
                name: InitialModuleState(module) for name, module in {MODEL: plan.model, **modules}.items()
            }
        return {
            "model": plan.model,
            "optimizer": plan.optimizer if plan.sharded_state is None else plan.sharded_state,
            "schedule": plan.schedule,
            "loss_scale": plan.loss_scale,
            "batches": plan.batches,
            "kept": self.registered,
            "origins": self._origins,
        }

    def refuse_unsavable(self, plan: TrainingPlan) -> None:
        """Raise CheckpointError, with its name, for a part of the state that cannot be saved in a checkpoint."""
        try:
            flatten(self.state(plan))
        except CheckpointError as error:
            raise CheckpointError(
                f"the state of this run cannot be saved, nor handed over to another worker, at step "
                f"{plan.batches.position.number}: {error}"
            ) from None

    # -- saving -----------------------------------------------------------------------------------------------------

    def begin(self, plan: TrainingPlan) -> None:
        """Note that nothing has to be saved now: this is the initial or the restored state."""
        self._saved = self._mark(plan, plan.batches.position)
        self.saver.begin(plan.batches.position.number)

    def is_saved(self, plan: TrainingPlan, here: Position) -> bool:
        return self._saved == self._mark(plan, here)

    @staticmethod
    def _mark(plan: TrainingPlan, here: Position) -> tuple[int, int]:
        """(the batch, the steps that were taken with it): several optimisers may be in the middle of a batch."""
        return here.number, 0 if is_batch_done(plan) else len(plan.finished)

    def save(self, plan: TrainingPlan, here: Position, *, writes: bool, whole: WholeParts | None = None) -> None:
        """Write a checkpoint in the background. Waits only until the tensors are copied that are on this worker.

        whole  what is distributed over the workers, if anything is; its tensors may arrive later
        """
        plan.norm_check.check()
        self._saved = self._mark(plan, here)
        if writes:
            self.ledger.write()
        kept_step, state = self._kept_step(plan), partial(self.state, plan, here, whole)
        self.saver.save(here.number, state, writes=writes, kept_step=kept_step)

    def is_best(self, metric: float, mode: str) -> bool:
        """Whether `metric` is better than all before it, which makes it the best so far."""
        return self._best.improves(metric, mode)

    def save_best(self, plan: TrainingPlan, here: Position, *, writes: bool, whole: WholeParts | None = None) -> None:
        """Save to the folder `best`. The arguments are those of `save`."""
        if self.directory is not None:
            self._best.step = here.number
            self._saver_of_best(self.directory).save(here.number, partial(self.state, plan, here, whole), writes=writes)

    def _saver_of_best(self, directory: Path) -> CheckpointSaver:
        if self._best_saver is None:
            self._best_saver = CheckpointSaver(directory / BEST, None, self._fence, mounted=directory)
        return self._best_saver

    def is_best_missing(self) -> bool:
        """Whether the last checkpoint of `save_best` is neither there nor being written; asked on rank 0."""
        if self.directory is None or self._best.step is None:
            return False
        saver = self._saver_of_best(self.directory)
        return saver.is_idle and not saver.is_on_disk(self._best.step)

    def forget_best(self) -> None:
        """Let metrics count as better again that are better than the one before the last of `save_best`."""
        self._best.forget_last()

    def is_last_missing(self, plan: TrainingPlan, here: Position, check: Callable[[], None]) -> bool:
        """Whether the last checkpoint is missing: an earlier rank 0 may have been lost before it was written.

        Called by rank 0 at the end. `check` is called repeatedly while others are written, and raises to end the wait.
        """
        self.ledger.write()
        self.saver.drain(check)
        return not self.is_on_disk(plan, here)

    def save_last(
        self, plan: TrainingPlan, here: Position, check: Callable[[], None], whole: WholeParts | None = None
    ) -> None:
        """Write the last checkpoint if it is missing, and wait for it. Called by rank 0 at the end.

        `check` is that of `is_last_missing`, `whole` that of `save`.
        """
        if self.is_last_missing(plan, here, check):
            self.save(plan, here, writes=True, whole=whole)
            self.saver.drain(check)

    def is_on_disk(self, plan: TrainingPlan, here: Position) -> bool:
        """Whether the state at this position is in a checkpoint that this worker has written, or has resumed from.

        A start that trained nothing leaves the checkpoint as it is, with the settings that it was trained with.
        """
        mark = self._mark(plan, here)
        return mark == self._resumed_from or (self._saved == mark and self.saver.has_written(here.number))

    def save_alone(self, plan: TrainingPlan, here: Position, why: str, then: Callable[[], None]) -> None:
        """Write a checkpoint without other workers, wait for it, and call `then`. Prints whether this was done."""
        end_s = time.monotonic() + SAVE_ALONE_S

        def check_deadline() -> None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"it was not written within {SAVE_ALONE_S:.0f} s")

        try:
            self.save_last(plan, here, check_deadline, self._collect_alone(plan))
            if not self.is_on_disk(plan, here):
                raise CheckpointError("its checkpoint could not be written, as was told above")
            then()
            print_message(f"saved at step {here.number}, where {why}")
        except Exception as problem:
            print_message(
                f"what was trained up to step {here.number} could not be saved: {type(problem).__name__}: {problem}"
            )

    @staticmethod
    def _collect_alone(plan: TrainingPlan) -> WholeParts | None:
        """Return what is distributed, if this worker has all of it. Raises LockstepError if not."""
        if not plan.is_distributed:
            return None
        optimizer = None if plan.sharded_state is None else plan.sharded_state.collect_alone()
        residuals = None if plan.residuals is None else plan.residuals.collect_alone()
        missing = []
        if plan.sharded_state is not None and optimizer is None:
            missing.append("the optimiser's state")
        if plan.residuals is not None and residuals is None:
            missing.append("what compression has left of the gradients")
        if missing:
            raise LockstepError(
                f"{' and '.join(missing)}: distributed over the workers, which may have left; "
                "Run(save_every=...) sets how often to save"
            )
        return WholeParts(optimizer, residuals)

    def _kept_step(self, plan: TrainingPlan) -> int | None:
        """The newest checkpoint up to this step is kept, to go back to; None: without audits none is kept for that."""
        return self.verified_steps if plan.audits.every else None

    def set_aside_unverified(self) -> list[int]:
        """Move the checkpoints that are not verified to the folder `suspect`. Returns their steps. Called by rank 0."""
        if self.directory is None:
            return []
        stores, moved = [CheckpointStore(self.directory), CheckpointStore(self.directory / BEST)], list[int]()
        for _ in range(2):  # and once more what is being written now
            moved += [step for store in stores for step in store.set_aside_after(self.verified_steps)]
            self.drain(lambda: None)
        return sorted(set(moved))

    def drain(self, check: Callable[[], None]) -> None:
        """Wait until everything is written. `check` is called repeatedly, and raises to end the wait."""
        for one in (self.saver, self._best_saver):
            if one is not None:
                one.drain(check)

    def close(self) -> None:
        """Wait until everything is written."""
        for one in (self.saver, self._best_saver):
            if one is not None:
                one.close()

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(
        self, plan: TrainingPlan, compare: Callable[[dict[str, str]], None], *, writes: bool, announce: bool
    ) -> int | None:
        """Resume from the newest checkpoint in the directory. Returns its step; None: there is no checkpoint.

        compare   called by all workers; raises if they have not found the same
        announce  whether to print from which step the run resumes, even if no setting has changed
        """
        if self.directory is not None and writes:
            run_files.prepare(self.directory)
        is_mapped = (lambda name: name.startswith("optimizer/")) if plan.sharded_state is not None else None
        found = self.saver.find(self.state(plan), announce=writes, is_mapped=is_mapped)
        step = found["batches"]["number"] if found is not None else None
        stopped = read_stop(self.directory)
        compare({"step": str(step), "stopped": str(stopped)})
        if found is not None:
            plan.batches.check(found["batches"])  # raises before it is printed that the run resumes
            self._compare_settings(plan, found, writes=writes, announce=announce)
            self.restore(plan, found)
            self.was_stopped, self._resumed_from = stopped == step, self._mark(plan, plan.batches.position)
        self.ledger.begin(plan.batches.position.number, plan.batches.facts(), writes=writes)
        return step

    def _compare_settings(self, plan: TrainingPlan, found: State, *, writes: bool, announce: bool) -> None:
        """Print which settings have changed since the checkpoint was saved, and which value of each is used."""
        saved, now = found.get("settings") or {}, plan.settings
        changed = setting_changes(saved, now)
        if writes and (changed or announce):
            what = ", with other settings than it was saved with:" if changed else ""
            print_message(f"resumed from step {found['batches']['number']} in {self.directory}{what}")
            for change in changed:
                print_message(f"  {change}")
        if saved.get("options", {}).get("scheduler") != now["options"]["scheduler"]:
            found["schedule"] = None  # a scheduler of another class cannot load this state
        # The optimiser and the scheduler keep the settings they are restored with, and later checkpoints record those.
        plan.settings = now | {name: saved[name] for name in ("optimizer", "scheduler") if saved.get(name)}


def is_batch_done(plan: TrainingPlan) -> bool:
    """Whether every optimiser has taken its step with the current batch."""
    return len(plan.finished) == len(parts_of(plan.optimizer))


def plan_of(plan: TrainingPlan | None, who: str) -> TrainingPlan:
    """Return the plan; raise LockstepError if there is none yet."""
    if plan is None:
        raise LockstepError(f"{who} has nothing to save before `run.train(batches, optimizer)`")
    return plan
