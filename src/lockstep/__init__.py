"""Lockstep: data-parallel training for PyTorch.

Names are imported on first use, so that the launcher and `lockstep --help` start without importing torch. Importing
this package registers the backend `shm` with torch.distributed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep import terminal_log
from lockstep.comm.register_backends import register_backends
from lockstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep import hooks as hooks
    from lockstep.data.reader import DataError
    from lockstep.data.sample_order import ByLength, Sequential, Shuffled
    from lockstep.ddp.batchnorm import SyncBatchNorm
    from lockstep.ddp.sharded_optimizer import ShardedOptimizer
    from lockstep.ddp.wrapper import DistributedDataParallel, install_ddp
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
    from lockstep.step.learning_rate import LRScaling
    from lockstep.train.optim import LAMB, LARS
    from lockstep.train.run import Run
    from lockstep.world.world import World, init

_NAMES = {
    "data.reader": ["DataError"],
    "data.sample_order": ["ByLength", "Sequential", "Shuffled"],
    "ddp.batchnorm": ["SyncBatchNorm"],
    "ddp.sharded_optimizer": ["ShardedOptimizer"],
    "ddp.wrapper": ["DistributedDataParallel", "install_ddp"],
    "errors": [
        *["CheckpointError", "DesyncError", "DirectoryInUseError", "DivergenceError", "LockstepError"],
        *["NonFiniteError", "PeerLostError", "ReplicaMismatchError", "SharedMemoryFullError", "UnevenDataError"],
        *["WorkerFailedError", "WorldError"],
    ],
    "notebook.launch": ["launch"],
    "train.optim": ["LAMB", "LARS"],
    "train.run": ["Run"],
    "step.learning_rate": ["LRScaling"],
    "world.world": ["World", "init"],
}
_MODULE_OF = {name: f"lockstep.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "LAMB", "LARS", "ByLength", "CheckpointError", "DataError", "DesyncError", "DirectoryInUseError",
    "DistributedDataParallel", "DivergenceError", "LRScaling", "LockstepError", "NonFiniteError", "PeerLostError",
    "ReplicaMismatchError", "Run", "Sequential", "ShardedOptimizer", "SharedMemoryFullError", "Shuffled",
    "SyncBatchNorm", "UnevenDataError", "WorkerFailedError", "World", "WorldError", "init", "install_ddp", "launch",
]  # fmt: skip

terminal_log.install()
register_backends()


def __getattr__(name: str) -> Any:
    if name == "hooks":
        return import_module("lockstep.hooks")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "hooks"])
