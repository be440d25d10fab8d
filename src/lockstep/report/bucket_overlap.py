"""Of every bucket's communication: what was hidden behind computation, and what was not. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Final

from lockstep.report.generations import Scene, choose_scene
from lockstep.report.trace_reader import Closeup, Span

WARM_UP: Final = 2  # steps in the beginning that say nothing of the others, if there are others


@dataclass(frozen=True)
class Bucket:
    number: int
    bytes: int
    parameters: str
    hidden_s: float  # per step
    exposed_s: float


def measure_buckets(scenes: list[Scene]) -> list[Bucket]:
    """Of the last era with the most workers; another number of workers has other times. In every step the worker is
    taken that waited least: it came last, so what it waited for was communication, and not another worker."""
    if not scenes:
        return []
    era = scenes[choose_scene(scenes)].era
    steps = [step for scene in scenes if scene.era is era for _, step in sorted(scene.steps.items())]
    steps = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
    exposed: dict[int, list[float]] = defaultdict(list)
    hidden: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        for number, (exposed_us, hidden_us) in split_buckets(came_last(step)).items():
            exposed[number].append(exposed_us)
            hidden[number].append(hidden_us)
    world = era.narrator.stay.world
    return [
        Bucket(
            number=number,
            bytes=world.bucket_bytes[number] if number < len(world.bucket_bytes) else 0,
            parameters=world.bucket_names[number] if number < len(world.bucket_names) else "",
            hidden_s=mean(hidden[number]) / 1e6,
            exposed_s=mean(exposed[number]) / 1e6,
        )
        for number in sorted(exposed)
    ]


def came_last(step: Mapping[int, Closeup]) -> Closeup:
    return min(step.values(), key=waited_us)


def waited_us(closeup: Closeup) -> float:
    return sum(span.took_us for span in closeup.spans if span.name == "wait")


def split_buckets(closeup: Closeup) -> dict[int, tuple[float, float]]:
    """bucket -> microseconds exposed, hidden. What overlaps a wait is exposed."""
    waits = [span for span in closeup.spans if span.name == "wait"]
    found: dict[int, tuple[float, float]] = {}
    for span in closeup.spans:
        name, _, number = span.name.partition(" ")
        if span.track == "comm" and name == "bucket" and number.isascii() and number.isdigit() and len(number) < 7:
            exposed_us = min(span.took_us, sum(_overlap_us(span, wait) for wait in waits))
            before = found.get(int(number), (0.0, 0.0))  # a bucket may travel in parts
            found[int(number)] = (before[0] + exposed_us, before[1] + span.took_us - exposed_us)
    return found


def _overlap_us(one: Span, other: Span) -> float:
    end = min(one.start_us + one.took_us, other.start_us + other.took_us)
    return max(0.0, end - max(one.start_us, other.start_us))
