"""The control store on a TCP port, for the agents of other hosts. Driven by the selector loop of its owner.

A peer gets no byte before it has proved that it knows the secret (wire.py), and has only a few seconds to do so. What
unauthenticated peers can use is bounded: MAX_UNAUTHENTICATED connections of a few bytes each, of which the oldest is
closed for a new one. A peer that violates the protocol is disconnected without an answer.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, final

from lockstep.control.connection import LARGEST_BUFFER_BYTES, READ_BYTES, Address, configure_socket, listen, own_address
from lockstep.control.store import Change, ControlStore
from lockstep.control.wire import (
    Channel,
    Message,
    Push,
    WireError,
    change_as_row,
    check_request,
    cut_pages,
    entry_as_row,
    follow,
)

MAX_UNAUTHENTICATED: Final = 64
MOST_CONNECTIONS: Final = 1024
AUTHENTICATE_WITHIN_S: Final = 5.0
STALLED_S: Final = 30.0  # how long a peer may read nothing of what waits to be sent to it
PUSH_BELOW_BYTES: Final = 1 << 20  # no push is added to a larger buffer: what changes meanwhile is sent later
ACCEPTS_AT_ONCE: Final = 16
PAUSE_S: Final = 0.5


def answer(store: ControlStore, request: Message, now_s: float) -> Message:
    """Carry out any request but "watch". `revision` in the answer is the one at which a watcher sees the result."""
    match request:
        case {"do": "get", "key": key}:
            return {"entry": entry_as_row(key, store.get(key))}
        case {"do": "list", "prefix": prefix, "after": after}:
            found = sorted((key, entry) for key, entry in store.list(prefix).items() if key > after)
            pages = cut_pages(Change(key, entry.revision, entry) for key, entry in found)
            return {"entries": [change_as_row(one) for one in pages[0]], "more": len(pages) > 1}
        case {"do": "cas", "key": key, "value": value, "revision": revision, "lease": lease}:
            return {"done": store.cas(key, value, revision, lease) is not None, "revision": store.changed_at(key)}
        case {"do": "delete", "key": key, "revision": revision}:
            return {"done": store.delete(key, revision), "revision": store.changed_at(key)}
        case {"do": "grant", "ttl_s": ttl_s}:
            return {"lease": store.grant(ttl_s, now_s)}
        case {"do": "keep_alive", "lease": lease}:
            return {"done": store.keep_alive(lease, now_s)}
        case {"do": "revoke", "lease": lease}:
            return {"done": store.revoke(lease)}
    raise AssertionError(request["do"])


@final
class Server:
    """Registers sockets with `selector`; the data of each key is an object with `ready(mask)`.

    Call `tick` before each `select`.
    """

    def __init__(
        self, store: ControlStore, secret: bytes, selector: selectors.BaseSelector, *, host: str, port: int = 0
    ) -> None:
        self._store, self._secret, self._selector = store, secret, selector
        self._listener = listen(host, port, backlog=256)
        self._is_listening, self._accept_at_s = False, -math.inf
        self._connections: dict[_Connection, None] = {}
        self._unauthenticated: dict[_Connection, None] = {}  # in the order in which they were accepted
        self._notified_revision = store.revision
        self._listen(True)

    @property
    def address(self) -> Address:
        return own_address(self._listener)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def ready(self, mask: int) -> None:
        """Accept a few connections at a time, so that a flood of them does not delay those that exist."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: drop unauthenticated peers, and accept none for a moment
                self._drop_all(list(self._unauthenticated))
                self._accept_at_s = time.monotonic() + PAUSE_S
                self._listen(False)
                return
            self._admit(accepted)

    def tick(self, now_s: float) -> float:
        self._listen(now_s >= self._accept_at_s)
        self._store.expire(now_s)
        if self._notified_revision != self._store.revision:
            self._notified_revision = self._store.revision
            for connection in list(self._connections):
                self._serve(connection, 0)  # it may watch what has changed
        self._drop_all([one for one in self._unauthenticated if now_s >= one.accepted_s + AUTHENTICATE_WITHIN_S])
        for connection in self._stalled(now_s):
            self._serve(connection, 0)  # it may have read since: what was late is perhaps this process
        self._drop_all(self._stalled(now_s))
        ends = [one.accepted_s + AUTHENTICATE_WITHIN_S for one in self._unauthenticated]
        ends += [one.last_sent_s + STALLED_S for one in self._connections if one.out]
        ends += [] if self._is_listening else [self._accept_at_s]
        return min([self._store.next_end_s(), *ends])

    def _stalled(self, now_s: float) -> list[_Connection]:
        return [one for one in self._connections if one.out and now_s >= one.last_sent_s + STALLED_S]

    def close(self) -> None:
        self._drop_all(list(self._connections))
        self._listen(False)
        self._listener.close()

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self)
        elif self._is_listening and not wanted:
            self._selector.unregister(self._listener)
        self._is_listening = wanted

    def _admit(self, accepted: socket.socket) -> None:
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED or len(self._connections) >= MOST_CONNECTIONS:
            self._drop_all(list(self._unauthenticated)[:1])
        if len(self._connections) >= MOST_CONNECTIONS:
            accepted.close()
            return
        try:
            configure_socket(accepted)
        except OSError:  # it is closed already
            accepted.close()
            return
        connection = _Connection(accepted, self._secret, self._serve)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._connections[connection] = self._unauthenticated[connection] = None

    def _serve(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                with suppress(BlockingIOError):
                    self._read(connection)
            self._send_pushes(connection)
        except (OSError, WireError):
            self._drop_all([connection])

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError
        for message in connection.channel.feed(data):
            self._handle(connection, message)
        connection.send(connection.channel.take_handshake())
        if connection.channel.is_open:
            self._unauthenticated.pop(connection, None)

    def _handle(self, connection: _Connection, request: Message) -> None:
        check_request(request)
        if request["do"] == "watch":
            connection.pushes = follow(self._store, request["prefix"])
            result: Message = {"done": True}
        else:
            try:
                result = answer(self._store, request, time.monotonic())
            except ValueError as error:
                result = {"error": str(error)}
        connection.send(connection.channel.outgoing({"id": request["id"], **result}))

    def _send_pushes(self, connection: _Connection) -> None:
        """Send what is buffered, and add pushes for a watcher as long as it reads them."""
        connection.flush()
        while connection.pushes is not None and len(connection.out) < PUSH_BELOW_BYTES:
            push = next(connection.pushes)
            if push is None:
                break
            connection.send(connection.channel.outgoing(push.as_message()))
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        if wanted != connection.mask:
            self._selector.modify(connection.sock, wanted, connection)
            connection.mask = wanted

    def _drop_all(self, connections: list[_Connection]) -> None:
        for connection in connections:
            if connection.closed:
                continue
            connection.closed = True
            self._connections.pop(connection, None)
            self._unauthenticated.pop(connection, None)
            self._selector.unregister(connection.sock)
            connection.sock.close()


@final
class _Connection:
    def __init__(self, sock: socket.socket, secret: bytes, serve: Callable[[_Connection, int], None]) -> None:
        self.sock, self._serve = sock, serve
        self.channel = Channel(secret, is_server=True)
        self.accepted_s = self.last_sent_s = time.monotonic()
        self.out = bytearray()
        self.mask = selectors.EVENT_READ
        self.pushes: Iterator[Push | None] | None = None
        self.closed = False

    def ready(self, mask: int) -> None:
        if not self.closed:  # another event of the same `select` may have closed it
            self._serve(self, mask)

    def send(self, data: bytes) -> None:
        if not self.out:
            self.last_sent_s = time.monotonic()
        self.out += data
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self.out:
                del self.out[: self.sock.send(self.out)]
                self.last_sent_s = time.monotonic()
        if len(self.out) > LARGEST_BUFFER_BYTES:
            raise ConnectionAbortedError("a peer sends requests and does not read the answers")
