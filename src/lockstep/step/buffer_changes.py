"""What changes in the buffers of a model in a step, and how the new values are written into the table of a step.

Note [Norm layers together]
Most buffers are those of batch norm: a model has some hundred of them, of a few numbers each. The running averages that
the same shards have changed are one matrix at the head of the table, with a row for each shard, followed by the
counters of batches, so that they are exchanged, averaged and written with a few calls for all of them. The layout
depends only on what all workers know: which shards have changed which buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.step.buffer_snapshot import BufferPlace, BufferValue, Gone, Owner, WriteDetection, bytes_of

WORD_BYTES: Final = 4


@dataclass(frozen=True)
class BufferKind:
    """Description of a buffer without its values, which can be sent as JSON."""

    dtype: str | None  # None: it has no tensor
    shape: tuple[int, ...] = ()
    is_persistent: bool = True
    is_gone: bool = False
    is_on_host: bool = False

    @property
    def words(self) -> int:
        """Number of table cells for the bytes of the buffer. See Note [One table]."""
        if self.dtype is None:
            return 0
        return -(-math.prod(self.shape) * self.torch_dtype.itemsize // WORD_BYTES)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, str(self.dtype))
        assert isinstance(found, torch.dtype)
        return found

    @staticmethod
    def of(value: BufferValue, *, is_persistent: bool) -> BufferKind:
        if not isinstance(value, Tensor):
            return BufferKind(None, (), is_persistent, is_gone=value is Gone.GONE)
        dtype = str(value.dtype).removeprefix("torch.")
        return BufferKind(dtype, tuple(value.shape), is_persistent, is_on_host=value.device.type == "cpu")


@dataclass(frozen=True)
class BufferChange:
    """A buffer that gets a value in this step: from one shard, or as the mean over several."""

    owner: Owner
    key: str
    kind: BufferKind
    shards: tuple[int, ...]
    place: BufferPlace | None  # its tensor is written in place; None: the buffer becomes a new tensor
    averages: bool = False

    @cached_property
    def name(self) -> str:
        return self.owner.name_of(self.key)

    @property
    def device(self) -> torch.device | None:
        """That of the tensor that is written in place."""
        return None if self.place is None or self.place.tensor is None else self.place.tensor.device

    @property
    def width(self) -> int:
        """Number of cells in the table. See Note [One table]."""
        return len(self.shards) * math.prod(self.kind.shape) if self.averages else self.kind.words


@dataclass(frozen=True)
class NewBuffer:
    """A buffer and its value after the step."""

    change: BufferChange
    value: BufferValue


@dataclass(frozen=True)
class NewNumber:
    """An attribute beside a buffer, and its value after the step."""

    owner: Owner
    key: str
    value: Any


@dataclass(frozen=True)
class NormLayers:
    """Changes of buffers of batch norm that are exchanged together. See Note [Norm layers together].

    averages  running averages in float32; all were changed by the same shards
    counters  counters of batches, which were changed by the same shards
    """

    averages: list[BufferChange]
    counters: list[BufferChange]

    @staticmethod
    def split(changes: Sequence[BufferChange]) -> tuple[NormLayers, list[BufferChange]]:
        """Return the changes that fit together, and the others. The same on all workers."""
        averages, counters, others = list[BufferChange](), list[BufferChange](), list[BufferChange]()
        for change in changes:
            place, group = change.place, others
            if place is not None and place.tensor is not None and change.kind.dtype is not None:
                dtype, dim = place.tensor.dtype, len(change.kind.shape)
                if place.is_norm_average and change.averages and dtype is torch.float32 and dim == 1:
                    group = averages
                elif place.detection is WriteDetection.NORM_COUNTER and dtype is torch.int64 and dim == 0:
                    group = counters
            first = group[0] if group and group is not others else change
            is_alike = first.device == change.device and first.shards == change.shards
            (group if is_alike else others).append(change)
        return NormLayers(averages, counters), others

    @property
    def width(self) -> int:
        """Number of cells at the head of the table."""
        return sum(change.width for change in (*self.averages, *self.counters))

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of elements of the averages."""
        return [math.prod(change.kind.shape) for change in self.averages]

    def _rows(self, head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the averages [shard, element] and the words of the counters."""
        shards, cells = len(self.averages[0].shards) if self.averages else 0, sum(self.sizes)
        return head[: shards * cells].view(shards, cells), head[shards * cells :]

    def fill(self, head: Tensor, averages: Mapping[int, Tensor], counters: Mapping[int, Tensor]) -> None:
        """Write what the shards of this worker have changed: by shard, all averages and all counters."""
        rows, words = self._rows(head)
        own = [n for n, shard in enumerate(self.averages[0].shards if self.averages else ()) if shard in averages]
        if own:  # consecutive: the others were run by other workers
            rows[own[0] : own[-1] + 1].copy_(torch.stack([averages[self.averages[0].shards[n]] for n in own]))
        if self.counters and self.counters[0].shards[0] in counters:
            words.copy_(counters[self.counters[0].shards[0]].view(torch.int32))

    def read(self, head: Tensor, counts: Sequence[int]) -> NewNorms:
        """Return the values after the step: means over the shards, weighted by their samples, and counters."""
        rows, words = self._rows(head)
        mean = head.new_zeros(sum(self.sizes))
        if self.averages:
            shards = self.averages[0].shards
            weight = sum(counts[s] for s in shards)
            for row in _torch.foreach_mul(rows.unbind(), [counts[s] / weight for s in shards]):
                mean += row
        found = words.to(torch.int32).view(torch.int64)
        is_on_host = bool(self.counters) and self.counters[0].kind.is_on_host
        return NewNorms(self, mean.to(torch.float32), found.cpu() if is_on_host else found)


@dataclass(frozen=True)
class NewNorms:
    """Buffers of batch norm layers, and their values after the step: all averages in one tensor, and all counters."""

    layers: NormLayers
    averages: Tensor
    counters: Tensor

    def write(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Write the values. Yields names, and digests of the values before: Note [Overwritten differences]."""
        averages = self.averages.split(self.layers.sizes)  # type: ignore[no-untyped-call]
        for changes, values in ((self.layers.averages, averages), (self.layers.counters, self.counters.unbind())):
            targets = [change.place.tensor for change in changes if change.place is not None]
            there = [target for target in targets if target is not None]
            if there:
                yield tuple(change.name for change in changes), bit_sums(there)
                _torch.foreach_copy_(there, values)


NewValue = NewBuffer | NewNumber | NewNorms  # what a step changes beside the weights


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the bit patterns of each tensor: int64 without dimensions, or float32 with one."""
    if tensors[0].dtype is torch.int64:
        return torch.stack(list(tensors))
    bits = torch.cat(list(tensors)).view(torch.int32).to(torch.int64)
    numbers = _numbers_of_elements(tuple(map(len, tensors)), bits.device)
    return bits.new_zeros(len(tensors)).index_add_(0, numbers, bits)


@cache
def _numbers_of_elements(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each element of concatenated tensors of these sizes the number of its tensor."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


def compatible_change(place: BufferPlace, shards: Sequence[int]) -> BufferChange:
    saved = place.saved
    assert saved is not None
    kind = BufferKind.of(saved, is_persistent=True)
    which = tuple(shards) if place.is_norm_average else (shards[0],)
    return BufferChange(place.owner, place.key, kind, which, place, averages=place.is_norm_average)


def read_value(change: BufferChange, part: Tensor, counts: Sequence[int]) -> BufferValue:
    """Read the value of a buffer after the step from its part of the summed table."""
    if change.averages:
        values = part.view(len(change.shards), -1)
        weight = sum(counts[s] for s in change.shards)
        weighed = (row * (counts[s] / weight) for row, s in zip(values, change.shards, strict=True))
        return sum(weighed, torch.zeros_like(values[0]))
    if change.kind.is_gone:
        return Gone.GONE
    return None if change.kind.dtype is None else from_words(part, change.kind)


def to_words(value: Tensor) -> Tensor:
    """The bytes of a tensor, four in each float64."""
    flat = bytes_of(value)
    missing = -flat.numel() % WORD_BYTES
    padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat.clone()
    return padded.view(torch.int32).to(torch.float64)


def from_words(words: Tensor, kind: BufferKind) -> Tensor:
    dtype, count = kind.torch_dtype, math.prod(kind.shape)
    flat = words.to(torch.int32).view(torch.uint8)[: count * dtype.itemsize]
    found = flat.clone().view(dtype).view(kind.shape)
    return found.cpu() if kind.is_on_host else found
