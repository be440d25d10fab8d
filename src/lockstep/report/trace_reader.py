"""The trace of a run (docs/trace.md), read into values. What was cut off is left out and counted.

All times are seconds since 1970. A host's workers share one clock, which cannot be set; what it stands for in seconds
since 1970 is taken from the first of them, so that a wall clock that is set later moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report.launcher_events import Told, find_told, worker_name
from lockstep.report.lenient_json import any_number, bytes_of, list_of, load, mapping_of, number, whole

PHASES: Final = ("data", "forward", "backward", "exposed", "waiting", "update", "between")
TRACKS: Final = ("main", "comm")
FRESH_S: Final = 15.0  # who wrote a sign of life since then is still at work; clocks of hosts differ a little
_ANOTHER_BOOT_S: Final = 2.0  # a host whose clock stands for something else by more than that was started again


@dataclass(frozen=True)
class Head:
    worker: str
    pid: int
    host: str
    device: str
    begin_s: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class World:
    """How the work is shared out from `begin_s` on. Zero and empty: not known."""

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
class Window:
    """Some steps in a row, as one worker spent them. `samples` are those of all workers."""

    begin_s: float
    end_s: float
    first: int
    count: int
    samples: float
    phases: Mapping[str, float]  # all of PHASES
    waited_for: Mapping[int, float]  # rank -> seconds
    loss: float | None
    lr: float | None
    grad_norm: float | None
    rss_bytes: float | None
    peak_bytes: float | None

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def took_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Span:
    name: str
    track: str
    start_us: float  # after the begin of its step
    took_us: float


@dataclass(frozen=True)
class Closeup:
    """A step that was looked at closely."""

    step: int
    begin_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Noise:
    step: int
    batch: float  # samples in the mean, which is less than the global batch where the last one of an epoch is
    scale: float | None


@dataclass(frozen=True)
class Logged:
    """What `run.log` was given, over all workers."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    at_s: float
    step: int | None
    what: str
    took_s: float | None = None
    bytes: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Stay:
    """What one worker did as one member of one generation."""

    world: World
    windows: tuple[Window, ...]
    closeups: tuple[Closeup, ...]
    noises: tuple[Noise, ...]


@dataclass(frozen=True)
class Process:
    """One file: one worker process, from its begin to its end."""

    head: Head
    stays: tuple[Stay, ...]
    events: tuple[Event, ...]
    last_s: float  # its last sign of life
    ended: bool  # it said so itself
    left_out: int  # lines that could not be read
    logged: tuple[Logged, ...] = ()


@dataclass(frozen=True)
class Trace:
    name: str  # of the run
    folder: Path
    processes: tuple[Process, ...]  # the first to begin comes first
    is_going_on: bool
    launches: tuple[tuple[Told, ...], ...] = ()  # what the launcher told, in each of them

    @property
    def begin_s(self) -> float:
        return self.processes[0].head.begin_s

    @property
    def end_s(self) -> float:
        return max(process.last_s for process in self.processes)


def read_trace(run: Path, *, now_s: float) -> Trace:
    """run: the directory of a Run, a launcher's folder of logs, or the trace's own folder."""
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
            f"the trace in {folders[0]} is empty: {len(files)} files, and none of them says who wrote it; workers "
            "write when they begin to train, so wait for the first step, or look into their logs for why there was none"
        )
    found = [_named(process, several_hosts=len({one.head.host for one in found}) > 1) for process in found]
    found.sort(key=lambda process: (process.head.begin_s, process.head.worker, process.head.pid))
    home = folders[0].parent if folders[0].name == "trace" else folders[0]
    alive = any(_is_alive(path, now_s) for folder in folders for path in folder.glob("*.now"))
    told = tuple(tuple(launch) for launch in find_told(run))
    return Trace(home.resolve().name or str(home), folders[0], tuple(found), alive, told)


def _named(process: Process, *, several_hosts: bool) -> Process:
    """With the worker's name as people know it, in place of the one in the file."""
    head = process.head
    return replace(process, head=replace(head, worker=worker_name(head.worker, head.host if several_hosts else "")))


