"""Registers Lockstep's backends with torch.distributed as soon as that is imported, without importing it.

`import lockstep` must be enough to use `init_process_group("shm")`, and must not load torch: the launcher and
`lockstep --help` start without it. So if torch is not loaded yet, an import hook does it later, and everything else is
imported on demand. The same holds for torch's compiler, which must not trace into Lockstep's process groups.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import importlib.abc  # at run time it would load twenty modules in every process
    from datetime import timedelta

    import torch
    import torch.distributed as dist


def register_backends() -> None:
    """Register the backends now, or when torch is imported."""
    # (module, an attribute that exists once the module is complete, action after its import)
    for name, attribute, action in (
        ("torch.distributed", "Backend", _register),
        ("torch._dynamo.trace_rules", "add", _disable_tracing),
    ):
        if hasattr(sys.modules.get(name), attribute):
            action()
        else:
            sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook:
    """Runs an action after the import of one module, and then removes itself. Does not affect other modules."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _LoaderWithAction(spec.loader, self._action))
        return spec


class _LoaderWithAction:
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._action()


def _disable_tracing() -> None:
    sys.modules["torch._dynamo.trace_rules"].add("lockstep.comm")


def _register() -> None:
    """Make `init_process_group("shm")` and `("hierarchy")` work. Calling it again has no effect."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if "shm" in dist.Backend.backend_list:
        return
    for name, create in (("shm", _create_shm), ("hierarchy", _create_hierarchy)):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        from lockstep import _torch  # only now is torch.distributed complete

        own: Any = _torch.get_default_group() if group is None else group
        if not is_lockstep_group(own):
            original(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
        else:
            own.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    # Torch's function rejects every backend but Gloo without calling the group.
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _create_shm(made: Any, options: Any) -> dist.ProcessGroup:
    """Create an shm group. A subgroup gets the processes of its members from the default group, if that is shm too."""
    import torch.distributed as dist

    from lockstep.errors import PeerLostError
    from lockstep.world.rendezvous import NO_PROCESSES, JoinRegistry, KnownProcesses

    ranks = made.global_ranks_in_group or range(made.group_size)
    whole: Any = dist.group.WORLD if made.global_ranks_in_group else None
    known = options.processes if isinstance(options, KnownProcesses) else getattr(whole, "processes", NO_PROCESSES)
    try:
        registry = JoinRegistry(made.store, made.group_rank, ranks, known)

        from lockstep.comm.shm import ShmGroup  # a slow import, so this worker registers before it

        return ShmGroup(made.store, made.group_rank, made.group_size, made.timeout, registry=registry)
    except PeerLostError as error:
        raise (whole.fail_if_dead(error) if hasattr(whole, "fail_if_dead") else error) from None


def _create_hierarchy(made: Any, options: Any) -> dist.ProcessGroup:
    from lockstep.comm.hierarchy import HierarchicalGroup, HierarchyOptions

    wanted = HierarchyOptions.from_environment(made.global_ranks_in_group)
    group: dist.ProcessGroup = HierarchicalGroup(
        made.store, made.group_rank, made.group_size, made.timeout, options=wanted
    )
    return group


def is_lockstep_group(group: dist.ProcessGroup) -> bool:
    """Whether this is one of Lockstep's groups. Unlike other groups written in Python, their works can be relied on."""
    return type(group).__module__.startswith("lockstep.")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend for tensors of this device: "shm", "hierarchy", "gloo", "nccl"."""
    own: Any = group
    if is_lockstep_group(group) and own.getBackendName() == "hierarchy":
        return "hierarchy"  # `_get_backend` would return its internal Gloo backend
    return str(group._get_backend(device).name()).lower()
