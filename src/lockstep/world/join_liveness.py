"""Liveness of workers that have not joined yet: a dead one is named at once, not at the deadline.

Workers that have joined an shm group are watched there (comm/shm/phases.py). Before that, a worker is known only by the
process identity that it has published in a store. A process of another host cannot be seen from here; it is never
considered dead.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from torch.distributed import DistError

from lockstep._torch import Store
from lockstep.errors import PeerLostError
from lockstep.world.process_identity import ProcessIdentity, this_process

CHECK_INTERVAL_S: Final = 0.05
RECHECK_S: Final = 0.5  # connections of a process close a moment before it has ended


@dataclass(frozen=True)
class KnownProcesses:
    """The process of each rank. Passed to the shm group as `init_process_group(pg_options=...)`."""

    processes: dict[int, ProcessIdentity]


class JoinLiveness:
    """Checks the processes of some ranks. All workers that use the same store name the same lost worker.

    A worker that learns of a loss may end because of it, and workers that check later find several dead. So the loss is
    published in the store before it is raised, and the first one that was published is raised by all.
    """

    def __init__(self, store: Store, *, during: str) -> None:
        """`during` is a clause for errors that says what the workers were doing."""
        self._store, self._during = store, during
        self._watched: dict[int, ProcessIdentity] = {}
        self.me = this_process()

    def watch(self, rank: int, process: ProcessIdentity) -> None:
        self._watched[rank] = process

    def check(self) -> None:
        """Raise PeerLostError if a watched process is dead."""
        for rank, process in self._watched.items():
            if process.is_dead(seen_from=self.me):
                text = f"rank {rank} (pid {process.pid}) died while {self._during}; its own output says why"
                raise self.publish_loss(PeerLostError(text, rank=rank, pid=process.pid))

    def check_repeatedly(self) -> None:
        """Raise PeerLostError if a watched process dies within RECHECK_S. Call it when a connection was closed."""
        end_s = time.monotonic() + RECHECK_S
        while time.monotonic() < end_s:
            self.check()
            time.sleep(CHECK_INTERVAL_S)

    def publish_loss(self, error: PeerLostError) -> PeerLostError:
        """Publish a loss. Returns the error to raise: that of the loss that was published first."""
        mine = json.dumps([error.rank, error.pid, str(error)])
        try:
            rank, pid, text = json.loads(self._store.compare_set("lost", "", mine))
        except DistError:  # the store was lost with the worker
            return error
        return error if (rank, pid) == (error.rank, error.pid) else PeerLostError(text, rank=rank, pid=pid)
