"""Lockstep: data-parallel training for PyTorch.

The names are loaded on first use, so that the launcher and `lockstep --help` start without importing torch. The backend
`shm` is known to torch.distributed from here on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.arrival import register_backends

if TYPE_CHECKING:
    from lockstep.errors import Desync, LockstepError, PeerLost, ReplicaMismatch, WorldError
    from lockstep.replicate.ddp import DistributedDataParallel
    from lockstep.replicate.install import install
    from lockstep.world import World, init

__version__ = "0.1.0"

_HOME = {
    "Desync": "lockstep.errors",
    "DistributedDataParallel": "lockstep.replicate.ddp",
    "LockstepError": "lockstep.errors",
    "PeerLost": "lockstep.errors",
    "ReplicaMismatch": "lockstep.errors",
    "World": "lockstep.world",
    "WorldError": "lockstep.errors",
    "init": "lockstep.world",
    "install": "lockstep.replicate.install",
}

__all__ = [
    "Desync",
    "DistributedDataParallel",
    "LockstepError",
    "PeerLost",
    "ReplicaMismatch",
    "World",
    "WorldError",
    "init",
    "install",
]

register_backends()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
