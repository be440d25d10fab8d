"""Frames between supervisors and the control store: JSON that nobody without the job's secret can forge. No I/O here.

    frame    4 bytes length of the rest | 32 bytes HMAC-SHA256 | payload
    hello    client -> server   its nonce, under a key from the secret alone: a stranger gets no answer at all
    welcome  server -> client   its nonce, under the session's key, which comes from the secret and both nonces
    proof    client -> server   nothing, under the session's key. Only now does the server keep more than a few bytes
    then     both ways          JSON objects

A code covers direction and number of its frame, too. So a frame of another session, of the other direction, from
before, out of order or changed is refused. Any violation raises WireError; drop the connection then, without a word.
Frames are authentic, not secret: who can listen can read them.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from enum import Enum
from typing import Any, Final, TypeAlias, final

from lockstep import strict_json
from lockstep.control.secret import SECRET_BYTES
from lockstep.control.store import write_json
from lockstep.errors import LockstepError

Message: TypeAlias = dict[str, Any]

LARGEST_FRAME_BYTES: Final = 2 << 20
NONCE_BYTES: Final = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">BQ")
_MAC_BYTES = 32
_HELLO = b"lockstep control 1: hello  "
_SESSION = b"lockstep control 1: session"
_FROM_CLIENT, _FROM_SERVER = 1, 2


class WireError(LockstepError):
    """The peer does not keep to the protocol: an attack, a broken connection, or another version or secret."""


class Phase(Enum):
    """What comes in next. Server: HELLO -> PROOF -> OPEN; client: WELCOME -> OPEN; after any violation BROKEN."""

    HELLO = "hello"
    WELCOME = "welcome"
    PROOF = "proof"
    OPEN = "open"
    BROKEN = "broken"


_GREETING_BYTES = {
    Phase.HELLO: _MAC_BYTES + NONCE_BYTES,
    Phase.WELCOME: _MAC_BYTES + NONCE_BYTES,
    Phase.PROOF: _MAC_BYTES,
}


@final
class Channel:
    """One end of one connection. After construction and after each `feed`, send what `take_greeting` returns."""

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._key = b""
        self._mine, self._theirs = (_FROM_SERVER, _FROM_CLIENT) if is_server else (_FROM_CLIENT, _FROM_SERVER)
        self._sent = self._received = 0
        self._rest = bytearray()
        self.phase = Phase.HELLO if is_server else Phase.WELCOME
        hello = hmac.digest(secret, _HELLO + self._nonce, "sha256") + self._nonce
        self._greeting = b"" if is_server else _LENGTH.pack(len(hello)) + hello

    @property
    def is_open(self) -> bool:
        """The peer has proved that it knows the secret, now and not at some other time."""
        return self.phase is Phase.OPEN

    def take_greeting(self) -> bytes:
        greeting, self._greeting = self._greeting, b""
        return greeting

    def outgoing(self, message: Message) -> bytes:
        assert self.is_open
        payload = write_json(message).encode("ascii")
        if _MAC_BYTES + len(payload) > LARGEST_FRAME_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes; a frame has at most {LARGEST_FRAME_BYTES}")
        return self._seal(payload)

    def feed(self, data: bytes) -> list[Message]:
        """What has arrived: the messages that are complete by now, all of them genuine."""
        if self.phase is Phase.BROKEN:
            raise WireError("the connection has been broken before")
        self._rest += data
        messages = []
        try:
            while (frame := self._next_frame()) is not None:
                if self.is_open:
                    messages.append(read_message(self._verify(frame)))
                else:
                    self._greet(frame)
        except WireError:
            self.phase = Phase.BROKEN
            self._rest.clear()
            raise
        return messages

    def _next_frame(self) -> bytes | None:
        if len(self._rest) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._rest)
        wanted = _GREETING_BYTES.get(self.phase)
        if wanted is not None and size != wanted:
            raise WireError(f"a frame of {size} bytes where a {self.phase.value} has {wanted}")
        if not _MAC_BYTES <= size <= LARGEST_FRAME_BYTES:
            raise WireError(f"a frame of {size} bytes; {_MAC_BYTES} to {LARGEST_FRAME_BYTES} are possible")
        if len(self._rest) < _LENGTH.size + size:
            return None
        frame = bytes(self._rest[_LENGTH.size : _LENGTH.size + size])
        del self._rest[: _LENGTH.size + size]
        return frame

    def _greet(self, frame: bytes) -> None:
        if self.phase is Phase.HELLO:
            theirs = frame[_MAC_BYTES:]
            if not hmac.compare_digest(frame[:_MAC_BYTES], hmac.digest(self._secret, _HELLO + theirs, "sha256")):
                raise WireError("a hello from somebody who does not know the job's secret")
            self._key = hmac.digest(self._secret, _SESSION + theirs + self._nonce, "sha256")
            self._greeting = self._seal(self._nonce)
            self.phase = Phase.PROOF
        elif self.phase is Phase.WELCOME:
            # The key needs what is still to be verified with it: who made it up does not know the secret.
            self._key = hmac.digest(self._secret, _SESSION + self._nonce + frame[_MAC_BYTES:], "sha256")
            self._verify(frame)
            self._greeting = self._seal(b"")
            self.phase = Phase.OPEN
        else:
            self._verify(frame)
            self.phase = Phase.OPEN

    def _seal(self, payload: bytes) -> bytes:
        code = self._code(self._mine, self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(code) + len(payload)) + code + payload

    def _verify(self, frame: bytes) -> bytes:
        payload = frame[_MAC_BYTES:]
        if not hmac.compare_digest(frame[:_MAC_BYTES], self._code(self._theirs, self._received, payload)):
            raise WireError(f"frame {self._received} is forged, changed, repeated or out of order")
        self._received += 1
        return payload

    def _code(self, direction: int, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, _NUMBER.pack(direction, number) + payload, "sha256")


def read_message(payload: bytes) -> Message:
    """One object."""
    try:
        message = strict_json.parse(payload)
    except ValueError as error:
        raise WireError(f"a message that is no plain JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError(f"a message must be an object, not {type(message).__name__}")
    return message
