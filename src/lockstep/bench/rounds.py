"""Interleaved rounds, and what may be said from them.

NOTE [paired rounds]. A machine is never as fast now as it was a minute ago, so two arms that are measured one after the
other differ for reasons that are not theirs. Here every arm runs in every round, in an order that rotates, and arms are
compared round by round: first the ratio within each round, then the median of the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Plan:
    warmup: int  # steps of each arm before the first round: buckets are rebuilt, memory is found
    rounds: int
    steps: int  # of each arm in a round


def order_of(names: Sequence[str], round_number: int) -> list[str]:
    """Everybody is first equally often."""
    turn = round_number % len(names)
    return [*names[turn:], *names[:turn]]


@dataclass(frozen=True)
class Conduct:
    """How the processes keep together."""

    line_up: Callable[[], None] = lambda: None  # wait until all of them are here
    finish: Callable[[], None] = lambda: None  # wait until the device has done what it was asked to
    report: Callable[[str], None] = lambda text: None


def time_rounds(
    names: Sequence[str], ours: Mapping[str, Callable[[], None]], plan: Plan, conduct: Conduct
) -> dict[str, list[float]]:
    """Milliseconds per step of each arm that is ours, one figure a round; in the turns of the others we rest.

    The arms come warm: they have made `plan.warmup` steps.
    """
    times: dict[str, list[float]] = {name: [] for name in ours}
    for round_number in range(plan.rounds):
        conduct.report(f"round {round_number + 1} of {plan.rounds}")
        for name in order_of(names, round_number):
            conduct.line_up()
            if name in ours:
                conduct.finish()
                started = time.perf_counter()
                for _ in range(plan.steps):
                    ours[name]()
                conduct.finish()
                times[name].append(1e3 * (time.perf_counter() - started) / plan.steps)
    return times


def slowest(workers: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """A round takes as long as its slowest worker. Each arm is timed by its own workers."""
    names = dict.fromkeys(name for worker in workers for name in worker)
    return {
        name: [max(times) for times in zip(*(w[name] for w in workers if name in w), strict=True)] for name in names
    }


@dataclass(frozen=True)
class Estimate:
    """A median, and the interval that holds the true one in at least 95 of 100 runs (under 6 values: their range)."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The interval between two order statistics: it assumes nothing about how the values are spread."""
    ranked = sorted(values)
    size, cut, outside = len(ranked), 0, 0.0
    while (outside := outside + 2 * comb(size, cut) / 2**size) <= 0.05:
        cut += 1  # the `cut` smallest and the `cut` largest may be left out
    cut = max(cut, 1)
    return Estimate(statistics.median(ranked), ranked[cut - 1], ranked[size - cut])


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    return estimate([value / other for value, other in zip(values, reference, strict=True)])


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    return estimate([value - other for value, other in zip(values, reference, strict=True)])
