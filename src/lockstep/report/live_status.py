"""How a run is doing right now, read from the files that its workers write anew once a second (docs/trace.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report.launcher_events import Told, count_restarts, read_told, worker_name

COMPUTE: Final = ("forward", "backward", "update")
STALE_S: Final = 15.0  # nobody has heard of a worker for so long
TAIL_BYTES: Final = 20_000  # of a trace, in which events are few
WORDS: Final = {"checkpoint": "checkpoint saved", "evaluate": "evaluation"}


@dataclass(frozen=True)
class Worker:
    """As it said last."""

    name: str
    rank: int
    host: str
    pid: int
    state: str
    unix_s: float
    step: int
    samples_per_s: float | None
    shares: Mapping[str, float]  # of its time, by phase
    waited_for: str  # the name of the worker that it has waited for most; empty: for none
    memory_bytes: int
    restarts: int = 0  # workers that were lost in its place


@dataclass(frozen=True)
class Event:
    unix_s: float
    text: str


@dataclass(frozen=True)
class Snapshot:
    """Of a run."""

    workers: Sequence[Worker]
    state: str
    step: int
    steps: int | None
    epoch: int
    loss: float | None
    lr: float | None
    global_batch_size: int | None
    samples_per_s: float | None
    metrics: Mapping[str, float]  # what `run.log` noted last
    events: Sequence[Event] = field(default_factory=list)
    lost: int = 0  # workers, since the launcher started

    @property
    def efficiency(self) -> float | None:
        """The share of time in which workers compute, in the mean."""
        shares = [sum(worker.shares.get(name, 0.0) for name in COMPUTE) for worker in self.workers if worker.shares]
        return sum(shares) / len(shares) if shares else None

    @property
    def left_s(self) -> float | None:
        """Until it ends, at the speed of now."""
        if self.steps is None or not self.samples_per_s or not self.global_batch_size:
            return None
        return (self.steps - self.step) * self.global_batch_size / self.samples_per_s


@dataclass(frozen=True)
class Place:
    """Where a run writes."""

    trace: Path
    logs: Path | None


def find(run: Path) -> Place:
    """`run`: the directory of a Run, a folder of the launcher's logs, or of traces."""
    logs, directory = None, run
    if (pointer := _read(run / "launch.json")) is not None and "logs" in pointer:
        logs = Path(pointer["logs"])
    elif (pointer := _read(run / "run.json")) is not None and "directory" in pointer:
        logs, directory = run, Path(pointer["directory"])
    elif (run / "events.jsonl").exists():
        logs = run
    trace = directory / "trace"
    if not trace.is_dir() and any(run.glob("*.jsonl")) and run.name == "trace":
        trace = run
    return Place(trace, logs)


def look(place: Place, *, now_s: float | None = None, since_s: float = 0.0) -> Snapshot | None:
    """None: nobody has said anything yet, or not since then."""
    now_s = time.time() if now_s is None else now_s
    told = [found for path in sorted(place.trace.glob("*.now")) if (found := _read(path)) is not None]
    told = [one for one in told if one.get("unix_s", 0.0) >= since_s]
    if not told:
        return None
    newest = max(told, key=lambda one: one.get("unix_s", 0.0))
    # Those of earlier generations, and of earlier runs, have fallen silent.
    present = [one for one in told if newest["unix_s"] - one.get("unix_s", 0.0) < STALE_S]
    by_rank: dict[int, dict[str, Any]] = {}
    for one in sorted(present, key=lambda one: (one.get("generation") or 0, one.get("unix_s", 0.0))):
        if one.get("generation") == newest.get("generation") and one.get("rank") is not None:
            by_rank[one["rank"]] = one
    leader = by_rank.get(0, newest)
    launched = read_told(place.logs / "events.jsonl") if place.logs is not None else []
    restarts, several_hosts = count_restarts(launched), len({one.get("host") for one in by_rank.values()}) > 1
    names = {rank: _name(one, several_hosts=several_hosts) for rank, one in by_rank.items()}
    is_silent = now_s - newest["unix_s"] > STALE_S
    state = "silent" if is_silent and newest.get("state") not in ("ended", "failed") else str(newest.get("state", ""))
    return Snapshot(
        workers=[_worker(one, names, restarts.get(names[rank], 0)) for rank, one in sorted(by_rank.items())],
        state=state,
        step=int(newest.get("step") or 0),
        steps=newest.get("steps"),
        epoch=int(newest.get("epoch") or 0),
        loss=leader.get("loss"),
        lr=leader.get("lr"),
        global_batch_size=newest.get("global_batch_size"),
        samples_per_s=leader.get("samples_per_s"),
        metrics=leader.get("metrics") or {},
        events=_events(launched, place.trace),
        lost=sum(one.kind == "lost" for one in launched),
    )


