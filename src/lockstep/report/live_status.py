"""Reads the current state of a run from the status files that its workers rewrite every second (docs/trace.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report.launcher_events import LauncherEvent, count_restarts, read_launcher_events, worker_name

COMPUTE: Final = ("forward", "backward", "update")
STALE_S: Final = 15.0  # a worker whose status file is older counts as silent
TAIL_BYTES: Final = 20_000  # read from the end of a trace file; events are rare in it
WORDS: Final = {"checkpoint": "checkpoint saved", "evaluate": "evaluation"}


@dataclass(frozen=True)
class WorkerStatus:
    """The last status that a worker wrote."""

    name: str
    rank: int
    host: str
    pid: int
    state: str
    unix_s: float
    step: int
    samples_per_s: float | None
    shares: Mapping[str, float]  # phase -> share of its time
    waited_for: str  # name of the worker that it waited for most; empty if it waited for none
    memory_bytes: int
    restarts: int = 0  # how many workers were started in its slot before it


@dataclass(frozen=True)
class StatusEvent:
    unix_s: float
    text: str


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment."""

    workers: Sequence[WorkerStatus]
    state: str
    step: int
    steps: int | None
    epoch: int
    loss: float | None
    lr: float | None
    global_batch_size: int | None
    samples_per_s: float | None
    metrics: Mapping[str, float]  # last values passed to `run.log`
    events: Sequence[StatusEvent] = field(default_factory=list)
    lost: int = 0  # workers lost since the launcher started

    @property
    def efficiency(self) -> float | None:
        """Share of time in which workers compute, averaged over the workers."""
        shares = [sum(worker.shares.get(name, 0.0) for name in COMPUTE) for worker in self.workers if worker.shares]
        return sum(shares) / len(shares) if shares else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the run ends at its current speed; None if that is not known."""
        if self.steps is None or not self.samples_per_s or not self.global_batch_size:
            return None
        return (self.steps - self.step) * self.global_batch_size / self.samples_per_s


@dataclass(frozen=True)
class RunPaths:
    """The folders that a run writes to; `logs` is None without a launcher."""

    trace: Path
    logs: Path | None


def find_run(run: Path) -> RunPaths:
    """Finds the folders of `run`: the directory of a Run, a launcher's log folder, or a trace folder.

    The folders need not exist.
    """
    logs, directory = None, run
    if (pointer := _read_json(run / "launch.json")) is not None and "logs" in pointer:
        logs = Path(pointer["logs"])
    elif (pointer := _read_json(run / "run.json")) is not None and "directory" in pointer:
        logs, directory = run, Path(pointer["directory"])
    elif (run / "events.jsonl").exists():
        logs = run
    trace = directory / "trace"
    if not trace.is_dir() and any(run.glob("*.jsonl")) and run.name == "trace":
        trace = run
    return RunPaths(trace, logs)


def read_status(paths: RunPaths, *, now_s: float | None = None, since_s: float = 0.0) -> Snapshot | None:
    """Returns the current state, or None if no worker has written its status since `since_s`."""
    now_s = time.time() if now_s is None else now_s
    statuses = [found for path in sorted(paths.trace.glob("*.now")) if (found := _read_json(path)) is not None]
    statuses = [one for one in statuses if one.get("unix_s", 0.0) >= since_s]
    if not statuses:
        return None
    newest = max(statuses, key=lambda one: one.get("unix_s", 0.0))
    # Status files of earlier generations and earlier runs are no longer updated.
    present = [one for one in statuses if newest["unix_s"] - one.get("unix_s", 0.0) < STALE_S]
    by_rank: dict[int, dict[str, Any]] = {}
    for one in sorted(present, key=lambda one: (one.get("generation") or 0, one.get("unix_s", 0.0))):
        if one.get("generation") == newest.get("generation") and one.get("rank") is not None:
            by_rank[one["rank"]] = one
    leader = by_rank.get(0, newest)
    launched = read_launcher_events(paths.logs / "events.jsonl") if paths.logs is not None else []
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
        events=_events(launched, paths.trace),
        lost=sum(one.kind == "lost" for one in launched),
    )


def _name(status: Mapping[str, Any], *, several_hosts: bool) -> str:
    return worker_name(str(status.get("worker", "?")), str(status.get("host", "")) if several_hosts else "")


def _worker(status: Mapping[str, Any], names: Mapping[int, str], restarts: int) -> WorkerStatus:
    """`names[rank]` is the name of each worker."""
    phases: Mapping[str, float] = status.get("phases") or {}
    total_s = sum(phases.values())
    waited: Mapping[str, float] = status.get("waited_for") or {}
    longest = int(max(waited, key=lambda rank: waited[rank])) if waited else -1
    return WorkerStatus(
        name=names[int(status["rank"])],
        rank=int(status["rank"]),
        host=str(status.get("host", "")),
        pid=int(status.get("pid", 0)),
        state=str(status.get("state", "")),
        unix_s=float(status.get("unix_s", 0.0)),
        step=int(status.get("step") or 0),
        samples_per_s=status.get("samples_per_s"),
        shares={name: seconds / total_s for name, seconds in phases.items()} if total_s > 0 else {},
        waited_for=names.get(longest, ""),
        memory_bytes=int(status.get("peak") or status.get("rss") or 0),
        restarts=restarts,
    )


def _events(launched: Iterable[LauncherEvent], trace: Path) -> list[StatusEvent]:
    """Returns the last events of the launcher and the workers, newest last."""
    found = [StatusEvent(one.at_s, one.text) for one in launched if one.text]
    times: dict[str, float] = {}  # text -> last time; all workers report the same evaluation
    for path in sorted(trace.glob("*.jsonl"))[-8:]:
        offset_s = _clock_offset_s(path)
        for line in _tail(path, TAIL_BYTES, b'"event"'):
            if line.get("kind") == "event" and line.get("what") != "recovery":
                what = f"{WORDS.get(line['what'], line['what'])} at step {line.get('step')}"
                text = f"{what}: {line['text']}" if "text" in line else what
                times[text] = max(times.get(text, 0.0), offset_s + float(line.get("t", 0.0)))
    found += [StatusEvent(unix_s, text) for text, unix_s in times.items()]
    return sorted(found, key=lambda event: event.unix_s)[-50:]


def _clock_offset_s(path: Path) -> float:
    """Returns what to add to the monotonic times of this file for seconds since 1970; 0 if its head is damaged."""
    try:
        with path.open() as file:
            head = json.loads(file.readline())
        return float(head["unix_s"]) - float(head["t"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _tail(path: Path, size_bytes: int, about: bytes) -> Iterable[dict[str, Any]]:
    """Yields the last lines that contain `about`, parsed. The others are not parsed, which would be slow."""
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
            continue  # the line was cut off
        if isinstance(found, dict):
            yield found


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def require_run(run: Path) -> RunPaths:
    """Like `find_run`, but raises LockstepError if there is no trace."""
    paths = find_run(run)
    if not paths.trace.is_dir():
        raise LockstepError(
            f"there is no trace of a run in {run}: give the directory of a lockstep.Run, or the folder of its "
            "launcher's logs. A Run writes one when its first step is done, unless it has trace=False"
        )
    return paths
