"""When a run saves, and from where it goes on."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint import format as layout
from lockstep.checkpoint.differences import compare_named, differences
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.writer import Writer, Written
from lockstep.errors import CheckpointError

State = dict[str, Any]
DRAIN_S, SAY_EVERY_S = 0.2, 30.0
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def read_interval(text: str | int | None) -> int | float | None:
    """200: steps. "200": steps as well. "30s", "5m", "2h": seconds, a float. None: after every epoch."""
    if text is None:
        return None
    if isinstance(text, int) and not isinstance(text, bool) and text >= 1:
        return text
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text.strip()) if isinstance(text, str) else None
    if match is not None and match[2] and float(match[1]) > 0:
        return float(match[1]) * _SECONDS[match[2]]
    if match is not None and not match[2] and match[1].isdecimal() and int(match[1]) >= 1:
        return int(match[1])
    raise ValueError(f"{text!r} is not how often to save: a number of steps such as 200, or a time such as 30s, 5m, 2h")


class Saving:
    """The checkpoints of one run. One worker writes them, in the background; each finds the newest by itself."""

    def __init__(
        self,
        directory: Path | None,
        every: str | int | None,
        fence: Callable[[], bool] = lambda: True,
        on_written: Callable[[Written], None] = lambda _: None,
    ) -> None:
        self._store = Store(directory) if directory is not None else None
        self._every, self._fence, self._on_written = read_interval(every), fence, on_written
        self._writer: Writer | None = None
        self._saved_at = -1
        self._saved_s = time.monotonic()

    def begin(self, step: int) -> None:
        """Nothing is new at this step."""
        self._saved_at, self._saved_s = step, time.monotonic()

    def is_due(self, number: int, *, ends_epoch: bool) -> bool:
        """After the step with this number. By time each worker has its own answer; that of the writer counts."""
        if self._every is None:
            return ends_epoch
        if isinstance(self._every, float):
            return time.monotonic() - self._saved_s >= self._every
        return (number + 1) % self._every == 0

    def has(self, step: int) -> bool:
        return self._saved_at == step

    def save(self, step: int, state: Callable[[], State], *, writes: bool) -> None:
        self.begin(step)
        if self._store is None or not writes:
            return
        if self._writer is None:
            self._writer = Writer(self._store, _warn, fence=self._fence, on_written=self._on_written)
        self._writer.submit(step, state())

    def has_written(self, step: int) -> bool:
        """We have, and it was there when we read it back."""
        return self._store is None or (self._writer is not None and self._writer.written == step)

    def drain(self, go_on: Callable[[], None] = lambda: None) -> None:
        """Wait for what is being written. `go_on` is asked again and again, and raises if we are wanted elsewhere."""
        began_s = said_s = time.monotonic()
        while self._writer is not None and not self._writer.drain(DRAIN_S):
            go_on()
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                _warn(f"waiting for the last checkpoint to be written, for {said_s - began_s:.0f} s")

    @property
    def is_idle(self) -> bool:
        """Nothing is being written."""
        return self._writer is None or self._writer.drain(0.0)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def find(self, now: State, *, tells: bool) -> State | None:
        """The newest checkpoint that is whole, if it fits what the program has `now`."""
        found = self._store.newest() if self._store is not None else None
        if found is None:
            return None
        if tells:
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

    def improves(self, value: float, mode: str) -> bool:
        """Whether `value` is better than all before it; it counts from now on. Not a number is never better."""
        known = self._value
        is_better = not math.isnan(value) and (known is None or (value > known if mode == "max" else value < known))
        if is_better:
            self._value = value
        return is_better

    def state(self) -> float | None:
        return self._value

    def restore(self, state: float | None) -> None:
        self._value = state


def read_part(path: Path, part: str) -> State:
    """A part of a checkpoint, such as "model": of the newest in a run directory, or of one that is named itself.

    Raises CheckpointError if there is none, or no such part in it.
    """
    if (path / MANIFEST).exists():
        state = layout.read(path)
    else:
        found = Store(path).newest() if path.is_dir() else None
        if found is None:
            raise CheckpointError(
                f"{path} is neither a run directory with checkpoints nor a checkpoint; `lockstep checkpoint ls DIR` "
                "shows what there is. A file of weights is read with model.load_state_dict(torch.load(...)) before "
                "run.replicate(model)"
            )
        path, state = found.path, found.state
    parts = {**{name: value for name, value in state.items() if name != "kept"}, **(state.get("kept") or {})}
    if not isinstance(parts.get(part), Mapping):
        known = ", ".join(sorted(name for name, value in parts.items() if isinstance(value, Mapping)))
        raise CheckpointError(f"{path} has no part {part!r}; it has {known}")
    return dict(parts[part])


def read_weights(path: str | Path, part: str) -> State:
    """The state dict of a model in `part` of a checkpoint. torch's AveragedModel keeps one behind a prefix."""
    state = read_part(Path(path).absolute(), part)
    averaged = {name.removeprefix("module."): value for name, value in state.items() if name.startswith("module.")}
    return averaged if len(averaged) == len(state) - ("n_averaged" in state) and averaged else state


def describe_misfit(weights: State, model: nn.Module) -> list[str]:
    """What forbids to load these weights into the model, in words; nothing: they fit."""
    return list(compare_named(weights, dict(model.state_dict())))


def named(things: Mapping[str, Any]) -> State:
    """The states of what a run has (see `Run._named`)."""
    schedule = things["schedule"]
    return {
        "model": dict(things["model"].state_dict()),
        "optimizer": things["optimizer"].state_dict(),
        "schedule": schedule.state_dict() if schedule is not None else None,
        "loss_scale": things["loss_scale"].state(),
        "batches": things["batches"].state(),
        "kept": {name: thing.state_dict() for name, thing in things["kept"].items()},
    }


def restore(things: Mapping[str, Any], state: State) -> None:
    """Where it does not fit, the batches say so before anything else is changed."""
    things["batches"].restore(state["batches"])
    things["model"].load_state_dict(state["model"])
    things["optimizer"].load_state_dict(state["optimizer"])
    if things["schedule"] is not None and state["schedule"] is not None:
        things["schedule"].load_state_dict(state["schedule"])
    things["loss_scale"].restore(state["loss_scale"])
    for name, thing in things["kept"].items():
        thing.load_state_dict(state["kept"][name])


def _warn(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
