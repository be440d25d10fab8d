"""Interleaved rounds, their statistics, and how a benchmark shows its results.

NOTE [paired rounds]. The speed of a machine drifts from minute to minute, so two arms that are measured one after the
other differ for reasons unrelated to them. Here every arm runs in every round, in an order that changes, and arms are
compared round by round: first the ratio within each round, then the median of the ratios.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RoundPlan:
    warmup: int  # steps of each arm before the first round, in which buckets are rebuilt and memory is allocated
    rounds: int
    steps: int  # steps of each arm in a round


@dataclass(frozen=True)
class RoundSync:
    """Hooks by which the processes of a benchmark stay in step."""

    barrier: Callable[[], object] = lambda: None  # wait for all processes
    finish: Callable[[], None] = lambda: None  # wait until the device has finished all queued work
    report: Callable[[str], None] = lambda text: None


def rotated_order(names: Sequence[str], round_number: int) -> list[str]:
    """The names in their order and in the reverse, by turns, and rotated by one place after both.

    So each is first equally often, and of each pair equally often one and the other comes before.
    """
    turn = round_number // 2 % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if round_number % 2 else order


def interleave(
    names: Sequence[str], own_turns: Mapping[str, Callable[[], T]], rounds: int, sync: RoundSync
) -> dict[str, list[T]]:
    """What each turn of this process returned, one value per round; it sleeps in the turns of other processes."""
    values: dict[str, list[T]] = {name: [] for name in own_turns}
    for round_number in range(rounds):
        sync.report(f"round {round_number + 1} of {rounds}")
        for name in rotated_order(names, round_number):
            sync.barrier()
            if name in own_turns:
                values[name].append(own_turns[name]())
    return values


def time_calls(call: Callable[[], object], calls: int, finish: Callable[[], None] = lambda: None) -> float:
    """Milliseconds per call. `finish` waits until all of them are complete."""
    finish()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    finish()
    return 1e3 * (time.perf_counter() - started) / calls


def time_chain(call: Callable[[], object], calls: int, finish: Callable[[], None]) -> float:
    """Milliseconds per call, where each call completes what the one before it has left: the first one is not timed."""
    finish()
    call()
    took_ms = time_calls(call, calls)
    finish()
    return took_ms


def time_rounds(
    names: Sequence[str],
    own_steps: Mapping[str, Callable[[], None]],
    plan: RoundPlan,
    sync: RoundSync,
    *,
    are_chained: bool = False,
) -> dict[str, list[float]]:
    """Milliseconds per step of each arm of this process, one value per round.

    The caller has made the `plan.warmup` steps of each arm already. `are_chained`: see `time_chain`.
    """
    time_steps = time_chain if are_chained else time_calls
    turns = {name: partial(time_steps, step, plan.steps, sync.finish) for name, step in own_steps.items()}
    return interleave(names, turns, plan.rounds, sync)


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
        return self.text(digits=3)

    def text(self, *, digits: int) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


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


def show(head: str, table: str, legend: Sequence[str], record: Mapping[str, Any], json_path: Path | None) -> None:
    """Print the results of a benchmark, and write them with all times to `json_path`, if there is one."""
    print(f"{head}\n\n{table}\n\n" + "\n".join(legend))
    if json_path:
        json_path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
