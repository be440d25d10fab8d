"""Places at which a worker can be made to die, for tests and for those who do not believe us.

LOCKSTEP_FAULTS is a JSON list: [{"at": "reduced", "step": 5, "worker": "h0.1", "signal": 9}, ...]. Beside `at`
everything may be left out: step, rank, worker, nth (the n-th time that all else fits, 1 if left out), signal (9 if left
out). A worker that takes the place of a dead one reads the same list, and counts anew. Unset, a place costs one look at
a None.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

PLACES = (
    "start", "joining", "forming", "catching-up", "sending-state", "receiving-state", "restored", "top", "forward",
    "table", "backward", "exchange", "waiting", "reduced", "committed", "optimizer", "applied", "compared",
    "evaluating", "logging", "ending", "copy", "write", "fsync", "verify", "rename", "prune",
)  # fmt: skip
_CONDITIONS = ("step", "rank", "worker")

hook: Callable[[str], None] | None = None
here: dict[str, Any] = {}  # what is true now: step, rank, worker


def at(place: str) -> None:
    if hook is not None:
        hook(place)


def arm(env: Mapping[str, str]) -> None:
    """Do as LOCKSTEP_FAULTS says, if it says anything."""
    global hook
    text = env.get("LOCKSTEP_FAULTS", "").strip()
    if not text:
        return
    wanted = [dict(one, left=int(one.get("nth", 1))) for one in json.loads(text)]
    for one in wanted:
        unknown = set(one) - {"at", "nth", "left", "signal", *_CONDITIONS}
        if unknown or one.get("at") not in PLACES:
            raise ValueError(f"LOCKSTEP_FAULTS: {one} is not understood; places are {', '.join(PLACES)}")

    def die(place: str) -> None:
        for one in wanted:
            if one["at"] != place or any(name in one and one[name] != here.get(name) for name in _CONDITIONS):
                continue
            one["left"] -= 1
            if one["left"] == 0:
                os.kill(os.getpid(), int(one.get("signal", signal.SIGKILL)))
                time.sleep(0.05)  # it reaches us wherever the system likes; not after this

    hook = die
