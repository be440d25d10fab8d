"""Files of a run, on disks that may be full, gone or broken: what to do about it, and how to go on meanwhile."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from lockstep.errors import LockstepError

LAUNCHES_KEPT: Final = 50  # that a directory knows of, to report what became of their workers
_GONE: Final = "the directory of the run is gone: make it again, or mount its disk"
_TAKEN: Final = "something else is in the place of a directory: move it away"
_ADVICE: Final = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or have the quota raised",
    errno.EROFS: "the disk is mounted read-only: mount it for writing, and look for disk errors in the system's log",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _TAKEN,
    errno.EEXIST: _TAKEN,
    errno.EIO: "the disk fails: look at the system's log, and copy away what you need",
    errno.ESTALE: "the network disk lost it: mount it again",
}


def describe(error: OSError) -> tuple[str, str]:
    """What went wrong, and what to do."""
    if error.errno is None:
        return f"{type(error).__name__}: {error}", "please report it"
    name = errno.errorcode.get(error.errno, str(error.errno))
    place = f" at {error.filename}" if error.filename is not None else ""
    return f"{error.strerror} ({name}){place}", _ADVICE.get(error.errno, "look at that disk")


def prepare(directory: Path) -> None:
    """Whoever begins a run wants to know now that nothing can be kept, and not when the first checkpoint is due."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    except OSError as error:
        problem, advice = describe(error)
        raise LockstepError(f"the directory of the run, {directory}, cannot be used: {problem}; {advice}") from None


def point_at_each_other(directory: Path, logs: Path) -> None:
    """Whoever knows the directory of a run finds what its launcher writes (`lockstep scale`), and the other way round.

    If that cannot be written, they are not found: the run goes on.
    """
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        pointer = directory / "launch.json"
        earlier = [one for one in _launches(pointer) if one != str(logs)][-LAUNCHES_KEPT:]
        pointer.write_text(json.dumps({"logs": str(logs), "earlier": earlier}))
        (logs / "run.json").write_text(json.dumps({"directory": str(directory)}))


def move_aside(directory: Path, *, stay: Iterable[str]) -> Path | None:
    """Move all that is in a run directory into a folder `previous-N` of it, and return that; None: there was nothing.

    stay  names that are left where they are. Earlier `previous-N` stay as well.
    """
    names = [p.name for p in directory.iterdir()] if directory.is_dir() else []
    moved = [name for name in names if name not in set(stay) and not name.startswith("previous-")]
    if not moved:
        return None
    target = next(one for n in count(1) if not (one := directory / f"previous-{n}").exists())
    target.mkdir()
    for name in moved:
        (directory / name).rename(target / name)
    return target


def _launches(pointer: Path) -> list[str]:
    """The folders of logs of all launches so far, the latest last."""
    try:
        found = json.loads(pointer.read_text())
        return [str(one) for one in [*found.get("earlier", []), found["logs"]]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def append_lines(path: Path, lines: Iterable[str]) -> int:
    """All of them in one write, so that whoever is killed leaves whole lines; or none. Returns the size of the file."""
    data = "".join(f"{line}\n" for line in lines).encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(file).st_size
        if os.write(file, data) < len(data):
            os.ftruncate(file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return os.fstat(file).st_size
    finally:
        os.close(file)


class Appender:
    """A file that a run adds lines to. That it cannot be written does not end the training."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._is_failing, self._has_directory = False, False

    def add(self, lines: Iterable[str]) -> int | None:
        """The size of the file then. None: it cannot be written now, which is told once; try again."""
        try:
            if not self._has_directory:  # not later: it may be the place where a disk was mounted
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._has_directory = True
            size = append_lines(self.path, lines)
        except OSError as error:
            self.fails(error)
            return None
        if self._is_failing:
            self._say("is written again, with all that was missing")
        self._is_failing = False
        return size

    def fails(self, error: OSError | LockstepError) -> None:
        """It cannot be written now, or is not what we wrote. Told once."""
        if not self._is_failing:
            problem, advice = describe(error) if isinstance(error, OSError) else (str(error), "move it away")
            self._say(f"cannot be written: {problem}; training goes on, and what is missing waits here; {advice}")
        self._is_failing = True

    def _say(self, text: str) -> None:
        print(f"lockstep: {self._what}, {self.path}, {text}", file=sys.stderr, flush=True)
