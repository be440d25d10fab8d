"""Checks that all workers make the same call of the Run, with the same arguments.

Note [Calls that are not steps]
Gloo and NCCL do not look at what they are sent: two workers in different calls get each other's bytes, hang, or abort.
So a worker that comes to a call that is not a step writes that to the store, and continues when all workers have. A
step does not do so, since it would cost time; but its call is in the reports (comm/peer_watch.py), so that the error
names both calls. Our own backends compare calls by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.comm import agreement
from lockstep.comm.peer_watch import Reporter, Watch, other_call
from lockstep.comm.register_backends import backend_name
from lockstep.errors import DesyncError, PeerLostError, ReplicaMismatchError
from lockstep.train.collective_calls import Calls

TOLD_WITHIN_S: Final = 2.0
LOOK_EVERY_S: Final = 0.01
FIRST_PAUSE_S: Final = 0.0005
LONGEST_PAUSE_S: Final = 0.05
COMPARE_NOTHING: Final = ("gloo", "nccl")  # the other backends compare calls themselves
Position = tuple[int, int]


@final
class CallBarrier:
    """Waits at the store until all workers are in the same call (Note [Calls that are not steps])."""

    def __init__(self, store: Store, group: dist.ProcessGroup, watch: Watch, place: Callable[[], Position]) -> None:
        """`store`: of this generation of workers only. `place`: the position of the call that we are in."""
        self._store, self._watch, self._place = PrefixStore("call", store), watch, place
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


def explain_desync(store: Store, group: dist.ProcessGroup, calls: Calls, error: DesyncError) -> DesyncError:
    """The same in terms of calls of the Run, if the workers are in different ones.

    Our backends compare collectives, and see a mismatch on all workers at once; so all of them tell here what they
    were doing. A worker that does not is waited for only for a moment.
    """
    rank, end_s = group.rank(), time.monotonic() + TOLD_WITHIN_S
    store.set(str(rank), calls.doing)
    for peer in range(group.size()):
        while not store.check([str(peer)]):
            if time.monotonic() > end_s:
                return error
            time.sleep(LOOK_EVERY_S)
        theirs = store.get(str(peer)).decode()
        if theirs != calls.doing:
            return other_call(rank, calls.doing, peer, theirs)
    return error


@final
class CallCheck:
    """Compares the calls of the workers of one generation."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, store: Store, calls: Calls) -> None:
        """`store`: of this generation only. `calls`: where we are in the program."""
        self._group, self._device = group, device
        self._watch = Watch(group, polls=device.type == "cpu")
        self._barrier: CallBarrier | None = None
        reporter = Reporter.of(group)
        if reporter is None:
            return
        reporter.tell_call = lambda: (calls.position, calls.doing)
        if backend_name(group, device) in COMPARE_NOTHING:
            self._barrier = CallBarrier(store, group, self._watch, lambda: calls.position)
        else:
            calls.explain_desync = partial(explain_desync, PrefixStore("desync", store), group)

    def explains(self, what: str) -> AbstractContextManager[None]:
        """Around a collective: an error in it says who was lost, and in what."""
        return self._watch.explains(what)

    def come_to(self, what: str) -> None:
        """Returns when all workers are at this call. Raises DesyncError if one is at another."""
        if self._barrier is not None:
            self._barrier.come_to(what)

    def compare(self, what: str, facts: dict[str, str]) -> None:
        """Raises ReplicaMismatchError, on all workers, where they are not the same."""
        with self.explains(what):
            if agreement.is_same(self._group, agreement.fingerprint(facts), device=self._device):
                return
            told = agreement.tell_all(self._group, facts, device=self._device)
        for rank, theirs in enumerate(told):
            for name, value in theirs.items():
                if value != told[0].get(name):
                    raise ReplicaMismatchError(
                        f"{what}: {name} is {told[0].get(name)} on rank 0 and {value} on rank {rank}; "
                        "it must be the same on all workers"
                    )
