"""Workers that are slower than others get fewer shards, and the bits stay the same."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.cli.main import main
from lockstep.step.shard_balance import (
    REST,
    WINDOW,
    ShardBalance,
    StepSpeed,
    best_counts,
    even_counts,
    shares_of,
)
from on_workers import on_workers
from runs import data, use

# -- the decision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "speeds", "counts"),
    [
        (12, (1, 1, 2), (5, 5, 2)),
        (12, (1, 1, 1), (4, 4, 4)),
        (8, (1, 3), (6, 2)),
        (8, (1, 1, 100), (4, 3, 1)),  # none is left without a shard
        (3, (1, 5, 1), (1, 1, 1)),
        (16, (2, 1, 1, 4), (3, 6, 6, 1)),
    ],
)
def test_the_slowest_is_done_as_soon_as_possible(shards: int, speeds: Any, counts: Any) -> None:
    assert best_counts(shards, speeds) == counts


def test_best_counts_are_the_best_of_all() -> None:
    speeds = (1.0, 1.7, 0.6)
    whole = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 9 - a)]
    best = min(max(n * s for n, s in zip(counts, speeds, strict=True)) for counts in whole)
    assert max(n * s for n, s in zip(best_counts(9, speeds), speeds, strict=True)) == best


def test_shares_cover_all_shards_in_order() -> None:
    assert shares_of((5, 5, 2)) == [range(5), range(5, 10), range(10, 12)]
    assert shares_of(even_counts(8, 3)) == [range(2), range(2, 5), range(5, 8)]


def feed(balance: ShardBalance, sample_s: Any, step_s: float) -> str | None:
    for _ in range(WINDOW):
        assert balance.reassign() is None
        balance.add_step([StepSpeed(one, step_s) for one in sample_s])
    return balance.reassign()


def test_equal_workers_keep_equal_shares() -> None:
    balance = ShardBalance(12, 3)
    assert feed(balance, (1.0, 1.04, 0.97), 0.1) is None
    assert balance.counts == (4, 4, 4)


def test_a_slow_worker_gets_fewer_shards_and_is_named() -> None:
    balance = ShardBalance(12, 3)
    found = feed(balance, (1.0, 1.0, 2.0), 0.1)
    assert found is not None
    assert balance.counts == (5, 5, 2)
    assert "worker 2 takes 2.0 times as long" in found
    assert "0.62 as long" in found
    assert feed(balance, (1.0, 1.0, 2.0), 0.07) is None  # it helps, and is kept
    assert feed(balance, (1.0, 1.0, 1.0), 0.1) is not None  # it has recovered
    assert balance.counts == (4, 4, 4)


def test_what_does_not_help_is_taken_back() -> None:
    balance = ShardBalance(12, 3)
    assert feed(balance, (1.0, 1.0, 2.0), 0.1) is not None
    back = feed(balance, (1.0, 1.0, 2.0), 0.12)  # bound by communication
    assert back is not None
    assert balance.counts == (4, 4, 4)
    assert "1.20 of the time before" in back
    assert [feed(balance, (1.0, 1.0, 2.0), 0.1) for _ in range(REST)] == [None] * REST
    assert feed(balance, (1.0, 1.0, 2.0), 0.1) is not None


def test_very_short_steps_are_left_alone() -> None:
    assert feed(ShardBalance(12, 3), (1.0, 1.0, 2.0), 0.001) is None


@pytest.mark.parametrize("balance", [ShardBalance(4, 4), ShardBalance(4, 1), ShardBalance(8, 2, enabled=False)])
def test_where_nothing_can_change(balance: ShardBalance) -> None:
    before = balance.counts
    for _ in range(2 * WINDOW):
        balance.add_step([StepSpeed(1.0 + rank, 0.1) for rank in range(len(before))])
    assert balance.reassign() is None


def test_steps_of_which_a_time_is_missing_do_not_count() -> None:
    balance = ShardBalance(12, 3)
    for _ in range(2 * WINDOW):
        balance.add_step([StepSpeed(1.0, 0.1), StepSpeed(), StepSpeed(2.0, 0.1)])
    assert balance.reassign() is None


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="balance_shards='no' must be True or False"):
        lockstep.Run(balance_shards="no")  # type: ignore[typeddict-item]


# -- runs --------------------------------------------------------------------------------------------------------------

SHARD_S = 0.015


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 10))


def train_with_a_slow_worker(
    rank: int, size: int, store: str, folder: str, options: dict[str, Any]
) -> tuple[str, list[int], float]:
    """The digest, how many shards this worker had in each step, and how long the last steps took."""
    use("shm", store, rank, size)
    slow = options.pop("slow", -1)

    def loss(model: Any, batch: Any) -> Any:
        if size > 1:
            time.sleep(2 * SHARD_S if rank == slow else SHARD_S)
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

    with lockstep.Run(
        folder if rank == 0 or size > 1 else None, seed=3, progress=False, device="cpu", **options
    ) as run:
        model = run.replicate(build())
        batches = run.batches(data(96), global_batch_size=24, shards=12, epochs=9)
        counts, times = [], [time.perf_counter()]
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)):
            counts.append(len(batch.shards))
            run.step(loss, batch)
            times.append(time.perf_counter())
        took = [after - before for before, after in itertools.pairwise(times)]
        return run.digest(), counts, statistics.median(took[-16:])


def on_slow_workers(size: int, folder: Path, name: str, **options: Any) -> list[Any]:
    return on_workers(train_with_a_slow_worker, size, str(folder / f"{name} store"), str(folder / name), options)


def test_a_worker_at_half_speed_gets_half_of_the_shards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ((alone, _, _),) = on_slow_workers(1, tmp_path, "alone")
    for attempt in range(3):  # on a busy machine all three may be slow
        name = f"slow {attempt}"
        slow = on_slow_workers(3, tmp_path, name, slow=2)
        assert {digest for digest, _, _ in slow} == {alone}
        shares = [counts[-1] for _, counts, _ in slow]  # 5, 5, 2, if no other process slows the others down
        assert sum(shares) == 12
        if shares[2] < min(shares[:2]):
            break
    assert shares[2] < min(shares[:2])
    capfd.readouterr()
    assert main(["report", str(tmp_path / name)]) == 0
    assert f"{', '.join(map(str, shares))} shards by speed: worker 2 takes" in capfd.readouterr().out


@pytest.mark.slow
def test_steps_get_shorter(tmp_path: Path) -> None:
    slow = on_slow_workers(3, tmp_path, "slow", slow=2)
    fixed = on_slow_workers(3, tmp_path, "fixed", slow=2, balance_shards=False)
    assert [counts[-1] for _, counts, _ in fixed] == [4, 4, 4]
    assert max(took for _, _, took in slow) < 0.9 * max(took for _, _, took in fixed)
