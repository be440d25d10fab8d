"""A process that has imported torch and lockstep, and becomes a worker whenever one is needed.

Importing takes seconds; forking takes milliseconds. So a lost worker is replaced while the others take a few steps,
and N workers start in the time of one. The template runs nothing of the program, starts no thread and touches no GPU:
what a worker inherits from it is what `import` leaves.

Every worker is forked twice: its parent ends at once, and the launcher, which adopts orphans, becomes its parent.

    python -m lockstep.launcher.fork_server SOCKET      the descriptor on which the launcher asks
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final

from lockstep.launcher.forked_workers import Request
from lockstep.launcher.worker_main import become

_PR_SET_PDEATHSIG: Final = 1
PARENT_WITHIN_S: Final = 10.0


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when to end
    line = socket.socket(fileno=descriptor)
    import lockstep.train.run  # noqa: F401  (and with it all of torch that a worker needs)

    with suppress(ImportError):
        import torch._dynamo  # noqa: F401  (which the first optimiser imports: that takes as long as torch itself)

    gc.freeze()  # workers share all this memory as long as their collectors do not walk through it
    while True:
        asked, handles, _, _ = socket.recv_fds(line, 16, 5)
        if not asked:
            return
        with os.fdopen(handles.pop(), "rb") as told:
            told.seek(0)
            request = Request(*json.load(told))
        pid, program = _fork(request, handles, line)
        if program is not None:
            become(list(program))
            return
        line.send(str(pid).encode())
        for handle in handles:
            os.close(handle)


def _fork(request: Request, handles: list[int], line: socket.socket) -> tuple[int, tuple[str, ...] | None]:
    """(pid, None) in the template, (0, the program) in the worker."""
    told, tell = os.pipe()
    first = os.fork()
    if first:
        os.close(tell)
        os.waitpid(first, 0)
        with os.fdopen(told, "rb") as answer:
            return int(answer.read()), None
    second = os.fork()
    if second:
        os.write(tell, str(second).encode())
        os._exit(0)
    os.close(told)
    os.close(tell)
    line.close()
    _settle(request, handles)
    return 0, tuple(request.command)


def _settle(request: Request, handles: list[int]) -> None:
    """Be as if `subprocess` had started us, in a session of our own, enrolled with the guardian."""
    os.setsid()
    end_s = time.monotonic() + PARENT_WITHIN_S
    while os.getppid() != request.launcher:
        if time.monotonic() > end_s:
            os._exit(1)
        time.sleep(0.0005)
    libc: Any = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request.launcher:  # it died before prctl
        os._exit(1)
    stdout, stderr, seat, guardian = handles
    with suppress(BrokenPipeError):
        os.write(guardian, b"+%d\n" % os.getpid())
    os.close(guardian)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.env)
    os.environ[request.seat] = str(seat)


if __name__ == "__main__":
    main(int(sys.argv[1]))
