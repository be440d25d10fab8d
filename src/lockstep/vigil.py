"""Watching over workers that are awaited and have not joined yet: a dead one is named at once, not at the deadline.

Who has joined an shm group is watched there (comm/shm/team.py). Before, a worker is known only by what it has told of
itself at a store: its process, in words that others can check. That of a worker elsewhere cannot be seen from here; it
is never taken for dead.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lockstep.errors import PeerLost
from lockstep.place import identify_host

LOOK_S: Final = 0.05
CLOSELY_S: Final = 0.5


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
class Introduced:
    """The process of each rank. `init_process_group(pg_options=...)` carries it to the shm group."""

    processes: dict[int, Process]


@dataclass(frozen=True)
class Stat:
    """What /proc says of a process."""

    state: str  # R running, S and D asleep, T and t stopped, Z dead and not collected yet, X dead
    started: str


def read_stat(pid: int) -> Stat:
    """Raises OSError if there is no such process, or no /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
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


class Vigil:
    """Over the processes of some ranks. All who keep it at one store blame the same one.

    Who learns of a death may end because of it; those who look later find several dead. So whoever raises leaves a
    note at the store, and the first note counts.
    """

    def __init__(self, store: Store, *, during: str) -> None:
        """`during`: what the others wait for, for errors."""
        self._store, self._during = store, during
        self._watched: dict[int, Process] = {}
        self.me = this_process()

    def watch(self, rank: int, process: Process) -> None:
        self._watched[rank] = process

    def look(self) -> None:
        """Raise PeerLost if one of them is dead."""
        for rank, process in self._watched.items():
            if process.is_dead(seen_from=self.me):
                text = f"rank {rank} (pid {process.pid}) died while {self._during}; its own output says why"
                raise self.note(PeerLost(text, rank=rank, pid=process.pid))

    def look_closely(self) -> None:
        """Something of theirs has broken, which happens a moment before the process has ended."""
        end_s = time.monotonic() + CLOSELY_S
        while time.monotonic() < end_s:
            self.look()
            time.sleep(LOOK_S)

    def note(self, error: PeerLost) -> PeerLost:
        """Tell the others whom we have lost. Returns what to raise: another may have told them before."""
        mine = json.dumps([error.rank, error.pid, str(error)])
        try:
            rank, pid, text = json.loads(self._store.compare_set("lost", "", mine))
        except DistError:  # the store went with whom we lost
            return error
        return error if (rank, pid) == (error.rank, error.pid) else PeerLost(text, rank=rank, pid=pid)
