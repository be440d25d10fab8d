"""torch.distributed process groups that can be aborted: Gloo, and NCCL for GPUs.

Note [Aborting Gloo]
A Gloo collective whose peer is lost, or never makes the call, blocks until the group's timeout. Its threads block too,
and the process cannot exit before. `ProcessGroupGloo.abort()` does not change that; closing the connections does. So
the sockets that Gloo opens are found by comparing /proc/self/fd before and after, and `abort` shuts them down: waiters
on both ends get an error within milliseconds. Gloo occasionally misses it: an operation that is posted at the moment
the connection closes keeps waiting. So `Gloo.wait` polls the state of the connections as well. A peer that has all it
needs may close its connections and leave while this worker still receives from others; hence the grace period.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from lockstep._torch import PrefixStore, ProcessGroupGloo, Store, TCPStore
from lockstep.settings import Settings

POLL_INTERVAL_S = 0.25
GRACE_S = 2.0
TWO_WORKERS_GRACE_S = 0.25  # shorter: the only peer has left, so everything it sent has arrived already
CONNECT_TIMEOUT_S = 0.5
_LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

_creation_lock = threading.Lock()  # groups that are created at the same time must not claim each other's sockets


class ConnectionTracker:
    """Tracks the sockets that are opened from its creation until `stop_tracking`, while process groups are created.

    `size` is the number of workers in these groups.

    Note [Releasing a Gloo listener]
    While two workers connect, one of them listens, and inside Gloo it waits for the other as long as a collective may
    take. There is no connection to shut down yet. So `shut_down` connects to the listener itself, sends the number of
    each of its pairs (8 bytes, counted from 0), and disconnects at once.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._before = _sockets()
        self._made: set[tuple[int, str]] | None = None

    def stop_tracking(self) -> None:
        """Sockets that are opened after this call are not tracked."""
        self._made = _sockets() - self._before

    def shut_down(self, *, listeners: bool = False) -> None:
        """Shut down all tracked connections.

        listeners  Shut down listening sockets as well: NCCL then fails. (Gloo would end the process.)

        May be called from any thread and more than once, also while the groups are still being created.
        """
        now = _sockets()
        for descriptor, _ in now - self._before if self._made is None else now & self._made:
            with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if listeners or not connection.getsockopt(*_LISTENS):
                    connection.shutdown(socket.SHUT_RDWR)
                elif self._made is None:
                    for number in range(2 * self._size):
                        address = connection.getsockname()[:2]
                        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as caller:
                            caller.sendall(struct.pack("=q", number))


class DeferredDestroy:
    """Destroys aborted process groups in a background thread.

    Gloo's destructor waits for its operations. One that has missed that its connection is closed (Note [Aborting Gloo])
    ends at the group's timeout, half an hour later. The thread that drops the last reference to such a group would
    block as long: the training thread in the middle of a step, if the garbage collector finds the group in a cycle, or
    the interpreter at exit. So an aborted group is kept alive here, and destroyed by a thread of its own once no other
    reference is left.
    """

    OWN_REFERENCES: Final = 3  # during the check: the list's, the loop variable's, and getrefcount's argument

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._lock = threading.Lock()

    def keep_alive(self, group: Any) -> None:
        """Take a reference to the group that also outlives the interpreter's shutdown. Calling again has no effect."""
        with self._lock:
            if not any(group is one for one in self.kept):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                self.kept.append(group)

    def destroy_unreferenced(self) -> None:
        """Destroy the kept groups that have no other reference, in threads. Call it after a garbage collection."""
        with self._lock:
            unreferenced = []
            for n in reversed(range(len(self.kept))):
                group = self.kept[n]
                if sys.getrefcount(group) == self.OWN_REFERENCES + 1:  # and the one taken by `keep_alive`
                    unreferenced.append(self.kept.pop(n))
            group = None
        while unreferenced:
            threading.Thread(target=_release, args=(unreferenced.pop(),), name="lockstep-destroy", daemon=True).start()


