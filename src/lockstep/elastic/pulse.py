"""Whether a worker process that still exists is as good as dead."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from lockstep.elastic.membership import Standing
from lockstep.elastic.person import Person

LEAVE_WITHIN_S: Final = 30.0
BUSY_STALLS: Final = 30  # how many times as long a worker may be silent that is computing


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
