"""A batch on its way: through nested structures, and between processes in one piece of memory.

Note [One piece]
Each tensor that torch sends from a loader process to this one is a piece of shared memory and a handshake of its own:
0.35 ms, most of it on the training process. Eight shards of two tensors are 16. So all plain tensors of a batch are
laid into one flat buffer, and only that one travels (hatch.py), is pinned, and is copied to the GPU. What comes out are
views of it. The buffer has no name anywhere (memfd): torch's own shared memory has one in /dev/shm for a moment, and a
process that is killed in that moment leaves it there for ever.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.data import fd_channel

ALIGN_BYTES: Final = 512  # as torch's GPU allocator aligns, so no kernel finds a view less aligned than a tensor
_NO_TENSORS_INSIDE: Final = (str, bytes, int, float, complex, type, type(None))


@dataclass(frozen=True)
class _Piece:
    """Stands where a tensor was taken out: where it lies in the flat buffer, and what it is."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        count = 1
        for length in self.shape:
            count *= length
        return flat[self.start : self.start + count * self.dtype.itemsize].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Parcel:
    """Any structure, with its plain tensors taken out into `flat` (None: they are still in it)."""

    content: Any
    flat: Tensor | None = None
    handle: int | None = None  # of the memory of `flat`, until it is sent

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent once, by the loader that packed it."""
        way = fd_channel.own()
        if self.handle is None or self.flat is None or way is None:
            return Parcel, (self.content, self.flat)
        label = way.put(self.handle)
        os.close(self.handle)
        object.__setattr__(self, "handle", None)
        return _receive, (self.content, way.number, label, self.flat.nbytes)

    def pin_memory(self) -> Parcel:
        """For torch's DataLoader, which calls it, in a thread of its own if there are loader processes."""
        return Parcel(over(self.content, _pin), None if self.flat is None else self.flat.pin_memory())

    def open(self) -> Any:
        flat = self.flat
        if flat is None:
            return self.content
        return over(self.content, lambda leaf: leaf.view(flat) if isinstance(leaf, _Piece) else leaf)


def pack(content: Any) -> Parcel:
    """All plain tensors laid into one buffer that other processes can map."""
    taken: list[tuple[_Piece, Tensor]] = []
    size_bytes = 0

    def take(leaf: Any) -> Any:
        nonlocal size_bytes
        # Another memory format than the usual one would be lost: such a tensor travels on its own.
        if not (is_plain(leaf) and leaf.device.type == "cpu" and leaf.is_contiguous()):
            return leaf
        piece = _Piece(size_bytes, leaf.dtype, tuple(leaf.shape))
        taken.append((piece, leaf))
        size_bytes += -(-leaf.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return piece

    rest = over(content, take)
    if not taken:
        return Parcel(rest)
    # Shared from the start, as torch's own collate has it: ordinary memory would be copied once more when it is sent.
    flat, handle = _share(size_bytes)
    for piece, tensor in taken:
        piece.view(flat).copy_(tensor)
    return Parcel(rest, flat, handle)


def _share(size_bytes: int) -> tuple[Tensor, int | None]:
    if size_bytes == 0 or not hasattr(os, "memfd_create"):
        shared = torch.UntypedStorage._new_shared(size_bytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8).set_(shared), None
    handle = os.memfd_create("lockstep-batch")
    os.ftruncate(handle, size_bytes)
    return _map(handle, size_bytes), handle


def _map(handle: int, size_bytes: int) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size_bytes, dtype=torch.uint8)


def _receive(content: Any, way: int, label: int, size_bytes: int) -> Parcel:
    handle = fd_channel.take(way, label)
    try:
        return Parcel(content, _map(handle, size_bytes))
    finally:
        os.close(handle)


def _pin(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.pin_memory() if is_plain(leaf) and leaf.device.type == "cpu" else leaf
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def is_plain(leaf: Any) -> bool:
    """A tensor that is nothing but its numbers: no subclass, no gradient, not sparse, not nested, no lazy conjugate."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized or leaf.is_conj() or leaf.is_neg())
    )


def over(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, with `change` applied to its leaves: tensors, and whatever else has a method `to`.

    An object with `to` is a leaf even if it is a tuple or a dataclass: it knows best which of its parts move (those of
    a PackedSequence do not all). Containers in which nothing changed are kept, others copied: `data` stays as it is.
    """
    if isinstance(data, _NO_TENSORS_INSIDE):
        return data
    if isinstance(data, Tensor | _Piece) or callable(getattr(data, "to", None)):
        return change(data)
    twin: Any
    if isinstance(data, dict):
        changed = {key: over(value, change) for key, value in data.items()}
        if all(changed[key] is value for key, value in data.items()):
            return data
        twin = copy.copy(data)  # not type(data)(...): a defaultdict, say, is not made from items
        twin.update(changed)
        return twin
    if isinstance(data, list | tuple):
        items = [over(item, change) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        if isinstance(data, list):
            twin = copy.copy(data)
            twin[:] = items
            return twin
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if is_dataclass(data):
        values = {f.name: getattr(data, f.name) for f in fields(data) if hasattr(data, f.name)}
        changed = {name: over(value, change) for name, value in values.items()}
        if all(changed[name] is value for name, value in values.items()):
            return data
        twin = copy.copy(data)
        for name, value in changed.items():
            object.__setattr__(twin, name, value)  # frozen ones too, and no __post_init__ once more
        return twin
    return data
