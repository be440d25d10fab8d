"""Our backends, made known to torch.distributed. Loaded with it, so all else is imported when it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def register() -> None:
    """Make `init_process_group("shm")` and `("hierarchy")` work. Calling again changes nothing."""
    if "shm" in dist.Backend.backend_list:
        return
    for name, create in (("shm", _create_shm), ("hierarchy", _create_hierarchy)):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    # Torch's function refuses every backend but Gloo before it asks the group.
    c10d.monitored_barrier = dist.monitored_barrier = _for_ours(c10d.monitored_barrier)


def is_ours(group: dist.ProcessGroup) -> bool:
    """Whether this is one of our own groups: written in Python like others, but with works that work."""
    return type(group).__module__.startswith("lockstep.")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """What carries the tensors of this device: "shm", "hierarchy", "gloo", "nccl"."""
    ours: Any = group
    if is_ours(group) and ours.getBackendName() == "hierarchy":
        return "hierarchy"  # it would answer with the Gloo that it has inside
    return str(group._get_backend(device).name()).lower()


def _create_shm(made: Any, options: Any) -> dist.ProcessGroup:
    """A subgroup knows the processes of its members from the default group, if that is ours."""
    from lockstep.comm.join_roll import NOBODY, Roll
    from lockstep.errors import PeerLostError
    from lockstep.world.join_liveness import Introduced

    ranks = made.global_ranks_in_group or range(made.group_size)
    whole: Any = dist.group.WORLD if made.global_ranks_in_group else None
    known = options.processes if isinstance(options, Introduced) else getattr(whole, "processes", NOBODY)
    try:
        roll = Roll(made.store, made.group_rank, ranks, known)

        from lockstep.comm.shm import ShmGroup  # takes its time, so we sign before

        return ShmGroup(made.store, made.group_rank, made.group_size, made.timeout, roll=roll)
    except PeerLostError as error:
        raise (whole.mourn(error) if hasattr(whole, "mourn") else error) from None


def _create_hierarchy(made: Any, options: Any) -> dist.ProcessGroup:
    from lockstep.comm.hierarchy import create

    return create(made, options)


def _for_ours(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours: Any = c10d._get_default_group() if group is None else group
        if not is_ours(ours):
            theirs(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
        else:
            ours.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier
