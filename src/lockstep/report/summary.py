"""Summarizes a run from its trace: metrics, causes of lost time, curves, events. Pure; other modules only show it.

Curves over the steps are thinned out so that spikes stay; gradient noise gives advice on the batch size.

The field names of these dataclasses are keys of `lockstep report --json`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Final

from lockstep.report.generations import (
    BucketTimes,
    TraceGeneration,
    find_excerpts,
    find_generations,
    measure_buckets,
    merge_windows,
)
from lockstep.report.run_folder import find_predecessors
from lockstep.report.table import megabytes
from lockstep.report.time_shares import (
    COMPUTE,
    LateWorker,
    RunMeasurements,
    SlowdownCause,
    TimeUsage,
    WaitTime,
    add_up,
    find_causes,
    find_late,
    measure_usage,
    measure_waits,
)
from lockstep.report.trace_reader import LoggedMetrics, Trace, TraceEvent, TraceWindow

MOST_POINTS: Final = 400
AROUND: Final = 2.0  # a noise scale within this factor of the batch size counts as equal to it
KINDS_OF_MEMORY: Final = ("weights", "gradients", "buckets", "optimizer", "graphs")
_SAME_EVENT_S: Final = 30.0  # equal events of workers within this time are one event

Point = tuple[int, float | None]  # step, value; None: NaN or infinite


class Status(Enum):
    ENDED = "ended"
    RUNNING = "is running"
    INTERRUPTED = "stopped without an end"


@dataclass(frozen=True)
class Scaling:
    """Throughput with `workers` workers against that many times the throughput of one, both measured in this run."""

    workers: int
    samples_per_s: float
    alone_per_s: float

    @property
    def efficiency(self) -> float:
        return self.samples_per_s / (self.workers * self.alone_per_s)


@dataclass(frozen=True)
class MemoryUsage:
    """Peak memory of a worker. Gradients are stored beside the weights; `rest` is activations and everything else."""

    worker: str
    where: str  # device, or process: the memory of a CPU process includes its libraries
    parts: Mapping[str, float]  # KINDS_OF_MEMORY and rest
    total_bytes: float


@dataclass(frozen=True)
class RunEvent:
    """An event, listed once for all workers that reported it."""

    at_s: float  # since the run began
    step: int | None
    what: str
    text: str
    took_s: float | None  # on the slowest worker
    bytes: float | None
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    name: str
    unit: str
    points: tuple[Point, ...]
    last: float | None  # the last finite value
    not_finite: int  # number of values that are not finite, before thinning out
    first_not_finite: int | None  # step


@dataclass(frozen=True)
class NoiseSummary:
    curve: Curve
    batch: float
    scale: float  # median of the last third of its values
    advice: str


@dataclass(frozen=True)
class RunSummary:
    name: str
    status: Status
    begin_s: float  # since 1970
    elapsed_s: float
    steps_done: int
    steps_in_all: int | None
    workers: int  # in the last generation
    hosts: int
    backend: str
    global_batch_size: int
    samples_per_s: float | None  # over all steps
    compute_share: float | None  # efficiency; known for every run, unlike `scaling`
    scaling: Scaling | None
    causes: list[SlowdownCause]
    total: TimeUsage
    usages: list[TimeUsage]
    waits: list[WaitTime]
    late: list[LateWorker]
    buckets: list[BucketTimes]
    curves: list[Curve]
    metrics: list[Curve]  # passed to `run.log`
    noise: NoiseSummary | None
    memory: list[MemoryUsage]
    sharding: str  # what a distributed state of the optimiser saves, or would save; "" if there is nothing to say
    happenings: list[RunEvent]
    environment: Mapping[str, Mapping[str, list[str]]]  # name -> value -> workers
    left_out: int  # lines of the trace that could not be read


def summarize(trace: Trace) -> RunSummary:
    generations = find_generations(trace)
    windows, usages, waits = merge_windows(generations), measure_usage(generations), measure_waits(generations)
    total, late = add_up(usages), find_late(generations, waits)
    elapsed_s = max(0.0, trace.end_s - trace.begin_s)
    size = max((len(generation.members) for generation in generations), default=1)
    hosts = len({one.host for one in usages}) or 1
    events: dict[str, list[TraceEvent]] = defaultdict(list)
    for process in trace.processes:
        events[process.head.worker] += process.events
    world = generations[-1].reference_member.record.world if generations else None
    seconds, samples = sum(one.took_s for one in windows), sum(one.samples for one in windows)
    return RunSummary(
        name=trace.name,
        status=_status(trace, generations),
        begin_s=trace.begin_s,
        elapsed_s=elapsed_s,
        steps_done=max((one.last for one in windows), default=0),
        steps_in_all=world.steps if world else None,
        workers=world.size if world else len({process.head.worker for process in trace.processes}),
        hosts=hosts,
        backend=world.backend if world else "",
        global_batch_size=world.global_batch_size if world else 0,
        samples_per_s=samples / seconds if seconds and samples else None,
        compute_share=total.share(*COMPUTE) if total.seconds else None,
        scaling=_scaling(generations),
        causes=find_causes(RunMeasurements(usages, total, late, events, elapsed_s, size, hosts)),
        total=total,
        usages=usages,
        waits=waits,
        late=late,
        buckets=measure_buckets(find_excerpts(generations)),
        curves=draw_curves(windows),
        metrics=draw_metrics(one for process in trace.processes for one in process.logged),
        noise=summarize_noise(generations),
        memory=_memory(generations),
        sharding=_describe_sharding(generations),
        happenings=_run_events(trace, generations, events),
        environment=_environment(trace),
        left_out=sum(process.left_out for process in trace.processes),
    )


def _status(trace: Trace, generations: list[TraceGeneration]) -> Status:
    if trace.is_running:
        return Status.RUNNING
    last = [member.process for member in generations[-1].members.values()] if generations else list(trace.processes)
    return Status.ENDED if any(process.ended for process in last) else Status.INTERRUPTED


def _scaling(generations: list[TraceGeneration]) -> Scaling | None:
    """Returns the scaling at the largest number of workers, or None without steps on one worker alone.

    The first window of a generation is not counted: it contains one-time costs, such as a recovery and warm-up steps.
    """
    samples: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for generation in generations:
        for window in generation.reference_member.record.windows[1:]:
            samples[generation.size] += window.samples
            seconds[generation.size] += window.took_s
    speeds = {size: samples[size] / seconds[size] for size in samples if seconds[size] and samples[size]}
    most = max(speeds, default=1)
    return Scaling(most, speeds[most], speeds[1]) if most > 1 and 1 in speeds else None


def _memory(generations: list[TraceGeneration]) -> list[MemoryUsage]:
    if not generations:
        return []
    found = []
    for _, member in sorted(generations[-1].members.items()):
        windows, known = member.record.windows, member.record.world.memory_bytes
        peak = max((one.peak_bytes or 0.0 for one in windows), default=0.0)
        total = peak or max((one.rss_bytes or 0.0 for one in windows), default=0.0)
        parts = {name: known.get(name, 0.0) for name in KINDS_OF_MEMORY}
        parts["graphs"] = max([parts["graphs"], *(one.graphs_bytes or 0.0 for one in windows)])
        total = max(total, sum(parts.values()))
        parts["rest"] = total - sum(parts.values())
        if total:
            found.append(MemoryUsage(member.worker, "device" if peak else "process", parts, total))
    return found


def _describe_sharding(generations: list[TraceGeneration]) -> str:
    if not generations:
        return ""
    worker = generations[-1].reference_member
    memory, size = worker.record.world.memory_bytes, generations[-1].size
    state, saved = memory.get("optimizer", 0.0), memory.get("saved", 0.0)
    if "saved" in memory and not saved:
        return (
            "The optimiser's state is distributed, but each worker has all of it: its part, and that of the other one."
        )
    if saved:
        return (
            f"The optimiser's state is distributed: {worker.worker} keeps {megabytes(state)} MiB of it, "
            f"{megabytes(saved)} MiB less than without shard_optimizer."
        )
    if size > 1 and state:
        whole, with_copies = megabytes(state * (1 - 1 / size)), megabytes(state * (1 - 2 / size))
        return (
            f"Run(shard_optimizer=True) would save {whole} of the {megabytes(state)} MiB of the optimiser's state on "
            f"each worker{f', and {with_copies} MiB with redundancy=1' if size > 2 else ''}."
        )
    return ""


def _run_events(
    trace: Trace, generations: list[TraceGeneration], events: Mapping[str, list[TraceEvent]]
) -> list[RunEvent]:
    found = [*_changes(trace, generations), *_losses(trace, generations)]
    reported = [(event.at_s, worker, event) for worker, own in events.items() for event in own]
    reported.sort(key=lambda one: one[:2])
    groups: dict[tuple[str, int | None, str], list[tuple[str, TraceEvent]]] = {}
    for at_s, worker, event in reported:
        key = (event.what, event.step, event.text)
        if key in groups and at_s - groups[key][0][1].at_s > _SAME_EVENT_S:
            found.append(_merge(trace, groups.pop(key)))
        groups.setdefault(key, []).append((worker, event))
    found += [_merge(trace, group) for group in groups.values()]
    return sorted(found, key=lambda event: event.at_s)


def _changes(trace: Trace, generations: list[TraceGeneration]) -> Iterator[RunEvent]:
    """Yields where training began, and where it continued with other workers."""
    before: TraceGeneration | None = None
    for generation in generations:
        names = tuple(member.worker for _, member in sorted(generation.members.items()))
        count = f"{generation.size} worker{'s' * (generation.size != 1)}"
        if before is None:
            text = f"begins on {count}"
        elif before.launch != generation.launch:
            text = f"continues on {count}, which were started again"
        else:
            old = [member.worker for _, member in sorted(before.members.items())]
            parts = [f"{join(sorted(set(names) - set(old)))} joined"] if set(names) - set(old) else []
            parts += [f"without {join(sorted(set(old) - set(names)))}"] if set(old) - set(names) else []
            text = f"continues on {count}" + (f": {', '.join(parts)}" if parts else "")
        yield RunEvent(generation.begin_s - trace.begin_s, None, "training", text, None, None, names)
        before = generation


def _losses(trace: Trace, generations: list[TraceGeneration]) -> Iterator[RunEvent]:
    """Yields lost workers and their replacements: from the launcher's events if there are any, else from the trace."""
    known: set[str] = set()
    for launch in trace.launches:
        before = find_predecessors(launch)
        for event in launch:
            known |= {event.worker} if event.kind in ("lost", "ended") else set()
            if event.kind == "lost":
                yield _run_event(trace, event.at_s, "worker lost", event.text, event.worker)
            elif event.kind == "started" and before.get(event.worker):
                text = f"{event.worker} was started in place of {before[event.worker][-1]}"
                yield _run_event(trace, event.at_s, "worker started", text, event.worker)
            elif event.kind == "lease lost":
                yield _run_event(trace, event.at_s, "host cut off", event.text, "")
    for old, new in pairwise(generations):
        left = {one.worker: one for one in old.members.values()}
        gone = set(left) - {one.worker for one in new.members.values()} if old.launch == new.launch else set()
        for worker in sorted(gone - known):
            if not left[worker].process.ended:
                yield _run_event(trace, left[worker].process.last_s, "worker lost", f"{worker} was lost", worker)


