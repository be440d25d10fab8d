"""Writes messages of the launcher and output of its workers to a terminal that may block for a while.

Note [Display process]
The launcher must renew leases, so it must never wait for a terminal. It does not draw the live view itself: it pipes
its output through a process that does (report/live_view.py). If that process dies, the launcher writes to the terminal
itself again, without the live view; output that was in the pipe then is in the logs only.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final, final

READ_BYTES: Final = 1 << 16
TAIL_BYTES: Final = 1 << 16
LONGEST_LINE_BYTES: Final = 1 << 16
LARGEST_PIPE_BYTES: Final = 1 << 20
_MISSING: Final = b"\nlockstep: the screen took nothing for a while; what is missing here is in the logs\n"
_CHUNK_BYTES: Final = 512  # a terminal that is ready for writing accepts at least so many bytes
_timeout_s: float | None = None  # None: writes block as long as necessary, as in other programs
_stuck: set[int] = set()  # descriptors that did not become writable in time
_piped: dict[int, int] = {}  # descriptors that lead to the display process, and copies of the originals
_SHOW_CURSOR: Final = b"\x1b[?25h"
SHOWN_WITHIN_S: Final = 10.0


def set_write_timeout(after_s: float) -> None:
    """From now on, output that a terminal does not accept within `after_s` is dropped. The logs still get it."""
    global _timeout_s
    _timeout_s = after_s


def clear_write_timeout() -> None:
    """From now on, writes block as long as necessary. Reports on each descriptor that output was dropped."""
    global _timeout_s
    _timeout_s = None
    while _stuck:
        with suppress(OSError):
            write_all(_stuck.pop(), _MISSING)


def print_message(text: str) -> None:
    with suppress(OSError):
        write_all(2, f"lockstep: {text}\n".encode(errors="replace"))


@final
class OutputStream:
    """Reads one pipe of a worker. `keep` gets all of it as it comes, `show` gets lines, each with its end.

    A carriage return ends a line, too: progress bars use it. A very long line is passed on in parts.
    """

    def __init__(
        self, pipe: BinaryIO, *, show: Callable[[list[bytes]], None], keep: Callable[[bytes], None] = lambda chunk: None
    ) -> None:
        self.pipe, self._show, self._keep = pipe, show, keep
        self.tail = b""
        self._rest = b""  # the beginning of a line whose end has not come yet
        os.set_blocking(pipe.fileno(), False)

    def on_readable(self) -> bytes | None:
        """Reads what the pipe has. Returns b"" at its end, None if it is empty for now."""
        try:
            chunk = os.read(self.pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self._keep(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        text = self._rest + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        if end:
            self._show(re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)", text[:end]))  # splitlines would also split at form feeds
        if not chunk or len(self._rest) > LONGEST_LINE_BYTES:
            self._show_rest()
        return chunk

    def drain(self) -> None:
        """Reads the rest after the worker has ended, at most what a pipe holds: a child of it may still write."""
        for _ in range(LARGEST_PIPE_BYTES // READ_BYTES):
            if not self.on_readable():
                break
        self._show_rest()

    def _show_rest(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._show([rest + b"\n"])


def write_all(screen: int, data: bytes) -> None:
    """Writes to a descriptor that may be a slow terminal, closed (< 0), or non-blocking. Raises OSError."""
    view = memoryview(data)
    while view and screen >= 0:
        if _timeout_s is not None:
            if not _is_writable(screen, _timeout_s):
                return
            size = _CHUNK_BYTES
        else:
            size = len(view)
        try:
            view = view[os.write(screen, view[:size]) :]
        except BlockingIOError:
            time.sleep(0.005)
        except BrokenPipeError:
            if screen not in _piped:
                raise
            _restore()  # the display process has died: see Note [Display process]
            os.write(screen, _SHOW_CURSOR)


@contextmanager
def piped_through(command: Sequence[str]) -> Iterator[None]:
    """Inside the block, standard output and error are piped through this process. See Note [Display process]."""
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdin=reader)
    os.close(reader)
    _piped.update({screen: os.dup(screen) for screen in (1, 2)})
    try:
        for screen in _piped:
            os.dup2(writer, screen)
        os.close(writer)
        yield
    finally:
        _restore()  # closes the last writing ends of the pipe, so the process ends
        with suppress(Exception):
            process.wait(SHOWN_WITHIN_S)
        if process.poll() is None:
            process.kill()


def _restore() -> None:
    while _piped:
        screen, copy = _piped.popitem()
        os.dup2(copy, screen)
        os.close(copy)


def _is_writable(screen: int, within_s: float) -> bool:
    """Waits up to `within_s`, but not again until the descriptor has become writable in the meantime."""
    is_ready = bool(select.select([], [screen], [], 0.0 if screen in _stuck else within_s)[1])
    if is_ready and screen in _stuck:
        _stuck.discard(screen)
        os.write(screen, _MISSING)
        return _is_writable(screen, within_s)
    if not is_ready:
        _stuck.add(screen)
    return is_ready
