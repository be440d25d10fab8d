"""The trace file of one worker, written by a thread of its own (docs/trace.md has the format).

A slow disk does not delay training, and a full or missing one does not end it: lines are dropped instead.
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
MAX_PENDING_LINES: Final = 5_000  # while the disk accepts none; more are dropped
CLOSE_TIMEOUT_S: Final = 2.0

TraceLine = Mapping[str, Any]


class TraceFile:
    """Writes the new lines and the current status once a second."""

    def __init__(self, folder: Path, name: str, worker: str) -> None:
        self._path, self._now_path = folder / f"{name}.jsonl", folder / f"{worker}.now"
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._now: Callable[[], TraceLine | None] = lambda: None
        self._has_folder = False

    def begin(self, now: Callable[[], TraceLine | None]) -> None:
        """Start the thread. It calls `now` for the current status; None: there is none to write."""
        self._now = now
        self._thread = threading.Thread(target=self._run, name="lockstep-trace", daemon=True)
        self._thread.start()

    def add(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":"))
        with self._lock:
            if len(self._lines) < MAX_PENDING_LINES:
                self._lines.append(line)

    def close(self) -> None:
        """Write the pending lines, and wait at most CLOSE_TIMEOUT_S for that."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        try:
            if not self._has_folder:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._has_folder = True
            if lines:
                run_files.append_lines(self._path, lines)
        except OSError:
            with self._lock:
                self._lines = (lines + self._lines)[:MAX_PENDING_LINES]
        with suppress(OSError):
            if (now := self._now()) is not None:
                fresh = self._now_path.with_suffix(f".{os.getpid()}")
                fresh.write_text(json.dumps(now))
                fresh.replace(self._now_path)
