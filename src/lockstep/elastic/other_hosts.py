"""The other hosts of a run, as this one sees them: which are present, which are cut off, and when the run has ended.

It observes, and publishes what it observed. `host_agent` decides what that means for the workers of this host.

Note [Hosts that cannot reach each other]
Two hosts that both reach the store count as alive. If they do not reach each other, their workers wait for each other,
in a collective or to connect, and no worker is missing. A long call looks the same from outside. So a host whose
workers have made no progress for half of --stuck-s probes the ports of the others; it names those that it has not
reached for the other half in a record under its lease. All hosts conclude the same from these records: `left_out` says
which hosts have to stop their workers. They may return when no record names such a pair any more.

A host that never reached a port although the run made progress does not name it: then a firewall blocks only that port.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from lockstep.control.connection import Address, listen, own_address
from lockstep.elastic.records import Records
from lockstep.errors import LockstepError
from lockstep.launcher.hosts import HostContact, Hosts, StoreConnection, address_towards, display_name

STAY_LEASES: Final = 2.0  # leases for which the host with the store waits for hosts that have not ended
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

    owner: Reachability
    address: Address
    connection: socket.socket | None = None
    probed_s: float = -1e9
    reached: bool = False  # ever
    unreached_since_s: float | None = None

    def ready(self, mask: int) -> None:
        """The probe has ended."""
        if self.connection is not None:
            reached = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            self.owner.record_result(self, reached=reached)


@final
class Reachability:
    """Listens on a port, and probes those of the other hosts.

    Registers sockets with `selector`; the data of each key is an object with `ready(mask)`.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        try:
            self._listener = listen(address, 0, backlog=64)
        except OSError as error:
            raise LockstepError(
                f"cannot listen on {address}, the address for the other hosts: {error}; GLOO_SOCKET_IFNAME "
                "chooses another interface"
            ) from error
        self.address = own_address(self._listener)
        self._selector = selector
        self._peers: dict[str, _Peer] = {}
        selector.register(self._listener, selectors.EVENT_READ, self)

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
            peer = self._peers.setdefault(name, _Peer(self, address))
            if peer.connection is not None and now_s >= peer.probed_s + PROBE_TIMEOUT_S:
                self.record_result(peer, reached=False)
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
            self.record_result(peer, reached=False)
            return
        self._selector.register(sock, selectors.EVENT_WRITE, peer)

    def record_result(self, peer: _Peer, *, reached: bool) -> None:
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
class RunEnd:
    """The run ends on this host, for a reason that lies elsewhere."""

    status: int
    why: str


@dataclass(frozen=True)
class NetworkEvent:
    text: str
    stops_this_host: bool = False  # whether the workers of this host have to stop


@final
class ProgressClock:
    """When the workers of this host last made progress in their current generation. Pure: time is an argument."""

    def __init__(self) -> None:
        self._last_progress_s, self._generation, self._count = 0.0, 0, 0
        self.has_progressed = False  # since the generation began

    def stalled_s(self, now_s: float, generation: int, progress_count: int) -> float:
        """For how long they have made no progress. `progress_count` is how often they have made any."""
        if generation != self._generation:
            self._generation, self._last_progress_s, self.has_progressed = generation, now_s, False
        elif progress_count != self._count:
            self._last_progress_s, self.has_progressed = now_s, True
        self._count = progress_count
        return now_s - self._last_progress_s


