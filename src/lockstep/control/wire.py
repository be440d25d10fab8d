"""What is sent between host agents and the control store: the job's secret, authenticated frames, messages. No I/O.

    frame    4 bytes length of the rest | 32 bytes HMAC-SHA256 | payload
    hello    client -> server   its nonce, with a MAC under the secret alone: without the secret there is no answer
    welcome  server -> client   its nonce, with a MAC under the session key, derived from the secret and both nonces
    proof    client -> server   empty, with a MAC under the session key. Before it, the server keeps only a few bytes
    then     both ways          JSON objects:

    request  {"id": 7, "do": "cas", ...}                       FIELDS has the fields of each `do`
    answer   {"id": 7, ...} or {"id": 7, "error": "why nothing was changed"}
    push     {"changes": [[key, revision, value, lease] or [key, revision], ...],
              "revision": r, "anew": bool, "complete": bool}
    last     {"trouble": "why the sender ends the connection"}  only from a bridge to etcd

A MAC also covers the direction and number of its frame. So a frame of another session, of the other direction, or one
that is repeated, out of order or changed is refused. Any violation raises WireError; close the connection then without
an answer. Frames are authenticated, not encrypted: a listener on the network can read them.

A client that watches a prefix gets everything below it once (`anew`), and then the changes, in rounds. A round may take
several pushes; with the last one (`complete`) the receiver has the state as of the revision. If a key changes faster
than it can be sent, only its last state is sent, so that a slow reader costs no memory.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Final, TypeAlias, final

from lockstep import strict_json
from lockstep.control.store import Change, ControlStore, StoreEntry, write_json
from lockstep.errors import LockstepError

Message: TypeAlias = dict[str, Any]


class WireError(LockstepError):
    """The peer violates the protocol: an attack, a broken connection, or another version or secret."""


# --------------------------------------------------------------------------------------------------------- the secret

VARIABLE: Final = "LOCKSTEP_JOB_SECRET"
SECRET_BYTES: Final = 32
_LONGEST_FILE_BYTES = 1024
_MAKE = 'make one with `python -c "import secrets; print(secrets.token_hex(32))"`'


def new_secret() -> bytes:
    """32 random bytes, which only the host agents of a job have."""
    return secrets.token_bytes(SECRET_BYTES)


def read_secret(env: Mapping[str, str], file: Path | None = None) -> bytes:
    """Read the secret, 64 hexadecimal digits, from the file if there is one, else from the environment.

    Raises ValueError, which says what is wrong, but does not contain the secret.
    """
    if file is not None:
        text, where = _read_private(file), f"the file {file}"
    elif VARIABLE in env:
        text, where = env[VARIABLE], VARIABLE
    else:
        raise ValueError(f"{VARIABLE} is not set, and all hosts of a job need the same; {_MAKE}")
    digits = text.strip()
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
        raise ValueError(f"{where} has {len(digits)} characters; a secret is 64 hexadecimal digits: {_MAKE}")
    return bytes.fromhex(digits)


def _read_private(file: Path) -> str:
    with file.open("rb") as handle:
        facts = os.fstat(handle.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if mode & 0o077:
            raise ValueError(f"others may use the secret in {file} (mode {mode:04o}); `chmod 600 {file}`, and if they "
                             "could read it until now, make a new one")  # fmt: skip
        if facts.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"the secret in {file} belongs to user {facts.st_uid}, and we are {os.geteuid()}")
        return handle.read(_LONGEST_FILE_BYTES).decode("ascii", errors="replace")


# ------------------------------------------------------------------------------------------------------------- frames

LARGEST_FRAME_BYTES: Final = 2 << 20
NONCE_BYTES: Final = 32
_LENGTH, _NUMBER = struct.Struct(">I"), struct.Struct(">BQ")
_MAC_BYTES = 32
_HELLO = b"lockstep control 1: hello  "
_SESSION = b"lockstep control 1: session"
_FROM_CLIENT, _FROM_SERVER = 1, 2


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
        self._secret, self._nonce, self._key = secret, secrets.token_bytes(NONCE_BYTES), b""
        directions = (_FROM_SERVER, _FROM_CLIENT) if is_server else (_FROM_CLIENT, _FROM_SERVER)
        self._own_direction, self._peer_direction = directions
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


# ----------------------------------------------------------------------------------------------------------- messages

# A page that exceeds this by the largest value and the longest key still fits into a frame.
PAGE_BYTES: Final = 512 << 10

_ANYTHING: Final = (NoneType, bool, int, float, str, list, dict)
FIELDS: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "get": {"key": (str,)},
    "list": {"prefix": (str,), "after": (str,)},
    "cas": {"key": (str,), "value": _ANYTHING, "revision": (int,), "lease": (str, NoneType)},
    "delete": {"key": (str,), "revision": (int,)},
    "grant": {"ttl_s": (int, float)},
    "keep_alive": {"lease": (str,)},
    "revoke": {"lease": (str,)},
    "watch": {"prefix": (str,)},
}


@dataclass(frozen=True)
class Push:
    changes: Sequence[Change]
    revision: int
    anew: bool
    complete: bool

    def as_message(self) -> Message:
        return {**vars(self), "changes": [change_as_row(change) for change in self.changes]}


def check_request(message: Message) -> None:
    """Raise WireError unless the message is a request with exactly the fields in FIELDS."""
    fields = FIELDS.get(read_field(message, "do", str))
    if fields is None:
        raise WireError(f"there is no request {message['do'][:40]!r}")
    read_field(message, "id", int)
    if message.keys() != {"id", "do", *fields}:
        raise WireError(f"{message['do']} takes {sorted(fields)}, and not {sorted(message.keys() - {'id', 'do'})}")
    for name, kinds in fields.items():
        read_field(message, name, *kinds)


def read_field(message: Message, name: str, *kinds: type) -> Any:
    """The value of a field. Raises WireError unless its type is exactly one of `kinds`: True is no number."""
    if name not in message or type(message[name]) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WireError(f"a message whose {name!r} is not {wanted}")
    return message[name]


def change_as_row(change: Change) -> list[Any]:
    entry = change.entry
    return [change.key, change.revision] if entry is None else [change.key, entry.revision, entry.value, entry.lease]


def entry_as_row(key: str, entry: StoreEntry | None) -> list[Any] | None:
    return None if entry is None else change_as_row(Change(key, entry.revision, entry))


def row_as_change(row: Any) -> Change:
    match row:
        case [str(key), int(revision)]:
            return Change(key, revision, None)
        case [str(key), int(revision), value, (str() | None) as lease]:
            return Change(key, revision, StoreEntry(value, revision, lease))
    raise WireError("a row that is neither [key, revision] nor [key, revision, value, lease]")


def message_as_push(message: Message) -> Push:
    return Push(
        changes=[row_as_change(row) for row in read_field(message, "changes", list)],
        revision=read_field(message, "revision", int),
        anew=read_field(message, "anew", bool),
        complete=read_field(message, "complete", bool),
    )


def cut_pages(changes: Iterable[Change]) -> list[list[Change]]:
    """Split changes into pages of about PAGE_BYTES. Returns at least one page, which may be empty."""
    pages: list[list[Change]] = [[]]
    size = 0
    for change in changes:
        own = len(write_json(change_as_row(change)))
        if pages[-1] and size + own > PAGE_BYTES:
            pages.append([])
            size = 0
        pages[-1].append(change)
        size += own
    return pages


def cut_round(changes: Iterable[Change], revision: int, *, anew: bool) -> Iterator[Push]:
    pages = cut_pages(changes)
    for number, page in enumerate(pages):
        yield Push(page, revision, anew=anew and number == 0, complete=number == len(pages) - 1)


def follow(store: ControlStore, prefix: str) -> Iterator[Push | None]:
    """Endless iterator over the pushes for a client that watches the prefix; None when there is nothing to send now."""
    seen = -1
    while True:
        news = store.changes_after(seen)
        anew = news is None
        if news is None:
            news = [Change(key, entry.revision, entry) for key, entry in store.list(prefix).items()]
        seen = store.revision
        below = [change for change in news if change.key.startswith(prefix)]
        if below or anew:
            yield from cut_round(below, seen, anew=anew)
        if store.revision == seen:
            yield None
