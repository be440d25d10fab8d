"""Makes the processes that tests start ready in 2 s of CPU time instead of 5 s. Python imports this at its start.

- While torch is imported nothing becomes garbage, but the collector searches a million new objects again and again,
  and once more when the process ends. So it is off during the import, and does not look at those objects later.
- The first optimiser imports torch's compiler, to call two functions that do nothing unless something is compiled, and
  `use_deterministic_algorithms` imports it to change a setting of it. Here the two packages of the compiler are
  imported without their contents, which are loaded when anything else of them is asked for.

Numbers do not change. `make test-all` runs without this file.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False  # every Python process imports this file, so it imports little itself
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from typing import Any

ModuleType = type(sys)


class Postponed(ModuleType):
    """A package whose contents are not loaded yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "config":
            return __import__(f"{self.__name__}.config", fromlist=["config"])
        load(self)
        return getattr(self, name)


def load(module: ModuleType) -> None:
    if type(module) is Postponed:
        module.__class__ = ModuleType
        vars(module).pop("graph_break", None)
        vars(module).pop("disable", None)
        assert module.__spec__ is not None
        assert module.__spec__.loader is not None
        without_collector(module.__spec__.loader, module)


def without_collector(loader: Loader, module: ModuleType) -> None:
    was_on = gc.isenabled()
    gc.disable()
    try:
        loader.exec_module(module)
    finally:
        if was_on:
            gc.enable()


def disable(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """`torch._dynamo.disable`: the function as it is, until the compiler is loaded."""
    from functools import wraps

    compiler = sys.modules["torch._dynamo"]
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if type(compiler) is Postponed:
            return function(*given, **named)
        if not disabled:
            disabled.append(compiler.disable(function, *args, **options))
        return disabled[0](*given, **named)

    return call


def load_torch(loader: Loader, module: ModuleType) -> None:
    without_collector(loader, module)
    gc.freeze()


def postpone(loader: Loader, module: ModuleType) -> None:
    if module.__name__ == "torch._dynamo":
        vars(module).update(graph_break=lambda *args, **named: None, disable=disable)
    module.__class__ = Postponed


HOW_TO_LOAD = {"torch": load_torch, "torch._dynamo": postpone, "torch._inductor": postpone}
WITHOUT_THE_REST = {"torch._dynamo.config", "torch._inductor.config", "torch._inductor.custom_graph_pass"}


class LoadDifferently:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        HOW_TO_LOAD[module.__name__](self._loader, module)


class Finder:
    """Finds the modules above as the finders after it would, and has them loaded differently."""

    def __init__(self) -> None:
        self._left = set(HOW_TO_LOAD)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        if package in HOW_TO_LOAD and name not in WITHOUT_THE_REST:
            load(sys.modules[package])
        if name not in self._left:
            return None
        import importlib.util

        self._left.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = LoadDifferently(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
