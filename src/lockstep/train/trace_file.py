"""The trace of one worker: lines in a file, written by a thread of their own (docs/trace.md has the format).

A slow disk holds nobody up, and one that is full or gone ends nothing: then the trace has a hole.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lockstep import run_files

VERSION: Final = 1
WRITE_EVERY_S: Final = 1.0
WAITING_AT_MOST: Final = 5_000  # lines, while the disk takes none
END_WITHIN_S: Final = 2.0

Line = Mapping[str, Any]


class TraceFile:
    """Once a second writes the new lines, and how things are now."""

    def __init__(self, folder: Path, name: str, worker: str) -> None:
        self._path, self._now_path = folder / f"{name}.jsonl", folder / f"{worker}.now"
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._now: Callable[[], Line | None] = lambda: None
        self._is_there = False

    def begin(self, now: Callable[[], Line | None]) -> None:
        """`now` is called by the thread that writes; None: nothing is to be told."""
        self._now = now
        self._thread = threading.Thread(target=self._keep_writing, name="lockstep-trace", daemon=True)
        self._thread.start()

    def add(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":"))
        with self._lock:
            if len(self._lines) < WAITING_AT_MOST:
                self._lines.append(line)

    def close(self) -> None:
        """What waits is written, if that does not take long."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(END_WITHIN_S)

    def _keep_writing(self) -> None:
        while not self._ended.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        try:
            if not self._is_there:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._is_there = True
            if lines:
                run_files.append_lines(self._path, lines)
        except OSError:
            with self._lock:
                self._lines = (lines + self._lines)[:WAITING_AT_MOST]
        with suppress(OSError):
            if (now := self._now()) is not None:
                fresh = self._now_path.with_suffix(f".{os.getpid()}")
                fresh.write_text(json.dumps(now))
                fresh.replace(self._now_path)
