"""When a run saves a checkpoint, and from which one it resumes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lockstep.checkpoint import format as layout
from lockstep.checkpoint.differences import before_training, compare_named, differences
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import CheckpointWriter, SavedCheckpoint
from lockstep.ddp.optimizer_state import load_optimizer
from lockstep.ddp.sharded_state import ShardedState
from lockstep.errors import CheckpointError
from lockstep.recovery.module_state import InitialModuleState, load_module
from lockstep.step.run_options import read_interval

State = dict[str, Any]
MODEL: Final = ""  # the name of the model among the modules that have a state; the others are registered by name
POLL_S, WARN_EVERY_S = 0.2, 30.0


class CheckpointSaver:
    """Saves and finds the checkpoints of a run. One worker writes, in the background; every worker finds the newest."""

    def __init__(
        self,
        directory: Path | None,
        every: str | int | None,
        fence: Callable[[], bool] = lambda: True,
        on_written: Callable[[SavedCheckpoint], None] = lambda _: None,
        mounted: Path | None = None,
    ) -> None:
        """`mounted`: see CheckpointStore."""
        self._store = CheckpointStore(directory, mounted=mounted) if directory is not None else None
        self._every, self._fence, self._on_written = read_interval(every), fence, on_written
        self._writer: CheckpointWriter | None = None
        self._saved_at = -1
        self._saved_s = time.monotonic()

    def restart_interval(self) -> None:
        """Begin to count the time until the next save anew: handing over the state has taken some itself."""
        self._saved_s = time.monotonic()

    def begin(self, step: int) -> None:
        """Note that nothing has to be saved at this step: it is the saved or the restored state."""
        self._saved_at, self._saved_s = step, time.monotonic()

    @property
    def is_by_time(self) -> bool:
        """Whether checkpoints are saved after some time, not after a number of steps."""
        return isinstance(self._every, float)

    def is_due(self, number: int, *, ends_epoch: bool) -> bool:
        """Whether to save after step `number`. By time, workers may differ; the answer of the writer counts."""
        if self._every is None:
            return ends_epoch
        if self.is_by_time:
            return self.is_time_over()
        return (number + 1) % self._every == 0

    def is_time_over(self) -> bool:
        """Whether checkpoints are saved after some time, and it has passed since the last one."""
        return isinstance(self._every, float) and time.monotonic() - self._saved_s >= self._every

    def is_saved(self, step: int) -> bool:
        return self._saved_at == step

    def save(self, step: int, state: Callable[[], State], *, writes: bool, kept_step: int | None = None) -> None:
        """Save in the background. `kept_step`: the newest checkpoint up to this step is not removed."""
        self.begin(step)
        if self._store is None or not writes:
            return
        self._store.kept_step = kept_step
        if self._writer is None:
            self._writer = CheckpointWriter(self._store, _warn, fence=self._fence, on_written=self._on_written)
        self._writer.submit(step, state())

    def has_written(self, step: int) -> bool:
        """Whether this worker has written the checkpoint of this step and read it back; True without a directory."""
        return self._store is None or (self._writer is not None and self._writer.written == step)

    def is_on_disk(self, step: int) -> bool:
        """Whether the checkpoint of this step is there; True without a directory."""
        return self._store is None or self._store.path_of(step).exists()

    def drain(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until everything is written. `check` is called repeatedly, and raises to end the wait."""
        began_s = said_s = time.monotonic()
        while self._writer is not None and not self._writer.drain(POLL_S):
            check()
            if time.monotonic() - said_s > WARN_EVERY_S:
                said_s = time.monotonic()
                _warn(f"waiting for the last checkpoint to be written, for {said_s - began_s:.0f} s")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return self._writer is None or self._writer.drain(0.0)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def find(self, now: State, *, announce: bool, is_mapped: Callable[[str], bool] | None = None) -> State | None:
        """Return the newest intact checkpoint, or None. Raises CheckpointError if it does not fit the state `now`.

        is_mapped  whether a tensor is mapped from its file (checkpoint/format.py); None: none is
        """
        found = self._store.newest(is_mapped=is_mapped or (lambda _: False)) if self._store is not None else None
        if found is None:
            return None
        if announce:
            for bad in found.skipped:
                _warn(f"skipped {bad.path}: {bad.reason}")
        differ = differences(found.state, now)
        if differ:
            raise CheckpointError(
                f"{found.path} is of another run than this program makes:\n  " + "\n  ".join(differ) + "\n"
                "Use what it was saved with, or another directory. Nothing was changed."
            )
        return found.state


