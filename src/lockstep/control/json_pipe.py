"""Messages between a host agent and one of its workers: one line of JSON each, over a pair of connected sockets.

The worker inherits its end, so no other process can use it: it needs neither a port nor a secret. When either side
dies, the other reads the end of the stream.
"""

from __future__ import annotations

import json
import socket
from typing import Any, Final

LONGEST_LINE_BYTES: Final = 16 << 20
MAX_UNSENT_BYTES: Final = 64 << 20
READ_BYTES: Final = 1 << 16

Message = dict[str, Any]


class JsonPipeError(Exception):
    """The other side sent something that is not a message."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageParser:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LONGEST_LINE_BYTES:
            raise JsonPipeError(f"a line of more than {LONGEST_LINE_BYTES} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise JsonPipeError(f"a line that is not JSON: {error}") from None
            if not isinstance(message, dict):
                raise JsonPipeError(f"a line that is not an object: {line[:80]!r}")
            messages.append(message)
        return messages


class JsonPipe:
    """The host agent's end. It never blocks, because a worker that was stopped does not read."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._parser = sock, MessageParser()
        self._unsent = b""
        self.ended = False
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        if not self.ended:
            self._unsent += encode(message)
            self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self.ended = True
        except OSError:
            self.ended = True

    def receive(self) -> list[Message]:
        """The messages that have arrived. Sets `ended` when no more will follow."""
        messages: list[Message] = []
        try:
            while not self.ended:
                data = self._socket.recv(READ_BYTES)
                self.ended = not data
                messages += self._parser.feed(data)
        except BlockingIOError:
            pass
        except (OSError, JsonPipeError):
            self.ended = True
        return messages

    def close(self) -> None:
        self.ended = True
        self._socket.close()
