"""Worker processes of a benchmark: started here, and ended however the benchmark ends.

A worker sends its results to the parent. The parent only waits, so that it takes no CPU time from the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, final

import torch
import torch.distributed as dist

from lockstep._torch import TCPStore
from lockstep.bench.network_namespaces import INTERFACE, NamespaceHost
from lockstep.errors import LockstepError

LOOPBACK = "127.0.0.1"
STORE_PORT = 29500  # on virtual hosts, where no other program runs


@dataclass(frozen=True)
class BenchWorkerFailure:
    rank: int
    at: float  # on the monotonic clock, which all processes of a machine share
    trace: str


@dataclass(frozen=True)
class WorkerDone:
    """The last message of a worker that has succeeded."""


@final
@dataclass(frozen=True)
class BenchWorker:
    """A worker's rank, its rendezvous, and its pipe to the parent."""

    rank: int
    size: int
    port: int
    wait_s: float  # the longest wait for a peer
    pipe: Connection

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.wait_s)

    def send(self, message: object) -> None:
        """Send to the parent: a text is progress (an empty one only shows life), anything else is a result."""
        self.pipe.send(message)

    def join(self, backend: str = "gloo") -> None:
        """Create the default process group. A worker sleeps in the barrier of Gloo."""
        store = TCPStore(LOOPBACK, self.port, is_master=False, timeout=self.timeout)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout)

    def join_on_host(self, hosts: Sequence[NamespaceHost], number: int, backend: str = "gloo") -> None:
        """Move to the virtual host of this number, and create the default process group. Rank 0 is on the first one."""
        hosts[number].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        store = TCPStore(hosts[0].address, STORE_PORT, is_master=self.rank == 0, timeout=self.timeout)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout)

    def leave(self) -> None:
        dist.barrier()  # no worker leaves while a peer still communicates with it
        dist.destroy_process_group()


Work = Callable[[BenchWorker, Any], None]


def run_worker(work: Work, worker: BenchWorker, job: Any) -> None:
    """Entry point of a worker process."""
    threading.Thread(target=exit_with_parent, name="lockstep-exit", daemon=True).start()
    # Ctrl-C reaches all processes of a terminal; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work(worker, job)
        worker.send(WorkerDone())
    except Exception as error:
        worker.send(BenchWorkerFailure(worker.rank, time.monotonic(), traceback.format_exc()))
        raise SystemExit(1) from error


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@final
class Workers:
    """`count` processes that run `work(worker, job)`. They are killed at the end of the `with` block."""

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
            receiver, sender = self._context.Pipe(duplex=False)
            worker = BenchWorker(rank, self.count, self._store.port, self.wait_s, sender)
            process = self._context.Process(
                target=run_worker, args=(self.work, worker, self.job), name=f"worker {rank}", daemon=True
            )
            process.start()
            sender.close()
            self._processes.append(process)
            self._pipes.append(receiver)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield (rank, result) until all workers are done; print the texts of rank 0. Raises LockstepError."""
        busy = set(range(self.count))
        while busy:
            ready = connection.wait([self._pipes[rank] for rank in busy], timeout=self.wait_s)
            if not ready:
                raise LockstepError(f"{self.doing}: no worker sent a message for {self.wait_s:g} s")
            for rank in sorted(rank for rank in busy if self._pipes[rank] in ready):
                message = self._receive(rank)
                if isinstance(message, BenchWorkerFailure):
                    raise self._error_of(message, busy - {rank})
                if isinstance(message, WorkerDone):
                    busy.remove(rank)
                elif not isinstance(message, str):
                    yield rank, message
                elif message and rank == 0:
                    self.doing = message
                    print(message, file=sys.stderr, flush=True)

    def results_by(self, key: Callable[[Any], Any]) -> Iterator[list[Any]]:
        """Yield the results of all workers, by rank, for each `key(result)`, as soon as all have sent theirs."""
        found: dict[Any, dict[int, Any]] = {}
        for rank, result in self.results():
            of_key = found.setdefault(key(result), {})
            of_key[rank] = result
            if len(of_key) == self.count:
                yield [of_key[rank] for rank in range(self.count)]

    def _error_of(self, failure: BenchWorkerFailure, others: set[int]) -> LockstepError:
        """The error of the worker that failed first. The others fail too, because they lose it."""
        failures = [failure]
        for rank in others:
            while self._pipes[rank].poll(1):
                message = self._receive(rank)
                if isinstance(message, BenchWorkerFailure):
                    failures.append(message)
                    break
                if isinstance(message, WorkerDone):
                    break
        first = min(failures, key=lambda failure: failure.at)
        return LockstepError(f"{self.doing}: {self.name(first.rank)} failed\n{first.trace}")

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(self.wait_s)
            status = self._processes[rank].exitcode
            # Other workers fail with an exception because they lose this one, so it counts as the first failure.
            return BenchWorkerFailure(rank, 0.0, f"it ended with status {status} without an error message")


def use_loopback() -> None:
    """Make Gloo use the loopback interface, instead of looking up the host's name."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def use_device(kind: str, number: int = 0) -> torch.device:
    """Device `number` of this kind, modulo how many there are. A CUDA device becomes the current one."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def finish_of(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished all queued work."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used: on a GPU for tensors, else in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def largest(mine: float) -> float:
    """The largest value of all workers."""
    value = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def device_name(kind: str) -> str:
    return torch.cuda.get_device_name(0) if kind == "cuda" else "cpu"
