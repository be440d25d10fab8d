"""Identities of processes and hosts, liveness of processes, and the contents of /proc/PID/stat. Without torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.settings import Settings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessStat:
    """Part of /proc/PID/stat."""

    state: str  # R running, S and D sleeping, T and t stopped, Z zombie, X dead
    started: str  # start time in clock ticks since boot: differs if the pid is reused
    cpu_s: float  # CPU seconds used in all


def read_stat(pid: int) -> ProcessStat:
    """Read /proc/PID/stat. Raises OSError if there is no such process, or no /proc."""
    # The name of the program is in parentheses, and may contain blanks.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return ProcessStat(fields[0], fields[19], (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK")))


def is_dead(pid: int, started: str = "") -> bool:
    """Whether a process of this host is certainly dead; with `started`, also if another process has its pid now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    try:
        stat = read_stat(pid)
    except OSError:
        return False  # /proc may be hidden
    return stat.state in "ZX" or bool(started and started != stat.started)


def is_dead_or_stopped(pid: int) -> bool:
    """Whether a process of this host is dead or stopped."""
    try:
        return read_stat(pid).state in "ZXTt"
    except OSError:
        return True


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process, so that other processes of the host can check it. Fields that are not known are ""."""

    pid: int
    started: str  # as in ProcessStat
    space: str  # namespace in which the pid is valid

    def is_dead(self, *, seen_from: ProcessIdentity) -> bool:
        """Whether the process is certainly dead; False also if `seen_from` cannot see it."""
        return bool(self.space) and self.space == seen_from.space and is_dead(self.pid, self.started)


def this_process() -> ProcessIdentity:
    try:
        started = read_stat(os.getpid()).started
    except OSError:
        started = ""
    return ProcessIdentity(os.getpid(), started, _space())


def _space() -> str:
    """Return a text that is equal for processes that see each other under the same pids and start times."""
    try:
        boot, pids = _BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/pid")
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # this /proc belongs to another pid namespace
    except OSError:
        return ""
    times = ""
    with suppress(OSError):  # older kernels have no time namespaces
        times = os.readlink("/proc/self/ns/time")
    return " ".join([boot, pids, times, socket.gethostname(), identify_host()])


def identify_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal for workers of one host: the same running kernel and network namespace.

    The namespace matters because shared memory is passed over an abstract Unix socket, which is visible only inside
    one. Containers of one machine count as separate hosts unless they share it (`--network=host`). Whether memory can
    really be shared shows when the workers of a host try. LOCKSTEP_HOST overrides all this.
    """
    if name := Settings.from_env(environment).host:
        return name
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()
