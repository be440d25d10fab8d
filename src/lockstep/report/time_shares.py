"""Measures what the workers spent their time on, which workers they waited for, and what cost the most time. Pure.

The cost of a cause is the share of a step's time that would be saved without it. The costliest is the headline of a
report: a sentence, and what to do about it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.report.generations import Member, TraceGeneration
from lockstep.report.trace_reader import PHASES, TraceEvent, TraceWindow

OTHER: Final = "other"  # time of a window outside its phases; zero if the trace is sound
COMPUTE: Final = ("forward", "backward", "update")
REASONS: Final[Mapping[str, tuple[str, ...]]] = {"data": ("data",), "compute": COMPUTE, "between": ("between",)}
MIN_COST: Final = 0.05  # causes that cost less are not reported
_SLOWER: Final = {
    "compute": "which computes slower than the others",
    "data": "which gets its data later than the others",
    "between": "whose program does more between two steps than that of the others",
    "": "which came last more often than the others, though it is not slower on average",
}
_LATE_ADVICE: Final = {
    "compute": "Look on {host} for other programs on its cores or its GPU, for fewer threads or a lower clock than the "
    "others have, and for samples that cost more than others.",
    "data": "Look on {host} for a slower disk or busy cores; give its loader more processes (`num_workers=`) or more "
    "batches ahead (`prefetch_factor=`).",
    "between": "Look for what only this worker does between two steps: logging, writing files, evaluating. "
    "Do it less often, or in a thread of its own.",
    "": "Look at its steps in the timeline: single long ones, rather than all of them, make it late.",
}


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
        for member, rank, waited_s in _waits(generation):
            seconds[member.worker, generation.name_of(rank)] += waited_s
    waits = [WaitTime(*pair, waited_s) for pair, waited_s in seconds.items()]
    return sorted(waits, key=lambda wait: (-wait.seconds, wait.waiter, wait.waited_for))


def find_late(generations: list[TraceGeneration], waits: list[WaitTime]) -> list[LateWorker]:
    """Returns the workers that others waited for, the longest wait first."""
    total_s = sum(wait.seconds for wait in waits)
    found = []
    by_worker: dict[str, list[_UsageInGeneration]] = defaultdict(list)
    for generation in generations:
        waited_s: dict[int, float] = defaultdict(float)
        for _, rank, seconds in _waits(generation):
            waited_s[rank] += seconds
        usages = {rank: _usage(member, list(member.record.windows)) for rank, member in generation.members.items()}
        for rank, usage in usages.items():
            others = [other for number, other in usages.items() if number != rank]
            by_worker[usage.worker].append(_UsageInGeneration(rank, usage, others, waited_s[rank]))
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


def _waits(generation: TraceGeneration) -> Iterator[tuple[Member, int, float]]:
    """Yields which member waited for which rank, and how many seconds."""
    for member in generation.members.values():
        for window in member.record.windows:
            for rank, waited_s in window.waited_for.items():
                yield member, rank, waited_s


# ---- causes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowdownCause:
    kind: str  # worker, turns, data, communication, between, recovery, or none
    cost: float
    sentence: str
    advice: str


@dataclass(frozen=True)
class RunMeasurements:
    usages: list[TimeUsage]
    total: TimeUsage
    late: list[LateWorker]
    events: Mapping[str, list[TraceEvent]]  # by worker
    elapsed_s: float
    size: int  # largest number of workers at a time
    hosts: int = 1


def find_causes(measured: RunMeasurements) -> list[SlowdownCause]:
    """Returns the causes, costliest first; a single one of kind `none` if none is worth reporting."""
    if not measured.total.steps:
        advice = "Workers write what they measured after half a second of training."
        return [SlowdownCause("none", 0.0, "No step was measured yet.", advice)]
    found = [*_waiting(measured), *_phases(measured), *_recovery(measured)]
    worth = sorted((one for one in found if one.cost >= MIN_COST), key=lambda cause: -cause.cost)
    computing = measured.total.share(*COMPUTE)
    sentence = f"Nothing holds this run up: its workers compute {percent(computing)} of the time."
    advice = "To be faster, the computation itself has to be: precision, kernels, more or faster devices."
    return worth or [SlowdownCause("none", 0.0, sentence, advice)]


def _waiting(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    """Yields that workers wait for one that is late, or for each other in turns."""
    if not measured.late:
        return
    worst = measured.late[0]
    # By chance alone each worker is last in 1 / size of all waiting time.
    if worst.part >= min(0.75, max(0.3, 1.5 / measured.size)):
        reason, detail = worst.reason, ""
        if reason:
            detail = f": {ms(worst.own_s[reason])} per step against {ms(worst.typical_s[reason])}"
        others = "The other worker" if measured.size == 2 else "The other workers"
        sentence = f"{others} waited {percent(worst.share)} of the time for {worst.worker}, {_SLOWER[reason]}{detail}."
        own_s = sum(one.seconds for one in measured.usages if one.worker == worst.worker)
        # The worker may have been present for a part of the run only; the others also trained without it.
        cost = worst.seconds / max(measured.total.seconds - own_s, worst.seconds)
        yield SlowdownCause("worker", cost, sentence, _LATE_ADVICE[reason].format(host=worst.host or "its host"))
        return
    share = measured.total.share("waiting")
    sentence = (
        f"Workers waited {percent(share)} of the time for each other, in turns: no single one is slower, but the time "
        "of a step varies on all of them."
    )
    advice = "Samples of similar cost in every shard help, and so do cores that are not shared with other programs."
    yield SlowdownCause("turns", share, sentence, advice)


def _phases(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    """Yields what the phases data, exposed and between cost on all workers."""
    step_s = measured.total.per_step_s()
    # If only one worker waits for its data, it is reported as late instead: hence the median.
    share = median(one.share("data") for one in measured.usages)
    sentence = (
        f"Workers waited {percent(share)} of the time for the loader: {ms(share * step_s)} of a step of {ms(step_s)}."
    )
    advice = (
        "Give it more processes (`num_workers=`) or more batches ahead (`prefetch_factor=`), or make a sample cheaper "
        "to load."
    )
    yield SlowdownCause("data", share, sentence, advice)
    share = measured.total.share("exposed")
    sentence = (
        f"Communication that is not hidden behind the backward pass took {percent(share)} of the time: "
        f"{ms(share * step_s)} of a step of {ms(step_s)}."
    )
    advice = "A larger batch per worker hides more of it, and fewer workers have less of it."
    if measured.hosts > 1:
        advice += " So does a faster network between the hosts, or more of the workers on one host."
    yield SlowdownCause("communication", share, sentence, advice)
    share = median(one.share("between") for one in measured.usages)
    busy = [one for one in measured.usages if one.phases["between"]]
    of_it = max((_took_s(measured, one.worker, "evaluate") / one.phases["between"] for one in busy), default=0.0)
    detail = f", {percent(min(1.0, of_it))} of that in evaluation" if of_it > 0.1 else ""
    sentence = f"The program itself took {percent(share)} of the time between two steps{detail}."
    advice = "Do less there, or less often: logging, evaluating, saving, moving figures from the device (`.item()`)."
    yield SlowdownCause("between", share, sentence, advice)


def _recovery(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    took_s = max(_took_s(measured, one.worker, "recovery") for one in measured.usages)
    if took_s and measured.elapsed_s:
        share = min(1.0, took_s / measured.elapsed_s)
        sentence = f"Recoveries took {percent(share)} of the time: {took_s:.1f} s in all."
        advice = "The events of the report say when; the logs of the workers that were lost say why."
        yield SlowdownCause("recovery", share, sentence, advice)


def _took_s(measured: RunMeasurements, worker: str, what: str) -> float:
    return sum(event.took_s or 0.0 for event in measured.events.get(worker, ()) if event.what == what)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    """Formats a time with three significant digits in a suitable unit."""
    if seconds >= 0.9995:  # which three digits round to 1
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
    if seconds >= 0.9995e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"
