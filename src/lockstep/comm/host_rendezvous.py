"""How a group over several hosts comes together: who is where, and the parts that each worker has a share in."""

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

from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.comm.abortable_group import Gloo, Link, Nccl
from lockstep.comm.host_groups import Alone, Native, Part, Tree
from lockstep.comm.host_layout import Layout
from lockstep.errors import WorldError
from lockstep.world.environment import identify_host

logger = logging.getLogger(__name__)

LOOK_S = 0.005
SHARE_WITHIN = timedelta(seconds=30)  # all workers are there already

Network = type[Gloo] | type[Nccl]
LocalGroup = Callable[..., Any]
"""Makes the group of one host from (store, rank, size, timeout, global_ranks=...), as ShmGroup does."""


@dataclass(frozen=True)
class Card:
    """What a worker tells the others about itself."""

    rank: int  # its name in errors; in a subgroup that is not its rank there
    pid: int
    host: str  # equal on workers that share one
    host_name: str  # for people
    exact: bool
    nccl: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host_name})"


def make_card(rank: int, *, exact: bool) -> Card:
    return Card(rank, os.getpid(), identify_host(), socket.gethostname(), exact, Nccl.is_there())


class Formation:
    """Everything waits at the store, and until one deadline."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def swap_cards(self, mine: Card) -> tuple[Card, ...]:
        self._store.set(f"card/{self._rank}", json.dumps(asdict(mine)))
        cards = tuple(Card(**json.loads(self._read(f"card/{rank}", rank))) for rank in range(self._size))
        for card in cards:
            if card.exact != mine.exact:
                raise WorldError(
                    f"{mine} asks for exact={mine.exact} and {card} for exact={card.exact}; "
                    "set LOCKSTEP_EXACT to the same on all workers"
                )
        return cards

    def flat(self, network: Network) -> Link:
        """All workers."""
        store = PrefixStore(f"{network.__name__}/flat", self._store)
        return network(store, self._rank, self._size, self._timeout)

    def local(self, layout: Layout, make: LocalGroup, names: Sequence[int]) -> Part:
        """The workers of our host: a group that `make` makes, or Gloo if that fails for one of them."""
        rank, size = layout.local_rank, len(layout.neighbours)
        if size == 1:
            return Alone()
        group, failure = None, ""
        try:
            store = PrefixStore(f"local/{layout.host}", self._store)
            group = make(store, rank, size, min(self._timeout, SHARE_WITHIN), global_ranks=names)
            group.set_timeout(self._timeout)
        except RuntimeError as error:
            failure = str(error) or type(error).__name__
        # Shared memory that works for us and not for our neighbour is of no use, so we ask.
        self._store.set(f"shared/{self._rank}", failure or "yes")
        answers = [self._read(f"shared/{other}", other) for other in layout.neighbours]
        if group is not None and set(answers) == {"yes"}:
            return Native(group, rank, size)
        if group is not None:
            group.shutdown()
        if rank == 0:
            why = next(answer for answer in answers if answer != "yes")
            logger.warning("the workers on %s use Gloo and no shared memory: %s", socket.gethostname(), why)
        return Tree(Gloo(PrefixStore(f"gloo/{layout.host}", self._store), rank, size, self._timeout), rank, size)

    def share_memory(self, layout: Layout) -> bool:
        """Whether the workers of every host do."""
        crowded = [rank for ranks in layout.hosts if len(ranks) > 1 for rank in ranks]
        return all(self._read(f"shared/{rank}", rank) == "yes" for rank in crowded)

    def across(self, layout: Layout, network: Network) -> Part:
        """The workers of our column."""
        rank, size = layout.host, len(layout.hosts)
        if size == 1 or not layout.carries:
            return Alone()
        store = PrefixStore(f"{network.__name__}/column/{layout.local_rank}", self._store)
        return Tree(network(store, rank, size, self._timeout), rank, size)

    def _read(self, key: str, rank: int) -> str:
        while not self._store.check([key]):
            if time.monotonic() > self._deadline:
                raise WorldError(
                    f"rank {self._rank} waited {self._timeout.total_seconds():g} s for rank {rank} of {self._size} to "
                    "join the group, in vain; look at its output, and check that it calls init_process_group or "
                    "new_group too"
                )
            time.sleep(LOOK_S)
        return self._store.get(key).decode()
