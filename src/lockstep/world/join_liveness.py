"""Watching over workers that are awaited and have not joined yet: a dead one is named at once, not at the deadline.

Who has joined an shm group is watched there (comm/shm/phases.py). Before, a worker is known only by what it has told of
itself at a store: its process, in words that others can check. That of a worker elsewhere cannot be seen from here; it
is never taken for dead.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lockstep.errors import PeerLostError
from lockstep.world.process_identity import Process, this_process

LOOK_S: Final = 0.05
CLOSELY_S: Final = 0.5


@dataclass(frozen=True)
class Introduced:
    """The process of each rank. `init_process_group(pg_options=...)` carries it to the shm group."""

    processes: dict[int, Process]


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
        """Raise PeerLostError if one of them is dead."""
        for rank, process in self._watched.items():
            if process.is_dead(seen_from=self.me):
                text = f"rank {rank} (pid {process.pid}) died while {self._during}; its own output says why"
                raise self.note(PeerLostError(text, rank=rank, pid=process.pid))

    def look_closely(self) -> None:
        """Something of theirs has broken, which happens a moment before the process has ended."""
        end_s = time.monotonic() + CLOSELY_S
        while time.monotonic() < end_s:
            self.look()
            time.sleep(LOOK_S)

    def note(self, error: PeerLostError) -> PeerLostError:
        """Tell the others whom we have lost. Returns what to raise: another may have told them before."""
        mine = json.dumps([error.rank, error.pid, str(error)])
        try:
            rank, pid, text = json.loads(self._store.compare_set("lost", "", mine))
        except DistError:  # the store went with whom we lost
            return error
        return error if (rank, pid) == (error.rank, error.pid) else PeerLostError(text, rank=rank, pid=pid)
