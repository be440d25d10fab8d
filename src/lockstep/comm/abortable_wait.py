"""Waiting for a collective of a group that may be given up meanwhile.

Our own groups and NCCL can be aborted, and then nobody waits in them any more. Gloo cannot: shutting its connections
down lets most waiters go, but an operation that looks away in that moment misses it, and waits for minutes. So whoever
waits for Gloo looks up now and then. That is for collectives only: with sends and receives, a wait that is over closes
all connections of the group.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from lockstep.comm.register_backends import backend_name
from lockstep.errors import PeerLostError

LOOK_EVERY_S: Final = 0.5
NO_LIMIT: Final = timedelta(0)  # what torch itself passes where it waits without a limit

_given_up: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def give_up(group: dist.ProcessGroup) -> None:
    """Whoever waits in it goes on soon, whatever becomes of its collectives."""
    _given_up.add(group)


def check_given_up(group: dist.ProcessGroup | None, where: str) -> None:
    if group in _given_up:
        raise PeerLostError(f"its group was given up while this worker waited in {where}")


def wait(group: dist.ProcessGroup, work: Any, device: torch.device, where: str) -> None:
    """Until a collective on tensors of this device is done."""
    if type(group) is not dist.ProcessGroup or backend_name(group, device) != "gloo":
        wait_without_limit(work)
        return
    while not done_within(work, LOOK_EVERY_S):
        check_given_up(group, where)


def wait_without_limit(work: Any) -> None:
    """Wait until a work of any process group is done.

    The argument is given because `wait` of a work that is written in Python may require it: torch always passes it.
    """
    work.wait(NO_LIMIT)


def done_within(work: Any, limit_s: float) -> bool:
    try:
        work.wait(timedelta(seconds=limit_s))
        return True
    except RuntimeError as error:
        if "Operation timed out" in str(error):
            return False
        raise
