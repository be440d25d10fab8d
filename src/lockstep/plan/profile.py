"""What was measured of a program: its steps on one or two workers, and sums between workers.

A `ProbeResult` holds the steps of one run, read from its trace; predictions are computed from a `ProgramProfile`. All
times are in seconds.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report.generations import TraceGeneration, find_generations
from lockstep.report.summary import KINDS_OF_MEMORY, summarize_noise
from lockstep.report.trace_reader import DetailedStep, read_trace

WARM_UP: Final = 4  # first steps that are not counted, if there are more than twice as many
GPU_WARM_UP: Final = 10  # shards are captured in the fifth
MIB: Final = 2**20
TIMES: Final = ("period_s", "first_shard_s", "later_shard_s", "update_s", "wait_s", "data_s", "other_s")
_SHARD: Final = re.compile(r"(forward|backward) (\d+)")


@dataclass(frozen=True)
class BucketTiming:
    """A bucket of gradients: its bytes as float32, and when it is sent, as a share of the last backward pass."""

    size_bytes: int
    ready: float


@dataclass(frozen=True)
class ProbeResult:
    """The steps of one run. Lists have one value per step; times are those of the slowest worker.

    shard_s       forward and backward of a shard that is the first of its worker, and of a later one
    period_s      from the begin of a step to the begin of the next one
    wait_s        of the worker that waits least: communication that is not hidden
    memory_bytes  by kind, of one worker; "peak" is the largest size of the process, or of the tensors of a GPU
    """

    workers: int
    hosts: int
    backend: str
    device: str
    slots: int  # cores that the workers of a host may use, or GPUs of the host
    shards: int
    global_batch_size: int
    grad_comm: str
    shard_optimizer: bool
    period_s: list[float]
    first_shard_s: list[float]
    later_shard_s: list[float]
    backward_share: float
    update_s: list[float]
    wait_s: list[float]
    data_s: list[float]
    other_s: list[float]
    buckets: list[BucketTiming]
    memory_bytes: dict[str, float]
    losses: list[float] = field(default_factory=list)
    noise_scale: float | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def samples_per_shard(self) -> float:
        return self.global_batch_size / max(1, self.shards)

    @property
    def step_s(self) -> float:
        return median(self.period_s)


def read_probe(folder: Path, *, grad_comm: str = "fp32", shard_optimizer: bool = False) -> ProbeResult:
    """Read the steps of a run from its trace. Raises LockstepError if there are no steps with details."""
    trace = read_trace(folder, now_s=time.time())
    generations = [one for one in find_generations(trace) if any(m.record.detailed_steps for m in one.members.values())]
    if not generations:
        raise LockstepError(f"the trace in {trace.folder} has no steps: let the program make 10 steps or more")
    generation = max(generations, key=lambda one: len(one.reference_member.record.detailed_steps))
    steps = _steps_of_all(generation)
    on_gpu = generation.reference_member.process.head.device.startswith("cuda")
    skipped = GPU_WARM_UP if on_gpu else WARM_UP
    numbers = sorted(steps)
    numbers = numbers[skipped:] if len(numbers) > 2 * skipped else numbers[len(numbers) // 3 :]
    if not numbers:
        raise LockstepError(f"the trace in {trace.folder} has too few steps: let the program make 10 steps or more")
    reference = generation.reference_member
    head, world = reference.process.head, reference.record.world
    if not world.global_batch_size:
        raise LockstepError(
            f"the trace in {trace.folder} does not say the batch size: the first step was not completed"
        )
    parts = [_StepParts.of(list(steps[number].values())) for number in numbers]
    noise = summarize_noise([generation])
    hosts = len({member.process.head.host for member in generation.members.values()})
    return ProbeResult(
        workers=world.size,
        hosts=hosts,
        backend=world.backend,
        device="cuda" if on_gpu else "cpu",
        slots=_slots(head.environment, on_gpu=on_gpu) or max(1, world.size // hosts),
        shards=world.shards or world.size,
        global_batch_size=world.global_batch_size,
        grad_comm=grad_comm,
        shard_optimizer=shard_optimizer,
        period_s=_periods(generation, numbers),
        first_shard_s=[s for one in parts for s in one.first_shards_s],
        later_shard_s=[s for one in parts for s in one.later_shards_s],
        backward_share=mean(one.backward_share for one in parts),
        update_s=[one.update_s for one in parts],
        wait_s=[one.wait_s for one in parts],
        data_s=[one.data_s for one in parts],
        other_s=[one.other_s for one in parts],
        buckets=_bucket_timings(world.bucket_bytes, parts),
        memory_bytes=_memory(generation),
        losses=[loss for _, loss in sorted(reference.record.losses.items())],
        noise_scale=None if noise is None else noise.scale,
        environment=dict(head.environment) | {"device": head.device},
    )


def merge_runs(runs: Sequence[ProbeResult]) -> ProbeResult:
    """Join equal runs to one whose step is the geometric mean of theirs; memory and buckets are those of the first."""
    step_s = math.exp(mean(math.log(one.step_s) for one in runs))
    times: dict[str, Any] = {
        name: [step_s / one.step_s * seconds for one in runs for seconds in getattr(one, name)] for name in TIMES
    }
    return replace(runs[0], **times)


def _steps_of_all(generation: TraceGeneration) -> dict[int, dict[int, DetailedStep]]:
    """The steps that all workers recorded in detail: step -> rank -> spans."""
    found: dict[int, dict[int, DetailedStep]] = {}
    for rank, member in generation.members.items():
        for one in member.record.detailed_steps:
            found.setdefault(one.step, {})[rank] = one
    return {step: by_rank for step, by_rank in found.items() if len(by_rank) == len(generation.members)}


def _periods(generation: TraceGeneration, numbers: Sequence[int]) -> list[float]:
    """The time from one step to the next, for consecutive steps; the length of single steps if there are none."""
    begins = {one.step: one.begin_s for one in generation.reference_member.record.detailed_steps}
    found = [begins[b] - begins[a] for a, b in pairwise(numbers) if b == a + 1]
    if found:
        return found
    by_step = {one.step: one for one in generation.reference_member.record.detailed_steps}
    return [sum(s.took_us for s in by_step[n].spans if s.track == "main") / 1e6 for n in numbers]


@dataclass(frozen=True)
class _StepParts:
    """One step: the slowest worker's compute time, the shortest wait, means of the rest."""

    first_shards_s: list[float]  # of each worker
    later_shards_s: list[float]
    backward_share: float
    update_s: float
    wait_s: float
    data_s: float
    other_s: float
    ready: dict[int, float]

    @staticmethod
    def of(workers: Sequence[DetailedStep]) -> _StepParts:
        shards: list[list[float]] = []
        backward = forward = 0.0
        ready: dict[int, list[float]] = {}
        sums: dict[str, list[float]] = {name: [] for name in ("update", "wait", "data", "between")}
        for worker in workers:
            by_shard: dict[int, float] = {}
            last_start = last_end = None
            totals = dict.fromkeys(sums, 0.0)
            for span in worker.spans:
                match, took_s = _SHARD.fullmatch(span.name), span.took_us / 1e6
                if span.track == "main" and match:
                    by_shard[int(match[2])] = by_shard.get(int(match[2]), 0.0) + took_s
                    if match[1] == "backward":
                        backward += took_s
                        last_start, last_end = span.start_us, span.start_us + span.took_us
                    else:
                        forward += took_s
                elif span.track == "main" and span.name in totals:
                    totals[span.name] += took_s
                elif span.track == "main" and span.name == "backward":
                    totals["wait"] += took_s
            for name, value in totals.items():
                sums[name].append(value)
            shards.append([seconds for _, seconds in sorted(by_shard.items())])
            if last_start is not None and last_end is not None and last_end > last_start:
                for span in worker.spans:
                    if span.track == "comm":
                        share = (span.start_us - last_start) / (last_end - last_start)
                        ready.setdefault(int(span.name.split()[-1]), []).append(min(1.0, max(0.0, share)))
        return _StepParts(
            first_shards_s=[one[0] for one in shards if one],
            later_shards_s=[mean(one[1:]) for one in shards if len(one) > 1],
            backward_share=backward / (forward + backward) if forward + backward else 2 / 3,
            update_s=max(sums["update"]),
            wait_s=min(sums["wait"]),
            data_s=mean(sums["data"]),
            other_s=mean(sums["between"]),
            ready={bucket: mean(shares) for bucket, shares in ready.items()},
        )


