"""A batch whose tensors are packed into one buffer, for sending it between processes and to a GPU.

Note [One buffer]
For each tensor that torch sends from a loader process to the training process it makes a piece of shared memory and a
handshake: 0.35 ms, most of it in the training process. Eight shards of two tensors are 16. So all plain tensors of a
batch are packed into one flat buffer, and only that is sent (fd_channel.py), pinned, and copied to the GPU; unpacked
tensors are views of it. The buffer has no name in any file system (memfd): torch's own shared memory has a temporary
one in /dev/shm, and a process that is killed at that moment leaves it there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.data import fd_channel

ALIGN_BYTES: Final = 512  # alignment of torch's GPU allocator: kernels get views as well aligned as tensors
_NO_TENSORS_INSIDE: Final = (str, bytes, int, float, complex, type, type(None))


@dataclass(frozen=True)
class _Piece:
    """Replaces a tensor in the structure: its place in the flat buffer, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        count = 1
        for length in self.shape:
            count *= length
        return flat[self.start : self.start + count * self.dtype.itemsize].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedBatch:
    """Any structure whose plain tensors were moved into `flat` (None: they are still in the structure)."""

    content: Any
    flat: Tensor | None = None
    handle: int | None = None  # memfd of `flat`, open until the batch is sent

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for sending: the loader process that packed the batch does that once, which closes `handle`."""
        channel = fd_channel.own_channel()
        if self.handle is None or self.flat is None or channel is None:
            return PackedBatch, (self.content, self.flat)
        label = channel.send(self.handle)
        os.close(self.handle)
        object.__setattr__(self, "handle", None)
        return _receive, (self.content, channel.number, label, self.flat.nbytes)

    def pin_memory(self) -> PackedBatch:
        """Called by torch's DataLoader; with loader processes, in a thread of its own."""
        return PackedBatch(map_leaves(self.content, _pin), None if self.flat is None else self.flat.pin_memory())

    def unpack(self) -> Any:
        """Return the structure with its tensors, which are views of `flat`."""
        flat = self.flat
        if flat is None:
            return self.content
        return map_leaves(self.content, lambda leaf: leaf.view(flat) if isinstance(leaf, _Piece) else leaf)


def pack(content: Any) -> PackedBatch:
    """Copy all plain tensors of a structure into one buffer that other processes can map."""
    packed: list[tuple[_Piece, Tensor]] = []
    size_bytes = 0

    def replace(leaf: Any) -> Any:
        nonlocal size_bytes
        # Packing would lose a memory format such as channels_last: such a tensor is sent on its own.
        if not (is_plain(leaf) and leaf.device.type == "cpu" and leaf.is_contiguous()):
            return leaf
        piece = _Piece(size_bytes, leaf.dtype, tuple(leaf.shape))
        packed.append((piece, leaf))
        size_bytes += -(-leaf.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return piece

    rest = map_leaves(content, replace)
    if not packed:
        return PackedBatch(rest)
    # Shared memory from the start, as in torch's own collate: other memory would be copied once more when it is sent.
    flat, handle = _new_shared(size_bytes)
    for piece, tensor in packed:
        piece.view(flat).copy_(tensor)
    return PackedBatch(rest, flat, handle)


def _new_shared(size_bytes: int) -> tuple[Tensor, int | None]:
    if size_bytes == 0 or not hasattr(os, "memfd_create"):
        shared = _torch.new_shared_storage(size_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(shared), None
    handle = os.memfd_create("lockstep-batch")
    os.ftruncate(handle, size_bytes)
    return _map(handle, size_bytes), handle


def _map(handle: int, size_bytes: int) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size_bytes, dtype=torch.uint8)


def _receive(content: Any, channel: int, label: int, size_bytes: int) -> PackedBatch:
    handle = fd_channel.receive(channel, label)
    try:
        return PackedBatch(content, _map(handle, size_bytes))
    finally:
        os.close(handle)


def _pin(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.pin_memory() if is_plain(leaf) and leaf.device.type == "cpu" else leaf
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def is_plain(leaf: Any) -> bool:
    """Whether this is a dense torch.Tensor: no subclass, no gradient, not sparse, not nested, no lazy conjugate."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized or leaf.is_conj() or leaf.is_neg())
    )


def map_leaves(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with `change` applied to its leaves: tensors, and other objects with a method `to`.

    An object with `to` is a leaf even if it is a tuple or a dataclass, because not all of its parts may move (as in a
    PackedSequence). `data` is not modified: containers in which something changed are copied, the others are reused.
    """
    if isinstance(data, _NO_TENSORS_INSIDE):
        return data
    if isinstance(data, Tensor | _Piece) or callable(getattr(data, "to", None)):
        return change(data)
    twin: Any
    if isinstance(data, dict):
        changed = {key: map_leaves(value, change) for key, value in data.items()}
        if all(changed[key] is value for key, value in data.items()):
            return data
        twin = copy.copy(data)  # not type(data)(...): a defaultdict, for example, is not constructed from items
        twin.update(changed)
        return twin
    if isinstance(data, list | tuple):
        items = [map_leaves(item, change) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        if isinstance(data, list):
            twin = copy.copy(data)
            twin[:] = items
            return twin
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if is_dataclass(data):
        values = {f.name: getattr(data, f.name) for f in fields(data) if hasattr(data, f.name)}
        changed = {name: map_leaves(value, change) for name, value in values.items()}
        if all(changed[name] is value for name, value in values.items()):
            return data
        twin = copy.copy(data)
        for name, value in changed.items():
            object.__setattr__(twin, name, value)  # works for frozen ones, and does not call __post_init__ again
        return twin
    return data
