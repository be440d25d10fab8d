"""That all workers do the same: the same call, with the same arguments."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.comm import agree
from lockstep.comm.peers import Reporter, Watch, other_call
from lockstep.comm.register import backend_name
from lockstep.errors import DesyncError, ReplicaMismatchError
from lockstep.train.calls import Calls
from lockstep.train.gate import Gate

TOLD_WITHIN_S: Final = 2.0
LOOK_EVERY_S: Final = 0.01
BLIND: Final = ("gloo", "nccl")  # the other backends compare calls themselves


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
class Accord:
    """Of one generation of workers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, store: Store, calls: Calls) -> None:
        """`store`: of this generation only. `calls`: where we are in the program."""
        self._group, self._device = group, device
        self._watch = Watch(group, polls=device.type == "cpu")
        self._gate: Gate | None = None
        reporter = Reporter.of(group)
        if reporter is None:
            return
        reporter.tell_call = lambda: (calls.position, calls.doing)
        if backend_name(group, device) in BLIND:
            self._gate = Gate(store, group, self._watch, lambda: calls.position)
        else:
            calls.explain_desync = partial(explain_desync, PrefixStore("desync", store), group)

    def explains(self, what: str) -> AbstractContextManager[None]:
        """Around a collective: an error in it says who was lost, and in what."""
        return self._watch.explains(what)

    def come_to(self, what: str) -> None:
        """Returns when all workers are at this call. Raises DesyncError if one is at another."""
        if self._gate is not None:
            self._gate.come_to(what)

    def compare(self, what: str, facts: dict[str, str]) -> None:
        """Raises ReplicaMismatchError, on all workers, where they are not the same."""
        with self.explains(what):
            if agree.is_same(self._group, agree.fingerprint(facts), device=self._device):
                return
            told = agree.tell_all(self._group, facts, device=self._device)
        for rank, theirs in enumerate(told):
            for name, value in theirs.items():
                if value != told[0].get(name):
                    raise ReplicaMismatchError(
                        f"{what}: {name} is {told[0].get(name)} on rank 0 and {value} on rank {rank}; "
                        "it must be the same on all workers"
                    )
