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
from dataclasses import asdict, dataclass
from typing import Any, Final

from lockstep.comm.join_roll import Roll
from lockstep.comm.shm.memory import Segment
from lockstep.errors import WorldError
from lockstep.world.process_identity import Process

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
    host: str
    process: Process


class _Gathering:
    """One formation of a group. Everything that waits is here, and watches those it waits for."""

    def __init__(self, roll: Roll, deadline: float) -> None:
        self.roll, self.deadline = roll, deadline
        self.rank, self.names, self.size = roll.rank, roll.names, len(roll.names)
        self.cards: dict[int, _Card] = {}

    def swap_cards(self, mine: _Card) -> str:
        """Returns the secret of the group."""
        store = self.roll.store
        with self.roll.asking():
            if self.rank == 0:
                store.set("secret", secrets.token_hex(16))
            store.set(f"card/{self.rank}", json.dumps(asdict(mine)))
            for rank in range(self.size):
                while not store.check([f"card/{rank}"]):
                    self.look(rank, "has come, but goes no further" if self.roll.has_come(rank) else "has not come")
                    time.sleep(ASK_S)
                card = json.loads(store.get(f"card/{rank}"))
                self.cards[rank] = _Card(card["name"], card["host"], Process(**card["process"]))
                if rank != self.rank:
                    self.roll.sign(rank, self.cards[rank].process)
            return str(store.get("secret").decode())

    def look(self, missing: int, how: str) -> None:
        """Between two looks for `missing`: is anybody dead, is it too late?"""
        self.roll.look()
        if time.monotonic() > self.deadline:
            raise WorldError(
                f"rank {self.names[self.rank]} waited for {self.who(missing)} to form an shm group of {self.size}, "
                f"and it {how}; check that all workers call init_process_group or new_group together, with the same "
                "backend"
            )

    def who(self, rank: int) -> str:
        process, card = self.roll.processes.get(rank), self.cards.get(rank)
        where = f" on {card.host}" if card else ""
        return f"rank {self.names[rank]}" + (f" (pid {process.pid}{where})" if process else "")


def meet(roll: Roll, segment: Segment, *, offer: int, deadline: float) -> dict[int, Peer]:
    """Exchange segments with every other rank of the group, and a number on the way."""
    rank, names, size = roll.rank, roll.names, len(roll.names)
    if size == 1:
        return {}
    gathering = _Gathering(roll, deadline)
    peers: dict[int, Peer] = {}
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
        undo.callback(close, peers)
        listener = opened.enter_context(_socket())
        listener.bind(b"\0lockstep-" + secrets.token_hex(16).encode())
        listener.listen(size)
        name = bytes(listener.getsockname())[1:].decode()
        secret = gathering.swap_cards(_Card(name, socket.gethostname(), roll.processes[rank]))
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
                roll.look_closely()
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
        gathering.roll.look_closely()
        raise WorldError(
            f"rank {gathering.names[gathering.rank]} on {socket.gethostname()} cannot reach {gathering.who(lower)} "
            f"within this host: {error.strerror}; shm is for workers on one host that share a network namespace. "
            'Use backend="hierarchy" over several hosts'
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
