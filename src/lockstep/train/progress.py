"""How far we are, on one line, from one worker."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.train.step import Result

LINE_EVERY_S = 10.0  # in a log file
TURN_EVERY_S = 0.2  # on a terminal
METRICS_SHOWN = 6


class Progress:
    def __init__(
        self, *, steps: int | None = None, speaks: Callable[[], bool] = lambda: False, is_shown: bool = False
    ) -> None:
        """
        steps     of the whole run; None: not known
        speaks    whether this worker is the one that prints
        is_shown  a view shows the progress already (report/live_view.py)
        """
        self._steps, self._speaks, self._is_shown = steps, speaks, is_shown
        self._on_terminal = sys.stderr.isatty()
        self._began = time.perf_counter()
        self._said = self._began
        self._count, self._samples = 0, 0
        self._metrics: dict[str, float] = {}
        self._has_ended = False
        self._width = 0  # of what the terminal shows in our line

    def step(self, result: Result, *, epoch: int, samples: int, waited_for_data_s: float) -> None:
        self._count, self._samples = self._count + 1, self._samples + samples
        now = time.perf_counter()
        every_s = TURN_EVERY_S if self._on_terminal else LINE_EVERY_S
        if self._is_shown or now - self._said < every_s or not self._speaks():
            return
        self._said = now
        took_s = now - self._began
        of = f"/{self._steps}" if self._steps is not None else ""
        parts = [f"step {result.number + 1}{of}", f"epoch {epoch}", f"loss {result.loss:.4g}"]
        parts += self._noted(result.metrics)
        parts += [f"{self._samples / took_s:,.0f} samples/s", f"waiting for data {waited_for_data_s / took_s:.0%}"]
        self._print("  ".join(parts))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """What `run.log` noted is part of the line from now on; after the last step it has a line of its own."""
        self._metrics = dict(metrics)
        if self._has_ended and not self._is_shown and self._speaks():
            self._print("  ".join([f"step {step}", *self._noted({})]))
            self._end_line()

    def end(self, number: int) -> None:
        self._has_ended = True
        if self._count and not self._is_shown and self._speaks():
            took_s = time.perf_counter() - self._began
            self._print(f"{number} steps done, {self._samples / took_s:,.0f} samples/s")
            self._end_line()

    def point_at_report(self, trace: Path | None) -> None:
        """Prints at the end of a run that took a step which command makes its report. `trace`: None if it has none."""
        if trace is None or not self._count or not self._speaks() or not any(trace.glob("*.jsonl")):
            return
        near = os.path.relpath(trace.parent)
        place = str(trace.parent) if near.startswith(os.pardir) else near
        print(f"lockstep: where the time went: lockstep report {shlex.quote(place)}", file=sys.stderr, flush=True)

    def _noted(self, of_step: Mapping[str, float]) -> list[str]:
        """The metrics of the loss function and of `run.log`."""
        return [f"{name} {value:.4g}" for name, value in list({**of_step, **self._metrics}.items())[:METRICS_SHOWN]]

    def _print(self, line: str) -> None:
        if self._on_terminal:
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(f"lockstep: {line}", file=sys.stderr, flush=True)

    def _end_line(self) -> None:
        if self._on_terminal:
            print(file=sys.stderr)
            self._width = 0