@final
class OtherHosts:
    """`run_options` must be the same on all hosts. Create it after `selector` is open; close it before `selector`."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        records: Records,
        connection: StoreConnection,
        run_options: Mapping[str, int],
        selector: selectors.BaseSelector,
    ) -> None:
        self._hosts, self._records, self._connection, self._run_options = hosts, records, connection, dict(run_options)
        self._contact = HostContact(hosts)
        self._member_stays = False
        self.stay_s = STAY_LEASES * hosts.lease_s  # how long to wait at most while `must_stay`
        self._progress = ProgressClock()
        self._unreached: set[str] = set()  # hosts that this one does not reach
        self._left_out: set[str] = set()  # hosts that are left out because other hosts do not reach them
        self._reachability: Reachability | None = None
        if hosts.count > 1:
            address = address_towards(hosts.where, os.environ.get("GLOO_SOCKET_IFNAME"))
            self._reachability = Reachability(address, selector) if address is not None else None

    def close(self) -> None:
        if self._reachability is not None:
            self._reachability.close()

    def start(self) -> None:
        self._records.publish(self._records.keys.run_options, self._run_options)

    # -- the store, and which hosts are present ----------------------------------------------------------------------

    def check_store(self, now_s: float) -> list[str]:
        """Returns messages for the user about the store and the other hosts."""
        records, client = self._records, self._connection.client
        messages = self._contact.update_store(now_s, trouble=client.disconnect_reason)
        if records.is_listed and client.is_connected:
            others = {host.name for host in records.hosts} - {records.name}
            messages += self._contact.update_hosts(others, records.hosts_left)
        return messages

    def why_end(self, now_s: float, *, ending: bool) -> RunEnd | None:
        """Why the run ends on this host; None if it does not.

        `ending`: this host is about to end anyway, so that failures on other hosts do not matter.
        """
        run_options, failure = self._records.run_options, self._records.failure
        if run_options not in (None, self._run_options):
            return RunEnd(2, f"this host has {_format_options(self._run_options)}, and the first one has "
                          f"{_format_options(run_options)}; start all hosts with the same")  # fmt: skip
        if failure is not None and not ending:
            return RunEnd(**failure)
        if self._contact.should_give_up(now_s):
            return RunEnd(1, f"gave up without the control store: {self._connection.client.disconnect_reason}")
        return None

    # -- which hosts reach each other --------------------------------------------------------------------------------

    @property
    def is_left_out(self) -> bool:
        return self._records.name in self._left_out

    def check_network(self, now_s: float, *, inside: bool, progress_count: int) -> list[NetworkEvent]:
        """Probe the other hosts and publish the result (Note [Hosts that cannot reach each other]).

        `inside`: a worker of this host is in a generation.
        """
        records, reachability, half_s = self._records, self._reachability, self._hosts.stuck_s / 2
        if reachability is None or not records.is_listed:
            return []
        networks = {name: one for name, one in records.networks.items() if name != records.name}
        stalled_s = self._progress.stalled_s(now_s, records.generation.number, progress_count) if inside else 0.0
        others = {name: (str(one["door"][0]), int(one["door"][1])) for name, one in networks.items()}
        reachability.probe(now_s, others, probe_all=stalled_s >= half_s)
        is_new = inside and not self._progress.has_progressed
        unreached = reachability.unreached(now_s, half_s, include_never_reached=is_new)
        self._unreached &= reachability.unreached(now_s, 0.0, include_never_reached=True)
        events = []
        if stalled_s >= self._hosts.stuck_s:
            stuck = f"no progress for {stalled_s:.0f} s, and host"
            new = sorted(unreached - self._unreached)
            events = [NetworkEvent(f"{stuck} {display_name(name)} cannot be reached from here") for name in new]
            self._unreached |= unreached
        records.set_network(probe_address=reachability.address, unreached=self._unreached)
        reports = {name: one["missed"] for name, one in networks.items()} | {records.name: sorted(self._unreached)}
        return events + self._leave_out({name: set(unreached) & reports.keys() for name, unreached in reports.items()})

    def _leave_out(self, complaints: Mapping[str, set[str]]) -> list[NetworkEvent]:
        before, self._left_out = self._left_out, left_out(complaints)
        events = []
        for name in sorted(self._left_out - before):
            others = " and ".join(map(display_name, unreachable_from(name, complaints)))
            text = f"host {display_name(name)} is left out: it and {others} do not reach each other"
            events.append(NetworkEvent(text, stops_this_host=name == self._records.name))
        returned = [display_name(name) for name in sorted(before - self._left_out)]
        return events + [NetworkEvent(f"host {name} is not left out any more") for name in returned]

    def reset(self) -> None:
        """Start over like a new host: the lease has ended, and with it what this host published."""
        self._unreached, self._left_out = set(), set()
        if self._reachability is not None:
            self._records.set_network(probe_address=self._reachability.address, unreached=())

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self, ended_by: int | None) -> None:
        """Publish that this host ends. `ended_by` is the signal that ended it in the middle of the run, if any."""
        self._member_stays = self._connection.member is not None and ended_by is None and not self._records.is_leaving
        if self._connection.keeps_store and ended_by is not None:
            name = signal.Signals(ended_by).name
            why = f"{display_name(self._records.name)}, which kept the store, was ended by {name}"
            self._records.publish_failure(status=128 + ended_by, why=why)
        if self._records.is_listed:
            self._records.publish(self._records.keys.left + self._records.name, True)

    @property
    def must_stay(self) -> bool:
        """Whether writes of this host are pending, or other hosts still need the store that it keeps or its etcd."""
        if self._connection.keeps_store and not self._contact.seen <= self._records.hosts_left:
            return True
        if self._member_stays and not {host.name for host in self._records.hosts} <= self._records.hosts_left:
            return True
        return bool(self._records.pending_writes) and self._connection.client.is_connected


def _format_options(run_options: Mapping[str, int] | None) -> str:
    return " ".join(f"{name} {value}" for name, value in (run_options or {}).items())
