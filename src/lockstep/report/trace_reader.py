"""Reads the trace of a run (docs/trace.md) into dataclasses. Lines that were cut off are skipped and counted.

All times are seconds since 1970. The workers of a host share one monotonic clock. Its offset to seconds since 1970 is
taken from the first worker of the host, so a wall clock that is set later changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from lockstep.errors import LockstepError
from lockstep.report.run_folder import (
    LauncherEvent,
    any_number,
    as_list,
    as_mapping,
    find_launcher_events,
    integer,
    named_folder,
    number,
    parse,
    read_bytes,
    worker_name,
)

T = TypeVar("T")
PHASES: Final = ("data", "forward", "backward", "exposed", "waiting", "update", "between")
TRACKS: Final = ("main", "comm")
FRESH_S: Final = 15.0  # a worker whose status file is newer is still running; clocks of hosts differ a little
_ANOTHER_BOOT_S: Final = 2.0  # a host whose clock offset differs by more than this was rebooted


@dataclass(frozen=True)
class TraceHead:
    """The first line of a trace file: which process wrote it."""

    worker: str
    pid: int
    host: str
    device: str
    begin_s: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class TraceWorld:
    """How the work is divided from `begin_s` on. Zero or empty values are not known."""

    begin_s: float
    generation: int
    rank: int
    size: int
    backend: str = ""
    shards: int = 0
    global_batch_size: int = 0
    steps: int | None = None
    bucket_bytes: tuple[int, ...] = ()
    bucket_names: tuple[str, ...] = ()
    memory_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceWindow:
    """Consecutive steps as one worker measured them. `samples` counts the samples of all workers."""

    begin_s: float
    end_s: float
    first: int
    count: int
    samples: float
    phases: Mapping[str, float]  # phase -> seconds, for every phase in PHASES
    waited_for: Mapping[int, float]  # rank -> seconds
    loss: float | None
    lr: float | None
    grad_norm: float | None
    rss_bytes: float | None
    peak_bytes: float | None
    graphs_bytes: float | None = None

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class TraceSpan:
    name: str
    track: str
    start_us: float  # since its step began
    took_us: float


@dataclass(frozen=True)
class DetailedStep:
    """A step that was recorded with all its spans."""

    step: int
    begin_s: float
    spans: tuple[TraceSpan, ...]


@dataclass(frozen=True)
class GradientNoise:
    step: int
    batch: float  # samples in the gradient's mean; the last batch of an epoch may be below the global batch size
    scale: float | None


@dataclass(frozen=True)
class LoggedMetrics:
    """The metrics passed to `run.log`, reduced over all workers."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TraceEvent:
    at_s: float
    step: int | None
    what: str
    took_s: float | None = None
    bytes: float | None = None
    text: str = ""


@dataclass(frozen=True)
class GenerationRecord:
    """What one worker recorded as a member of one generation."""

    world: TraceWorld
    windows: list[TraceWindow] = field(default_factory=list)
    detailed_steps: list[DetailedStep] = field(default_factory=list)
    noises: list[GradientNoise] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # by step; only of a run for `lockstep plan`


@dataclass(frozen=True)
class TraceProcess:
    """One trace file: one worker process, from start to end."""

    head: TraceHead
    records: list[GenerationRecord]
    events: list[TraceEvent]
    last_s: float  # time of its last line
    ended: bool  # it wrote a line of kind `end`
    left_out: int  # lines that could not be read
    logged: list[LoggedMetrics]


@dataclass(frozen=True)
class Trace:
    name: str  # name of the run
    folder: Path
    processes: tuple[TraceProcess, ...]  # in order of their start
    is_running: bool
    launches: tuple[tuple[LauncherEvent, ...], ...] = ()  # launches[i]: events that the launcher wrote in launch i

    @property
    def begin_s(self) -> float:
        return self.processes[0].head.begin_s

    @property
    def end_s(self) -> float:
        return max(process.last_s for process in self.processes)


