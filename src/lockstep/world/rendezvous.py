"""How workers find each other before there is a process group: one store, hosted by rank 0, and one deadline.

Addresses and ranks come from environment.py; the process group is created in world.py.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread
from typing import Any, final

from torch.distributed import DistError

from lockstep._torch import HashStore, Store, TCPStore
from lockstep.errors import WorldError
from lockstep.world.join_liveness import JoinLiveness
from lockstep.world.process_identity import ProcessIdentity

# A store answers in milliseconds. A server that accepts a connection and sends nothing for this long is not a store.
HANDSHAKE_S = 30.0
# After this time one line on stderr says which worker is missing, and how long this one will wait for it.
NOTICE_S = 10.0


@dataclass(frozen=True)
class ExpectedWorkers:
    """Why other workers are expected. The texts become part of the error that names missing workers."""

    by: str = ""  # where the number comes from: "SLURM announced 2 workers (SLURM_NTASKS=2)"
    do: str = ""  # what to do if they are missing


@final
class _Notice:
    """Prints one line, once, after NOTICE_S."""

    def __init__(self, who: str, deadline: float) -> None:
        self._who, self._deadline, self._due_s = who, deadline, time.monotonic() + NOTICE_S

    def print_if_due(self, awaited: str, expected: ExpectedWorkers) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        why = f": {expected.by}" if expected.by else ""
        left = f"waiting {max(0.0, self._deadline - now_s):.0f} s more (LOCKSTEP_JOIN_TIMEOUT_S)"
        print(f"lockstep: {self._who} waits for {awaited}{why}; {left}", file=sys.stderr, flush=True)


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
        self._liveness = JoinLiveness(store, during=f"{size} workers met at {where}")

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
        """Polls, because a wait inside the store logs a long message when it times out."""
        pause_s = 0.002
        notice = _Notice(f"rank {self.rank} of {self.size}", self.deadline)
        try:
            self.store.set(f"{topic}/{self.rank}", mine)
            for rank in range(self.size):
                while not self.store.check([f"{topic}/{rank}"]):
                    self._liveness.check()
                    if time.monotonic() > self.deadline:
                        raise self._missing(topic)
                    if self.rank == 0:  # one line is enough
                        notice.print_if_due(f"rank {rank}", self._expected)
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 0.25)
                yield self.store.get(f"{topic}/{rank}").decode()
        except DistError as error:
            self._liveness.check_repeatedly()  # the worker that hosts the store may have just died
            raise WorldError(
                f"rank {self.rank} of {self.size} lost the store at {self.where} while joining: the process that hosts "
                "it (rank 0, or torchrun) has ended; look at the first error in its output"
            ) from error

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


def create_local_store() -> Store:
    """Return the store of a single worker. Other processes cannot reach it."""
    return HashStore()


def serve_store(addr: str, port: int) -> Store:
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


def connect_store(
    addr: str, port: int, *, deadline: float, who: str, store_host: str, expected: ExpectedWorkers | None = None
) -> Store:
    """Connect to the store, and wait for it to start until the deadline. Raises WorldError.

    TCPStore could wait itself, but it logs a stack trace per attempt and exceeds its own timeout.
    """
    pause_s = 0.01
    expected = expected or ExpectedWorkers()
    notice = _Notice(who, deadline)
    while True:
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
            notice.print_if_due(f"{store_host} at {addr}:{port}", expected)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)
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
        try:
            made.append(TCPStore(addr, port, None, False, timedelta(seconds=wait_s)))
        except DistError:
            return  # another kind of server, which did answer

    thread = Thread(target=open_client, name="lockstep-join", daemon=True)
    thread.start()
    thread.join(wait_s)
    return made[0] if made else None
