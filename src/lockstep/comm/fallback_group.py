"""A base class for process groups in Python that leave some operations to a backend of torch.

Note [Interpreter lock]
If a subclass in Python does not override a method such as `alltoall_base`, `send` or `recv`, torch runs its own while
it holds the interpreter's lock (`PyProcessGroup`). Gloo may then wait for a mutex that one of its threads holds while
it frees a completed collective. If that collective has the last reference to a tensor of Python's, the thread waits for
the interpreter's lock: a deadlock. So such methods are called on a second group, which is no subclass: there torch
releases the lock first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch

# Torch's stub files have other overloads in every version, so the type checker sees `Any`.
_ProcessGroup: Any = dist.ProcessGroup


class FallbackGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose subclass implements some of the operations; `fallback` runs the others.

    `fallback` also has torch's versions of the operations that are overridden.
    """

    def __init__(self, store: _torch.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.fallback: Any = dist.ProcessGroup(store, rank, size)

    def set_default_backend(self, backend_type: Any) -> None:
        for group in (self, self.fallback):
            group._set_default_backend(backend_type)

    def register_fallback(self, backend: Any, device_type: str, backend_type: Any) -> None:
        """Let a backend run the operations of the fallback on tensors of this type of device."""
        for group in (self, self.fallback):
            group._register_backend(torch.device(device_type), backend_type, backend)


def _run_by_fallback(name: str) -> None:
    def call(self: FallbackGroup, *args: Any, **options: Any) -> Any:
        return getattr(self.fallback, name)(*args, **options)

    call.__name__ = name
    setattr(FallbackGroup, name, call)


for _name in (
    *("allgather_coalesced", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("alltoall", "alltoall_base", "all_to_all_single"),  # the last is the name of the second since torch 2.13
):
    _run_by_fallback(_name)
