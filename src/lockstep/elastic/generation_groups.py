"""The process groups of a worker's current generation: formed when it joins, given up when it leaves.

Note [Leaving]
A thread that waits in a collective cannot leave by itself. So the thread that reads the order to leave aborts the
groups: shm and NCCL groups are aborted; Gloo's connections are cut (comm/abortable_group.py, Note [Aborting Gloo]).
The training thread then gets an error, whatever it waits for, and does the rest.

Note [Leaving NCCL]
`abort` of NCCL ends its kernels within milliseconds, but takes 0.7 s to free what the communicator has, and shutting
down or deleting an aborted group waits for that. So a thread of its own aborts it, torch forgets the group without
shutting it down, and the next communicator is created meanwhile (0.1 s). An abort while the training thread is inside a
call of NCCL may crash, because it frees what the call uses. So the thread waits until the training thread has left the
generation or waits for the GPU; it waits for NCCL_CALL_WITHIN_S only, since the program may be busy for long. The
first call between two workers would connect them, and wait for a lost one; so all connections are made beforehand.

While a communicator is created and connected it cannot be aborted: cutting its sockets, the listening ones too and
again and again, makes the call fail. It would try for a minute to reach a lost worker.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from lockstep._torch import Store, set_group_timeout
from lockstep.comm.abortable_group import ConnectionTracker, deferred_destroy, prepare_nccl_for_aborts
from lockstep.comm.abortable_wait import expect_aborts, is_waiting_on_device, mark_aborted
from lockstep.comm.register_backends import is_lockstep_group
from lockstep.elastic.agent_client import AgentClient, GenerationEnded, JoinedGeneration
from lockstep.errors import WorldError
from lockstep.world import world as worlds
from lockstep.world.environment import RankAssignment
from lockstep.world.world import World

FORM_WITHIN_S: Final = 60.0
CONNECT_WITHIN_S: Final = 10.0  # for Gloo, which an order to leave does not interrupt meanwhile
WAIT_AT_MOST: Final = timedelta(minutes=30)
NCCL_CALL_WITHIN_S: Final = 1.0  # for the training thread to be out of a call of NCCL
EXIT_WITHIN_S: Final = 5.0  # for aborts that still run when the program ends


class GenerationStoreClient(Store):
    """The torch store through which the members of one generation find each other, kept by the host agents.

    It does not depend on any worker, and every wait in it ends with GenerationEnded when the generation ends.
    """

    def __init__(self, agent: AgentClient) -> None:
        super().__init__()
        self._agent = agent

    def set(self, key: str, value: str | bytes) -> None:
        self._agent.request("set", key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._agent.request("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._agent.request("add", key, amount=value))

    def check(self, keys: list[str]) -> bool:
        return all(self._agent.request("check", key) for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (value.encode() if isinstance(value, str) else value for value in (expected, desired))
        answer = self._agent.request("compare_set", key, new, expected=base64.b64encode(old).decode())
        return base64.b64decode(answer)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._agent.request("get", key)

    def delete_key(self, key: str) -> bool:
        return bool(self._agent.request("delete", key))

    def num_keys(self) -> int:
        raise NotImplementedError("the keys of a generation are not counted")

    def set_timeout(self, timeout: timedelta) -> None:
        pass  # every wait ends with the generation


class GenerationGroups:
    """The generation that this worker is in: its world, and the groups that were formed for it."""

    def __init__(self, agent: AgentClient, *, slot: int, backend: str | None, device: Any) -> None:
        self._agent, self._slot, self._backend, self._device = agent, slot, backend, device
        self._lock = threading.Lock()
        self._groups: list[dist.ProcessGroup] = []
        self._aborted: list[dist.ProcessGroup] = []
        self._world_backend = ""  # that of the world group, from the moment in which its creation begins
        self._left = threading.Event()  # set when the training thread has left the generation
        self._nccl_thread: threading.Thread | None = None  # see Note [Leaving NCCL]
        self._connections: ConnectionTracker | None = None
        self._store: GenerationStoreClient | None = None
        agent.on_leave = self.abort
        atexit.register(self._end_thread)

    def join(self, joined: JoinedGeneration) -> World:
        """Form the world group, together with all members. Raises GenerationEnded if the generation ends before."""
        with self._lock:
            self._groups, self._aborted, self._connections = [], [], ConnectionTracker(joined.size)
            self._left, self._nccl_thread, self._world_backend = threading.Event(), None, ""
        self._check()
        self._store = GenerationStoreClient(self._agent)  # torch's groups keep only its C++ part alive
        assignment = RankAssignment(
            joined.rank, joined.size, "lockstep run", local_rank=self._slot, local_size=joined.local_size
        )
        hook = sys.excepthook  # torch would put a rank before each line of a traceback, once more each time
        try:
            world = worlds.rejoin(
                assignment,
                self._store,
                backend=self._backend,
                device=self._device,
                deadline=time.monotonic() + FORM_WITHIN_S,
                connect_s=CONNECT_WITHIN_S,
                on_backend=self._set_backend,
            )
        finally:
            sys.excepthook = hook
        group = dist.group.WORLD
        assert group is not None
        try:
            if world.size > 1 and _nccl_of(group) is not None:
                _connect_pairs(group, world)
        finally:
            self.add_group(group)
        return world

    def _set_backend(self, backend: str) -> None:
        self._world_backend = backend.lower()
        if "nccl" in self._world_backend:
            prepare_nccl_for_aborts()

    def wait_for_members(self, world: World) -> None:
        """Wait until all members are here. An order to leave ends this wait, but not Gloo's while it connects."""
        assert self._store is not None
        self._store.set(f"here/{world.rank}", b"")
        for rank in range(world.size):
            self._store.get(f"here/{rank}")

    def add_group(self, group: dist.ProcessGroup) -> None:
        """Give up this group with the generation, too."""
        if _nccl_of(group) is not None or self._world_backend == "hierarchy":  # which uses NCCL between hosts
            expect_aborts(group)
        with self._lock:
            if group not in self._groups:
                self._groups.append(group)
        self._check()

    def finish_forming(self) -> None:
        """All groups are formed: connections made from now on belong to others, and are not cut."""
        assert self._connections is not None
        self._connections.stop_tracking()
        for group in self._groups:
            if not is_lockstep_group(group):
                set_group_timeout(WAIT_AT_MOST, group)  # it was short while the group was formed
        self._check()

    def _check(self) -> None:
        if (why := self._agent.leave_reason()) is not None:
            self.abort()
            raise GenerationEnded(f"generation {self._agent.generation} has ended: {why}")

    def abort(self) -> None:
        """Abort all groups. See Note [Leaving]. Any thread may call it, more than once."""
        cuts_listeners = self._world_backend == "nccl"
        with self._lock:
            groups, connections = [group for group in self._groups if group not in self._aborted], self._connections
            self._aborted += groups
            for group in groups:
                mark_aborted(group)  # before anything of it is aborted
            if "nccl" in self._world_backend and connections is not None and self._nccl_thread is None:
                arguments = (self._groups, connections if cuts_listeners else None, self._left)
                self._nccl_thread = threading.Thread(
                    target=_abort_nccl, args=arguments, name="lockstep-abort", daemon=True
                )
                self._nccl_thread.start()
        if connections is not None:
            connections.shut_down(listeners=cuts_listeners)
        for group in groups:
            if is_lockstep_group(group):
                any_group: Any = group
                with contextlib.suppress(Exception):
                    any_group.abort()

    def leave(self) -> None:
        """Give up all groups. The training thread calls it when it is out of every collective."""
        self.abort()
        for group in self._groups:
            if not is_lockstep_group(group):
                deferred_destroy.keep_alive(group)
        try:
            worlds.leave_world(aborted=[group for group in self._groups if _nccl_of(group) is not None])
        finally:
            self._left.set()
        with self._lock:
            self._groups, self._aborted = [], []

    def _end_thread(self) -> None:
        """At exit: a thread that returns to an interpreter that has ended crashes."""
        self._left.set()
        if self._nccl_thread is not None:
            self._nccl_thread.join(EXIT_WITHIN_S)


