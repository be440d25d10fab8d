"""Checks that all workers make the same call of the Run, with the same arguments.

Note [Calls that are not steps]
Gloo and NCCL do not compare what they are sent: two workers in different calls get each other's bytes, hang, or abort.
So a worker that reaches a call that is not a step writes that to the store, and continues when all workers have. A step
does not do so, since it would cost time; but its call is in the reports (comm/peer_watch.py), so that the error names
both calls. The backends of Lockstep compare calls themselves.
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

from lockstep._torch import PrefixStore, Store
from lockstep.comm import agreement
from lockstep.comm.peer_watch import PeerWatch, Reporter, desync_error
from lockstep.comm.register_backends import backend_name
from lockstep.errors import DesyncError, PeerLostError, ReplicaMismatchError
from lockstep.recovery.collective_calls import CollectiveCalls

ANSWER_WITHIN_S: Final = 2.0
POLL_EVERY_S: Final = 0.01
FIRST_PAUSE_S: Final = 0.0005
LONGEST_PAUSE_S: Final = 0.05
COMPARE_NOTHING: Final = ("gloo", "nccl")  # the other backends compare calls themselves
Position = tuple[int, int]


@final
class CallBarrier:
    """Waits at the store until all workers are in the same call (Note [Calls that are not steps])."""

    def __init__(
        self, store: Store, group: dist.ProcessGroup, watch: PeerWatch, position: Callable[[], Position]
    ) -> None:
        """`store`: used by this generation of workers only. `position`: returns the position of the current call."""
        self._store, self._watch, self._position = PrefixStore("call", store), watch, position
        self._rank, self._size = group.rank(), group.size()
        self._reporter = Reporter.of(group)
        self._last = ""  # key of the last call; all workers have passed it once they are at the next one

    def wait_for_all(self, what: str) -> None:
        """Wait until all workers are at this call. Raises DesyncError if one is at another."""
        number = self._position()
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

        with self._watch.explain_errors(what):
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
        """Compare with the workers that wait at a call, and with those that are in a step."""
        for rank in range(self._size):
            if rank != self._rank and self._store.check([f"at {rank}"]):
                place, theirs = json.loads(self._store.get(f"at {rank}"))
                if tuple(place) > number or (tuple(place) == number and theirs != what):
                    raise desync_error(self._rank, what, rank, theirs)
        if self._reporter is not None and isinstance(gone := self._reporter.diagnose(what), PeerLostError):
            raise gone
        for peer in self._reporter.read_reports() if self._reporter is not None else ():
            if peer.position == number and peer.doing not in ("", what):
                raise desync_error(self._rank, what, peer.rank, peer.doing)


def explain_desync(store: Store, group: dist.ProcessGroup, calls: CollectiveCalls, error: DesyncError) -> DesyncError:
    """Return an error that names the calls of the Run if the workers are in different calls, else `error`.

    The backends of Lockstep compare collectives, and find a mismatch on all workers at once; so all of them write here
    which call they are in. A worker that does not is waited for only TOLD_WITHIN_S.
    """
    rank, end_s = group.rank(), time.monotonic() + ANSWER_WITHIN_S
    store.set(str(rank), calls.current_call)
    for peer in range(group.size()):
        while not store.check([str(peer)]):
            if time.monotonic() > end_s:
                return error
            time.sleep(POLL_EVERY_S)
        theirs = store.get(str(peer)).decode()
        if theirs != calls.current_call:
            return desync_error(rank, calls.current_call, peer, theirs)
    return error


@final
class CallCheck:
    """Compares the calls of all workers of one generation."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, store: Store, calls: CollectiveCalls) -> None:
        """`store`: used by this generation only. `calls`: knows the current call of this worker."""
        self._group, self._device = group, device
        self._watch = PeerWatch(group, polls=device.type == "cpu")
        self._barrier: CallBarrier | None = None
        reporter = Reporter.of(group)
        if reporter is None:
            return
        reporter.current_call = lambda: (calls.position, calls.current_call)
        if backend_name(group, device) in COMPARE_NOTHING:
            self._barrier = CallBarrier(store, group, self._watch, lambda: calls.position)
        else:
            calls.explain_desync = partial(explain_desync, PrefixStore("desync", store), group)

    def explain_errors(self, what: str) -> AbstractContextManager[None]:
        """Use around a collective: an error in it names the worker that was lost, and the call."""
        return self._watch.explain_errors(what)

    def wait_for_all(self, what: str) -> None:
        """Wait until all workers are at this call. Raises DesyncError if one is at another."""
        if self._barrier is not None:
            self._barrier.wait_for_all(what)

    def compare(self, what: str, facts: dict[str, str]) -> None:
        """Raise ReplicaMismatchError, on all workers, if the facts are not equal on all of them."""
        with self.explain_errors(what):
            if agreement.all_equal(self._group, agreement.fingerprint(facts), device=self._device):
                return
            told = agreement.gather_values(self._group, facts, device=self._device)
        for rank, theirs in enumerate(told):
            for name, value in theirs.items():
                if value != told[0].get(name):
                    raise ReplicaMismatchError(
                        f"{what}: {name} is {told[0].get(name)} on rank 0 and {value} on rank {rank}; "
                        "it must be the same on all workers"
                    )
