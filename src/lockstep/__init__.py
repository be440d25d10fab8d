"""Lockstep: data-parallel training for PyTorch.

Names are imported on first use, so that the launcher and `lockstep --help` start without importing torch. Importing
this package registers the backend `shm` with torch.distributed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.comm.register_on_import import register_backends

if TYPE_CHECKING:
    from lockstep.data.reader import DataError
    from lockstep.data.sample_order import ByLength, Sequential, Shuffled
    from lockstep.ddp.batchnorm import SyncBatchNorm
    from lockstep.ddp.install import install_ddp
    from lockstep.ddp.wrapper import DistributedDataParallel
    from lockstep.errors import (
        CheckpointError,
        DesyncError,
        DirectoryInUseError,
        DivergenceError,
        LockstepError,
        NonFiniteError,
        PeerLostError,
        ReplicaMismatchError,
        SharedMemoryFullError,
        UnevenDataError,
        WorkerFailedError,
        WorldError,
    )
    from lockstep.notebook.launch import launch
    from lockstep.train.optim import LAMB, LARS
    from lockstep.train.run import Run
    from lockstep.train.schedule import LRScaling
    from lockstep.world.world import World, init

__version__ = "0.1.0"

_MODULE_OF = {
    "ByLength": "lockstep.data.sample_order",
    "CheckpointError": "lockstep.errors",
    "DesyncError": "lockstep.errors",
    "DataError": "lockstep.data.reader",
    "DirectoryInUseError": "lockstep.errors",
    "DistributedDataParallel": "lockstep.ddp.wrapper",
    "DivergenceError": "lockstep.errors",
    "Sequential": "lockstep.data.sample_order",
    "LAMB": "lockstep.train.optim",
    "LARS": "lockstep.train.optim",
    "LockstepError": "lockstep.errors",
    "NonFiniteError": "lockstep.errors",
    "PeerLostError": "lockstep.errors",
    "ReplicaMismatchError": "lockstep.errors",
    "Run": "lockstep.train.run",
    "LRScaling": "lockstep.train.schedule",
    "SharedMemoryFullError": "lockstep.errors",
    "Shuffled": "lockstep.data.sample_order",
    "SyncBatchNorm": "lockstep.ddp.batchnorm",
    "UnevenDataError": "lockstep.errors",
    "WorkerFailedError": "lockstep.errors",
    "World": "lockstep.world.world",
    "WorldError": "lockstep.errors",
    "init": "lockstep.world.world",
    "install_ddp": "lockstep.ddp.install",
    "launch": "lockstep.notebook.launch",
}

__all__ = [
    "LAMB",
    "LARS",
    "ByLength",
    "CheckpointError",
    "DataError",
    "DesyncError",
    "DirectoryInUseError",
    "DistributedDataParallel",
    "DivergenceError",
    "LRScaling",
    "LockstepError",
    "NonFiniteError",
    "PeerLostError",
    "ReplicaMismatchError",
    "Run",
    "Sequential",
    "SharedMemoryFullError",
    "Shuffled",
    "SyncBatchNorm",
    "UnevenDataError",
    "WorkerFailedError",
    "World",
    "WorldError",
    "init",
    "install_ddp",
    "launch",
]

register_backends()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
