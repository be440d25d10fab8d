"""The control store on a port, for supervisors of other hosts. Driven by somebody else's selectors loop.

A stranger gets nothing: not a byte before it has proved that it knows the secret (wire.py), and not many moments to do
so. What it can take is bounded: MOST_UNPROVEN connections of a few bytes each, of which the oldest goes when another
comes. Whoever breaks the protocol is dropped without a word.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, final

from lockstep.control.frames import Channel, Message, WireError
from lockstep.control.messages import Push, check_request, cut_pages, entry_as_row, follow
from lockstep.control.sockets import set_up
from lockstep.control.store import Change, Store

MOST_UNPROVEN: Final = 64
MOST_CONNECTIONS: Final = 1024
UNPROVEN_S: Final = 5.0
STALLED_S: Final = 30.0  # how long somebody may take nothing of what we have for it
READ_BYTES: Final = 65536
PUSH_BELOW_BYTES: Final = 1 << 20  # no push is added to a buffer that has more: what changes meanwhile is sent later
LARGEST_BUFFER_BYTES: Final = 8 << 20
ACCEPTS_AT_ONCE: Final = 16
PAUSE_S: Final = 0.5


def answer(store: Store, request: Message, now_s: float) -> Message:
    """Do what a request asks, except to watch. `revision` in an answer: where a watcher sees what it is about."""
    match request:
        case {"do": "get", "key": key}:
            return {"entry": entry_as_row(key, store.get(key))}
        case {"do": "list", "prefix": prefix, "after": after}:
            found = sorted((key, entry) for key, entry in store.list(prefix).items() if key > after)
            pages = cut_pages(Change(key, entry.revision, entry) for key, entry in found)
            return {"entries": [entry_as_row(one.key, one.entry) for one in pages[0]], "more": len(pages) > 1}
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
    """Registers with `selector`, as data an object with `ready(mask)`. Call `tick` before each `select`."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        selector: selectors.BaseSelector,
        *,
        host: str,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._secret, self._selector, self._clock = store, secret, selector, clock
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self._listener.setblocking(False)
        self._is_listening, self._accept_at_s = False, -math.inf
        self._connections: dict[_Connection, None] = {}
        self._unproven: dict[_Connection, None] = {}  # in the order in which they came
        self._told = store.revision
        self._listen(True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def ready(self, mask: int) -> None:
        """Somebody wants to connect. A few at a time, so that many of them do not keep those waiting who have."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: strangers go, and nobody is accepted for a moment
                self._drop_all(list(self._unproven))
                self._accept_at_s = self._clock() + PAUSE_S
                self._listen(False)
                return
            self._admit(accepted)

    def tick(self, now_s: float) -> float:
        self._listen(now_s >= self._accept_at_s)
        self._store.expire(now_s)
        self._notify()
        self._drop_all([one for one in self._unproven if now_s >= one.since_s + UNPROVEN_S])
        self._drop_all([one for one in self._connections if one.out and now_s >= one.moved_s + STALLED_S])
        ends = [one.since_s + UNPROVEN_S for one in self._unproven]
        ends += [one.moved_s + STALLED_S for one in self._connections if one.out]
        ends += [] if self._is_listening else [self._accept_at_s]
        return min([self._store.next_end_s(), *ends])

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
        if len(self._unproven) >= MOST_UNPROVEN or len(self._connections) >= MOST_CONNECTIONS:
            self._drop_all(list(self._unproven)[:1])
        if len(self._connections) >= MOST_CONNECTIONS:
            accepted.close()
            return
        try:
            set_up(accepted)
        except OSError:  # it has gone already
            accepted.close()
            return
        connection = _Connection(accepted, self._secret, self._serve, self._clock)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._connections[connection] = self._unproven[connection] = None

    def _serve(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                with suppress(BlockingIOError):
                    self._read(connection)
            self._fill(connection)
        except (OSError, WireError):
            self._drop_all([connection])

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError
        for message in connection.channel.feed(data):
            self._obey(connection, message)
        connection.send(connection.channel.take_greeting())
        if connection.channel.is_open:
            self._unproven.pop(connection, None)

    def _obey(self, connection: _Connection, request: Message) -> None:
        check_request(request)
        if request["do"] == "watch":
            connection.pushes = follow(self._store, request["prefix"])
            result: Message = {"done": True}
        else:
            try:
                result = answer(self._store, request, self._clock())
            except ValueError as error:
                result = {"error": str(error)}
        connection.send(connection.channel.outgoing({"id": request["id"], **result}))

    def _notify(self) -> None:
        if self._told == self._store.revision:
            return
        self._told = self._store.revision
        for connection in list(self._connections):
            try:
                self._fill(connection)
            except OSError:
                self._drop_all([connection])

    def _fill(self, connection: _Connection) -> None:
        """Send, and add what a watcher has not seen as long as it takes it."""
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
            self._unproven.pop(connection, None)
            self._selector.unregister(connection.sock)
            connection.sock.close()


@final
class _Connection:
    def __init__(
        self, sock: socket.socket, secret: bytes, serve: Callable[[_Connection, int], None], clock: Callable[[], float]
    ) -> None:
        self.sock, self._serve, self._clock = sock, serve, clock
        self.channel = Channel(secret, is_server=True)
        self.since_s = self.moved_s = clock()
        self.out = bytearray()
        self.mask = selectors.EVENT_READ
        self.pushes: Iterator[Push | None] | None = None
        self.closed = False

    def ready(self, mask: int) -> None:
        if not self.closed:  # another one's event of the same `select` may have closed it
            self._serve(self, mask)

    def send(self, data: bytes) -> None:
        if not self.out:
            self.moved_s = self._clock()
        self.out += data
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self.out:
                del self.out[: self.sock.send(self.out)]
                self.moved_s = self._clock()
        if len(self.out) > LARGEST_BUFFER_BYTES:
            raise ConnectionAbortedError("somebody asks and does not read the answers")
