"""Our class in torch's place, for a program that cannot be edited."""

from __future__ import annotations

import sys

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from lockstep.ddp.wrapper import DistributedDataParallel


def install_ddp() -> None:
    """From now on `torch.nn.parallel.DistributedDataParallel` is ours, also where it was imported before.

    Every module-level name that is torch's class is bound to ours: modules that are loaded later import it from where
    torch keeps it and get ours too. Calling it again does nothing.
    """
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] == "lockstep":
            continue
        try:
            names = [key for key, value in vars(module).items() if value is TorchDDP]
        except TypeError:  # not a module at all: some programs put other things there
            continue
        for key in names:
            setattr(module, key, DistributedDataParallel)
