"""Kills all workers when the launcher ends, even if the launcher was killed by SIGKILL.

Two mechanisms, because each has a gap:
- A watch process: a small fork of the launcher that blocks on a pipe. When the launcher ends for any reason, the pipe
  ends, and the watch process kills the process group of every worker, DataLoader workers and other children included.
  The gap: the watch process may be killed as well (`pkill -9 lockstep` matches both).
- PR_SET_PDEATHSIG on each worker (Linux): the kernel kills the worker when the launcher dies. The gap: it is not
  inherited, so the worker's own children are not covered; DataLoader workers notice it themselves within seconds.

The launcher also adopts orphans (Linux): it can then see that the children of a worker have ended, even where process 1
of a container does not reap them.

Not covered: a child that has left its worker's process group on purpose (setsid, daemons).

Note [Semaphores]
Processes that are spawned (not forked) share named semaphores, such as those of a DataLoader's queues. If a process is
killed, Python unlinks its semaphores in a "resource tracker", a child of that process, which is killed with the group
here. So a worker gives its semaphores a prefix, and the process that kills the group unlinks what has that prefix.

Note [Shared memory of NCCL]
NCCL creates files in /dev/shm while it forms a communicator, and unlinks them when all that need them have mapped them.
Those of a worker that is killed meanwhile stay, and nothing in their names tells whose they are. So whenever a worker
has ended, files of this user are unlinked that were created during this run, are so old that even containers which
share /dev/shm, and whose processes cannot be seen, have mapped theirs, and that no process maps or has open. Files of
the last minute of a run stay.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """From now on, a descendant of this process whose parent dies becomes a child of this process."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


SEMAPHORE_PATH: Final = "/dev/shm/sem"  # beginning of the file names of Linux's named semaphores


def name_semaphores(run: str) -> None:
    """Called in a worker: its semaphores, and those of processes that it starts, get its prefix: Note [Semaphores]."""
    from multiprocessing import process

    config = getattr(process.current_process(), "_config", None)
    if isinstance(config, dict):
        config["semprefix"] = semaphore_prefix(run, os.getpid())


def semaphore_prefix(run: str, worker: int) -> str:
    """Contains the run's id, because containers may share a /dev/shm and have processes with equal pids."""
    return f"/mp-{hashlib.sha256(run.encode()).hexdigest()[:8]}-{worker}"


def unlink_semaphores(run: str, worker: int) -> None:
    """Removes the semaphores of a worker whose whole process group was killed."""
    for path in glob.glob(f"{SEMAPHORE_PATH}.{semaphore_prefix(run, worker)[1:]}-*"):
        with suppress(OSError):
            os.unlink(path)


NCCL_PATH: Final = "/dev/shm/nccl-"  # beginning of the file names of NCCL's shared memory
NCCL_SETUP_S: Final = 60.0


def unlink_nccl_files(since_s: float) -> None:
    """Removes shared memory of NCCL that killed workers have left, if it was created after `since_s` (time.time()).

    See Note [Shared memory of NCCL].
    """
    found, now_s = set[bytes](), time.time()
    for path in glob.glob(os.fsencode(f"{NCCL_PATH}*")):
        with suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.getuid() and since_s <= status.st_mtime <= now_s - NCCL_SETUP_S:
                found.add(path)
    for process in Path("/proc").glob("[0-9]*") if found else ():
        with suppress(OSError):  # it has ended, or it may not be looked into
            found = _without_used(found, process)
    for path in found:
        with suppress(OSError):
            os.unlink(path)


def _without_used(paths: set[bytes], process: Path) -> set[bytes]:
    """Returns the paths that this process neither maps nor has open. Raises OSError if that cannot be seen."""
    maps = (process / "maps").read_bytes()
    paths = {path for path in paths if path not in maps}
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.discard(os.fsencode(os.readlink(descriptor)))
    return paths


class ParentWatch:
    """The launcher's side of the watch process, which knows the process groups that must not outlive the launcher.

    Enter it before the first worker is started, and while the launcher has a single thread: it forks.
    """

    def __init__(self, run: str = "") -> None:
        """`run` is the LOCKSTEP_RUN_ID of the workers."""
        self._pid, self._run, self._began_s = 0, run, time.time()
        self.pipe = -1  # the writing end, for workers that another process forks; owned by this object

    def __enter__(self) -> ParentWatch:
        read_end, self.pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self.pipe)
                _watch(read_end, self._run)
            finally:
                os._exit(0)
        os.close(read_end)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.pipe)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def child_setup(self) -> Callable[[], None]:
        """Returns `register_child` for the children of this process: a `preexec_fn`."""
        return functools.partial(register_child, os.getpid(), self.pipe)

    def release(self, group: int) -> None:
        """Forgets a group that has ended: its number may soon belong to other processes."""
        unlink_semaphores(self._run, group)
        unlink_nccl_files(self._began_s)
        with suppress(BrokenPipeError):
            os.write(self.pipe, b"-%d\n" % group)


def register_child(launcher: int, pipe: int) -> None:
    """Called by a new worker between fork and exec, as leader of its own process group.

    `launcher` is the pid of its parent, `pipe` the one of ParentWatch. The worker registers itself: until it has, it
    holds the pipe open, so the watch process cannot miss it.
    """
    end_with_parent(launcher)
    with suppress(BrokenPipeError):
        os.write(pipe, b"+%d\n" % os.getpid())


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (Linux). Ends it if the parent has ended already."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl, so the kernel sends no signal
        os._exit(1)


def _watch(read_end: int, run: str) -> None:
    """Runs in the watch process. It ignores Ctrl-C and hang-ups, and closes all descriptors of the launcher."""
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