def _connect_pairs(group: dist.ProcessGroup, world: World) -> None:
    """Exchange a number between every two workers, which makes NCCL connect them. Does not wait for the GPU, where
    nothing but an abort would end the exchange with a lost worker. Raises WorldError if a worker cannot be reached."""
    numbers = torch.zeros(world.size, device=world.device)
    try:
        group.alltoall_base(torch.empty_like(numbers), numbers, [], [])
    except RuntimeError as error:
        raise WorldError(f"rank {world.rank} of {world.size} could not connect to the others: {error}") from error


def _abort_nccl(groups: list[dist.ProcessGroup], forming: ConnectionTracker | None, left: threading.Event) -> None:
    """Abort the NCCL groups of a generation that has ended. See Note [Leaving NCCL].

    groups   Those of the generation; a group that is added later is aborted as well.
    forming  The connections of a communicator that is being created: they are cut until `groups` has it.
    left     Set when the training thread has left the generation.
    """
    began_s, aborted = time.monotonic(), list[dist.ProcessGroup]()
    while True:
        has_left = left.wait(0.25 if aborted else 0.005)
        if forming is not None and not groups and not has_left:
            forming.shut_down(listeners=True)
        may_abort = has_left or time.monotonic() - began_s > NCCL_CALL_WITHIN_S
        for group in [group for group in groups if group not in aborted and not is_lockstep_group(group)]:
            if may_abort or is_waiting_on_device(group):
                aborted.append(group)
                if (nccl := _nccl_of(group)) is not None:
                    with contextlib.suppress(Exception):
                        nccl.abort()
        if has_left:
            return


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend of a group; None if it has none."""
    with contextlib.suppress(RuntimeError):
        backend: Any = group._get_backend(torch.device("cuda"))
        if backend.name().lower() == "nccl":
            return backend
    return None
