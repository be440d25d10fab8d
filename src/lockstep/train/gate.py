"""Before a call that is not a step: are all workers in the same one?

Gloo and NCCL do not look at what they are sent: two workers in different calls get each other's bytes, hang, or abort.
So whoever comes to such a call says so at the store and goes on when all have. A step does not ask, since that would
cost; but its call is in the reports (comm/peers.py), and so both are named. Our own backend compares calls by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Final, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.comm.peers import Reporter, Watch, other_call
from lockstep.errors import PeerLostError

FIRST_PAUSE_S: Final = 0.0005
LONGEST_PAUSE_S: Final = 0.05
Position = tuple[int, int]


@final
class Gate:
    def __init__(self, store: Store, group: dist.ProcessGroup, watch: Watch, place: Callable[[], Position]) -> None:
        """`store`: of this generation of workers only. `place`: the position of the call that we are in."""
        self._store, self._watch, self._place = PrefixStore("gate", store), watch, place
        self._rank, self._size = group.rank(), group.size()
        self._reporter = Reporter.of(group)
        self._last = ""  # of which we know that all have passed it, once they are at the next

    def come_to(self, what: str) -> None:
        """Returns when all are there. Raises DesyncError if one is elsewhere."""
        number = self._place()
        key = f"{number[0]}.{number[1]} {what}"
        if self._store.add(key, 1) == self._size:
            self._store.set(f"{key} all", "")
            self._store.delete_key(key)
            if self._last:
                self._store.delete_key(f"{self._last} all")
        elif not self._is_open(key, LONGEST_PAUSE_S):
            self._wait(number, what, key)
        self._last = key

    def _wait(self, number: Position, what: str, key: str) -> None:
        self._store.set(f"at {self._rank}", json.dumps([number, what]))

        def opened_within(seconds: float) -> bool:
            if self._is_open(key, seconds):
                return True
            self._compare(number, what)
            return False

        with self._watch.explains(what):
            self._watch.wait_for(opened_within, what)

    def _is_open(self, key: str, within_s: float) -> bool:
        end_s, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
        while not self._store.check([f"{key} all"]):
            if time.monotonic() > end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def _compare(self, number: Position, what: str) -> None:
        """With those who wait at a gate, too, and with those who are in a step."""
        for rank in range(self._size):
            if rank != self._rank and self._store.check([f"at {rank}"]):
                place, theirs = json.loads(self._store.get(f"at {rank}"))
                if tuple(place) > number or (tuple(place) == number and theirs != what):
                    raise other_call(self._rank, what, rank, theirs)
        if self._reporter is not None and isinstance(gone := self._reporter.blame(what), PeerLostError):
            raise gone
        for peer in self._reporter.hear() if self._reporter is not None else ():
            if peer.position == number and peer.doing not in ("", what):
                raise other_call(self._rank, what, peer.rank, peer.doing)
