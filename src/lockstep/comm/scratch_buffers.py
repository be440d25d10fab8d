"""Buffers that are used for a short time, and kept for reuse: page faults are expensive."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.errors import SharedMemoryFullError


class ScratchBuffers:
    """Lends buffers for pending collectives, and keeps them for reuse."""

    KEEP = 8  # buffers of each size

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def acquire(self, numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return torch.empty(numel, dtype=like.dtype, device=like.device)  # torch caches this memory itself
        capacity = _capacity_bytes(numel * like.itemsize)
        with self._lock:
            free = self._free.setdefault(capacity, [])
            buffer = free.pop() if free else torch.empty(capacity, dtype=torch.uint8, device="cpu")
        return buffer[: numel * like.itemsize].view(like.dtype)

    def release(self, tensor: Tensor) -> None:
        """Return a buffer that is no longer used."""
        if tensor.device.type != "cpu":
            return
        capacity = _capacity_bytes(tensor.nbytes)
        with self._lock:
            if len(self._free[capacity]) < self.KEEP:
                self._free[capacity].append(_whole(tensor))


def _whole(part: Tensor) -> Tensor:
    """Return the bytes of the buffer of which this is the beginning."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(part.untyped_storage())


def _capacity_bytes(size_bytes: int) -> int:
    """Round up to a power of two, so that few sizes occur."""
    return 1 << max(12, (size_bytes - 1).bit_length())


class SharedBuffers:
    """Buffers of bytes in the memory of a group, which its other workers read where they are.

    A released buffer is used again after the next `share`: then all workers have read it. All workers acquire, share
    and release buffers of the same sizes in the same order.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._free: dict[int, list[Tensor]] = {}
        self._released: list[Tensor] = []

    def acquire(self, size: int) -> Tensor:
        capacity = _capacity_bytes(size)
        if free := self._free.get(capacity):
            return free.pop()[:size]
        try:
            found: Tensor = self._group.allocate_tensor(capacity, dtype=torch.uint8, device="cpu")
        except SharedMemoryFullError:  # then `share` says so, on all workers
            found = torch.empty(capacity, dtype=torch.uint8, device="cpu")
        return found[:size]

    def share(self, buffer: Tensor) -> list[Tensor]:
        """Wait until all workers have written their buffers, and return them by rank; none if one is not shared."""
        released, self._released = self._released, []
        found: list[Tensor] = self._group.share(buffer)
        for one in released:
            self._free.setdefault(_capacity_bytes(len(one)), []).append(_whole(one))
        return found

    def release(self, buffer: Tensor) -> None:
        self._released.append(buffer)


_shared_buffers: weakref.WeakKeyDictionary[Any, SharedBuffers] = weakref.WeakKeyDictionary()


def shared_buffers(group: Any) -> SharedBuffers:
    """Return those of a group: one for all who use it, since another worker may still read what was released last."""
    found = _shared_buffers.get(group)
    if found is None:
        found = _shared_buffers[group] = SharedBuffers(weakref.proxy(group))
    return found


class ScratchScope:
    """Lends buffers, and takes them back at the end of the block."""

    def __init__(self, buffers: ScratchBuffers, device: torch.device) -> None:
        self._buffers, self._device, self._lent = buffers, device, list[Tensor]()

    def empty(self, dtype: torch.dtype, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        like = torch.empty(0, dtype=dtype, device=device or self._device)
        self._lent.append(self._buffers.acquire(math.prod(shape), like))
        return self._lent[-1].view(shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for buffer in self._lent:
            self._buffers.release(buffer)
