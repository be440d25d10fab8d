"""How a supervisor gets a socket to the control store, and what both ends set on theirs."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final, Protocol, TypeAlias, final

Address: TypeAlias = tuple[str, int]

_KEEP_CHECKING: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class Dial(Protocol):
    """As text: where it leads, for errors."""

    def __call__(self) -> socket.socket:
        """A new non-blocking socket on its way to the store. OSError if there is none to be had just now."""

    def close(self) -> None:
        """What it holds itself, not the sockets."""


def parse_addresses(text: str) -> list[Address]:
    """Of "etcd://a:2379,b:2379", or the same without its beginning."""
    addresses = []
    for one in text.removeprefix("etcd://").rstrip("/").split(","):
        host, colon, port = one.strip().rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{one!r} in {text!r} is not HOST:PORT; write HOST:PORT or etcd://HOST:2379,HOST:2379")
        addresses.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return addresses


def set_up(sock: socket.socket) -> None:
    """Nothing blocks, small messages go at once, and a peer whose machine has gone is noticed within a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_CHECKING.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@final
class TcpDial:
    def __init__(self, host: str, port: int) -> None:
        """The name is looked up here, once: that blocks, and a supervisor that has workers must not."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"the control store's host {host!r} has no address ({error}); give it as numbers") from None
        self._where = f"{host}:{port}"
        self._ways = [(family, address) for family, _, _, _, address in found]

    def __str__(self) -> str:
        return self._where

    def __call__(self) -> socket.socket:
        family, address = self._ways[0]
        self._ways.append(self._ways.pop(0))  # the next time another, should this be the wrong one
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            set_up(sock)
            with suppress(BlockingIOError):
                sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        pass
