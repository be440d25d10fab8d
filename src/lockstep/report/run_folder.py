"""Reads the small files of a run, which may be damaged: where its folders are, and the launcher's events.jsonl.

In damaged JSON a value of the wrong type counts as missing, and is never an error.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError

MOST: Final = 1e15  # seconds, bytes or samples; a larger number is damage
MOST_BYTES: Final = 1_000_000  # read from the end of one launch's events
MOST_LAUNCHES: Final = 50
_ALONE: Final = re.compile(r"\bh0\.(\d+)\b")  # worker id in a run with one launcher
_AMONG: Final = re.compile(r"\b([\w-]+)-[0-9a-f]{6}\.(\d+)\b")  # worker id in a run with one launcher per host
_RANK: Final = re.compile(r"rank(\d+)")  # worker name in a run whose workers cannot be replaced


# ---- JSON ------------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, most: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def read_last_lines(path: Path, most_bytes: int) -> list[bytes]:
    """Returns the lines in the last bytes of a file; the first of them may be cut off."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            return file.read().splitlines()
    except OSError:
        return []


def parse(raw: bytes) -> Mapping[str, Any]:
    """Returns the JSON object; an empty one if it is damaged."""
    try:
        return as_mapping(json.loads(raw.decode(errors="replace")))
    except (ValueError, RecursionError):
        return {}


def as_mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def as_list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def number(found: Any) -> float | None:
    """Returns a count or a time; None for anything else, NaN, or a value beyond `MOST`."""
    value = any_number(found)
    return value if value is not None and abs(value) <= MOST else None  # the comparison is false for NaN


def any_number(found: Any) -> float | None:
    """Returns any number, also NaN, infinity or a huge one, as a loss may be; None if a float cannot hold it."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return None


def integer(found: Any) -> int | None:
    """Returns an integer, also from text: the ranks in `waited_for` are JSON keys."""
    if isinstance(found, str):
        return int(found) if found.isascii() and found.isdigit() and len(found) < 10 else None
    value = number(found)
    return None if value is None else int(value)


# ---- folders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPaths:
    """The folders that a run writes to; `logs` is None without a launcher."""

    trace: Path
    logs: Path | None


def named_folder(pointer: Path, name: str) -> Path | None:
    """Returns the folder that this JSON file names, if it does. A relative path is relative to the file's folder."""
    found = parse(read_bytes(pointer)).get(name)
    return pointer.parent / found if isinstance(found, str) and found else None


def find_run(run: Path) -> RunPaths:
    """Finds the folders of `run`: the directory of a Run, a launcher's log folder, or a trace folder.

    The folders need not exist.
    """
    logs, directory = named_folder(run / "launch.json", "logs"), run
    if logs is None and (found := named_folder(run / "run.json", "directory")) is not None:
        logs, directory = run, found
    elif logs is None and (run / "events.jsonl").exists():
        logs = run
    trace = directory / "trace"
    if not trace.is_dir() and any(run.glob("*.jsonl")) and run.name == "trace":
        trace = run
    return RunPaths(trace, logs)


def require_run(run: Path) -> RunPaths:
    """Like `find_run`, but raises LockstepError if there is no trace."""
    paths = find_run(run)
    if not paths.trace.is_dir():
        raise LockstepError(
            f"there is no trace of a run in {run}: give the directory of a lockstep.Run, or the folder of its "
            "launcher's logs. A Run writes one when its first step is done, unless it has trace=False"
        )
    return paths


# ---- events of the launcher ------------------------------------------------------------------------------------------


def replace_worker_ids(text: str) -> str:
    """Replaces every id of a worker by its name: "worker 3", or "worker 3 on node1"."""
    return _ALONE.sub(r"worker \1", _AMONG.sub(r"worker \2 on \1", text))


def worker_name(worker: str, host: str = "") -> str:
    """Returns the name in the launcher's output: "rank 3" where workers cannot be replaced, else "worker 3".

    `worker` is the name in the trace. A `host` that is not empty is added to the name of a rank.
    """
    if (found := _RANK.fullmatch(worker)) is not None:
        return f"rank {found[1]}" + (f" on {host}" if host else "")
    return replace_worker_ids(worker)


def describe_end(code: int | None) -> str:
    """Describes the end of a worker process with this exit code, which is negative for a signal and None if unknown."""
    if code is None:
        return "was lost"
    if code >= 0:
        return f"failed with exit status {code}"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


@dataclass(frozen=True)
class LauncherEvent:
    """One line of events.jsonl. `kind` is started, lost, ended, or another kind that the launcher writes."""

    at_s: float  # since 1970
    kind: str
    worker: str  # name; empty if the event is not about one worker
    slot: int | None = None
    code: int | None = None
    took_s: float | None = None
    members: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        """A sentence without its full stop; empty for kinds that are not shown."""
        if self.kind == "lost":
            return f"{self.worker} {describe_end(self.code)}"
        if self.kind == "recovered" and self.took_s is not None:
            return f"{self.worker} continues after {1000 * self.took_s:.0f} ms"
        if self.kind == "generation":
            return f"{self.members} worker{'s' * (self.members != 1)}: {self.why}" if self.why else ""
        if self.kind == "lease lost":
            return f"this host's workers were stopped: {self.why}"
        return f"{self.worker} {self.kind}" if self.kind in ("started", "ended") else ""


def read_launcher_events(path: Path) -> list[LauncherEvent]:
    """Returns the events of one launch, oldest first. Damaged lines are skipped; a missing file has no events."""
    lines = read_last_lines(path, MOST_BYTES)
    return [event for raw in lines if (event := _launcher_event(parse(raw))) is not None]


def _launcher_event(line: Mapping[str, Any]) -> LauncherEvent | None:
    at_s, kind = number(line.get("time")), line.get("event")
    if at_s is None or not isinstance(kind, str):
        return None
    return LauncherEvent(
        at_s=at_s,
        kind=kind,
        worker=replace_worker_ids(str(line.get("worker") or "")),
        slot=integer(line.get("slot")),
        code=integer(line.get("code")),
        took_s=number(line.get("took_s")),
        members=len(as_list(line.get("members"))),
        why=replace_worker_ids(str(line.get("why") or "")),
    )


def find_launcher_events(run: Path) -> list[list[LauncherEvent]]:
    """Returns the events of each launch, in order of their start. `run` is its directory or a log folder."""
    found = [events for path in dict.fromkeys(_find_files(run)) if (events := read_launcher_events(path))]
    return sorted(found, key=lambda events: events[0].at_s)


def _find_files(run: Path) -> Iterator[Path]:
    yield run / "events.jsonl"
    home = named_folder(run / "run.json", "directory") or (run.parent if run.name == "trace" else run)
    pointer = parse(read_bytes(home / "launch.json"))
    for logs in [*as_list(pointer.get("earlier")), pointer.get("logs")][-MOST_LAUNCHES:]:
        if isinstance(logs, str):
            yield home / logs / "events.jsonl"  # an absolute path stays as it is
    yield from sorted(run.glob("*/events.jsonl"))


def find_predecessors(events: Iterable[LauncherEvent]) -> dict[str, list[str]]:
    """Returns for each worker those that were started in its slot before it, the oldest first."""
    by_slot: dict[int | None, list[str]] = {}
    found: dict[str, list[str]] = {}
    for one in events:
        if one.kind == "started":
            started = by_slot.setdefault(one.slot, [])
            found[one.worker] = list(started)
            started.append(one.worker)
    return found