def find_folders(run: Path) -> list[Path]:
    """Those with the files of the trace. Several hosts may each have one, in a folder of logs that they share."""
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise LockstepError(
            f"{run} {what}; `lockstep report` takes the directory of a lockstep.Run, or the folder of logs that "
            "`lockstep run` prints"
        )
    tried = [run / "trace", run]
    directory = mapping_of(load(bytes_of(run / "run.json"))).get("directory")
    if isinstance(directory, str) and directory:
        tried.append(run / directory / "trace")  # an absolute one stays as it is
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


def read_process(lines: Iterable[bytes], offsets: dict[str, list[float]]) -> Process | None:
    """One file. None without a head. offsets: host -> what its clock stands for, which this file may add to."""
    head: Head | None = None
    offset = last_s = 0.0
    ended, left_out = False, 0
    stays: list[_Stay] = []
    events: list[Event] = []
    logged: list[Logged] = []
    for raw in lines:
        line = mapping_of(load(raw))
        kind, t = line.get("kind"), number(line.get("t"))
        if head is None:
            head, offset = _head(line, offsets) if kind == "head" else (None, 0.0)
            left_out += head is None
            last_s = head.begin_s if head is not None else 0.0
            continue
        at_s = None if t is None else t + offset
        known: object = line  # a kind that is not known here is no damage
        if kind == "world":
            known = world = _world(line, at_s)
            stays += [_Stay(world)] if world is not None else []
        elif kind == "event":
            known = event = _event(line, at_s)
            events += [event] if event is not None else []
        elif kind == "metrics":
            known = noted = _logged(line)
            logged += [noted] if noted is not None else []
        elif kind == "end":
            ended = True
        elif kind in ("steps", "spans", "noise"):
            if not stays:  # the line that said so is lost
                stays.append(_Stay(World(head.begin_s, 0, _rank_of(head.worker), 1)))
            known, at_s = stays[-1].take(kind, line, offset), at_s or stays[-1].last_s
        elif not line:
            known = None
        left_out += known is None
        last_s = max(last_s, at_s or 0.0)
    if head is None:
        return None
    return Process(head, tuple(stay.done() for stay in stays), tuple(events), last_s, ended, left_out, tuple(logged))


