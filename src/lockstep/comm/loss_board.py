"""Who broke the group: a note at the store, for those who only see the consequences.

When a worker dies, those who talked to it know, and break off with everybody else. Without a word from them the others
would blame the messengers. The store may be gone too, so nobody waits long for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch._C._distributed_c10d import Store

from lockstep.errors import PeerLostError
from lockstep.world.process_identity import read_stat

PATIENCE_S = 0.3
LOOK_S = 0.01

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Note:
    rank: int
    pid: int
    text: str

    def error(self) -> PeerLostError:
        return PeerLostError(self.text, rank=self.rank, pid=self.pid)


class Board:
    def __init__(self, store: Store) -> None:
        self._store = store

    def leave(self, note: Note) -> Note:
        """The first note stays. Returns that one."""
        text = json.dumps(asdict(note))
        standing = soon(lambda: bytes(self._store.compare_set("blame", "", text)))
        return note if standing is None else Note(**json.loads(standing))

    def read(self) -> Note | None:
        """Gives those who know a moment to say it."""

        def look() -> bytes | None:
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end:
                if self._store.check(["blame"]):
                    return self._store.get("blame")
                time.sleep(LOOK_S)
            return None

        text = soon(look)
        return None if text is None else Note(**json.loads(text))


def soon(ask: Callable[[], Answer]) -> Answer | None:
    """What the store answers, or None if it does not."""
    answers: list[Answer] = []

    def act() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=act, name="lockstep-blame", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE_S)
    return answers[0] if answers else None


def is_gone(pid: int) -> bool:
    """Dead or stopped. For processes of this host."""
    try:
        return read_stat(pid).state in "ZXTt"
    except OSError:
        return True
