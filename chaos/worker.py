"""What happens inside a worker: it joins a group, runs collectives until a worker dies, says what it was told, leaves
the group, and forms a new one with the other survivors.

Words that travel over the pipe: Join -> Formed, Told, Left; Reform -> Reformed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import collectives
from board import Board, Note
from leftovers import Holdings, holdings, settle
from lockstep.errors import LockstepError, PeerLostError
from plan import COLLECTIVES, MIXED, Case, Event

SLOW_S = 0.2  # how long the slow one sleeps
CHILD_S = 30  # a child that outlives its parent ends by itself after this
STORE_S = 10.0  # what a store may take: it lives in the driver, which is never killed


@dataclass(frozen=True)
class Address:
    """Where a group meets: a file, or a port of this machine."""

    path: str = ""
    port: int = 0

    def open(self, timeout_s: float) -> dist.Store:
        if self.path:
            return dist.FileStore(self.path)
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class Join:
    case: Case
    rank: int
    address: Address
    backend: str


@dataclass(frozen=True)
class Formed:
    formed_s: float


@dataclass(frozen=True)
class Told:
    """How the loop of a survivor ended. Times are of the monotonic clock, which all processes share."""

    error: str  # the class of the exception
    peer_lost: bool
    ours: bool  # any error that this library raises on purpose
    text: str
    rank: int | None
    pid: int | None
    where: str  # the collective it was in, "forming", or "never"
    entered_s: float  # when it had entered that
    raised_s: float
    trace: str


@dataclass(frozen=True)
class Left:
    """The group is destroyed."""

    took_s: float
    problem: str
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class Reform:
    rank: int
    size: int
    address: Address
    backend: str


@dataclass(frozen=True)
class Reformed:
    problem: str
    leftovers: tuple[str, ...]


def serve(pipe: Connection, board_path: Path, row: int, stacks: Path) -> None:
    """The life of a worker. It ends when the driver hangs up, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)  # names that newer torch spells differently
        worker = Worker(Board(board_path), row, pipe, driver_pid=_end_with_the_driver())
        with contextlib.suppress(EOFError, BrokenPipeError):
            pipe.send(os.getpid())
            worker.listen()
    os._exit(0)


def _end_with_the_driver() -> int:
    """Its pid."""
    driver = multiprocessing.parent_process()
    assert driver is not None

    def watch() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=watch, name="driver", daemon=True).start()
    assert driver.pid is not None
    return driver.pid


class Worker:
    def __init__(self, board: Board, row: int, pipe: Connection, *, driver_pid: int) -> None:
        self._board, self._row, self._pipe, self._driver_pid = board, row, pipe, driver_pid
        self._note = Note()
        self._where, self._entered_s = "never", 0.0
        self._before: Holdings

    def listen(self) -> None:
        torch.ones(2).sum()
        torch.cuda.is_available()  # which torch's barrier asks too: a driver starts a thread then, and keeps it
        self._before = holdings()
        while True:
            command = self._pipe.recv()
            if isinstance(command, Join):
                self._take_part(command)
                self._pipe.send(self._leave())
            elif isinstance(command, Reform):
                self._pipe.send(self._reform(command))

    # ------------------------------------------------------------------------------------ until a worker dies

    def _take_part(self, join: Join) -> None:
        self._note = Note()
        try:
            store = join.address.open(STORE_S)
            with self._inside("forming"):
                _init(join, store)
                member = collectives.GroupMember(join.rank, join.case.workers, timedelta(seconds=join.case.timeout_s))
                if join.case.collective in ("subgroup", MIXED):
                    collectives.make_halves(member)
            if join.case.event is Event.CHILD and join.rank in join.case.victims:
                self._leave_an_heir()
            self._pipe.send(Formed(time.monotonic()))
            self._loop(join.case, member)
        except Exception as error:
            raised_s = time.monotonic()
            told = Told(
                error=type(error).__name__,
                peer_lost=isinstance(error, PeerLostError),
                ours=isinstance(error, LockstepError),
                text=str(error),
                rank=getattr(error, "rank", None),
                pid=getattr(error, "pid", None),
                where=self._where,
                entered_s=self._entered_s,
                raised_s=raised_s,
                trace="" if isinstance(error, PeerLostError) else traceback.format_exc(),
            )
        self._pipe.send(told)

    def _loop(self, case: Case, member: collectives.GroupMember) -> None:
        dice = Random(f"steps {case.seed} {case.number}")  # falls alike on all workers
        end_s = time.monotonic() + case.patience_s
        while time.monotonic() < end_s:
            name = dice.choice(COLLECTIVES) if case.collective == MIXED else case.collective
            if case.event is Event.NEW_GROUP:
                name = "new_group"
            with self._inside(name):
                collectives.by_name(name)(member, dice)
            if member.rank == case.slow_rank:
                time.sleep(SLOW_S)
        raise TimeoutError(f"went on for {case.patience_s:g} s, and no collective failed")

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        """The board is told; after an error `_where` and `_entered_s` stay as they are."""
        self._where, self._entered_s = name, time.monotonic()
        place = COLLECTIVES.index(name) if name in COLLECTIVES else -1
        done, child = self._note.steps, self._note.child
        self._board.write(self._row, Note(place, 1, done, child))
        yield
        self._note = Note(place, 0, done + 1, child)
        self._board.write(self._row, self._note)

    def _leave_an_heir(self) -> None:
        """A child that does nothing, but holds every descriptor and mapping that we hold."""
        parents = (os.getpid(), os.getppid(), self._driver_pid)
        child = os.fork()
        if child == 0:
            end_s = time.monotonic() + CHILD_S
            while os.getppid() in parents and time.monotonic() < end_s:
                time.sleep(0.1)
            os._exit(0)
        self._note = Note(child=child, steps=self._note.steps)
        self._board.write(self._row, self._note)

    # ------------------------------------------------------------------------------------------------- afterwards

    def _leave(self) -> Left:
        started_s = time.monotonic()
        problem = ""
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            # Torch counts groups to name them, and forgets to start anew when init_process_group failed; the next group
            # would look for its peers under another name than they have.
            dist.distributed_c10d._world.group_count = 0
        except Exception:
            problem = traceback.format_exc()
        took_s = time.monotonic() - started_s
        return Left(took_s, problem, self._leftovers())

    def _leftovers(self) -> tuple[str, ...]:
        gc.collect()
        if found := tuple(settle(self._before)):
            self._before = holdings()  # said once
        return found

    def _reform(self, reform: Reform) -> Reformed:
        """As recovery will do it: a group of its own, without init_process_group and its global state."""
        problem = ""
        try:
            _meet_again(reform)
        except Exception:
            problem = traceback.format_exc()
        return Reformed(problem, self._leftovers())


def _init(join: Join, store: dist.Store) -> None:
    dist.init_process_group(
        join.backend,
        store=store,
        rank=join.rank,
        world_size=join.case.workers,
        timeout=timedelta(seconds=join.case.timeout_s),
    )


def _meet_again(reform: Reform) -> None:
    store = dist.PrefixStore("again", reform.address.open(STORE_S))
    group: Any
    if reform.backend == "shm":
        from lockstep.comm.shm import ShmGroup

        group = ShmGroup(store, reform.rank, reform.size, timedelta(seconds=10))
    else:
        group = dist.ProcessGroupGloo(store, reform.rank, reform.size, timedelta(seconds=10))
    tensor = torch.full((1000,), float(reform.rank + 1))
    group.allreduce([tensor]).wait()
    collectives.expect(tensor, reform.size * (reform.size + 1) // 2, "all_reduce of the survivors")
    group.shutdown()
