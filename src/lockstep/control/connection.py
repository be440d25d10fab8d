"""A host agent's connection to the control store, which reconnects by itself, and the sockets of both ends.

Nothing is sent twice. A request that was under way when the connection was lost may have been carried out or not; its
callback gets an error that says so. While there is no connection, requests fail at once: none is queued.
"""

from __future__ import annotations

import math
import os
import random
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import ip_address
from typing import Final, Protocol, TypeAlias, final

from lockstep.control.store import ControlError, Json
from lockstep.control.wire import Channel, Message, WireError, read_field

READ_BYTES: Final = 65536
LARGEST_BUFFER_BYTES: Final = 8 << 20
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


Address: TypeAlias = tuple[str, int]
OnAnswer: TypeAlias = Callable[[Message | ControlError], None]


class Dial(Protocol):
    """Connects to the store. `str` of it is the address, for error messages."""

    def __call__(self) -> socket.socket:
        """A new non-blocking socket that is connecting to the store. Raises OSError if that is not possible now."""

    def close(self) -> None:
        """Release what the object itself holds; the sockets belong to the caller."""


SCHEME: Final = "etcd://"
TLS_SCHEME: Final = "etcds://"


def is_etcd(where: str) -> bool:
    return where.startswith((SCHEME, TLS_SCHEME))


@dataclass(frozen=True)
class OwnEtcd:
    """An etcd that the hosts of the job run themselves: the password of root, and the member of this host, if any."""

    password: str = field(repr=False)
    member: Address | None = None


def parse_addresses(text: str) -> list[Address]:
    """The addresses in "a:2379,b:2379", with or without "etcd://" or "etcds://" before it.

    Raises ValueError if one is malformed.
    """
    addresses = []
    for one in text.removeprefix(SCHEME).removeprefix(TLS_SCHEME).rstrip("/").split(","):
        host, colon, port = one.strip().rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{one!r} in {text!r} is not HOST:PORT; write HOST:PORT or etcd://HOST:2379,HOST:2379")
        addresses.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return addresses


def is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def configure_socket(sock: socket.socket) -> None:
    """Make it non-blocking, send small messages at once, and notice a peer whose machine is down within a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """A new non-blocking socket that listens there. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


def own_address(sock: socket.socket) -> Address:
    host, port = sock.getsockname()[:2]
    return str(host), int(port)


@final
class TcpDial:
    def __init__(self, host: str, port: int) -> None:
        """The name is resolved here, once: that blocks, and a host agent with running workers must not block."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"the control store's host {host!r} has no address ({error}); give it as numbers") from None
        self._where = f"{host}:{port}"
        self._addresses = [(family, address) for family, _, _, _, address in found]

    def __str__(self) -> str:
        return self._where

    def __call__(self) -> socket.socket:
        family, address = self._addresses[0]
        self._addresses.append(self._addresses.pop(0))  # the next attempt uses the next one, in case this one is wrong
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            configure_socket(sock)
            with suppress(BlockingIOError):
                sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        pass


def backoff(attempt: int, *, jitter: float, first_s: float = 0.05, most_s: float = 2.0) -> float:
    """Seconds to wait after `attempt` + 1 failures. `jitter`, 0 to 1, keeps hosts from reconnecting all at once."""
    return float(min(most_s, first_s * 2 ** min(attempt, 30)) * (0.5 + jitter / 2))


class LinkState(Enum):
    """DISCONNECTED -> CONNECTING -> HANDSHAKE -> OPEN, and from each state back to DISCONNECTED."""

    DISCONNECTED = "not connected"
    CONNECTING = "connecting"
    HANDSHAKE = "greeting"
    OPEN = "connected"


@final
class ProgressTimeout:
    """A deadline that moves with each sign of progress."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since_s: float | None = None

    def reset(self) -> None:
        self._since_s = None

    def deadline_s(self, now_s: float, *, waiting: bool) -> float:
        """Call it in every tick: time counts from the first tick with `waiting`, or the first after `reset`."""
        if not waiting:
            self._since_s = None
            return math.inf
        if self._since_s is None:
            self._since_s = now_s
        return self._since_s + self.limit_s


