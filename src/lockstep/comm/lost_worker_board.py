"""Records in the store which worker was lost first, for workers that only see the consequences.

When a worker dies, its direct peers know, and abort their other connections. Without a record the others would name
these peers as the cause. The store may be lost too, so calls to it have a short time limit.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from lockstep._torch import Store
from lockstep.errors import PeerLostError
from lockstep.world.process_identity import read_stat

READ_TIMEOUT_S = 0.3
POLL_INTERVAL_S = 0.01

_KEY = "first_loss"

Result = TypeVar("Result")


@dataclass(frozen=True)
class LostWorkerRecord:
    """A lost worker, and the text of the error that names it."""

    rank: int
    pid: int
    text: str

    def error(self) -> PeerLostError:
        return PeerLostError(self.text, rank=self.rank, pid=self.pid)


class LostWorkerBoard:
    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, record: LostWorkerRecord) -> LostWorkerRecord:
        """Publish a record unless there is one already. Returns the first one, or `record` if the store is lost."""
        text = json.dumps(asdict(record))
        first = call_with_timeout(lambda: bytes(self._store.compare_set(_KEY, "", text)))
        return record if first is None else LostWorkerRecord(**json.loads(first))

    def read(self) -> LostWorkerRecord | None:
        """Return the record, or None if there is none. Waits READ_TIMEOUT_S for another worker to publish it."""

        def poll() -> bytes | None:
            end = time.monotonic() + READ_TIMEOUT_S
            while time.monotonic() < end:
                if self._store.check([_KEY]):
                    return self._store.get(_KEY)
                time.sleep(POLL_INTERVAL_S)
            return None

        text = call_with_timeout(poll)
        return None if text is None else LostWorkerRecord(**json.loads(text))


def call_with_timeout(call: Callable[[], Result]) -> Result | None:
    """Return what `call`, which accesses the store, returns; None if it raises, or takes too long."""
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, name="lockstep-loss-board", daemon=True)
    thread.start()
    thread.join(2 * READ_TIMEOUT_S)
    return results[0] if results else None


def is_dead_or_stopped(pid: int) -> bool:
    """Whether a process of this host is dead or stopped."""
    try:
        return read_stat(pid).state in "ZXTt"
    except OSError:
        return True
