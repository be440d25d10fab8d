"""No worker waits in a group that was aborted."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import abortable_wait, agreement
from lockstep.comm.abortable_group import Gloo
from lockstep.comm.agreement import Broadcast
from lockstep.errors import PeerLostError
from lockstep.trace.metrics import gather_pieces
from on_workers import on_workers

CPU = torch.device("cpu")

WAITS = {
    "compares": lambda group: agreement.all_equal(group, 1, device=CPU),
    "tells": lambda group: agreement.gather_values(group, "word", device=CPU),
    "broadcasts": lambda group: Broadcast(keep=False)(group, [torch.ones(4)], source=1),
    "gathers": lambda group: gather_pieces(group, CPU, {0: {"loss": (1.0, 1.0)}}, what="run.log"),
}


def wait_for_a_missing_peer(rank: int, size: int, what: str) -> float:
    """The other one never calls, and lives on: so no connection tells anything."""
    group = dist.new_group(timeout=timedelta(seconds=3))  # its thread ends with the other's
    if rank == 0:
        threading.Timer(0.3, abortable_wait.mark_aborted, [group]).start()
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match="its group was aborted while this worker waited in"):
            WAITS[what](group)
        return time.monotonic() - began_s
    return 0.0


@pytest.mark.few(2)
@pytest.mark.parametrize("what", WAITS)
def test_who_waits_in_a_group_that_is_given_up_goes_on(what: str) -> None:
    waited_s, _ = on_workers(wait_for_a_missing_peer, 2, what)
    assert waited_s < 2


class EndsWhileItIsLookedAt:
    """A work that ends between the end of a short wait for it and the question whether it has ended."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._waits = 0

    def wait(self, *limit: timedelta) -> bool:
        self._waits += 1
        done = self._work.wait(*limit)
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        return bool(done)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def test_a_collective_that_ends_after_a_poll_has_not_failed() -> None:
    gloo = Gloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    gloo.wait(EndsWhileItIsLookedAt(gloo.group.allreduce([torch.ones(3)])))
