"""Reads the launcher's events.jsonl: when workers started, ended or were lost, and by which names it shows them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.report.lenient_json import as_list, as_mapping, number, parse, read_bytes

MOST_BYTES: Final = 1_000_000  # read from the end of one launch's events
MOST_LAUNCHES: Final = 50
_ALONE: Final = re.compile(r"\bh0\.(\d+)\b")  # worker id in a run with one launcher
_AMONG: Final = re.compile(r"\b([\w-]+)-[0-9a-f]{6}\.(\d+)\b")  # worker id in a run with one launcher per host
_RANK: Final = re.compile(r"rank(\d+)")  # worker name in a run whose workers cannot be replaced


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
    generation: int = 0
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
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    return [event for raw in lines if (event := _launcher_event(as_mapping(parse(raw)))) is not None]


def _launcher_event(line: Mapping[str, Any]) -> LauncherEvent | None:
    at_s, kind = number(line.get("time")), line.get("event")
    if at_s is None or not isinstance(kind, str):
        return None
    slot, code, generation = (number(line.get(name)) for name in ("slot", "code", "number"))
    return LauncherEvent(
        at_s=at_s,
        kind=kind,
        worker=replace_worker_ids(str(line.get("worker") or "")),
        slot=None if slot is None else int(slot),
        code=None if code is None else int(code),
        took_s=number(line.get("took_s")),
        members=len(as_list(line.get("members"))),
        generation=int(generation or 0),
        why=replace_worker_ids(str(line.get("why") or "")),
    )


def find_launcher_events(run: Path) -> list[list[LauncherEvent]]:
    """Returns the events of each launch, in order of their start. `run` is its directory or a log folder."""
    found = [events for path in dict.fromkeys(_find_files(run)) if (events := read_launcher_events(path))]
    return sorted(found, key=lambda events: events[0].at_s)


def _find_files(run: Path) -> Iterator[Path]:
    yield run / "events.jsonl"
    directory = as_mapping(parse(read_bytes(run / "run.json"))).get("directory")
    home = run / directory if isinstance(directory, str) else run.parent if run.name == "trace" else run
    pointer = as_mapping(parse(read_bytes(home / "launch.json")))
    for logs in [*as_list(pointer.get("earlier")), pointer.get("logs")][-MOST_LAUNCHES:]:
        if isinstance(logs, str):
            yield home / logs / "events.jsonl"  # an absolute path stays as it is
    yield from sorted(run.glob("*/events.jsonl"))


def count_restarts(events: Iterable[LauncherEvent]) -> dict[str, int]:
    """Returns for each worker how many workers were started in its slot before it."""
    before: dict[int | None, int] = {}
    found: dict[str, int] = {}
    for one in events:
        if one.kind == "started":
            found[one.worker] = before.get(one.slot, 0)
            before[one.slot] = before.get(one.slot, 0) + 1
    return found


def find_replaced(events: Iterable[LauncherEvent]) -> dict[str, str]:
    """Returns for each replacement the worker that it replaced."""
    by_slot: dict[int | None, str] = {}
    found: dict[str, str] = {}
    for one in events:
        if one.kind == "started":
            if one.slot in by_slot:
                found[one.worker] = by_slot[one.slot]
            by_slot[one.slot] = one.worker
    return found
