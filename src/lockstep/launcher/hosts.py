"""A run on several hosts: host names, the connection to the control store, and the network interface to use.

Every host has a host agent. The host agent whose own address is the rendezvous serves the control store, the others
connect to it; with etcd all of them connect. What is decided there: see elastic/membership.py, elastic/host_workers.py.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, final

from lockstep.control.connection import Address, OwnEtcd, is_etcd, is_loopback, parse_addresses
from lockstep.control.remote_store import connect_store
from lockstep.control.server import Server
from lockstep.control.store import PREFIX, ClientOptions, ControlStore, LocalStoreClient, OnLost, StoreClient
from lockstep.errors import LockstepError
from lockstep.launcher.etcd_member import EtcdMember, root_password
from lockstep.launcher.output import print_message
from lockstep.launcher.parent_watch import ParentWatch

HOST: Final = "h0"  # the name of the host in a run on one host
LEASE_S: Final = 5.0
# A worker whose peer closed the connection waits this long (recovery/elastic_calls.py) for word that the host is lost.
LONGEST_LEASE_S: Final = 15.0
SHORTEST_LEASE_S: Final = 0.5
SAY_AFTER_S: Final = 1.0  # without the store, before the first message
SAY_EVERY_S: Final = 30.0
_LONGEST_NAME = 40
_SIOCGIFADDR: Final = 0x8915


@dataclass(frozen=True)
class Hosts:
    """Options of a run on several hosts; equal on all of them except `name`."""

    count: int
    where: str  # HOST:PORT of the host that serves the store, or etcd://HOST:PORT,... (etcds:// with TLS)
    name: str  # of this host; unique to this host agent
    secret: bytes = field(repr=False)
    lease_s: float = LEASE_S
    give_up_s: float = 600.0  # the run ends after so long without the store
    stuck_s: float = 300.0  # after so long without progress, a host that others cannot reach is left out
    starts_etcd: bool = False  # each host that `where` names runs a member of the etcd

    @property
    def title(self) -> str:
        return display_name(self.name)


def make_host_name(wish: str | None) -> str:
    """Returns `wish` or the host's own name, with a random suffix, so that ids are never reused."""
    wish = wish or socket.gethostname().partition(".")[0]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", wish).strip("-")[:_LONGEST_NAME] or "host"
    return f"{plain}-{secrets.token_hex(3)}"


def display_name(name: str) -> str:
    """The host's name without its random suffix."""
    return re.sub(r"-[0-9a-f]{6}$", "", name)


def name_workers(text: str) -> str:
    """Replaces ids of workers in a text by "worker 3 on node1"."""
    return re.sub(r"\b([\w-]+)-[0-9a-f]{6}\.(\d+)\b", r"worker \2 on \1", text)


