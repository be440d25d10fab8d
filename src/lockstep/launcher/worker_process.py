"""One worker process as the launcher sees it: how it is started, its output pipes, its log, and its crash record."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from lockstep.failures import crash_record
from lockstep.failures.crash_record import CrashRecord, RunMark
from lockstep.launcher.exit_policy import last_output
from lockstep.launcher.fork_server_client import ForkedProcess
from lockstep.launcher.output import LineBuffer, print_message, write_all

READ_BYTES = 65536
TAIL_BYTES = 65536
LONGEST_LINE_BYTES = 65536
LARGEST_PIPE_BYTES = 1 << 20


def start_process(
    command: Sequence[str], env: Mapping[str, str], child_setup: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Start a worker that runs `command` through launcher/worker_main.py. `child_setup` runs in it before that."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep.launcher.worker_main", *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=child_setup,  # safe: the launcher has one thread
    )


class OutputStream:
    """Copies one pipe of a worker to its log unchanged, and to the terminal line by line with the worker's name."""

    def __init__(self, worker: WorkerProcess, pipe: BinaryIO, screen: int) -> None:
        self.worker = worker
        self.pipe = pipe
        self.screen = screen
        self.broken = False  # the launcher's output is a pipe that was closed (`| head`)
        self.tail = b""
        self._lines = LineBuffer()
        os.set_blocking(pipe.fileno(), False)

    def on_readable(self) -> bytes | None:
        """Copies what the pipe has. Returns b"" at its end, None if it is empty for now."""
        try:
            chunk = os.read(self.pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self.worker.write_log(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        self.worker.tail = (self.worker.tail + chunk)[-TAIL_BYTES:]
        self._show(self._lines.add(chunk))
        if not chunk or len(self._lines.rest) > LONGEST_LINE_BYTES:
            self._show(self._lines.flush())
        return chunk

    def drain(self) -> None:
        """Copies the rest after the worker has ended, at most what a pipe holds: a child of it may still write."""
        for _ in range(LARGEST_PIPE_BYTES // READ_BYTES):
            if not self.on_readable():
                break
        self._show(self._lines.flush())

    def _show(self, lines: Sequence[bytes]) -> None:
        prefix, torch_prefix = f"[{self.worker.name}] ".encode(), b"[rank%d]: " % self.worker.rank
        try:
            write_all(self.screen, b"".join(prefix + line.removeprefix(torch_prefix) for line in lines))
        except BrokenPipeError:
            self.broken, self.screen = True, -1
        except OSError:
            self.screen = -1  # the terminal is closed (nohup); the logs are still written


def log_file_name(name: str) -> str:
    """The name of a worker's log file: "rank 1" -> rank1.log. Each host has its own folder."""
    return name.partition(" on ")[0].replace(" ", "") + ".log"


class WorkerProcess:
    def __init__(self, rank: int, name: str, process: subprocess.Popen[bytes] | ForkedProcess, log: BinaryIO) -> None:
        self.rank, self.name = rank, name
        self.process = process
        self.log = log
        self.tail = b""
        self.stop_sent = False
        self.crash: CrashRecord | None = None  # what it wrote when it failed
        self.mark: RunMark | None = None  # it ended inside a Run, or after an exception had left the Run
        self.is_reaped = False  # all its resources are released; its pid may belong to another process by now
        assert process.stdout is not None
        assert process.stderr is not None
        self.out = OutputStream(self, process.stdout, 1)  # type: ignore[arg-type]
        self.err = OutputStream(self, process.stderr, 2)  # type: ignore[arg-type]

    def write_log(self, chunk: bytes) -> None:
        """Never raises: a full disk must not end the training."""
        if self.log.closed:
            return
        try:
            self.log.write(chunk)
        except OSError as error:
            print_message(f"the log of {self.name} ends here: {error}")
            self.log.close()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def collect_last_output(self, log_dir: Path) -> None:
        """Reads the rest of its pipes and its crash record, after it has ended."""
        self.out.drain()
        self.err.drain()
        self.crash = crash_record.read(log_dir, self.process.pid, log_file_name(self.name).removesuffix(".log"))
        self.mark = crash_record.take_mark(log_dir, self.process.pid)
        if self.crash is None and self.mark is not None and self.process.returncode == 0:
            self.crash = self.mark.facts
        if self.crash is not None and not self.crash.is_printed:
            text = self.crash.trace.encode(errors="replace")
            self.write_log(text)
            self.err.tail = (self.err.tail + text)[-TAIL_BYTES:]
            self.tail = (self.tail + text)[-TAIL_BYTES:]

    def last_lines(self) -> list[str]:
        return last_output(self.err.tail.decode(errors="replace"), self.tail.decode(errors="replace"))
