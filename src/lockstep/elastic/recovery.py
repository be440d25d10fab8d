"""Inside a worker: into a generation, and out of it. Process groups are formed for it and given up with it.

Note [Leaving]
Whoever waits in a collective cannot leave by itself. So the thread that hears the order to leave breaks the groups:
shm and NCCL groups are aborted; Gloo's connections are cut (comm/abortable_group.py, Note [Giving Gloo up]). The
training thread then gets an error, whatever it waits for, and does the rest.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from lockstep.comm import deferred_destroy
from lockstep.comm.abortable_group import Cut
from lockstep.comm.abortable_wait import give_up
from lockstep.comm.register_backends import is_ours
from lockstep.elastic.agent_client import Joining, Left, Seat
from lockstep.world import world as worlds
from lockstep.world.environment import Place
from lockstep.world.world import World

FORM_WITHIN_S: Final = 60.0
CONNECT_WITHIN_S: Final = 10.0  # Gloo, which does not hear an order to leave meanwhile
WAIT_AT_MOST: Final = timedelta(minutes=30)


class SeatStore(Store):
    """The store through which the members of one generation find each other: kept by the supervisors.

    It outlives every worker, and whoever waits in it is freed when the generation ends.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self._seat = seat

    def set(self, key: str, value: str | bytes) -> None:
        self._seat.ask("set", key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._seat.ask("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._seat.ask("add", key, amount=value))

    def check(self, keys: list[str]) -> bool:
        return all(self._seat.ask("check", key) for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (value.encode() if isinstance(value, str) else value for value in (expected, desired))
        answer = self._seat.ask("compare_set", key, new, expected=base64.b64encode(old).decode())
        return base64.b64decode(answer)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._seat.ask("get", key)

    def delete_key(self, key: str) -> bool:
        return bool(self._seat.ask("delete", key))

    def num_keys(self) -> int:
        raise NotImplementedError("nobody counts the keys of a generation")

    def set_timeout(self, timeout: timedelta) -> None:
        pass  # nobody waits here for longer than the generation lives


class Company:
    """The generation that this worker is in: its world, and the groups that were formed for it."""

    def __init__(self, seat: Seat, *, slot: int, backend: str | None, device: Any) -> None:
        self._seat, self._slot, self._backend, self._device = seat, slot, backend, device
        self._lock = threading.Lock()
        self._groups: list[dist.ProcessGroup] = []
        self._cut: Cut | None = None
        self._store: SeatStore | None = None
        self._broken = False
        seat.on_leave = self.break_up

    def join(self, joining: Joining) -> World:
        """Form the groups of this generation, all members together. Raises Left if it ends before."""
        with self._lock:
            self._broken, self._groups, self._cut = False, [], Cut(joining.size)
        self._check()
        self._store = SeatStore(self._seat)  # torch's groups hold it, but only the part that is not Python
        place = Place(joining.rank, joining.size, "lockstep run", local_rank=self._slot, local_size=joining.local_size)
        hook = sys.excepthook  # torch would put a rank before each line of a traceback, and another one each time
        try:
            world = worlds.rejoin(
                place,
                self._store,
                backend=self._backend,
                device=self._device,
                deadline=time.monotonic() + FORM_WITHIN_S,
                connect_s=CONNECT_WITHIN_S,
            )
        finally:
            sys.excepthook = hook
        assert dist.group.WORLD is not None
        self.own(dist.group.WORLD)
        return world

    def meet(self, world: World) -> None:
        """All members are here. Who waits for a lost one here can be freed; Gloo, while it connects, cannot."""
        assert self._store is not None
        self._store.set(f"here/{world.rank}", b"")
        for rank in range(world.size):
            self._store.get(f"here/{rank}")

    def own(self, group: dist.ProcessGroup) -> None:
        """This group ends with the generation, too."""
        with self._lock:
            self._groups.append(group)
        self._check()

    def formed(self) -> None:
        """All groups are there: connections that are made from now on are somebody else's."""
        assert self._cut is not None
        self._cut.settle()
        for group in self._groups:
            if not is_ours(group):
                _set_pg_timeout(WAIT_AT_MOST, group)  # while it was formed, it was short
        self._check()

    def _check(self) -> None:
        if (why := self._seat.why_left()) is not None:
            self.break_up()
            raise Left(f"generation {self._seat.generation} has ended: {why}")

    def break_up(self) -> None:
        """See Note [Leaving]. Called by any thread, and more than once."""
        with self._lock:
            groups, cut = list(self._groups), self._cut
            self._broken = True
        if cut is not None:
            cut.shut()
        for group in groups:
            give_up(group)
            with contextlib.suppress(Exception):
                abort(group)

    def leave(self) -> None:
        """The training thread is out of every collective: nothing of the generation stays."""
        self.break_up()
        for group in self._groups:
            if not is_ours(group):
                deferred_destroy.keep(group)
        worlds.forget()
        with self._lock:
            self._groups = []


def abort(group: dist.ProcessGroup) -> None:
    ours: Any = group
    if is_ours(group):
        ours.abort()
        return
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):
            backend: Any = group._get_backend(torch.device(kind))
            if backend.name().lower() == "nccl":
                backend.abort()