@final
class Events:
    """Events of an elastic run on this host: messages on the terminal, and events.jsonl in the folder of logs.

    A full disk does not end the training.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def print(self, text: str) -> None:
        print_message(name_workers(re.sub(rf"\b{HOST}\.(\d+)", r"worker \1", text)))

    def record(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "monotonic": time.monotonic(), "event": event, **facts})
        with suppress(OSError), self._path.open("a") as file:
            file.write(line + "\n")


def key_prefix(secret: bytes) -> str:
    """Returns the prefix of all keys of a job, because two jobs may share an etcd."""
    return f"{PREFIX}{hmac.new(secret, b'the records of a job', hashlib.sha256).hexdigest()[:16]}/"


def workers_on_host(total: int, hosts: int, number: int) -> int:
    """Returns how many of `total` workers the host with this number has; the first hosts get the remainder."""
    return total // hosts + (number < total % hosts) if number < hosts else 0


def check_rendezvous(where: str) -> Sequence[Address]:
    """Returns the addresses in `where`. Raises ValueError unless it can be a rendezvous."""
    addresses = parse_addresses(where)
    if not is_etcd(where) and len(addresses) != 1:
        raise ValueError(f"{where!r} names {len(addresses)} hosts, and only one can keep the store")
    return addresses


# ---- the control store -----------------------------------------------------------------------------------------------


@final
class StoreConnection:
    """The client of this host and, if the store is here, its server or its member of the etcd.

    Made after `selector`, closed before it.
    """

    def __init__(self, client: StoreClient, server: Server | None = None, member: EtcdMember | None = None) -> None:
        self.client, self._server, self.member = client, server, member

    @staticmethod
    def local(on_lost: OnLost) -> StoreConnection:
        """The store of a run on one host, in memory and without a server."""
        return StoreConnection(
            LocalStoreClient(ControlStore(), options=ClientOptions(prefix=PREFIX, ttl_s=LEASE_S), on_lost=on_lost)
        )

    @staticmethod
    def open(
        hosts: Hosts, selector: selectors.BaseSelector, on_lost: OnLost, folder: Path, parent_watch: ParentWatch
    ) -> StoreConnection:
        """Serves the store if the rendezvous is an address of this host, else connects to it.

        With `starts_etcd` the member of this host is started; its data are in `folder`. Raises LockstepError if the
        address is this host's and cannot be listened on.
        """
        # Half a lease, so that a lost connection can be made again before the lease ends.
        options = ClientOptions(
            prefix=key_prefix(hosts.secret), ttl_s=hosts.lease_s, answer_timeout_s=hosts.lease_s / 2
        )
        if not is_etcd(hosts.where):
            store = ControlStore()
            server = _serve(store, hosts, selector)
            if server is not None:
                return StoreConnection(LocalStoreClient(store, options=options, on_lost=on_lost), server)
        member = own = None
        if hosts.starts_etcd:
            member = EtcdMember.start(hosts.where, hosts.secret, folder / "etcd", parent_watch)
            own = OwnEtcd(root_password(hosts.secret), member.address if member is not None else None)
        client = connect_store(hosts.where, hosts.secret, selector, options=options, on_lost=on_lost, own_etcd=own)
        return StoreConnection(client, member=member)

    @property
    def keeps_store(self) -> bool:
        """Whether the others cannot continue without this host."""
        return self._server is not None or (self.member is not None and self.member.is_only)

    def tick(self, now_s: float) -> float:
        """Renews leases and serves requests. Returns the latest time for the next call."""
        if self.member is not None:
            self.member.check()
        next_s = self.client.tick(now_s)  # before the server's, which might end this host's own lease
        return next_s if self._server is None else min(next_s, self._server.tick(now_s))

    def close(self) -> None:
        self.client.close()
        if self._server is not None:
            self._server.close()
        if self.member is not None:
            self.member.close()


def _serve(store: ControlStore, hosts: Hosts, selector: selectors.BaseSelector) -> Server | None:
    """Returns None if the address is another host's, or another host agent of this host listens on it."""
    ((name, port),) = parse_addresses(hosts.where)
    for address in _addresses(name, port):
        # Debian resolves a host's own name to its loopback, where other hosts could not connect.
        everywhere = is_loopback(address) and not is_loopback(name)
        try:
            return Server(store, hosts.secret, selector, host="0.0.0.0" if everywhere else address, port=port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise LockstepError(f"cannot listen on {address}:{port}: {error}; choose another port") from error
    return None


def check_etcd(hosts: Hosts) -> str:
    """Read and write in the etcd of the run. Returns a description of it, or why it does not answer yet.

    Raises LockstepError if it does not accept the login, or the user may not write there. Blocks.
    """
    from lockstep.control.etcd import Etcd  # here, so that only its users import http.client
    from lockstep.control.etcd_gateway import EtcdAccess, Gateway, LoginFailed, Refused, Unreachable

    gateway = Gateway(list(parse_addresses(hosts.where)), EtcdAccess.from_env(os.environ, hosts.where))
    key = f"{key_prefix(hosts.secret)}check/{hosts.name}"
    try:
        etcd = Etcd(gateway)
        etcd.get(key)
        written = etcd.cas(key, True, 0, None)
        etcd.delete(key, written.revision)
    except Refused as error:
        raise LoginFailed(f"etcd at {hosts.where} refuses to write {key}: {error}") from None
    except Unreachable as error:
        if "certificate verify failed" in str(error):
            raise LoginFailed(f"{error}; ETCDCTL_CACERT names the authority of its certificates") from None
        return f"{error}; waiting for it"
    try:
        members = gateway.call("/v3/cluster/member/list", {})["members"]
    except (Refused, Unreachable, KeyError):  # some versions let only root read it
        return f"the control store is the etcd at {hosts.where}"
    may_be_lost = (len(members) - 1) // 2
    redundancy = f"{may_be_lost} of them may be lost" if may_be_lost else "none may be lost; three would allow for one"
    return f"the control store is an etcd with {len(members)} member{'s' * (len(members) != 1)}: {redundancy}"


def wait_for_address(hosts: Hosts, print_message: Callable[[str], None]) -> None:
    """Waits until the name of the rendezvous, or one of the names, can be resolved: in Kubernetes that takes a while.

    Raises LockstepError after `give_up_s`. Blocks, so it is called before there are workers.
    """
    end_s = time.monotonic() + hosts.give_up_s
    has_printed = False
    while True:
        for name, port in parse_addresses(hosts.where):
            try:
                _addresses(name, port)
                return
            except OSError as error:
                why = str(error)
        if time.monotonic() >= end_s:
            raise LockstepError(f"{why}; gave up after {hosts.give_up_s:g} s")
        if not has_printed:
            print_message(f"{why}; waiting until it has, at most {hosts.give_up_s:g} s")
        has_printed = True
        time.sleep(min(1.0, hosts.give_up_s / 4))


def _addresses(name: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"the rendezvous {name!r} has no address ({error})") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


# ---- contact with the store and other hosts --------------------------------------------------------------------------


class HostContact:
    """Tracks contact with the store and the other hosts: messages about changes, and when to give up. Pure."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._lost_at_s: float | None = None  # since when there is no contact with the store; None: there is
        self._message_at_s = 0.0
        self._was_connected = self._has_printed = False
        self._present: set[str] = set()
        self.seen: set[str] = set()

    def update_store(self, now_s: float, *, trouble: str) -> list[str]:
        """Returns messages to print. `trouble` is why the store cannot be reached, "" if it can."""
        hosts = self._hosts
        if not trouble:
            had_printed, self._has_printed, self._lost_at_s = self._has_printed, False, None
            self._was_connected = True
            return [f"the control store at {hosts.where} can be reached"] if had_printed else []
        if self._lost_at_s is None:
            self._lost_at_s, self._message_at_s = now_s, now_s + SAY_AFTER_S
        if now_s < self._message_at_s:
            return []
        self._message_at_s, self._has_printed = now_s + SAY_EVERY_S, True
        left_s = max(0.0, self._lost_at_s + hosts.give_up_s - now_s)
        what = "the control store cannot be reached" if self._was_connected else "waiting for the control store"
        return [f"{what}: {trouble}; giving up in {left_s:.0f} s"]

    def update_hosts(self, names: Collection[str], left: Collection[str]) -> list[str]:
        """Returns messages to print. `names` are the other hosts that are present now, `left` those that have ended."""
        present, count = set(names), self._hosts.count
        new = [display_name(name) for name in sorted(present - self._present)]
        lines = [f"{' and '.join(new)} can be seen: {len(present) + 1} of {count} hosts"] if new else []
        for name in sorted(self._present - present - set(left)):
            lines.append(f"host {display_name(name)} is lost: nothing was heard from it for {self._hosts.lease_s:g} s")
        self._present = present
        self.seen |= present
        return lines

    def should_give_up(self, now_s: float) -> bool:
        return self._lost_at_s is not None and now_s >= self._lost_at_s + self._hosts.give_up_s


# ---- network interfaces ----------------------------------------------------------------------------------------------


@functools.cache
def interface_to(where: str) -> str | None:
    """Returns the interface with the route to the rendezvous, or with its address; None if it cannot be found."""
    for name, port in parse_addresses(where):
        with suppress(OSError):
            address = _own_address(name, port)
            if is_loopback(address) and not is_loopback(name):
                return _interface_by_route("0.0.0.0")
            return _interface_with(address) or _interface_by_route(_addresses(name, port)[0])
    return None


def address_towards(where: str, interface: str | None = None) -> str | None:
    """Returns the address at which other hosts reach workers of this host; that of `interface`, if given."""
    name = interface or interface_to(where)
    if name is not None and (found := _address_of(name)) is not None:
        return found
    for host, port in parse_addresses(where):
        with suppress(OSError):
            return _own_address(host, port)
    return None


def _own_address(name: str, port: int) -> str:
    """Returns the source address of packets to that destination. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_with(address: str) -> str | None:
    wanted = ip_address(address)
    if wanted.version == 6:
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                fields = line.split()
                if bytes.fromhex(fields[0]) == wanted.packed:
                    return fields[-1]
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address_of(name) == str(wanted)), None)


def _address_of(interface: str) -> str | None:
    """Returns its first IPv4 address."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(found[20:24])
    return None


def _interface_by_route(address: str) -> str | None:
    """Returns the interface of the most specific route. For addresses that SIOCGIFADDR does not list."""
    if ip_address(address).version == 6:
        return None
    target = struct.unpack("=I", ip_address(address).packed)[0]
    best: tuple[int, str] | None = None
    with suppress(OSError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            name, destination, _, _, _, _, _, mask, *_ = line.split()
            if target & int(mask, 16) == int(destination, 16):
                width = int(mask, 16).bit_count()
                best = max(best or (-1, ""), (width, name), key=lambda found: found[0])
    return None if best is None else best[1]
