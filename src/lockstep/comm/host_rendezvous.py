"""How the workers of a hierarchical group find each other, and create the subgroups that each belongs to."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from lockstep._torch import PrefixStore, Store
from lockstep.comm.abortable_group import AbortableGroup, Gloo, Nccl
from lockstep.comm.host_groups import NativeSubgroup, SingleWorker, Subgroup, TreeSubgroup
from lockstep.comm.host_layout import HostLayout
from lockstep.errors import WorldError
from lockstep.world.environment import identify_host

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.005
SHARED_MEMORY_TIMEOUT = timedelta(seconds=30)  # all workers have joined already

Network = type[Gloo] | type[Nccl]
LocalGroup = Callable[..., Any]
"""Makes the group of one host from (store, rank, size, timeout, global_ranks=...), as ShmGroup does."""


@dataclass(frozen=True)
class MemberInfo:
    """What a worker publishes about itself."""

    rank: int  # global rank, used in errors; differs from the rank in a subgroup
    pid: int
    host: str  # identity of the host; equal on all its workers
    host_name: str  # for messages
    exact: bool
    nccl: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host_name})"


def describe_this_worker(rank: int, *, exact: bool) -> MemberInfo:
    return MemberInfo(rank, os.getpid(), identify_host(), socket.gethostname(), exact, Nccl.is_available())


class HostRendezvous:
    """Exchanges information through the store; all waits share one deadline."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def exchange_members(self, mine: MemberInfo) -> tuple[MemberInfo, ...]:
        self._store.set(f"member/{self._rank}", json.dumps(asdict(mine)))
        members = tuple(MemberInfo(**json.loads(self._read(f"member/{rank}", rank))) for rank in range(self._size))
        for member in members:
            if member.exact != mine.exact:
                raise WorldError(
                    f"{mine} asks for exact={mine.exact} and {member} for exact={member.exact}; "
                    "set LOCKSTEP_EXACT to the same on all workers"
                )
        return members

    def create_flat(self, network: Network) -> AbortableGroup:
        """Create a group of all workers."""
        store = PrefixStore(f"{network.__name__}/flat", self._store)
        return network(store, self._rank, self._size, self._timeout)

    def create_local(self, layout: HostLayout, make: LocalGroup, global_ranks: Sequence[int]) -> Subgroup:
        """Create the subgroup of this host: the group that `make` returns, or Gloo if that fails for a worker."""
        rank, size = layout.local_rank, len(layout.local_ranks)
        if size == 1:
            return SingleWorker()
        group, failure = None, ""
        try:
            store = PrefixStore(f"local/{layout.host}", self._store)
            group = make(store, rank, size, min(self._timeout, SHARED_MEMORY_TIMEOUT), global_ranks=global_ranks)
            group.set_timeout(self._timeout)
        except RuntimeError as error:
            failure = str(error) or type(error).__name__
        # Shared memory is of use only if it works for all workers of the host, so they compare.
        self._store.set(f"shared/{self._rank}", failure or "yes")
        answers = [self._read(f"shared/{other}", other) for other in layout.local_ranks]
        if group is not None and set(answers) == {"yes"}:
            return NativeSubgroup(group, rank, size)
        if group is not None:
            group.shutdown()
        if rank == 0:
            why = next(answer for answer in answers if answer != "yes")
            logger.warning("the workers on %s use Gloo and no shared memory: %s", socket.gethostname(), why)
        return TreeSubgroup(
            Gloo(PrefixStore(f"gloo/{layout.host}", self._store), rank, size, self._timeout), rank, size
        )

    def all_share_memory(self, layout: HostLayout) -> bool:
        """Whether on every host the workers share memory. A host with one worker counts."""
        not_alone = [rank for ranks in layout.hosts if len(ranks) > 1 for rank in ranks]
        return all(self._read(f"shared/{rank}", rank) == "yes" for rank in not_alone)

    def create_column(self, layout: HostLayout, network: Network) -> Subgroup:
        """Create the subgroup of this worker's column."""
        rank, size = layout.host, len(layout.hosts)
        if size == 1 or not layout.has_column:
            return SingleWorker()
        store = PrefixStore(f"{network.__name__}/column/{layout.local_rank}", self._store)
        return TreeSubgroup(network(store, rank, size, self._timeout), rank, size)

    def _read(self, key: str, rank: int) -> str:
        while not self._store.check([key]):
            if time.monotonic() > self._deadline:
                raise WorldError(
                    f"rank {self._rank} waited {self._timeout.total_seconds():g} s for rank {rank} of {self._size} to "
                    "join the group, in vain; look at its output, and check that it calls init_process_group or "
                    "new_group too"
                )
            time.sleep(POLL_INTERVAL_S)
        return self._store.get(key).decode()