def read_trace(run: Path, *, now_s: float) -> Trace:
    """Reads the trace of `run`: the directory of a Run, a launcher's log folder, or the trace folder itself.

    Raises LockstepError if there is no trace, or if it is empty or cannot be read.
    """
    folders = find_folders(run)
    files = sorted(path for folder in folders for path in folder.glob("*.jsonl"))
    offsets: dict[str, list[float]] = {}
    found = []
    for path in files:
        try:
            process = read_process(path.read_bytes().splitlines(), offsets)
        except OSError as error:
            raise LockstepError(f"the trace {path} cannot be read: {error.strerror}; let this user read it") from None
        if process is not None:
            found.append(process)
    if not found:
        raise LockstepError(
            f"the trace in {folders[0]} is empty: {len(files)} files, and none of them has a head line; workers "
            "write when they begin to train, so wait for the first step, or look into their logs for why there was none"
        )
    several_hosts = len({process.head.host for process in found}) > 1
    for at, process in enumerate(found):  # the name that the launcher shows
        head = process.head
        name = worker_name(head.worker, head.host if several_hosts else "")
        found[at] = replace(process, head=replace(head, worker=name))
    found.sort(key=lambda process: (process.head.begin_s, process.head.worker, process.head.pid))
    home = folders[0].parent if folders[0].name == "trace" else folders[0]
    alive = any(_is_alive(path, now_s) for folder in folders for path in folder.glob("*.now"))
    launches = tuple(tuple(launch) for launch in find_launcher_events(run))
    return Trace(home.resolve().name or str(home), folders[0], tuple(found), alive, launches)


def find_folders(run: Path) -> list[Path]:
    """Returns the folders with trace files. Several hosts may each have one in a shared log folder.

    Raises LockstepError if there is none.
    """
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise LockstepError(
            f"{run} {what}; `lockstep report` takes the directory of a lockstep.Run, or the folder of logs that "
            "`lockstep run` prints"
        )
    tried = [run / "trace", run]
    if (directory := named_folder(run / "run.json", "directory")) is not None:
        tried.append(directory / "trace")
    for folder in tried:
        if _has_trace(folder):
            return [folder]
    shared = sorted(folder for folder in run.glob("*/trace") if _has_trace(folder))
    if shared:
        return shared
    raise LockstepError(
        f"{run} holds no trace: there is no *.jsonl file of a worker in {run / 'trace'}. A lockstep.Run writes one "
        "while it trains, if it has a directory or was started by `lockstep run`, and not with Run(trace=False)"
    )


def read_process(lines: Iterable[bytes], offsets: dict[str, list[float]]) -> TraceProcess | None:
    """Reads one trace file. Returns None if it has no head.

    `offsets[host]` lists the known clock offsets of a host, one per boot; this function may append to it.
    """
    head: TraceHead | None = None
    offset = last_s = 0.0
    ended, left_out = False, 0
    records: list[GenerationRecord] = []
    events: list[TraceEvent] = []
    logged: list[LoggedMetrics] = []
    for raw in lines:
        line = parse(raw)
        kind, t = line.get("kind"), number(line.get("t"))
        if head is None:
            head, offset = _head(line, offsets) if kind == "head" else (None, 0.0)
            left_out += head is None
            last_s = head.begin_s if head is not None else 0.0
            continue
        at_s = None if t is None else t + offset
        is_read = bool(line)  # an unknown kind is not damage
        if kind == "world":
            world = _world(line, at_s)
            is_read = _add(records, None if world is None else GenerationRecord(world))
        elif kind == "event":
            is_read = _add(events, _event(line, at_s))
        elif kind == "metrics":
            is_read = _add(logged, _logged(line))
        elif kind == "end":
            ended = True
        elif kind in ("steps", "spans", "noise", "loss"):
            if not records:  # the `world` line is missing
                digits = head.worker[len(head.worker.rstrip("0123456789")) :]
                records.append(GenerationRecord(TraceWorld(head.begin_s, 0, integer(digits) or 0, 1)))
            record = records[-1]
            if kind == "steps":
                is_read = _add(record.windows, _window(line, offset))
            elif kind == "spans":
                is_read = _add(record.detailed_steps, _detailed_step(line, offset))
            elif kind == "loss":
                step, loss = integer(line.get("step")), number(line.get("loss"))
                if is_read := step is not None and "loss" in line:
                    record.losses[step + 1] = math.nan if loss is None else loss
            else:
                is_read = _add(record.noises, _noise(line))
            at_s = at_s or (record.windows[-1].end_s if record.windows else record.world.begin_s)
        left_out += not is_read
        last_s = max(last_s, at_s or 0.0)
    if head is None:
        return None
    return TraceProcess(head, records, events, last_s, ended, left_out, logged)


def _add(items: list[T], item: T | None) -> bool:
    """Adds the item, unless it is None, which a damaged line gives. Returns whether it was added."""
    items += [item] if item is not None else []
    return item is not None


def _head(line: Mapping[str, Any], offsets: dict[str, list[float]]) -> tuple[TraceHead | None, float]:
    t, unix_s = number(line.get("t")), number(line.get("unix_s"))
    if t is None or unix_s is None:
        return None, 0.0
    host = str(line.get("host", ""))
    same_boot = [one for one in offsets.get(host, ()) if abs(one - (unix_s - t)) < _ANOTHER_BOOT_S]
    offset = same_boot[0] if same_boot else unix_s - t
    if not same_boot:
        offsets.setdefault(host, []).append(offset)
    environment = {str(name): str(value) for name, value in as_mapping(line.get("environment")).items()}
    worker, pid = str(line.get("worker", "worker")), integer(line.get("pid")) or 0
    return TraceHead(worker, pid, host, str(line.get("device", "")), t + offset, environment), offset


