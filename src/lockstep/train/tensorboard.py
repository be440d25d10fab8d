"""Writes the metrics of a run as TensorBoard event files, on the one worker that writes."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError


class TensorBoardWriter:
    """Writes to the folder `tensorboard` of a run directory; does nothing without a directory or if not `enabled`.

    Raises LockstepError if it is enabled and has no directory, or if the package is not installed.
    """

    def __init__(self, directory: Path | None, *, enabled: bool) -> None:
        if enabled and directory is None:
            raise LockstepError("tensorboard=True: where shall its files go? Give the Run a directory")
        if enabled and importlib.util.find_spec("tensorboard") is None:
            raise LockstepError("tensorboard=True needs a package that is not here: pip install tensorboard")
        self._folder = directory / "tensorboard" if directory is not None and enabled else None
        self._writer: Any = None

    def write(self, step: int, metrics: Mapping[str, float | None], *, writes: bool) -> None:
        """Write the metrics of a step. The writing worker may change; TensorBoard merges their files."""
        if self._folder is None or not writes:
            return
        try:
            if self._writer is None:
                self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
            for name, value in metrics.items():
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._disable(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._disable(error)
        self._writer = None

    def _disable(self, error: Exception) -> None:
        """Warn and write nothing more: a full disk, or any other problem here, does not end the training."""
        text = f"lockstep: TensorBoard gets no more metrics, into {self._folder}: {error!r}"
        print(text, file=sys.stderr, flush=True)
        self._folder = self._writer = None