class BestMetric:
    """The best value of a metric so far, and whether another one is better."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._before: float | None = None  # the best before the last improvement
        self.step: int | None = None  # of the checkpoint of the best

    def improves(self, value: float, mode: str) -> bool:
        """Whether `value` is better than all before it, which makes it the best so far. NaN is never better."""
        known = self._value
        is_better = not math.isnan(value) and (known is None or (value > known if mode == "max" else value < known))
        if is_better:
            self._value, self._before = value, known
        return is_better

    def forget_last(self) -> None:
        """Forget the last improvement: its checkpoint could not be written."""
        self._value, self.step = self._before, None

    def state(self) -> dict[str, Any]:
        return {"value": self._value, "before": self._before, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._value, self._before, self.step = state["value"], state["before"], state["step"]


def read_weights(path: str | Path, part: str) -> State:
    """Read the state dict of a model from a checkpoint, as "weights", and what it lacks, as "raw" (module_state.py).

    path  a run directory, of which the newest checkpoint is read, or one checkpoint
    part  "model", or a name that was given to `run.register_state`

    The prefix that torch's AveragedModel gives to names is removed. Raises CheckpointError if there is no such part.
    """
    path = Path(path).absolute()
    if (path / MANIFEST).exists():
        state = layout.read(path)
    else:
        found = CheckpointStore(path).newest() if path.is_dir() else None
        if found is None:
            raise CheckpointError(
                f"{path} is neither a run directory with checkpoints nor a checkpoint; `lockstep checkpoint ls DIR` "
                "shows what there is. A file of weights is read with model.load_state_dict(torch.load(...)) before "
                "run.replicate(model)"
            )
        path, state = found.path, found.state
    raw, registered = state.get("raw") or {}, state.get("kept") or {}
    parts = {**{name: value for name, value in state.items() if name not in ("kept", "raw")}, **registered}
    if not isinstance(parts.get(part), Mapping):
        known = ", ".join(sorted(name for name, value in parts.items() if isinstance(value, Mapping)))
        raise CheckpointError(f"{path} has no part {part!r}; it has {known}")
    lacking = (raw.get("kept") or {}).get(part) if part in registered else raw.get("model") if part == "model" else None
    return _without_prefix({"weights": dict(parts[part]), "raw": lacking or {}})


def _without_prefix(found: State) -> State:
    """Remove the prefix from the state of an AveragedModel, and drop its counter; any other state is unchanged."""
    weights: State = found["weights"]
    prefixed = [name for name in weights if str(name).startswith("module.")]
    if not prefixed or len(prefixed) != len(weights) - ("n_averaged" in weights):
        return found

    def strip(part: State) -> State:
        return {name.removeprefix("module."): part[name] for name in part if name.startswith("module.")}

    return {"weights": strip(weights), "raw": {kind: strip(part) for kind, part in found["raw"].items()}}


def describe_misfit(found: State, model: nn.Module) -> list[str]:
    """Describe why what `read_weights` found cannot be loaded into the model; an empty list if it fits."""
    now = dict(model.state_dict())
    return list(compare_named(before_training(found["weights"], now, found["raw"].get("grown") or {}), now))


def collect_state(things: Mapping[str, Any]) -> State:
    """Collect the states of all parts of a run (see `Checkpoints._things`)."""
    schedule, model = things["schedule"], dict(things["model"].state_dict())
    kept = {name: thing.state_dict() for name, thing in things["kept"].items()}
    return {
        "model": model,
        "optimizer": things["optimizer"].state_dict(),
        "schedule": schedule.state_dict() if schedule is not None else None,
        "loss_scale": things["loss_scale"].state(),
        "batches": things["batches"].state(),
        "kept": kept,
        **_raw(things, model, kept),
    }


def _raw(things: Mapping[str, Any], model: State, kept: Mapping[str, State]) -> State:
    """Collect what the state dicts of modules lack (module_state.py)."""
    origins: Mapping[str, InitialModuleState] = things["origins"]
    registered = {name: origins[name].raw(things["kept"][name], kept[name]) for name in kept if name in origins}
    parts = {
        "model": origins[MODEL].raw(things["model"], model),
        "kept": {n: raw for n, raw in registered.items() if raw},
    }
    found = {name: part for name, part in parts.items() if part}
    return {"raw": found} if found else {}


def restore_state(things: Mapping[str, Any], state: State) -> None:
    """Restore all parts of a run. If the state does not fit, the batches raise before anything is changed."""
    things["batches"].restore(state["batches"])
    raw = state.get("raw") or {}
    load_module(things["model"], state["model"], raw.get("model"))
    if isinstance(things["optimizer"], ShardedState):
        things["optimizer"].load_state_dict(state["optimizer"])
    else:
        load_optimizer(things["optimizer"], state["optimizer"])
    if things["schedule"] is not None and state["schedule"] is not None:
        things["schedule"].load_state_dict(state["schedule"])
    things["loss_scale"].restore(state["loss_scale"])
    for name, thing in things["kept"].items():
        if isinstance(thing, nn.Module):
            load_module(thing, state["kept"][name], (raw.get("kept") or {}).get(name))
        elif isinstance(thing, torch.optim.Optimizer):
            load_optimizer(thing, state["kept"][name])
        else:
            thing.load_state_dict(state["kept"][name])


def _warn(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
