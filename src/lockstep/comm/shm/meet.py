"""How the workers of one host get hold of each other's memory.

Each listens at a Unix socket without a file (Linux' abstract names), at a random name that only the store tells. Over
it go the file descriptors of the segments. The kernel says who is at the other end: another user is turned away, and
so is whoever does not know the secret of this job. Afterwards the sockets are closed; what stays is, for every peer,
the mapping of its memory and a descriptor that becomes readable when its process is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from lockstep.comm.shm.memory import Segment
from lockstep.errors import PeerLost, WorldError

LOOK_S: Final = 0.05
ASK_S: Final = 0.002
SAY_S: Final = 1.0


@dataclass(frozen=True)
class Peer:
    """Another worker of this host."""

    rank: int
    pid: int
    segment: Segment
    alive_fd: int  # readable when the process is gone: a pidfd, or else the socket to it
    offer: int  # what it offered

    def close(self) -> None:
        os.close(self.alive_fd)


@dataclass(frozen=True)
class _Card:
    name: str
    pid: int
    pid_space: str
    host: str


class _Gathering:
    """One formation of a group. Everything that waits is here, and watches those it waits for."""

    def __init__(self, store: Store, rank: int, names: Sequence[int], deadline: float) -> None:
        self.store, self.rank, self.names, self.size, self.deadline = store, rank, names, len(names), deadline
        self.cards: dict[int, _Card] = {}
        self._watched: dict[int, int] = {}  # pidfd -> rank
        self._poll = select.poll()

    def swap_cards(self, mine: _Card) -> None:
        self.store.set(f"card/{self.rank}", json.dumps(vars(mine)))
        for rank in range(self.size):
            while not self.store.check([f"card/{rank}"]):
                self.look(rank, "has not come")
                time.sleep(ASK_S)
            card = _Card(**json.loads(self.store.get(f"card/{rank}")))
            self.cards[rank] = card
            if card.pid_space == mine.pid_space and rank != self.rank:
                self._watch(rank, card.pid)

    def _watch(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # gone already, and nobody knows its number any more
            raise self._died(rank) from None
        except (OSError, AttributeError):
            return
        self._watched[fd] = rank
        self._poll.register(fd, select.POLLIN)

    def look(self, missing: int, how: str) -> None:
        """Between two looks for `missing`: is anybody dead, is it too late?"""
        for fd, _ in self._poll.poll(0):
            raise self._died(self._watched[fd])
        if time.monotonic() > self.deadline:
            card = self.cards.get(missing)
            who = f"rank {self.names[missing]}" + (f" (pid {card.pid} on {card.host})" if card else "")
            raise WorldError(
                f"rank {self.names[self.rank]} waited for {who} to form an shm group of {self.size}, and it {how}; "
                "check that all workers call init_process_group or new_group together, with the same backend"
            )

    def _died(self, rank: int) -> PeerLost:
        name, pid = self.names[rank], self.cards[rank].pid
        return PeerLost(
            f"rank {name} (pid {pid}) died while the shm group of {self.size} workers was formed; "
            "its own output says why",
            rank=name,
            pid=pid,
        )

    def look_closely(self, missing: int) -> None:
        """It has closed its socket, which happens a moment before its process has ended."""
        for _ in range(10):
            self.look(missing, "has not answered")
            time.sleep(LOOK_S)

    def close(self) -> None:
        for fd in self._watched:
            os.close(fd)


def meet(
    store: Store, rank: int, names: Sequence[int], segment: Segment, *, offer: int, deadline: float
) -> dict[int, Peer]:
    """Exchange segments with every other rank of the group, and a number on the way. `names`: for errors."""
    size = len(names)
    if size == 1:
        return {}
    if rank == 0:
        store.set("secret", secrets.token_hex(16))
    gathering = _Gathering(store, rank, names, deadline)
    peers: dict[int, Peer] = {}
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
        undo.callback(close, peers)
        opened.callback(gathering.close)
        listener = opened.enter_context(_socket())
        listener.bind(b"\0lockstep-" + secrets.token_hex(16).encode())
        listener.listen(size)
        name = bytes(listener.getsockname())[1:].decode()
        gathering.swap_cards(_Card(name, os.getpid(), _pid_space(), socket.gethostname()))
        secret = store.get("secret").decode()
        hello = {"secret": secret, "rank": rank, "size": segment.size, "offer": offer}
        # First everybody calls the lower ranks, which needs nobody's answer; then everybody answers the higher ones.
        calls = {}
        for lower in range(rank):
            calls[lower] = opened.enter_context(_call(gathering, lower))
            _hand_over(calls[lower], hello, segment.fd)
        while len(peers) < size - 1 - rank:
            caller = _answer(listener)
            if caller is None:
                missing = next(r for r in range(rank + 1, size) if r not in peers)
                gathering.look(missing, "has not called")
                continue
            with caller:
                peer = _receive(caller, secret, size)
                if peer is not None and peer.rank not in peers and peer.rank > rank:
                    peers[peer.rank] = peer
                    _hand_over(caller, hello, segment.fd)
        for lower, call in calls.items():
            while not select.select([call], [], [], LOOK_S)[0]:
                gathering.look(lower, "has not answered")
            peer = _receive(call, secret, size)
            if peer is None:
                gathering.look_closely(lower)
                raise WorldError(
                    f"rank {names[rank]} called rank {names[lower]} to form an shm group of {size}, and it hung up"
                )
            peers[lower] = peer
        undo.pop_all()
    return peers


def close(peers: dict[int, Peer]) -> None:
    for peer in peers.values():
        peer.close()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _call(gathering: _Gathering, lower: int) -> socket.socket:
    call, card = _socket(), gathering.cards[lower]
    try:
        call.connect(b"\0" + card.name.encode())
    except OSError as error:
        call.close()
        gathering.look_closely(lower)
        names = gathering.names
        raise WorldError(
            f"rank {names[gathering.rank]} on {socket.gethostname()} cannot reach rank {names[lower]} "
            f"(pid {card.pid} on {card.host}) within this host: {error.strerror}; shm is for workers on one host that "
            'share a network namespace. Use backend="hierarchy" over several hosts'
        ) from error
    return call


def _answer(listener: socket.socket) -> socket.socket | None:
    if not select.select([listener], [], [], LOOK_S)[0]:
        return None
    caller, _ = listener.accept()
    caller.settimeout(SAY_S)  # whoever calls and says nothing
    return caller


def _hand_over(link: socket.socket, message: dict[str, Any], fd: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # gone: whoever waits for it will say so
        socket.send_fds(link, [json.dumps(message).encode()], [fd])


def _receive(link: socket.socket, secret: str, size: int) -> Peer | None:
    """The peer at the other end, or None if it is a stranger."""
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        return None  # before we wait for what it has to say
    try:
        data, fds, _, _ = socket.recv_fds(link, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    with contextlib.ExitStack() as close:
        for fd in fds:
            close.callback(os.close, fd)
        try:
            message = json.loads(data)
            known = hmac.compare_digest(str(message["secret"]), secret)
            rank, length, offer = int(message["rank"]), int(message["size"]), int(message["offer"])
        except (ValueError, KeyError, TypeError):
            return None
        if not known or not fds or not 0 <= rank < size:
            return None
        if os.fstat(fds[0]).st_size < length:
            return None
        segment = Segment(fds[0], length, limited=False)
        return Peer(rank, pid, segment, _watch(pid, link), offer)


def _watch(pid: int, link: socket.socket) -> int:
    """A descriptor that tells when the other process ends. Its socket would too, but forked children keep that open."""
    try:
        return os.pidfd_open(pid)  # fails for pid 0: a process in another pid namespace
    except (OSError, AttributeError):
        return os.dup(link.fileno())


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"
