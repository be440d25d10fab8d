"""How far we are, on one line, from one worker."""

from __future__ import annotations

import sys
import time

from lockstep.train.step import Result

LINE_EVERY_S = 10.0  # in a log file
TURN_EVERY_S = 0.2  # on a terminal


class Progress:
    def __init__(self, *, steps: int | None, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._on_terminal = sys.stderr.isatty()
        self._began = time.perf_counter()
        self._said = self._began
        self._count, self._samples = 0, 0

    def step(self, result: Result, *, epoch: int, samples: int, waited_for_data_s: float) -> None:
        self._count, self._samples = self._count + 1, self._samples + samples
        now = time.perf_counter()
        if not self._shown or now - self._said < (TURN_EVERY_S if self._on_terminal else LINE_EVERY_S):
            return
        self._said = now
        took_s = now - self._began
        of = f"/{self._steps}" if self._steps is not None else ""
        line = (
            f"step {result.number + 1}{of}  epoch {epoch}  loss {result.loss:.4g}  "
            f"{self._samples / took_s:,.0f} samples/s  waiting for data {waited_for_data_s / took_s:.0%}"
        )
        self._print(line)

    def end(self, number: int) -> None:
        if self._shown and self._count:
            took_s = time.perf_counter() - self._began
            self._print(f"{number} steps done, {self._samples / took_s:,.0f} samples/s")
            if self._on_terminal:
                print(file=sys.stderr)

    def _print(self, line: str) -> None:
        if self._on_terminal:
            print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)
        else:
            print(f"lockstep: {line}", file=sys.stderr, flush=True)
