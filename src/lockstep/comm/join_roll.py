"""The roll of a group that is being formed: who has come, and whether those who have still live.

Every worker signs it as the first thing it does, before anything slow. So one that dies on the way from there to the
others is named at once. One that dies before it has signed can be known only from elsewhere: from the group that this
one is a part of, or from the cards that `lockstep.init` swaps. If it is not, it is missed at the deadline.
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
from torch.distributed.distributed_c10d import Store

from lockstep.errors import PeerLostError, WorldError
from lockstep.world.join_liveness import LOOK_S, Vigil
from lockstep.world.process_identity import Process

READ_AT_ONCE: Final = 8  # signatures looked for in one look: many workers ask one store
NOBODY: Final[Mapping[int, Process]] = {}


class Roll:
    """`names`: what the ranks of the group are called in errors: their global ranks."""

    def __init__(self, store: Store, rank: int, names: Sequence[int], known: Mapping[int, Process] = NOBODY) -> None:
        """`known`: by global rank, those that have introduced themselves before."""
        self.store, self.rank, self.names = store, rank, tuple(names)
        self._next_look_s = 0.0
        self._vigil = Vigil(store, during=f"the shm group of {len(names)} workers was formed")
        self.processes = {rank: self._vigil.me}  # by rank in the group
        self._signed = {rank}
        self._unread = deque(r for r in range(len(names)) if r != rank)
        for other in self._unread:
            if names[other] in known:
                self._know(other, known[names[other]])
        with self.asking():
            store.set(f"process/{rank}", json.dumps(asdict(self._vigil.me)))

    def _know(self, rank: int, process: Process) -> None:
        self.processes[rank] = process
        self._vigil.watch(self.names[rank], process)

    def sign(self, rank: int, process: Process) -> None:
        """`rank` has come, and is this process."""
        self._know(rank, process)
        self._signed.add(rank)

    def who(self, rank: int) -> str:
        process = self.processes.get(rank)
        return f"rank {self.names[rank]}" + (f" (pid {process.pid})" if process else "")

    def has_come(self, rank: int) -> bool:
        return rank in self._signed

    def look(self) -> None:
        """Raise PeerLostError if anybody is dead. May be called all the time: it looks now and then."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        with suppress(DistError):  # whoever needs the store will find out
            self._read_some()
        self._vigil.look()

    def _read_some(self) -> None:
        for _ in range(min(READ_AT_ONCE, len(self._unread))):
            rank = self._unread.popleft()
            if rank in self._signed:
                continue
            if self.store.check([f"process/{rank}"]):
                self.sign(rank, Process(**json.loads(self.store.get(f"process/{rank}"))))
            else:
                self._unread.append(rank)

    def look_closely(self) -> None:
        """Somebody has hung up."""
        self._vigil.look_closely()

    def note(self, error: PeerLostError) -> PeerLostError:
        """The group has lost somebody. Tells those who have not noticed yet; returns what to raise."""
        return self._vigil.note(error) if error.rank is not None else error

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around calls of the store: when that is gone, whoever kept it may be the one who died."""
        try:
            yield
        except DistError as error:
            self.look_closely()
            raise WorldError(
                f"rank {self.names[self.rank]} lost the store while an shm group of {len(self.names)} was formed: "
                "whoever keeps it (rank 0, or torchrun) went away; look at the first error in its output"
            ) from error
