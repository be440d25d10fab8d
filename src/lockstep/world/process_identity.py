"""Process identities that other processes of the host can check, and the contents of /proc/PID/stat. Without torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.world.environment import identify_host


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process. Fields that are not known are ""."""

    pid: int
    started: str  # start time in clock ticks since boot: differs if the pid is reused
    space: str  # namespace in which the pid is valid

    def is_dead(self, *, seen_from: ProcessIdentity) -> bool:
        """Whether the process is certainly dead; False also if `seen_from` cannot see it."""
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
            return False  # /proc may be hidden
        return stat.state in "ZX" or bool(self.started and self.started != stat.started)


@dataclass(frozen=True)
class ProcessStat:
    """Part of /proc/PID/stat."""

    state: str  # R running, S and D sleeping, T and t stopped, Z zombie, X dead
    started: str


def read_stat(pid: int) -> ProcessStat:
    """Read /proc/PID/stat. Raises OSError if there is no such process, or no /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return ProcessStat(fields[0], fields[19])


def this_process() -> ProcessIdentity:
    try:
        started = read_stat(os.getpid()).started
    except OSError:
        started = ""
    return ProcessIdentity(os.getpid(), started, _space())


def _space() -> str:
    """Return a text that is equal for processes that see each other under the same pids and start times."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # this /proc belongs to another pid namespace
    except OSError:
        return ""
    times = ""
    with suppress(OSError):  # older kernels have no time namespaces
        times = os.readlink("/proc/self/ns/time")
    return " ".join([boot, pids, times, socket.gethostname(), identify_host()])
