"""A short run of the user's program for `lockstep plan`, with other settings than the program has.

The variable LOCKSTEP_PROBE holds the fields of `Probe` as JSON. Checkpoints of the program are neither read nor
written; the program is ended after its last step. All steps are timed: their spans and losses are in the trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint.store import CheckpointStore
from lockstep.settings import Settings
from lockstep.step.run_options import RunOptions
from lockstep.step.step_types import TrainingPlan

LEARNING_RATES: Final = ("lr", "initial_lr", "max_lr", "min_lr")  # in the groups of an optimiser


@dataclass(frozen=True)
class Probe:
    """
    steps              number of steps after which the program is ended
    global_batch_size  replaces that of the program; None: it is kept
    shards             replaces those of the program; None: they are kept
    options            replace options of the Run, by name
    start              directory of a run whose newest checkpoint has the first weights and the state of the optimiser;
                       None: the program's own
    lr_factor          learning rates are multiplied by it
    """

    steps: int
    global_batch_size: int | None = None
    shards: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    lr_factor: float = 1.0

    @staticmethod
    def from_settings(settings: Settings) -> Probe | None:
        return None if settings.probe is None else Probe(**json.loads(settings.probe))

    def change_options(self, options: RunOptions) -> RunOptions:
        parsed = RunOptions.from_keywords(dict(self.options))  # type: ignore[arg-type]
        changed = {name: getattr(parsed, name) for name in self.options}
        return replace(options, trace=True, tensorboard=False, save_every=None, **changed)

    def prepare(self, plan: TrainingPlan) -> None:
        """Load the first state, and change the learning rates. Called before the first step."""
        if self.start is not None and (found := CheckpointStore(Path(self.start)).newest()) is not None:
            plan.model.load_state_dict(found.state["model"])
            plan.optimizer.load_state_dict(found.state["optimizer"])
            if plan.schedule is not None and found.state.get("schedule"):
                plan.schedule.load_state_dict(found.state["schedule"])
        # Only now: the program may have read how many steps its own epochs have, for its learning rates.
        plan.batches.settings = replace(plan.batches.settings, epochs=None)
        if self.lr_factor == 1.0 or plan.large_batch is not None:  # `LRScaling` scales with the batch size itself
            return
        for group in plan.optimizer.param_groups:
            group |= {name: group[name] * self.lr_factor for name in LEARNING_RATES if name in group}
        scale_schedule(plan.schedule, self.lr_factor)


def scale_schedule(schedule: Any, factor: float) -> None:
    """Multiply the learning rates that a scheduler, or those inside it, computes from."""
    for inner in getattr(schedule, "_schedulers", []):
        scale_schedule(inner, factor)
    for name in ("base_lrs", "max_lrs"):
        if isinstance(rates := getattr(schedule, name, None), list):
            setattr(schedule, name, [rate * factor for rate in rates])
