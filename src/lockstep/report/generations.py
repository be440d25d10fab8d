"""Splits a trace into generations, each with a fixed set of workers, and finds the steps to show in detail. Pure.

In these steps, it measures how much of each bucket's communication was hidden behind computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Final

from lockstep.report.trace_reader import DetailedStep, GenerationRecord, Trace, TraceProcess, TraceSpan, TraceWindow

WARM_UP: Final = 2  # first steps that are skipped as not typical, if there are more than twice as many


@dataclass(frozen=True)
class Member:
    """A worker process and its record in one generation."""

    process: TraceProcess
    record: GenerationRecord

    @property
    def worker(self) -> str:
        return self.process.head.worker


@dataclass(frozen=True)
class TraceGeneration:
    """One generation of workers of one launch. A rank denotes the same worker only within it."""

    launch: int
    number: int
    size: int
    members: Mapping[int, Member]  # by rank; ranks without a trace are missing

    @property
    def begin_s(self) -> float:
        return min(member.record.world.begin_s for member in self.members.values())

    @property
    def reference_member(self) -> Member:
        """The member with the most recorded steps: values equal on all workers (loss, samples) are read from it."""
        return max(
            self.members.values(),
            key=lambda member: (sum(one.count for one in member.record.windows), -member.record.world.rank),
        )

    def name_of(self, rank: int) -> str:
        return self.members[rank].worker if rank in self.members else f"rank {rank}, which left no trace"


def find_generations(trace: Trace) -> list[TraceGeneration]:
    """Returns the generations in order of time, without those that measured nothing, unless there are no others."""
    found: dict[tuple[int, int, int], dict[int, Member]] = defaultdict(dict)
    for launch, processes in enumerate(find_launches(trace)):
        for process in processes:
            for record in process.records:
                world = record.world
                found[launch, world.generation, world.size][world.rank] = Member(process, record)
    generations = [TraceGeneration(*key, members) for key, members in found.items()]
    generations.sort(key=lambda generation: (generation.launch, generation.begin_s))
    measured = [
        generation
        for generation in generations
        if any(m.record.windows or m.record.detailed_steps for m in generation.members.values())
    ]
    return measured or generations


def find_launches(trace: Trace) -> list[list[TraceProcess]]:
    """Groups processes by launch: those that overlap in time. Generation numbers start again in each launch."""
    launches: list[list[TraceProcess]] = []
    end_s = float("-inf")
    for process in trace.processes:
        if process.head.begin_s > end_s:
            launches.append([])
        launches[-1].append(process)
        end_s = max(end_s, process.last_s)
    return launches


def merge_windows(generations: list[TraceGeneration]) -> list[TraceWindow]:
    """Returns the windows of the run with each step once: steps repeated after a restart replace the earlier ones."""
    merged: list[TraceWindow] = []
    for generation in generations:
        for window in generation.reference_member.record.windows:
            while merged and merged[-1].first >= window.first:
                merged.pop()
            merged.append(window)
    return merged


# ---- steps in detail -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimelineExcerpt:
    """Consecutive detailed steps of one generation, with all workers that recorded them."""

    generation: TraceGeneration
    steps: Mapping[int, Mapping[int, DetailedStep]]  # step -> rank -> spans

    @property
    def spans(self) -> int:
        return sum(len(one.spans) for step in self.steps.values() for one in step.values())

    @property
    def begin_s(self) -> float:
        return min(one.begin_s for step in self.steps.values() for one in step.values())


def choose_excerpt(excerpts: Sequence[TimelineExcerpt]) -> int:
    """Returns the index of the excerpt to show first: the last one with the largest number of workers."""
    return max(range(len(excerpts)), key=lambda number: (excerpts[number].generation.size, number), default=0)


def find_excerpts(generations: list[TraceGeneration]) -> list[TimelineExcerpt]:
    return [
        TimelineExcerpt(generation, steps)
        for generation in generations
        for steps in _consecutive_steps(align_hosts(generation, _detailed_steps(generation)))
    ]


def align_hosts(
    generation: TraceGeneration, seen: Mapping[int, Mapping[int, DetailedStep]]
) -> dict[int, dict[int, DetailedStep]]:
    """Corrects for wall clocks of hosts, which may differ by more than a step takes.

    The waits of a step end at the same moment on all hosts, when all sums are complete: every host is shifted by the
    median of its difference at these moments.
    """
    ends: dict[tuple[int, str], float] = {}  # step, host
    for step, by_rank in seen.items():
        for rank, detailed in by_rank.items():
            waits = [span.start_us + span.took_us for span in detailed.spans if span.name == "wait"]
            if waits:
                ends.setdefault((step, generation.members[rank].process.head.host), detailed.begin_s + max(waits) / 1e6)
    hosts = list(dict.fromkeys(host for _, host in ends))
    first = hosts[0] if hosts else ""
    shifts = {}
    for host in hosts[1:]:
        off = [ends[step, first] - ends[step, host] for step in seen if (step, first) in ends and (step, host) in ends]
        shifts[host] = median(off) if off else 0.0

    def shifted(rank: int, detailed: DetailedStep) -> DetailedStep:
        return replace(detailed, begin_s=detailed.begin_s + shifts.get(generation.members[rank].process.head.host, 0.0))

    return {step: {rank: shifted(rank, one) for rank, one in by_rank.items()} for step, by_rank in seen.items()}


def _detailed_steps(generation: TraceGeneration) -> dict[int, dict[int, DetailedStep]]:
    seen: dict[int, dict[int, DetailedStep]] = defaultdict(dict)
    for rank, member in sorted(generation.members.items()):
        for detailed in member.record.detailed_steps:
            if detailed.spans:
                seen[detailed.step][rank] = detailed
    return seen


def _consecutive_steps(
    seen: Mapping[int, Mapping[int, DetailedStep]],
) -> Iterator[Mapping[int, Mapping[int, DetailedStep]]]:
    row: dict[int, Mapping[int, DetailedStep]] = {}
    for step in sorted(seen):
        if row and step != max(row) + 1:
            yield row
            row = {}
        row[step] = seen[step]
    if row:
        yield row


# ---- buckets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketTimes:
    """Communication time of one bucket per step."""

    number: int
    bytes: int
    parameters: str
    hidden_s: float
    exposed_s: float


def measure_buckets(excerpts: list[TimelineExcerpt]) -> list[BucketTimes]:
    """Returns the times of each bucket in the last generation with the most workers; times depend on their number.

    In every step the worker that waited least is measured: it arrived last, so it waited for communication only, and
    not for another worker.
    """
    if not excerpts:
        return []
    generation = excerpts[choose_excerpt(excerpts)].generation
    steps = [
        step for excerpt in excerpts if excerpt.generation is generation for _, step in sorted(excerpt.steps.items())
    ]
    steps = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
    exposed: dict[int, list[float]] = defaultdict(list)
    hidden: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        for number, (exposed_us, hidden_us) in split_buckets(min(step.values(), key=waited_us)).items():
            exposed[number].append(exposed_us)
            hidden[number].append(hidden_us)
    world = generation.reference_member.record.world
    return [
        BucketTimes(
            number=number,
            bytes=world.bucket_bytes[number] if number < len(world.bucket_bytes) else 0,
            parameters=world.bucket_names[number] if number < len(world.bucket_names) else "",
            hidden_s=mean(hidden[number]) / 1e6,
            exposed_s=mean(exposed[number]) / 1e6,
        )
        for number in sorted(exposed)
    ]


def waited_us(detailed: DetailedStep) -> float:
    return sum(span.took_us for span in detailed.spans if span.name == "wait")


def split_buckets(detailed: DetailedStep) -> dict[int, tuple[float, float]]:
    """Returns bucket -> (exposed, hidden) in microseconds. Communication that overlaps a wait is exposed."""
    waits = [span for span in detailed.spans if span.name == "wait"]
    found: dict[int, tuple[float, float]] = {}
    for span in detailed.spans:
        name, _, number = span.name.partition(" ")
        if span.track == "comm" and name == "bucket" and number.isascii() and number.isdigit() and len(number) < 7:
            exposed_us = min(span.took_us, sum(_overlap_us(span, wait) for wait in waits))
            before = found.get(int(number), (0.0, 0.0))  # a bucket may be sent in parts
            found[int(number)] = (before[0] + exposed_us, before[1] + span.took_us - exposed_us)
    return found


def _overlap_us(one: TraceSpan, other: TraceSpan) -> float:
    end = min(one.start_us + one.took_us, other.start_us + other.took_us)
    return max(0.0, end - max(one.start_us, other.start_us))
