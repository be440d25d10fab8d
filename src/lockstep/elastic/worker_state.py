"""What the host agent knows about one of its workers, and whether the worker is still alive."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.control.json_pipe import JsonPipe
from lockstep.elastic.membership import OrderAction, Standing, Worker

LEAVE_WITHIN_S: Final = 30.0
BUSY_STALLS: Final = 30  # a worker that uses the CPU may be silent this many times as long


@dataclass
class LocalWorker:
    record: Worker
    pipe: JsonPipe
    slot: int
    pid: int = 0
    last_heard_s: float = field(default_factory=time.monotonic)
    has_run: bool = False  # it has created its Run, and can receive messages
    orders_sent: set[tuple[OrderAction, int]] = field(default_factory=set)
    leave_sent_s: float | None = None
    last_busy: tuple[float, float | None] = (0.0, None)  # when it last used the CPU, and its CPU seconds then
    known_calls: int = 0  # how many entries of the call log it has
    known_in_loop: bool = False  # whether it knows that the others are in their loop
    known_anew: int = 0  # the `anew` of the generation whose entries it has
    position: Any = None  # the last position that it sent
    is_calling: bool = False  # whether it was in a call of the Run then
    left_run: bool = False  # it left its Run by an exception, which its program may catch
    ended_s: float = 0.0  # when its process ended with status 0 after that
    released: bool = False  # a surplus worker: it ends with status 0, which is not the end of the program

    @property
    def id(self) -> str:
        return self.record.id


def why_dead(local: LocalWorker, now_s: float, stall_s: float) -> str | None:
    """Why a worker must be killed: it is stopped or stuck, or does not leave when ordered to. None if it is alive."""
    if not local.has_run or local.record.standing in (Standing.DONE, Standing.QUIT):
        return None
    silent_s = now_s - local.last_heard_s
    if silent_s > stall_s / 2:  # early enough to know at `stall_s` whether it uses the CPU
        idle_s = _idle_s(local, now_s, since_s=local.last_heard_s)
        is_idle = idle_s >= min(1.0, 0.4 * stall_s) or silent_s > BUSY_STALLS * stall_s
        if silent_s > stall_s and is_idle:
            return f"it gave no sign of life for {silent_s:.1f} s (stopped, or stuck)"
    elif local.leave_sent_s is not None and now_s - local.leave_sent_s > LEAVE_WITHIN_S / 2:
        late_s = now_s - local.leave_sent_s
        is_idle = _idle_s(local, now_s, since_s=local.leave_sent_s) >= LEAVE_WITHIN_S / 4
        if late_s > LEAVE_WITHIN_S and (is_idle or late_s > BUSY_STALLS * LEAVE_WITHIN_S):
            return f"it did not leave its generation within {late_s:.0f} s"
    return None


def _idle_s(local: LocalWorker, now_s: float, *, since_s: float) -> float:
    """How long the worker has not used the CPU, as far as it was observed after `since_s`.

    A worker that computes may keep its own threads from running, and so send no heartbeat.
    """
    used = _cpu_seconds(local.pid)
    if used is None:
        return math.inf
    before_s, before = local.last_busy
    computes = before is not None and used - before > max(0.05, 0.05 * (now_s - before_s))  # heartbeats use a little
    if before is None or computes or before_s < since_s:
        local.last_busy = now_s, used
    return now_s - local.last_busy[0]


def _cpu_seconds(pid: int) -> float | None:
    """CPU seconds that a process has used in all; None if it does not exist, or cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))
