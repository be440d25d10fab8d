"""A connection to the control store that comes back by itself: questions go out, answers and pushes come in.

Nothing is sent twice. What was under way when the connection was lost may have happened or not, and whoever asked is
told so. While there is no connection nothing is kept for later either.
"""

from __future__ import annotations

import math
import os
import random
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Final, TypeAlias, final

from lockstep.control.frames import Channel, Message, WireError
from lockstep.control.messages import take
from lockstep.control.sockets import Dial
from lockstep.control.store import Json
from lockstep.control.store_client import ControlError

READ_BYTES: Final = 65536
LARGEST_BUFFER_BYTES: Final = 8 << 20

Hear: TypeAlias = Callable[[Message | ControlError], None]


def backoff(attempt: int, *, luck: float, first_s: float = 0.05, most_s: float = 2.0) -> float:
    """How long to wait after so many failures (0: the first). `luck`, 0 to 1, keeps hosts from coming all at once."""
    return float(min(most_s, first_s * 2 ** min(attempt, 30)) * (0.5 + luck / 2))


class Phase(Enum):
    """AWAY -> DIALLING -> GREETING -> OPEN, and from anywhere back to AWAY."""

    AWAY = "not connected"
    DIALLING = "connecting"
    GREETING = "greeting"
    OPEN = "connected"


@final
class Patience:
    """Whether what is awaited has made no progress for too long."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since_s: float | None = None

    def progress(self) -> None:
        self._since_s = None

    def ends_s(self, now_s: float, *, waiting: bool) -> float:
        """To be asked in every tick: time counts from the first tick that sees us wait."""
        if not waiting:
            self._since_s = None
            return math.inf
        if self._since_s is None:
            self._since_s = now_s
        return self._since_s + self.limit_s


@final
class Link:
    """`on_open` is called for each new connection, `on_push` with each message that answers nothing."""

    def __init__(
        self,
        dial: Dial,
        secret: bytes,
        selector: selectors.BaseSelector,
        *,
        patience_s: float,
        on_open: Callable[[], None],
        on_push: Callable[[Message], None],
    ) -> None:
        self._dial, self._secret, self._selector = dial, secret, selector
        self._on_open, self._on_push = on_open, on_push
        self._patience = Patience(patience_s)
        self._phase = Phase.AWAY
        self._failures = 0
        self._retry_at_s: float | None = -math.inf
        self._sock: socket.socket | None = None
        self._channel = Channel(secret, is_server=False)
        self._out = bytearray()
        self._asked: dict[int, Hear] = {}
        self._number = 0
        self.trouble = f"no connection to the control store at {dial} has been made yet"

    @property
    def is_open(self) -> bool:
        return self._phase is Phase.OPEN

    def praise(self) -> None:
        """It is of use: should it be lost, the next attempt comes soon."""
        self._failures = 0

    def ask(self, do: str, hear: Hear, **fields: Json) -> None:
        """`hear` is called once, here or later: with the answer, or with what went wrong."""
        if not self.is_open:
            hear(ControlError(f"the control store was not asked to {do}: {self.trouble}", may_have_happened=False))
            return
        if len(self._out) > LARGEST_BUFFER_BYTES:
            text = f"the control store was not asked to {do}: {len(self._out)} bytes are waiting to be sent already"
            hear(ControlError(text, may_have_happened=False))
            return
        self._number += 1
        self._asked[self._number] = hear
        self._out += self._channel.outgoing({"id": self._number, "do": do, **fields})
        self._try(self._flush)

    def ready(self, mask: int) -> None:
        if self._sock is not None:  # an event of the same `select` may have ended it
            self._try(lambda: self._carry(mask))

    def tick(self, now_s: float) -> float:
        if self._phase is Phase.AWAY:
            if self._retry_at_s is None:
                self._retry_at_s = now_s + backoff(self._failures, luck=random.random())
                self._failures += 1
            if now_s < self._retry_at_s:
                return self._retry_at_s
            self._try(self._connect)
        waiting = self._phase in (Phase.DIALLING, Phase.GREETING) or bool(self._asked)
        end_s = self._patience.ends_s(now_s, waiting=waiting)
        if now_s >= end_s:
            self.drop(f"while {self._phase.value}, nothing was heard for {self._patience.limit_s:g} s")
        return now_s if self._phase is Phase.AWAY else end_s

    def drop(self, why: str) -> None:
        self.trouble = f"the connection to the control store at {self._dial} was lost: {why}"
        self._phase, self._retry_at_s = Phase.AWAY, None
        if self._sock is not None:
            self._selector.unregister(self._sock)
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)  # what was sent arrives, even if we have not read everything
            self._sock.close()
            self._sock = None
        asked, self._asked = self._asked, {}
        for hear in asked.values():
            hear(ControlError(f"{self.trouble}; look at the next snapshot for what was done", may_have_happened=True))

    def close(self) -> None:
        self.drop("it was closed")
        self._retry_at_s = math.inf
        self._dial.close()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, WireError) as error:
            self.drop(f"while {self._phase.value}, {error}")

    def _connect(self) -> None:
        self._patience.progress()
        self._phase = Phase.DIALLING
        self._sock = self._dial()
        self._channel = Channel(self._secret, is_server=False)
        self._out = bytearray(self._channel.take_greeting())
        self._selector.register(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def _carry(self, mask: int) -> None:
        assert self._sock is not None
        if self._phase is Phase.DIALLING:
            error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self._phase = Phase.GREETING
        if mask & selectors.EVENT_READ:
            with suppress(BlockingIOError):
                self._take(self._sock.recv(READ_BYTES))
        self._flush()

    def _take(self, data: bytes) -> None:
        if not data:
            hint = "; it does not say so, but our secret may be another" if self._phase is Phase.GREETING else ""
            raise ConnectionResetError(f"the other side closed it{hint}")
        self._patience.progress()
        messages = self._channel.feed(data)
        self._out += self._channel.take_greeting()
        if self._phase is Phase.GREETING and self._channel.is_open:
            self._phase = Phase.OPEN
            self._on_open()
        for message in messages:
            self._hear(message)
            if not self.is_open:  # somebody who heard it has had enough
                return

    def _hear(self, message: Message) -> None:
        if "trouble" in message:  # a bridge (etcd.py) that is about to end
            raise ConnectionAbortedError(take(message, "trouble", str))
        if "id" not in message:
            self._on_push(message)
            return
        hear = self._asked.pop(take(message, "id", int), None)
        if hear is None:
            raise WireError("an answer to nothing that was asked")
        if "error" in message:
            hear(ControlError(take(message, "error", str), may_have_happened=False))
        else:
            hear(message)

    def _flush(self) -> None:
        if self._sock is None:
            return
        with suppress(BlockingIOError):
            while self._out and self._phase is not Phase.DIALLING:
                del self._out[: self._sock.send(self._out)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector.get_key(self._sock).events != wanted:
            self._selector.modify(self._sock, wanted, self)
