"""Replaces torch's DistributedDataParallel with ours, for a program that cannot be edited."""

from __future__ import annotations

import sys

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from lockstep.ddp.wrapper import DistributedDataParallel


def install_ddp() -> None:
    """Make `torch.nn.parallel.DistributedDataParallel` our class, also in modules that have imported it before.

    Rebinds every module-level name that refers to torch's class; modules that are imported later get ours from
    torch's modules. Calling it again does nothing.
    """
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] == "lockstep":
            continue
        try:
            names = [key for key, value in vars(module).items() if value is TorchDDP]
        except TypeError:  # some programs put objects into sys.modules that are not modules
            continue
        for key in names:
            setattr(module, key, DistributedDataParallel)