def _world(line: Mapping[str, Any], at_s: float | None) -> TraceWorld | None:
    rank, size, generation = (integer(line.get(name)) for name in ("rank", "size", "generation"))
    if at_s is None or rank is None or size is None or size < 1:
        return None
    return TraceWorld(
        at_s,
        generation or 0,
        rank,
        size,
        backend=str(line.get("backend") or ""),
        shards=integer(line.get("shards")) or 0,
        global_batch_size=integer(line.get("global_batch_size")) or 0,
        steps=integer(line.get("steps")),
        bucket_bytes=tuple(integer(one) or 0 for one in as_list(line.get("buckets"))),
        bucket_names=tuple(_bucket_name(one) for one in as_list(line.get("bucket_names"))),
        memory_bytes={str(name): number(one) or 0.0 for name, one in as_mapping(line.get("memory")).items()},
    )


def _window(line: Mapping[str, Any], offset: float) -> TraceWindow | None:
    begin, end, first, count = (number(line.get(name)) for name in ("t0", "t1", "first", "count"))
    if begin is None or end is None or first is None or count is None or count < 1 or end < begin:
        return None
    phases = as_mapping(line.get("phases"))
    waited = {integer(rank): number(s) for rank, s in as_mapping(line.get("waited_for")).items()}
    return TraceWindow(
        begin_s=begin + offset,
        end_s=end + offset,
        first=int(first) + 1,  # reports count steps from 1
        count=int(count),
        samples=number(line.get("samples")) or 0.0,
        phases={name: max(0.0, number(phases.get(name)) or 0.0) for name in PHASES},
        waited_for={rank: s for rank, s in waited.items() if rank is not None and s is not None and s > 0},
        loss=any_number(line.get("loss")),
        lr=any_number(line.get("lr")),
        grad_norm=any_number(line.get("grad_norm")),
        rss_bytes=number(line.get("rss")),
        peak_bytes=number(line.get("peak")),
        graphs_bytes=number(line.get("graphs")),
    )


def _detailed_step(line: Mapping[str, Any], offset: float) -> DetailedStep | None:
    step, t = integer(line.get("step")), number(line.get("t"))
    if step is None or t is None:
        return None
    return DetailedStep(step + 1, t + offset, tuple(_spans(as_list(line.get("spans")))))


def _noise(line: Mapping[str, Any]) -> GradientNoise | None:
    step, batch = integer(line.get("step")), number(line.get("batch"))
    return None if step is None else GradientNoise(step + 1, batch or 0.0, number(line.get("scale")))


def _spans(found: Iterable[Any]) -> Iterator[TraceSpan]:
    for one in found:
        if not isinstance(one, list) or len(one) < 4:
            continue
        start, took = number(one[2]), number(one[3])
        if start is not None and took is not None and took >= 0 and one[1] in TRACKS:
            yield TraceSpan(str(one[0]), one[1], start, took)


def _event(line: Mapping[str, Any], at_s: float | None) -> TraceEvent | None:
    if at_s is None or not line.get("what"):
        return None
    took_s, size = number(line.get("took_s")), number(line.get("bytes"))
    return TraceEvent(at_s, integer(line.get("step")), str(line["what"]), took_s, size, str(line.get("text") or ""))


def _logged(line: Mapping[str, Any]) -> LoggedMetrics | None:
    step, found = integer(line.get("step")), line.get("metrics")
    if step is None or not isinstance(found, dict):
        return None
    metrics = {str(name): value for name, one in found.items() if (value := any_number(one)) is not None}
    return LoggedMetrics(step, metrics)


def _bucket_name(found: Any) -> str:
    if not isinstance(found, list) or len(found) < 2:
        return str(found)
    first, last = str(found[0]), str(found[1])
    return first if first == last else f"{first} to {last}"


def _has_trace(folder: Path) -> bool:
    """The directory of a Run also holds other *.jsonl files; trace files begin with a head, unless it was cut off."""
    return any(folder.name == "trace" or b'"head"' in read_bytes(path, 4096) for path in folder.glob("*.jsonl"))


def _is_alive(path: Path, now_s: float) -> bool:
    now = parse(read_bytes(path))
    unix_s = number(now.get("unix_s"))
    return unix_s is not None and abs(now_s - unix_s) < FRESH_S and now.get("state") != "ended"
