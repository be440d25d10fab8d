"""The state of a run: what it consists of, when and where it is saved, and from where it resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from torch import nn

from lockstep import run_files
from lockstep.checkpoint.differences import changes
from lockstep.checkpoint.format import flatten
from lockstep.checkpoint.writer import Written
from lockstep.data.ledger import Ledger
from lockstep.data.sample_order import Position
from lockstep.errors import CheckpointError, LockstepError
from lockstep.train.checkpointing import MODEL, BestMetric, Saving, State, named, restore
from lockstep.train.collective_calls import say
from lockstep.train.module_state import ModuleOrigin
from lockstep.train.run_directory import read_stop
from lockstep.train.step import Plan
from lockstep.train.trained_parameters import (
    group_names,
    match_groups,
    modules_in_eval_mode,
    take_over_modes,
    take_over_trainable,
)


@final
class Checkpoints:
    """One worker, that of rank 0, writes them; `writes` says whether this is it."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        every: str | int | None = None,
        fence: Callable[[], bool] = lambda: True,
        on_written: Callable[[Written], None] = lambda _: None,
    ) -> None:
        """
        directory   of the run; None: nothing is saved
        identity    what must not change between the parts of a run, beside what a plan has
        every       steps or a time between two checkpoints; None: after every epoch
        fence       asked right before a checkpoint would be seen; False: it is dropped
        on_written  told of each that is written, from another thread
        """
        self.directory, self._identity, self._fence = directory, dict(identity or {}), fence
        self.ledger = Ledger(directory)
        self.saving = Saving(directory, every or os.environ.get("LOCKSTEP_CHECKPOINT_EVERY"), fence, on_written)
        self.registered: dict[str, Any] = {}  # by run.register_state
        self._origins: dict[str, ModuleOrigin] = {}  # the modules among them, and the model, when training began
        self._best = BestMetric()
        self._best_saving: Saving | None = None
        self.was_stopped = False  # by the program, in an earlier start
        self._resumed_from: int | None = None  # the step of the checkpoint

    # -- what a state is ---------------------------------------------------------------------------------------------

    def state(self, plan: Plan, here: Position | None = None) -> State:
        """Everything that a worker must have to take the step at `here`; None: the next one of the batches.

        `run`: what must not change between the parts of a run, or it would be another run.
        """
        run = {"shards": plan.batches.settings.shards, "optimizer": type(plan.optimizer).__name__}
        more = {
            "trainable": [leaf.name for leaf in plan.leaves],
            "in_eval_mode": modules_in_eval_mode(plan.model),
            "groups": group_names(plan),
            "settings": plan.settings,
            "best": self._best.state(),
        }
        found = named(self._things(plan)) | {"run": self._identity | run} | more
        return found if here is None else found | {"batches": plan.batches.state(here)}

    def restore(self, plan: Plan, state: State) -> None:
        """Take over a state."""
        match_groups(plan, state)
        restore(self._things(plan), state)
        take_over_trainable(plan, state)
        take_over_modes(plan.model, state.get("in_eval_mode"))
        self._best.restore(state.get("best"))

    def _things(self, plan: Plan) -> dict[str, Any]:
        """All that has a state, by name."""
        if not self._origins:  # asked for before anything is restored
            modules = {name: thing for name, thing in self.registered.items() if isinstance(thing, nn.Module)}
            self._origins = {name: ModuleOrigin(module) for name, module in {MODEL: plan.model, **modules}.items()}
        return {
            "model": plan.model,
            "optimizer": plan.optimizer,
            "schedule": plan.schedule,
            "loss_scale": plan.loss_scale,
            "batches": plan.batches,
            "kept": self.registered,
            "origins": self._origins,
        }

    def refuse_unsavable(self, plan: Plan) -> None:
        """Raise CheckpointError, with its name, for a part of the state that no checkpoint can hold."""
        try:
            flatten(self.state(plan))
        except CheckpointError as error:
            raise CheckpointError(
                f"the state of this run cannot be saved, nor handed over to another worker, at step "
                f"{plan.batches.position.number}: {error}"
            ) from None

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, plan: Plan, here: Position, *, writes: bool) -> None:
        """Have a checkpoint written in the background; this waits only for a copy of the tensors."""
        plan.last_norm.check(plan.leaves)
        if writes:
            self.ledger.write()
        self.saving.save(here.number, lambda: self.state(plan, here), writes=writes)

    def save_best(self, plan: Plan, here: Position, metric: float, *, mode: str, writes: bool) -> bool:
        """Save to the folder `best` if `metric` is better than all before it. Returns whether it was."""
        is_better = self._best.improves(metric, mode)
        if is_better and self.directory is not None:
            if self._best_saving is None:
                self._best_saving = Saving(self.directory / "best", None, self._fence)
            self._best_saving.save(here.number, lambda: self.state(plan, here), writes=writes)
        return is_better

    def keep_last(self, plan: Plan, here: Position, go_on: Callable[[], None]) -> None:
        """By rank 0, at the end: an earlier rank 0 may have been lost with what it had not written yet.

        go_on  called again and again while it is written; raises if we are wanted elsewhere, or it takes too long
        """
        self.ledger.write()
        self.saving.drain(go_on)
        # A start that trained nothing leaves the checkpoint as it is, with the settings that it was trained with.
        if here.number != self._resumed_from and not self.saving.has_written(here.number):
            plan.last_norm.check(plan.leaves)
            self.saving.save(here.number, lambda: self.state(plan, here), writes=True)
            self.saving.drain(go_on)

    def close(self) -> None:
        """Wait for what is being written."""
        for one in (self.saving, self._best_saving):
            if one is not None:
                one.close()

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, plan: Plan, compare: Callable[[dict[str, str]], None], *, writes: bool, tells: bool) -> int | None:
        """From where the last run in this directory ended. Returns the step; None: there is no checkpoint.

        compare  all workers: raises if they have not found the same
        tells    whether to say from where the run resumes, also if no setting has changed
        """
        if self.directory is not None and writes:
            run_files.prepare(self.directory)
        found = self.saving.find(self.state(plan), tells=writes)
        step = found["batches"]["number"] if found is not None else None
        stopped = read_stop(self.directory)
        compare({"step": str(step), "stopped": str(stopped)})
        if found is not None:
            plan.batches.check(found["batches"])  # a start that is refused has not said that it resumes
            self._compare_settings(plan, found, writes=writes, tells=tells)
            self.restore(plan, found)
            self.was_stopped, self._resumed_from = stopped == step, step
        self.ledger.begin(plan.batches.position.number, plan.batches.facts(), writes=writes)
        return step

    def _compare_settings(self, plan: Plan, found: State, *, writes: bool, tells: bool) -> None:
        """Say which settings have changed since the checkpoint was saved, and which value of each counts."""
        saved, now = found.get("settings") or {}, plan.settings
        changed = changes(saved, now)
        if writes and (changed or tells):
            what = ", with other settings than it was saved with:" if changed else ""
            say(f"resumed from step {found['batches']['number']} in {self.directory}{what}")
            for change in changed:
                say(f"  {change}")
        if saved.get("options", {}).get("scheduler") != now["options"]["scheduler"]:
            found["schedule"] = None  # the state of a scheduler of another class means nothing to this one
        # What is restored with its state stays what it was, and so do the words about it in later checkpoints.
        plan.settings = now | {name: saved[name] for name in ("optimizer", "scheduler") if saved.get(name)}


def plan_of(plan: Plan | None, who: str) -> Plan:
    """The plan, or LockstepError if there is none yet."""
    if plan is None:
        raise LockstepError(f"{who} has nothing to save before `run.train(batches, optimizer)`")
    return plan
