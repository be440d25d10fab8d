"""Rendezvous of the workers of one host, in which they map each other's segments.

Each worker listens on a Unix socket without a file (Linux' abstract names), with a random name that only the store
holds. The file descriptors of the segments are sent over it. The kernel reports the user of the peer process: another
user is rejected, and so is a process that does not know the secret of this job. Afterwards the sockets are closed; what
remains for every peer is the mapping of its memory and a descriptor that becomes readable when its process has ended.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import itertools
import json
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

from lockstep.comm.shm.memory import Segment
from lockstep.errors import WorldError
from lockstep.process_identity import ProcessIdentity
from lockstep.world.rendezvous import JoinRegistry, poll_key

POLL_S: Final = 0.05
STORE_POLL_S: Final = 0.002
HELLO_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class Peer:
    """Another worker of this host. Owns the descriptor `alive_fd`."""

    rank: int
    pid: int
    segment: Segment
    alive_fd: int  # readable when the process has ended: a pidfd, or else the socket to it
    section_bytes: int  # bytes of a section that the peer has reserved


@dataclass(frozen=True)
class _Address:
    name: str
    host: str
    process: ProcessIdentity


class _Rendezvous:
    """One formation of a group: the addresses of its workers, and the checks while this worker waits for them."""

    def __init__(self, registry: JoinRegistry, deadline: float) -> None:
        self.registry, self.deadline = registry, deadline
        self.rank, self.names, self.size = registry.rank, registry.names, len(registry.names)
        self.addresses: dict[int, _Address] = {}

    def exchange_addresses(self, own: _Address) -> str:
        """Publish this worker's address, and read those of all ranks. Returns the secret of the group."""
        store = self.registry.store
        with self.registry.liveness.store_access():
            if self.rank == 0:
                store.set("secret", secrets.token_hex(16))
            store.set(f"card/{self.rank}", json.dumps(asdict(own)))
            for rank in range(self.size):
                check = functools.partial(self._check_arrival, rank)
                address = json.loads(poll_key(store, f"card/{rank}", check, itertools.repeat(STORE_POLL_S)))
                self.addresses[rank] = _Address(address["name"], address["host"], ProcessIdentity(**address["process"]))
                if rank != self.rank:
                    self.registry.register(rank, self.addresses[rank].process)
            return str(store.get("secret").decode())

    def _check_arrival(self, rank: int) -> None:
        joined = rank in self.registry.joined
        self.check_progress(rank, "has joined, but published no address" if joined else "has not come")

    def check_progress(self, missing: int, how: str) -> None:
        """While waiting for `missing`: raise PeerLostError if a worker is dead, WorldError after the deadline."""
        self.registry.check()
        if time.monotonic() > self.deadline:
            raise WorldError(
                f"rank {self.names[self.rank]} waited for {self.describe(missing)} to form an shm group of "
                f"{self.size}, and it {how}; check that all workers call init_process_group or new_group together, "
                "with the same backend"
            )

    def describe(self, rank: int) -> str:
        process, address = self.registry.processes.get(rank), self.addresses.get(rank)
        where = f" on {address.host}" if address else ""
        return f"rank {self.names[rank]}" + (f" (pid {process.pid}{where})" if process else "")


