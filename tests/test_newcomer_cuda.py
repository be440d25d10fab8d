"""What `tests/test_newcomer.py` shows on a CPU, on a GPU: with one worker and with two that share it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import test_newcomer
from on_workers import on_workers
from runs import use

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(rank: int, size: int, store: str, name: str, *args: Any) -> Any:
    use("shm", store, rank, size)
    test_newcomer.DEVICE = "cuda:0"
    return getattr(test_newcomer, name)(rank, size, *args)


def results(size: int, name: str, *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on_workers(on_gpu, size, f"{folder}/store", name, *args)


@pytest.mark.parametrize("name", ["unfreezing", "metrics_of_steps"])
def test_the_same_on_one_worker_and_two(name: str) -> None:
    (alone,) = results(1, name)
    assert results(2, name) == [alone] * 2


def test_figures_and_predictions(tmp_path: Path) -> None:
    (alone,) = results(1, "found_by_evaluate", str(tmp_path))
    assert alone["numbers"] == list(range(37))
    assert alone["loaded average"] == alone["of the average"] != alone["of the model"]
    same = {name: value for name, value in alone.items() if not name.startswith("no ")}
    for theirs in results(2, "found_by_evaluate", str(tmp_path)):
        assert {name: value for name, value in theirs.items() if not name.startswith("no ")} == same


def test_a_mean_is_refused_and_leaving_the_loop_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(test_newcomer, "DEVICE", "cuda:0")
    test_newcomer.test_a_mean_passed_off_as_a_sum_is_refused_in_the_first_step(tmp_path)
    for n, right in enumerate((test_newcomer.loss, test_newcomer.of_tokens)):
        test_newcomer.loop(lambda run, batch, *_, right=right: run.step(right, batch))
        assert test_newcomer.train(tmp_path / str(n), body=lambda batch: batch.number == 7) == list(range(8))
        assert test_newcomer.checkpoints(tmp_path / str(n))[-1] == 8
        assert test_newcomer.train(tmp_path / str(n)) == []
