"""Another order of the samples where a run resumes: refused within an epoch, taken and told between two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

import lockstep
from lockstep.data.ledger import prove
from lockstep.data.sample_order import ByLength
from on_workers import Failure, on_workers, try_on_workers
from runs import classify, data

SAMPLES, BATCH = 96, 16  # 6 steps in an epoch
LENGTHS = torch.arange(SAMPLES) % 23


class Strided:
    """An order of the program's own."""

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def steps(self, epoch: int) -> int:
        return SAMPLES // BATCH

    def batch(self, epoch: int, step: int) -> list[int]:
        return [n * self.stride % SAMPLES for n in range(step * BATCH, (step + 1) * BATCH)]


class Reversed(Strided):
    def batch(self, epoch: int, step: int) -> list[int]:
        return super().batch(epoch, step)[::-1]


def weighted(heavy: int) -> WeightedRandomSampler:
    return WeightedRandomSampler([9.0 if n % heavy == 0 else 1.0 for n in range(SAMPLES)], SAMPLES)


ORDERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "Shuffled": lambda: lockstep.Shuffled(SAMPLES, BATCH, 7),  # as by default
    "Shuffled(seed=9)": lambda: lockstep.Shuffled(SAMPLES, BATCH, 9),
    "Sequential": lambda: lockstep.Sequential(SAMPLES, BATCH),
    "Sequential(size=64)": lambda: lockstep.Sequential(64, BATCH),
    "by length": lambda: ByLength(LENGTHS, BATCH, 7),
    "small pools": lambda: ByLength(LENGTHS, BATCH, 7, pool=2),
    "other lengths": lambda: ByLength(LENGTHS.flip(0), BATCH, 7),
    "RandomSampler": lambda: RandomSampler(range(SAMPLES)),
    "SequentialSampler": lambda: SequentialSampler(range(SAMPLES)),
    "BatchSampler": lambda: BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=False),
    "weighted": lambda: weighted(2),
    "other weights": lambda: weighted(3),
    "Strided": lambda: Strided(5),
    "other stride": lambda: Strided(7),
    "Reversed": lambda: Reversed(5),
}


def train(directory: Path | None, order: str, steps: int | None = None, **options: Any) -> str:
    with lockstep.Run(directory, seed=7, progress=False, device="cpu", **options) as run:
        model = run.replicate(nn.Linear(16, 10))
        batches = run.batches(data(SAMPLES), global_batch_size=BATCH, shards=8, epochs=3, order=ORDERS[order]())
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps=steps):
            run.step(classify, batch)
        return run.digest()


SAME_NAME = "gives another order there than when this was saved"
REFUSED = [
    ("default", "Sequential", "Shuffled in the checkpoint, Sequential in the program"),
    ("default", "Shuffled(seed=9)", r"Shuffled in the checkpoint, Shuffled\(seed=9\) in the program"),
    ("Shuffled(seed=9)", "default", r"Shuffled\(seed=9\) in the checkpoint, Shuffled in the program"),
    ("Sequential", "Sequential(size=64)", r"Sequential in the checkpoint, Sequential\(size=64\) in the program"),
    ("by length", "small pools", r"ByLength\(lengths=\w+\) in the checkpoint, ByLength\(pool=2, lengths=\w+\) in"),
    ("by length", "other lengths", r"ByLength\(lengths=\w+\) in the checkpoint, ByLength\(lengths=\w+\) in the"),
    ("default", "RandomSampler", "Shuffled in the checkpoint, RandomSampler in the program"),
    ("RandomSampler", "default", "RandomSampler in the checkpoint, Shuffled in the program"),
    ("RandomSampler", "SequentialSampler", "RandomSampler in the checkpoint, SequentialSampler in the program"),
    ("RandomSampler", "BatchSampler", r"RandomSampler in the checkpoint, BatchSampler\(RandomSampler\) in the"),
    ("weighted", "other weights", f"WeightedRandomSampler, as order of the samples, {SAME_NAME}"),
    ("Strided", "other stride", f"Strided, as order of the samples, {SAME_NAME}"),
    ("Strided", "Reversed", "Strided in the checkpoint, Reversed in the program"),
    ("Sequential", "Strided", "Sequential in the checkpoint, Strided in the program"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("saved", "now", "words"), REFUSED, ids=lambda text: text)
def test_another_order_within_an_epoch_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], saved: str, now: str, words: str
) -> None:
    train(tmp_path, saved, steps=8)  # step 2 of epoch 1
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    capfd.readouterr()
    with pytest.raises(ValueError, match=f"cannot resume at step 2 of epoch 1.*{words}.*until the epoch ends"):
        train(tmp_path, now)
    assert "resumed from" not in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    assert train(tmp_path, saved) == train(None, saved)  # nothing is lost


@pytest.mark.few(3)
@pytest.mark.parametrize(("saved", "now", "words"), REFUSED[:3] + REFUSED[6:7] + REFUSED[10:13], ids=lambda text: text)
def test_between_two_epochs_the_order_may_change_and_that_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], saved: str, now: str, words: str
) -> None:
    train(tmp_path, saved, steps=6)
    capfd.readouterr()
    assert train(tmp_path, now) != train(None, saved)
    if "gives another order" not in words:
        assert "lockstep:   order: " in capfd.readouterr().err
    proof = prove(tmp_path)
    assert proof.holds
    assert [epoch.samples for epoch in proof.epochs] == [SAMPLES] * 3


def test_equal_orders_are_told_apart_by_nothing(tmp_path: Path) -> None:
    train(tmp_path / "a", "default", steps=8)
    assert train(tmp_path / "a", "Shuffled") == train(None, "default")
    train(tmp_path / "b", "Shuffled(seed=9)", steps=8)
    assert prove(tmp_path / "b").holds  # with the seed of the order, and not that of the run
    train(tmp_path / "c", "Sequential(size=64)", steps=5)
    assert prove(tmp_path / "c").holds
    assert [epoch.samples for epoch in prove(tmp_path / "c").epochs] == [64, 16]


def resume_with(rank: int, size: int, folder: str, order: str) -> str:
    return train(Path(folder), order)


def test_all_workers_refuse_it_and_all_resume_with_the_order_that_was(tmp_path: Path) -> None:
    train(tmp_path, "Strided", steps=8)
    for outcome in try_on_workers(resume_with, 2, str(tmp_path), "other stride"):
        assert isinstance(outcome, Failure)
        assert SAME_NAME in outcome
    for outcome in try_on_workers(resume_with, 3, str(tmp_path), "default"):
        assert isinstance(outcome, Failure)
        assert "Strided in the checkpoint, Shuffled in the program" in outcome
    assert on_workers(resume_with, 3, str(tmp_path), "Strided") == [train(None, "Strided")] * 3