class _Stay:
    """A Stay that is being read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._windows: list[Window] = []
        self._closeups: list[Closeup] = []
        self._noises: list[Noise] = []

    @property
    def last_s(self) -> float:
        return self._windows[-1].end_s if self._windows else self._world.begin_s

    def take(self, kind: str, line: Mapping[str, Any], offset: float) -> object:
        """None: it makes no sense."""
        if kind == "steps":
            window = _window(line, offset)
            self._windows += [window] if window is not None else []
            return window
        if kind == "spans":
            closeup = _closeup(line, offset)
            self._closeups += [closeup] if closeup is not None else []
            return closeup
        step, batch = whole(line.get("step")), number(line.get("batch"))
        if step is None:
            return None
        noise = Noise(step + 1, batch or 0.0, number(line.get("scale")))
        self._noises.append(noise)
        return noise

    def done(self) -> Stay:
        return Stay(self._world, tuple(self._windows), tuple(self._closeups), tuple(self._noises))


def _head(line: Mapping[str, Any], offsets: dict[str, list[float]]) -> tuple[Head | None, float]:
    t, unix_s = number(line.get("t")), number(line.get("unix_s"))
    if t is None or unix_s is None:
        return None, 0.0
    host = str(line.get("host", ""))
    same_boot = [one for one in offsets.get(host, ()) if abs(one - (unix_s - t)) < _ANOTHER_BOOT_S]
    offset = same_boot[0] if same_boot else unix_s - t
    if not same_boot:
        offsets.setdefault(host, []).append(offset)
    environment = {str(name): str(value) for name, value in mapping_of(line.get("environment")).items()}
    worker, pid = str(line.get("worker", "worker")), whole(line.get("pid")) or 0
    return Head(worker, pid, host, str(line.get("device", "")), t + offset, environment), offset


def _world(line: Mapping[str, Any], at_s: float | None) -> World | None:
    rank, size, generation = (whole(line.get(name)) for name in ("rank", "size", "generation"))
    if at_s is None or rank is None or size is None or size < 1:
        return None
    names = [_bucket_name(one) for one in list_of(line.get("bucket_names"))]
    memory = {str(name): number(value) or 0.0 for name, value in mapping_of(line.get("memory")).items()}
    bare = World(at_s, generation or 0, rank, size, str(line.get("backend") or ""), memory_bytes=memory)
    return replace(
        bare,
        shards=whole(line.get("shards")) or 0,
        global_batch_size=whole(line.get("global_batch_size")) or 0,
        steps=whole(line.get("steps")),
        bucket_bytes=tuple(whole(one) or 0 for one in list_of(line.get("buckets"))),
        bucket_names=tuple(names),
    )


def _window(line: Mapping[str, Any], offset: float) -> Window | None:
    begin, end, first, count = (number(line.get(name)) for name in ("t0", "t1", "first", "count"))
    if begin is None or end is None or first is None or count is None or count < 1 or end < begin:
        return None
    phases = mapping_of(line.get("phases"))
    waited = {whole(rank): number(s) for rank, s in mapping_of(line.get("waited_for")).items()}
    return Window(
        begin_s=begin + offset,
        end_s=end + offset,
        first=int(first) + 1,  # people count from 1
        count=int(count),
        samples=number(line.get("samples")) or 0.0,
        phases={name: max(0.0, number(phases.get(name)) or 0.0) for name in PHASES},
        waited_for={rank: s for rank, s in waited.items() if rank is not None and s is not None and s > 0},
        loss=any_number(line.get("loss")),
        lr=any_number(line.get("lr")),
        grad_norm=any_number(line.get("grad_norm")),
        rss_bytes=number(line.get("rss")),
        peak_bytes=number(line.get("peak")),
    )


def _closeup(line: Mapping[str, Any], offset: float) -> Closeup | None:
    step, t = whole(line.get("step")), number(line.get("t"))
    if step is None or t is None:
        return None
    return Closeup(step + 1, t + offset, tuple(_spans(list_of(line.get("spans")))))


def _spans(found: Iterable[Any]) -> Iterator[Span]:
    for one in found:
        if not isinstance(one, list) or len(one) < 4:
            continue
        start, took = number(one[2]), number(one[3])
        if start is not None and took is not None and took >= 0 and one[1] in TRACKS:
            yield Span(str(one[0]), one[1], start, took)


def _event(line: Mapping[str, Any], at_s: float | None) -> Event | None:
    if at_s is None or not line.get("what"):
        return None
    took_s, size = number(line.get("took_s")), number(line.get("bytes"))
    return Event(at_s, whole(line.get("step")), str(line["what"]), took_s, size, str(line.get("text") or ""))


def _logged(line: Mapping[str, Any]) -> Logged | None:
    step, found = whole(line.get("step")), line.get("metrics")
    if step is None or not isinstance(found, dict):
        return None
    metrics = {str(name): value for name, one in found.items() if (value := any_number(one)) is not None}
    return Logged(step, metrics)


def _bucket_name(found: Any) -> str:
    if not isinstance(found, list) or len(found) < 2:
        return str(found)
    first, last = str(found[0]), str(found[1])
    return first if first == last else f"{first} to {last}"


def _has_trace(folder: Path) -> bool:
    """The directory of a Run holds other *.jsonl files, too; ours begin with a head, unless even that was cut off."""
    return any(folder.name == "trace" or b'"head"' in bytes_of(path, 4096) for path in folder.glob("*.jsonl"))


def _is_alive(path: Path, now_s: float) -> bool:
    now = mapping_of(load(bytes_of(path)))
    unix_s = number(now.get("unix_s"))
    return unix_s is not None and abs(now_s - unix_s) < FRESH_S and now.get("state") != "ended"


def _rank_of(worker: str) -> int:
    digits = worker[len(worker.rstrip("0123456789")) :]
    return whole(digits) or 0
