"""Whether hosts reach each other: each listens on a port, which the others probe when the run makes no progress.

Note [Hosts that cannot reach each other]
Two hosts that both reach the store count as alive. If they do not reach each other, their workers wait for each other,
in a collective or to connect, and no worker is missing. A long call looks the same from outside. So a host whose
workers have made no progress for half of --stuck-s probes the ports of the others; it names those that it has not
reached for the other half in a record under its lease. All hosts conclude the same from these records: `left_out` says
which hosts have to stop their workers. They may return when no record names such a pair any more.

A host that never reached a port although the run made progress does not name it: then a firewall blocks only that port.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from lockstep.control.sockets import Address
from lockstep.errors import LockstepError

PROBE_EVERY_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 3.0  # how long a connection attempt may take
ACCEPTS_AT_ONCE: Final = 16


def left_out(complaints: Mapping[str, Collection[str]]) -> set[str]:
    """The hosts that must stop so that all others reach each other: first those in most pairs that do not.

    `complaints` has, by host, the hosts that it does not reach.
    """
    pairs = {frozenset((one, peer)) for one, others in complaints.items() for peer in others if one != peer}
    out: set[str] = set()
    while pairs:
        counts = Counter(name for pair in pairs for name in pair)
        worst = max(counts, key=lambda name: (counts[name], name))
        out.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return out


def unreachable_from(name: str, complaints: Mapping[str, Collection[str]]) -> list[str]:
    """The hosts that do not reach `name`, or that `name` does not reach."""
    return sorted({*complaints.get(name, ()), *(one for one, others in complaints.items() if name in others)})


@dataclass
class _Peer:
    """What is known about the port of another host."""

    address: Address
    connection: socket.socket | None = None
    probed_s: float = -1e9
    reached: bool = False  # ever
    unreached_since_s: float | None = None


@final
class Reachability:
    """Listens on a port, and probes those of the other hosts.

    Registers sockets with `selector`; the data of each key is an object with `ready(mask)`.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=64)
        except OSError as error:
            raise LockstepError(
                f"cannot listen on {address}, the address for the other hosts: {error}; GLOO_SOCKET_IFNAME "
                "chooses another interface"
            ) from error
        self._listener.setblocking(False)
        self._selector = selector
        self._peers: dict[str, _Peer] = {}
        selector.register(self._listener, selectors.EVENT_READ, self)

    @property
    def address(self) -> Address:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def ready(self, mask: int) -> None:
        """Accept probes and close them: the connection itself is the answer."""
        with suppress(OSError):
            for _ in range(ACCEPTS_AT_ONCE):
                self._listener.accept()[0].close()

    def probe(self, now_s: float, addresses: Mapping[str, Address], *, probe_all: bool) -> None:
        """Start the probes that are due: of hosts not reached yet or no longer; with `probe_all`, of all hosts."""
        for name in self._peers.keys() - addresses.keys():
            self._close_probe(self._peers.pop(name))
        for name, address in addresses.items():
            peer = self._peers.setdefault(name, _Peer(address))
            if peer.connection is not None and now_s >= peer.probed_s + PROBE_TIMEOUT_S:
                self._record_result(peer, reached=False)
            due = peer.connection is None and now_s >= peer.probed_s + PROBE_EVERY_S
            if due and (probe_all or not peer.reached or peer.unreached_since_s is not None):
                self._start_probe(peer, now_s)

    def unreached(self, now_s: float, for_s: float, *, include_never_reached: bool) -> set[str]:
        """The hosts that have not answered for `for_s`; those that never answered only if `include_never_reached`."""
        return {
            name
            for name, peer in self._peers.items()
            if peer.unreached_since_s is not None
            and now_s - peer.unreached_since_s >= for_s
            and (peer.reached or include_never_reached)
        }

    def close(self) -> None:
        for peer in self._peers.values():
            self._close_probe(peer)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _start_probe(self, peer: _Peer, now_s: float) -> None:
        peer.probed_s = now_s
        family = socket.AF_INET6 if ":" in peer.address[0] else socket.AF_INET
        peer.connection = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(peer.address)
        except BlockingIOError:
            pass
        except OSError:  # no route to the host, for example
            sock.close()
            peer.connection = None
            self._record_result(peer, reached=False)
            return
        self._selector.register(sock, selectors.EVENT_WRITE, _ProbeEvent(self, peer))

    def finish_probe(self, peer: _Peer) -> None:
        if peer.connection is not None:
            self._record_result(peer, reached=peer.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0)

    def _record_result(self, peer: _Peer, *, reached: bool) -> None:
        self._close_probe(peer)
        if reached:
            peer.reached, peer.unreached_since_s = True, None
        elif peer.unreached_since_s is None:
            peer.unreached_since_s = peer.probed_s

    def _close_probe(self, peer: _Peer) -> None:
        if peer.connection is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            peer.connection = None


@dataclass(frozen=True)
class _ProbeEvent:
    reachability: Reachability
    peer: _Peer

    def ready(self, mask: int) -> None:
        self.reachability.finish_probe(self.peer)
