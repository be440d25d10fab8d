"""Registers our backends as soon as torch.distributed is there, without importing it.

`import lockstep` must be enough to use `init_process_group("shm")`, and must not load torch: the launcher and
`lockstep --help` start without it. So if torch is not loaded yet, we wait for its module to be imported. Likewise for
torch's compiler, which shall not look into our process groups.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Deed = Callable[[], None]


def _register() -> None:
    from lockstep.comm.register_backends import register

    register()


def _keep_compiler_out() -> None:
    sys.modules["torch._dynamo.trace_rules"].add("lockstep.comm")


# a module, a name in it that shows that it is complete, and what to do then
AWAITED: tuple[tuple[str, str, Deed], ...] = (
    ("torch.distributed", "Backend", _register),
    ("torch._dynamo.trace_rules", "add", _keep_compiler_out),
)


def register_backends() -> None:
    """Now, or when torch is imported."""
    for name, sign, deed in AWAITED:
        if hasattr(sys.modules.get(name), sign):
            deed()
        else:
            sys.meta_path.insert(0, _Doorman(name, deed))


class _Doorman(importlib.abc.MetaPathFinder):
    """Lets every module pass. Behind the one that is awaited, it does its deed, and goes away."""

    def __init__(self, name: str, deed: Deed) -> None:
        self._name, self._deed = name, deed

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _AndThen(spec.loader, self._deed)
        return spec


class _AndThen(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, deed: Deed) -> None:
        self._loader, self._deed = loader, deed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._deed()