@final
class ReconnectingLink:
    """`on_open` is called for each new connection, `on_push` with each message that answers no request."""

    def __init__(
        self,
        dial: Dial,
        secret: bytes,
        selector: selectors.BaseSelector,
        *,
        answer_timeout_s: float,
        on_open: Callable[[], None],
        on_push: Callable[[Message], None],
    ) -> None:
        self._dial, self._secret, self._selector = dial, secret, selector
        self._on_open, self._on_push = on_open, on_push
        self._progress = ProgressTimeout(answer_timeout_s)
        self._state = LinkState.DISCONNECTED
        self._failures = 0
        self._retry_at_s: float | None = -math.inf
        self._sock: socket.socket | None = None
        self._channel = Channel(secret, is_server=False)
        self._out = bytearray()
        self._pending: dict[int, OnAnswer] = {}
        self._last_id = 0
        self.disconnect_reason = f"no connection to the control store at {dial} has been made yet"

    @property
    def is_open(self) -> bool:
        return self._state is LinkState.OPEN

    def reset_backoff(self) -> None:
        """The connection works: if it is lost, the next attempt follows soon."""
        self._failures = 0

    def request(self, do: str, on_answer: OnAnswer, **fields: Json) -> None:
        """Send a request. `on_answer` is called once, here or later: with the answer, or with the error."""
        why_not = "" if self.is_open else self.disconnect_reason
        if self.is_open and len(self._out) > LARGEST_BUFFER_BYTES:
            why_not = f"{len(self._out)} bytes are waiting to be sent already"
        if why_not:
            on_answer(ControlError(f"the control store was not asked to {do}: {why_not}", may_have_happened=False))
            return
        self._last_id += 1
        self._pending[self._last_id] = on_answer
        self._out += self._channel.outgoing({"id": self._last_id, "do": do, **fields})
        self._try(self._flush)

    def ready(self, mask: int) -> None:
        if self._sock is not None:  # an event of the same `select` may have ended it
            self._try(lambda: self._transfer(mask))

    def tick(self, now_s: float) -> float:
        if self._state is LinkState.DISCONNECTED:
            if self._retry_at_s is None:
                self._retry_at_s = now_s + backoff(self._failures, jitter=random.random())
                self._failures += 1
            if now_s < self._retry_at_s:
                return self._retry_at_s
            self._try(self._connect)
        waiting = self._state in (LinkState.CONNECTING, LinkState.HANDSHAKE) or bool(self._pending)
        deadline_s = self._progress.deadline_s(now_s, waiting=waiting)
        if now_s >= deadline_s:
            self.drop(f"while {self._state.value}, nothing was received for {self._progress.limit_s:g} s")
        return now_s if self._state is LinkState.DISCONNECTED else deadline_s

    def drop(self, why: str) -> None:
        self.disconnect_reason = f"the connection to the control store at {self._dial} was lost: {why}"
        self._state, self._retry_at_s = LinkState.DISCONNECTED, None
        if self._sock is not None:
            self._selector.unregister(self._sock)
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)  # so that what was sent arrives although unread input is left
            self._sock.close()
            self._sock = None
        pending, self._pending = self._pending, {}
        text = f"{self.disconnect_reason}; look at the next snapshot for what was done"
        for on_answer in pending.values():
            on_answer(ControlError(text, may_have_happened=True))

    def close(self) -> None:
        self.drop("it was closed")
        self._retry_at_s = math.inf
        self._dial.close()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, WireError) as error:
            self.drop(f"while {self._state.value}, {error}")

    def _connect(self) -> None:
        self._progress.reset()
        self._state = LinkState.CONNECTING
        self._sock = self._dial()
        self._channel = Channel(self._secret, is_server=False)
        self._out = bytearray(self._channel.take_handshake())
        self._selector.register(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def _transfer(self, mask: int) -> None:
        assert self._sock is not None
        if self._state is LinkState.CONNECTING:
            if error := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            self._state = LinkState.HANDSHAKE
        if mask & selectors.EVENT_READ:
            with suppress(BlockingIOError):
                self._receive(self._sock.recv(READ_BYTES))
        self._flush()

    def _receive(self, data: bytes) -> None:
        if not data:
            hint = "; the secrets may differ" if self._state is LinkState.HANDSHAKE else ""
            raise ConnectionResetError(f"the other side closed it{hint}")
        self._progress.reset()
        messages = self._channel.feed(data)
        self._out += self._channel.take_handshake()
        if self._state is LinkState.HANDSHAKE and self._channel.is_open:
            self._state = LinkState.OPEN
            self._on_open()
        for message in messages:
            self._dispatch(message)
            if not self.is_open:  # a callback has dropped the connection
                return

    def _dispatch(self, message: Message) -> None:
        if "trouble" in message:  # from a bridge (etcd.py) that is about to exit
            raise ConnectionAbortedError(read_field(message, "trouble", str))
        if "id" not in message:
            self._on_push(message)
            return
        on_answer = self._pending.pop(read_field(message, "id", int), None)
        if on_answer is None:
            raise WireError("an answer to nothing that was asked")
        if "error" in message:
            on_answer(ControlError(read_field(message, "error", str), may_have_happened=False))
        else:
            on_answer(message)

    def _flush(self) -> None:
        if self._sock is None:
            return
        with suppress(BlockingIOError):
            while self._out and self._state is not LinkState.CONNECTING:
                del self._out[: self._sock.send(self._out)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector.get_key(self._sock).events != wanted:
            self._selector.modify(self._sock, wanted, self)
