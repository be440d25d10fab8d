"""What a worker writes down when an exception ends it, for the launcher's card (elastic/failure.py)."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, final

from lockstep.elastic.failure import LONGEST_TRACE, Facts, write
from lockstep.train import step


@final
class Farewell:
    """From `begin` to `end`, an exception that nobody catches is written down with what the Run knows. After an error
    it is not ended: the exception is yet to come to the top."""

    def __init__(self, env: Mapping[str, str], where: Callable[[], dict[str, Any]]) -> None:
        folder = env.get("LOCKSTEP_RUN_DIR")  # without a launcher nobody would read it
        self._folder = Path(folder) if folder else None
        self._where, self._pid = where, os.getpid()
        self._before = sys.excepthook
        self._is_over = False

    def begin(self) -> None:
        if self._folder is not None:
            self._before, sys.excepthook = sys.excepthook, self._tell

    def end(self) -> None:
        self._is_over = True  # torch may have kept us, to put us back when its group ends
        if sys.excepthook == self._tell:
            sys.excepthook = self._before

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self._is_over and os.getpid() == self._pid and isinstance(error, Exception):
            with suppress(Exception):
                self._write(kind, error, trace)
        self._before(kind, error, trace)

    def _write(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        assert self._folder is not None
        where = self._where()
        shard = _shard_of(trace)
        if shard is not None:
            where["shard"] = shard
        text = "".join(traceback.format_exception(kind, error, trace))[-LONGEST_TRACE:]
        write(self._folder, Facts(self._pid, socket.gethostname(), kind.__name__, str(error), text, where))


def _shard_of(trace: TracebackType | None) -> int | None:
    """Which shard was being computed. Read off the frame of the step, so that a step need not note it."""
    while trace is not None:
        if trace.tb_frame.f_code is step.take_step.__code__:
            shard = trace.tb_frame.f_locals.get("shard")
            return shard.number if "outcome" not in trace.tb_frame.f_locals and shard is not None else None
        trace = trace.tb_next
    return None
