"""Registers Lockstep's backends as soon as torch.distributed is imported, without importing it.

`import lockstep` must be enough to use `init_process_group("shm")`, and must not load torch: the launcher and
`lockstep --help` start without it. So if torch is not loaded yet, an import hook does it later. The same holds for
torch's compiler, which must not trace into Lockstep's process groups.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[], None]


def _register() -> None:
    from lockstep.comm.register_backends import register

    register()


def _disable_tracing() -> None:
    sys.modules["torch._dynamo.trace_rules"].add("lockstep.comm")


# (module, an attribute that exists once the module is complete, action after its import)
ON_IMPORT: tuple[tuple[str, str, Action], ...] = (
    ("torch.distributed", "Backend", _register),
    ("torch._dynamo.trace_rules", "add", _disable_tracing),
)


def register_backends() -> None:
    """Register the backends now, or when torch is imported."""
    for name, attribute, action in ON_IMPORT:
        if hasattr(sys.modules.get(name), attribute):
            action()
        else:
            sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Runs an action after the import of one module, and then removes itself. Does not affect other modules."""

    def __init__(self, name: str, action: Action) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithAction(spec.loader, self._action)
        return spec


class _LoaderWithAction(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._action()
