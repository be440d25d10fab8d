"""Names in a folder of checkpoints: `step-000000123`, and temporary names.

    .step-000000123.<owner>-<n>.partial     being written
    .step-000000123.<owner>-<n>.aside       the previous one of that step, while the new one replaces it
    .step-000000123.<owner>-<n>.removed     being removed

A process that is killed leaves its temporary folders behind. They must be removed, but not those of another writer of
the same run that is still alive. So `owner` identifies the process: boot ID of the machine, PID namespace, PID, and
start time. On the same machine these tell whether the process is alive. On another machine or in another container that
cannot be known, and a folder is abandoned if nothing in it has changed for an hour. A lock would need a file that stays
behind, and does not work on every network file system.
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
_TEMPORARY = re.compile(r"\.(step-\d{9,18})\.([0-9a-z-]+)-(\d+)\.(partial|aside|removed)")
_count = itertools.count()
_in_use: set[str] = set()  # temporary names that this process uses


class Use(Enum):
    PARTIAL = "partial"
    ASIDE = "aside"
    REMOVED = "removed"


@dataclass(frozen=True)
class TemporaryFolder:
    """A directory that exists briefly, unless the process that created it was killed."""

    path: Path
    step: int
    use: Use
    owner: str


def directory_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps in ascending order; none if the folder does not exist."""
    return sorted(step for step in map(step_of, _names(folder)) if step is not None)


def temporary_folders(folder: Path) -> list[TemporaryFolder]:
    found = []
    for name in sorted(_names(folder)):
        match = _TEMPORARY.fullmatch(name)
        step = step_of(match[1]) if match else None
        if match and step is not None:
            found.append(TemporaryFolder(folder / name, step, Use(match[4]), match[2]))
    return found


def new_temporary_folder(folder: Path, step: int, use: Use) -> Path:
    """Return a unique path. The caller must call `release_name` when it no longer uses it."""
    name = f".{directory_name(step)}.{_identity(os.getpid())}-{next(_count)}.{use.value}"
    _in_use.add(name)
    return folder / name


def release_name(path: Path) -> None:
    _in_use.discard(path.name)


def is_abandoned(folder: TemporaryFolder, *, now: float) -> bool:
    """Whether the owner has ended. `now` is by the clock of the file system, which may differ from this machine's."""
    boot, _, rest = folder.owner.partition("-")
    space, _, rest = rest.partition("-")
    pid = rest.partition("-")[0]
    here = _identity(os.getpid())
    if folder.owner == here:
        return folder.path.name not in _in_use
    if pid.isdecimal() and here.startswith(f"{boot}-{space}-") and boot != _UNKNOWN:
        return _identity(int(pid)) != folder.owner
    return now - _last_modified(folder.path) > OLD_S


_UNKNOWN = "unknown"


def _identity(pid: int) -> str:
    """Identity of a process of this machine. It ends in 0 if there is none; without /proc: "unknown-0-<pid>-0"."""
    boot = _read("/proc/sys/kernel/random/boot_id").replace("-", "")[:12] or _UNKNOWN
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    # The name of the program is in parentheses and may contain blanks. The first field after it is the process state,
    # and the 20th the start time. A killed process stays as a zombie (Z) until its parent waits for it.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    started = fields[19] if len(fields) > 19 and fields[0] not in "ZX" else "0"
    return f"{boot}-{space}-{pid}-{started}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _last_modified(path: Path) -> float:
    """Return the latest modification time of the folder and its files; 0 if it no longer exists."""
    modified = 0.0
    for place in (path, *(path / name for name in _names(path))):
        try:
            modified = max(modified, os.lstat(place).st_mtime)
        except OSError:
            continue
    return modified


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
