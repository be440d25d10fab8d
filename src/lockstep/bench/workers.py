"""The worker processes of a benchmark: started, listened to, and ended however the benchmark ends.

A worker does its work and tells the parent what it finds. The parent only waits, so that it takes no time from them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, final

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.errors import LockstepError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Failure:
    rank: int
    at: float  # on the monotonic clock, which all processes of a machine share
    trace: str


@dataclass(frozen=True)
class Done:
    """The last word of a worker."""


@final
@dataclass(frozen=True)
class Seat:
    """A worker's place among the others, and its line to the parent."""

    rank: int
    size: int
    port: int
    wait_s: float  # the longest wait for a peer
    pipe: Connection

    @property
    def patience(self) -> timedelta:
        return timedelta(seconds=self.wait_s)

    def tell(self, message: object) -> None:
        """A text says where we are (an empty one, that we live); anything else is a result."""
        self.pipe.send(message)

    def join(self) -> None:
        """The default process group, on Gloo. Who waits in its barrier sleeps."""
        store = TCPStore(LOOPBACK, self.port, is_master=False, timeout=self.patience)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=self.patience)

    def leave(self) -> None:
        dist.barrier()  # nobody leaves while a peer still talks to it
        dist.destroy_process_group()


Work = Callable[[Seat, Any], None]


def live(work: Work, seat: Seat, job: Any) -> None:
    """A worker's life."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends us
    try:
        work(seat, job)
        seat.tell(Done())
    except Exception as error:
        seat.tell(Failure(seat.rank, time.monotonic(), traceback.format_exc()))
        raise SystemExit(1) from error


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@final
class Workers:
    """`count` processes that do `work(seat, job)`. Leaving the `with` block ends them, however it is left."""

    def __init__(
        self, count: int, work: Work, job: Any, *, wait_s: float, name: Callable[[int], str] | None = None
    ) -> None:
        self.count, self.work, self.job, self.wait_s = count, work, job, wait_s
        self.name = name or (lambda rank: f"worker {rank} of {count}")
        self.doing = "starting"
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> Workers:
        use_loopback()
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # 0: the system picks the port
        self._processes, self._pipes = [], []
        for rank in range(self.count):
            ours, theirs = self._context.Pipe(duplex=False)
            seat = Seat(rank, self.count, self._store.port, self.wait_s, theirs)
            process = self._context.Process(
                target=live, args=(self.work, seat, self.job), name=f"worker {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def results(self) -> Iterator[tuple[int, Any]]:
        """(rank, what it found), as it comes, until the last worker is done. Texts of rank 0 go to the terminal."""
        busy = set(range(self.count))
        while busy:
            ready = connection.wait([self._pipes[rank] for rank in busy], timeout=self.wait_s)
            if not ready:
                raise LockstepError(f"{self.doing}: no worker gave a sign of life for {self.wait_s:g} s")
            for rank in sorted(rank for rank in busy if self._pipes[rank] in ready):
                message = self._receive(rank)
                if isinstance(message, Failure):
                    raise self._error_of(message, busy - {rank})
                if isinstance(message, Done):
                    busy.remove(rank)
                elif not isinstance(message, str):
                    yield rank, message
                elif message and rank == 0:
                    self.doing = message
                    print(message, file=sys.stderr, flush=True)

    def _error_of(self, failure: Failure, others: set[int]) -> LockstepError:
        """The others fail too, because they lose this worker; the one that failed first is the one to show."""
        failures = [failure]
        for rank in others:
            while self._pipes[rank].poll(1):
                message = self._receive(rank)
                if isinstance(message, Failure):
                    failures.append(message)
                    break
                if isinstance(message, Done):
                    break
        first = min(failures, key=lambda failure: failure.at)
        return LockstepError(f"{self.doing}: {self.name(first.rank)} failed\n{first.trace}")

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(self.wait_s)
            status = self._processes[rank].exitcode
            # Others fail with an exception because they lose this one, so it comes first, whenever we notice.
            return Failure(rank, 0.0, f"it ended with status {status} without a word")


def use_loopback() -> None:
    """Gloo looks the host's name up to find its interface; on one machine the loopback is the right one."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
