"""Makes workers agree: compares small values across them, gathers values that differ, and broadcasts tensors.

To compare and to gather, only all-reduce is used, which every process group has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import _torch
from lockstep.comm import abortable_wait

MESSAGE_BYTES = 250 * 1024 * 1024
MAX_PADDING = 1.5  # bytes that are gathered over those that are needed: broadcasts take twice as long between hosts


def fingerprint(value: Any) -> int:
    """Return a 62-bit hash of a JSON value; equal in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def all_equal(group: dist.ProcessGroup, number: int, *, device: torch.device) -> bool:
    """Whether every worker passed the same number."""
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    abortable_wait.wait(group, group.allreduce([both], options), device, "a comparison")
    highest, negated_lowest = both.tolist()
    return bool(highest == -negated_lowest)


def gather_rows(group: dist.ProcessGroup, row: list[int], *, device: torch.device) -> list[list[int]]:
    """Return the row of integers of every worker, by rank. All rows must have the same length."""
    table = torch.zeros(group.size(), len(row), dtype=torch.int64, device=device)
    table[group.rank()] = torch.tensor(row, dtype=torch.int64)
    _add_up(group, table)
    rows: list[list[int]] = table.tolist()
    return rows


def gather_values(group: dist.ProcessGroup, value: Any, *, device: torch.device) -> list[Any]:
    """Return the JSON value of every worker, by rank. Slow: meant for error messages and set-up."""
    text = json.dumps(value).encode()
    lengths = [length for (length,) in gather_rows(group, [len(text)], device=device)]
    table = torch.zeros(group.size(), max(lengths), dtype=torch.int32, device=device)
    table[group.rank(), : len(text)] = torch.tensor(list(text), dtype=torch.int32, device=device)
    _add_up(group, table)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(table, lengths, strict=True)]


def _add_up(group: dist.ProcessGroup, table: Tensor) -> None:
    abortable_wait.wait(group, group.allreduce([table], dist.AllreduceOptions()), table.device, "an exchange of words")


@dataclass(frozen=True)
class _Message:
    """A buffer of bytes and, for each tensor in it, the tensor's index in the list and a view of its part."""

    flat: Tensor
    numbers: tuple[int, ...]
    views: tuple[Tensor, ...]


def is_even(sizes: Sequence[int]) -> bool:
    """Whether workers that have so many bytes each should gather them. A gather sends as much from each worker as the
    largest one has; otherwise each broadcasts its own."""
    return len(sizes) * max(sizes) <= MAX_PADDING * sum(sizes)


class Broadcast:
    """Broadcasts a list of tensors as bytes, so that tensors of all dtypes share a message.

    With `keep`, the message buffers are reused by later calls with tensors of the same shapes, such as the buffers of
    batch norm in every step.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._shapes: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._messages: list[_Message] = []

    def __call__(
        self,
        group: dist.ProcessGroup,
        tensors: Sequence[Tensor],
        *,
        source: int = 0,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """Overwrite every tensor with its values on rank `source` of the group. Returns when they have arrived."""
        tensors = [t.detach() for t in tensors]
        shapes = [(t.shape, t.dtype, t.device) for t in tensors]
        if shapes != self._shapes or not self._messages:
            self._messages = _lay_out(tensors, message_bytes)
            self._shapes = shapes
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        is_source = group.rank() == source
        works = []
        for message in self._messages:
            if is_source:
                _torch.foreach_copy_(list(message.views), [tensors[n] for n in message.numbers])
            works.append(group.broadcast([message.flat], options))
        for message, work in zip(self._messages, works, strict=True):
            abortable_wait.wait(group, work, message.flat.device, "a broadcast of state")
            if not is_source:
                _torch.foreach_copy_([tensors[n] for n in message.numbers], list(message.views))
        if not self._keep:
            self._messages = []


def _lay_out(tensors: Sequence[Tensor], message_bytes: int) -> list[_Message]:
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(number)
    messages = []
    for device, numbers in by_device.items():
        # Wide elements come first, so that every tensor begins at a multiple of its own element size.
        numbers = sorted(numbers, key=lambda n: -tensors[n].element_size())
        batch, size = list[int](), 0
        for n in numbers:
            if batch and size + tensors[n].nbytes > message_bytes:
                messages.append(_message(tensors, batch, device))
                batch, size = [], 0
            batch.append(n)
            size += tensors[n].nbytes
        messages.append(_message(tensors, batch, device))
    return messages


def _message(tensors: Sequence[Tensor], numbers: Sequence[int], device: torch.device) -> _Message:
    flat = torch.empty(sum(tensors[n].nbytes for n in numbers), dtype=torch.uint8, device=device)
    views, at = [], 0
    for n in numbers:
        tensor = tensors[n]
        views.append(flat[at : (at := at + tensor.nbytes)].view(tensor.dtype).view(tensor.shape))
    return _Message(flat, tuple(numbers), tuple(views))
