"""Where the workers meet before there is a process group: one store, kept by rank 0, and one deadline.

It knows addresses and ranks, not where they come from (`world.detect`) nor what they are for (`world.init`).
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

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lockstep.errors import WorldError
from lockstep.world.join_liveness import Vigil
from lockstep.world.process_identity import Process

# A store answers in milliseconds. Whoever accepts our connection and then says nothing for this long is no store.
HANDSHAKE_S = 30.0
# After so long a wait, one line on stderr says whom we wait for and until when.
NOTICE_S = 10.0


@dataclass(frozen=True)
class Announced:
    """Why we expect other workers. The texts go into the error that names those who did not come."""

    by: str = ""  # who said how many there are, with its variables: "SLURM announced 2 workers (SLURM_NTASKS=2)"
    do: str = ""  # what to do if they are not there


@final
class _Notice:
    """Prints its text once, when NOTICE_S have passed."""

    def __init__(self, who: str, deadline: float) -> None:
        self._who, self._deadline, self._due_s = who, deadline, time.monotonic() + NOTICE_S

    def look(self, awaited: str, announced: Announced) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        why = f": {announced.by}" if announced.by else ""
        left = f"waiting {max(0.0, self._deadline - now_s):.0f} s more (LOCKSTEP_JOIN_TIMEOUT_S)"
        print(f"lockstep: {self._who} waits for {awaited}{why}; {left}", file=sys.stderr, flush=True)


class Meeting:
    """Everybody at one store, and the moment (of `time.monotonic`) after which we stop waiting for them."""

    def __init__(
        self, store: Store, rank: int, size: int, where: str, deadline: float, announced: Announced | None = None
    ) -> None:
        self.store, self.rank, self.size, self.where, self.deadline = store, rank, size, where, deadline
        self._announced = announced or Announced()
        self.processes: dict[int, Process] = {}
        self._vigil = Vigil(store, during=f"{size} workers met at {where}")

    def introduce(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """The first swap: what each tells of itself. Whoever dies after it is named at once by those who wait here."""
        cards = []
        mine = card | {"process": asdict(self._vigil.me)}
        for rank, text in enumerate(self._hear("card", json.dumps(mine))):
            cards.append(json.loads(text))
            self.processes[rank] = process = Process(**cards[-1].pop("process"))
            if rank != self.rank:
                self._vigil.watch(rank, process)
        return cards

    def swap(self, topic: str, mine: str) -> list[str]:
        """Tell the others, and return what each rank told."""
        return list(self._hear(topic, mine))

    def _hear(self, topic: str, mine: str) -> Iterator[str]:
        """Polls: a wait inside the store logs a page when it ends."""
        pause_s = 0.002
        notice = _Notice(f"rank {self.rank} of {self.size}", self.deadline)
        try:
            self.store.set(f"{topic}/{self.rank}", mine)
            for rank in range(self.size):
                while not self.store.check([f"{topic}/{rank}"]):
                    self._vigil.look()
                    if time.monotonic() > self.deadline:
                        raise self._missing(topic)
                    if self.rank == 0:  # one line is enough
                        notice.look(f"rank {rank}", self._announced)
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 0.25)
                yield self.store.get(f"{topic}/{rank}").decode()
        except DistError as error:
            self._vigil.look_closely()  # perhaps whoever keeps the store has just died
            raise WorldError(
                f"rank {self.rank} of {self.size} lost the store at {self.where} while joining: whoever keeps it "
                "(rank 0, or torchrun) went away; look at the first error in its output"
            ) from error

    def _missing(self, topic: str) -> WorldError:
        gone = [str(rank) for rank in range(self.size) if not self.store.check([f"{topic}/{rank}"])]
        names = ", ".join(gone[:8]) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
        alone = len(gone) == self.size - 1
        came = f"only rank {self.rank} came" if alone else f"{self.size - len(gone)} of {self.size} came"
        why = f"{self._announced.by}, and {came}" if self._announced.by else came
        check = (
            "check that they were started with the same MASTER_ADDR and MASTER_PORT, that they can reach "
            f"{self.where}, and that they did not fail before"
        )
        do = self._announced.do if alone and self._announced.do else check
        return WorldError(
            f"rank {self.rank} of {self.size} waited at {self.where} for rank{'s' * (len(gone) != 1)} {names}, "
            f"in vain: {why}; {do}. LOCKSTEP_JOIN_TIMEOUT_S allows more time"
        )


def own_store() -> Store:
    """The store of a world of one. Nobody else can reach it."""
    return HashStore()


def serve(addr: str, port: int) -> Store:
    """Rank 0 keeps the store. On the loopback only, if that is the address: the store believes whoever reaches it."""
    try:
        listener, addr = _listen(addr, port)
    except OSError as error:
        raise WorldError(
            f"rank 0 cannot listen on MASTER_PORT={port}: {os.strerror(error.errno or 0)}; set MASTER_PORT to a free "
            "port, the same on every worker (`lockstep run` and `torchrun --standalone` choose one), or end what "
            f"holds it: `ss -ltnp 'sport = :{port}'` names it"
        ) from error
    patience = timedelta(seconds=HANDSHAKE_S)
    # The store owns the descriptor from here on, and closes it.
    return TCPStore(addr, port, None, True, patience, False, master_listen_fd=listener.detach())


def _listen(addr: str, port: int) -> tuple[socket.socket, str]:
    """The listening socket, and the address at which rank 0 itself finds it."""
    try:
        loopback = addr == "localhost" or ip_address(addr).is_loopback
    except ValueError:
        loopback = False
    if loopback and ":" in addr:
        return socket.create_server((addr, port), family=socket.AF_INET6, backlog=1024), addr
    if loopback:
        addr = "127.0.0.1" if addr == "localhost" else addr
        return socket.create_server((addr, port), backlog=1024), addr
    # MASTER_ADDR may be a name that leads here from outside only, so we listen everywhere and go the short way.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both), "127.0.0.1"


def connect(
    addr: str, port: int, *, deadline: float, who: str, keeper: str, announced: Announced | None = None
) -> Store:
    """Knock until somebody listens, then shake hands.

    TCPStore would do both, but it logs a stack trace per attempt and does not keep to its own timeout.
    """
    pause_s = 0.01
    announced = announced or Announced()
    notice = _Notice(who, deadline)
    while True:
        try:
            socket.create_connection((addr, port), timeout=max(0.1, min(10.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = f": {announced.by}, and {keeper} did not come" if announced.by else ""
                do = f". If it was not started: {announced.do}" if announced.do else ""
                raise WorldError(
                    f"{who} waited for {keeper} at {addr}:{port}, in vain ({error}){why}; check that it was started, "
                    "that MASTER_ADDR and MASTER_PORT are the same on every worker, and that nothing between the "
                    f"hosts blocks the port{do}. LOCKSTEP_JOIN_TIMEOUT_S allows more time"
                ) from error
            notice.look(f"{keeper} at {addr}:{port}", announced)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)
    store = _shake_hands(addr, port, wait_s=max(1.0, min(HANDSHAKE_S, deadline - time.monotonic())))
    if store is None:
        raise WorldError(
            f"{who} reached {addr}:{port}, but what listens there is not the store of {keeper}; another program has "
            "the port: set MASTER_PORT to a free one, the same on every worker"
        )
    return store


def _shake_hands(addr: str, port: int, *, wait_s: float) -> Store | None:
    """None if the other side does not behave like a store.

    In a thread, because TCPStore waits for ever for a stranger that accepts the connection and says nothing. The
    thread then stays behind; it is a daemon, and the process is about to fail.
    """
    made: list[Store] = []

    def shake_hands() -> None:
        try:
            made.append(TCPStore(addr, port, None, False, timedelta(seconds=wait_s)))
        except DistError:
            return  # a stranger that did answer

    thread = Thread(target=shake_hands, name="lockstep-join", daemon=True)
    thread.start()
    thread.join(wait_s)
    return made[0] if made else None
