"""One run directory, one run: a lock that rank 0 holds, and that ends with its process.

The lock is of the kind that belongs to a process (fcntl), not to a descriptor: loader processes do not inherit it, so a
run that is killed leaves none behind. Network disks know it as far as they know locks at all; where there are none, we
go without. Whoever only reads a directory does not ask.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from lockstep import files
from lockstep.errors import DirectoryInUse

FILE: Final = "run.lock"
NEWS_S: Final = 2.0  # whoever has just got the lock writes who it is; so long we wait for that
LOOK_EVERY_S: Final = 0.05
_HELD: Final = (errno.EACCES, errno.EAGAIN)


@final
class Claim:
    """`take` and `release` may be called at any time, in any order."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self._directory = directory
        self._run = env.get("LOCKSTEP_RUN_ID", "")  # of all workers of a launcher; "": nobody else's
        self._file: int | None = None

    def take(self) -> None:
        """Raises DirectoryInUse if another run that lives has it. An earlier rank 0 of the same run may have it still:
        that one is lost, or about to hand over, and what it may write is decided elsewhere (Saving's fence)."""
        if self._file is not None:
            return
        files.prepare(self._directory)
        path = self._directory / FILE
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return  # prepare has found the directory good; a disk that does not let us lock must not end the run
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            try:
                if error.errno in _HELD:
                    self._refuse(file)
            finally:
                os.close(file)
            return
        self._file = file
        text = json.dumps(self._introduce()).encode()
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, text, 0)
        except OSError:
            pass  # a full disk: the lock itself holds

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _introduce(self) -> dict[str, Any]:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "run": self._run}

    def _refuse(self, file: int) -> None:
        holder = _read(file)
        if self._run and holder.get("run") == self._run:
            return
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else "another process"
        raise DirectoryInUse(
            f"the run directory {self._directory} is in use by {who}: two runs would spoil each other's checkpoints; "
            "end that one, or choose another directory"
        )


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
