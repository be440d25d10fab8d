"""Makes the card of a failed worker from its crash record, the end of its output, and its exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lockstep.failures import traceback_parser
from lockstep.failures.card import ASCII, LINES, TOO_EARLY, WIDTH, Card, Evidence, advise, draw, explain
from lockstep.failures.crash_record import ENDED_ITSELF, CrashRecord
from lockstep.failures.traceback_parser import Frame, ParsedError
from lockstep.launcher.exit_policy import describe
from lockstep.launcher.output import write_all

_EARLY: Final = re.compile(
    r"^PeerLostError: rank (?P<rank>\d+) \(pid (?P<pid>\d+) on (?P<host>\S+)\) left .*: its program ended"
)

_RAISED_BY_ALL: Final = re.compile(r"(UnevenDataError|NonFiniteError|ReplicaMismatchError|DivergenceError)\b")


@dataclass(frozen=True)
class FailedWorker:
    """What the launcher knows of a worker that failed."""

    name: str  # "rank 1", "worker 3 on node2"
    of: int  # number of workers
    pid: int
    code: int
    last_lines: list[str]  # the end of its output
    log_dir: Path
    log: str  # name of its log file there
    stop_sent: bool = False  # the launcher had asked it to stop
    early: bool = False  # it ended with status 0 in the middle of its Run
    out_of_memory: str = ""  # what the kernel's counters say
    trace_name: str = ""  # name of its files in the folder of traces
    pids: dict[str, int] = field(default_factory=dict)  # pids of all workers, by name


def describe_failure(worker: FailedWorker, crash: CrashRecord | None) -> Card:
    """Returns the card. `crash` is what the worker recorded itself, if it did."""
    return make_card(worker, crash, {} if crash is not None else last_seen(worker))


def make_card(worker: FailedWorker, crash: CrashRecord | None, seen: dict[str, Any]) -> Card:
    """Returns the card; pure. `seen` is how far the worker was, if there is no crash record."""
    if crash is not None:
        found = parse_record(crash)
    else:
        found = ParsedError() if worker.early else traceback_parser.read(worker.last_lines)
    memory = crash.where.get("memory") if crash is not None else None
    evidence = Evidence(
        found.what,
        "\n".join(worker.last_lines),
        worker.code,
        worker.out_of_memory,
        worker.stop_sent,
        memory if isinstance(memory, dict) else {},
        str(crash.where.get("device", "")) if crash is not None else "",
    )
    cause = TOO_EARLY if worker.early else explain(evidence)
    if found.cause and cause is None:
        cause = explain(replace(evidence, what=found.cause, last_lines=""))
    early = _EARLY.search(found.what)
    ended_itself = crash is not None and crash.kind == ENDED_ITSELF  # for which Python prints no traceback
    last = next((line.strip()[:300] for line in reversed(worker.last_lines) if line.strip()), "")
    what = found.what
    if not what:  # it ended without an exception
        what = describe(worker.code, early=worker.early).partition(";")[0]
        what += f"; its last output: {last}" if last else "; it printed nothing"
    if ended_itself and last and last not in what:
        what += f"; its last output: {last}"
    if found.cause:
        what += f"\nbecause of {found.cause}"
    host = crash.host if crash is not None else socket.gethostname()
    title, who = f"lockstep: {worker.name} failed", f"{name_with_rank(worker, crash)}, pid {worker.pid} on {host}"
    if early is not None:  # with status 0: the workers that failed only waited for it
        title = f"lockstep: rank {early['rank']} ended before the others"
        who = f"rank {early['rank']} of {worker.of}, pid {early['pid']} on {early['host']}; {worker.name} waited for it"
    elsewhere = named_by_all(found.what, worker)
    if elsewhere is not None:
        title = f"lockstep: {elsewhere} failed"
        who = f"{elsewhere} of {worker.of}, pid {worker.pids[elsewhere]} on {host}; all workers say so"
    return Card(
        title=title,
        who=who,
        what=what,
        place=_place(found.frame),
        where=describe_place(crash.where if crash is not None else seen, is_certain=crash is not None),
        why=cause.why if cause is not None else "",
        do=cause.do if cause is not None else advise(evidence),
        logs=f"{worker.log_dir / worker.log}"
        + ("\nwith the whole traceback" if found.what and not ended_itself else ""),
    )


def name_with_rank(worker: FailedWorker, crash: CrashRecord | None) -> str:
    """Returns the worker's name; in an elastic run, where ranks change, with the rank that its errors name."""
    rank, size = (crash.where.get(name) for name in ("rank", "size")) if crash is not None else (None, None)
    if worker.name.startswith("rank ") or rank is None:
        return f"{worker.name} of {worker.of}"
    return f"{worker.name} (rank {rank} of {size} then)"


