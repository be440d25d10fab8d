"""One run directory, one run: a lock that all its workers share, and that ends with their processes.

Note [Whose lock]
A run locks one byte of `run.lock`, and its identity says which: all workers of a run share that byte, and another run
has another one. So a worker sees from the locks alone whether another run is in the directory, whatever the file
contains and in whichever order the workers of a run come; what is written in the file is for error messages. Rank 0
looks whether any other byte is locked, and takes its own, while it has byte 0, so that of two runs that start together
one gets the directory.

The lock is of the kind that belongs to a process (fcntl), not to a descriptor: loader processes do not inherit it, and
a run that is killed leaves none behind. Network disks know it as far as they know locks at all; where there are none,
we go without. Commands that only read a directory do not ask.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Final, final

from lockstep import run_files
from lockstep.errors import DirectoryInUseError

FILE: Final = "run.lock"
WAIT_S: Final = 2.0  # for locks that are held for a moment only
LOOK_EVERY_S: Final = 0.02
_TURN: Final = 0  # the byte that rank 0 has while it looks and takes its own
_FIRST, _LAST = 2, 2**30  # bytes of runs
_HELD: Final = (errno.EACCES, errno.EAGAIN)


_reserved: Final[dict[str, Claim]] = {}  # by Runs of this process, which the locks do not tell apart


@final
class Claim:
    """`take` and `release` may be called at any time, in any order."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        self._run = env.get("LOCKSTEP_RUN_ID", "")  # of all workers of a launcher; "": there is none
        self._byte = byte_of(self._run or f"{socket.gethostname()} {os.getpid()}")
        self._file: int | None = None

    def reserve(self) -> None:
        """Take the directory in this process, on every worker, before any of them waits for another.

        Raises DirectoryInUseError if a Run that has not ended has it.
        """
        if _reserved.setdefault(os.path.realpath(self.directory), self) is not self:
            raise DirectoryInUseError(
                f"the run directory {self.directory} is in use by another Run of this program (process {os.getpid()}), "
                "whose `with` block has not ended: two would spoil each other's checkpoints. End that one first, or "
                "give each Run a directory of its own"
            )

    def free(self) -> None:
        """Let another Run of this process have the directory."""
        if _reserved.get(os.path.realpath(self.directory)) is self:
            del _reserved[os.path.realpath(self.directory)]

    def take(self, *, leads: bool) -> None:
        """Take the directory for this run; any worker may come first.

        `leads` is for rank 0: raises DirectoryInUseError if another run that lives has the directory. The other
        workers keep it for the run if rank 0 is lost. Without a launcher they take nothing: nobody replaces rank 0.
        """
        if not leads and not self._run:
            return
        if leads:
            run_files.prepare(self.directory)
        if self._file is None:
            try:
                self._file = os.open(self.directory / FILE, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return  # whether the directory is good is asked elsewhere; that we cannot lock must not end the run
        if leads:
            self._lead(self._file)
        else:
            _lock_soon(self._file, fcntl.LOCK_SH, self._byte)

    def _lead(self, file: int) -> None:
        with _turn(file):
            is_taken, holder = _is_locked_by_others(file, self._byte), _read(file)
            if not is_taken:
                _lock_soon(file, fcntl.LOCK_SH, self._byte)
                self._write(file, holder)
        if is_taken:
            self.release()
            who = "another process"
            if holder:
                who = f"the run of process {holder['pid']} on {holder['host']}, since {holder['since']}"
            raise DirectoryInUseError(
                f"the run directory {self.directory} is in use by {who}: two runs would spoil each other's "
                "checkpoints; end that one, or choose another directory"
            )

    def _write(self, file: int, before: dict[str, Any]) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        since = before["since"] if self._run and before.get("run") == self._run else now  # the run began before we led
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "run": self._run}
        with suppress(OSError):  # a full disk: the lock itself holds
            text = json.dumps(mine).encode()
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def byte_of(run: str) -> int:
    """The byte of the lock file that belongs to this run. See Note [Whose lock]."""
    digest = hashlib.sha256(run.encode()).digest()
    return _FIRST + int.from_bytes(digest[:8], "big") % (_LAST - _FIRST)


class Got(Enum):
    IT = "it"
    NOT = "not"  # another process has it
    NONE = "none"  # there are no locks here


def _lock(file: int, kind: int, start: int, length: int = 1) -> Got:
    """`length` 0: to the end of all files."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except OSError as error:
        return Got.NOT if error.errno in _HELD else Got.NONE
    return Got.IT


def _lock_soon(file: int, kind: int, start: int) -> Got:
    """A byte that another process may have for a moment."""
    end_s = time.monotonic() + WAIT_S
    while (got := _lock(file, kind, start)) is Got.NOT and time.monotonic() < end_s:
        time.sleep(LOOK_EVERY_S)
    return got


@contextmanager
def _turn(file: int) -> Iterator[None]:
    """While no other rank 0 looks. One that is stopped in there is not waited for: it has its byte, or will look."""
    _lock_soon(file, fcntl.LOCK_EX, _TURN)
    try:
        yield
    finally:
        with suppress(OSError):  # there are no locks here
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _TURN)


def _is_locked_by_others(file: int, byte: int) -> bool:
    """Whether a run other than that of `byte` has its own: those bytes cannot be locked then."""
    for start, length in ((_FIRST - 1, byte - _FIRST + 1), (byte + 1, 0)):
        got = _lock(file, fcntl.LOCK_EX, start, length)
        if got is Got.NOT:
            return True
        if got is Got.IT:
            fcntl.lockf(file, fcntl.LOCK_UN, length, start)
    return False


def _read(file: int) -> dict[str, Any]:
    """Who wrote last that it leads; {} if nothing of that kind is there."""
    with suppress(OSError, ValueError, TypeError):
        holder = json.loads(os.pread(file, 10_000, 0))
        if {"host", "pid", "since"} <= set(holder):
            return dict(holder)
    return {}
