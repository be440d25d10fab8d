"""Workers that are forked from a template (launcher/fork_server.py), as their launcher sees them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from lockstep.launcher.parent_watch import Guardian


class Forked:
    """A worker that was forked from the template, in the clothes of `subprocess.Popen`."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.pid = 0  # not known yet
        self.returncode: int | None = None
        self._signals: list[int] = []  # for when it is
        self.on_born: Callable[[int], None] = lambda pid: None

    def born(self, pid: int) -> None:
        self.pid = pid
        self.on_born(pid)
        for number in self._signals:
            self.send_signal(number)

    def poll(self) -> int | None:
        if self.returncode is None and self.pid:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return None  # its first parent has not ended yet
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (3600.0 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.pid:
            self._signals.append(number)
        elif self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Request:
    """A worker to be."""

    command: tuple[str, ...]  # what follows `python` on a command line
    env: dict[str, str]
    launcher: int  # pid
    seat: str  # the variable that tells the worker its descriptor


class Template:
    """The process that they are forked from."""

    def __init__(self, env: Mapping[str, str], guardian: Guardian) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ended = False
        self._unborn: deque[Forked] = deque()
        self._guardian = guardian
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.launcher.fork_server", str(theirs.fileno())],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
            preexec_fn=guardian.enrol(),  # safe: the launcher has one thread
        )
        theirs.close()

    def fork(self, request: Request, seat: int, guardian: int) -> Forked:
        """`seat`, `guardian`: descriptors that the worker gets."""
        out, err = os.pipe(), os.pipe()
        worker = Forked(os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0))
        with tempfile.TemporaryFile() as told:  # an environment may be larger than a message
            told.write(json.dumps([request.command, request.env, request.launcher, request.seat]).encode())
            told.flush()
            with suppress(BrokenPipeError, ConnectionError):  # it has ended, as `take` will find
                socket.send_fds(self.line, [b"fork"], [out[1], err[1], seat, guardian, told.fileno()])
        for handle in (out[1], err[1]):
            os.close(handle)
        self._unborn.append(worker)
        return worker

    def take(self) -> bytes | None:
        """Read which were born. The end of the template is that of all who were not."""
        try:
            while answer := self.line.recv(64, socket.MSG_DONTWAIT):
                self._unborn.popleft().born(int(answer))
        except BlockingIOError:
            return None
        except OSError:
            pass
        self._end()
        return b""

    def _end(self) -> None:
        """Whoever was not born will not be."""
        self.ended = True
        for worker in self._unborn:
            worker.returncode = 1
        self._unborn.clear()

    def close(self) -> None:
        self._end()
        self.line.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guardian.release(self._process.pid)
