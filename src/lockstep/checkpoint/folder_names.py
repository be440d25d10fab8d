"""Names in a folder of checkpoints: `step-000000123`, and those that are being written or removed.

    .step-000000123.<who>-<n>.partial     being written
    .step-000000123.<who>-<n>.aside       the one of that step before, while the new one takes its place
    .step-000000123.<who>-<n>.removed     on its way out

A process that is killed leaves its names behind. Somebody must clear up, and must not take them from another writer of
the same run that lives. So `who` says which process it is: boot of the machine, PID namespace, PID, and when it began.
Where these tell that it is gone, it is gone. Of another machine or container we know nothing, and wait until nothing
has moved for an hour. A lock would need a file that stays behind, and is not one on every network disk.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

OLD_S = 3600.0

_STEP = re.compile(r"step-(\d{9,18})")
_PASSING = re.compile(r"\.(step-\d{9,18})\.([0-9a-z-]+)-(\d+)\.(partial|aside|removed)")
_count = itertools.count()
_in_use: set[str] = set()  # names of this process


class Use(Enum):
    PARTIAL = "partial"
    ASIDE = "aside"
    REMOVED = "removed"


@dataclass(frozen=True)
class Passing:
    """A directory that is there for a moment only, unless its maker was killed."""

    path: Path
    step: int
    use: Use
    who: str


def directory_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def steps_in(folder: Path) -> list[int]:
    """In order. A folder that is not there has none."""
    return sorted(step for step in map(step_of, _names(folder)) if step is not None)


def passing_in(folder: Path) -> list[Passing]:
    found = []
    for name in sorted(_names(folder)):
        match = _PASSING.fullmatch(name)
        step = step_of(match[1]) if match else None
        if match and step is not None:
            found.append(Passing(folder / name, step, Use(match[4]), match[2]))
    return found


def new_passing(folder: Path, step: int, use: Use) -> Path:
    """A name that nobody else has. To be given back with `done_with`."""
    name = f".{directory_name(step)}.{_identity(os.getpid())}-{next(_count)}.{use.value}"
    _in_use.add(name)
    return folder / name


def done_with(path: Path) -> None:
    _in_use.discard(path.name)


def is_left_behind(passing: Passing, *, now: float) -> bool:
    """`now` by the clock of that disk, which need not be ours."""
    boot, _, rest = passing.who.partition("-")
    space, _, rest = rest.partition("-")
    pid = rest.partition("-")[0]
    here = _identity(os.getpid())
    if passing.who == here:
        return passing.path.name not in _in_use
    if pid.isdecimal() and here.startswith(f"{boot}-{space}-") and boot != _UNKNOWN:
        return _identity(int(pid)) != passing.who
    return now - _last_moved(passing.path) > OLD_S


_UNKNOWN = "unknown"


def _identity(pid: int) -> str:
    """Of a process of this machine; "unknown-0-<pid>-0" where there is no /proc, and ends in 0 if there is none."""
    boot = _read("/proc/sys/kernel/random/boot_id").replace("-", "")[:12] or _UNKNOWN
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    # The name of the program is in brackets and may hold blanks. Behind it: how it is, and as the 20th when it began.
    # One that was killed stays as a Z until its parent looks.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    began = fields[19] if len(fields) > 19 and fields[0] not in "ZX" else "0"
    return f"{boot}-{space}-{pid}-{began}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _last_moved(path: Path) -> float:
    """When something in it was written last; 0 if it is gone."""
    moved = 0.0
    for place in (path, *(path / name for name in _names(path))):
        try:
            moved = max(moved, os.lstat(place).st_mtime)
        except OSError:
            continue
    return moved


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
