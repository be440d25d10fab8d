"""How `lockstep scale` asks the launcher of a run for another number of workers.

The launcher writes a file into the folder of its logs: its pid, its start time, and how many workers it can have.
`lockstep scale` writes the number into a file beside that one, and sends a signal. A launcher that was killed leaves
its file behind, and its pid may belong to another process, which the signal would end: hence the start time.
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

from lockstep.process_identity import read_stat, this_process

LAUNCHER_FILE: Final = "supervisor.json"
REQUEST_FILE: Final = "want"
REQUEST_SIGNAL: Final = signal.SIGUSR2


class NotRunning(Exception):
    """There is no launcher to send the request to."""


class OutOfBounds(Exception):
    """The run cannot have that many workers."""


@dataclass(frozen=True)
class LauncherInfo:
    pid: int
    started: str  # as in `read_stat`
    host: str
    least: int  # workers
    most: int


def publish_launcher(folder: Path, *, least: int, most: int) -> None:
    """Called by the launcher: writes the file that `request_workers` reads. Raises OSError."""
    process = this_process()
    new = folder / f"{LAUNCHER_FILE}.new"
    new.write_text(json.dumps(asdict(LauncherInfo(process.pid, process.started, socket.gethostname(), least, most))))
    new.rename(folder / LAUNCHER_FILE)


def read_request(folder: Path) -> int:
    """Called by the launcher after REQUEST_SIGNAL: the number of workers. Raises OSError, ValueError."""
    return int((folder / REQUEST_FILE).read_text())


def request_workers(run: Path, workers: int) -> None:
    """Asks the launcher of this run for that many workers. Raises NotRunning, OutOfBounds."""
    try:
        folder = _logs_of(run)
        launcher = LauncherInfo(**json.loads((folder / LAUNCHER_FILE).read_text()))
        if launcher.host != socket.gethostname():
            raise NotRunning(f"its host agent is on {launcher.host}; ask there, or the one of this host")
        with _open_process(launcher.pid) as handle:
            if not _is_running(launcher):
                raise NotRunning(f"its launcher, process {launcher.pid}, has ended, or is in another container")
            if not launcher.least <= workers <= launcher.most:
                raise OutOfBounds(
                    f"{workers} workers: this run can have {launcher.least} to {launcher.most} "
                    "(--min and --max, and the shards of its batches)"
                )
            (folder / REQUEST_FILE).write_text(str(workers))
            if handle is None:
                os.kill(launcher.pid, REQUEST_SIGNAL)
            else:
                signal.pidfd_send_signal(handle, REQUEST_SIGNAL)
    except (OSError, OverflowError, KeyError, TypeError, ValueError) as error:
        raise NotRunning(f"{type(error).__name__}: {error}") from error


def _logs_of(run: Path) -> Path:
    pointer = run / "launch.json"  # in the directory of a Run: where the logs of its launcher are
    return Path(json.loads(pointer.read_text())["logs"]) if pointer.exists() else run


@contextmanager
def _open_process(pid: int) -> Iterator[int | None]:
    """Yields a pidfd, which refers to this process even if the pid is reused; None where that is not supported."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _is_running(launcher: LauncherInfo) -> bool:
    """Whether the process with that pid is the launcher; True if that cannot be found out."""
    try:
        stat = read_stat(launcher.pid)
    except FileNotFoundError:
        return not Path("/proc/self").exists()
    except OSError:
        return True
    return stat.state not in "ZX" and launcher.started in ("", stat.started)
