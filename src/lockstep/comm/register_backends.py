"""Registers Lockstep's backends with torch.distributed. Imported with it, so other modules are imported on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def register() -> None:
    """Make `init_process_group("shm")` and `("hierarchy")` work. Calling it again has no effect."""
    if "shm" in dist.Backend.backend_list:
        return
    for name, create in (("shm", _create_shm), ("hierarchy", _create_hierarchy)):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    # Torch's function rejects every backend but Gloo without calling the group.
    c10d.monitored_barrier = dist.monitored_barrier = _add_monitored_barrier(c10d.monitored_barrier)


def is_lockstep_group(group: dist.ProcessGroup) -> bool:
    """Whether this is one of Lockstep's groups. Unlike other groups written in Python, their works can be relied on."""
    return type(group).__module__.startswith("lockstep.")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend for tensors of this device: "shm", "hierarchy", "gloo", "nccl"."""
    own: Any = group
    if is_lockstep_group(group) and own.getBackendName() == "hierarchy":
        return "hierarchy"  # `_get_backend` would return its internal Gloo backend
    return str(group._get_backend(device).name()).lower()


def _create_shm(made: Any, options: Any) -> dist.ProcessGroup:
    """Create an shm group. A subgroup gets the processes of its members from the default group, if that is shm too."""
    from lockstep.comm.join_registry import NO_PROCESSES, JoinRegistry
    from lockstep.errors import PeerLostError
    from lockstep.world.join_liveness import KnownProcesses

    ranks = made.global_ranks_in_group or range(made.group_size)
    whole: Any = dist.group.WORLD if made.global_ranks_in_group else None
    known = options.processes if isinstance(options, KnownProcesses) else getattr(whole, "processes", NO_PROCESSES)
    try:
        registry = JoinRegistry(made.store, made.group_rank, ranks, known)

        from lockstep.comm.shm import ShmGroup  # a slow import, so this worker registers before it

        return ShmGroup(made.store, made.group_rank, made.group_size, made.timeout, registry=registry)
    except PeerLostError as error:
        raise (whole.fail_if_dead(error) if hasattr(whole, "fail_if_dead") else error) from None


def _create_hierarchy(made: Any, options: Any) -> dist.ProcessGroup:
    from lockstep.comm.hierarchy import create

    return create(made, options)


def _add_monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """Extend torch's function to Lockstep's groups."""

    @functools.wraps(original)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        own: Any = c10d._get_default_group() if group is None else group
        if not is_lockstep_group(own):
            original(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
        else:
            own.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier
