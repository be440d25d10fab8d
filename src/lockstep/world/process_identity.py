"""Which process somebody is, in words that others can check; and what /proc says of one. Without torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.world.environment import identify_host


@dataclass(frozen=True)
class Process:
    """Which process somebody is. What is "" is not known."""

    pid: int
    started: str  # in ticks since the machine started: whoever gets the same number later has another
    space: str  # the processes among which the number means this one

    def is_dead(self, *, seen_from: Process) -> bool:
        """Certainly dead; False also if that cannot be seen from there."""
        if not self.space or self.space != seen_from.space:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        try:
            stat = read_stat(self.pid)
        except OSError:
            return False  # /proc may be hidden from us
        return stat.state in "ZX" or bool(self.started and self.started != stat.started)


@dataclass(frozen=True)
class Stat:
    """What /proc says of a process."""

    state: str  # R running, S and D asleep, T and t stopped, Z dead and not collected yet, X dead
    started: str


def read_stat(pid: int) -> Stat:
    """Raises OSError if there is no such process, or no /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return Stat(fields[0], fields[19])


def this_process() -> Process:
    try:
        started = read_stat(os.getpid()).started
    except OSError:
        started = ""
    return Process(os.getpid(), started, _space())


def _space() -> str:
    """Equal for processes that know each other by the same numbers, and read the same times off /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # this /proc is of another namespace than we are, and has other numbers
    except OSError:
        return ""
    times = ""
    with suppress(OSError):  # older kernels have one time for all
        times = os.readlink("/proc/self/ns/time")
    return " ".join([boot, pids, times, socket.gethostname(), identify_host()])
