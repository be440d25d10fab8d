"""The workers as the driver sees them: started, spoken to, killed, collected."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import leftovers
import worker
from board import Board, Note

START_S = 60.0
ROWS = 4096  # of the board: more than workers that can be told apart at any time
MARK = "LOCKSTEP_CHAOS"  # in the environment of all processes we start, so that they can be found

# Loaded once, in a server that forks the workers: a new one is there in a tenth of a second.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "lockstep.comm.shm"]
_context = mp.get_context("forkserver")

_Word = TypeVar("_Word")


class Silent(Exception):
    """A worker did not say what it should have, in time. The text tells where it hangs, or that it died."""


@dataclass
class Member:
    row: int  # of the board
    pid: int
    process: Any
    pipe: Connection
    stacks: Path

    def send(self, command: object) -> None:
        self.pipe.send(command)

    def receive(self, kind: type[_Word], end_s: float, *, passing_over: type | None = None) -> _Word:
        """The next word, which must be of this kind; one word of another kind may come before."""
        try:
            if not self.pipe.poll(max(0.0, end_s - time.monotonic())):
                raise Silent(f"pid {self.pid}: no {kind.__name__} came; it was at\n{self._stack()}")
            word = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise Silent(f"pid {self.pid} died by itself, exit status {self.collect()}") from error
        if isinstance(word, kind):
            return word
        if passing_over is not None and isinstance(word, passing_over):
            return self.receive(kind, end_s)
        raise Silent(f"pid {self.pid}: {word} came instead of {kind.__name__}")

    def _stack(self) -> str:
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)
        # The main thread comes last.
        return self.stacks.read_text().rpartition("\n\n")[2][:2500] or "(it does not even handle a signal)"

    def kill(self) -> float:
        """When."""
        now_s = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        return now_s

    def stop(self) -> float:
        now_s = time.monotonic()
        os.kill(self.pid, signal.SIGSTOP)
        return now_s

    def go_on(self) -> float:
        now_s = time.monotonic()
        os.kill(self.pid, signal.SIGCONT)
        return now_s

    def collect(self) -> int | None:
        """Waits for the end of the process, and takes its status so that no zombie stays."""
        self.process.join(5)
        self.pipe.close()
        status: int | None = self.process.exitcode
        return status


class Fleet:
    """Up to a number of workers, replaced as they die. With `with`: no process outlives it."""

    def __init__(self) -> None:
        _context.set_forkserver_preload(PRELOADED)
        os.environ[MARK] = self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._scratch = tempfile.TemporaryDirectory(prefix="lockstep-chaos-")
        self.folder = Path(self._scratch.name)
        self._members: list[Member] = []
        self._rows = 0
        self._board = Board.create(self.folder / "board", ROWS)

    def get(self, count: int) -> list[Member]:
        """So many, alive: those that are left from before, and new ones."""
        fresh = [self._start() for _ in range(count - len(self._members))]
        end_s = time.monotonic() + START_S
        for member in fresh:
            member.pid = member.receive(int, end_s)
        self._members += fresh
        chosen = self._members[:count]
        for member in chosen:
            self._board.write(member.row, Note())  # what it notes is of the coming case
        return chosen

    def _start(self) -> Member:
        row, self._rows = self._rows, (self._rows + 1) % ROWS
        ours, theirs = _context.Pipe()
        stacks = self.folder / f"stacks-{row}"
        process = _context.Process(target=worker.serve, args=(theirs, self.folder / "board", row, stacks), daemon=True)
        process.start()
        theirs.close()
        return Member(row, process.pid or 0, process, ours, stacks)

    def note(self, member: Member) -> Note:
        return self._board.read(member.row)

    def reap(self, member: Member) -> None:
        """After its death: collected, and its child too."""
        member.collect()
        self._members.remove(member)
        if child := self.note(member).child:
            os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)  # it became ours when its parent died, if we adopt orphans

    def discard(self, member: Member) -> None:
        """Something is wrong with it: it does not take part again."""
        if member in self._members:
            with contextlib.suppress(ProcessLookupError):
                member.kill()
            self.reap(member)

    def strangers(self) -> list[str]:
        """Unknown processes: not ours, nor the fork server and its tracker, nor a worker."""
        known = {os.getpid(), *(member.pid for member in self._members), *_service_pids()}
        end_s = time.monotonic() + leftovers.SETTLE_S
        while True:
            found = {pid: name for pid, name in leftovers.marked_processes(self.mark).items() if pid not in known}
            if not found or time.monotonic() > end_s:
                return [f"process {pid} {name}" for pid, name in found.items()]
            time.sleep(0.02)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for member in list(self._members):
            self.discard(member)
        self._board.close()
        self._scratch.cleanup()


def _service_pids() -> set[int]:
    from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
    from multiprocessing.resource_tracker import _resource_tracker  # type: ignore[attr-defined]

    return {pid for pid in (_forkserver._forkserver_pid, _resource_tracker._pid) if pid is not None}


def adopt_orphans() -> None:
    """From now on a child of a dead worker becomes ours, so that we can collect it."""
    set_child_subreaper = 36  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)
