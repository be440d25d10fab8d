"""From how a worker ended to the card that says so: facts that it wrote down, its last words, its exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.failures import traceback_parser
from lockstep.failures.card import ASCII, LINES, WIDTH, Box, Card, draw
from lockstep.failures.causes import TOO_EARLY, Evidence, advise, explain
from lockstep.failures.crash_record import ENDED_ITSELF, Facts
from lockstep.failures.traceback_parser import Frame, Trouble
from lockstep.launcher.exit_policy import describe
from lockstep.launcher.output import write_all

_EARLY: Final = re.compile(
    r"^PeerLostError: rank (?P<rank>\d+) \(pid (?P<pid>\d+) on (?P<host>\S+)\) left .*: its program ended"
)

_RAISED_BY_ALL: Final = re.compile(r"(UnevenDataError|NonFiniteError|ReplicaMismatchError|DivergenceError)\b")


@dataclass(frozen=True)
class Dead:
    """A worker that failed, as its launcher knows it."""

    name: str  # "rank 1", "worker 3 on node2"
    of: int  # workers in all
    pid: int
    code: int
    words: list[str]
    log_dir: Path
    log: str  # its file there
    told: bool = False
    early: bool = False  # with status 0, in the middle of its Run
    out_of_memory: str = ""
    trace_name: str = ""  # of its files in the folder of traces
    pids: dict[str, int] = field(default_factory=dict)  # of all workers, by name


def hold(dead: Dead, facts: Facts | None) -> Card:
    """`facts`: what it wrote down, if it did."""
    return make_card(dead, facts, {} if facts is not None else last_seen(dead))


def make_card(dead: Dead, facts: Facts | None, seen: dict[str, Any]) -> Card:
    """Pure. `seen`: how far it was, if it wrote down nothing."""
    found = (
        read_facts(facts) if facts is not None else traceback_parser.read(dead.words) if not dead.early else Trouble()
    )
    evidence = Evidence(found.what, "\n".join(dead.words), dead.code, dead.out_of_memory, dead.told)
    cause = TOO_EARLY if dead.early else explain(evidence)
    if found.cause and cause is None:
        cause = explain(Evidence(found.cause, "", dead.code))
    early = _EARLY.search(found.what)
    ended_itself = facts is not None and facts.kind == ENDED_ITSELF  # of which Python prints no traceback
    what = found.what or _ended(dead)
    if ended_itself and (last := _last_line(dead)) and last not in what:
        what += f"; the last that it said: {last}"
    if found.cause:
        what += f"\nbecause of {found.cause}"
    host = facts.host if facts is not None else socket.gethostname()
    title, who = f"lockstep: {dead.name} failed", f"{name_with_rank(dead, facts)}, pid {dead.pid} on {host}"
    if early is not None:  # with status 0: those who waited for it failed, and are not to blame
        title = f"lockstep: rank {early['rank']} ended before the others"
        who = f"rank {early['rank']} of {dead.of}, pid {early['pid']} on {early['host']}; {dead.name} waited for it"
    elsewhere = named_by_all(found.what, dead)
    if elsewhere is not None:
        title = f"lockstep: {elsewhere} failed"
        who = f"{elsewhere} of {dead.of}, pid {dead.pids[elsewhere]} on {host}; all workers say so"
    return Card(
        title=title,
        who=who,
        what=what,
        place=_place(found.frame),
        where=describe_place(facts.where if facts is not None else seen, is_certain=facts is not None),
        why=cause.why if cause is not None else "",
        do=cause.do if cause is not None else advise(evidence),
        logs=f"{dead.log_dir / dead.log}" + ("\nwith the whole traceback" if found.what and not ended_itself else ""),
    )


def name_with_rank(dead: Dead, facts: Facts | None) -> str:
    """Of an elastic run, whose ranks change: the worker's number stays, and errors speak of the rank that it had."""
    rank, size = (facts.where.get(name) for name in ("rank", "size")) if facts is not None else (None, None)
    if dead.name.startswith("rank ") or rank is None:
        return f"{dead.name} of {dead.of}"
    return f"{dead.name} (rank {rank} of {size} then)"


def read_facts(facts: Facts) -> Trouble:
    """What they are about. Of a SyntaxError and of sys.exit there may be no traceback, but there is a place."""
    lines = facts.trace.splitlines()
    found = traceback_parser.read(lines)
    frame = found.frame or traceback_parser.find_frame(lines)
    if facts.kind == ENDED_ITSELF:
        return Trouble(facts.text, "", frame)
    return Trouble(traceback_parser.shorten(f"{facts.kind}: {facts.text}".rstrip(": ")), found.cause, frame)


def named_by_all(what: str, dead: Dead) -> str | None:
    """Some errors are raised on all workers alike, and name the one that they are about. None: that is us, or none."""
    ranks = re.findall(r"\brank (\d+)", what) if _RAISED_BY_ALL.match(what) else []
    if re.search(r"the end of an epoch: True on rank 0", what):  # it is always compared with that one
        ranks = ["0"]
    name = f"rank {ranks[-1]}" if ranks else dead.name
    return name if name != dead.name and name in dead.pids else None


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


def last_seen(dead: Dead) -> dict[str, Any]:
    """Of a worker that died without a word: what its trace last said, at most a second before."""
    folder = dead.log_dir
    with suppress(OSError, ValueError, KeyError, TypeError):
        folder = Path(json.loads((folder / "run.json").read_bytes())["directory"])
    with suppress(OSError, ValueError, TypeError, KeyError):
        now = json.loads((folder / "trace" / f"{dead.trace_name}.now").read_bytes())
        if now["pid"] == dead.pid:
            return {"step": int(now["step"]) - 1, "epoch": int(now["epoch"])}
    return {}


def could_not_start(error: Exception, workers: int) -> Card:
    """The launcher itself has failed."""
    title, kind = "lockstep: the run could not be started, or watched", type(error).__name__
    if isinstance(error, OSError):
        return Card(title, what=f"could not start {workers} workers: {error}", do="try fewer with -n")
    cause = explain(Evidence(f"{kind}: {error}", "", 1))
    return Card(title, what=f"lockstep: {error}", why=cause.why if cause else "", do=cause.do if cause else "")


def show(card: Card) -> None:
    """As the very last thing."""
    with suppress(OSError):
        write_all(2, ("\n" + draw(card, width=_width(), box=_box())).encode(errors="replace"))


def _ended(dead: Dead) -> str:
    """Without an exception."""
    ended, last = describe(dead.code, early=dead.early).partition(";")[0], _last_line(dead)
    return ended + (f"; the last that it said: {last}" if last else "; it said nothing")


def _last_line(dead: Dead) -> str:
    return next((line.strip()[:300] for line in reversed(dead.words) if line.strip()), "")


def _place(frame: Frame | None) -> tuple[str, ...]:
    if frame is None:
        return ()
    function = f", in {frame.function}" if frame.function and frame.function != "<module>" else ""
    lines = [f"{_short(frame.file)}:{frame.line}{function}"]
    return (*lines, f"    {frame.source}") if frame.source else tuple(lines)


def _short(file: str) -> str:
    """As the user would write it."""
    here = os.path.relpath(file) if os.path.isabs(file) else file
    return file if here.startswith("..") else here


def _box() -> Box:
    with suppress(OSError):
        if os.isatty(2) and "utf" in (getattr(sys.stderr, "encoding", None) or "").lower():
            return LINES
    return ASCII


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns if os.isatty(2) else WIDTH
