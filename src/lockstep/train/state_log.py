"""For `lockstep certify`: what every tensor of the state was after every step and evaluation, in 64 bits each.

LOCKSTEP_WITNESS names the file, LOCKSTEP_WITNESS_STEPS after how many steps the program is ended. Where
LOCKSTEP_WITNESS_DIRECTORY is set, the run has that directory, whatever the program says; LOCKSTEP_WITNESS_PART: another
start goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lockstep.ddp.state_digest import cheap_digests

Named = Callable[[], Mapping[str, Tensor]]


class Witness:
    def __init__(self, path: Path, steps: int, directory: Path | None = None, *, is_part: bool = False) -> None:
        self._path, self.steps, self.directory, self.is_part = path, steps, directory, is_part
        self._at = (-1, 0)  # the last step, and how many evaluations came since

    @staticmethod
    def of(env: Mapping[str, str]) -> Witness | None:
        path, directory = env.get("LOCKSTEP_WITNESS", ""), env.get("LOCKSTEP_WITNESS_DIRECTORY", "")
        if not path:
            return None
        steps, is_part = int(env.get("LOCKSTEP_WITNESS_STEPS", "8")), bool(env.get("LOCKSTEP_WITNESS_PART"))
        return Witness(Path(path), steps, Path(directory) if directory else None, is_part=is_part)

    def note_step(self, step: int, loss: float, state: Named, *, writes: bool) -> None:
        """A step that is taken over from a lost worker may be noted twice; it is the same one."""
        self._at = (step, 0)
        self._write("step", {"loss": [loss]}, state, writes=writes)

    def note_evaluation(self, what: str, figures: Mapping[str, Sequence[float]], state: Named, *, writes: bool) -> None:
        """`figures`: of the evaluation `what`, by name; `state` after it."""
        self._at = (self._at[0], self._at[1] + 1)
        self._write(what, figures, state, writes=writes)

    def _write(self, what: str, figures: Mapping[str, Sequence[float]], state: Named, *, writes: bool) -> None:
        if not writes:
            return
        tensors, (step, call) = state(), self._at
        seen = dict(zip(tensors, cheap_digests(tensors.values()), strict=True))
        bits = {name: [float(value).hex() for value in values] for name, values in figures.items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "call": call, "what": what, "figures": bits, "tensors": seen}) + "\n")
