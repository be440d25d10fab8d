"""Buffers that are used for a short time, and kept for reuse: page faults are expensive."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor


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
                self._free[capacity].append(
                    torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
                )


def _capacity_bytes(size_bytes: int) -> int:
    """Round up to a power of two, so that few sizes occur."""
    return 1 << max(12, (size_bytes - 1).bit_length())


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
