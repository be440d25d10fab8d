"""Frames between host agents and the control store: JSON that cannot be forged without the job's secret. No I/O here.

    frame    4 bytes length of the rest | 32 bytes HMAC-SHA256 | payload
    hello    client -> server   its nonce, with a MAC under the secret alone: without the secret there is no answer
    welcome  server -> client   its nonce, with a MAC under the session key, derived from the secret and both nonces
    proof    client -> server   empty, with a MAC under the session key. Before it, the server keeps only a few bytes
    then     both ways          JSON objects

A MAC also covers the direction and number of its frame. So a frame of another session, of the other direction, or one
that is repeated, out of order or changed is refused. Any violation raises WireError; close the connection then without
an answer. Frames are authenticated, not encrypted: a listener on the network can read them.
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
    """The peer violates the protocol: an attack, a broken connection, or another version or secret."""


class HandshakePhase(Enum):
    """Which frame is expected next. Server: HELLO -> PROOF -> OPEN; client: WELCOME -> OPEN; a violation: BROKEN."""

    HELLO = "hello"
    WELCOME = "welcome"
    PROOF = "proof"
    OPEN = "open"
    BROKEN = "broken"


_HANDSHAKE_BYTES = {
    HandshakePhase.HELLO: _MAC_BYTES + NONCE_BYTES,
    HandshakePhase.WELCOME: _MAC_BYTES + NONCE_BYTES,
    HandshakePhase.PROOF: _MAC_BYTES,
}


@final
class Channel:
    """One end of one connection. After construction and after each `feed`, send what `take_handshake` returns."""

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._key = b""
        self._own_direction, self._peer_direction = (
            (_FROM_SERVER, _FROM_CLIENT) if is_server else (_FROM_CLIENT, _FROM_SERVER)
        )
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.phase = HandshakePhase.HELLO if is_server else HandshakePhase.WELCOME
        hello = hmac.digest(secret, _HELLO + self._nonce, "sha256") + self._nonce
        self._handshake = b"" if is_server else _LENGTH.pack(len(hello)) + hello

    @property
    def is_open(self) -> bool:
        """Whether the peer has proved in this session that it has the secret."""
        return self.phase is HandshakePhase.OPEN

    def take_handshake(self) -> bytes:
        handshake, self._handshake = self._handshake, b""
        return handshake

    def outgoing(self, message: Message) -> bytes:
        assert self.is_open
        payload = write_json(message).encode("ascii")
        if _MAC_BYTES + len(payload) > LARGEST_FRAME_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes; a frame has at most {LARGEST_FRAME_BYTES}")
        return self._seal(payload)

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes. Returns the messages that are complete by now, all of them authenticated."""
        if self.phase is HandshakePhase.BROKEN:
            raise WireError("the connection has been broken before")
        self._buffer += data
        messages = []
        try:
            while (frame := self._next_frame()) is not None:
                if self.is_open:
                    messages.append(read_message(self._verify(frame)))
                else:
                    self._handle_handshake(frame)
        except WireError:
            self.phase = HandshakePhase.BROKEN
            self._buffer.clear()
            raise
        return messages

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        wanted = _HANDSHAKE_BYTES.get(self.phase)
        if wanted is not None and size != wanted:
            raise WireError(f"a frame of {size} bytes where a {self.phase.value} has {wanted}")
        if not _MAC_BYTES <= size <= LARGEST_FRAME_BYTES:
            raise WireError(f"a frame of {size} bytes; {_MAC_BYTES} to {LARGEST_FRAME_BYTES} are possible")
        if len(self._buffer) < _LENGTH.size + size:
            return None
        frame = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
        del self._buffer[: _LENGTH.size + size]
        return frame

    def _handle_handshake(self, frame: bytes) -> None:
        if self.phase is HandshakePhase.HELLO:
            peer_nonce = frame[_MAC_BYTES:]
            if not hmac.compare_digest(frame[:_MAC_BYTES], hmac.digest(self._secret, _HELLO + peer_nonce, "sha256")):
                raise WireError("a hello from a peer that does not know the job's secret")
            self._key = hmac.digest(self._secret, _SESSION + peer_nonce + self._nonce, "sha256")
            self._handshake = self._seal(self._nonce)
            self.phase = HandshakePhase.PROOF
        elif self.phase is HandshakePhase.WELCOME:
            # The key is derived from the nonce that it then verifies: a nonce made up without the secret fails.
            self._key = hmac.digest(self._secret, _SESSION + self._nonce + frame[_MAC_BYTES:], "sha256")
            self._verify(frame)
            self._handshake = self._seal(b"")
            self.phase = HandshakePhase.OPEN
        else:
            self._verify(frame)
            self.phase = HandshakePhase.OPEN

    def _seal(self, payload: bytes) -> bytes:
        mac = self._mac(self._own_direction, self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(mac) + len(payload)) + mac + payload

    def _verify(self, frame: bytes) -> bytes:
        payload = frame[_MAC_BYTES:]
        if not hmac.compare_digest(frame[:_MAC_BYTES], self._mac(self._peer_direction, self._received, payload)):
            raise WireError(f"frame {self._received} is forged, changed, repeated or out of order")
        self._received += 1
        return payload

    def _mac(self, direction: int, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, _NUMBER.pack(direction, number) + payload, "sha256")


def read_message(payload: bytes) -> Message:
    """The JSON object in a payload. Raises WireError if it is anything else."""
    try:
        message = strict_json.parse(payload)
    except ValueError as error:
        raise WireError(f"a message that is no plain JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError(f"a message must be an object, not {type(message).__name__}")
    return message
