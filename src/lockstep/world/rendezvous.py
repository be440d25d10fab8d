"""How workers find each other before there is a process group: one store, hosted by rank 0, and one deadline.

Addresses and ranks come from environment.py; the process group is created in world.py. This is the one place that waits
at a store (`poll_key`) and notices workers that die before they have joined: such a worker is named at once, not at the
deadline. It is known only by the process identity that it has published in the store; a process of another host cannot
be seen from here, and is never considered dead. Workers that have joined an shm group are watched there
(comm/shm/phases.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread
from typing import Any, Final, TypeVar

from torch.distributed import DistError

from lockstep._torch import HashStore, Store, TCPStore
from lockstep.errors import PeerLostError, WorldError
from lockstep.process_identity import ProcessIdentity, this_process
from lockstep.world.environment import RankAssignment

_log = logging.getLogger(__name__)

# A store answers in milliseconds. A server that accepts a connection and sends nothing for this long is not a store.
HANDSHAKE_S: Final = 30.0
# After this time one line on stderr says which worker is missing, and how long this one will wait for it.
NOTICE_S: Final = 10.0
CHECK_INTERVAL_S: Final = 0.05
RECHECK_S: Final = 0.5  # connections of a process close a moment before it has ended
READS_PER_CHECK: Final = 8  # limits the load on the store, which all workers read from
NO_PROCESSES: Final[Mapping[int, ProcessIdentity]] = {}
LOSS_TIMEOUT_S: Final = 0.3
LOSS_POLL_S: Final = 0.01
_FIRST_LOSS: Final = "first_loss"  # key in the store

Result = TypeVar("Result")


def poll_key(store: Store, key: str, check: Callable[[], None], pauses_s: Iterator[float]) -> str:
    """Return the value of a key as soon as it is there. `check` is called before every pause, and raises to give up.

    Polls, because a wait inside the store logs a long message when it times out, and notices no dead worker.
    """
    while not store.check([key]):
        check()
        time.sleep(next(pauses_s))
    return str(store.get(key).decode())


def _growing_pauses(pause_s: float, longest_s: float) -> Iterator[float]:
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


# When a worker dies, its direct peers know, and abort their other connections. The other workers only see these
# consequences, and would name these peers as the cause; so which worker was lost first is recorded in the store. The
# store may be lost too, so calls to it have a short time limit.


def publish_first_loss(store: Store, error: PeerLostError) -> PeerLostError:
    """Publish a loss unless there is one already. Returns the first one, or `error` if the store is lost."""
    text = json.dumps({"rank": error.rank, "pid": error.pid, "text": str(error)})
    first = call_with_timeout(lambda: store.compare_set(_FIRST_LOSS, "", text).decode())
    return error if first is None else _parse_loss(first)


def read_first_loss(store: Store) -> PeerLostError | None:
    """Return the loss that was published; None if there is none within LOSS_TIMEOUT_S."""
    end_s = time.monotonic() + LOSS_TIMEOUT_S

    def check() -> None:
        if time.monotonic() >= end_s:
            raise TimeoutError

    text = call_with_timeout(lambda: poll_key(store, _FIRST_LOSS, check, itertools.repeat(LOSS_POLL_S)))
    return None if text is None else _parse_loss(text)


def _parse_loss(text: str) -> PeerLostError:
    loss = json.loads(text)
    return PeerLostError(loss["text"], rank=loss["rank"], pid=loss["pid"])


def call_with_timeout(call: Callable[[], Result]) -> Result | None:
    """Return what `call`, which accesses the store, returns; None if it raises, or takes too long."""
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = Thread(target=run, name="lockstep-first-loss", daemon=True)
    thread.start()
    thread.join(2 * LOSS_TIMEOUT_S)
    return results[0] if results else None


@dataclass(frozen=True)
class KnownProcesses:
    """The process of each rank. Passed to the shm group as `init_process_group(pg_options=...)`."""

    processes: dict[int, ProcessIdentity]


class JoinLiveness:
    """Checks the processes of some ranks. All workers that use the same store name the same lost worker.

    A worker that learns of a loss may end because of it, and workers that check later find several dead. So the loss is
    published in the store before it is raised, and the first one that was published is raised by all.

    during      a clause for errors that says what the workers were doing
    store_lost  a clause for errors: this worker lost the store while ...
    """

    def __init__(self, store: Store, *, during: str, store_lost: str = "") -> None:
        self._store, self._during, self._store_lost = store, during, store_lost
        self._watched: dict[int, ProcessIdentity] = {}
        self.me = this_process()

    def watch(self, rank: int, process: ProcessIdentity) -> None:
        self._watched[rank] = process

    def check(self) -> None:
        """Raise PeerLostError if a watched process is dead."""
        for rank, process in self._watched.items():
            if process.is_dead(seen_from=self.me):
                text = f"rank {rank} (pid {process.pid}) died while {self._during}; its own output says why"
                raise self.publish_loss(PeerLostError(text, rank=rank, pid=process.pid))

    def check_repeatedly(self) -> None:
        """Raise PeerLostError if a watched process dies within RECHECK_S. Call it when a connection was closed."""
        end_s = time.monotonic() + RECHECK_S
        while time.monotonic() < end_s:
            self.check()
            time.sleep(CHECK_INTERVAL_S)

    def publish_loss(self, error: PeerLostError) -> PeerLostError:
        """Publish a loss. Returns the error to raise: that of the loss that was published first."""
        if error.rank is None:
            return error
        mine = json.dumps([error.rank, error.pid, str(error)])
        try:
            rank, pid, text = json.loads(self._store.compare_set("lost", "", mine))
        except DistError:  # the store was lost with the worker
            return error
        return error if (rank, pid) == (error.rank, error.pid) else PeerLostError(text, rank=rank, pid=pid)

    @contextmanager
    def store_access(self) -> Iterator[None]:
        """Context for calls to the store. If the store is lost, raises PeerLostError or WorldError.

        The process that hosts it may be the worker that died.
        """
        try:
            yield
        except DistError as error:
            self.check_repeatedly()
            raise WorldError(
                f"{self._store_lost}: the process that hosts it (rank 0, or torchrun) has ended; "
                "look at the first error in its output"
            ) from error


class JoinRegistry:
    """The registry of an shm group that is being created: which workers have joined, and whether they are still alive.

    Every worker registers as the first thing it does, before anything slow. So one that dies between that and the end
    of the rendezvous is named at once. The process of a worker that dies before it has registered is known only if
    another source has it: the group that this one is a subgroup of, or the identities that `lockstep.init` exchanges.
    Otherwise it is reported as missing at the deadline. Creating the registry registers this worker.

    names  global rank of each rank in the group, used in errors
    known  processes that are known already, by global rank
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[int], known: Mapping[int, ProcessIdentity] = NO_PROCESSES
    ) -> None:
        self.store, self.rank, self.names = store, rank, tuple(names)
        self._next_check_s = 0.0
        self.liveness = JoinLiveness(
            store,
            during=f"the shm group of {len(names)} workers was formed",
            store_lost=f"rank {names[rank]} lost the store while an shm group of {len(names)} was formed",
        )
        self.processes = {rank: self.liveness.me}  # by rank in the group
        self.joined = {rank}
        self._unread = deque(r for r in range(len(names)) if r != rank)
        for other in self._unread:
            if names[other] in known:
                self._add_process(other, known[names[other]])
        with self.liveness.store_access():
            store.set(f"process/{rank}", json.dumps(asdict(self.liveness.me)))

    def _add_process(self, rank: int, process: ProcessIdentity) -> None:
        self.processes[rank] = process
        self.liveness.watch(self.names[rank], process)

    def register(self, rank: int, process: ProcessIdentity) -> None:
        """Record that `rank` has joined, and which process it is."""
        self._add_process(rank, process)
        self.joined.add(rank)

    def check(self) -> None:
        """Raise PeerLostError if a worker is dead. Cheap to call in a loop: it checks every CHECK_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        with suppress(DistError):  # the next caller that needs the store reports it
            self._read_some()
        self.liveness.check()

    def _read_some(self) -> None:
        for _ in range(min(READS_PER_CHECK, len(self._unread))):
            rank = self._unread.popleft()
            if rank in self.joined:
                continue
            if self.store.check([f"process/{rank}"]):
                self.register(rank, ProcessIdentity(**json.loads(self.store.get(f"process/{rank}"))))
            else:
                self._unread.append(rank)


@dataclass(frozen=True)
class ExpectedWorkers:
    """Why other workers are expected. The texts become part of the error that names missing workers."""

    by: str = ""  # where the number comes from: "SLURM announced 2 workers (SLURM_NTASKS=2)"
    do: str = ""  # what to do if they are missing


class _Notice:
    """Prints one line, once, after NOTICE_S."""

    def __init__(self, who: str, deadline: float, expected: ExpectedWorkers) -> None:
        self._who, self._deadline, self._due_s = who, deadline, time.monotonic() + NOTICE_S
        self._why = f": {expected.by}" if expected.by else ""

    def print_if_due(self, awaited: str) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        left = f"waiting {max(0.0, self._deadline - now_s):.0f} s more (LOCKSTEP_JOIN_TIMEOUT_S)"
        _log.warning("%s waits for %s%s; %s", self._who, awaited, self._why, left)


class Rendezvous:
    """Exchanges values between workers through a store, until a deadline (of `time.monotonic`).

    `where` is the store's address, for errors.
    """

    def __init__(
        self, store: Store, rank: int, size: int, where: str, deadline: float, expected: ExpectedWorkers | None = None
    ) -> None:
        self.store, self.rank, self.size, self.where, self.deadline = store, rank, size, where, deadline
        self._expected = expected or ExpectedWorkers()
        self.processes: dict[int, ProcessIdentity] = {}
        self._liveness = JoinLiveness(
            store,
            during=f"{size} workers met at {where}",
            store_lost=f"rank {rank} of {size} lost the store at {where} while joining",
        )

    def exchange_identities(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange a description of each worker; call it first. Returns them by rank.

        If a worker dies later, those that wait in `exchange` raise PeerLostError at once.
        """
        identities = []
        with_process = mine | {"process": asdict(self._liveness.me)}
        for rank, text in enumerate(self._exchange("card", json.dumps(with_process))):
            identities.append(json.loads(text))
            self.processes[rank] = process = ProcessIdentity(**identities[-1].pop("process"))
            if rank != self.rank:
                self._liveness.watch(rank, process)
        return identities

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Publish a value, and return those of all workers, by rank. Raises WorldError if workers are missing."""
        return list(self._exchange(topic, mine))

    def _exchange(self, topic: str, mine: str) -> Iterator[str]:
        notice = _Notice(f"rank {self.rank} of {self.size}", self.deadline, self._expected)
        pauses_s = _growing_pauses(0.002, 0.25)

        def check() -> None:
            self._liveness.check()
            if time.monotonic() > self.deadline:
                raise self._missing(topic)
            if self.rank == 0:  # one line is enough
                notice.print_if_due(f"rank {rank}")

        with self._liveness.store_access():
            self.store.set(f"{topic}/{self.rank}", mine)
            for rank in range(self.size):
                yield poll_key(self.store, f"{topic}/{rank}", check, pauses_s)

    def _missing(self, topic: str) -> WorldError:
        missing = [str(rank) for rank in range(self.size) if not self.store.check([f"{topic}/{rank}"])]
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        alone = len(missing) == self.size - 1
        came = f"only rank {self.rank} came" if alone else f"{self.size - len(missing)} of {self.size} came"
        why = f"{self._expected.by}, and {came}" if self._expected.by else came
        check = (
            "check that they were started with the same MASTER_ADDR and MASTER_PORT, that they can reach "
            f"{self.where}, and that they did not fail before"
        )
        do = self._expected.do if alone and self._expected.do else check
        return WorldError(
            f"rank {self.rank} of {self.size} waited at {self.where} for rank{'s' * (len(missing) != 1)} {names}, "
            f"in vain: {why}; {do}. LOCKSTEP_JOIN_TIMEOUT_S allows more time"
        )


def open_store(assignment: RankAssignment, deadline: float, expected: ExpectedWorkers) -> Store:
    """Start the store of rank 0, or connect to it; that of a single worker cannot be reached by other processes."""
    if assignment.size == 1:
        return HashStore()
    assert assignment.addr is not None
    assert assignment.port is not None
    if assignment.rank == 0 and not assignment.agent_store:
        return _serve_store(assignment.addr, assignment.port)
    return _connect_store(assignment.addr, assignment.port, assignment, deadline, expected)


def _serve_store(addr: str, port: int) -> Store:
    """Start the store of rank 0. On a loopback address it listens only there: the store has no authentication.

    Raises WorldError if the port cannot be used.
    """
    try:
        listener, addr = _listen(addr, port)
    except OSError as error:
        raise WorldError(
            f"rank 0 cannot listen on MASTER_PORT={port}: {os.strerror(error.errno or 0)}; set MASTER_PORT to a free "
            "port, the same on every worker (`lockstep run` and `torchrun --standalone` choose one), or end what "
            f"holds it: `ss -ltnp 'sport = :{port}'` names it"
        ) from error
    timeout = timedelta(seconds=HANDSHAKE_S)
    # The store owns the descriptor from here on, and closes it.
    return TCPStore(addr, port, None, True, timeout, False, master_listen_fd=listener.detach())


def _listen(addr: str, port: int) -> tuple[socket.socket, str]:
    """Return the listening socket, and the address with which rank 0 itself connects to it."""
    try:
        loopback = addr == "localhost" or ip_address(addr).is_loopback
    except ValueError:
        loopback = False
    if loopback and ":" in addr:
        return socket.create_server((addr, port), family=socket.AF_INET6, backlog=1024), addr
    if loopback:
        addr = "127.0.0.1" if addr == "localhost" else addr
        return socket.create_server((addr, port), backlog=1024), addr
    # MASTER_ADDR may resolve to this host from outside only: listen on all interfaces, and use the loopback here.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both), "127.0.0.1"


def _connect_store(
    addr: str, port: int, assignment: RankAssignment, deadline: float, expected: ExpectedWorkers
) -> Store:
    """Connect to the store, and wait for it to start until the deadline. Raises WorldError.

    TCPStore could wait itself, but it logs a stack trace per attempt and exceeds its own timeout.
    """
    who = f"rank {assignment.rank} of {assignment.size}"
    store_host = "torchrun" if assignment.agent_store else "rank 0"
    notice = _Notice(who, deadline, expected)
    for pause_s in _growing_pauses(0.01, 0.5):
        try:
            socket.create_connection((addr, port), timeout=max(0.1, min(10.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = f": {expected.by}, and {store_host} did not come" if expected.by else ""
                do = f". If it was not started: {expected.do}" if expected.do else ""
                raise WorldError(
                    f"{who} waited for {store_host} at {addr}:{port}, in vain ({error}){why}; check that it was "
                    "started, that MASTER_ADDR and MASTER_PORT are the same on every worker, and that nothing between "
                    f"the hosts blocks the port{do}. LOCKSTEP_JOIN_TIMEOUT_S allows more time"
                ) from error
            notice.print_if_due(f"{store_host} at {addr}:{port}")
            time.sleep(pause_s)
    store = _open_client(addr, port, wait_s=max(1.0, min(HANDSHAKE_S, deadline - time.monotonic())))
    if store is None:
        raise WorldError(
            f"{who} reached {addr}:{port}, but what listens there is not the store of {store_host}; another program "
            "has the port: set MASTER_PORT to a free one, the same on every worker"
        )
    return store


def _open_client(addr: str, port: int, *, wait_s: float) -> Store | None:
    """Return a client of the store; None if the server does not behave like a store.

    Runs in a thread, because TCPStore blocks forever if the server accepts the connection and sends nothing. The thread
    then stays; it is a daemon, and the process is about to fail.
    """
    made: list[Store] = []

    def open_client() -> None:
        with suppress(DistError):  # another kind of server, which did answer
            made.append(TCPStore(addr, port, None, False, timedelta(seconds=wait_s)))

    thread = Thread(target=open_client, name="lockstep-join", daemon=True)
    thread.start()
    thread.join(wait_s)
    return made[0] if made else None
