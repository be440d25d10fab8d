"""Who worked together, and when: a run is a row of eras, each with the same workers from begin to end. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lockstep.report.trace_reader import Closeup, Process, Stay, Trace, Window


@dataclass(frozen=True)
class Member:
    process: Process
    stay: Stay

    @property
    def worker(self) -> str:
        return self.process.head.worker


@dataclass(frozen=True)
class Era:
    """One generation of workers of one launch. Its ranks mean somebody only here."""

    launch: int
    generation: int
    size: int
    members: Mapping[int, Member]  # by rank; those that are known

    @property
    def begin_s(self) -> float:
        return min(member.stay.world.begin_s for member in self.members.values())

    @property
    def narrator(self) -> Member:
        """What is the same for all workers (loss, samples, ...) is told by the one that saw most of it."""
        return max(
            self.members.values(),
            key=lambda member: (sum(one.count for one in member.stay.windows), -member.stay.world.rank),
        )

    def name_of(self, rank: int) -> str:
        return self.members[rank].worker if rank in self.members else f"rank {rank}, which left no trace"


def find_eras(trace: Trace) -> list[Era]:
    """In the order of time. Eras in which nothing was measured are left out, unless there are no others."""
    found: dict[tuple[int, int, int], dict[int, Member]] = defaultdict(dict)
    for launch, processes in enumerate(find_launches(trace)):
        for process in processes:
            for stay in process.stays:
                world = stay.world
                found[launch, world.generation, world.size][world.rank] = Member(process, stay)
    eras = [Era(*key, members) for key, members in found.items()]
    eras.sort(key=lambda era: (era.launch, era.begin_s))
    measured = [era for era in eras if any(m.stay.windows or m.stay.closeups for m in era.members.values())]
    return measured or eras


def find_launches(trace: Trace) -> list[list[Process]]:
    """Processes whose lives overlap, one after the other, are of one launch: generations are counted anew in each."""
    launches: list[list[Process]] = []
    end_s = float("-inf")
    for process in trace.processes:
        if process.head.begin_s > end_s:
            launches.append([])
        launches[-1].append(process)
        end_s = max(end_s, process.last_s)
    return launches


def tell_windows(eras: list[Era]) -> list[Window]:
    """The windows of the run, each step once: what was computed again after a restart replaces what was there."""
    told: list[Window] = []
    for era in eras:
        for window in era.narrator.stay.windows:
            while told and told[-1].first >= window.first:
                told.pop()
            told.append(window)
    return told


@dataclass(frozen=True)
class Scene:
    """Steps in a row that were looked at closely, with everybody who took part."""

    era: Era
    steps: Mapping[int, Mapping[int, Closeup]]  # step -> rank -> what it did

    @property
    def spans(self) -> int:
        return sum(len(one.spans) for step in self.steps.values() for one in step.values())

    @property
    def begin_s(self) -> float:
        return min(one.begin_s for step in self.steps.values() for one in step.values())


def choose_scene(scenes: Sequence[Scene]) -> int:
    """Returns the number of the scene to show first: the last one with as many workers as there ever were at a time."""
    return max(range(len(scenes)), key=lambda number: (scenes[number].era.size, number), default=0)


def find_scenes(eras: list[Era]) -> list[Scene]:
    return [Scene(era, steps) for era in eras for steps in _runs_of_steps(align_hosts(era, _closeups(era)))]


def align_hosts(era: Era, seen: Mapping[int, Mapping[int, Closeup]]) -> dict[int, dict[int, Closeup]]:
    """Wall clocks of hosts may differ by more than a step takes. The waits of a step end at the same moment everywhere,
    when all sums are there: every host is moved by the median of what it is off by then."""
    ends: dict[tuple[int, str], float] = {}  # step, host
    for step, by_rank in seen.items():
        for rank, closeup in by_rank.items():
            waits = [span.start_us + span.took_us for span in closeup.spans if span.name == "wait"]
            if waits:
                ends.setdefault((step, era.members[rank].process.head.host), closeup.begin_s + max(waits) / 1e6)
    hosts = list(dict.fromkeys(host for _, host in ends))
    first = hosts[0] if hosts else ""
    shifts = {}
    for host in hosts[1:]:
        off = [ends[step, first] - ends[step, host] for step in seen if (step, first) in ends and (step, host) in ends]
        shifts[host] = median(off) if off else 0.0

    def moved(rank: int, closeup: Closeup) -> Closeup:
        return replace(closeup, begin_s=closeup.begin_s + shifts.get(era.members[rank].process.head.host, 0.0))

    return {step: {rank: moved(rank, one) for rank, one in by_rank.items()} for step, by_rank in seen.items()}


def _closeups(era: Era) -> dict[int, dict[int, Closeup]]:
    seen: dict[int, dict[int, Closeup]] = defaultdict(dict)
    for rank, member in sorted(era.members.items()):
        for closeup in member.stay.closeups:
            if closeup.spans:
                seen[closeup.step][rank] = closeup
    return seen


def _runs_of_steps(seen: Mapping[int, Mapping[int, Closeup]]) -> Iterator[Mapping[int, Mapping[int, Closeup]]]:
    row: dict[int, Mapping[int, Closeup]] = {}
    for step in sorted(seen):
        if row and step != max(row) + 1:
            yield row
            row = {}
        row[step] = seen[step]
    if row:
        yield row
