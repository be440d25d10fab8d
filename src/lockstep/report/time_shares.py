"""Where the time of the workers went, and whom they waited for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.report.generations import Era, Member
from lockstep.report.trace_reader import PHASES, Window

OTHER: Final = "other"  # of a window's time, what its phases leave open: nothing, if the trace is sound
COMPUTE: Final = ("forward", "backward", "update")
REASONS: Final[Mapping[str, tuple[str, ...]]] = {"data": ("data",), "compute": COMPUTE, "between": ("between",)}


@dataclass(frozen=True)
class Usage:
    """How one worker, or all of them, spent the time of their steps. The phases add up to `seconds`."""

    worker: str
    rank: int | None
    host: str
    device: str
    steps: int
    seconds: float
    phases: Mapping[str, float]
    first: int = 0  # its first step and its last one; 0: none was measured
    last: int = 0

    def share(self, *names: str) -> float:
        return sum(self.phases[name] for name in names) / self.seconds if self.seconds else 0.0

    def per_step_s(self, *names: str) -> float:
        return sum(self.phases[name] for name in names or self.phases) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Wait:
    waiter: str
    waited_for: str
    seconds: float


@dataclass(frozen=True)
class Late:
    """A worker that others waited for, and what it is slower in than the median of them."""

    worker: str
    rank: int
    host: str
    seconds: float  # of all the others together
    share: float  # of their time
    part: float  # of everything that was ever waited for somebody
    reason: str  # data, compute or between; empty: not slower in any of them
    own_s: Mapping[str, float]  # per step: data, compute, between
    typical_s: Mapping[str, float]


def measure_usage(eras: list[Era]) -> list[Usage]:
    """One per worker, in the order of ranks; a worker that was replaced under the same name is one."""
    windows: dict[str, list[Window]] = defaultdict(list)
    last: dict[str, Member] = {}
    for era in eras:
        for member in era.members.values():
            windows[member.worker] += member.stay.windows
            last[member.worker] = member
    order = sorted(last, key=lambda worker: (last[worker].stay.world.rank, worker))
    return [_usage(last[worker], windows[worker]) for worker in order]


def add_up(usages: Iterable[Usage]) -> Usage:
    """All workers as one; its steps are those of all of them together."""
    several = list(usages)
    phases = {name: sum(one.phases[name] for one in several) for name in (*PHASES, OTHER)}
    steps, seconds = sum(one.steps for one in several), sum(one.seconds for one in several)
    firsts = [one.first for one in several if one.first]
    last = max((one.last for one in several), default=0)
    return Usage("all workers", None, "", "", steps, seconds, phases, min(firsts, default=0), last)


def measure_waits(eras: list[Era]) -> list[Wait]:
    """The longest first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for era in eras:
        for member in era.members.values():
            for window in member.stay.windows:
                for rank, waited_s in window.waited_for.items():
                    seconds[member.worker, era.name_of(rank)] += waited_s
    waits = [Wait(*pair, waited_s) for pair, waited_s in seconds.items()]
    return sorted(waits, key=lambda wait: (-wait.seconds, wait.waiter, wait.waited_for))


def find_late(eras: list[Era], waits: list[Wait]) -> list[Late]:
    """Whom the others waited for, the longest first."""
    total_s = sum(wait.seconds for wait in waits)
    found = []
    places: dict[str, list[_Place]] = defaultdict(list)
    for era in eras:
        waited_s = _waited_s(era)
        usages = {rank: _usage(member, list(member.stay.windows)) for rank, member in era.members.items()}
        for rank, usage in usages.items():
            others = [other for number, other in usages.items() if number != rank]
            places[usage.worker].append(_Place(rank, usage, others, waited_s.get(rank, 0.0)))
    for own_places in places.values():
        waited = sum(place.waited_s for place in own_places)
        others_s = sum(other.seconds for place in own_places for other in place.others)
        if waited and others_s:
            # A step costs a worker more or less among more or fewer: compare where it was waited for longest.
            worst = max(own_places, key=lambda place: place.waited_s)
            found.append(_late(worst, waited, share=waited / others_s, part=waited / total_s))
    return sorted(found, key=lambda late: (-late.seconds, late.worker))


@dataclass(frozen=True)
class _Place:
    """A worker in an era."""

    rank: int
    own: Usage
    others: list[Usage]
    waited_s: float  # by the others, for this one


def _late(place: _Place, seconds: float, *, share: float, part: float) -> Late:
    own, others = place.own, place.others
    own_s = {reason: own.per_step_s(*names) for reason, names in REASONS.items()}
    typical_s = {reason: median(one.per_step_s(*names) for one in others) for reason, names in REASONS.items()}
    excess = {reason: own_s[reason] - typical_s[reason] for reason in REASONS}
    reason = max(excess, key=lambda one: excess[one])
    reason = reason if excess[reason] > 0.02 * own.per_step_s() else ""
    return Late(own.worker, place.rank, own.host, seconds, share, part, reason, own_s, typical_s)


def _usage(member: Member, windows: list[Window]) -> Usage:
    phases = {name: sum(window.phases[name] for window in windows) for name in PHASES}
    left_s = sum(max(0.0, window.took_s - sum(window.phases.values())) for window in windows)
    phases[OTHER] = left_s if left_s > 0.001 * sum(phases.values()) else 0.0
    head, steps = member.process.head, sum(window.count for window in windows)
    return Usage(
        member.worker,
        member.stay.world.rank,
        head.host,
        head.device,
        steps,
        sum(phases.values()),
        phases,
        first=min((window.first for window in windows), default=0),
        last=max((window.last for window in windows), default=0),
    )


def _waited_s(era: Era) -> dict[int, float]:
    seconds: dict[int, float] = defaultdict(float)
    for member in era.members.values():
        for window in member.stay.windows:
            for rank, waited_s in window.waited_for.items():
                seconds[rank] += waited_s
    return seconds
