"""Steps to a loss at other batch sizes: planted curves, their noise, wrong inputs, and branches of a real program."""

from __future__ import annotations

import math
import random
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.plan.batch_size import (
    LAW_ERROR,
    BatchForecast,
    Branch,
    BranchPlan,
    LearningRateRule,
    StepsLaw,
    advise,
    fit_curve,
    fit_law,
    forecast,
    run_branches,
    samples_at,
    steps_at,
    steps_to,
)

BASE, CRITICAL, MIN_STEPS = 128, 600.0, 40.0
SIZES = (BASE // 2, BASE, 2 * BASE)
SAMPLES = 300 * BASE


def planted_loss(progress: float) -> float:
    """The loss after `progress` times the fewest steps."""
    return 1.0 + 1.5 * (1 + progress) ** -0.8


def planted(batch: int, *, noise: float = 0.0, seed: int = 0, is_paired: bool = True) -> Branch:
    """A branch whose steps to any loss are proportional to 1 + CRITICAL / batch.

    noise      standard deviation of the loss of one sample
    is_paired  whether branches with other batch sizes have the same samples in the same order
    """
    rng = random.Random(seed if is_paired else 1000 * seed + batch)
    block, unit = SIZES[0], noise / math.sqrt(SIZES[0])
    blocks = [rng.gauss(0.0, unit) for _ in range(SAMPLES // block)]
    per_step = batch // block
    losses = []
    for step in range(SAMPLES // batch):
        error = sum(blocks[step * per_step : (step + 1) * per_step]) / per_step
        losses.append(planted_loss(step / (MIN_STEPS * (1 + CRITICAL / batch))) + error)
    return Branch(batch, batch / BASE, tuple(losses))


def true_steps(batch: int, loss: float) -> float:
    return ((1.5 / (loss - 1.0)) ** (1 / 0.8) - 1) * MIN_STEPS * (1 + CRITICAL / batch)


def forecast_of(**how: object) -> BatchForecast:
    return forecast([planted(batch, **how) for batch in SIZES], base_batch_size=BASE)  # type: ignore[arg-type]


# ---- the noise scale, and rules for the learning rate ----------------------------------------------------------------


def test_steps_from_the_noise_scale() -> None:
    known = {"steps": 1000.0, "at_batch": 64, "noise_scale": 64.0}
    assert steps_at(64, **known) == 1000
    assert steps_at(128, **known) == pytest.approx(750)  # 2 s_min at the noise scale, 1.5 s_min at twice as much
    assert samples_at(128, **known) == pytest.approx(750 * 128)
    assert steps_at(2**40, **known) == pytest.approx(500)
    assert samples_at(1e-9, **known) == pytest.approx(1000 * 64 / 2)
    assert steps_at(128, steps=1000, at_batch=64, noise_scale=0) == 1000
    with pytest.raises(ValueError, match="batch=0"):
        steps_at(0, **known)


def test_advice_from_the_noise_scale() -> None:
    assert "a larger batch pays" in advise(1000.0, batch=64)
    assert "no longer pays" in advise(10.0, batch=64)
    assert "not known" in advise(None, batch=64)


def test_rules_for_the_learning_rate() -> None:
    assert [rule.factor(4.0) for rule in LearningRateRule] == [4.0, 2.0, 1.0]
    assert LearningRateRule("sqrt").factor(0.25) == 0.5
    with pytest.raises(ValueError, match="positive"):
        LearningRateRule.NONE.factor(0)


# ---- the curve of a branch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("loss", [2.2, 1.9, 1.7])
def test_steps_to_a_loss_on_a_planted_curve(batch: int, loss: float) -> None:
    found = steps_to(planted(batch), loss)
    assert found.steps == pytest.approx(true_steps(batch, loss), rel=0.01)
    assert found.samples == found.steps * batch


def test_an_exponential_is_fitted() -> None:
    curve = fit_curve(Branch(8, 1.0, tuple(0.5 + 2.0 * math.exp(-step / 50) for step in range(200))))
    assert curve.steps_to(0.5 + 2.0 * math.exp(-1)) == pytest.approx(50, rel=0.02)
    assert curve.at(0) == curve.first == pytest.approx(2.5, rel=0.02)


def test_a_loss_beyond_the_branch_is_extrapolated_and_marked() -> None:
    whole = planted(BASE)
    loss = whole.losses[150]
    assert not steps_to(whole, loss).is_extrapolated
    found = steps_to(replace(whole, losses=whole.losses[:100]), loss)
    assert found.is_extrapolated
    assert found.steps == pytest.approx(150, rel=0.05)


def test_single_wrong_losses_do_not_move_the_curve() -> None:
    branch = planted(BASE, noise=1.0)
    losses = list(branch.losses)
    losses[30], losses[200] = 60.0, 45.0
    moved = steps_to(replace(branch, losses=tuple(losses)), 1.8).steps
    assert moved == pytest.approx(steps_to(branch, 1.8).steps, rel=0.03)


# ---- from branches to other batch sizes ------------------------------------------------------------------------------


def test_the_law_is_found_from_exact_curves() -> None:
    found = forecast_of()
    assert found.critical_batch_size == pytest.approx(CRITICAL, rel=0.05)
    for batch in (4 * BASE, 16 * BASE):
        assert found.predict(batch).steps == pytest.approx(true_steps(batch, found.target_loss), rel=0.02)
    assert not found.is_extrapolated


@pytest.mark.parametrize("seed", range(6))
def test_the_law_is_found_in_noise(seed: int) -> None:
    found = forecast_of(noise=1.0, seed=seed)
    predicted, truth = found.predict(4 * BASE), true_steps(4 * BASE, found.target_loss)
    assert predicted.steps == pytest.approx(truth, rel=0.12)
    assert predicted.low <= truth <= predicted.high
    assert predicted.high / predicted.low < 1.6


def noise_width(found: BatchForecast) -> float:
    """The part of the interval's relative width that is due to the noise."""
    predicted = replace(found, omissions=()).predict(4 * BASE)
    return (predicted.high - predicted.low) / predicted.steps - 2 * LAW_ERROR


@pytest.mark.parametrize("seed", range(3))
def test_more_noise_makes_the_interval_wider(seed: int) -> None:
    widths = [noise_width(forecast_of(noise=noise, seed=seed)) for noise in (0.0, 0.5, 2.0)]
    assert widths[0] < 0.02  # the planted power is not one of those that are fitted
    assert widths[2] > 1.5 * widths[1] > 1.5 * widths[0]


def test_common_samples_make_the_prediction_more_precise() -> None:
    def mean_error(*, is_paired: bool) -> float:
        errors = []
        for seed in range(12):
            # The steps of a branch with four times the batch are those of the same samples, or of others.
            found = forecast_of(noise=2.0, seed=seed, is_paired=is_paired)
            large = steps_to(planted(4 * BASE, noise=2.0, seed=seed, is_paired=is_paired), found.target_loss)
            errors.append(abs(found.predict(4 * BASE).steps / large.steps - 1))
        return sum(errors) / len(errors)

    assert mean_error(is_paired=True) < 0.6 * mean_error(is_paired=False)


def test_parts_of_the_law_are_never_negative() -> None:
    exact = fit_law([(batch, 7 + 900 / batch) for batch in (10, 20, 40)])
    assert (exact.min_steps, exact.min_samples) == (pytest.approx(7), pytest.approx(900))
    assert fit_law([(10, 100), (20, 40), (40, 15)]).min_steps == 0  # falls faster than 1/B
    constant = fit_law([(10, 50), (20, 51), (40, 52)])
    assert (constant.min_steps, constant.min_samples) == (pytest.approx(51, rel=0.01), 0)


def test_the_rows_of_the_curve() -> None:
    found = forecast_of()
    assert [row["global_batch_size"] for row in found.curve] == [64, 128, 256, 512, 1024]
    for row in found.curve:
        assert row["samples"] == row["steps"] * row["global_batch_size"]
        assert row["low"] < row["steps"] < row["high"]
    for one, row in zip(found.measured, found.curve, strict=False):
        assert one.steps == pytest.approx(row["steps"], rel=0.02)


def test_the_best_batch_has_the_least_time_to_the_loss() -> None:
    found = forecast_of()
    sizes = [2**power for power in range(4, 14)]
    assert found.best_batch(lambda batch: 1.0, sizes) == sizes[-1]  # steps take the same time
    assert found.best_batch(lambda batch: 0.01 * batch, sizes) == sizes[0]  # samples take the same time
    # (1 + c / B) (d + B) is least at B = sqrt(c d).
    assert found.best_batch(lambda batch: 437 + batch, sizes) == 512
    with pytest.raises(ValueError, match="no batch sizes"):
        found.best_batch(lambda batch: 1.0, [])


def test_advice_from_branches() -> None:
    found = forecast_of()
    assert f"critical batch size is about {found.critical_batch_size:,.0f}" in found.advice
    assert "batch 512 needs" in found.advice
    assert "extrapolated" not in found.advice
    unlimited = replace(found, law=StepsLaw(0.0, 1000.0))
    assert unlimited.critical_batch_size is None
    assert "far above 256" in unlimited.advice
    assert "does not pay" in replace(found, law=StepsLaw(50.0, 10.0)).advice


# ---- wrong inputs ----------------------------------------------------------------------------------------------------


def test_one_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two batch sizes or more are needed, not \[128, 128\]"):
        forecast([planted(BASE), planted(BASE)], base_batch_size=BASE)
    with pytest.raises(ValueError, match=r"two batch sizes or more, not \[128, 128\]"):
        BranchPlan(start=None, batches=(BASE, BASE), base_batch_size=BASE, steps=50, rule=LearningRateRule.NONE)


def test_a_target_above_the_first_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target loss 3: the branch with batch 64 .* has 2\.5\d* at its start"):
        forecast([planted(batch) for batch in SIZES], base_batch_size=BASE, target_loss=3.0)


def test_a_target_that_is_never_reached_is_refused() -> None:
    last = f"{planted(64).losses[-1]:.3g}"
    with pytest.raises(LockstepError, match=rf"batch 64 .* reached a loss of {last}\d* after 600 steps.* 0\.5 within"):
        forecast([planted(batch) for batch in SIZES], base_batch_size=BASE, target_loss=0.5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_branch_that_diverged_is_named(wrong: float) -> None:
    large = planted(2 * BASE)
    large = replace(large, losses=(*large.losses[:16], wrong, *large.losses[17:]))
    with pytest.raises(
        LockstepError, match=rf"batch 256 and learning rate x 2 diverged: its loss at step 17 is {wrong}"
    ):
        forecast([planted(BASE), large], base_batch_size=BASE)


@pytest.mark.parametrize("first", [1.0, 4.0])
def test_a_loss_that_rises_is_refused(first: float) -> None:
    rising = Branch(2 * BASE, 2.0, tuple(first + step / 100 for step in range(100)))
    with pytest.raises(LockstepError, match="the branch with batch 256 and learning rate x 2 does not fall enough"):
        forecast([planted(BASE), rising], base_batch_size=BASE)


def test_a_short_branch_is_refused() -> None:
    with pytest.raises(ValueError, match="has 9 steps"):
        fit_curve(Branch(8, 1.0, (1.0,) * 9))


# ---- branches of a real program --------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch, lockstep
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(512, 4)
targets = inputs @ torch.tensor([1.0, -2.0, 3.0, 4.0]) + 0.1 * torch.randn(512)

def loss(model, batch):
    x, y = batch
    return ((model(x)[:, 0] - y) ** 2).sum(), len(y)

with lockstep.Run(sys.argv[1], seed=3, progress=False) as run:
    model = run.replicate(torch.nn.Linear(4, 1))
    batches = run.batches(TensorDataset(inputs, targets), global_batch_size=16)
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else None
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.02), steps=steps):
        run.step(loss, batch)
"""


@pytest.mark.slow
def test_branches_of_a_program_start_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, start = tmp_path / "program.py", tmp_path / "start"
    script.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", [str(script), str(start), "40"])
    runpy.run_path(str(script))
    before = sorted(path.name for path in start.rglob("*"))
    plan = BranchPlan(start=start, batches=(32, 16), base_batch_size=16, steps=30, rule=LearningRateRule.LINEAR)
    lines: list[str] = []
    program = [str(script), str(start)]
    small, large = run_branches(plan, program, folder=tmp_path / "runs", timeout_s=60, report=lines.append)
    assert lines == ["30 steps at batch 16, learning rate x 1", "15 steps at batch 32, learning rate x 2"]
    assert [(one.global_batch_size, one.lr_factor, len(one.losses)) for one in (small, large)] == [
        (16, 1.0, 30),
        (32, 2.0, 15),
    ]
    # The loss begins at about 30, and 40 steps with the learning rate 0.02 divide it by about 25.
    assert 0 < large.losses[0] < 4
    assert sum(large.losses[-3:]) < 0.5 * sum(large.losses[:3])
    assert sorted(path.name for path in start.rglob("*")) == before

    too_large = replace(plan, batches=(1024, 2048), steps=640)
    with pytest.raises(LockstepError, match=r"batch 1024 and learning rate x 64: (.|\n)*ended with status(.|\n)*512"):
        run_branches(too_large, program, folder=tmp_path / "wrong", timeout_s=60)


def test_a_start_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    plan = BranchPlan(start=tmp_path, batches=(16, 32), base_batch_size=16, steps=30, rule=LearningRateRule.NONE)
    with pytest.raises(LockstepError, match="has no checkpoint"):
        run_branches(plan, ["never_started.py"], folder=tmp_path / "runs", timeout_s=1)
