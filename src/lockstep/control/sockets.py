"""How a host agent connects to the control store, and the socket options of both ends."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final, Protocol, TypeAlias, final

Address: TypeAlias = tuple[str, int]

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class Dial(Protocol):
    """Connects to the store. `str` of it is the address, for error messages."""

    def __call__(self) -> socket.socket:
        """A new non-blocking socket that is connecting to the store. Raises OSError if that is not possible now."""

    def close(self) -> None:
        """Release what the object itself holds; the sockets belong to the caller."""


def parse_addresses(text: str) -> list[Address]:
    """The addresses in "a:2379,b:2379", with or without "etcd://" before it. Raises ValueError if one is malformed."""
    addresses = []
    for one in text.removeprefix("etcd://").rstrip("/").split(","):
        host, colon, port = one.strip().rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{one!r} in {text!r} is not HOST:PORT; write HOST:PORT or etcd://HOST:2379,HOST:2379")
        addresses.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return addresses


def configure_socket(sock: socket.socket) -> None:
    """Make it non-blocking, send small messages at once, and notice a peer whose machine is down within a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
        self._addresses.append(
            self._addresses.pop(0)
        )  # the next attempt uses the next address, in case this one is wrong
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
