"""Copies batches to the device before they are needed.

Note [Prefetching to a GPU]
While the GPU works on a batch, the next one is copied on a separate stream. The host never waits for the whole device:
the consumer's stream waits for the event of the copy, and only when the batch is returned. The memory of the batch
comes from the pool of the copy stream; `record_stream` keeps it from being reused before the consumer's stream is done
with it. Only plain tensors are copied this way. What an object does in its own `to()` is not known, so `to()` is called
when the batch is returned, on the consumer's stream.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.data.packed_batch import PackedBatch, is_plain, map_leaves


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
    if device.type == "cpu":
        return content
    return map_leaves(content, lambda leaf: leaf.to(device))


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

    def copy(leaf: Any) -> Any:
        return leaf.to(stream.device, non_blocking=True) if is_plain(leaf) else leaf

    with torch.cuda.stream(stream):
        flat = None if packed.flat is None else copy(packed.flat)
        on_gpu = PackedBatch(map_leaves(packed.content, copy), flat)
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
