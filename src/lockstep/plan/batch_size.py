"""Steps and samples to the same loss at other batch sizes: from the gradient noise scale, or from measured branches.

The steps to a loss are s_min (1 + B_crit / B), and the samples are B times as many (McCandlish et al., An Empirical
Model of Large-Batch Training, 2018). The gradient noise scale is an estimate of B_crit from one run. Branches measure
it: short runs from one checkpoint, at several batch sizes and with the learning rates of a rule. They read the same
samples in the same order, so that most of the noise in their losses is common to all.

A curve a + b (1 + t / (p tau))^-p is fitted to the losses of each branch; t is the number of updates before the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import combinations
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import LockstepError
from lockstep.plan.profile import read_probe
from lockstep.plan.program_runs import ProgramRun, run_program
from lockstep.report.summary import advise_batch

LEAST_STEPS: Final = 10  # of a branch: a curve has four parameters
EXTRAPOLATED_TIMES: Final = 4.0  # a curve is not extrapolated beyond this many times the steps of its branch
TARGET_AT: Final = 0.6  # the loss that is aimed at, if none is given, is reached after this share of the slowest branch
OUTLIER: Final = 4.0  # standard deviations from the curve to which the loss of a step is limited
SHIFTS: Final = 40  # refits for the interval, each once with the residuals and once with their negatives
POWERS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)  # the last is almost an exponential
LAW_ERROR: Final = 0.05  # with it, 41 of 42 runs were inside: 3 models, SGD and AdamW, all rules, 3 seeds each
TIMES: Final = 60  # values of tau, from 1/100 of the branch to four times its length


class LearningRateRule(Enum):
    """How the learning rate follows the batch size."""

    LINEAR = "linear"  # usual for SGD
    SQRT = "sqrt"  # usual for Adam
    NONE = "none"

    def factor(self, ratio: float) -> float:
        """Return what the learning rate is multiplied by when the batch size is multiplied by `ratio`."""
        if not ratio > 0:
            raise ValueError(f"the ratio of batch sizes must be positive, not {ratio}")
        return {LearningRateRule.LINEAR: ratio, LearningRateRule.SQRT: math.sqrt(ratio)}.get(self, 1.0)


# ---- from the gradient noise scale -----------------------------------------------------------------------------------


def steps_at(batch: float, *, steps: float, at_batch: float, noise_scale: float) -> float:
    """Return how many steps `batch` needs to the loss to which `at_batch` needs `steps`."""
    if not (batch > 0 and at_batch > 0 and steps >= 0 and noise_scale >= 0):
        raise ValueError(f"{batch=}, {at_batch=}, {steps=} and {noise_scale=} must not be negative, batches not zero")
    return steps * (1 + noise_scale / batch) / (1 + noise_scale / at_batch)


def samples_at(batch: float, *, steps: float, at_batch: float, noise_scale: float) -> float:
    """Return how many samples `batch` needs to the loss to which `at_batch` needs `steps`."""
    return batch * steps_at(batch, steps=steps, at_batch=at_batch, noise_scale=noise_scale)


def advise(noise_scale: float | None, *, batch: int) -> str:
    """Return a sentence on whether a larger batch pays. `noise_scale` is None if it was not measured."""
    unknown = "The gradient noise scale is not known: let the program make more steps, on two shards or more."
    return unknown if noise_scale is None else advise_batch(noise_scale, batch)


# ---- the losses of a branch ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """The losses of a short run: `losses[i]` is the mean over the batch of step i, before its update."""

    global_batch_size: int
    lr_factor: float
    losses: tuple[float, ...]

    def __str__(self) -> str:
        return f"the branch with batch {self.global_batch_size} and learning rate x {self.lr_factor:g}"

    @property
    def samples(self) -> int:
        return self.global_batch_size * len(self.losses)


@dataclass(frozen=True)
class LossCurve:
    """A falling curve floor + drop (1 + t / (power time))^-power, fitted to the first `steps` steps of a branch."""

    floor: float
    drop: float
    time: float
    power: float
    steps: int

    def at(self, step: float) -> float:
        return self.floor + self.drop * math.pow(1 + step / (self.power * self.time), -self.power)

    def values(self) -> Tensor:
        """Return the losses of the curve at the steps of the branch, [steps, 1]."""
        steps = torch.arange(self.steps, dtype=torch.float64)[:, None]
        return self.floor + self.drop * (1 + steps / (self.power * self.time)) ** -self.power

    @property
    def first(self) -> float:
        return self.floor + self.drop

    def steps_to(self, loss: float) -> float:
        """Return after how many steps the curve reaches `loss`; infinity if it does not."""
        if loss >= self.first:
            return 0.0
        if loss - self.floor <= 1e-9 * self.drop:
            return math.inf
        return self.power * self.time * (math.pow((loss - self.floor) / self.drop, -1 / self.power) - 1)


@dataclass(frozen=True)
class StepsToLoss:
    """How many steps a branch needs to a loss. `is_extrapolated`: it has fewer steps than that."""

    global_batch_size: int
    steps: float
    is_extrapolated: bool

    @property
    def samples(self) -> float:
        return self.steps * self.global_batch_size


def fit_curve(branch: Branch) -> LossCurve:
    """Fit a falling curve by least squares; single losses far away from it count less.

    Raises LockstepError if the branch diverged, and ValueError if it is too short.
    """
    return _fit(_without_outliers(branch))[0]


def steps_to(branch: Branch, target_loss: float) -> StepsToLoss:
    """Return how many steps the fitted curve of the branch takes to `target_loss`.

    Raises ValueError if the target is not below the first loss, LockstepError if the curve does not reach it within
    `EXTRAPOLATED_TIMES` the length of the branch.
    """
    return _steps_to(branch, fit_curve(branch), target_loss)


def _steps_to(branch: Branch, curve: LossCurve, target_loss: float) -> StepsToLoss:
    if not target_loss < curve.first:
        raise ValueError(
            f"target loss {target_loss:.6g}: {branch} has {curve.first:.6g} at its start; choose a lower one"
        )
    steps = curve.steps_to(target_loss)
    if not steps <= EXTRAPOLATED_TIMES * curve.steps:
        raise LockstepError(
            f"{branch} reached a loss of {curve.at(curve.steps):.6g} after {curve.steps} steps, and its curve does not "
            f"reach {target_loss:.6g} within {EXTRAPOLATED_TIMES:g} times as many; make more steps, or choose a higher "
            "target loss"
        )
    return StepsToLoss(branch.global_batch_size, steps, is_extrapolated=steps > curve.steps)


def _without_outliers(branch: Branch) -> Tensor:
    """Return the losses as a tensor [steps, 1], limited to a band around the curve."""
    for step, loss in enumerate(branch.losses):
        if not math.isfinite(loss):
            raise LockstepError(
                f"{branch} diverged: its loss at step {step + 1} is {loss}; choose smaller batches or another rule for "
                "the learning rate"
            )
    if len(branch.losses) < LEAST_STEPS:
        raise ValueError(f"{branch} has {len(branch.losses)} steps; a curve needs {LEAST_STEPS} or more")
    losses = torch.tensor(branch.losses, dtype=torch.float64)[:, None]
    for _ in range(2):
        fitted = _fit(losses)[0].values()
        residuals = losses - fitted
        limit = OUTLIER * 1.4826 * float(residuals.abs().median())  # of a normal distribution
        losses = fitted + residuals.clamp(-limit, limit)
    return losses


def _fit(losses: Tensor) -> list[LossCurve]:
    """Fit a curve to each column of `losses` [steps, columns].

    For a given shape, floor and drop are a linear regression, which reduces the squared error by the square of the
    covariance with the normalised shape. The shape with the largest reduction is taken.
    """
    steps = len(losses)
    times = torch.linspace(math.log(steps / 100), math.log(4 * steps), TIMES, dtype=torch.float64).exp()
    grid = torch.cartesian_prod(times, torch.tensor(POWERS, dtype=torch.float64))  # [shapes, 2]
    time, power = grid[:, :1], grid[:, 1:]
    shapes = (1 + torch.arange(steps, dtype=torch.float64) / (power * time)) ** -power  # [shapes, steps]
    means, loss_means = shapes.mean(1), losses.mean(0)
    centred = shapes - means[:, None]
    norms = centred.norm(dim=1)
    reduction = (centred / norms[:, None]) @ (losses - loss_means)  # [shapes, columns]
    best = reduction.argmax(0)
    drops = (reduction.max(0).values / norms[best]).clamp(min=0.0)
    floors = loss_means - drops * means[best]
    rows = torch.cat([floors[:, None], drops[:, None], grid[best]], dim=1)
    return [LossCurve(floor, drop, time, power, steps) for floor, drop, time, power in rows.tolist()]


# ---- from branches to other batch sizes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepsLaw:
    """steps(B) = min_steps + min_samples / B, which is s_min (1 + B_crit / B) with B_crit = min_samples / min_steps."""

    min_steps: float
    min_samples: float

    def steps(self, batch: float) -> float:
        return self.min_steps + self.min_samples / batch


def fit_law(measured: Sequence[tuple[int, float]]) -> StepsLaw:
    """Fit the law to pairs of batch size and steps, with the least squared relative error; no part is negative.

    Raises ValueError if there are fewer than two batch sizes.
    """
    if len({batch for batch, _ in measured}) < 2:
        raise ValueError(f"the critical batch size needs branches at two batch sizes or more, not {list(measured)}")
    # Rows (u, v) of the regression 1 = min_steps u + min_samples v.
    rows = [(1 / max(steps, 1e-9), 1 / (batch * max(steps, 1e-9))) for batch, steps in measured]
    uu, uv, vv = sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows)
    u1, v1 = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    min_steps, min_samples = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
    if min_steps < 0:
        return StepsLaw(0.0, v1 / vv)
    if min_samples < 0:
        return StepsLaw(u1 / uu, 0.0)
    return StepsLaw(min_steps, min_samples)


@dataclass(frozen=True)
class StepsForecast:
    """Steps to the target loss at a batch size, with an interval (see `BatchForecast.predict`)."""

    global_batch_size: int
    steps: float
    low: float
    high: float

    @property
    def samples(self) -> float:
        return self.steps * self.global_batch_size


@dataclass(frozen=True)
class BatchForecast:
    """Steps to a loss as a function of the batch size.

    measured  steps of the branches
    law       fitted to them
    refits    laws from losses with other noise
    omissions laws without one of the branches; empty if there are only two
    """

    target_loss: float
    base_batch_size: int
    measured: tuple[StepsToLoss, ...]
    law: StepsLaw
    refits: tuple[StepsLaw, ...]
    omissions: tuple[StepsLaw, ...]

    @property
    def critical_batch_size(self) -> float | None:
        """The batch size with twice the fewest samples; None if it is too large to be seen in the branches."""
        return self.law.min_samples / self.law.min_steps if self.law.min_steps > 0 else None

    def predict(self, batch: int) -> StepsForecast:
        """The interval holds 90 % of the refits and all laws without one branch, and is widened by `LAW_ERROR`."""
        if batch < 1:
            raise ValueError(f"the batch size must be positive, not {batch}")
        steps = self.law.steps(batch)
        refits = quantiles([one.steps(batch) for one in self.refits], n=20, method="inclusive")
        others = [steps, *(one.steps(batch) for one in self.omissions)]
        low, high = min(refits[0], *others), max(refits[-1], *others)
        return StepsForecast(batch, steps, low * (1 - LAW_ERROR), high * (1 + LAW_ERROR))

    @property
    def is_extrapolated(self) -> bool:
        """Whether a branch did not reach the target loss."""
        return any(one.is_extrapolated for one in self.measured)

    @property
    def curve(self) -> list[dict[str, Any]]:
        """Rows for the batch sizes of the branches, and for up to four times the largest."""
        sizes = sorted({one.global_batch_size for one in self.measured})
        rows = [self.predict(batch) for batch in (*sizes, 2 * sizes[-1], 4 * sizes[-1])]
        return [asdict(one) | {"samples": one.samples} for one in rows]

    def best_batch(self, step_time_s: Callable[[int], float], candidates: Sequence[int]) -> int:
        """Return the batch size with the least time to the target loss; of equal ones, the smallest."""
        if not candidates:
            raise ValueError("there are no batch sizes to choose from")
        return min(sorted(candidates), key=lambda batch: self.law.steps(batch) * step_time_s(batch))

    @property
    def advice(self) -> str:
        base, largest = self.base_batch_size, max(one.global_batch_size for one in self.measured)
        here, there = self.predict(base), self.predict(4 * base)
        critical = self.critical_batch_size
        if critical is None:
            text = f"The critical batch size is far above {largest:,}, the largest that was tried: a larger batch pays."
        elif critical < min(one.global_batch_size for one in self.measured) / 4:
            text = "The batch size hardly changes the number of steps: a larger batch does not pay."
        else:
            text = f"The critical batch size is about {critical:,.0f}: larger batches need many more samples."
        text += (
            f" To the loss {self.target_loss:.4g}, batch {base:,} needs about {here.steps:,.0f} steps, and batch "
            f"{there.global_batch_size:,} needs {there.steps:,.0f} ({there.low:,.0f} to {there.high:,.0f}) with "
            f"{there.samples / here.samples:.2f} times the samples."
        )
        return text + (" Some branches did not reach this loss; their curves were extrapolated." * self.is_extrapolated)


def _choose_target(branches: Sequence[Branch], curves: Sequence[LossCurve]) -> float:
    """Return a loss that all branches reach. Raises LockstepError if a branch starts below it, or does not fall."""
    target = max(one.at(TARGET_AT * one.steps) for one in curves)
    for branch, curve in sorted(zip(branches, curves, strict=True), key=lambda pair: pair[1].drop):
        if not target < curve.first:
            raise LockstepError(
                f"the loss of {branch} does not fall enough: from {curve.first:.6g} to {curve.at(curve.steps):.6g} in "
                f"{curve.steps} steps; make more steps, or start from an earlier checkpoint"
            )
    return target


def forecast(branches: Sequence[Branch], *, base_batch_size: int, target_loss: float | None = None) -> BatchForecast:
    """Compute the steps to `target_loss` at other batch sizes; None: to a loss that all branches reach.

    Raises ValueError for fewer than two batch sizes and for a target that is not below the first losses, LockstepError
    if a branch diverged or does not reach the target.
    """
    sizes = [one.global_batch_size for one in branches]
    if len(set(sizes)) < 2:
        raise ValueError(f"branches at two batch sizes or more are needed, not {sizes}")
    losses = [_without_outliers(one) for one in branches]
    curves = [_fit(one)[0] for one in losses]
    target = _choose_target(branches, curves) if target_loss is None else target_loss
    measured = tuple(_steps_to(branch, curve, target) for branch, curve in zip(branches, curves, strict=True))
    pairs = [(one.global_batch_size, one.steps) for one in measured]
    omitted = combinations(pairs, len(pairs) - 1) if len(pairs) > 2 else ()
    return BatchForecast(
        target_loss=target,
        base_batch_size=base_batch_size,
        measured=measured,
        law=fit_law(pairs),
        refits=tuple(_refit(branches, losses, target)),
        omissions=tuple(fit_law(one) for one in omitted if len({batch for batch, _ in one}) > 1),
    )


def _refit(branches: Sequence[Branch], losses: Sequence[Tensor], target: float) -> list[StepsLaw]:
    """Fit again, with the residuals of all branches moved by the same number of samples.

    The noise of branches that read the same samples remains common, and also what it has in common from step to step.
    """
    samples = min(one.samples for one in branches)
    found: list[list[float]] = []
    for branch, loss in zip(branches, losses, strict=True):
        fitted = _fit(loss)[0].values()
        residuals = (loss - fitted) * math.sqrt(len(loss) / (len(loss) - 4))
        moves = [round(samples * k / SHIFTS / branch.global_batch_size) for k in range(SHIFTS)]
        moved = torch.cat([residuals.roll(move, dims=0) for move in moves], dim=1)
        refitted = _fit(torch.cat([fitted + moved, fitted - moved], dim=1))
        found.append([min(one.steps_to(target), EXTRAPOLATED_TIMES * one.steps) for one in refitted])
    sizes = [one.global_batch_size for one in branches]
    return [fit_law(list(zip(sizes, steps, strict=True))) for steps in zip(*found, strict=True)]


# ---- running the branches --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BranchPlan:
    """Which branches are run.

    start            directory of a run, whose newest checkpoint they start from; None: the program's first weights
    base_batch_size  of the program, for which its learning rate is meant
    steps            at the base batch size; others take as many samples, but `LEAST_STEPS` steps or more
    """

    start: Path | None
    batches: tuple[int, ...]
    base_batch_size: int
    steps: int
    rule: LearningRateRule

    def __post_init__(self) -> None:
        if len(set(self.batches)) < 2 or min(self.batches) < 1:
            raise ValueError(f"branches need two batch sizes or more, not {list(self.batches)}")
        if self.base_batch_size < 1 or self.steps < LEAST_STEPS:
            raise ValueError(f"branches need {LEAST_STEPS} steps or more of a batch of 1 or more, not {self}")

    def run_at(self, batch: int) -> ProgramRun:
        return ProgramRun(
            steps=max(LEAST_STEPS, round(self.steps * self.base_batch_size / batch)),
            global_batch_size=batch,
            start=None if self.start is None else str(self.start.absolute()),
            lr_factor=self.rule.factor(batch / self.base_batch_size),
        )


def run_branch(how: ProgramRun, program: Sequence[str], folder: Path, timeout_s: float) -> Branch:
    """Run the program as `how` says. Raises LockstepError with the end of its output if it fails."""
    batch = how.global_batch_size
    assert batch is not None
    try:
        losses = read_probe(run_program(how, program, folder, timeout_s)).losses
    except LockstepError as error:
        raise LockstepError(f"the branch with batch {batch} and learning rate x {how.lr_factor:g}: {error}") from None
    return Branch(batch, how.lr_factor, tuple(losses))


def run_branches(
    plan: BranchPlan,
    program: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> list[Branch]:
    """Run the program once for each batch size, in ascending order, with its files in `folder`.

    timeout_s  of one run
    report     is called with a line before each run

    Raises LockstepError if there is no checkpoint to start from, or if the program fails.
    """
    if plan.start is not None and CheckpointStore(plan.start).newest() is None:
        raise LockstepError(f"{plan.start} has no checkpoint from which branches can start; let the program save one")
    found = []
    for batch in sorted(set(plan.batches)):
        how = plan.run_at(batch)
        report(f"{how.steps} steps at batch {batch}, learning rate x {how.lr_factor:g}")
        found.append(run_branch(how, program, folder / f"batch{batch}", timeout_s))
    return found