def parse_record(crash: CrashRecord) -> ParsedError:
    """Parses a crash record. After a SyntaxError or sys.exit there may be no traceback, but there is a frame."""
    lines = crash.trace.splitlines()
    found = traceback_parser.read(lines)
    frame = found.frame or traceback_parser.find_frame(lines)
    if crash.kind == ENDED_ITSELF:
        return ParsedError(crash.text, "", frame)
    return ParsedError(traceback_parser.shorten(f"{crash.kind}: {crash.text}".rstrip(": ")), found.cause, frame)


def named_by_all(what: str, worker: FailedWorker) -> str | None:
    """Returns the worker that an error names that is raised on all workers; None if it is `worker` itself, or none."""
    ranks = re.findall(r"\brank (\d+)", what) if _RAISED_BY_ALL.match(what) else []
    if re.search(r"the end of an epoch: True on rank 0", what):  # ranks are always compared with rank 0
        ranks = ["0"]
    name = f"rank {ranks[-1]}" if ranks else worker.name
    return name if name != worker.name and name in worker.pids else None


def describe_place(where: dict[str, Any], *, is_certain: bool = True) -> str:
    parts = []
    if "step" in where:
        at = "step" if is_certain else "after step"
        parts.append(f"{at} {where['step']}, epoch {where.get('epoch', 0)} (both count from 0)")
    elif "rank" in where:
        parts.append("before the first step")
    if "shard" in where:
        parts.append(f"shard {where['shard']}")
    if where.get("call"):
        parts.append(f"in {where['call']}")
    return ", ".join(parts)


def last_seen(worker: FailedWorker) -> dict[str, Any]:
    """Returns step and epoch from the trace of a worker that left no crash record; at most a second old."""
    folder = worker.log_dir
    with suppress(OSError, ValueError, KeyError, TypeError):
        folder = Path(json.loads((folder / "run.json").read_bytes())["directory"])
    with suppress(OSError, ValueError, TypeError, KeyError):
        now = json.loads((folder / "trace" / f"{worker.trace_name}.now").read_bytes())
        if now["pid"] == worker.pid:
            return {"step": int(now["step"]) - 1, "epoch": int(now["epoch"])}
    return {}


def could_not_start(error: Exception, workers: int) -> Card:
    """Returns the card for an error of the launcher itself."""
    title, kind = "lockstep: the run could not be started, or watched", type(error).__name__
    if isinstance(error, OSError):
        return Card(title, what=f"could not start {workers} workers: {error}", do="try fewer with -n")
    cause = explain(Evidence(f"{kind}: {error}", "", 1))
    return Card(title, what=f"lockstep: {error}", why=cause.why if cause else "", do=cause.do if cause else "")


def show(card: Card) -> None:
    """Prints the card. Call it last."""
    with suppress(OSError):
        box, width = ASCII, WIDTH
        if os.isatty(2):
            width = shutil.get_terminal_size((WIDTH, 24)).columns
            box = LINES if "utf" in (getattr(sys.stderr, "encoding", None) or "").lower() else ASCII
        write_all(2, ("\n" + draw(card, width=width, box=box)).encode(errors="replace"))


def _place(frame: Frame | None) -> tuple[str, ...]:
    if frame is None:
        return ()
    function = f", in {frame.function}" if frame.function and frame.function != "<module>" else ""
    here = os.path.relpath(frame.file) if os.path.isabs(frame.file) else frame.file
    file = frame.file if here.startswith("..") else here  # relative to the working folder, if it is below it
    return (f"{file}:{frame.line}{function}", *([f"    {frame.source}"] if frame.source else []))
