"""Lockstep: data-parallel training for PyTorch.

The names are loaded on first use, so that the launcher and `lockstep --help` start without importing torch. The backend
`shm` is known to torch.distributed from here on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.arrival import register_backends

if TYPE_CHECKING:
    from lockstep.data.order import ByLength, InOrder, Shuffled
    from lockstep.errors import (
        CheckpointError,
        Desync,
        Divergence,
        LockstepError,
        NonFinite,
        PeerLost,
        ReplicaMismatch,
        UnevenData,
        WorkerFailed,
        WorldError,
    )
    from lockstep.notebook.launch import launch
    from lockstep.replicate.batchnorm import SyncBatchNorm
    from lockstep.replicate.ddp import DistributedDataParallel
    from lockstep.replicate.install import install
    from lockstep.train.optim import LAMB, LARS
    from lockstep.train.run import Run
    from lockstep.train.schedule import Scaling
    from lockstep.world import World, init

__version__ = "0.1.0"

_HOME = {
    "ByLength": "lockstep.data.order",
    "CheckpointError": "lockstep.errors",
    "Desync": "lockstep.errors",
    "DistributedDataParallel": "lockstep.replicate.ddp",
    "Divergence": "lockstep.errors",
    "InOrder": "lockstep.data.order",
    "LAMB": "lockstep.train.optim",
    "LARS": "lockstep.train.optim",
    "LockstepError": "lockstep.errors",
    "NonFinite": "lockstep.errors",
    "PeerLost": "lockstep.errors",
    "ReplicaMismatch": "lockstep.errors",
    "Run": "lockstep.train.run",
    "Scaling": "lockstep.train.schedule",
    "Shuffled": "lockstep.data.order",
    "SyncBatchNorm": "lockstep.replicate.batchnorm",
    "UnevenData": "lockstep.errors",
    "WorkerFailed": "lockstep.errors",
    "World": "lockstep.world",
    "WorldError": "lockstep.errors",
    "init": "lockstep.world",
    "install": "lockstep.replicate.install",
    "launch": "lockstep.notebook.launch",
}

__all__ = [
    "LAMB",
    "LARS",
    "ByLength",
    "CheckpointError",
    "Desync",
    "DistributedDataParallel",
    "Divergence",
    "InOrder",
    "LockstepError",
    "NonFinite",
    "PeerLost",
    "ReplicaMismatch",
    "Run",
    "Scaling",
    "Shuffled",
    "SyncBatchNorm",
    "UnevenData",
    "WorkerFailed",
    "World",
    "WorldError",
    "init",
    "install",
    "launch",
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
