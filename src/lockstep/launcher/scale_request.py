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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lockstep.world.process_identity import read_stat, this_process

NOTE: Final = "supervisor.json"
WANTED: Final = "want"
ASKS: Final = signal.SIGUSR2


class NotRunning(Exception):
    """There is no launcher here that could be asked."""


class OutOfBounds(Exception):
    """There cannot be so many workers."""


@dataclass(frozen=True)
class Launcher:
    pid: int
    started: str  # as in `Process`
    host: str
    least: int  # workers
    most: int


def introduce(folder: Path, *, least: int, most: int) -> None:
    """By the launcher. Raises OSError."""
    us = this_process()
    new = folder / f"{NOTE}.new"
    new.write_text(json.dumps(asdict(Launcher(us.pid, us.started, socket.gethostname(), least, most))))
    new.rename(folder / NOTE)


def read_wanted(folder: Path) -> int:
    """By the launcher, when it was asked. Raises OSError, ValueError."""
    return int((folder / WANTED).read_text())


def ask(run: Path, workers: int) -> None:
    """The launcher of this run. Raises NotRunning, OutOfBounds."""
    try:
        folder = _logs_of(run)
        launcher = Launcher(**json.loads((folder / NOTE).read_text()))
        if launcher.host != socket.gethostname():
            raise NotRunning(f"its supervisor is on {launcher.host}; ask there, or the one of this host")
        with _held(launcher.pid) as handle:
            if not _is(launcher):
                raise NotRunning(f"its launcher, process {launcher.pid}, has ended, or is in another container")
            if not launcher.least <= workers <= launcher.most:
                raise OutOfBounds(
                    f"{workers} workers: this run can have {launcher.least} to {launcher.most} "
                    "(--min and --max, and the shards of its batches)"
                )
            (folder / WANTED).write_text(str(workers))
            if handle is None:
                os.kill(launcher.pid, ASKS)
            else:
                signal.pidfd_send_signal(handle, ASKS)
    except (OSError, OverflowError, KeyError, TypeError, ValueError) as error:
        raise NotRunning(f"{type(error).__name__}: {error}") from error


def _logs_of(run: Path) -> Path:
    pointer = run / "launch.json"  # a Run says where its launcher is
    return Path(json.loads(pointer.read_text())["logs"]) if pointer.exists() else run


@contextmanager
def _held(pid: int) -> Iterator[int | None]:
    """Meanwhile its number does not become another's. None: this Python, or this system, cannot hold a process."""
    handle = None
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        pass
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _is(launcher: Launcher) -> bool:
    """Whether the process with that number is the launcher. If nothing can be seen of it, we take it for that."""
    try:
        stat = read_stat(launcher.pid)
    except FileNotFoundError:
        return not Path("/proc/self").exists()
    except OSError:
        return True
    return stat.state not in "ZX" and launcher.started in ("", stat.started)
