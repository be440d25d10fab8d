"""Messages between a supervisor and a worker of its own: JSON, a line each, over a pair of connected sockets.

The worker inherits its end, so nobody else can speak on it: it needs neither a port nor a secret. When either side
dies, the other reads the end.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Final

LONGEST_LINE_BYTES: Final = 16 << 20
MOST_WAITING_BYTES: Final = 64 << 20
READ_BYTES: Final = 1 << 16

Message = dict[str, Any]


class LineError(Exception):
    """The other side does not keep to the rules, or does not read."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Cuts what comes in into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            raise LineError(f"a line of more than {LONGEST_LINE_BYTES} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise LineError(f"a line that is not JSON: {error}") from None
            if not isinstance(message, dict):
                raise LineError(f"a line that is not an object: {line[:80]!r}")
            messages.append(message)
        return messages


class Line:
    """The supervisor's end. It never blocks: a worker that was stopped does not read."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lines = end, Lines()
        self._waiting = b""
        self.ended = False
        end.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_behind(self) -> bool:
        """Something waits to be sent."""
        return bool(self._waiting)

    def send(self, message: Message) -> None:
        if not self.ended:
            self._waiting += encode(message)
            self.flush()

    def flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._socket.send(self._waiting) :]
        except BlockingIOError:
            if len(self._waiting) > MOST_WAITING_BYTES:
                self.ended = True
        except OSError:
            self.ended = True

    def receive(self) -> list[Message]:
        """What has come; sets `ended` when nothing more will."""
        messages: list[Message] = []
        try:
            while not self.ended:
                data = self._socket.recv(READ_BYTES)
                self.ended = not data
                messages += self._lines.feed(data)
        except BlockingIOError:
            pass
        except (OSError, LineError):
            self.ended = True
        return messages

    def close(self) -> None:
        self.ended = True
        self._socket.close()