def _release(group: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


deferred_destroy = DeferredDestroy()  # of this process


class AbortableGroup(Protocol):
    group: Any  # the torch.distributed backend, which has the collectives

    def wait(self, work: Any) -> None:
        """Wait for a collective of this group. Raises RuntimeError if it fails."""

    def abort(self) -> None:
        """Make every waiter of the group fail. May be called from any thread and more than once."""

    def disconnected_ranks(self, size: int) -> list[int]:
        """Return the ranks that are known to have closed their connection to this worker."""


class Nccl:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if host := Settings.from_env(os.environ).host:
            os.environ.setdefault("NCCL_HOSTID", host)  # else NCCL refuses hosts that share a GPU
        make: Any = dist.ProcessGroupNCCL
        options = make.Options()
        options._timeout = timeout
        self.group: Any = make(store, rank, size, options)

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available() and dist.is_nccl_available()

    def wait(self, work: Any) -> None:
        work.wait()

    def abort(self) -> None:
        self.group.abort()

    def disconnected_ranks(self, size: int) -> list[int]:
        return []


class Gloo:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = PrefixStore("ends", store)
        with _creation_lock:
            before = _sockets()
            self.group: Any = ProcessGroupGloo(store, rank, size, timeout)
            # With TORCH_GLOO_LAZY_INIT there are fewer: operations on later connections end at the timeout only.
            made = _sockets() - before
        store_port = _port_of(store)
        self._remote_ends, local_ends = {}, []
        for number in made:
            ends = _ends_of(number[0])
            if ends is not None and store_port not in (ends[0][1], ends[1][1]):
                local_ends.append(ends[0])
                self._remote_ends[number] = ends[1]
        self._store.set(str(rank), json.dumps(local_ends))
        self._grace_s = GRACE_S if size > 2 else TWO_WORKERS_GRACE_S

    def wait(self, work: Any) -> None:
        """See Note [Aborting Gloo]. The time limit passed to `work.wait` does not disturb the collective."""
        broken_since = None
        while True:
            try:
                work.wait(timedelta(seconds=POLL_INTERVAL_S))
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
            if work.is_completed():  # it failed, or has ended since: the next wait tells which, and does not block
                work.wait()
                return
            if not self._broken():
                broken_since = None
            elif broken_since is None:
                broken_since = time.monotonic()
            elif time.monotonic() - broken_since > self._grace_s:
                raise RuntimeError("a connection was closed by the other side")

    def _broken(self) -> list[tuple[str, int]]:
        """Return the remote ends of the connections that are closed."""
        now = _sockets()
        return [remote for number, remote in self._remote_ends.items() if number not in now or _is_closed(number[0])]

    def abort(self) -> None:
        deferred_destroy.keep_alive(self.group)
        for descriptor, _ in self._remote_ends.keys() & _sockets():
            with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def disconnected_ranks(self, size: int) -> list[int]:
        """Return the ranks that have closed their connection to this worker.

        Reads from the store, which may no longer answer.
        """
        lost = self._broken()
        if not lost:
            return []
        local_ends = {rank: json.loads(self._store.get(str(rank))) for rank in range(size)}
        return [rank for rank, ends in local_ends.items() if any(list(remote) in ends for remote in lost)]


def _sockets() -> set[tuple[int, str]]:
    """Return (descriptor, kernel's name) of every open socket: a descriptor alone may be reused for another socket."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed in the meantime
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


def _duplicate(descriptor: int) -> socket.socket:
    """Return a second handle to a socket that torch owns: closing it leaves the original open."""
    return socket.socket(fileno=os.dup(descriptor))


def _ends_of(descriptor: int) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return the local and the remote (address, port) of an IPv4 or IPv6 connection; None for any other socket."""
    with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return connection.getsockname()[:2], connection.getpeername()[:2]
    return None


def _is_closed(descriptor: int) -> bool:
    """Whether the other side has closed the connection. Data that it sent before may still be unread."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


def _port_of(store: Store) -> int | None:
    """Return the port of the store. Connections to it, and on its own host those it accepts, are not Gloo's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


# ---- the environment of NCCL -----------------------------------------------------------------------------------------

# When torch's watchdog sees an error of NCCL, it ends the process, or sleeps for a minute, in which others are to write
# reports.
_WITHOUT_WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
# NCCL has a thread for diagnosis (RAS), which crashes at the end of a program whose communicators were aborted (2.28).
# NCCL tries for a minute to reach a worker that is gone; here for a second: the n-th try after n times 50 ms.
# NCCL connects workers in the first collective that needs it, which cannot be aborted; here when a group is created.
_NCCL_DEFAULTS: Final = {
    "NCCL_RAS_ENABLE": "0",
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_SOCKET_RETRY_CNT": "6",
    "NCCL_SOCKET_RETRY_SLEEP_MSEC": "50",
}


def prepare_nccl_for_aborts() -> None:
    """Set the environment of a process that continues after its NCCL groups are aborted, before it uses NCCL."""
    os.environ |= _WITHOUT_WATCHDOG
    for name, value in _NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)


def share_gpu_over_nccl(worker: object) -> None:
    """Let NCCL accept several workers of this host on one GPU, for tests: each takes the others for other hosts, and
    they communicate through sockets. Call it before the first use of NCCL; `worker` differs between the workers."""
    os.environ |= {f"NCCL_{name}_DISABLE": "1" for name in ("IB", "P2P", "SHM")}
    os.environ |= {"NCCL_HOSTID": f"lockstep-{worker}", "NCCL_SOCKET_IFNAME": "lo"}
