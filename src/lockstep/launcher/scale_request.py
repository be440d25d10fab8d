"""How `lockstep scale` asks the launcher of a run for another number of workers, and `lockstep drain` that some leave.

The launcher writes a file into the folder of its logs: its pid, its start time, and how many workers it can have.
The command writes what it asks for into a file beside that one, and sends a signal. A launcher that was killed leaves
its file behind, and its pid may belong to another process, which the signal would end: hence the start time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lockstep.process_identity import read_stat, this_process

LAUNCHER_FILE: Final = "supervisor.json"
REQUEST_FILE: Final = "want"
REQUEST_SIGNAL: Final = signal.SIGUSR2
READ_WITHIN_S: Final = 3.0


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


@dataclass(frozen=True)
class Request:
    """What the launcher is asked for: another number of workers, or that some leave."""

    workers: int = 0
    leaving: tuple[int, ...] = ()  # numbers of workers of this host

    def __post_init__(self) -> None:
        if not all(isinstance(one, int) and one >= 0 for one in (self.workers, *self.leaving)):
            raise ValueError(f"{self}: whole numbers are needed")


def read_request(folder: Path) -> Request:
    """Called by the launcher after REQUEST_SIGNAL; deletes the file. Raises OSError, ValueError."""
    text = (folder / REQUEST_FILE).read_text()
    (folder / REQUEST_FILE).unlink()
    asked = json.loads(text)
    if not isinstance(asked, dict) or asked.keys() != {"workers", "leaving"} or not isinstance(asked["leaving"], list):
        raise ValueError(f"{asked!r:.80} is no request")
    return Request(asked["workers"], tuple(asked["leaving"]))


def send_request(run: Path, request: Request) -> None:
    """Sends a request to the launcher of this run. Raises NotRunning, OutOfBounds."""
    workers = request.workers
    try:
        folder = _logs_of(run)
        launcher = LauncherInfo(**json.loads((folder / LAUNCHER_FILE).read_text()))
        if launcher.host != socket.gethostname():
            raise NotRunning(f"its host agent is on {launcher.host}; ask there, or the one of this host")
        with _open_process(launcher.pid) as handle:
            if not _is_running(launcher):
                raise NotRunning(f"its launcher, process {launcher.pid}, has ended, or is in another container")
            if workers and not launcher.least <= workers <= launcher.most:
                raise OutOfBounds(
                    f"{workers} workers: this run can have {launcher.least} to {launcher.most} "
                    "(--min and --max, and the shards of its batches)"
                )
            _await_read(folder / REQUEST_FILE)
            (folder / REQUEST_FILE).write_text(json.dumps(asdict(request)))
            if handle is None:
                os.kill(launcher.pid, REQUEST_SIGNAL)
            else:
                signal.pidfd_send_signal(handle, REQUEST_SIGNAL)
    except (OSError, OverflowError, KeyError, TypeError, ValueError) as error:
        raise NotRunning(f"{type(error).__name__}: {error}") from error


def _await_read(file: Path) -> None:
    """Wait until the launcher has read an earlier request, which would be overwritten; for READ_WITHIN_S at most."""
    end_s = time.monotonic() + READ_WITHIN_S
    while file.exists() and time.monotonic() < end_s:
        time.sleep(0.01)


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
