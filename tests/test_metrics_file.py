"""metrics.jsonl: every line once, whichever worker writes it, and whichever is lost meanwhile."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lockstep.trace.metrics import MetricsFile


def lines(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["time"] > 0 for row in rows)
    return [(row["step"], row["loss"]) for row in rows]


def test_one_writes_and_all_know(tmp_path: Path) -> None:
    first, second = MetricsFile(tmp_path), MetricsFile(tmp_path)
    for step in range(3):
        first.add(step, {"loss": float(step)}, writes=True)
        second.add(step, {"loss": float(step)}, writes=False)
    assert lines(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("wrote", [True, False])
def test_the_heir_adds_the_last_line_if_it_is_missing(tmp_path: Path, wrote: bool) -> None:
    first, second = MetricsFile(tmp_path), MetricsFile(tmp_path)
    for step in range(3):
        second.add(step, {"loss": float(step)}, writes=False)
        if step < 2 or wrote:
            first.add(step, {"loss": float(step)}, writes=True)
    second.add(3, {"loss": 3.0}, writes=True)  # the first is lost
    assert lines(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_heir_adds_it_at_the_end_if_nothing_comes_after_it(tmp_path: Path) -> None:
    successor = MetricsFile(tmp_path)
    successor.add(7, {"loss": 1.0}, writes=False)
    successor.write()
    successor.write()
    assert lines(tmp_path) == [(7, 1.0)]


@pytest.mark.parametrize("loss", [2.5, math.nan, math.inf])
def test_a_call_that_is_made_again_is_not_written_again(tmp_path: Path, loss: float) -> None:
    """The first wrote it and was lost; the successor learns the result then, and is rank 0."""
    first, successor = MetricsFile(tmp_path), MetricsFile(tmp_path)
    first.add(0, {"loss": 1.0}, writes=True)
    successor.add(0, {"loss": 1.0}, writes=False)
    first.add(1, {"loss": loss}, writes=True)
    successor.add(1, {"loss": loss}, writes=True)
    assert [step for step, _ in lines(tmp_path)] == [0, 1]
