"""One run directory, one run: a lock that all its workers share, and that ends with their processes.

Rank 0 asks for the whole lock first, which it gets if nobody else has any of it, writes down who it is, and from then
on shares it with the others. So if rank 0 is lost and another takes its place, no stranger comes in between. The lock
is of the kind that belongs to a process (fcntl), not to a descriptor: loader processes do not inherit it, and a run
that is killed leaves none behind. Network disks know it as far as they know locks at all; where there are none, we go
without. Whoever only reads a directory does not ask.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Final, final

from lockstep import files
from lockstep.errors import DirectoryInUseError

FILE: Final = "run.lock"
NEWS_S: Final = 2.0  # whoever has just got the lock writes who it is; so long we wait for that
LOOK_EVERY_S: Final = 0.05
_HELD: Final = (errno.EACCES, errno.EAGAIN)


@final
class Claim:
    """`take` and `release` may be called at any time, in any order."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        self._run = env.get("LOCKSTEP_RUN_ID", "")  # of all workers of a launcher; "": nobody else's
        self._file: int | None = None

    def take(self, *, leads: bool) -> None:
        """Raises DirectoryInUseError if another run that lives has it. `leads`: as rank 0, before the others."""
        if leads:
            files.prepare(self.directory)
        if self._file is None:
            try:
                self._file = os.open(self.directory / FILE, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return  # whether the directory is good is asked elsewhere; that we cannot lock must not end the run
        if leads:
            self._lead(self._file)
        _lock(self._file, fcntl.LOCK_SH)

    def _lead(self, file: int) -> None:
        is_taken = _lock(file, fcntl.LOCK_EX) is Got.NOT
        holder = _read(file) if is_taken else {}
        if is_taken and not self._is_ours(holder):
            self.release()
            who = "another process"
            if holder:
                who = f"the run of process {holder['pid']} on {holder['host']}, since {holder['since']}"
            raise DirectoryInUseError(
                f"the run directory {self.directory} is in use by {who}: two runs would spoil each other's "
                "checkpoints; end that one, or choose another directory"
            )
        with suppress(OSError):  # a full disk: the lock itself holds
            began = {"since": holder["since"]} if holder else {}  # the run did, before we led it
            text = json.dumps(self._introduce() | began).encode()
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))

    def _is_ours(self, holder: dict[str, Any]) -> bool:
        """An earlier rank 0 of the same run, or we ourselves: others of that run may still have their part."""
        mine = self._introduce()
        if self._run and holder.get("run") == self._run:
            return True
        return all(holder.get(name) == mine[name] for name in ("host", "pid"))

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _introduce(self) -> dict[str, Any]:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "run": self._run}


class Got(Enum):
    IT = "it"
    NOT = "not"  # somebody else has it
    NONE = "none"  # there are no locks here


def _lock(file: int, kind: int) -> Got:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return Got.NOT if error.errno in _HELD else Got.NONE
    return Got.IT


def _read(file: int) -> dict[str, Any]:
    end_s = time.monotonic() + NEWS_S
    while True:
        try:
            holder = json.loads(os.pread(file, 10_000, 0))
            if {"host", "pid", "since"} <= set(holder):
                return dict(holder)
        except (OSError, ValueError, TypeError):
            pass
        if time.monotonic() > end_s:
            return {}
        time.sleep(LOOK_EVERY_S)
