"""A base class for process groups in Python that leave some operations to a backend of torch.

Note [Interpreter lock]
If a method of `dist.ProcessGroup` is not overridden in a Python subclass, torch runs its own while it holds the
interpreter's lock. Gloo may then wait for a mutex that one of its threads holds while it frees a completed collective.
If that collective has the last reference to a tensor of Python's, the thread waits for the interpreter's lock: a
deadlock. So such methods are called on a second group, which is no subclass: there torch releases the lock first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch

# Torch's stub files have other overloads in every version, so the type checker sees `Any`.
_ProcessGroup: Any = dist.ProcessGroup


def _by_fallback(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(self.fallback, name)(*args, **options)


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

    allgather_coalesced, gather, scatter = map(_by_fallback, ("allgather_coalesced", "gather", "scatter"))
    alltoall, alltoall_base, all_to_all_single = map(_by_fallback, ("alltoall", "alltoall_base", "all_to_all_single"))
    send, recv, recv_anysource = map(_by_fallback, ("send", "recv", "recv_anysource"))