def exchange_segments(
    registry: JoinRegistry, segment: Segment, *, section_bytes: int, deadline: float
) -> dict[int, Peer]:
    """Exchange segments, and `section_bytes`, with every other rank. Returns the peers, which the caller closes."""
    rank, names, size = registry.rank, registry.names, len(registry.names)
    if size == 1:
        return {}
    rendezvous = _Rendezvous(registry, deadline)
    peers: dict[int, Peer] = {}
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
        undo.callback(close_peers, peers)
        listener = opened.enter_context(_socket())
        listener.bind(b"\0lockstep-" + secrets.token_hex(16).encode())
        listener.listen(size)
        name = bytes(listener.getsockname())[1:].decode()
        secret = rendezvous.exchange_addresses(_Address(name, socket.gethostname(), registry.processes[rank]))
        hello = {"secret": secret, "rank": rank, "size": segment.size, "offer": section_bytes}
        # First each worker connects to the lower ranks, which needs no answer; then it answers the higher ones.
        connections = {}
        for peer_rank in range(rank):
            connections[peer_rank] = opened.enter_context(_connect(rendezvous, peer_rank))
            _send_segment(connections[peer_rank], hello, segment.fd)
        while len(peers) < size - 1 - rank:
            incoming = _accept(listener)
            if incoming is None:
                missing = next(r for r in range(rank + 1, size) if r not in peers)
                rendezvous.check_progress(missing, "has not connected")
                continue
            with incoming:
                peer = _receive_segment(incoming, secret, size)
                if peer is not None and peer.rank not in peers and peer.rank > rank:
                    peers[peer.rank] = peer
                    _send_segment(incoming, hello, segment.fd)
        for peer_rank, connection in connections.items():
            while not _is_readable(connection, POLL_S):
                rendezvous.check_progress(peer_rank, "has not answered")
            peer = _receive_segment(connection, secret, size)
            if peer is None:
                registry.liveness.check_repeatedly()
                raise WorldError(
                    f"rank {names[rank]} connected to rank {names[peer_rank]} to form an shm group of {size}, and it "
                    "closed the connection"
                )
            peers[peer_rank] = peer
        undo.pop_all()
    return peers


def close_peers(peers: dict[int, Peer]) -> None:
    for peer in peers.values():
        os.close(peer.alive_fd)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _connect(rendezvous: _Rendezvous, peer_rank: int) -> socket.socket:
    connection, address = _socket(), rendezvous.addresses[peer_rank]
    try:
        connection.connect(b"\0" + address.name.encode())
    except OSError as error:
        connection.close()
        rendezvous.registry.liveness.check_repeatedly()
        raise WorldError(
            f"rank {rendezvous.names[rendezvous.rank]} on {socket.gethostname()} cannot reach "
            f"{rendezvous.describe(peer_rank)} within this host: {error.strerror}; shm is for workers on one host that "
            'share a network namespace. Use backend="hierarchy" over several hosts'
        ) from error
    return connection


def _is_readable(sock: socket.socket, within_s: float) -> bool:
    """Whether something can be read. By poll: select fails in a program with more than a thousand open files."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def _accept(listener: socket.socket) -> socket.socket | None:
    if not _is_readable(listener, POLL_S):
        return None
    incoming, _ = listener.accept()
    incoming.settimeout(HELLO_TIMEOUT_S)  # the process may connect and send nothing
    return incoming


def _send_segment(connection: socket.socket, message: dict[str, Any], fd: int) -> None:
    # If the peer is dead, the wait for its answer reports that.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(connection, [json.dumps(message).encode()], [fd])


def _receive_segment(connection: socket.socket, secret: str, size: int) -> Peer | None:
    """The peer at the other end, or None if it is not a worker of this group."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        return None  # before waiting for its message
    try:
        data, fds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    with contextlib.ExitStack() as close:
        for fd in fds:
            close.callback(os.close, fd)
        try:
            message = json.loads(data)
            known = hmac.compare_digest(str(message["secret"]), secret)
            rank, length, section_bytes = int(message["rank"]), int(message["size"]), int(message["offer"])
        except (ValueError, KeyError, TypeError):
            return None
        if not known or not fds or not 0 <= rank < size:
            return None
        if os.fstat(fds[0]).st_size < length:
            return None
        segment = Segment(fds[0], length, limited=False)
        return Peer(rank, pid, segment, _liveness_fd(pid, connection), section_bytes)


def _liveness_fd(pid: int, connection: socket.socket) -> int:
    """A descriptor that becomes readable when the peer ends. A socket does too, but forked children keep it open."""
    try:
        return os.pidfd_open(pid)  # fails for pid 0: a process in another pid namespace
    except (OSError, AttributeError):
        return os.dup(connection.fileno())
