"""Curves over the steps of a run, thinned out so that spikes stay; advice on the batch size from gradient noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.report.generations import TraceGeneration
from lockstep.report.trace_reader import LoggedMetrics, TraceWindow

MOST_POINTS: Final = 400
AROUND: Final = 2.0  # a noise scale within this factor of the batch size counts as equal to it

Point = tuple[int, float | None]  # step, value; None: NaN or infinite


@dataclass(frozen=True)
class Curve:
    name: str
    unit: str
    points: tuple[Point, ...]
    last: float | None  # the last finite value
    not_finite: int  # number of values that are not finite, before thinning out
    first_not_finite: int | None  # step


@dataclass(frozen=True)
class NoiseSummary:
    curve: Curve
    batch: float
    scale: float  # median of the last third of its values
    advice: str


def draw_curves(windows: Sequence[TraceWindow]) -> list[Curve]:
    """Returns one curve per metric, with a window's value at its last step. Curves without any value are left out."""
    figures: list[tuple[str, str, Callable[[TraceWindow], float | None]]] = [
        ("loss", "", lambda window: window.loss),
        ("throughput", "samples/s", lambda window: window.samples / window.took_s if window.took_s > 0 else None),
        ("learning rate", "", lambda window: window.lr),
        ("gradient norm", "", lambda window: window.grad_norm),
    ]
    curves = [draw(name, unit, [(window.last, of(window)) for window in windows]) for name, unit, of in figures]
    return [curve for curve in curves if curve.points]


def draw(name: str, unit: str, found: Iterable[Point]) -> Curve:
    """Builds a curve. Values of None were not measured and are skipped; values that are not finite are counted gaps."""
    known = [(step, value) for step, value in found if value is not None]
    bad = [step for step, value in known if not math.isfinite(value)]
    points: list[Point] = [(step, value if math.isfinite(value) else None) for step, value in known]
    last = next((value for _, value in reversed(points) if value is not None), None)
    return Curve(name, unit, tuple(thin_out(points, MOST_POINTS)), last, len(bad), bad[0] if bad else None)


def thin_out(points: Sequence[Point], most: int) -> list[Point]:
    """Returns at most `most` points: the first, the last, and a minimum, maximum and gap of each stretch in between."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 3
    kept = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        values = [(value, at) for at, (_, value) in enumerate(stretch) if value is not None]
        gaps = [at for at, (_, value) in enumerate(stretch) if value is None]
        chosen = {min(values)[1], max(values)[1]} if values else set()
        kept += [stretch[at] for at in sorted(chosen | set(gaps[:1]))]
    return [*kept, points[-1]]


def draw_metrics(logged: Iterable[LoggedMetrics]) -> list[Curve]:
    """Returns one curve per metric of `run.log`, in the order of their first steps; the last value of a step counts."""
    points: dict[str, dict[int, float]] = {}
    for one in sorted(logged, key=lambda one: one.step):
        for name, value in one.metrics.items():
            points.setdefault(name, {})[one.step] = value
    return [draw(name, "", list(found.items())) for name, found in points.items()]


def summarize_noise(generations: list[TraceGeneration]) -> NoiseSummary | None:
    """Returns None if the noise scale was never measured."""
    by_step: dict[int, tuple[float, float]] = {}  # scale, batch; for a repeated step the last value counts
    for generation in generations:
        for member in generation.members.values():
            for noise in member.record.noises:
                if noise.scale is not None and noise.scale > 0:
                    by_step[noise.step] = (noise.scale, member.record.world.global_batch_size or noise.batch)
    if not by_step:
        return None
    steps = sorted(by_step)
    lately = steps[-max(1, len(steps) // 3) :]
    scale, batch = median(by_step[step][0] for step in lately), by_step[steps[-1]][1]
    curve = draw("gradient noise scale", "samples", [(step, by_step[step][0]) for step in steps])
    return NoiseSummary(curve, batch, scale, advise_batch(scale, batch))


def advise_batch(scale: float, batch: float) -> str:
    """Returns a sentence on whether a larger batch pays.

    The steps to a given loss are proportional to 1 + scale / batch, and the samples to 1 + batch / scale (McCandlish et
    al., 2018). The scale is a rough estimate: within a factor of two of the batch it counts as equal to it.
    """
    if batch <= 0:
        return f"The noise scale is about {scale:,.0f} samples; the batch size is not known."
    steps = (1 + scale / (2 * batch)) / (1 + scale / batch)  # of twice the batch, over those of the batch itself
    figures = f"The noise scale is about {scale:,.0f} samples, the batch has {batch:,.0f}"
    cost = (
        f"Twice the batch would need about {100 * (1 - steps):.0f} % fewer steps, and {100 * (2 * steps - 1):.0f} % "
        "more samples"
    )
    if scale > AROUND * batch:
        return f"{figures}, which is less: a larger batch pays. {cost}."
    if scale >= batch / AROUND:
        return f"{figures}, which is about the same: it is near the largest that pays. {cost}."
    smaller = "a smaller batch would learn as much from fewer samples"
    return f"{figures}, which is more: a larger batch no longer pays. {cost}; {smaller}."
