"""A batch on its way: its tensors packed into one buffer, sent between processes, and copied to the device in advance.

Note [One buffer]
For each tensor that torch sends from a loader process to the training process it makes a piece of shared memory and a
handshake: 0.35 ms, most of it in the training process. Eight shards of two tensors are 16. So all plain tensors of a
batch are packed into one flat buffer, and only that is sent, pinned, and copied to the GPU; unpacked tensors are views
of it. The buffer has no name in any file system (memfd): torch's own shared memory has a temporary one in /dev/shm, and
a process that is killed at that moment leaves it there.

Note [Descriptor channels]
multiprocessing sends a descriptor with a thread in the sending process, a socket in the file system and a handshake:
0.35 ms each, and a process that is killed meanwhile leaves a folder in /tmp. Here a loader process sends its
descriptors, numbered, through a socket pair before it sends the batch; the process that receives the batch reads them
there. Descriptors of a batch that was never sent (it could not be pickled) are closed when the next one is read.

Note [Prefetching to a GPU]
While the GPU works on a batch, the next one is copied on a separate stream. The host never waits for the whole device:
the consumer's stream waits for the event of the copy, and only when the batch is returned. The memory of the batch
comes from the pool of the copy stream; `record_stream` keeps it from being reused before the consumer's stream is done
with it. Only plain tensors are copied this way. What an object does in its own `to()` is not known, so `to()` is called
when the batch is returned, on the consumer's stream.
"""

from __future__ import annotations

import copy
import math
import os
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep import _torch

ALIGN_BYTES: Final = 512  # alignment of torch's GPU allocator: kernels get views as well aligned as tensors
_NO_TENSORS_INSIDE: Final = (str, bytes, int, float, complex, type, type(None))


@dataclass(frozen=True)
class _Piece:
    """Replaces a tensor in the structure: its place in the flat buffer, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        return flat[self.start : self.start + size_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedBatch:
    """Any structure whose plain tensors were moved into `flat` (None: they are still in the structure)."""

    content: Any
    flat: Tensor | None = None
    handle: int | None = None  # memfd of `flat`, open until the batch is sent

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for sending: the loader process that packed the batch does that once, which closes `handle`."""
        if self.handle is None or self.flat is None or _own_channel is None:
            return PackedBatch, (self.content, self.flat)
        label = _own_channel.send(self.handle)
        os.close(self.handle)
        object.__setattr__(self, "handle", None)
        return _receive_batch, (self.content, _own_channel.number, label, self.flat.nbytes)

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
    if isinstance(data, list | tuple):
        items = [map_leaves(item, change) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        if isinstance(data, tuple):
            return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
        twin: Any = copy.copy(data)
        twin[:] = items
        return twin
    if isinstance(data, dict):
        values = data
    elif is_dataclass(data):
        values = {f.name: getattr(data, f.name) for f in fields(data) if hasattr(data, f.name)}
    else:
        return data
    changed = {name: map_leaves(value, change) for name, value in values.items()}
    if all(changed[name] is value for name, value in values.items()):
        return data
    twin = copy.copy(data)  # not type(data)(...): a defaultdict, for example, is not constructed from items
    if isinstance(data, dict):
        twin.update(changed)
        return twin
    for name, value in changed.items():
        object.__setattr__(twin, name, value)  # works for frozen ones, and does not call __post_init__ again
    return twin


# ---- between processes: see Note [Descriptor channels] ---------------------------------------------------------------

_RECEIVE_TIMEOUT_S: Final = 60.0  # never reached normally: a descriptor is sent before the batch that needs it
_LABEL: Final = struct.Struct("<Q")
_numbers = count()
_receivers: dict[int, socket.socket] = {}  # receiving ends of the channels that this process created, by number
_own_channel: FdChannel | None = None  # in a loader process: the channel through which it sends


@final
class FdChannel:
    """A channel from a loader process to the process that creates it, which does so before it starts the loader."""

    def __init__(self) -> None:
        self.number, self._sent = next(_numbers), 0
        receiver, self._sender = socket.socketpair()
        receiver.settimeout(_RECEIVE_TIMEOUT_S)
        _receivers[self.number] = receiver

    def send(self, handle: int) -> int:
        """Send a descriptor and return its label, for `receive_fd`. The caller may close `handle` afterwards."""
        self._sent += 1
        socket.send_fds(self._sender, [_LABEL.pack(self._sent)], [handle])
        return self._sent

    def close(self) -> None:
        """Called by the process that created the channel. Descriptors that were not received are closed."""
        _receivers.pop(self.number).close()
        self._sender.close()


def set_own_channel(channel: FdChannel) -> None:
    """Make this loader process send its descriptors through `channel`."""
    global _own_channel
    _own_channel = channel


def receive_fd(number: int, label: int) -> int:
    """Return the descriptor with this label from channel `number`. The caller closes it.

    Raises ConnectionError if it is missing.
    """
    while True:
        data, handles, _, _ = socket.recv_fds(_receivers[number], _LABEL.size, 1)
        found = _LABEL.unpack(data)[0] if len(data) == _LABEL.size else None
        if found == label and handles:
            return handles[0]
        for handle in handles:
            os.close(handle)
        if found is None or found >= label:
            raise ConnectionError(f"memory {label} of a loader process is missing, and {found} came")


def _receive_batch(content: Any, channel: int, label: int, size_bytes: int) -> PackedBatch:
    handle = receive_fd(channel, label)
    try:
        return PackedBatch(content, _map(handle, size_bytes))
    finally:
        os.close(handle)


# ---- to the device ---------------------------------------------------------------------------------------------------


def prefetch_to_device(batches: Generator[PackedBatch, None, None], device: torch.device) -> Generator[Any, None, None]:
    """Yield the batches, unpacked and on the device. Closes `batches` at the end."""
    with closing(batches):
        if device.type == "cuda":
            yield from _prefetch_to_gpu(batches, device)
        else:
            for packed in batches:
                yield move_to_device(device, packed.unpack())


def move_to_device(device: torch.device, content: Any) -> Any:
    """Copy to the device now, on the current stream."""
    return content if device.type == "cpu" else map_leaves(content, lambda leaf: leaf.to(device))


@dataclass(frozen=True)
class _PendingCopy:
    batch: PackedBatch  # on the GPU
    copied: torch.cuda.Event


def _prefetch_to_gpu(batches: Generator[PackedBatch, None, None], device: torch.device) -> Generator[Any, None, None]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pending = _start_copy(next(batches, None), stream)
    while pending is not None:
        # The copy of the next batch starts before this batch is returned. If the next one is not loaded yet, this waits
        # for it: loaders that keep up have loaded it, and with slower ones training would wait for it anyway.
        current, pending = pending, _start_copy(next(batches, None), stream)
        yield _finish_copy(current, device)


def _start_copy(packed: PackedBatch | None, stream: torch.cuda.Stream) -> _PendingCopy | None:
    if packed is None:
        return None

    def copy_leaf(leaf: Any) -> Any:
        return leaf.to(stream.device, non_blocking=True) if is_plain(leaf) else leaf

    with torch.cuda.stream(stream):
        flat = None if packed.flat is None else copy_leaf(packed.flat)
        on_gpu = PackedBatch(map_leaves(packed.content, copy_leaf), flat)
        return _PendingCopy(on_gpu, stream.record_event())


def _finish_copy(pending: _PendingCopy, device: torch.device) -> Any:
    consumer = torch.cuda.current_stream(device)
    consumer.wait_event(pending.copied)

    def hand_over(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf.to(device)
        leaf.record_stream(consumer)
        return leaf

    return map_leaves(pending.batch.unpack(), hand_over)
