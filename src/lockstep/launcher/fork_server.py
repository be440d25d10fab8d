"""A process that has imported torch and lockstep, and forks a worker whenever the launcher requests one.

Importing takes seconds, forking takes milliseconds. So a lost worker is replaced while the others make a few steps,
and N workers start in the time of one. The fork server runs nothing of the program, and does not use CUDA: a worker
inherits from it only what `import` leaves, and what torch's compiler keeps of what it has found out.

Every worker is forked twice: its first parent ends at once, and the launcher, which adopts orphans, becomes its parent.

Note [Successor]
Preparing torch's compiler (`_torch.prepare_compiler`) takes seconds more, and not every program compiles. When the
launcher requests it, the server forks a successor, which does that while the server continues, and then takes its
place. If it fails, takes longer than PREPARED_WITHIN_S or initialises CUDA, the successor ends and the server stays: a
process that is forked after that cannot use CUDA.

    python -m lockstep.launcher.fork_server SOCKET      SOCKET: the descriptor on which the launcher sends requests

`ForkServer` and `ForkedProcess` are the launcher's side: the server process, and workers forked from it.
"""

from __future__ import annotations

import gc
import json
import os
import select
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

from lockstep.launcher.output import print_message
from lockstep.launcher.parent_watch import ParentWatch, end_with_parent, register_child

PARENT_WITHIN_S: Final = 10.0  # for the launcher to adopt a process
FORK: Final = b"fork"  # a request, with the descriptors of a worker
PREPARED_WITHIN_S: Final = 300.0  # 23 s were seen on a busy machine that had never compiled
PREPARE_COMPILER: Final = b"prepare compiler"  # a request: Note [Successor]


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
        self._prepares_compiler = False
        self._parent_watch = parent_watch
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.launcher.fork_server", str(theirs.fileno())],
            # To find out whether there are GPUs must not use CUDA, and the compiler must not start its processes here.
            env={**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"},
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
                socket.send_fds(self.socket, [FORK], [out[1], err[1], agent, watch_pipe, file.fileno()])
        for handle in (out[1], err[1]):
            os.close(handle)
        self._requested.append(worker)
        return worker

    def prepare_compiler(self) -> None:
        """Requests that workers which are forked later have torch's compiler prepared. Only the first call counts."""
        if not self._prepares_compiler and not self.ended:
            self._prepares_compiler = True
            with suppress(BrokenPipeError, ConnectionError):
                self.socket.send(PREPARE_COMPILER)

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
        with suppress(ChildProcessError):
            while os.waitpid(-self._process.pid, 0)[0]:  # a successor is in the same process group
                pass
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
    launcher, successor, successor_pid = os.getppid(), -1, 0  # a pipe from the successor, and its pid; -1: none
    events = select.poll()
    events.register(descriptor, select.POLLIN)
    while True:
        ready = dict(events.poll(None if successor < 0 else 1e3 * PREPARED_WITHIN_S))
        if not ready:
            os.kill(successor_pid, signal.SIGKILL)  # which closes the pipe
            continue
        if successor in ready:
            if os.read(successor, 1):
                os._exit(0)  # it waits for this
            events.unregister(successor)
            os.close(successor)
            os.wait()
            successor = -1
            print_message("torch's compiler could not be prepared ahead: replacements of workers do that themselves")
            continue
        message, handles, _, _ = socket.recv_fds(line, 16, 5)
        if not message:
            return
        if message == PREPARE_COMPILER:
            successor, successor_pid = _fork_successor(launcher)
            if successor >= 0:
                events.register(successor, select.POLLIN)
            continue
        with os.fdopen(handles.pop(), "rb") as file:
            file.seek(0)
            request = ForkRequest(*json.load(file))
        pid, program = _fork(request, handles, line)
        if program is not None:
            if successor >= 0:
                os.close(successor)
            run_as_main(list(program))
            return
        line.send(str(pid).encode())
        for handle in handles:
            os.close(handle)


def _fork_successor(launcher: int) -> tuple[int, int]:
    """Forks the successor, which prepares the compiler. See Note [Successor].

    Returns in the server the reading end of a pipe and the pid: a byte means that the successor is ready and the server
    must end, the end of the pipe that it has failed. Returns (-1, 0) in the successor, once the server has ended.
    """
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        return read_end, pid
    os.close(read_end)
    from lockstep import _torch

    gc.disable()
    try:
        _torch.prepare_compiler()
        check = os.fork()
        if check == 0:
            os._exit(_torch.is_in_bad_fork())
        if os.waitpid(check, 0)[1]:
            os._exit(1)
    except BaseException:
        os._exit(1)
    gc.freeze()
    gc.enable()
    with suppress(BrokenPipeError):  # the server was killed
        os.write(write_end, b"1")
    os.close(write_end)
    _wait_for_parent(launcher)
    end_with_parent(launcher)
    return -1, 0


def _wait_for_parent(launcher: int) -> None:
    """Waits until the launcher has adopted this process. Ends it if that does not happen."""
    end_s = time.monotonic() + PARENT_WITHIN_S
    while os.getppid() != launcher:
        if time.monotonic() > end_s:
            os._exit(1)
        time.sleep(0.0005)


def _fork(request: ForkRequest, handles: list[int], line: socket.socket) -> tuple[int, tuple[str, ...] | None]:
    """Returns (pid, None) in the fork server, and (0, the program) in the worker."""
    read_end, write_end = os.pipe()
    first = os.fork()
    if first:
        os.close(write_end)
        os.waitpid(first, 0)
        with os.fdopen(read_end, "rb") as answer:
            return int(answer.read()), None
    if os.fork():
        os._exit(0)
    os.setsid()  # before its pid is known: the process group of the server may be killed and reaped
    os.write(write_end, str(os.getpid()).encode())
    os.close(read_end)
    os.close(write_end)
    line.close()
    _set_up_worker(request, handles)
    return 0, tuple(request.command)


def _set_up_worker(request: ForkRequest, handles: list[int]) -> None:
    """Makes this process what `subprocess` would have started: with streams of its own, registered with ParentWatch."""
    _wait_for_parent(request.launcher_pid)
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
