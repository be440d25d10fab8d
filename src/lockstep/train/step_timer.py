"""Where the time of a step goes.

A step is a chain of laps: the time from one mark to the next belongs to what was done meanwhile, so all laps together
are the whole time. On a CPU a mark is a moment. On a GPU it is an event in the stream, because the host only says what
is to be done.

Note [Steps that are timed]
Marks cost some microseconds each, and what is made of them costs more: Python is slow to get going again after every
product of matrices. So not all steps are timed, but so many that they are APART_S from each other: of steps that last
longer all, of short ones a few. Everybody times the same ones, since they tell each other how long they took. Which
ones those are has no rhythm, for a program may have one, say with every eighth batch late. What may be so uneven that
a sample says little, waiting for data and all that is done between steps, is measured in every step.

Note [Who is waited for]
When its own backward pass is over, a worker waits until all sums have come: for the others, if they are not as far, and
then for what is left of the communication. An all-reduce makes slow and fast workers look alike. But whoever arrives
last waits least, and only for communication; so the shortest wait of all is that of communication (exposed), and what a
worker waits beyond it, it waits for the one with the shortest wait. No clocks are compared. Every worker tells the
others with its next step how long it has waited.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

PHASES: Final = ("data", "forward", "backward", "exposed", "waiting", "update", "between")
WAIT: Final = "wait"  # becomes exposed and waiting
AFTER: Final = "after"  # a step, until the next one begins
GPU_EVERY: Final = 8  # steps: events cost more than moments
APART_S: Final = 0.2
RAREST: Final = 1000  # steps from one that is timed to the next


@dataclass(frozen=True)
class Span:
    """A lap, or the way of a bucket: in seconds from the begin of the step."""

    name: str
    start_s: float
    took_s: float
    track: str = "main"


@dataclass
class StepTimes:
    """Of one step of this worker."""

    number: int
    began_s: float
    ended_s: float
    laps: dict[str, float]  # seconds by name; `wait` is not yet told apart
    spans: list[Span] = field(default_factory=list)
    exposed_s: float | None = None  # None: nobody has told us how long the others waited
    waited_for: int | None = None  # a rank

    @property
    def waited_s(self) -> float:
        return self.laps.get(WAIT, 0.0)

    @property
    def after_s(self) -> float:
        return self.laps.get(AFTER, 0.0)

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s - self.after_s

    def phases(self) -> dict[str, float]:
        """They add up to the whole time."""
        exposed_s = self.waited_s if self.exposed_s is None else self.exposed_s
        told = {"exposed": exposed_s, "waiting": self.waited_s - exposed_s}
        told["between"] = self.laps.get("between", 0.0) + self.after_s
        return {name: told.get(name, self.laps.get(name, 0.0)) for name in PHASES}

    def hear(self, waits_s: Sequence[float]) -> None:
        """How long each rank has waited. See Note [Who is waited for]."""
        self.exposed_s = min(min(waits_s), self.waited_s)
        last = min(range(len(waits_s)), key=waits_s.__getitem__)
        self.waited_for = last if self.waited_s > self.exposed_s else None


def next_looked_at(step: int) -> int:
    """The first one, from `step` on, whose every span is kept: so few that a month of them is little."""
    if step <= 6:
        return max(step, 1)  # not step 0, which is like no other
    scale = 10 ** (len(str(step)) - 1)
    return min(one for first in (1, 2, 5, 10) for one in range(first * scale, first * scale + 3) if one >= step)


def _scatter(number: int) -> int:
    """Below 2**32. Numbers that follow each other go anywhere."""
    number = (number + 1) * 0x9E3779B1 & 0xFFFFFFFF
    return (number ^ number >> 15) * 0x85EBCA77 & 0xFFFFFFFF


class _Mark(NamedTuple):  # made a dozen times in a step, so not a dataclass
    name: str
    shard: int
    at_s: float
    event: Any  # of a GPU, or None


class Stopwatch:
    """Of one worker: `cut` at the top of the loop, `lap` at the end of everything in it, `stop` at the end of the step.

    What these cost in a step that is not timed, every step costs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._travels: list[tuple[int, float, float]] = []
        self._number = -1
        self._underway: list[_Underway] = []  # steps of a GPU that may not have come to their last event
        self._pool: list[Any] = []
        self._looks_next = -1
        self._took_s: dict[int, float] = {}  # rank -> its last step that was timed
        self._at_s = time.monotonic()  # the last moment that every step looks at
        self._data_s = self._outside_s = 0.0  # of all steps
        self.is_timed = self.looks = False  # this step; closely
        self.set_pace({})

    def set_pace(self, took_s: Mapping[int, float]) -> None:
        """By rank: how long steps take. All workers know the same."""
        self._took_s.update(took_s)
        slowest_s = max(self._took_s.values(), default=APART_S)
        every = min(RAREST, math.ceil(APART_S / slowest_s)) if slowest_s > 0 else RAREST
        self._bound = 2**32 // max(every, GPU_EVERY if self._on_gpu else 1)

    def cut(self, number: int) -> StepTimes | None:
        """A step begins. Returns the last one that is known in full."""
        at_s = self._look_outside()
        if number > self._looks_next:
            self._looks_next = next_looked_at(number)
        looks = number == self._looks_next
        is_timed = looks or _scatter(number) < self._bound
        if not (is_timed or self.is_timed or self._underway):
            return None
        now = _Mark(AFTER, -1, at_s, self._record() if self._on_gpu and (is_timed or self.is_timed) else None)
        done = self._finish(now)
        self._number, self._marks, self._travels = number, [now], []
        self.looks, self.is_timed = looks, is_timed
        return done

    def finish(self) -> StepTimes | None:
        """The last step was taken."""
        done = self._finish(_Mark(AFTER, -1, self._at_s, self._record() if self._on_gpu and self.is_timed else None))
        self.is_timed = self.looks = False
        return done

    def know(self) -> tuple[float, float] | None:
        """Seconds of waiting for data and of what was done between steps, in all steps so far.

        None on a GPU, which may be busy while the host waits.
        """
        return None if self._on_gpu else (self._data_s, self._outside_s)

    def _look_outside(self) -> float:
        at_s = time.monotonic()
        self._outside_s += at_s - self._at_s
        self._at_s = at_s
        return at_s

    @property
    def looks_at_buckets(self) -> bool:
        return self.looks and not self._on_gpu

    def travelled(self, bucket: int, left_s: float, came_s: float) -> None:
        """When a bucket was sent, and when its sum was there."""
        self._travels.append((bucket, left_s, came_s))

    def lap(self, name: str, shard: int = -1) -> None:
        if self.is_timed:
            self._marks.append(_Mark(name, shard, time.monotonic(), self._record() if self._on_gpu else None))

    def data_came(self) -> None:
        at_s = time.monotonic()
        self._data_s += at_s - self._at_s
        self._at_s = at_s
        self.lap("data")

    def stop(self) -> float:
        """The step was taken. Returns the moment."""
        self._at_s = time.monotonic()
        self.lap("update")
        return self._at_s

    def drop(self) -> None:
        """The step is begun anew, with other workers: what was done until now is nobody's."""
        self._look_outside()
        self._marks, self._travels, self._took_s, self._looks_next = [], [], {}, -1
        self.is_timed = self.looks = False
        self.set_pace({})

    def _record(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _finish(self, last: _Mark) -> StepTimes | None:
        if not self._marks or self._number < 0:
            return None
        step = _Underway(self._number, [*self._marks, last], self._travels, self.looks)
        if not self._on_gpu:
            return step.times() if self.is_timed else None
        if self.is_timed:
            self._underway.append(step)
        if not self._underway or not self._underway[0].has_ended():
            return None
        oldest = self._underway.pop(0)
        times = oldest.times()
        self._pool += [mark.event for mark in oldest.marks[:-1] if mark.event is not None]  # the last is the next first
        return times


@dataclass(frozen=True)
class _Underway:
    number: int
    marks: list[_Mark]
    travels: list[tuple[int, float, float]]
    looks: bool

    def has_ended(self) -> bool:
        """All of them: the program may take its steps in another stream than the one it goes round its loop in."""
        return all(mark.event is None or mark.event.query() for mark in self.marks)

    def times(self) -> StepTimes:
        first = self.marks[0]
        laps: dict[str, float] = {}
        spans = []
        before_s = 0.0
        for mark in self.marks[1:]:
            at_s = _seconds_between(first, mark)
            laps[mark.name] = laps.get(mark.name, 0.0) + at_s - before_s
            if self.looks:
                name = "between" if mark.name == AFTER else mark.name
                name = name if mark.shard < 0 else f"{name} {mark.shard}"
                spans.append(Span(name, before_s, at_s - before_s))
            before_s = at_s
        for bucket, left_s, came_s in self.travels:
            spans.append(Span(f"bucket {bucket}", left_s - first.at_s, max(0.0, came_s - left_s), "comm"))
        return StepTimes(self.number, first.at_s, first.at_s + before_s, laps, spans)


def _seconds_between(first: _Mark, mark: _Mark) -> float:
    if first.event is None or mark.event is None:
        return mark.at_s - first.at_s
    return float(first.event.elapsed_time(mark.event)) / 1000