def _bucket_timings(sizes: Sequence[int], parts: Sequence[_StepParts]) -> list[BucketTiming]:
    found = []
    for bucket, size in enumerate(sizes):
        shares = [one.ready[bucket] for one in parts if bucket in one.ready]
        found.append(BucketTiming(size, median(shares) if shares else (bucket + 1) / len(sizes)))
    return found


def _memory(generation: TraceGeneration) -> dict[str, float]:
    member = generation.reference_member
    known, windows = member.record.world.memory_bytes, member.record.windows
    peaks = [one.peak_bytes or one.rss_bytes or 0.0 for one in windows]
    graphs = max([known.get("graphs", 0.0), *(one.graphs_bytes or 0.0 for one in windows)])
    return {**{name: known.get(name, 0.0) for name in KINDS_OF_MEMORY}, "graphs": graphs, "peak": max(peaks, default=0)}


def _slots(environment: Mapping[str, str], *, on_gpu: bool) -> int:
    """Cores that a worker may use, or GPUs of its host; 0 if the trace does not say."""
    text = environment.get("GPUs" if on_gpu else "cores", "")
    known = re.search(r"(\d+) cores", environment.get("machine", "")) if not on_gpu else None  # of older traces
    return int(text) if text.isdecimal() else int(known[1]) if known else 0


