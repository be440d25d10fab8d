"""Summarizes a run from its trace: metrics, causes of lost time, curves, events. Pure; other modules only show it.

The field names of these dataclasses are keys of `lockstep report --json`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from lockstep.report.bucket_overlap import BucketTimes, measure_buckets
from lockstep.report.curves import Curve, NoiseSummary, draw_curves, draw_metrics, summarize_noise
from lockstep.report.generations import TraceGeneration, find_excerpts, find_generations, merge_windows
from lockstep.report.launcher_events import find_replaced
from lockstep.report.slowdown_causes import RunMeasurements, SlowdownCause, find_causes
from lockstep.report.time_shares import (
    COMPUTE,
    LateWorker,
    TimeUsage,
    WaitTime,
    add_up,
    find_late,
    measure_usage,
    measure_waits,
)
from lockstep.report.trace_reader import Trace, TraceEvent

_SAME_EVENT_S = 30.0  # equal events of workers within this time are one event


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
    parts: Mapping[str, float]  # weights, gradients, optimizer, rest
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
        parts = {name: known.get(name, 0.0) for name in ("weights", "gradients", "optimizer")}
        total = max(total, sum(parts.values()))
        parts["rest"] = total - sum(parts.values())
        if total:
            found.append(MemoryUsage(member.worker, "device" if peak else "process", parts, total))
    return found


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
        replaced = find_replaced(launch)
        for event in launch:
            known |= {event.worker} if event.kind in ("lost", "ended") else set()
            if event.kind == "lost":
                yield _run_event(trace, event.at_s, "worker lost", event.text, event.worker)
            elif event.kind == "started" and event.worker in replaced:
                text = f"{event.worker} was started in place of {replaced[event.worker]}"
                yield _run_event(trace, event.at_s, "worker started", text, event.worker)
            elif event.kind == "lease lost":
                yield _run_event(trace, event.at_s, "host cut off", event.text, "")
    for before, after in pairwise(generations):
        left = {one.worker: one for one in before.members.values()}
        gone = set(left) - {one.worker for one in after.members.values()} if before.launch == after.launch else set()
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
