"""A run on several hosts: what each is called, where they meet, and which network leads there.

Every host has a supervisor. The one whose own address is the rendezvous keeps the store, the others connect to it; with
an etcd all of them connect. What is decided there is the business of `membership` and `roster`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import hmac
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final, final

from lockstep.control.remote_store import reach
from lockstep.control.server import Server
from lockstep.control.sockets import Address, parse_addresses
from lockstep.control.store import Store
from lockstep.control.store_client import PREFIX, Arbiter, LocalClient, OnLost, Terms
from lockstep.errors import LockstepError

HOST: Final = "h0"  # the name of one that is alone
LEASE_S: Final = 5.0
# A worker whose peer hung up waits for so long (train/elastic_calls.py) until it hears that the peer's host is lost.
LONGEST_LEASE_S: Final = 15.0
SHORTEST_LEASE_S: Final = 0.5
SAY_AFTER_S: Final = 1.0  # without the store
SAY_EVERY_S: Final = 30.0
_LONGEST_NAME = 40
_SIOCGIFADDR: Final = 0x8915


@dataclass(frozen=True)
class Hosts:
    """The same on all hosts of a run, but for the name."""

    count: int
    where: str  # HOST:PORT of the one that keeps the store, or etcd://HOST:PORT,...
    name: str  # of this one, and of this supervisor alone
    secret: bytes = field(repr=False)
    lease_s: float = LEASE_S
    give_up_s: float = 600.0  # without the store
    stuck_s: float = 300.0  # without progress, before hosts that do not reach each other count as cut off

    @property
    def title(self) -> str:
        return title_of(self.name)


def name_host(env: Mapping[str, str]) -> str:
    """LOCKSTEP_HOST or the host's own name, and something that no other supervisor has: ids are never used again."""
    wish = env.get("LOCKSTEP_HOST", "").strip() or socket.gethostname().partition(".")[0]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", wish).strip("-")[:_LONGEST_NAME] or "host"
    return f"{plain}-{secrets.token_hex(3)}"


def title_of(name: str) -> str:
    """As people call it."""
    return re.sub(r"-[0-9a-f]{6}$", "", name)


def in_words(text: str) -> str:
    """With "worker 3 on node1" in place of ids."""
    return re.sub(r"\b([\w-]+)-[0-9a-f]{6}\.(\d+)\b", r"worker \2 on \1", text)


def prefix_of(secret: bytes) -> str:
    """Below which the records of a job are: two jobs may share an etcd."""
    return f"{PREFIX}{hmac.new(secret, b'the records of a job', hashlib.sha256).hexdigest()[:16]}/"


def share_of(total: int, hosts: int, number: int) -> int:
    """How many of `total` workers the host with this number has: the first ones have the remainder."""
    return total // hosts + (number < total % hosts) if number < hosts else 0


def check_where(where: str) -> Sequence[Address]:
    """ValueError unless hosts can meet there."""
    addresses = parse_addresses(where)
    if not where.startswith("etcd://") and len(addresses) != 1:
        raise ValueError(f"{where!r} names {len(addresses)} hosts, and only one can keep the store")
    return addresses


# ---- where they meet -------------------------------------------------------------------------------------------------


@final
class Station:
    """The arbiter of this host and, if the store is here, the door to it. Made after `selector`, closed before it."""

    def __init__(self, arbiter: Arbiter, server: Server | None = None) -> None:
        self.arbiter, self._server = arbiter, server

    @staticmethod
    def alone(on_lost: OnLost) -> Station:
        """One host needs no door."""
        return Station(LocalClient(Store(), terms=Terms(prefix=PREFIX, ttl_s=LEASE_S), on_lost=on_lost))

    @staticmethod
    def among(hosts: Hosts, selector: selectors.BaseSelector, on_lost: OnLost) -> Station:
        """LockstepError if the address is ours, and we cannot listen there."""
        # Half a lease, so that a connection that is lost alone can be made again before the lease is.
        terms = Terms(prefix=prefix_of(hosts.secret), ttl_s=hosts.lease_s, patience_s=hosts.lease_s / 2)
        if not hosts.where.startswith("etcd://"):
            store = Store()
            server = _open_door(store, hosts, selector)
            if server is not None:
                return Station(LocalClient(store, terms=terms, on_lost=on_lost), server)
        return Station(reach(hosts.where, hosts.secret, selector, terms=terms, on_lost=on_lost))

    @property
    def keeps_store(self) -> bool:
        return self._server is not None

    def tick(self, now_s: float) -> float:
        """When to come again at the latest."""
        next_s = self.arbiter.tick(now_s)  # before the server, or our own lease might end
        return next_s if self._server is None else min(next_s, self._server.tick(now_s))

    def close(self) -> None:
        self.arbiter.close()
        if self._server is not None:
            self._server.close()


