"""`lockstep scale`: between somebody who wants another number of workers and the launcher of a run.

The launcher writes down, in the folder of its logs, which process it is and how many workers it can have. Who asks
writes the number beside that and sends a signal. A launcher that was killed leaves its note behind, and its number may
be another process's by now, which that signal would end: so when it was started is part of who it is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

NOTE: Final = "supervisor.json"
WANTED: Final = "want"
ASKS: Final = signal.SIGUSR2


@dataclass(frozen=True)
class Launcher:
    pid: int
    started: str  # in ticks since the machine started; "": not known
    host: str
    least: int  # workers
    most: int


def introduce(folder: Path, *, least: int, most: int) -> None:
    """By the launcher. Raises OSError."""
    us = Launcher(os.getpid(), _started(os.getpid()), socket.gethostname(), least, most)
    new = folder / f"{NOTE}.new"
    new.write_text(json.dumps(asdict(us)))
    new.rename(folder / NOTE)


def read_wanted(folder: Path) -> int:
    """By the launcher, when it was asked. Raises OSError, ValueError."""
    return int((folder / WANTED).read_text())


def ask(run: Path, workers: int) -> None:
    """Of a run that goes on here. Raises OutOfBounds; OSError, KeyError, TypeError or ValueError if it does not."""
    folder = run
    if (run / "launch.json").exists():  # a Run says where its launcher is
        folder = Path(json.loads((run / "launch.json").read_text())["logs"])
    launcher = Launcher(**json.loads((folder / NOTE).read_text()))
    if launcher.host != socket.gethostname():
        raise ValueError(f"its supervisor is on {launcher.host}; ask there, or the one of this host")
    process = os.pidfd_open(launcher.pid)  # from here on the number cannot become another's
    try:
        if _started(launcher.pid) != launcher.started:
            raise ProcessLookupError(f"its launcher, process {launcher.pid}, has ended")
        if not launcher.least <= workers <= launcher.most:
            raise OutOfBounds(
                f"{workers} workers: this run can have {launcher.least} to {launcher.most} "
                "(--min and --max, and the shards of its batches)"
            )
        (folder / WANTED).write_text(str(workers))
        signal.pidfd_send_signal(process, ASKS)
    finally:
        os.close(process)


class OutOfBounds(Exception):
    """There cannot be so many workers."""


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""  # it is gone, or /proc is hidden
