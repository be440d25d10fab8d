"""The registry of an shm group that is being created: which workers have joined, and whether they are still alive.

Every worker registers as the first thing it does, before anything slow. So one that dies between that and the end of
the rendezvous is named at once. The process of a worker that dies before it has registered is known only if another
source has it: the group that this one is a subgroup of, or the identities that `lockstep.init` exchanges. Otherwise it
is reported as missing at the deadline.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Final

from torch.distributed import DistError

from lockstep._torch import Store
from lockstep.errors import PeerLostError, WorldError
from lockstep.world.join_liveness import CHECK_INTERVAL_S, JoinLiveness
from lockstep.world.process_identity import ProcessIdentity

READS_PER_CHECK: Final = 8  # limits the load on the store, which all workers read from
NO_PROCESSES: Final[Mapping[int, ProcessIdentity]] = {}


class JoinRegistry:
    """The workers of one group. Creating it registers this worker.

    names  global rank of each rank in the group, used in errors
    known  processes that are known already, by global rank
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[int], known: Mapping[int, ProcessIdentity] = NO_PROCESSES
    ) -> None:
        self.store, self.rank, self.names = store, rank, tuple(names)
        self._next_check_s = 0.0
        self._liveness = JoinLiveness(store, during=f"the shm group of {len(names)} workers was formed")
        self.processes = {rank: self._liveness.me}  # by rank in the group
        self._joined = {rank}
        self._unread = deque(r for r in range(len(names)) if r != rank)
        for other in self._unread:
            if names[other] in known:
                self._add_process(other, known[names[other]])
        with self.store_access():
            store.set(f"process/{rank}", json.dumps(asdict(self._liveness.me)))

    def _add_process(self, rank: int, process: ProcessIdentity) -> None:
        self.processes[rank] = process
        self._liveness.watch(self.names[rank], process)

    def register(self, rank: int, process: ProcessIdentity) -> None:
        """Record that `rank` has joined, and which process it is."""
        self._add_process(rank, process)
        self._joined.add(rank)

    def has_joined(self, rank: int) -> bool:
        return rank in self._joined

    def check(self) -> None:
        """Raise PeerLostError if a worker is dead. Cheap to call in a loop: it checks every CHECK_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        with suppress(DistError):  # the next caller that needs the store reports it
            self._read_some()
        self._liveness.check()

    def _read_some(self) -> None:
        for _ in range(min(READS_PER_CHECK, len(self._unread))):
            rank = self._unread.popleft()
            if rank in self._joined:
                continue
            if self.store.check([f"process/{rank}"]):
                self.register(rank, ProcessIdentity(**json.loads(self.store.get(f"process/{rank}"))))
            else:
                self._unread.append(rank)

    def check_repeatedly(self) -> None:
        """Raise PeerLostError if a worker dies within RECHECK_S. Call it when a connection was closed."""
        self._liveness.check_repeatedly()

    def publish_loss(self, error: PeerLostError) -> PeerLostError:
        """Publish that the group has lost a worker, for those that have not noticed yet. Returns the error to raise."""
        return self._liveness.publish_loss(error) if error.rank is not None else error

    @contextmanager
    def store_access(self) -> Iterator[None]:
        """Context for calls to the store. If the store is lost, raises PeerLostError or WorldError.

        The process that hosts it may be the worker that died.
        """
        try:
            yield
        except DistError as error:
            self.check_repeatedly()
            raise WorldError(
                f"rank {self.names[self.rank]} lost the store while an shm group of {len(self.names)} was formed: "
                "the process that hosts it (rank 0, or torchrun) has ended; look at the first error in its output"
            ) from error
