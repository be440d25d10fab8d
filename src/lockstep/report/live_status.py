"""Reads the current state of a run from the status files that its workers rewrite every second (docs/trace.md)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.report.run_folder import (
    LauncherEvent,
    RunPaths,
    any_number,
    as_mapping,
    find_predecessors,
    integer,
    number,
    parse,
    read_bytes,
    read_last_lines,
    read_launcher_events,
    worker_name,
)

COMPUTE: Final = ("forward", "backward", "update")
STALE_S: Final = 15.0  # a worker whose status file is older counts as silent
TAIL_BYTES: Final = 20_000  # read from the end of a trace file; events are rare in it
HEAD_BYTES: Final = 1 << 16  # the first line of a trace file is shorter
WORDS: Final = {"checkpoint": "checkpoint saved", "evaluate": "evaluation"}


@dataclass(frozen=True)
class WorkerStatus:
    """The last status that a worker wrote."""

    name: str
    pid: int
    shares: Mapping[str, float]  # phase -> share of its time
    waited_for: str  # name of the worker that it waited for most; empty if it waited for none
    memory_bytes: int
    memory: Mapping[str, float] = field(default_factory=dict)  # bytes by kind: see `Run.memory`
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


def read_status(paths: RunPaths, *, now_s: float | None = None, since_s: float = 0.0) -> Snapshot | None:
    """Returns the current state, or None if no worker has written its status since `since_s`."""
    now_s = time.time() if now_s is None else now_s
    statuses = [found for path in sorted(paths.trace.glob("*.now")) if (found := parse(read_bytes(path)))]
    statuses = [one for one in statuses if _written_s(one) >= since_s]
    if not statuses:
        return None
    newest = max(statuses, key=_written_s)
    # Status files of earlier generations and earlier runs are no longer updated.
    present = [one for one in statuses if _written_s(newest) - _written_s(one) < STALE_S]
    generation = integer(newest.get("generation"))
    by_rank: dict[int, Mapping[str, Any]] = {}
    for one in sorted(present, key=_written_s):
        rank, pid = integer(one.get("rank")), integer(one.get("pid"))
        # A pid of 0 or below, which denotes many processes, must not reach a caller of `kill`.
        if integer(one.get("generation")) == generation and rank is not None and pid is not None and pid > 0:
            by_rank[rank] = one
    leader = by_rank.get(0, newest)
    launched = read_launcher_events(paths.logs / "events.jsonl") if paths.logs is not None else []
    before, several_hosts = find_predecessors(launched), len({str(one.get("host")) for one in by_rank.values()}) > 1
    names = {rank: _name(one, several_hosts=several_hosts) for rank, one in by_rank.items()}
    state = str(newest.get("state", ""))
    is_silent = now_s - _written_s(newest) > STALE_S and state not in ("ended", "failed")
    return Snapshot(
        workers=[_worker(one, rank, names, before) for rank, one in sorted(by_rank.items())],
        state="silent" if is_silent else state,
        step=integer(newest.get("step")) or 0,
        steps=integer(newest.get("steps")),
        epoch=integer(newest.get("epoch")) or 0,
        loss=any_number(leader.get("loss")),
        lr=any_number(leader.get("lr")),
        global_batch_size=integer(newest.get("global_batch_size")),
        samples_per_s=number(leader.get("samples_per_s")),
        metrics=_numbers(leader.get("metrics")),
        events=_events(launched, paths.trace),
        lost=sum(one.kind == "lost" for one in launched),
    )


def _written_s(status: Mapping[str, Any]) -> float:
    return number(status.get("unix_s")) or 0.0


def _numbers(found: Any) -> dict[str, float]:
    return {name: value for name, one in as_mapping(found).items() if (value := any_number(one)) is not None}


def _name(status: Mapping[str, Any], *, several_hosts: bool) -> str:
    return worker_name(str(status.get("worker", "?")), str(status.get("host", "")) if several_hosts else "")


def _worker(
    status: Mapping[str, Any], rank: int, names: Mapping[int, str], before: Mapping[str, list[str]]
) -> WorkerStatus:
    """`names[rank]` is the name of each worker, and `before` has for each name the workers in its slot before it."""
    phases, waited = _numbers(status.get("phases")), _numbers(status.get("waited_for"))
    total_s = sum(phases.values())
    longest = integer(max(waited, key=lambda rank: waited[rank])) if waited else None
    return WorkerStatus(
        name=names[rank],
        pid=int(status["pid"]),
        shares={name: seconds / total_s for name, seconds in phases.items()} if total_s > 0 else {},
        waited_for="" if longest is None else names.get(longest, ""),
        memory_bytes=integer(status.get("peak")) or integer(status.get("rss")) or 0,
        memory=_numbers(status.get("memory")),
        restarts=len(before.get(names[rank], ())),
    )


def _events(launched: Iterable[LauncherEvent], trace: Path) -> list[StatusEvent]:
    """Returns the last events of the launcher and the workers, newest last."""
    found = [StatusEvent(one.at_s, one.text) for one in launched if one.text]
    times: dict[str, float] = {}  # text -> last time; all workers report the same evaluation
    for path in sorted(trace.glob("*.jsonl"))[-8:]:
        offset_s = _clock_offset_s(path)
        for raw in read_last_lines(path, TAIL_BYTES):
            line = parse(raw) if b'"event"' in raw else {}  # parsing the others would be slow
            what = str(line.get("what", ""))
            if line.get("kind") == "event" and what not in ("", "recovery"):
                text = f"{WORDS.get(what, what)} at step {line.get('step')}"
                text += f": {line['text']}" if "text" in line else ""
                times[text] = max(times.get(text, 0.0), offset_s + (number(line.get("t")) or 0.0))
    found += [StatusEvent(unix_s, text) for text, unix_s in times.items()]
    return sorted(found, key=lambda event: event.unix_s)[-50:]


def _clock_offset_s(path: Path) -> float:
    """Returns what to add to the monotonic times of this file for seconds since 1970; 0 if its head is damaged."""
    head = parse(read_bytes(path, HEAD_BYTES).partition(b"\n")[0])
    unix_s, t = number(head.get("unix_s")), number(head.get("t"))
    return 0.0 if unix_s is None or t is None else unix_s - t
