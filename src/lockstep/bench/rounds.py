"""Interleaved rounds, and their statistics.

NOTE [paired rounds]. The speed of a machine drifts from minute to minute, so two arms that are measured one after the
other differ for reasons unrelated to them. Here every arm runs in every round, in an order that rotates, and arms are
compared round by round: first the ratio within each round, then the median of the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class RoundPlan:
    warmup: int  # steps of each arm before the first round, in which buckets are rebuilt and memory is allocated
    rounds: int
    steps: int  # steps of each arm in a round


def rotated_order(names: Sequence[str], round_number: int) -> list[str]:
    """The names, rotated by one place each round, so that each is first equally often."""
    turn = round_number % len(names)
    return [*names[turn:], *names[:turn]]


@dataclass(frozen=True)
class RoundSync:
    """Hooks by which the processes of a benchmark stay in step."""

    barrier: Callable[[], None] = lambda: None  # wait for all processes
    finish: Callable[[], None] = lambda: None  # wait until the device has finished all queued work
    report: Callable[[str], None] = lambda text: None


def time_rounds(
    names: Sequence[str], own_steps: Mapping[str, Callable[[], None]], plan: RoundPlan, sync: RoundSync
) -> dict[str, list[float]]:
    """Milliseconds per step of each arm of this process, one value per round; it sleeps in the turns of other arms.

    The caller has made the `plan.warmup` steps of each arm already.
    """
    times: dict[str, list[float]] = {name: [] for name in own_steps}
    for round_number in range(plan.rounds):
        sync.report(f"round {round_number + 1} of {plan.rounds}")
        for name in rotated_order(names, round_number):
            sync.barrier()
            if name in own_steps:
                sync.finish()
                started = time.perf_counter()
                for _ in range(plan.steps):
                    own_steps[name]()
                sync.finish()
                times[name].append(1e3 * (time.perf_counter() - started) / plan.steps)
    return times


def slowest(workers: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Times of each arm: a round takes as long as its slowest worker. An arm is timed by its own workers only."""
    names = dict.fromkeys(name for worker in workers for name in worker)
    return {
        name: [max(times) for times in zip(*(w[name] for w in workers if name in w), strict=True)] for name in names
    }


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % confidence interval (for fewer than 6 values: their range)."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Median of `values`, with the interval between two order statistics, which assumes no distribution."""
    ranked = sorted(values)
    size, cut, outside = len(ranked), 0, 0.0
    while (outside := outside + 2 * comb(size, cut) / 2**size) <= 0.05:
        cut += 1  # the `cut` smallest and the `cut` largest may be left out
    cut = max(cut, 1)
    return Estimate(statistics.median(ranked), ranked[cut - 1], ranked[size - cut])


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    return estimate([value / base for value, base in zip(values, reference, strict=True)])


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    return estimate([value - base for value, base in zip(values, reference, strict=True)])