def _name(said: Mapping[str, Any], *, several_hosts: bool) -> str:
    return worker_name(str(said.get("worker", "?")), str(said.get("host", "")) if several_hosts else "")


def _worker(said: Mapping[str, Any], names: Mapping[int, str], restarts: int) -> Worker:
    """`names`: of all workers, by rank."""
    phases: Mapping[str, float] = said.get("phases") or {}
    whole = sum(phases.values())
    waited: Mapping[str, float] = said.get("waited_for") or {}
    longest = int(max(waited, key=lambda rank: waited[rank])) if waited else -1
    return Worker(
        name=names[int(said["rank"])],
        rank=int(said["rank"]),
        host=str(said.get("host", "")),
        pid=int(said.get("pid", 0)),
        state=str(said.get("state", "")),
        unix_s=float(said.get("unix_s", 0.0)),
        step=int(said.get("step") or 0),
        samples_per_s=said.get("samples_per_s"),
        shares={name: seconds / whole for name, seconds in phases.items()} if whole > 0 else {},
        waited_for=names.get(longest, ""),
        memory_bytes=int(said.get("peak") or said.get("rss") or 0),
        restarts=restarts,
    )


def _events(launched: Iterable[Told], trace: Path) -> list[Event]:
    """The newest last."""
    found = [Event(one.at_s, one.text) for one in launched if one.text]
    told: dict[str, float] = {}  # all workers evaluate, and each says so: once is enough
    for path in sorted(trace.glob("*.jsonl"))[-8:]:
        since_s = _clock_of(path)
        for line in _tail(path, TAIL_BYTES, b'"event"'):
            if line.get("kind") == "event" and line.get("what") != "recovery":
                what = f"{WORDS.get(line['what'], line['what'])} at step {line.get('step')}"
                text = f"{what}: {line['text']}" if "text" in line else what
                told[text] = max(told.get(text, 0.0), since_s + float(line.get("t", 0.0)))
    found += [Event(unix_s, text) for text, unix_s in told.items()]
    return sorted(found, key=lambda event: event.unix_s)[-50:]


def _clock_of(path: Path) -> float:
    """What makes a time of this file, which is monotonic, one of the calendar."""
    try:
        with path.open() as file:
            head = json.loads(file.readline())
        return float(head["unix_s"]) - float(head["t"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _tail(path: Path, size_bytes: int, about: bytes) -> Iterable[dict[str, Any]]:
    """Of the last lines those that have `about` in them: to parse all of them takes a while."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size_bytes))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        if about not in line:
            continue
        try:
            found = json.loads(line)
        except ValueError:
            continue  # cut off
        if isinstance(found, dict):
            yield found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def require(run: Path) -> Place:
    """Raises LockstepError where there is no run."""
    place = find(run)
    if not place.trace.is_dir():
        raise LockstepError(
            f"there is no trace of a run in {run}: give the directory of a lockstep.Run, or the folder of its "
            "launcher's logs. A Run writes one when its first step is done, unless it has trace=False"
        )
    return place
