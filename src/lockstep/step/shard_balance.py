"""Assigns shards to workers by how fast these compute. The bits of a step do not depend on who computes a shard.

Every worker sends with the table of a step how long it took for a sample in an earlier one, and how long the whole step
took. All workers have the same tables, so all decide alike, without a further message.

Note [When shards are assigned anew]
After every `WINDOW` steps the medians of the window are compared. If another assignment would shorten the computation
of the slowest worker by a tenth or more, it is used from the next batch on. It may split the shards in a way that takes
more communication (comm/tree_order.py, Note [Subtrees]); so if the steps of the next window do not become shorter, the
previous assignment is used again, and no other is tried for `REST` windows.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import torch

from lockstep.data.sample_order import shards_of_rank

WINDOW: Final = 16  # steps
REST: Final = 16  # windows
LEAST_GAIN: Final = 0.1  # of the time that the slowest worker computes in a step
LEAST_GAIN_S: Final = 5e-4  # seconds a step
SLOW: Final = 1.5  # a worker that takes this many times as long as the median of the others is named
WATCHED: Final = 2  # windows in which a worker must be slow before it may be dropped


class StepSpeed(NamedTuple):
    """Times of one worker in an earlier step; 0.0 if they are not known."""

    sample_s: float = 0.0  # forward and backward pass, for a sample
    step_s: float = 0.0  # from the begin of the step to that of the next one


@final
class SpeedMeter:
    """Measures `StepSpeed`. On a GPU with events, so that the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[Any, Any, int]] = deque(maxlen=8)  # (begin, end, samples) of earlier steps
        self._sample_s = self._step_s = 0.0
        self._began_s: float | None = None

    @contextmanager
    def measure(self, samples: int, waited_s: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Measure the forward and backward passes of a step, which run in this context.

        waited_s  how long this worker has waited for others so far; what is added meanwhile does not count
        """
        now_s, waited_before_s = time.perf_counter(), waited_s()
        if self._began_s is not None:
            self._step_s = now_s - self._began_s
        self._began_s = now_s
        begin = _record_event() if self._on_gpu else None
        yield
        if self._on_gpu:
            self._pending.append((begin, _record_event(), samples))
        else:
            took_s = time.perf_counter() - now_s - (waited_s() - waited_before_s)
            self._sample_s = took_s / samples if samples else 0.0

    def read(self) -> StepSpeed:
        """Return the times of the last step that is complete."""
        while self._pending and self._pending[0][1].query():
            begin, end, samples = self._pending.popleft()
            self._sample_s = begin.elapsed_time(end) / 1e3 / samples if samples else 0.0
        return StepSpeed(self._sample_s, self._step_s)


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream())
    return event


@final
class ShardBalance:
    """Decides which worker computes how many shards: see Note [When shards are assigned anew]."""

    def __init__(self, shards: int, workers: int, *, enabled: bool = True) -> None:
        self.counts = even_counts(shards, workers)
        self._enabled = enabled and 1 < workers < shards
        self._window: list[Sequence[StepSpeed]] = []
        self._slowness: deque[list[float]] = deque(maxlen=WATCHED)
        self._before: tuple[tuple[int, ...], float] | None = None  # while a new one is tried: the last one, its step
        self._rest = 0  # windows

    @property
    def shares(self) -> list[range]:
        return shares_of(self.counts)

    def slowness(self, rank: int) -> float:
        """How many times as long as the others a worker has taken for a sample in the last windows, at least."""
        return min(window[rank] for window in self._slowness) if len(self._slowness) == WATCHED else 1.0

    def add_step(self, speeds: Sequence[StepSpeed]) -> None:
        """Add the times that all workers have sent, by rank."""
        if len(speeds) > 1 and all(one.sample_s > 0 and one.step_s > 0 for one in speeds):
            self._window.append(speeds)

    def reassign(self) -> str | None:
        """Change `counts` if it is time for that. Returns what has changed and why; None if nothing has."""
        if len(self._window) < WINDOW:
            return None
        window, self._window = self._window, []
        by_rank = list(zip(*window, strict=True))
        sample_s = [statistics.median(one.sample_s for one in steps) for steps in by_rank]
        step_s = max(statistics.median(one.step_s for one in steps) for steps in by_rank)
        self._slowness.append([slowness_of(rank, sample_s) for rank in range(len(sample_s))])
        if not self._enabled:
            return None
        if self._before is not None:
            (counts, before_s), self._before = self._before, None
            if step_s >= before_s:
                self.counts, self._rest = counts, REST
                return f"{_listed(counts)} again: the steps took {step_s / before_s:.2f} of the time before"
        if self._rest > 0:
            self._rest -= 1
            return None
        return self._improve(sample_s, step_s)

    def _improve(self, sample_s: Sequence[float], step_s: float) -> str | None:
        shards, workers = sum(self.counts), len(self.counts)
        counts = best_counts(shards, sample_s)
        now, then = _slowest(self.counts, sample_s), _slowest(counts, sample_s)
        if then > (1 - LEAST_GAIN) * now or step_s * (1 - then / now) < LEAST_GAIN_S:
            return None
        even = _slowest(even_counts(shards, workers), sample_s)
        self._before, self.counts = (self.counts, step_s), counts
        slow = [describe_slow(rank, sample_s) for rank in range(workers)]
        why = "; ".join(
            [*(one for one in slow if one), f"the slowest computes {then / even:.2f} as long as with equal shares"]
        )
        return f"{_listed(counts)} by speed: {why}"


def slowness_of(rank: int, sample_s: Sequence[float]) -> float:
    """How many times as long as the median of the others a worker takes for a sample."""
    return sample_s[rank] / statistics.median(one for other, one in enumerate(sample_s) if other != rank)


def describe_slow(rank: int, sample_s: Sequence[float]) -> str:
    """Say how much slower than the others a worker is; "" if it is not much slower."""
    times = slowness_of(rank, sample_s)
    return f"worker {rank} takes {times:.1f} times as long for a sample as the others" if times >= SLOW else ""


def even_counts(shards: int, workers: int) -> tuple[int, ...]:
    return tuple(len(shards_of_rank(shards, workers, rank)) for rank in range(workers))


def best_counts(shards: int, sample_s: Sequence[float]) -> tuple[int, ...]:
    """Return how many shards each worker computes, at least one, if all are to be done as soon as possible."""
    counts = [1] * len(sample_s)
    for _ in range(shards - len(sample_s)):
        fastest = min(range(len(counts)), key=lambda rank: ((counts[rank] + 1) * sample_s[rank], rank))
        counts[fastest] += 1
    return tuple(counts)


def shares_of(counts: Sequence[int]) -> list[range]:
    """Return the shards of each worker: consecutive ones, in the order of ranks."""
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _slowest(counts: Sequence[int], sample_s: Sequence[float]) -> float:
    return max(count * one for count, one in zip(counts, sample_s, strict=True))


def _listed(counts: Sequence[int]) -> str:
    return f"{', '.join(map(str, counts))} shards"
