"""Who worked together, and when: a run is a row of eras, each with the same workers from begin to end. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.measure.timeline import Closeup, Process, Stay, Trace, Window


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
        return self.members[rank].worker if rank in self.members else f"rank{rank}"


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


def find_scenes(eras: list[Era]) -> list[Scene]:
    return [Scene(era, steps) for era in eras for steps in _runs_of_steps(era)]


def _runs_of_steps(era: Era) -> Iterator[Mapping[int, Mapping[int, Closeup]]]:
    seen: dict[int, dict[int, Closeup]] = defaultdict(dict)
    for rank, member in sorted(era.members.items()):
        for closeup in member.stay.closeups:
            if closeup.spans:
                seen[closeup.step][rank] = closeup
    row: dict[int, Mapping[int, Closeup]] = {}
    for step in sorted(seen):
        if row and step != max(row) + 1:
            yield row
            row = {}
        row[step] = seen[step]
    if row:
        yield row