def _run_event(trace: Trace, at_s: float, what: str, text: str, worker: str) -> RunEvent:
    return RunEvent(at_s - trace.begin_s, None, what, text, None, None, (worker,) if worker else ())


def join(names: Sequence[str]) -> str:
    """Joins names as in a sentence: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _merge(trace: Trace, group: list[tuple[str, TraceEvent]]) -> RunEvent:
    first = group[0][1]
    took_s = max((event.took_s for _, event in group if event.took_s is not None), default=None)
    size = max((event.bytes for _, event in group if event.bytes is not None), default=None)
    workers = tuple(dict.fromkeys(worker for worker, _ in group))
    return RunEvent(first.at_s - trace.begin_s, first.step, first.what, first.text, took_s, size, workers)


def _environment(trace: Trace) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for process in trace.processes:
        head = process.head
        for name, value in {"host": head.host, "device": head.device, **head.environment}.items():
            if value and head.worker not in found[name][value]:
                found[name][value].append(head.worker)
    return {name: dict(values) for name, values in found.items() if values}


# ---- curves ----------------------------------------------------------------------------------------------------------


def draw_curves(windows: Sequence[TraceWindow]) -> list[Curve]:
    """Returns one curve per metric, with a window's value at its last step. Curves without any value are left out."""
    figures: list[tuple[str, str, Callable[[TraceWindow], float | None]]] = [
        ("loss", "", lambda window: window.loss),
        ("throughput", "samples/s", lambda window: window.samples / window.took_s if window.took_s > 0 else None),
        ("learning rate", "", lambda window: window.lr),
        ("gradient norm", "", lambda window: window.grad_norm),
    ]
    curves = [draw(name, unit, [(window.last, of(window)) for window in windows]) for name, unit, of in figures]
    return [curve for curve in curves if curve.points]