def _open_door(store: Store, hosts: Hosts, selector: selectors.BaseSelector) -> Server | None:
    """None if the address is another host's, or another supervisor of this host has it."""
    ((name, port),) = parse_addresses(hosts.where)
    for address in _addresses(name, port):
        # Debian leads a host's own name to its loopback, where nobody else would find us.
        everywhere = is_loopback(address) and not is_loopback(name)
        try:
            return Server(store, hosts.secret, selector, host="0.0.0.0" if everywhere else address, port=port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise LockstepError(f"cannot listen on {address}:{port}: {error}; choose another port") from error
    return None


def await_address(hosts: Hosts, say: Callable[[str], None]) -> None:
    """The rendezvous has a name that leads somewhere: in Kubernetes that takes a while. LockstepError if it never does.

    Blocks, so it is called before there are workers.
    """
    end_s = time.monotonic() + hosts.give_up_s
    said = False
    while True:
        try:
            for name, port in parse_addresses(hosts.where):
                _addresses(name, port)
            return
        except OSError as error:
            if time.monotonic() >= end_s:
                raise LockstepError(f"{error}; gave up after {hosts.give_up_s:g} s") from None
            if not said:
                say(f"{error}; waiting until it has, at most {hosts.give_up_s:g} s")
            said = True
        time.sleep(min(1.0, hosts.give_up_s / 4))


def _addresses(name: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"the rendezvous {name!r} has no address ({error})") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


# ---- whom we can see -------------------------------------------------------------------------------------------------


class Contact:
    """With the store and the other hosts. What there is to say about it, and when to give up. Pure."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._away_s: float | None = None  # since when; None: we are in contact
        self._say_at_s = 0.0
        self._was_there = self._has_said = False
        self._known: set[str] = set()
        self.met: set[str] = set()

    def look(self, now_s: float, *, trouble: str) -> list[str]:
        """`trouble`: why the store cannot be reached; "": it can."""
        hosts = self._hosts
        if not trouble:
            said, self._has_said, self._away_s = self._has_said, False, None
            self._was_there = True
            return [f"the control store at {hosts.where} can be reached"] if said else []
        if self._away_s is None:
            self._away_s, self._say_at_s = now_s, now_s + SAY_AFTER_S
        if now_s < self._say_at_s:
            return []
        self._say_at_s, self._has_said = now_s + SAY_EVERY_S, True
        left_s = max(0.0, self._away_s + hosts.give_up_s - now_s)
        what = "the control store cannot be reached" if self._was_there else "waiting for the control store"
        return [f"{what}: {trouble}; giving up in {left_s:.0f} s"]

    def meet(self, names: Collection[str], left: Collection[str]) -> list[str]:
        """The other hosts that are there now, and those that have ended."""
        here, many = set(names), self._hosts.count
        came = [title_of(name) for name in sorted(here - self._known)]
        lines = [f"{' and '.join(came)} can be seen: {len(here) + 1} of {many} hosts"] if came else []
        for name in sorted(self._known - here - set(left)):
            lines.append(f"host {title_of(name)} is lost: nothing was heard from it for {self._hosts.lease_s:g} s")
        self._known = here
        self.met |= here
        return lines

    def is_hopeless(self, now_s: float) -> bool:
        return self._away_s is not None and now_s >= self._away_s + self._hosts.give_up_s


# ---- which network leads there ---------------------------------------------------------------------------------------


@functools.cache
def interface_to(where: str) -> str | None:
    """The interface through which we reach the rendezvous, or on which we are it; None if that cannot be told."""
    for name, port in parse_addresses(where):
        with suppress(OSError):
            address = _own_address(name, port)
            if is_loopback(address) and not is_loopback(name):
                return _interface_by_route("0.0.0.0")
            return _interface_with(address) or _interface_by_route(_addresses(name, port)[0])
    return None


def address_towards(where: str, interface: str | None = None) -> str | None:
    """The address at which the others find our workers: that of the interface, if one is chosen."""
    name = interface or interface_to(where)
    if name is not None and (found := _address_of(name)) is not None:
        return found
    for host, port in parse_addresses(where):
        with suppress(OSError):
            return _own_address(host, port)
    return None


def _own_address(name: str, port: int) -> str:
    """That of ours from which packets to it would come. Nothing is sent."""
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
    """Its first IPv4 address."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(found[20:24])
    return None


def _interface_by_route(address: str) -> str | None:
    """An interface may have more addresses than the one that it tells."""
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
