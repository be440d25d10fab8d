"""What the launcher says, and what it passes on from its workers: on a terminal that may not read for a while."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import Final

_MISSING: Final = b"\nlockstep: the screen took nothing for a while; what is missing here is in the logs\n"
_AT_ONCE: Final = 512  # bytes: a terminal that takes any takes so many
_patience_s: float | None = None  # None: wait as long as it takes, as every program does
_stuck: set[int] = set()


def lose_patience(after_s: float) -> None:
    """From now on, what a screen does not take after so long is not shown: leases do not wait for it. Logs have it."""
    global _patience_s
    _patience_s = after_s


def regain_patience() -> None:
    """Nothing is left to be late for."""
    global _patience_s
    _patience_s = None
    while _stuck:
        with suppress(OSError):
            write_all(_stuck.pop(), _MISSING)


def say(text: str) -> None:
    with suppress(OSError):
        write_all(2, f"lockstep: {text}\n".encode(errors="replace"))


def write_all(screen: int, data: bytes) -> None:
    """To a descriptor that may be a slow terminal, a closed one (< 0), or one that somebody made non-blocking."""
    view = memoryview(data)
    while view and screen >= 0:
        if _patience_s is not None:
            if not _takes(screen, _patience_s):
                return
            size = _AT_ONCE
        else:
            size = len(view)
        try:
            view = view[os.write(screen, view[:size]) :]
        except BlockingIOError:
            time.sleep(0.005)


def _takes(screen: int, within_s: float) -> bool:
    """It is waited for once; then not before it takes something again."""
    is_ready = bool(select.select([], [screen], [], 0.0 if screen in _stuck else within_s)[1])
    if is_ready and screen in _stuck:
        _stuck.discard(screen)
        os.write(screen, _MISSING)
        return _takes(screen, within_s)
    if not is_ready:
        _stuck.add(screen)
    return is_ready
