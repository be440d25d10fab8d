"""Measures what the workers spent their time on, and which workers they waited for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.report.generations import Member, TraceGeneration
from lockstep.report.trace_reader import PHASES, TraceWindow

OTHER: Final = "other"  # time of a window outside its phases; zero if the trace is sound
COMPUTE: Final = ("forward", "backward", "update")
REASONS: Final[Mapping[str, tuple[str, ...]]] = {"data": ("data",), "compute": COMPUTE, "between": ("between",)}


@dataclass(frozen=True)
class TimeUsage:
    """How one worker, or all of them, spent the time of their steps. The phases add up to `seconds`."""

    worker: str
    rank: int | None
    host: str
    device: str
    steps: int
    seconds: float
    phases: Mapping[str, float]
    first: int = 0  # first and last step; 0 if none was measured
    last: int = 0

    def share(self, *names: str) -> float:
        return sum(self.phases[name] for name in names) / self.seconds if self.seconds else 0.0

    def per_step_s(self, *names: str) -> float:
        return sum(self.phases[name] for name in names or self.phases) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class WaitTime:
    waiter: str
    waited_for: str
    seconds: float


@dataclass(frozen=True)
class LateWorker:
    """A worker that others waited for, and in what it is slower than their median."""

    worker: str
    rank: int
    host: str
    seconds: float  # that the others waited for it, summed
    share: float  # of the others' time
    part: float  # of the time spent waiting for any worker
    reason: str  # data, compute or between; empty if it is not slower in any of them
    own_s: Mapping[str, float]  # per step: data, compute, between
    typical_s: Mapping[str, float]


def measure_usage(generations: list[TraceGeneration]) -> list[TimeUsage]:
    """Returns one per worker, in order of ranks; workers of the same name count as one."""
    windows: dict[str, list[TraceWindow]] = defaultdict(list)
    last: dict[str, Member] = {}
    for generation in generations:
        for member in generation.members.values():
            windows[member.worker] += member.record.windows
            last[member.worker] = member
    order = sorted(last, key=lambda worker: (last[worker].record.world.rank, worker))
    return [_usage(last[worker], windows[worker]) for worker in order]


def add_up(usages: Iterable[TimeUsage]) -> TimeUsage:
    """Returns the sum over all workers, steps included."""
    several = list(usages)
    phases = {name: sum(one.phases[name] for one in several) for name in (*PHASES, OTHER)}
    steps, seconds = sum(one.steps for one in several), sum(one.seconds for one in several)
    firsts = [one.first for one in several if one.first]
    last = max((one.last for one in several), default=0)
    return TimeUsage("all workers", None, "", "", steps, seconds, phases, min(firsts, default=0), last)


def measure_waits(generations: list[TraceGeneration]) -> list[WaitTime]:
    """Returns the time that each worker waited for each other one, longest first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for generation in generations:
        for member in generation.members.values():
            for window in member.record.windows:
                for rank, waited_s in window.waited_for.items():
                    seconds[member.worker, generation.name_of(rank)] += waited_s
    waits = [WaitTime(*pair, waited_s) for pair, waited_s in seconds.items()]
    return sorted(waits, key=lambda wait: (-wait.seconds, wait.waiter, wait.waited_for))


def find_late(generations: list[TraceGeneration], waits: list[WaitTime]) -> list[LateWorker]:
    """Returns the workers that others waited for, the longest wait first."""
    total_s = sum(wait.seconds for wait in waits)
    found = []
    by_worker: dict[str, list[_UsageInGeneration]] = defaultdict(list)
    for generation in generations:
        waited_s = _waited_s(generation)
        usages = {rank: _usage(member, list(member.record.windows)) for rank, member in generation.members.items()}
        for rank, usage in usages.items():
            others = [other for number, other in usages.items() if number != rank]
            by_worker[usage.worker].append(_UsageInGeneration(rank, usage, others, waited_s.get(rank, 0.0)))
    for own_usages in by_worker.values():
        waited = sum(one.waited_s for one in own_usages)
        others_s = sum(other.seconds for one in own_usages for other in one.others)
        if waited and others_s:
            # Step times depend on the number of workers: compare in the generation with the longest wait.
            worst = max(own_usages, key=lambda one: one.waited_s)
            found.append(_late(worst, waited, share=waited / others_s, part=waited / total_s))
    return sorted(found, key=lambda late: (-late.seconds, late.worker))


@dataclass(frozen=True)
class _UsageInGeneration:
    """Time usage of a worker and the others in one generation."""

    rank: int
    own: TimeUsage
    others: list[TimeUsage]
    waited_s: float  # time that the others waited for this worker


def _late(one: _UsageInGeneration, seconds: float, *, share: float, part: float) -> LateWorker:
    own, others = one.own, one.others
    own_s = {reason: own.per_step_s(*names) for reason, names in REASONS.items()}
    typical_s = {reason: median(one.per_step_s(*names) for one in others) for reason, names in REASONS.items()}
    excess = {reason: own_s[reason] - typical_s[reason] for reason in REASONS}
    reason = max(excess, key=lambda one: excess[one])
    reason = reason if excess[reason] > 0.02 * own.per_step_s() else ""
    return LateWorker(own.worker, one.rank, own.host, seconds, share, part, reason, own_s, typical_s)


def _usage(member: Member, windows: list[TraceWindow]) -> TimeUsage:
    phases = {name: sum(window.phases[name] for window in windows) for name in PHASES}
    left_s = sum(max(0.0, window.took_s - sum(window.phases.values())) for window in windows)
    phases[OTHER] = left_s if left_s > 0.001 * sum(phases.values()) else 0.0
    head, steps = member.process.head, sum(window.count for window in windows)
    return TimeUsage(
        member.worker,
        member.record.world.rank,
        head.host,
        head.device,
        steps,
        sum(phases.values()),
        phases,
        first=min((window.first for window in windows), default=0),
        last=max((window.last for window in windows), default=0),
    )


def _waited_s(generation: TraceGeneration) -> dict[int, float]:
    seconds: dict[int, float] = defaultdict(float)
    for member in generation.members.values():
        for window in member.record.windows:
            for rank, waited_s in window.waited_for.items():
                seconds[rank] += waited_s
    return seconds
