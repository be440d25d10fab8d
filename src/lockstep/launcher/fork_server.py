"""A process that has imported torch and lockstep, and forks a worker whenever the launcher requests one.

Importing takes seconds, forking takes milliseconds. So a lost worker is replaced while the others make a few steps,
and N workers start in the time of one. The fork server runs nothing of the program, starts no thread and touches no
GPU: a worker inherits from it only what `import` leaves.

Every worker is forked twice: its first parent ends at once, and the launcher, which adopts orphans, becomes its parent.

    python -m lockstep.launcher.fork_server SOCKET      SOCKET: the descriptor on which the launcher sends requests

`ForkServer` and `ForkedProcess` are the launcher's side: the server process, and workers forked from it.
"""

from __future__ import annotations

import gc
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
from dataclasses import astuple, dataclass
from typing import BinaryIO, Final

from lockstep.launcher.parent_watch import ParentWatch, register_child

PARENT_WITHIN_S: Final = 10.0  # for the launcher to adopt a worker


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
            [sys.executable, "-m", "lockstep.launcher.fork_server", str(theirs.fileno())],
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
            file.write(json.dumps(astuple(request)).encode())
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


# ---- in the fork server --------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends the server
    line = socket.socket(fileno=descriptor)
    gc.disable()  # collections would take an eighth of the time of these imports
    import lockstep.train.run  # noqa: F401  (imports all of torch that a worker needs)
    from lockstep import _torch
    from lockstep.launcher.worker_main import run_as_main

    with suppress(ImportError):
        _torch.dynamo()

    gc.freeze()  # garbage collection in the workers would write to these pages, and so copy them
    gc.enable()
    while True:
        message, handles, _, _ = socket.recv_fds(line, 16, 5)
        if not message:
            return
        with os.fdopen(handles.pop(), "rb") as file:
            file.seek(0)
            request = ForkRequest(*json.load(file))
        pid, program = _fork(request, handles, line)
        if program is not None:
            run_as_main(list(program))
            return
        line.send(str(pid).encode())
        for handle in handles:
            os.close(handle)


def _fork(request: ForkRequest, handles: list[int], line: socket.socket) -> tuple[int, tuple[str, ...] | None]:
    """Returns (pid, None) in the fork server, and (0, the program) in the worker."""
    read_end, write_end = os.pipe()
    first = os.fork()
    if first:
        os.close(write_end)
        os.waitpid(first, 0)
        with os.fdopen(read_end, "rb") as answer:
            return int(answer.read()), None
    second = os.fork()
    if second:
        os.write(write_end, str(second).encode())
        os._exit(0)
    os.close(read_end)
    os.close(write_end)
    line.close()
    _set_up_worker(request, handles)
    return 0, tuple(request.command)


def _set_up_worker(request: ForkRequest, handles: list[int]) -> None:
    """Makes this process what `subprocess` would have started: own session and streams, registered with ParentWatch."""
    os.setsid()
    end_s = time.monotonic() + PARENT_WITHIN_S
    while os.getppid() != request.launcher_pid:
        if time.monotonic() > end_s:
            os._exit(1)
        time.sleep(0.0005)
    stdout, stderr, agent, watch_pipe = handles
    register_child(request.launcher_pid, watch_pipe)
    os.close(watch_pipe)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.env)
    os.environ[request.agent_variable] = str(agent)


if __name__ == "__main__":
    main(int(sys.argv[1]))
