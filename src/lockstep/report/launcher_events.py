"""What the launcher of a run knows: how it calls the workers, and what became of them (its events.jsonl)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.report.lenient_json import bytes_of, list_of, load, mapping_of, number

MOST_BYTES: Final = 1_000_000  # of the events of one launch that are read
MOST_LAUNCHES: Final = 50
_ALONE: Final = re.compile(r"\bh0\.(\d+)\b")  # the id of a worker, where one launcher has all of them
_AMONG: Final = re.compile(r"\b([\w-]+)-[0-9a-f]{6}\.(\d+)\b")  # and where every host has a launcher
_RANK: Final = re.compile(r"rank(\d+)")  # a run whose workers cannot be replaced


def in_words(text: str) -> str:
    """Replaces every id of a worker by its name: "worker 3", or "worker 3 on node1"."""
    return _ALONE.sub(r"worker \1", _AMONG.sub(r"worker \2 on \1", text))


def worker_name(worker: str, host: str = "") -> str:
    """Returns the name that the launcher's output has: "rank 3" where workers cannot be replaced, else "worker 3".

    `worker` is its name in the trace; `host`: to be named too.
    """
    if (found := _RANK.fullmatch(worker)) is not None:
        return f"rank {found[1]}" + (f" on {host}" if host else "")
    return in_words(worker)


def describe_end(code: int | None) -> str:
    """What happened to a worker whose process ended with this code, which is negative for a signal."""
    if code is None:
        return "was lost"
    if code >= 0:
        return f"failed with exit status {code}"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


@dataclass(frozen=True)
class Told:
    """One event, in the launcher's words. `kind`: started, lost, ended, or another one that it may write."""

    at_s: float  # since 1970
    kind: str
    worker: str  # its name; empty: not about one worker
    slot: int | None = None
    code: int | None = None
    took_s: float | None = None
    members: int = 0
    generation: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        """A sentence without its full stop; empty: not worth one."""
        if self.kind == "lost":
            return f"{self.worker} {describe_end(self.code)}"
        if self.kind == "recovered" and self.took_s is not None:
            return f"{self.worker} continues after {1000 * self.took_s:.0f} ms"
        if self.kind == "generation":
            return f"{self.members} worker{'s' * (self.members != 1)}: {self.why}" if self.why else ""
        if self.kind == "lease lost":
            return f"this host's workers were stopped: {self.why}"
        return f"{self.worker} {self.kind}" if self.kind in ("started", "ended") else ""


def read_told(path: Path) -> list[Told]:
    """The events of one launch, oldest first. What is cut off or no event is left out; no file: no events."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    return [told for raw in lines if (told := _told(mapping_of(load(raw)))) is not None]


def _told(line: Mapping[str, Any]) -> Told | None:
    at_s, kind = number(line.get("time")), line.get("event")
    if at_s is None or not isinstance(kind, str):
        return None
    slot, code, generation = (number(line.get(name)) for name in ("slot", "code", "number"))
    return Told(
        at_s=at_s,
        kind=kind,
        worker=in_words(str(line.get("worker") or "")),
        slot=None if slot is None else int(slot),
        code=None if code is None else int(code),
        took_s=number(line.get("took_s")),
        members=len(list_of(line.get("members"))),
        generation=int(generation or 0),
        why=in_words(str(line.get("why") or "")),
    )


def find_told(run: Path) -> list[list[Told]]:
    """What each launcher of a run has told, the first to start first. `run`: its directory, or a folder of logs."""
    found = [told for path in dict.fromkeys(_find_files(run)) if (told := read_told(path))]
    return sorted(found, key=lambda told: told[0].at_s)


def _find_files(run: Path) -> Iterator[Path]:
    yield run / "events.jsonl"
    directory = mapping_of(load(bytes_of(run / "run.json"))).get("directory")
    home = run / directory if isinstance(directory, str) else run.parent if run.name == "trace" else run
    pointer = mapping_of(load(bytes_of(home / "launch.json")))
    for logs in [*list_of(pointer.get("earlier")), pointer.get("logs")][-MOST_LAUNCHES:]:
        if isinstance(logs, str):
            yield home / logs / "events.jsonl"  # an absolute path stays as it is
    yield from sorted(run.glob("*/events.jsonl"))


def count_restarts(told: Iterable[Told]) -> dict[str, int]:
    """By worker: how many were started in its place before it."""
    before: dict[int | None, int] = {}
    found: dict[str, int] = {}
    for one in told:
        if one.kind == "started":
            found[one.worker] = before.get(one.slot, 0)
            before[one.slot] = before.get(one.slot, 0) + 1
    return found


def find_replaced(told: Iterable[Told]) -> dict[str, str]:
    """By worker: the one in whose place it was started."""
    places: dict[int | None, str] = {}
    found: dict[str, str] = {}
    for one in told:
        if one.kind == "started":
            if one.slot in places:
                found[one.worker] = places[one.slot]
            places[one.slot] = one.worker
    return found
