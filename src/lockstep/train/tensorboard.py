"""Figures of a run as event files of TensorBoard, from the one worker that writes."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError


class Board:
    """Of one run directory; without one, or if nobody asked for it, it shows nothing."""

    def __init__(self, directory: Path | None, *, wanted: bool) -> None:
        if wanted and directory is None:
            raise LockstepError("tensorboard=True: where shall its files go? Give the Run a directory")
        if wanted and importlib.util.find_spec("tensorboard") is None:
            raise LockstepError("tensorboard=True needs a package that is not here: pip install tensorboard")
        self._folder = directory / "tensorboard" if directory is not None and wanted else None
        self._writer: Any = None

    def show(self, step: int, figures: Mapping[str, float | None], *, writes: bool) -> None:
        """Whoever writes may be another worker each time: TensorBoard puts their files together."""
        if self._folder is None or not writes:
            return
        try:
            if self._writer is None:
                self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
            for name, value in figures.items():
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._give_up(error)
        self._writer = None

    def _give_up(self, error: Exception) -> None:
        """A full disk, or anything else that is wrong with it, does not end the training."""
        text = f"lockstep: TensorBoard gets no more figures, into {self._folder}: {error!r}"
        print(text, file=sys.stderr, flush=True)
        self._folder = self._writer = None
