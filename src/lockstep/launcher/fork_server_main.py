"""A process that has imported torch and lockstep, and forks a worker whenever the launcher requests one.

Importing takes seconds, forking takes milliseconds. So a lost worker is replaced while the others make a few steps,
and N workers start in the time of one. The fork server runs nothing of the program, starts no thread and touches no
GPU: a worker inherits from it only what `import` leaves.

Every worker is forked twice: its first parent ends at once, and the launcher, which adopts orphans, becomes its parent.

    python -m lockstep.launcher.fork_server_main SOCKET      SOCKET: the descriptor on which the launcher sends requests
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Final

from lockstep.launcher.fork_server_client import ForkRequest
from lockstep.launcher.parent_watch import register_child
from lockstep.launcher.worker_main import run_as_main

PARENT_WITHIN_S: Final = 10.0  # for the launcher to adopt a worker


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends the server
    line = socket.socket(fileno=descriptor)
    import lockstep.train.run  # noqa: F401  (imports all of torch that a worker needs)
    from lockstep import _torch

    with suppress(ImportError):
        _torch.dynamo()

    gc.freeze()  # garbage collection in the workers would write to these pages, and so copy them
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
