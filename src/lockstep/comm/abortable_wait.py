"""Waiting for a collective of a group that another thread may abort.

Lockstep's own groups and NCCL can be aborted, which ends every wait. Gloo cannot: shutting down its connections ends
most waits, but an operation that is posted at that moment misses it and waits for minutes. So waits for Gloo poll. This
works for collectives only: when a wait for a send or a receive times out, Gloo closes all connections of the group.

Note [Aborted on the GPU]
A wait for a collective of NCCL only queues the wait on the stream, and an aborted collective ends there without an
error: what it should have received is garbage. So in a run that continues after an abort, a result may be used only
after the stream was synchronised and the group was found not to be aborted. A group is marked before it is aborted.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from lockstep.comm.register_backends import backend_name
from lockstep.errors import PeerLostError

POLL_INTERVAL_S: Final = 0.5
NO_LIMIT: Final = timedelta(0)  # torch itself passes this to wait without a limit
DEVICE_WAIT_S: Final = 1800.0
SPIN_S: Final = 0.001

_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_may_be_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_waits_on_device: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def expect_aborts(group: dist.ProcessGroup) -> None:
    """Make `wait` and `wait_on_device` verify that results of this group were not cut off by an abort."""
    _may_be_aborted.add(group)


def mark_aborted(group: dist.ProcessGroup) -> None:
    """Make `wait` for collectives of this group raise PeerLostError soon, whether or not they complete."""
    _aborted.add(group)


def check_aborted(group: dist.ProcessGroup | None, where: str) -> None:
    """Raise PeerLostError if the group was aborted while the caller waited in `where`."""
    if group in _aborted:
        raise PeerLostError(f"its group was aborted while this worker waited in {where}")


def wait(group: dist.ProcessGroup, work: Any, device: torch.device, where: str) -> None:
    """Wait for a collective on tensors of this device. Raises PeerLostError if the group is aborted meanwhile."""
    if type(group) is not dist.ProcessGroup or backend_name(group, device) != "gloo":
        wait_without_limit(work)
        wait_on_device(group, device, where)
        return
    while not done_within(work, POLL_INTERVAL_S):
        check_aborted(group, where)


def wait_on_device(group: dist.ProcessGroup, device: torch.device, where: str) -> None:
    """Wait until all that is queued on the current stream is done, if the collectives of this group run on a GPU and
    it may be aborted. Raises PeerLostError if it was. See Note [Aborted on the GPU]."""
    with device_wait(group, device, where) as done_within:
        if done_within is not None and not done_within(DEVICE_WAIT_S):
            raise PeerLostError(f"{where} was not complete after {DEVICE_WAIT_S:.0f} s")


@contextmanager
def device_wait(group: dist.ProcessGroup, device: torch.device, where: str) -> Iterator[Callable[[float], bool] | None]:
    """Yield a function that waits for the current stream for some seconds, and returns whether it is done.

    Yields None if there is nothing to wait for: see `wait_on_device`. Raises PeerLostError, at the end of the context,
    if the group was aborted.
    """
    if group not in _may_be_aborted or device.type != "cuda":
        yield None
        return
    event: Any = torch.cuda.current_stream(device).record_event()
    _waits_on_device.add(group)
    try:
        yield partial(_done_within, event)
    finally:
        _waits_on_device.discard(group)
    check_aborted(group, where)


def _done_within(event: Any, limit_s: float) -> bool:
    began_s = time.monotonic()
    while not event.query():
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            return False
        time.sleep(0 if waited_s < SPIN_S else SPIN_S / 20)
    return True


def is_waiting_on_device(group: dist.ProcessGroup) -> bool:
    """Whether a thread is in `wait_on_device` of this group now: not in a call of NCCL, where an abort may crash."""
    return group in _waits_on_device


def wait_without_limit(work: Any) -> None:
    """Wait until a work of any process group is done.

    The argument is passed because `wait` of a work that is written in Python may require it: torch always passes it.
    """
    work.wait(NO_LIMIT)


def done_within(work: Any, limit_s: float) -> bool:
    """Wait for at most `limit_s`; return whether the work is done."""
    try:
        work.wait(timedelta(seconds=limit_s))
        return True
    except RuntimeError as error:
        if "Operation timed out" in str(error):
            return False
        raise
