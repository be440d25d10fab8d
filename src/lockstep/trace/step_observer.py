"""What a worker measures in its own steps, and receives from the other workers: times, and how noisy the gradient is.

Nothing here changes what is computed. The reports of all workers travel with the table of a later step (step_table.py).
Most short steps are not observed (see Note [Steps that are timed]): the observer is inactive in them, as soon as all
workers have the reports of the last observed step. So all observers are active in the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.trace.gradient_noise import NoiseScale, PendingShardNorms, ShardNorms, ShardNormSampler
from lockstep.trace.step_timer import GPU_EVERY, StepTimer
from lockstep.trace.trace_writer import TraceWriter

REPORT_FIELDS: Final = 8  # a timed step, how long it waited and took; a step with shard norms, and four fields of these
REPORT_STEPS, GPU_REPORT_STEPS = 2, 6  # until all workers have the report of a step; a GPU may be some steps behind
NO_REPORT: Final = (-1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ObserverConfig:
    """What a worker observes and writes."""

    writes: bool = False  # this worker writes the facts that all workers know
    shards: bool = True  # False: the norms of shards could not be compared with those of batches
    population: int | None = None  # number of samples in the dataset; None for a stream


class StepObserver:
    """Times the steps of this worker, estimates the gradient noise, and writes both to the trace."""

    def __init__(self, trace_writer: TraceWriter, device: torch.device, *, details_all: bool = False) -> None:
        """`details_all`: the trace has the spans and the loss of every step."""
        self.trace_writer, self._timer = trace_writer, StepTimer(device, details_all=details_all)
        self._details_all = details_all
        self._describe: Callable[[], dict[str, Any]] = dict
        self._shards = ShardNormSampler(enabled=True)
        self._noise = NoiseScale()
        self._norm: tuple[int, float | Tensor, int] | None = None  # of the last step's gradient: step, norm, samples
        self._on_gpu = device.type == "cuda"
        self._report_steps = GPU_REPORT_STEPS if self._on_gpu else REPORT_STEPS
        self._reports_until = 0  # step number
        self._unread: PendingShardNorms | None = None
        self._mine: ShardNorms | None = None
        self._number, self._began_s = -1, 0.0
        self._writes = self._has_begun = False
        self.active: StepObserver = self  # the observer of this step: a NullObserver if it is not observed

    def set_world(self, describe: Callable[[], dict[str, Any]], *, config: ObserverConfig, **world: Any) -> None:
        """Start with other workers. `describe()` returns buckets and memory; it is called after the first step."""
        self._describe, self._writes = describe, config.writes
        self._noise.population = config.population
        self._norm = self._unread = self._mine = None
        self._shards, self.active = ShardNormSampler(enabled=config.shards), self
        totals = self._timer.totals()  # of the steps up to now
        self._timer.reset()
        self.trace_writer.set_world(totals, **world)

    # -- times -------------------------------------------------------------------------------------------------------

    @property
    def is_detailed(self) -> bool:
        return self._timer.is_detailed

    def begin_iteration(self, number: int) -> None:
        """At the top of the loop: a step ends, and step `number` begins."""
        times = self._timer.begin_step(number)
        if times is not None:
            self.trace_writer.add_timed_step(times, describe=self._describe)
        if not self._has_begun:
            self.trace_writer.begin(self._timer.totals())
            self._has_begun = True
        if self._timer.is_timed or self._shards.is_due(number):
            self._reports_until = number + self._report_steps
        self.active = self if number <= self._reports_until else _INACTIVE

    def end_loop(self) -> None:
        if (times := self._timer.end_loop()) is not None:
            self.trace_writer.add_timed_step(times, describe=self._describe)

    def end_data_wait(self) -> None:
        self._timer.end_data_wait()

    def lap(self, name: str, shard: int = -1) -> None:
        if self._timer.is_timed:
            self._timer.lap(name, shard)

    def add_buckets(self, times: Callable[[], Sequence[tuple[float, float]]]) -> None:
        """Note when each bucket was sent and arrived. Called when all buckets have arrived."""
        if self._timer.times_buckets:
            for bucket, (sent_s, arrived_s) in enumerate(times()):
                self._timer.add_bucket(bucket, sent_s, arrived_s)

    def end_step(
        self, number: int, loss: float, *, samples: int, epoch: int, facts: Callable[[], dict[str, Any]]
    ) -> None:
        """Step `number` was applied. `facts()` returns its learning rate and the norm of its gradient."""
        if self._details_all:
            self.trace_writer.add_loss(number, loss)
        if self.trace_writer.count_step(number, loss, samples, self._timer.end_step()):
            self.trace_writer.end_window_if_due(self._timer.totals(), epoch=epoch, facts=facts())

    def end_further_step(self) -> None:
        """A step of another optimiser, with the same batch, was applied: its time belongs to the same step."""
        self._timer.end_step()

    def close(self, *, succeeded: bool) -> None:
        self.trace_writer.close(self._timer.totals(), succeeded=succeeded)

    # -- noise -------------------------------------------------------------------------------------------------------

    def begin_step(self, number: int) -> Callable[[Sequence[Tensor | None]], None] | None:
        """Begin to compute a step. Returns the function to call with the gradients of each shard, or None."""
        self._number, self._began_s = number, time.monotonic()
        self._shards.begin(number)
        if self._shards.is_sampling:
            self._reports_until = number + self._report_steps  # also where a step is repeated with other workers
        return self._shards.add if self._shards.is_sampling else None

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        if self._shards.is_sampling:
            self._shards.end_shard(weight, samples)

    def add_gradient(self, norm: float | Tensor | None, samples: int, loss_scale: float) -> None:
        """Note the norm of the gradient of the global batch, before clipping."""
        # Reading a value from a GPU takes time: only in steps whose shards were sampled, and in one of GPU_EVERY.
        reads = norm is not None and (not self._on_gpu or self._shards.is_sampling or self._number % GPU_EVERY == 0)
        self._norm = (self._number, norm, samples) if reads and norm is not None else None
        if self._shards.is_sampling:
            self._unread = self._shards.end(self._number, loss_scale, took_s=time.monotonic() - self._began_s)

    # -- others ------------------------------------------------------------------------------------------------------

    def pop_report(self) -> Sequence[float]:
        mine, self._mine = self._mine, None
        shards = NO_REPORT[3:] if mine is None else (mine.step, mine.mean_sq, mine.shards, mine.samples, mine.next)
        return [*self.trace_writer.pop_report(), *map(float, shards)]

    def add_reports(self, reports: Sequence[Sequence[float]]) -> None:
        """`reports[rank]` is that rank's report. Call it where a GPU synchronisation is cheap."""
        if self._norm is not None:
            step, norm, samples = self._norm
            self._noise.add_batch(step, float(norm), samples)
            self._norm = None
        if self._unread is not None:
            self._mine, self._unread = self._shards.read(self._unread), None
        if any(row[0] >= 0 for row in reports):
            self.trace_writer.add_reports([(row[0], row[1], row[2]) for row in reports])
            self._timer.set_pace({rank: row[2] for rank, row in enumerate(reports) if row[0] >= 0})
        rows = [row[3:] for row in reports if row[3] >= 0]
        norms = [ShardNorms(int(row[0]), row[1], int(row[2]), int(row[3]), int(row[4])) for row in rows]
        if norms:
            self._shards.next = max(one.next for one in norms)
            self._add_shards([one for one in norms if one.shards])

    def _add_shards(self, norms: Sequence[ShardNorms]) -> None:
        for one in norms:
            self._noise.add_shards(one)
        if norms and self._writes and (facts := self._noise.facts()) is not None:
            self.trace_writer.set_noise(step=self._number, **facts)

    @property
    def noise_scale(self) -> float | None:
        """The batch size, in samples, beyond which a larger one gains less and less. None if it is not known yet."""
        facts = self._noise.facts()
        return facts["scale"] if facts is not None else None


@final
class NullObserver(StepObserver):
    """Observes nothing and costs nothing: for `Run(trace=False)`, steps that are not observed, and benchmarks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(TraceWriter(None, "", device), device)

    is_detailed = False

    def begin_iteration(self, number: int) -> None:
        pass

    def end_loop(self) -> None:
        pass

    def end_data_wait(self) -> None:
        pass

    def lap(self, name: str, shard: int = -1) -> None:
        pass

    def add_buckets(self, times: Callable[[], Sequence[tuple[float, float]]]) -> None:
        pass

    def begin_step(self, number: int) -> None:
        pass

    def end_shard(self, weight: float | Tensor, samples: int) -> None:
        pass

    def add_gradient(self, norm: float | Tensor | None, samples: int, loss_scale: float) -> None:
        pass

    def end_step(
        self, number: int, loss: float, *, samples: int, epoch: int, facts: Callable[[], dict[str, Any]]
    ) -> None:
        pass

    def end_further_step(self) -> None:
        pass

    def pop_report(self) -> Sequence[float]:
        return NO_REPORT

    def add_reports(self, reports: Sequence[Sequence[float]]) -> None:
        pass


_INACTIVE: Final = NullObserver(torch.device("cpu"))
