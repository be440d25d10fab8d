"""What happened in a run, from its trace: figures, causes, curves, events. Pure; others only show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from lockstep.report.bucket_overlap import Bucket, measure_buckets
from lockstep.report.curves import Curve, NoiseStory, draw_curves, draw_metrics, judge_noise
from lockstep.report.generations import Era, find_eras, find_scenes, tell_windows
from lockstep.report.launcher_events import find_replaced
from lockstep.report.slowdown_causes import Cause, Facts, find_causes
from lockstep.report.time_shares import COMPUTE, Late, Usage, Wait, add_up, find_late, measure_usage, measure_waits
from lockstep.report.trace_reader import Event, Trace

_SAME_EVENT_S = 30.0


class Status(Enum):
    ENDED = "ended"
    GOING_ON = "is running"
    BROKEN_OFF = "stopped without an end"


@dataclass(frozen=True)
class Scaling:
    """Throughput of so many workers, over that many times the throughput of one, where this very run had one alone."""

    workers: int
    samples_per_s: float
    alone_per_s: float

    @property
    def efficiency(self) -> float:
        return self.samples_per_s / (self.workers * self.alone_per_s)


@dataclass(frozen=True)
class Memory:
    """The most that a worker needed. Gradients live beside the weights; the rest is activations and all others."""

    worker: str
    where: str  # device, or process: that of a CPU holds the libraries, too
    parts: Mapping[str, float]  # weights, gradients, optimizer, rest
    total_bytes: float


@dataclass(frozen=True)
class Happening:
    """An event, once for all workers that told it."""

    at_s: float  # since the begin of the run
    step: int | None
    what: str
    text: str
    took_s: float | None  # the longest
    bytes: float | None
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Story:
    name: str
    status: Status
    begin_s: float  # since 1970
    elapsed_s: float
    steps_done: int
    steps_in_all: int | None
    workers: int  # lately
    hosts: int
    backend: str
    global_batch_size: int
    samples_per_s: float | None  # over all steps
    compute_share: float | None  # the efficiency that every run has: see Usage
    scaling: Scaling | None
    causes: list[Cause]
    total: Usage
    usages: list[Usage]
    waits: list[Wait]
    late: list[Late]
    buckets: list[Bucket]
    curves: list[Curve]
    metrics: list[Curve]  # what `run.log` was given
    noise: NoiseStory | None
    memory: list[Memory]
    happenings: list[Happening]
    environment: Mapping[str, Mapping[str, list[str]]]  # name -> value -> workers
    left_out: int  # lines of the trace that could not be read


def tell(trace: Trace) -> Story:
    eras = find_eras(trace)
    windows, usages, waits = tell_windows(eras), measure_usage(eras), measure_waits(eras)
    total, late = add_up(usages), find_late(eras, waits)
    elapsed_s = max(0.0, trace.end_s - trace.begin_s)
    size, hosts = max((len(era.members) for era in eras), default=1), len({one.host for one in usages}) or 1
    events: dict[str, list[Event]] = defaultdict(list)
    for process in trace.processes:
        events[process.head.worker] += process.events
    world = eras[-1].narrator.stay.world if eras else None
    seconds, samples = sum(one.took_s for one in windows), sum(one.samples for one in windows)
    return Story(
        name=trace.name,
        status=_status(trace, eras),
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
        scaling=_scaling(eras),
        causes=find_causes(Facts(usages, total, late, events, elapsed_s, size, hosts)),
        total=total,
        usages=usages,
        waits=waits,
        late=late,
        buckets=measure_buckets(find_scenes(eras)),
        curves=draw_curves(windows),
        metrics=draw_metrics(one for process in trace.processes for one in process.logged),
        noise=judge_noise(eras),
        memory=_memory(eras),
        happenings=_happenings(trace, eras, events),
        environment=_environment(trace),
        left_out=sum(process.left_out for process in trace.processes),
    )


def _status(trace: Trace, eras: list[Era]) -> Status:
    if trace.is_going_on:
        return Status.GOING_ON
    last = [member.process for member in eras[-1].members.values()] if eras else list(trace.processes)
    return Status.ENDED if any(process.ended for process in last) else Status.BROKEN_OFF


def _scaling(eras: list[Era]) -> Scaling | None:
    """Of the largest number of workers that the run had for a while. The first window of an era is not counted: it
    has what is slow only once, as a recovery and the first steps of a worker are."""
    samples: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for era in eras:
        for window in era.narrator.stay.windows[1:]:
            samples[era.size] += window.samples
            seconds[era.size] += window.took_s
    speeds = {size: samples[size] / seconds[size] for size in samples if seconds[size] and samples[size]}
    most = max(speeds, default=1)
    return Scaling(most, speeds[most], speeds[1]) if most > 1 and 1 in speeds else None


def _memory(eras: list[Era]) -> list[Memory]:
    if not eras:
        return []
    found = []
    for _, member in sorted(eras[-1].members.items()):
        windows, known = member.stay.windows, member.stay.world.memory_bytes
        peak = max((one.peak_bytes or 0.0 for one in windows), default=0.0)
        total = peak or max((one.rss_bytes or 0.0 for one in windows), default=0.0)
        parts = {name: known.get(name, 0.0) for name in ("weights", "gradients", "optimizer")}
        total = max(total, sum(parts.values()))
        parts["rest"] = total - sum(parts.values())
        if total:
            found.append(Memory(member.worker, "device" if peak else "process", parts, total))
    return found


def _happenings(trace: Trace, eras: list[Era], events: Mapping[str, list[Event]]) -> list[Happening]:
    found = [*_changes(trace, eras), *_losses(trace, eras)]
    told = [(event.at_s, worker, event) for worker, own in events.items() for event in own]
    told.sort(key=lambda one: one[:2])
    groups: dict[tuple[str, int | None, str], list[tuple[str, Event]]] = {}
    for at_s, worker, event in told:
        key = (event.what, event.step, event.text)
        if key in groups and at_s - groups[key][0][1].at_s > _SAME_EVENT_S:
            found.append(_one_of(trace, groups.pop(key)))
        groups.setdefault(key, []).append((worker, event))
    found += [_one_of(trace, group) for group in groups.values()]
    return sorted(found, key=lambda happening: happening.at_s)


def _changes(trace: Trace, eras: list[Era]) -> Iterator[Happening]:
    """Where training began, and where it continued with other workers."""
    before: Era | None = None
    for era in eras:
        names = tuple(member.worker for _, member in sorted(era.members.items()))
        count = f"{era.size} worker{'s' * (era.size != 1)}"
        if before is None:
            text = f"begins on {count}"
        elif before.launch != era.launch:
            text = f"continues on {count}, which were started again"
        else:
            old = [member.worker for _, member in sorted(before.members.items())]
            parts = [f"{join(sorted(set(names) - set(old)))} joined"] if set(names) - set(old) else []
            parts += [f"without {join(sorted(set(old) - set(names)))}"] if set(old) - set(names) else []
            text = f"continues on {count}" + (f": {', '.join(parts)}" if parts else "")
        yield Happening(era.begin_s - trace.begin_s, None, "training", text, None, None, names)
        before = era


def _losses(trace: Trace, eras: list[Era]) -> Iterator[Happening]:
    """Workers that were lost, and those that were started in their place: as the launcher has told, if it has."""
    known: set[str] = set()
    for launch in trace.launches:
        replaced = find_replaced(launch)
        for told in launch:
            known |= {told.worker} if told.kind in ("lost", "ended") else set()
            if told.kind == "lost":
                yield _happening(trace, told.at_s, "worker lost", told.text, told.worker)
            elif told.kind == "started" and told.worker in replaced:
                text = f"{told.worker} was started in place of {replaced[told.worker]}"
                yield _happening(trace, told.at_s, "worker started", text, told.worker)
            elif told.kind == "lease lost":
                yield _happening(trace, told.at_s, "host cut off", told.text, "")
    for before, after in pairwise(eras):
        left = {one.worker: one for one in before.members.values()}
        gone = set(left) - {one.worker for one in after.members.values()} if before.launch == after.launch else set()
        for worker in sorted(gone - known):
            if not left[worker].process.ended:
                yield _happening(trace, left[worker].process.last_s, "worker lost", f"{worker} was lost", worker)


def _happening(trace: Trace, at_s: float, what: str, text: str, worker: str) -> Happening:
    return Happening(at_s - trace.begin_s, None, what, text, None, None, (worker,) if worker else ())


def join(names: Sequence[str]) -> str:
    """As one lists them in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _one_of(trace: Trace, group: list[tuple[str, Event]]) -> Happening:
    first = group[0][1]
    took_s = max((event.took_s for _, event in group if event.took_s is not None), default=None)
    size = max((event.bytes for _, event in group if event.bytes is not None), default=None)
    workers = tuple(dict.fromkeys(worker for worker, _ in group))
    return Happening(first.at_s - trace.begin_s, first.step, first.what, first.text, took_s, size, workers)


def _environment(trace: Trace) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for process in trace.processes:
        head = process.head
        for name, value in {"host": head.host, "device": head.device, **head.environment}.items():
            if value and head.worker not in found[name][value]:
                found[name][value].append(head.worker)
    return {name: dict(values) for name, values in found.items() if values}
