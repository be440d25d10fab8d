"""Where the time of a step goes.

A step is a chain of laps: the time from one mark to the next belongs to the work in between, so all laps together are
the whole time. On a CPU a mark is a clock reading. On a GPU it is an event in the stream, because the host only queues
the work.

Note [Steps that are timed]
A mark costs some microseconds, and evaluating the marks costs more: Python is slow to resume after every matrix
product. So only some steps are timed, about APART_S apart: all steps that last longer than that, and a few of the short
ones. All workers time the same steps, since they send each other how long these took. The timed steps are not periodic,
because a program may be, for example with every eighth batch late. Waiting for data and the time between steps may vary
so much that a sample says little; they are measured in every step.

Note [Which worker is waited for]
When its own backward pass is over, a worker waits until all sums have arrived: for workers that are slower, and then
for the rest of the communication. An all-reduce makes slow and fast workers look alike. But the last worker to arrive
waits least, and only for communication. So the shortest wait of all workers is the exposed communication, and what a
worker waits beyond it, it waits for the worker with the shortest wait. No clocks are compared. Every worker sends the
length of its wait with its next step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

PHASES: Final = ("data", "forward", "backward", "exposed", "waiting", "update", "between")
WAIT: Final = "wait"  # is split into `exposed` and `waiting`
AFTER: Final = "after"  # from the end of a step to the begin of the next one
GPU_EVERY: Final = 8  # on a GPU at most one step in so many is timed: events cost more than clock readings
APART_S: Final = 0.2
RAREST: Final = 1000  # at least one step in so many is timed, on average


@dataclass(frozen=True)
class TimedSpan:
    """A lap, or the exchange of one bucket. `start_s` counts from the begin of the step."""

    name: str
    start_s: float
    took_s: float
    track: str = "main"


@dataclass
class StepTimes:
    """The times of one step of this worker."""

    number: int
    began_s: float
    ended_s: float
    laps: dict[str, float]  # seconds by name; `wait` is not split yet
    spans: list[TimedSpan] = field(default_factory=list)
    exposed_s: float | None = None  # None: the waits of the other workers are not known
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
        """Seconds by phase (PHASES); they add up to the whole time."""
        exposed_s = self.waited_s if self.exposed_s is None else self.exposed_s
        derived = {"exposed": exposed_s, "waiting": self.waited_s - exposed_s}
        derived["between"] = self.laps.get("between", 0.0) + self.after_s
        return {name: derived.get(name, self.laps.get(name, 0.0)) for name in PHASES}

    def set_waits(self, waits_s: Sequence[float]) -> None:
        """Split the wait, given how long each rank has waited: see Note [Which worker is waited for]."""
        self.exposed_s = min(min(waits_s), self.waited_s)
        last = min(range(len(waits_s)), key=waits_s.__getitem__)
        self.waited_for = last if self.waited_s > self.exposed_s else None


def next_detailed_step(step: int) -> int:
    """Return the first step, from `step` on, that keeps all its spans: so few that a month of them is little."""
    if step <= 6:
        return max(step, 1)  # not step 0, which is not typical
    scale = 10 ** (len(str(step)) - 1)
    return min(one for first in (1, 2, 5, 10) for one in range(first * scale, first * scale + 3) if one >= step)


def _hash(number: int) -> int:
    """Return a hash below 2**32, in which consecutive numbers are unrelated."""
    number = (number + 1) * 0x9E3779B1 & 0xFFFFFFFF
    return (number ^ number >> 15) * 0x85EBCA77 & 0xFFFFFFFF


class _Mark(NamedTuple):  # made a dozen times in a step, so not a dataclass
    name: str
    shard: int
    at_s: float
    event: Any  # a CUDA event, or None on a CPU


class StepTimer:
    """Times the steps of one worker: `begin_step` at the top of the loop, `lap` after each part, `end_step` at its end.

    These are called in every step, so they do next to nothing in a step that is not timed.
    """

    def __init__(self, device: torch.device, *, details_all: bool = False) -> None:
        """`details_all`: all steps are timed with their spans, which costs more time."""
        self._on_gpu, self._details_all = device.type == "cuda", details_all
        self._marks: list[_Mark] = []
        self._buckets: list[tuple[int, float, float]] = []
        self._number = -1
        self._pending: list[_PendingStep] = []  # steps whose last event the GPU may not have reached
        self._pool: list[Any] = []
        self._next_detailed = -1
        self._took_s: dict[int, float] = {}  # rank -> duration of its last timed step
        self._at_s = time.monotonic()  # the last clock reading of those that every step makes
        self._data_s = self._outside_s = 0.0  # sums over all steps
        self.is_timed = self.is_detailed = False  # whether this step is timed; whether its spans are kept too
        self.set_pace({})

    def set_pace(self, took_s: Mapping[int, float]) -> None:
        """Set by rank how long steps take, which decides how many are timed. Equal on all workers."""
        self._took_s.update(took_s)
        slowest_s = max(self._took_s.values(), default=APART_S)
        every = min(RAREST, math.ceil(APART_S / slowest_s)) if slowest_s > 0 else RAREST
        self._bound = 2**32 // max(every, GPU_EVERY if self._on_gpu else 1)

    def begin_step(self, number: int) -> StepTimes | None:
        """Begin a step. Returns the times of an earlier step, if they have become complete."""
        at_s = self._end_outside()
        if number > self._next_detailed:
            self._next_detailed = number if self._details_all else next_detailed_step(number)
        is_detailed = number == self._next_detailed
        is_timed = is_detailed or _hash(number) < self._bound
        if not (is_timed or self.is_timed or self._pending):
            return None
        now = _Mark(AFTER, -1, at_s, self._record() if self._on_gpu and (is_timed or self.is_timed) else None)
        done = self._finish(now)
        self._number, self._marks, self._buckets = number, [now], []
        self.is_detailed, self.is_timed = is_detailed, is_timed
        return done

    def end_loop(self) -> StepTimes | None:
        """End the last step. Returns its times if they are complete."""
        done = self._finish(_Mark(AFTER, -1, self._at_s, self._record() if self._on_gpu and self.is_timed else None))
        self.is_timed = self.is_detailed = False
        return done

    def totals(self) -> tuple[float, float] | None:
        """Seconds spent so far waiting for data and between steps, over all steps.

        None on a GPU, which may be busy while the host waits.
        """
        return None if self._on_gpu else (self._data_s, self._outside_s)

    def _end_outside(self) -> float:
        at_s = time.monotonic()
        self._outside_s += at_s - self._at_s
        self._at_s = at_s
        return at_s

    @property
    def times_buckets(self) -> bool:
        return self.is_detailed and not self._on_gpu

    def add_bucket(self, bucket: int, sent_s: float, arrived_s: float) -> None:
        """Note when a bucket was sent, and when its sum had arrived."""
        self._buckets.append((bucket, sent_s, arrived_s))

    def lap(self, name: str, shard: int = -1) -> None:
        if self.is_timed:
            self._marks.append(_Mark(name, shard, time.monotonic(), self._record() if self._on_gpu else None))

    def end_data_wait(self) -> None:
        at_s = time.monotonic()
        self._data_s += at_s - self._at_s
        self._at_s = at_s
        self.lap("data")

    def end_step(self) -> float:
        """End the update of this step. Returns the current time."""
        self._at_s = time.monotonic()
        self.lap("update")
        return self._at_s

    def reset(self) -> None:
        """Forget the step that is running: it is repeated with other workers."""
        self._end_outside()
        self._marks, self._buckets, self._took_s, self._next_detailed = [], [], {}, -1
        self.is_timed = self.is_detailed = False
        self.set_pace({})

    def _record(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _finish(self, last: _Mark) -> StepTimes | None:
        if not self._marks or self._number < 0:
            return None
        step = _PendingStep(self._number, [*self._marks, last], self._buckets, self.is_detailed)
        if not self._on_gpu:
            return step.times() if self.is_timed else None
        if self.is_timed:
            self._pending.append(step)
        if not self._pending or not self._pending[0].has_ended():
            return None
        oldest = self._pending.pop(0)
        times = oldest.times()
        # The last mark is also the first one of the next step.
        self._pool += [mark.event for mark in oldest.marks[:-1] if mark.event is not None]
        return times


@dataclass(frozen=True)
class _PendingStep:
    number: int
    marks: list[_Mark]
    buckets: list[tuple[int, float, float]]
    is_detailed: bool

    def has_ended(self) -> bool:
        """Whether all events have occurred: a program may step in another stream than the one that its loop runs in."""
        return all(mark.event is None or mark.event.query() for mark in self.marks)

    def times(self) -> StepTimes:
        first = self.marks[0]
        laps: dict[str, float] = {}
        spans = []
        before_s = 0.0
        for mark in self.marks[1:]:
            at_s = _seconds_between(first, mark)
            laps[mark.name] = laps.get(mark.name, 0.0) + at_s - before_s
            if self.is_detailed:
                name = "between" if mark.name == AFTER else mark.name
                name = name if mark.shard < 0 else f"{name} {mark.shard}"
                spans.append(TimedSpan(name, before_s, at_s - before_s))
            before_s = at_s
        for bucket, sent_s, arrived_s in self.buckets:
            spans.append(TimedSpan(f"bucket {bucket}", sent_s - first.at_s, max(0.0, arrived_s - sent_s), "comm"))
        return StepTimes(self.number, first.at_s, first.at_s + before_s, laps, spans)


def _seconds_between(first: _Mark, mark: _Mark) -> float:
    if first.event is None or mark.event is None:
        return mark.at_s - first.at_s
    return float(first.event.elapsed_time(mark.event)) / 1000
