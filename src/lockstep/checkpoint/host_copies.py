"""A copy of a state in host memory, in buffers that are kept from one save to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Copies:
    """Room for one state. What `take` returned is valid until the next `take`."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """When this returns, the tensors may be changed. From a GPU it waits for the copies, and for nothing later.

        Raises MemoryError if there is no room.
        """
        # What does not fit any more is given back before anything new is asked for.
        kept = {name: buffer for name, buffer in self._buffers.items() if _fits(buffer, tensors.get(name))}
        self._buffers = kept
        for name, tensor in tensors.items():
            if name not in kept:
                kept[name] = _host_memory(tensor)
        with torch.no_grad():
            for name, tensor in tensors.items():
                kept[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(device))
            copied.synchronize()
        return {name: kept[name] for name in tensors}

    def drop(self) -> None:
        self._buffers = {}


def _fits(buffer: Tensor, tensor: Tensor | None) -> bool:
    return tensor is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _host_memory(tensor: Tensor) -> Tensor:
    """Contiguous; page-locked for what comes from a GPU, as long as the system has such memory."""
    for pin_memory in (True, False) if tensor.is_cuda else (False,):
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    raise MemoryError(reason)