# ---- sums between workers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SumPoint:
    """The measured sum of a gradient: its bytes, how long it takes, and the CPU time of one worker."""

    size_bytes: float
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class MeasuredSums:
    """Sums of one kind between given workers, for several sizes in ascending order."""

    backend: str
    hosts: int
    workers_per_host: int
    grad_comm: str
    device: str
    mbit: int  # of the links between hosts; 0: on one host, or not known
    points: tuple[SumPoint, ...]

    def at(self, size_bytes: float) -> SumPoint:
        """Interpolate linearly between the measured sizes, and extrapolate beyond the largest with the last slope."""
        points = self.points
        if size_bytes <= points[0].size_bytes or len(points) == 1:
            return SumPoint(size_bytes, points[0].seconds, points[0].cpu_s)
        low, high = next(((a, b) for a, b in pairwise(points) if size_bytes <= b.size_bytes), points[-2:])
        share = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
        seconds = low.seconds + share * (high.seconds - low.seconds)
        return SumPoint(size_bytes, max(seconds, 0.0), max(low.cpu_s + share * (high.cpu_s - low.cpu_s), 0.0))


def read_links(path: Path) -> list[MeasuredSums]:
    """Read a file that `lockstep doctor --links` has written. Raises LockstepError if it cannot be read."""
    try:
        return parse_links(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LockstepError(
            f"{path} cannot be read as a file of measured links: {error}; `lockstep doctor --links {path}` writes one"
        ) from None


def parse_links(found: Mapping[str, Any]) -> list[MeasuredSums]:
    """Raises KeyError or TypeError if `found` is not what `lockstep doctor --links` writes."""
    return [
        MeasuredSums(
            backend=one["backend"],
            hosts=one["hosts"],
            workers_per_host=one["workers_per_host"],
            grad_comm=one["grad_comm"],
            device=one["device"],
            mbit=int(one.get("mbit") or 0),
            points=tuple(SumPoint(p["bytes"], p["seconds"], p["cpu_s"]) for p in one["points"]),
        )
        for one in found["sums"]
    ]


# ---- the profile -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramProfile:
    """Everything that was measured of a program."""

    program: str
    probes: tuple[ProbeResult, ...]
    sums: tuple[MeasuredSums, ...] = ()
    checkpoint_s: float | None = None
    checkpoint_bytes: float | None = None
    run_noise: float = 0.0  # by how much equal runs differed: a relative standard deviation

    @cached_property
    def base(self) -> ProbeResult:
        """The run with the fewest workers and the largest batch: what one worker takes without communication."""
        return min(self.probes, key=lambda one: (one.workers, -one.global_batch_size, one.shards))

    @property
    def device(self) -> str:
        return self.base.device

    @property
    def gradient_bytes(self) -> float:
        return self.base.memory_bytes["gradients"]

    @cached_property
    def noise_scale(self) -> float | None:
        known = [one.noise_scale for one in self.probes if one.noise_scale is not None]
        return median(known) if known else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> ProgramProfile:
        """Raises KeyError or TypeError if it is not a profile."""
        probes = tuple(
            ProbeResult(**{**one, "buckets": [BucketTiming(**bucket) for bucket in one["buckets"]]})
            for one in found["probes"]
        )
        sums = tuple(
            MeasuredSums(**{**one, "points": tuple(SumPoint(**point) for point in one["points"])})
            for one in found["sums"]
        )
        rest = {name: found.get(name) for name in ("checkpoint_s", "checkpoint_bytes")}
        return ProgramProfile(found["program"], probes, sums, run_noise=found.get("run_noise", 0.0), **rest)
