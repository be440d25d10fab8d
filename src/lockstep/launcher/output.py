"""What the launcher says, and what it passes on from its workers: on a terminal that may not read for a while.

Note [A process that shows it]
The launcher has leases to keep, and must never wait for a terminal. So where there is a picture to be drawn, it does
not draw: it hands its output to a process that does (report/live_view.py). Nothing is lost with that one but the
picture: if it dies, we write to the terminal ourselves again. What was on its way to it then is in the logs only.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

_MISSING: Final = b"\nlockstep: the screen took nothing for a while; what is missing here is in the logs\n"
_AT_ONCE: Final = 512  # bytes: a terminal that takes any takes so many
_patience_s: float | None = None  # None: wait as long as it takes, as every program does
_stuck: set[int] = set()
_behind: dict[int, int] = {}  # screens that somebody shows for us, and copies of what they were
_SHOW_CURSOR: Final = b"\x1b[?25h"
SHOWN_WITHIN_S: Final = 10.0


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
        except BrokenPipeError:
            if screen not in _behind:
                raise
            _take_back()  # whoever showed it is gone: see Note [A process that shows it]
            os.write(screen, _SHOW_CURSOR)


@contextmanager
def shown_by(command: Sequence[str]) -> Iterator[None]:
    """Inside, what goes to our screens goes to this process. See Note [A process that shows it]."""
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdin=reader)
    os.close(reader)
    _behind.update({screen: os.dup(screen) for screen in (1, 2)})
    try:
        for screen in _behind:
            os.dup2(writer, screen)
        os.close(writer)
        yield
    finally:
        _take_back()  # these were the last that had the pipe, so it ends
        with suppress(Exception):
            process.wait(SHOWN_WITHIN_S)
        if process.poll() is None:
            process.kill()


def _take_back() -> None:
    while _behind:
        screen, copy = _behind.popitem()
        os.dup2(copy, screen)
        os.close(copy)


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
