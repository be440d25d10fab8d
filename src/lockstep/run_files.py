"""Files of a run. A disk that is full, missing or broken does not stop training; messages say what to do about it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from lockstep.errors import LockstepError

_log = logging.getLogger(__name__)

LAUNCHES_KEPT: Final = 50  # earlier launches that a run directory lists, for the report of their workers' exits
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
    """Return what went wrong, and what to do about it."""
    if error.errno is None:
        return f"{type(error).__name__}: {error}", "please report it"
    name = errno.errorcode.get(error.errno, str(error.errno))
    place = f" at {error.filename}" if error.filename is not None else ""
    return f"{error.strerror} ({name}){place}", _ADVICE.get(error.errno, "look at that disk")


def prepare(directory: Path) -> None:
    """Create the run directory. Raises LockstepError now, and not at the first checkpoint, if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    except OSError as error:
        problem, advice = describe(error)
        raise LockstepError(f"the directory of the run, {directory}, cannot be used: {problem}; {advice}") from None


def write_pointers(directory: Path, logs: Path) -> None:
    """Write the path of the launcher's logs into the run directory (for `lockstep scale`), and the reverse.

    Errors are ignored: the run continues without these files.
    """
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        pointer = directory / "launch.json"
        earlier = [one for one in _launches(pointer) if one != str(logs)][-LAUNCHES_KEPT:]
        pointer.write_text(json.dumps({"logs": str(logs), "earlier": earlier}))
        (logs / "run.json").write_text(json.dumps({"directory": str(directory)}))


def move_aside(directory: Path, *, stay: Iterable[str]) -> Path | None:
    """Move the contents of a run directory into a new folder `previous-N` inside it.

    Returns that folder, or None if there was nothing to move. Earlier `previous-N` and the names in `stay` stay.
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
    """Return the log folders of all launches so far, the latest last."""
    try:
        found = json.loads(pointer.read_text())
        return [str(one) for one in [*found.get("earlier", []), found["logs"]]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def append_lines(path: Path, lines: Iterable[str]) -> int:
    """Append lines in one write, so that a kill leaves whole lines or none. Returns the new size of the file.

    Raises OSError, and leaves the file as it was, if not all of them can be written.
    """
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
    """A file to which a run appends lines. A failure to write it does not end the training."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._is_failing, self._has_directory = False, False

    def add(self, lines: Iterable[str]) -> int | None:
        """Append lines. Returns the new size of the file, or None if it cannot be written now: try again later.

        A failure is printed once.
        """
        try:
            if not self._has_directory:  # only once: later it may be the empty mount point of a lost disk
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._has_directory = True
            size = append_lines(self.path, lines)
        except OSError as error:
            self.report_failure(error)
            return None
        if self._is_failing:
            self._print("is written again, with all that was missing")
        self._is_failing = False
        return size

    def report_failure(self, error: OSError | LockstepError) -> None:
        """Print, once, that the file cannot be written now, or does not have the expected contents."""
        if not self._is_failing:
            problem, advice = describe(error) if isinstance(error, OSError) else (str(error), "move it away")
            self._print(f"cannot be written: {problem}; training continues, and missing lines are kept here; {advice}")
        self._is_failing = True

    def _print(self, text: str) -> None:
        _log.warning("%s, %s, %s", self._what, self.path, text)
