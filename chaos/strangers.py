"""Strangers at the door of a control store: forgers, listeners who repeat and splice what they heard, and idle ones.

They know the secret only where an attacker in the middle of a genuine session would see what it makes of it.

    LOCKSTEP_JOB_SECRET=... python chaos/strangers.py PORT COUNT [--seed N] [--over-s S]     an attack on 127.0.0.1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.control.wire import LARGEST_FRAME_BYTES, Channel, read_secret

ANSWER_S = 5.0
STRANGE = ["noise", "http", "length", "hello flipped", "hello cut", "replay", "splice", "direct", "reflect"]
INNER = ["flipped", "cut", "replay", "reorder", "gap", "other session", "splice", "reflect", "length", "bare"]


class Tap:
    """A genuine session with an attacker in the middle, who decides which of its frames arrive."""

    def __init__(self, port: int, secret: bytes) -> None:
        self.channel = Channel(secret, is_server=False)
        self.sock = socket.create_connection(("127.0.0.1", port), ANSWER_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.hello = self.channel.take_handshake()
        self.sock.sendall(self.hello)
        self.welcome = self._read_until(lambda: self.channel.is_open)
        self.proof = self.channel.take_handshake()
        self.sock.sendall(self.proof)
        self.number = 0
        self.first = b""

    def seal(self, do: str, **fields: Any) -> bytes:
        self.number += 1
        return self.channel.outgoing({"id": self.number, "do": do, **fields})

    def ask(self, frame: bytes) -> dict[str, Any]:
        self.sock.sendall(frame)
        self.heard: list[dict[str, Any]] = []
        self._read_until(lambda: self.heard)
        return self.heard[0]

    def _read_until(self, done: Any) -> bytes:
        raw = b""
        while not done():
            data = self.sock.recv(65536)
            assert data, "the server dropped a genuine session"
            raw += data
            self.heard = self.channel.feed(data)
        return raw


@dataclass
class Tape:
    """What was recorded of one session: its frames from either side, none of which may ever count again."""

    hello: bytes
    proof: bytes
    requests: list[bytes]
    answers: list[bytes]


def poison(number: int) -> dict[str, Any]:
    """Would change the store if it were believed."""
    return {"key": f"job/forged/{number}", "value": "forged", "revision": 0, "lease": None}


def record(port: int, secret: bytes) -> Tape:
    tap = Tap(port, secret)
    requests = [tap.seal("cas", **poison(number)) for number in range(8)]  # held back: the server has not seen these
    tap.sock.close()
    return Tape(tap.hello, tap.proof, requests, [tap.welcome])


def flip(rng: random.Random, data: bytes, count: int = 1) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed) if bytes(changed) != data else flip(rng, data, 1)


def strange_message(rng: random.Random, tapes: list[Tape]) -> tuple[str, bytes]:
    """Something for a new connection; the second welcome and beyond must never be earned by it."""
    tape, other = rng.sample(tapes, 2)
    kind = rng.choice(STRANGE)
    if kind == "noise":
        return kind, rng.randbytes(rng.randrange(1, 5000))
    if kind == "http":
        return kind, b"GET /metrics HTTP/1.1\r\nHost: control\r\n\r\n"
    if kind == "length":
        size = rng.choice([0, 1, 31, 32, 63, 65, 4097, LARGEST_FRAME_BYTES, LARGEST_FRAME_BYTES + 1, 2**31, 2**32 - 1])
        return kind, size.to_bytes(4, "big") + tape.hello[4:] + rng.randbytes(rng.randrange(200))
    if kind == "hello flipped":
        return kind, flip(rng, tape.hello, rng.randrange(1, 4))
    if kind == "hello cut":
        return kind, tape.hello[: rng.randrange(len(tape.hello))]
    if kind == "replay":
        return kind, tape.hello + tape.proof + b"".join(tape.requests)
    if kind == "splice":
        return kind, tape.hello + other.proof + rng.choice(other.requests)
    if kind == "direct":
        return kind, rng.choice(tape.requests)
    return kind, rng.choice(tape.answers)


def inner_message(rng: random.Random, tap: Tap, tape: Tape, number: int) -> tuple[str, bytes]:
    """Something in the place of the next frame of a genuine session."""
    genuine, next_one = tap.seal("cas", **poison(number)), tap.seal("cas", **poison(number))
    kind = rng.choice(INNER)
    if kind == "flipped":
        return kind, flip(rng, genuine)
    if kind == "cut":
        at = rng.randrange(4, len(genuine))
        return kind, genuine[:at] + next_one
    if kind == "replay":
        return kind, tap.first
    if kind == "reorder":
        return kind, next_one + genuine
    if kind == "gap":
        return kind, next_one
    if kind == "other session":
        return kind, rng.choice(tape.requests)
    if kind == "splice":
        other = rng.choice(tape.requests)
        at = rng.choice([4, 36, 40])
        return kind, genuine[:at] + other[at:] if genuine[:at] + other[at:] != genuine else next_one
    if kind == "reflect":
        return kind, tap.welcome
    if kind == "length":
        size = rng.choice([0, 1, 31, LARGEST_FRAME_BYTES + 1, 2**31, 2**32 - 1])
        return kind, size.to_bytes(4, "big") + genuine[4:]
    payload = genuine[36:]
    return kind, (len(payload) + 32).to_bytes(4, "big") + bytes(32) + payload


def attack(port: int, secret: bytes, count: int, *, seed: int, over_s: float = 0.0) -> dict[str, Any]:
    """Send the messages, within `over_s` seconds or more, and tell what came of them."""
    rng, began_s = random.Random(seed), time.monotonic()
    tapes = [record(port, secret) for _ in range(6)]
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    writes = 0
    sent = 0
    while sent < count * 9 // 10:
        batch = []
        for _ in range(16):
            kind, data = strange_message(rng, tapes)
            sock = socket.create_connection(("127.0.0.1", port), ANSWER_S)
            with suppress(OSError):  # it may be dropped before we are done
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            batch.append((kind, sock))
        for kind, sock in batch:
            welcome = 68 if kind in ("replay", "splice") else 0
            if (size := len(drain(sock))) not in (0, welcome):
                wrong.append(f"{kind}: {size} bytes came back")
            kinds["stranger: " + kind] += 1
        sent += len(batch)
        time.sleep(max(0.0, began_s + over_s * sent / count - time.monotonic()))
    while sent < count:
        tap = Tap(port, secret)
        # It exists, and is deleted: a replay of the first frame would make it anew.
        tap.first = tap.seal("cas", **{**poison(sent), "key": "job/attacker"})
        made = tap.ask(tap.first)
        gone = tap.ask(tap.seal("delete", key="job/attacker", revision=made["revision"]))
        assert made["done"] is gone["done"] is True
        writes += 2
        kind, data = inner_message(rng, tap, rng.choice(tapes), sent)
        with suppress(OSError):
            tap.sock.sendall(data)
            tap.sock.shutdown(socket.SHUT_WR)
        if size := len(drain(tap.sock)):
            wrong.append(f"{kind}: {size} bytes came back")
        kinds["insider: " + kind] += 1
        sent += 1
        time.sleep(max(0.0, began_s + over_s * sent / count - time.monotonic()))
    return {"sent": sent, "writes": writes, "kinds": dict(kinds), "wrong": wrong[:10]}


def drain(sock: socket.socket) -> bytes:
    """What comes until the server hangs up. A timeout means that it does not."""
    sock.settimeout(ANSWER_S)
    data = b""
    with suppress(ConnectionError):
        while more := sock.recv(65536):
            data += more
    sock.close()
    return data


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int, help="messages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--over-s", type=float, default=0.0, help="spread over so many seconds")
    chosen = parser.parse_args(argv)
    told = attack(chosen.port, read_secret(os.environ), chosen.count, seed=chosen.seed, over_s=chosen.over_s)
    print(json.dumps(told))
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
