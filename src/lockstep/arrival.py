"""Registers our backends as soon as torch.distributed is there, without importing it.

`import lockstep` must be enough to use `init_process_group("shm")`, and must not load torch: the launcher and
`lockstep --help` start without it. So if torch is not loaded yet, we wait for its module to be imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

AWAITED = "torch.distributed"


def register_backends() -> None:
    """Now, or when torch.distributed is imported."""
    if hasattr(sys.modules.get(AWAITED), "Backend"):
        _register()
    else:
        sys.meta_path.insert(0, _Doorman())


def _register() -> None:
    from lockstep.comm.register import register

    register()


class _Doorman(importlib.abc.MetaPathFinder):
    """Lets every module pass. Behind the one that is awaited, it registers, and goes away."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _AndThen(spec.loader)
        return spec


class _AndThen(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        _register()
