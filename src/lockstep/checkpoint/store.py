"""The checkpoints of one run: `checkpoints/step-000000123`, newest last."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format as layout

KEPT = 2


class Store:
    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory / "checkpoints"

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Called by one worker."""
        path = self._directory / f"step-{step:09d}"
        layout.write(path, state)
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(self._directory / f"step-{old:09d}")
        for leftover in self._directory.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed while it wrote
        return path

    def latest(self) -> dict[str, Any] | None:
        """The newest checkpoint, or None if there is none."""
        steps = self._steps()
        return layout.read(self._directory / f"step-{steps[-1]:09d}") if steps else None

    def _steps(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        found = (re.fullmatch(r"step-(\d{9})", path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)
