"""Fault injection: places in the program at which a worker can be killed, for tests and for evaluation by users.

LOCKSTEP_FAULTS is a JSON list: [{"at": "reduced", "step": 5, "worker": "h0.1", "signal": 9}, ...]. All keys but `at`
are optional: step, rank, worker (of an elastic run), nth (the n-th time that all others match; default 1), signal
(default 9). A worker that replaces a dead one reads the same list, and counts from 0. If it is unset, a place costs one
comparison with None.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from lockstep.settings import Settings

PLACES = (
    "start", "joining", "forming", "catching-up", "sending-state", "receiving-state", "restored", "top", "forward",
    "table", "backward", "exchange", "waiting", "reduced", "committed", "optimizer", "applied", "weights",
    "moving-state", "compared",
    "evaluating", "logging", "ending", "copy", "write", "fsync", "verify", "rename", "prune",
)  # fmt: skip
_CONDITIONS = ("step", "rank", "worker")

hook: Callable[[str], None] | None = None
context: dict[str, Any] = {}  # current step, rank and worker, to which conditions are compared


def at(place: str) -> None:
    """Mark a place in the program, one of PLACES."""
    if hook is not None:
        hook(place)


def arm(settings: Settings) -> None:
    """Install the faults of LOCKSTEP_FAULTS, if it is set. Raises ValueError if it is not understood."""
    global hook
    text = settings.faults
    if text is None:
        return
    wanted = [dict(one, left=int(one.get("nth", 1))) for one in json.loads(text)]
    for one in wanted:
        unknown = set(one) - {"at", "nth", "left", "signal", *_CONDITIONS}
        if unknown or one.get("at") not in PLACES:
            raise ValueError(f"LOCKSTEP_FAULTS: {one} is not understood; places are {', '.join(PLACES)}")

    def kill_if_due(place: str) -> None:
        for one in wanted:
            if one["at"] != place or any(name in one and one[name] != context.get(name) for name in _CONDITIONS):
                continue
            one["left"] -= 1
            if one["left"] == 0:
                os.kill(os.getpid(), int(one.get("signal", signal.SIGKILL)))
                time.sleep(0.05)  # signals are delivered asynchronously, but not later than this

    hook = kill_if_due
