"""For `lockstep certify`: what every tensor of the state was after every step, in 64 bits each.

LOCKSTEP_WITNESS names the file, LOCKSTEP_WITNESS_STEPS after how many steps the program is ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lockstep.replicate.digest import cheap_digests


class Witness:
    def __init__(self, path: Path, steps: int) -> None:
        self._path, self.steps = path, steps

    @staticmethod
    def of(env: Mapping[str, str]) -> Witness | None:
        path = env.get("LOCKSTEP_WITNESS", "")
        return Witness(Path(path), int(env.get("LOCKSTEP_WITNESS_STEPS", "8"))) if path else None

    def note(self, step: int, loss: float, state: Mapping[str, Tensor]) -> None:
        """A step that is taken over from a lost worker may be noted twice; it is the same one."""
        seen = dict(zip(state, cheap_digests(state.values()), strict=True))
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.hex(), "tensors": seen}) + "\n")
