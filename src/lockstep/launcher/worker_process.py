"""One worker process as the launcher sees it: its pipes, its log, and what it leaves behind when it ends."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import BinaryIO

from lockstep.failures import crash_record
from lockstep.failures.crash_record import Facts, RunMark
from lockstep.launcher.exit_policy import last_words
from lockstep.launcher.forked_workers import Forked
from lockstep.launcher.output import say, write_all

READ_BYTES = 65536
TAIL_BYTES = 65536
LONGEST_LINE_BYTES = 65536
LARGEST_PIPE_BYTES = 1 << 20


class _Stream:
    """One pipe from a worker: to the log as it is, to the terminal line by line behind the worker's name."""

    def __init__(self, worker: WorkerProcess, pipe: BinaryIO, screen: int) -> None:
        self.worker = worker
        self.pipe = pipe
        self.screen = screen
        self.broken = False  # whoever read our output has gone (`| head`)
        self.tail = b""
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def take(self) -> bytes | None:
        """Pass on what is there: b"" when the pipe has ended, None when there is nothing just now."""
        try:
            chunk = os.read(self.pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self.worker.write_log(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        self.worker.tail = (self.worker.tail + chunk)[-TAIL_BYTES:]
        text = self._rest + chunk
        # A progress bar ends its lines with a carriage return; waiting for its newline would show nothing.
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        self._show(text[:end])
        if not chunk or len(self._rest) > LONGEST_LINE_BYTES:
            self._end_line()
        return chunk

    def drain(self) -> None:
        """What a dead worker has left: at most what a pipe holds. A child of it may go on writing for ever."""
        for _ in range(LARGEST_PIPE_BYTES // READ_BYTES):
            if not self.take():
                break
        self._end_line()

    def _end_line(self) -> None:
        self._show(self._rest + b"\n" if self._rest else b"")
        self._rest = b""

    def _show(self, text: bytes) -> None:
        prefix, torchs = f"[{self.worker.name}] ".encode(), b"[rank%d]: " % self.worker.rank
        lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)", text)  # not splitlines: form feeds and the like are no ends
        try:
            write_all(self.screen, b"".join(prefix + line.removeprefix(torchs) for line in lines))
        except BrokenPipeError:
            self.broken, self.screen = True, -1
        except OSError:
            self.screen = -1  # the terminal is gone, and nobody minded (nohup): the logs go on


def log_of(name: str) -> str:
    """The file of a worker. Each host has its own folder."""
    return name.partition(" on ")[0].replace(" ", "") + ".log"


class WorkerProcess:
    def __init__(self, rank: int, name: str, process: subprocess.Popen[bytes] | Forked, log: BinaryIO) -> None:
        self.rank, self.name = rank, name
        self.process = process
        self.log = log
        self.tail = b""
        self.told = False
        self.facts: Facts | None = None  # that it wrote down when it failed
        self.mark: RunMark | None = None  # it ended in a Run, or had left it by an exception
        self.buried = False  # nothing of it is left, and its number may be somebody else's
        assert process.stdout is not None
        assert process.stderr is not None
        self.out = _Stream(self, process.stdout, 1)  # type: ignore[arg-type]
        self.err = _Stream(self, process.stderr, 2)  # type: ignore[arg-type]

    def write_log(self, chunk: bytes) -> None:
        """A full disk must not end the training."""
        if self.log.closed:
            return
        try:
            self.log.write(chunk)
        except OSError as error:
            say(f"the log of {self.name} ends here: {error}")
            self.log.close()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def take_last(self, log_dir: Path) -> None:
        """It has ended: take what is left in its pipes, and the traceback that it left for its log."""
        self.out.drain()
        self.err.drain()
        self.facts = crash_record.read(log_dir, self.process.pid, log_of(self.name).removesuffix(".log"))
        self.mark = crash_record.take_mark(log_dir, self.process.pid)
        if self.facts is None and self.mark is not None and self.process.returncode == 0:
            self.facts = self.mark.facts
        if self.facts is not None and not self.facts.is_printed:
            text = self.facts.trace.encode(errors="replace")
            self.write_log(text)
            self.err.tail = (self.err.tail + text)[-TAIL_BYTES:]
            self.tail = (self.tail + text)[-TAIL_BYTES:]

    def words(self) -> list[str]:
        return last_words(self.err.tail.decode(errors="replace"), self.tail.decode(errors="replace"))