def draw(name: str, unit: str, found: Iterable[Point]) -> Curve:
    """Builds a curve. Values of None were not measured and are skipped; values that are not finite are counted gaps."""
    known = [(step, value) for step, value in found if value is not None]
    bad = [step for step, value in known if not math.isfinite(value)]
    points: list[Point] = [(step, value if math.isfinite(value) else None) for step, value in known]
    last = next((value for _, value in reversed(points) if value is not None), None)
    return Curve(name, unit, tuple(thin_out(points, MOST_POINTS)), last, len(bad), bad[0] if bad else None)


def thin_out(points: Sequence[Point], most: int) -> list[Point]:
    """Returns at most `most` points: the first, the last, and a minimum, maximum and gap of each stretch in between."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 3
    kept = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        values = [(value, at) for at, (_, value) in enumerate(stretch) if value is not None]
        gaps = [at for at, (_, value) in enumerate(stretch) if value is None]
        chosen = {min(values)[1], max(values)[1]} if values else set()
        kept += [stretch[at] for at in sorted(chosen | set(gaps[:1]))]
    return [*kept, points[-1]]


def draw_metrics(logged: Iterable[LoggedMetrics]) -> list[Curve]:
    """Returns one curve per metric of `run.log`, in the order of their first steps; the last value of a step counts."""
    points: dict[str, dict[int, float]] = {}
    for one in sorted(logged, key=lambda one: one.step):
        for name, value in one.metrics.items():
            points.setdefault(name, {})[one.step] = value
    return [draw(name, "", list(found.items())) for name, found in points.items()]


def summarize_noise(generations: list[TraceGeneration]) -> NoiseSummary | None:
    """Returns None if the noise scale was never measured."""
    by_step: dict[int, tuple[float, float]] = {}  # scale, batch; for a repeated step the last value counts
    for generation in generations:
        for member in generation.members.values():
            for noise in member.record.noises:
                if noise.scale is not None and noise.scale > 0:
                    by_step[noise.step] = (noise.scale, member.record.world.global_batch_size or noise.batch)
    if not by_step:
        return None
    steps = sorted(by_step)
    lately = steps[-max(1, len(steps) // 3) :]
    scale, batch = median(by_step[step][0] for step in lately), by_step[steps[-1]][1]
    curve = draw("gradient noise scale", "samples", [(step, by_step[step][0]) for step in steps])
    return NoiseSummary(curve, batch, scale, advise_batch(scale, batch))


def advise_batch(scale: float, batch: float) -> str:
    """Returns a sentence on whether a larger batch pays.

    The steps to a given loss are proportional to 1 + scale / batch, and the samples to 1 + batch / scale (McCandlish et
    al., 2018). The scale is a rough estimate: within a factor of two of the batch it counts as equal to it.
    """
    if batch <= 0:
        return f"The noise scale is about {scale:,.0f} samples; the batch size is not known."
    steps = (1 + scale / (2 * batch)) / (1 + scale / batch)  # of twice the batch, over those of the batch itself
    figures = f"The noise scale is about {scale:,.0f} samples, the batch has {batch:,.0f}"
    cost = (
        f"Twice the batch would need about {100 * (1 - steps):.0f} % fewer steps, and {100 * (2 * steps - 1):.0f} % "
        "more samples"
    )
    if scale > AROUND * batch:
        return f"{figures}, which is less: a larger batch pays. {cost}."
    if scale >= batch / AROUND:
        return f"{figures}, which is about the same: it is near the largest that pays. {cost}."
    smaller = "a smaller batch would learn as much from fewer samples"
    return f"{figures}, which is more: a larger batch no longer pays. {cost}; {smaller}."
