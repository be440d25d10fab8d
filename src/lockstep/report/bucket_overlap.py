"""Measures how much of each bucket's communication was hidden behind computation. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Final

from lockstep.report.generations import TimelineExcerpt, choose_excerpt
from lockstep.report.trace_reader import DetailedStep, TraceSpan

WARM_UP: Final = 2  # first steps that are skipped as not typical, if there are more than twice as many


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
        for number, (exposed_us, hidden_us) in split_buckets(last_to_arrive(step)).items():
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


def last_to_arrive(step: Mapping[int, DetailedStep]) -> DetailedStep:
    return min(step.values(), key=waited_us)


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
