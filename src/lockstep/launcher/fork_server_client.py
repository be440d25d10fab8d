"""The launcher's side of the fork server (fork_server_main.py): the server process, and workers forked from it."""

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

from lockstep.launcher.parent_watch import ParentWatch


class ForkedProcess:
    """A worker that was forked from the fork server, with the interface of `subprocess.Popen`."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.pid = 0  # 0: not forked yet
        self.returncode: int | None = None
        self._signals: list[int] = []  # to be sent once it is forked
        self.on_started: Callable[[int], None] = lambda pid: None

    def set_pid(self, pid: int) -> None:
        self.pid = pid
        self.on_started(pid)
        for number in self._signals:
            self.send_signal(number)

    def poll(self) -> int | None:
        if self.returncode is None and self.pid:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return None  # not adopted yet: its first parent has not ended
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
class ForkRequest:
    """What the fork server needs to know to fork a worker. The descriptors are sent beside it."""

    command: tuple[str, ...]  # what follows `python` on a command line
    env: dict[str, str]
    launcher_pid: int
    agent_variable: str  # environment variable that gets the number of the descriptor `agent`


class ForkServer:
    """The fork server's process. `socket` is the launcher's end of the connection to it."""

    def __init__(self, env: Mapping[str, str], parent_watch: ParentWatch) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ended = False
        self._requested: deque[ForkedProcess] = deque()  # whose pids are not known yet, in order
        self._parent_watch = parent_watch
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.launcher.fork_server_main", str(theirs.fileno())],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
            preexec_fn=parent_watch.child_setup(),  # safe: the launcher has one thread
        )
        theirs.close()

    def fork(self, request: ForkRequest, agent: int, watch_pipe: int) -> ForkedProcess:
        """Requests a worker; its pid is set later. The worker inherits the descriptors `agent` and `watch_pipe`."""
        out, err = os.pipe(), os.pipe()
        worker = ForkedProcess(os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0))
        with tempfile.TemporaryFile() as file:  # an environment may be larger than a message
            fields = [request.command, request.env, request.launcher_pid, request.agent_variable]
            file.write(json.dumps(fields).encode())
            file.flush()
            with suppress(BrokenPipeError, ConnectionError):  # the server has ended, which `on_readable` will notice
                socket.send_fds(self.socket, [b"fork"], [out[1], err[1], agent, watch_pipe, file.fileno()])
        for handle in (out[1], err[1]):
            os.close(handle)
        self._requested.append(worker)
        return worker

    def on_readable(self) -> bytes | None:
        """Reads the pids of new workers. Returns b"" if the server has ended, else None."""
        try:
            while answer := self.socket.recv(64, socket.MSG_DONTWAIT):
                self._requested.popleft().set_pid(int(answer))
        except BlockingIOError:
            return None
        except OSError:
            pass
        self._end()
        return b""

    def _end(self) -> None:
        """Workers that were not forked yet count as failed."""
        self.ended = True
        for worker in self._requested:
            worker.returncode = 1
        self._requested.clear()

    def close(self) -> None:
        self._end()
        self.socket.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._parent_watch.release(self._process.pid)
