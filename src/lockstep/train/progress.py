"""The progress of a run on one line, printed by one worker."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.step.step_types import Result

LINE_EVERY_S = 10.0  # in a log file
TURN_EVERY_S = 0.2  # on a terminal
METRICS_SHOWN = 6


class Progress:
    def __init__(
        self, *, steps: int | None = None, is_printing: Callable[[], bool] = lambda: False, is_shown: bool = False
    ) -> None:
        """
        steps        number of steps of the whole run; None if it is not known
        is_printing  whether this worker is the one that prints
        is_shown     the live view shows the progress already (report/live_view.py)
        """
        self._steps, self._is_printing, self._is_shown = steps, is_printing, is_shown
        self._on_terminal = sys.stderr.isatty()
        self._began = time.perf_counter()
        self._printed_at = self._began
        self._count, self._samples = 0, 0
        self._metrics: dict[str, float] = {}
        self._has_ended = False
        self._width = 0  # length of the line that the terminal shows

    def step(self, result: Result, *, epoch: int, samples: int, waited_for_data_s: float) -> None:
        self._count, self._samples = self._count + 1, self._samples + samples
        now = time.perf_counter()
        every_s = TURN_EVERY_S if self._on_terminal else LINE_EVERY_S
        if self._is_shown or now - self._printed_at < every_s or not self._is_printing():
            return
        self._printed_at = now
        took_s = now - self._began
        of = f"/{self._steps}" if self._steps is not None else ""
        parts = [f"step {result.number + 1}{of}", f"epoch {epoch}", f"loss {result.loss:.4g}"]
        parts += self._metric_texts(result.metrics)
        parts += [f"{self._samples / took_s:,.0f} samples/s", f"waiting for data {waited_for_data_s / took_s:.0%}"]
        self._print("  ".join(parts))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of `run.log` to the following lines; after the last step they get their own line."""
        self._metrics = dict(metrics)
        if self._has_ended and not self._is_shown and self._is_printing():
            self._print("  ".join([f"step {step}", *self._metric_texts({})]))
            self._end_line()

    def end(self, number: int) -> None:
        self._has_ended = True
        if self._count and not self._is_shown and self._is_printing():
            took_s = time.perf_counter() - self._began
            self._print(f"{number} steps done, {self._samples / took_s:,.0f} samples/s")
            self._end_line()

    def print_report_command(self, trace: Path | None) -> None:
        """Print which command makes the report, at the end of a run that took a step. `trace`: None without a trace."""
        if trace is None or not self._count or not self._is_printing() or not any(trace.glob("*.jsonl")):
            return
        near = os.path.relpath(trace.parent)
        place = str(trace.parent) if near.startswith(os.pardir) else near
        print(f"lockstep: where the time went: lockstep report {shlex.quote(place)}", file=sys.stderr, flush=True)

    def _metric_texts(self, of_step: Mapping[str, float]) -> list[str]:
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
