"""The lock of a run directory: all workers of a run share it, and it ends with their processes.

Note [One byte per run]
A run locks one byte of `run.lock`, chosen by its id: all workers of a run share that byte, and another run has another
one. So the locks alone show whether another run uses the directory, whatever the file contains and in whichever order
the workers of a run start; the content of the file is only for error messages. Rank 0 checks whether any other byte is
locked, and locks its own, while it holds byte 0, so that of two runs that start together only one gets the directory.

The lock belongs to a process (fcntl), not to a descriptor: loader processes do not inherit it, and a run that is killed
leaves none behind. Network file systems support it as far as they support locks at all; without locks, nothing is
locked. Commands that only read a directory do not check it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Final, final

from lockstep import run_files
from lockstep.errors import DirectoryInUseError

FILE: Final = "run.lock"
WAIT_S: Final = 2.0  # for locks that are held only briefly
POLL_EVERY_S: Final = 0.02
_TURN: Final = 0  # the byte that rank 0 holds while it checks the others and locks its own
_FIRST, _LAST = 2, 2**30  # range of the bytes of runs
_HELD: Final = (errno.EACCES, errno.EAGAIN)


_reserved: Final[dict[str, RunLock]] = {}  # by path; for Runs of the same process, which the locks do not distinguish


@final
class RunLock:
    """The lock of one run directory. `acquire` and `release` may be called at any time, in any order."""

    def __init__(self, directory: Path, run_id: str) -> None:
        """`run_id`: equal on all workers of a launcher; "" without a launcher."""
        self.directory, self._run = directory, run_id
        self._byte = byte_of(self._run or f"{socket.gethostname()} {os.getpid()}")
        self._file: int | None = None

    def reserve(self) -> None:
        """Reserve the directory in this process, on every worker, before any of them waits for another.

        Raises DirectoryInUseError if a Run of this process that has not ended uses it.
        """
        if _reserved.setdefault(os.path.realpath(self.directory), self) is not self:
            raise DirectoryInUseError(
                f"the run directory {self.directory} is in use by another Run of this program (process {os.getpid()}), "
                "whose `with` block has not ended: two would spoil each other's checkpoints. End that one first, or "
                "give each Run a directory of its own"
            )

    def unreserve(self) -> None:
        """Undo `reserve`: another Run of this process may use the directory."""
        if _reserved.get(os.path.realpath(self.directory)) is self:
            del _reserved[os.path.realpath(self.directory)]

    def acquire(self, *, leads: bool) -> None:
        """Lock the directory for this run; the workers may call it in any order.

        leads  on rank 0: raises DirectoryInUseError if another live run has the directory. The other workers keep the
               lock for the run if rank 0 is lost. Without a launcher, which would replace rank 0, they lock nothing.
        """
        if not leads and not self._run:
            return
        if leads:
            run_files.prepare(self.directory)
        if self._file is None:
            try:
                self._file = os.open(self.directory / FILE, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return  # the directory is checked elsewhere; a lock that is impossible must not end the run
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
        since = (
            before["since"] if self._run and before.get("run") == self._run else now
        )  # the run began before this worker was rank 0
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "run": self._run}
        with suppress(OSError):  # a full disk; the lock itself is held
            text = json.dumps(mine).encode()
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def byte_of(run: str) -> int:
    """Return the byte of the lock file that belongs to this run: see Note [One byte per run]."""
    digest = hashlib.sha256(run.encode()).digest()
    return _FIRST + int.from_bytes(digest[:8], "big") % (_LAST - _FIRST)


class LockResult(Enum):
    LOCKED = "locked"
    HELD = "held"  # by another process
    UNSUPPORTED = "unsupported"  # the file system has no locks


def _lock(file: int, kind: int, start: int, length: int = 1) -> LockResult:
    """Try to lock a range of bytes. `length` 0: up to any end of the file."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except OSError as error:
        return LockResult.HELD if error.errno in _HELD else LockResult.UNSUPPORTED
    return LockResult.LOCKED


def _lock_soon(file: int, kind: int, start: int) -> LockResult:
    """Lock a byte that another process may hold briefly."""
    end_s = time.monotonic() + WAIT_S
    while (got := _lock(file, kind, start)) is LockResult.HELD and time.monotonic() < end_s:
        time.sleep(POLL_EVERY_S)
    return got


@contextmanager
def _turn(file: int) -> Iterator[None]:
    """Hold the byte that only one rank 0 holds at a time. Waits at most WAIT_S: a process that is suspended in this
    block has locked its own byte, or has yet to check the others."""
    _lock_soon(file, fcntl.LOCK_EX, _TURN)
    try:
        yield
    finally:
        with suppress(OSError):  # the file system has no locks
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _TURN)


def _is_locked_by_others(file: int, byte: int) -> bool:
    """Whether a run other than that of `byte` has locked its byte: then the other bytes cannot be locked."""
    for start, length in ((_FIRST - 1, byte - _FIRST + 1), (byte + 1, 0)):
        got = _lock(file, fcntl.LOCK_EX, start, length)
        if got is LockResult.HELD:
            return True
        if got is LockResult.LOCKED:
            fcntl.lockf(file, fcntl.LOCK_UN, length, start)
    return False


def _read(file: int) -> dict[str, Any]:
    """Return what the last rank 0 wrote about itself; {} if there is nothing readable."""
    with suppress(OSError, ValueError, TypeError):
        holder = json.loads(os.pread(file, 10_000, 0))
        if {"host", "pid", "since"} <= set(holder):
            return dict(holder)
    return {}
