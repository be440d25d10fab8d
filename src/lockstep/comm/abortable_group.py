"""Groups of torch's that can be given up: Gloo, and NCCL for GPUs.

Note [Giving Gloo up]
A Gloo collective whose peer is gone, or never calls, waits until the group's timeout, its threads with it, and the
process cannot end before. `abort()` of torch's class does not change that. What does is a closed connection. So we find
out which sockets are Gloo's, by looking before and after it makes them, and shut those down: waiters here and at the
other end get an error within milliseconds. Now and then Gloo misses it: what is called at the moment at which the
connection closes waits on. So whoever waits looks at the connections too. A peer that has all it needs may close its
connections and leave while we are still receiving from others; that is what the grace is for.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from lockstep.comm import deferred_destroy

LOOK_S = 0.25
GRACE_S = 2.0
GRACE_OF_TWO_S = 0.25  # the only other one has left, so all it had to say is here already
KNOCK_S = 0.5
_LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

_forming = threading.Lock()  # so that two groups that are formed at once do not take each other's sockets for their own


class Cut:
    """The connections that are made from now on until `settle`, while groups of so many workers are formed.

    Note [Knocking]
    Of two workers one listens, and inside Gloo it waits for the other as long as a collective may take. There is
    nothing to cut. So we come ourselves, with the number of each of its pairs (8 bytes, from 0 on), and leave at once.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._before = _sockets()
        self._made: set[tuple[int, str]] | None = None

    def settle(self) -> None:
        """What is opened from now on is somebody else's."""
        self._made = _sockets() - self._before

    def shut(self) -> None:
        """May be called by any thread, and more than once: also while the groups are still being formed."""
        now = _sockets()
        for descriptor, _ in now - self._before if self._made is None else now & self._made:
            with contextlib.suppress(OSError), _borrow(descriptor) as link:
                if link.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if not link.getsockopt(*_LISTENS):
                    link.shutdown(socket.SHUT_RDWR)
                elif self._made is None:  # it must stay: Gloo would end the process
                    _knock(link.getsockname(), 2 * self._size)


class Link(Protocol):
    group: Any  # with torch's collectives

    def wait(self, work: Any) -> None:
        """For one of its collectives."""

    def abort(self) -> None:
        """May be called by any thread, and more than once."""

    def hung_up(self, size: int) -> list[int]:
        """The ranks that are known to have closed their connection to us."""


class Nccl:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if host := os.environ.get("LOCKSTEP_HOST", "").strip():
            os.environ.setdefault("NCCL_HOSTID", host)  # or it would refuse hosts that share a GPU
        make: Any = dist.ProcessGroupNCCL
        options = make.Options()
        options._timeout = timeout
        self.group: Any = make(store, rank, size, options)

    @staticmethod
    def is_there() -> bool:
        return torch.cuda.is_available() and dist.is_nccl_available()

    def wait(self, work: Any) -> None:
        work.wait()

    def abort(self) -> None:
        self.group.abort()

    def hung_up(self, size: int) -> list[int]:
        return []


class Gloo:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = PrefixStore("ends", store)
        with _forming:
            before = _sockets()
            self.group: Any = ProcessGroupGloo(store, rank, size, timeout)
            # Fewer with TORCH_GLOO_LAZY_INIT: then what was not connected yet is free at its timeout only.
            made = _sockets() - before
        door = _port_of(store)
        connections = {number: ends for number in made if (ends := _ends_of(number[0])) and not ends.touch(door)}
        self._far_ends = {number: ends.far for number, ends in connections.items()}
        self._store.set(str(rank), json.dumps([ends.near for ends in connections.values()]))
        self._grace_s = GRACE_S if size > 2 else GRACE_OF_TWO_S

    def wait(self, work: Any) -> None:
        """Note [Giving Gloo up]. A time limit here does not disturb the collective."""
        broken_since = None
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if work.is_completed() or "Operation timed out" not in str(error):
                    raise
            if not self._broken():
                broken_since = None
            elif broken_since is None:
                broken_since = time.monotonic()
            elif time.monotonic() - broken_since > self._grace_s:
                raise RuntimeError("a connection was closed by the other side")

    def _broken(self) -> list[tuple[str, int]]:
        """The far ends of connections that are closed."""
        now = _sockets()
        return [far for number, far in self._far_ends.items() if number not in now or _is_closed(number[0])]

    def abort(self) -> None:
        deferred_destroy.keep(self.group)
        for descriptor, _ in self._far_ends.keys() & _sockets():
            with contextlib.suppress(OSError), _borrow(descriptor) as link:
                link.shutdown(socket.SHUT_RDWR)

    def hung_up(self, size: int) -> list[int]:
        """The ranks that have closed their connection to us. Reads at the store, which may not answer any more."""
        lost = self._broken()
        if not lost:
            return []
        near_ends = {rank: json.loads(self._store.get(str(rank))) for rank in range(size)}
        return [rank for rank, ends in near_ends.items() if any(list(far) in ends for far in lost)]


@dataclass(frozen=True)
class Ends:
    """Of a connection: (address, port)."""

    near: tuple[str, int]
    far: tuple[str, int]

    def touch(self, port: int | None) -> bool:
        return port in (self.near[1], self.far[1])


def _sockets() -> set[tuple[int, str]]:
    """(descriptor, what the kernel calls it): a descriptor alone may be another socket by the time we look again."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


def _knock(door: Any, pairs: int) -> None:
    """See Note [Knocking]."""
    for number in range(pairs):
        with socket.create_connection(door[:2], timeout=KNOCK_S) as caller:
            caller.sendall(struct.pack("=q", number))


def _borrow(descriptor: int) -> socket.socket:
    """Somebody else's socket: closing what we return leaves it open."""
    return socket.socket(fileno=os.dup(descriptor))


def _ends_of(descriptor: int) -> Ends | None:
    """If it is a connection of the internet family."""
    try:
        with _borrow(descriptor) as link:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return Ends(link.getsockname()[:2], link.getpeername()[:2])
    except OSError:
        return None


def _is_closed(descriptor: int) -> bool:
    """By the other side. What it has sent before may still be to be read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


def _port_of(store: Store) -> int | None:
    """Where the store listens. Connections to it, and on its own host those it accepts, are not Gloo's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None
