"""A log of 64-bit digests of every tensor of the state after each step and evaluation, for `lockstep certify`.

LOCKSTEP_STATE_LOG            path of the file; the log is off if it is not set
LOCKSTEP_STATE_LOG_STEPS      the program is ended after this many steps
LOCKSTEP_STATE_LOG_DIRECTORY  run directory, which replaces the one that the program sets
LOCKSTEP_STATE_LOG_PART       set if another start will resume this run
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lockstep.ddp.replica import cheap_digests
from lockstep.settings import Settings

NamedTensors = Mapping[str, Tensor] | None  # None on workers that do not write


class StateLog:
    """Appends a line of digests for each step and evaluation."""

    def __init__(self, path: Path, steps: int, directory: Path | None = None, *, is_part: bool = False) -> None:
        self._path, self.steps, self.directory, self.is_part = path, steps, directory, is_part
        self.shards = 0  # of a batch; set when training begins
        self._at = (-1, 0)  # the last step, and the number of evaluations since

    @staticmethod
    def from_settings(settings: Settings) -> StateLog | None:
        if settings.state_log is None:
            return None
        directory = None if settings.state_log_directory is None else Path(settings.state_log_directory)
        return StateLog(Path(settings.state_log), settings.state_log_steps, directory, is_part=settings.state_log_part)

    def log_step(self, step: int, loss: float, state: NamedTensors, *, writes: bool) -> None:
        """Log the state after a step. A step that is taken over from a lost worker may be logged twice, equally."""
        self._at = (step, 0)
        self._write("step", {"loss": [loss]}, state, writes=writes)

    def log_evaluation(
        self, what: str, metrics: Mapping[str, Sequence[float]], state: NamedTensors, *, writes: bool
    ) -> None:
        """Log the metrics of the evaluation `what` by name, and the state after it."""
        self._at = (self._at[0], self._at[1] + 1)
        self._write(what, metrics, state, writes=writes)

    def _write(self, what: str, metrics: Mapping[str, Sequence[float]], state: NamedTensors, *, writes: bool) -> None:
        if not writes:
            return
        assert state is not None
        tensors, (step, call) = state, self._at
        digests = dict(zip(tensors, cheap_digests(tensors.values()), strict=True))
        bits = {name: [float(value).hex() for value in values] for name, values in metrics.items()}
        with self._path.open("a") as file:
            line = {
                "step": step,
                "call": call,
                "what": what,
                "shards": self.shards,
                "figures": bits,
                "tensors": digests,
            }
            file.write(json.dumps(line) + "\n")
