"""Nobody outlives the launcher, not even one that is SIGKILLed.

Two nets, because each has a hole:
- A guardian: a small fork of the launcher that blocks on a pipe. When the launcher is gone, whatever the reason, the
  pipe ends, and the guardian kills the process group of every worker: DataLoader workers and other children included.
  The hole: somebody kills the guardian as well (`pkill -9 lockstep` finds both).
- PR_SET_PDEATHSIG on each worker (Linux): the kernel kills the worker itself when the launcher dies. The hole: it is
  not inherited, so the worker's own children are not covered; DataLoader workers notice by themselves in seconds.

For those that do end in time, the launcher adopts orphans (Linux): it can then see that they are gone, even where
process 1 of a container does not collect the dead.

Not covered by any of it: a child that left its worker's process group on purpose (setsid, daemons).

Note [Semaphores]
Processes that are spawned (not forked) share named semaphores, such as those of a DataLoader's queues. Python unlinks
the ones of a process that was killed in a "resource tracker", a child of that process, which is killed with its group
here. So a worker gives its semaphores a prefix, and whoever kills its group unlinks what has that prefix.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """From now on, a process whose parent dies becomes our child, if it descends from us."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


SEMAPHORES: Final = "/dev/shm/sem"  # where Linux has named semaphores


def name_semaphores(env: Mapping[str, str]) -> None:
    """In a worker: let its semaphores, and those of processes that it starts, have its prefix: Note [Semaphores]."""
    from multiprocessing import process

    config = getattr(process.current_process(), "_config", None)
    if isinstance(config, dict):
        config["semprefix"] = prefix_of_semaphores(env.get("LOCKSTEP_RUN_ID", ""), os.getpid())


def prefix_of_semaphores(run: str, worker: int) -> str:
    """Containers may share a /dev/shm and have processes with the same number: so the run is in it."""
    return f"/mp-{hashlib.sha256(run.encode()).hexdigest()[:8]}-{worker}"


def unlink_semaphores(run: str, worker: int) -> None:
    """Of a worker whose whole group was killed."""
    for path in glob.glob(f"{SEMAPHORES}.{prefix_of_semaphores(run, worker)[1:]}-*"):
        with suppress(OSError):
            os.unlink(path)


class Guardian:
    """Keeps the list of process groups that must not outlive us. Enter it before the first worker is started, and
    while the launcher has one thread only: it forks."""

    def __init__(self, run: str = "") -> None:
        """`run`: the LOCKSTEP_RUN_ID of the workers."""
        self._pid, self._run = 0, run
        self._pipe = -1

    def __enter__(self) -> Guardian:
        read_end, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _guard(read_end, self._run)
            finally:
                os._exit(0)
        os.close(read_end)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._pipe)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def enrol(self) -> Callable[[], None]:
        """To be called by a new worker between fork and exec, as leader of its own process group.

        The worker enrols itself: until it has, it holds the pipe open, so the guardian cannot miss it.
        """
        launcher, pipe = os.getpid(), self._pipe

        def between_fork_and_exec() -> None:
            if _libc is not None:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:  # it died before prctl; the kernel will not tell us any more
                os._exit(1)
            with suppress(BrokenPipeError):
                os.write(pipe, b"+%d\n" % os.getpid())

        return between_fork_and_exec

    @property
    def pipe(self) -> int:
        """For somebody who starts workers in our place."""
        return self._pipe

    def release(self, group: int) -> None:
        """The group is gone. Its number may soon belong to somebody else."""
        unlink_semaphores(self._run, group)
        with suppress(BrokenPipeError):
            os.write(self._pipe, b"-%d\n" % group)


def _guard(read_end: int, run: str) -> None:
    """The life of the guardian: out of reach of Ctrl-C and hang-ups, holding nothing of the launcher's open."""
    os.setsid()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    os.dup2(read_end, 0)
    os.closerange(1, 65536)
    groups: set[int] = set()
    rest = b""
    while chunk := os.read(0, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        unlink_semaphores(run, group)
