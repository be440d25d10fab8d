"""Frames: who knows the secret is understood, and anything else is refused before it means something."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.control.wire import (
    LARGEST_FRAME_BYTES,
    VARIABLE,
    Channel,
    HandshakePhase,
    WireError,
    check_request,
    message_as_push,
    new_secret,
    read_message,
    read_secret,
    row_as_change,
)

SECRET = bytes(range(32))
HELLO_BYTES = 4 + 32 + 32


def pair(secret: bytes = SECRET) -> tuple[Channel, Channel]:
    return Channel(secret, is_server=False), Channel(secret, is_server=True)


def greet(client: Channel, server: Channel) -> list[bytes]:
    """Shake hands, and return what went over the wire."""
    hello = client.take_handshake()
    assert server.feed(hello) == []
    welcome = server.take_handshake()
    assert client.feed(welcome) == []
    proof = client.take_handshake()
    assert not server.is_open
    assert server.feed(proof) == []
    assert client.is_open
    assert server.is_open
    return [hello, welcome, proof]


def opened() -> tuple[Channel, Channel]:
    client, server = pair()
    greet(client, server)
    return client, server


# -------------------------------------------------------------------------------------------- those who know the secret


def test_messages_go_both_ways_in_any_pieces() -> None:
    client, server = opened()
    questions: list[dict[str, Any]] = [{"id": n, "text": "é\u2028\ud800" * n, "float": 0.1} for n in range(9)]
    stream = b"".join(client.outgoing(one) for one in questions)
    rng, heard = random.Random(0), []
    while stream:
        size = rng.randrange(1, 60)
        heard += server.feed(stream[:size])
        stream = stream[size:]
    assert heard == questions
    assert client.feed(server.outgoing({"a": 1}) + server.outgoing({"a": 2})) == [{"a": 1}, {"a": 2}]


def test_every_session_has_a_key_of_its_own() -> None:
    frames = set()
    for _ in range(20):
        client, _server = opened()
        frames.add(client.outgoing({"the": "same"}))
    assert len(frames) == 20


def test_the_largest_frame_passes_and_one_more_byte_is_not_even_waited_for() -> None:
    client, server = opened()
    room = LARGEST_FRAME_BYTES - 32 - len('{"a":""}')
    assert server.feed(client.outgoing({"a": "x" * room})) == [{"a": "x" * room}]
    with pytest.raises(ValueError, match="a frame has at most"):
        client.outgoing({"a": "x" * (room + 1)})
    with pytest.raises(WireError, match="2097153 bytes"):
        server.feed((LARGEST_FRAME_BYTES + 1).to_bytes(4, "big"))


# ------------------------------------------------------------------------------------------------------------ strangers


def test_a_stranger_gets_no_byte() -> None:
    stranger, server = Channel(bytes(32), is_server=False), Channel(SECRET, is_server=True)
    with pytest.raises(WireError, match="does not know"):
        server.feed(stranger.take_handshake())
    assert server.take_handshake() == b""
    assert server.phase is HandshakePhase.BROKEN


def test_a_client_does_not_believe_a_server_without_the_secret() -> None:
    client, _ = pair()
    hello = client.take_handshake()
    for answer in (hello, HELLO_BYTES.to_bytes(4, "big") + bytes(64), bytes(4) + hello[4:]):
        client, _ = pair()
        client.take_handshake()
        with pytest.raises(WireError):
            client.feed(answer)
        assert client.take_handshake() == b""


def test_a_recorded_session_is_no_use_in_another() -> None:
    client, server = pair()
    hello, _welcome, proof = greet(client, server)
    request = client.outgoing({"id": 1})
    fresh = Channel(SECRET, is_server=True)
    fresh.feed(hello)  # known to be genuine, but not to be new: it gets a challenge
    assert fresh.phase is HandshakePhase.PROOF
    with pytest.raises(WireError, match="forged, changed, repeated"):
        fresh.feed(proof)
    fresh = Channel(SECRET, is_server=True)
    fresh.feed(hello)
    with pytest.raises(WireError, match="where a proof has 32"):
        fresh.feed(request)


def test_a_recorded_server_is_no_server() -> None:
    client, server = pair()
    _hello, welcome, _proof = greet(client, server)
    fresh, _ = pair()
    with pytest.raises(WireError, match="frame 0 is forged"):
        fresh.feed(welcome + server.outgoing({"changes": []}))
    assert fresh.take_handshake() != b""  # its own hello, and nothing after


def test_before_its_proof_no_client_makes_the_server_keep_more_than_a_few_bytes() -> None:
    for start in (b"", (4096).to_bytes(4, "big"), (65).to_bytes(4, "big"), (63).to_bytes(4, "big"), b"GET / HTTP/1.1"):
        server = Channel(SECRET, is_server=True)
        with pytest.raises(WireError, match="where a hello has 64"):
            server.feed(start + bytes(65536))
    client, server = pair()
    server.feed(client.take_handshake())
    with pytest.raises(WireError, match="where a proof has 32"):
        server.feed((33).to_bytes(4, "big"))


# ------------------------------------------------------------------------------------------ an attacker between the two

Attack = Callable[[Channel, Channel], bytes]


def other_session(client: Channel, server: Channel) -> bytes:
    stranger, peer = opened()
    peer.feed(stranger.outgoing({"id": 0}))
    client.outgoing({"id": 0})
    return stranger.outgoing({"id": 1})


def replay(client: Channel, server: Channel) -> bytes:
    frame = client.outgoing({"id": 1})
    server.feed(frame)
    return frame


def gap(client: Channel, server: Channel) -> bytes:
    client.outgoing({"id": 1})
    return client.outgoing({"id": 2})


def reorder(client: Channel, server: Channel) -> bytes:
    first, second = client.outgoing({"id": 1}), client.outgoing({"id": 2})
    return second + first


def reflect(client: Channel, server: Channel) -> bytes:
    return server.outgoing({"id": 1})


def flip(client: Channel, server: Channel) -> bytes:
    frame = bytearray(client.outgoing({"id": 1}))
    frame[-2] ^= 1
    return bytes(frame)


def flip_code(client: Channel, server: Channel) -> bytes:
    frame = bytearray(client.outgoing({"id": 1}))
    frame[4] ^= 128
    return bytes(frame)


def shorten(client: Channel, server: Channel) -> bytes:
    frame = client.outgoing({"id": 1})
    return (len(frame) - 5).to_bytes(4, "big") + frame[4:]


def no_code(client: Channel, server: Channel) -> bytes:
    return (8).to_bytes(4, "big") + b'{"id":1}'


def empty(client: Channel, server: Channel) -> bytes:
    return bytes(4)


def greet_again(client: Channel, server: Channel) -> bytes:
    return Channel(SECRET, is_server=False).take_handshake()


ATTACKS: list[Attack] = [
    other_session, replay, gap, reorder, reflect, flip, flip_code, shorten, no_code, empty, greet_again
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: one.__name__)
def test_frames_count_in_their_place_alone(attack: Attack) -> None:
    client, server = opened()
    data = attack(client, server)
    with pytest.raises(WireError):
        server.feed(data)
    with pytest.raises(WireError, match="broken before"):
        server.feed(client.outgoing({"id": 3}))


def test_a_client_is_as_strict_as_a_server() -> None:
    client, server = opened()
    frame = server.outgoing({"id": 1})
    client.feed(frame)
    with pytest.raises(WireError):
        client.feed(frame)


@pytest.mark.slow
def test_ten_thousand_changed_frames_and_none_is_believed() -> None:
    rng = random.Random(20240607)
    changes = refused = 0
    other, _ = opened()
    foreign = [other.outgoing({"id": n, "do": "cas", "key": "k"}) for n in range(5)]
    while changes < 10_000:
        client, server = opened()
        frames = [client.outgoing({"id": n, "do": "cas", "key": "k" * rng.randrange(9)}) for n in range(5)]
        good = rng.randrange(4)
        assert len(server.feed(b"".join(frames[:good]))) == good
        changed = mutate(rng, frames[good], foreign[good], rng.choice(frames))
        if changed == frames[good]:
            continue
        changes += 1
        try:
            assert server.feed(changed + b"".join(frames[good + 1 :])) == []
        except WireError:
            refused += 1
    assert refused > 9_500  # the others wait for the rest of a frame whose length was changed


def mutate(rng: random.Random, frame: bytes, foreign: bytes, another: bytes) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        at = rng.randrange(len(frame) * 8)
        return frame[: at // 8] + bytes([frame[at // 8] ^ (1 << at % 8)]) + frame[at // 8 + 1 :]
    if kind == 1:
        at = rng.randrange(len(frame))
        return frame[:at] + frame[at + 1 :]
    if kind == 2:
        at = rng.randrange(1, min(len(frame), len(foreign)))
        return frame[:at] + foreign[at:]
    if kind == 3:
        return foreign
    if kind == 4:
        return another
    return rng.choice([2**32 - 1, 2**31, LARGEST_FRAME_BYTES + 1, 0, 31]).to_bytes(4, "big") + frame[4:]


# ----------------------------------------------------------------------------------------------------------- plain JSON


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{", b"[]", b"1", b"null", b'"text"', b"\xff", b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}',
        b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b'{"b": {"a": 1, "a": 1}}', b"{} {}", b'{"a": 1,}',
        b"\xef\xbb\xbf{}", b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", "{}".encode("utf-16"),
        b'{"a": "\x00"}', b"\x80\x04N.",
    ],
)  # fmt: skip
def test_only_plain_json_objects_are_read(payload: bytes) -> None:
    with pytest.raises(WireError):
        read_message(payload)


def test_what_is_no_json_is_refused_although_it_is_sealed() -> None:
    client, server = opened()
    with pytest.raises(WireError, match="occurs twice"):
        server.feed(client._seal(b'{"id": 1, "id": 2}'))


@pytest.mark.parametrize(
    "message",
    [
        {}, {"id": 1}, {"do": "get"}, {"id": 1, "do": "get"}, {"id": "1", "do": "get", "key": "a"},
        {"id": True, "do": "get", "key": "a"}, {"id": 1, "do": "get", "key": 7}, {"id": 1, "do": "eval", "key": "a"},
        {"id": 1, "do": "get", "key": "a", "more": 1}, {"id": 1, "do": ["get"], "key": "a"},
        {"id": 1, "do": "cas", "key": "a", "value": 1, "revision": 1.0, "lease": None},
        {"id": 1, "do": "cas", "key": "a", "value": 1, "revision": True, "lease": None},
        {"id": 1, "do": "cas", "key": "a", "value": 1, "revision": 0},
        {"id": 1, "do": "grant", "ttl_s": "3"}, {"id": 1, "do": "watch", "prefix": None},
    ],
)  # fmt: skip
def test_questions_have_exactly_the_fields_they_should(message: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        check_request(message)


def test_a_client_checks_what_it_is_pushed() -> None:
    push: dict[str, Any] = {"changes": [["a", 1]], "revision": 1, "anew": False, "complete": True}
    assert message_as_push(push).as_message() == push
    for name, value in [("changes", None), ("changes", [["a"]]), ("revision", "1"), ("anew", 0), ("complete", None)]:
        with pytest.raises(WireError):
            message_as_push({**push, name: value})
    for row in (None, [1, 1], ["a", 1, 2], ["a", 1, 2, 3], ["a", 1, 2, None, 4], "ab"):
        with pytest.raises(WireError):
            row_as_change(row)


# ----------------------------------------------------------------------------------------------------------- the secret


def test_a_secret_comes_from_the_environment_or_from_a_private_file(tmp_path: Path) -> None:
    secret, file = new_secret(), tmp_path / "secret"
    assert len(secret) == 32
    assert secret != new_secret()
    file.write_text(secret.hex() + "\n")
    file.chmod(0o600)
    assert read_secret({VARIABLE: secret.hex()}) == secret
    assert read_secret({}, file) == secret


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_secret_that_others_can_read_is_none(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET.hex())
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"mode {mode:04o}\); `chmod 600"):
        read_secret({}, file)


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "0x" + "0" * 62, "\u0660" * 64])
def test_what_is_no_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits") as refused:
        read_secret({VARIABLE: text})
    assert len(text) < 8 or text not in str(refused.value)
    with pytest.raises(ValueError, match="is not set"):
        read_secret({})
    with pytest.raises(ValueError, match="32 bytes"):
        Channel(b"short", is_server=True)
