"""Puts the class under test in the place of torch's DistributedDataParallel, and sees to it that it is really used."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TORCH_CLASS

SHORT_NAMES = {
    "torch": "torch.nn.parallel.DistributedDataParallel",
    "lockstep": "lockstep.DistributedDataParallel",
}


def load(name: str) -> type:
    """The class called `name`: `torch`, `lockstep` or a dotted name."""
    dotted = SHORT_NAMES.get(name, name)
    module, _, attribute = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--class {name}: cannot load {dotted}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"--class {name}: {dotted} is not a class but {found!r}")
    return found


def put_in_place(name: str, cls: type) -> None:
    if name == "lockstep":
        import lockstep

        lockstep.install_ddp()  # what a user's program calls: the tests go through the same door
    elif cls is not TORCH_CLASS:
        _rebind(TORCH_CLASS, cls)
    seen = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    assert seen is cls, f"torch.nn.parallel still gives {seen}, not {cls}"


def _rebind(old: type, new: type) -> None:
    """Every module-level name that is `old` becomes `new`, except in the package of `new`, which may build on it.

    Modules that did `from torch.nn.parallel import DistributedDataParallel` hold the name themselves, so all loaded
    modules are looked at; those imported later find the new class by themselves."""
    own = new.__module__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == own or module_name == __name__:
            continue
        for name in [name for name, value in getattr(module, "__dict__", {}).items() if value is old]:
            setattr(module, name, new)


def count_constructions(cls: type, built: Path) -> None:
    """Every construction appends a byte to the file `built`, from whichever process."""
    construct: Any = cls.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        add_byte(built)
        construct(self, *args, **named)

    cls.__init__ = __init__  # type: ignore[misc]


def drop_devices(cls: type) -> None:
    """The constructor never sees `device_ids` and `output_device`: they name GPUs that are not there."""
    _replace_devices(cls, lambda devices: None)


def use_first_device(cls: type) -> None:
    """The constructor sees GPU 0 instead of any other in `device_ids` and `output_device`."""
    _replace_devices(cls, lambda devices: [0] * len(devices) if isinstance(devices, list) else devices and 0)


def _replace_devices(cls: type, replace: Callable[[Any], Any]) -> None:
    construct: Any = cls.__init__

    @functools.wraps(construct)
    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **named: Any
    ) -> None:
        construct(self, module, replace(device_ids), replace(output_device), *rest, **named)

    cls.__init__ = __init__  # type: ignore[misc]


def add_byte(built: Path) -> None:
    descriptor = os.open(built, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b".")
    os.close(descriptor)
