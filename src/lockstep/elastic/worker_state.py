"""A worker of this host as its agent knows it, and whether it is still alive."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.control.json_pipe import Line
from lockstep.elastic.membership import Do, Standing, Worker

LEAVE_WITHIN_S: Final = 30.0
BUSY_STALLS: Final = 30  # how many times as long a worker may be silent that is computing


@dataclass
class Person:
    worker: Worker
    line: Line
    slot: int
    pid: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    spoke: bool = False  # it has a Run
    told: set[tuple[Do, int]] = field(default_factory=set)
    told_leave_s: float | None = None
    busy: tuple[float, float | None] = (0.0, None)  # when we saw it compute, and how much it had by then
    journal: int = 0  # entries it knows
    knows_loop: bool = False
    knows_anew: int = 0  # entries of that generation
    at: Any = None  # the position that it last told
    is_calling: bool = False  # it was in a call of the Run then
    left_run: bool = False  # by an exception, which its program may catch
    ended_s: float = 0.0  # when its process ended with status 0 after that
    released: bool = False  # one too many: it ends with status 0, which is not the end of the program

    @property
    def id(self) -> str:
        return self.worker.id


def why_dead(person: Person, now_s: float, stall_s: float) -> str | None:
    """It is stopped, or does not leave when it is told to: why it is to be killed. None: it lives."""
    if not person.spoke or person.worker.standing in (Standing.DONE, Standing.QUIT):
        return None
    silent_s = now_s - person.heard_s
    if silent_s > stall_s / 2:  # soon enough to know by then whether it computes
        idle_s = _idle_s(person, now_s, since_s=person.heard_s)
        is_idle = idle_s >= min(1.0, 0.4 * stall_s) or silent_s > BUSY_STALLS * stall_s
        if silent_s > stall_s and is_idle:
            return f"it gave no sign of life for {silent_s:.1f} s (stopped, or stuck)"
    elif person.told_leave_s is not None and now_s - person.told_leave_s > LEAVE_WITHIN_S / 2:
        late_s = now_s - person.told_leave_s
        is_idle = _idle_s(person, now_s, since_s=person.told_leave_s) >= LEAVE_WITHIN_S / 4
        if late_s > LEAVE_WITHIN_S and (is_idle or late_s > BUSY_STALLS * LEAVE_WITHIN_S):
            return f"it did not leave its generation within {late_s:.0f} s"
    return None


def _idle_s(person: Person, now_s: float, *, since_s: float) -> float:
    """How long it has not computed, as far as we have looked since then. One that computes may not hear us, or lets no
    other thread of its own run, and so gives no sign of life."""
    used = _cpu_seconds(person.pid)
    if used is None:
        return math.inf
    before_s, before = person.busy
    computes = before is not None and used - before > max(0.05, 0.05 * (now_s - before_s))  # beats take a little
    if before is None or computes or before_s < since_s:
        person.busy = now_s, used
    return now_s - person.busy[0]


def _cpu_seconds(pid: int) -> float | None:
    """That a process has used in all; None if it is not there, or cannot be looked at."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))
