"""Batches reach the device before they are asked for.

Note [One batch ahead]
While the GPU works on a batch, the next one is copied on a stream of its own. Nothing waits for the whole device: the
consumer's stream waits for the copy's event, and only when the batch is handed out. Memory of the batch comes from the
copying stream's pool; `record_stream` keeps it from being reused before the consumer's stream is done with it.
Only plain tensors are copied this way. What an object does in its own `to()` cannot be seen, so it is called when the
batch is handed out, on the consumer's stream.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.data.packed_batch import Parcel, is_plain, over


def arrive(parcels: Generator[Parcel, None, None], device: torch.device) -> Generator[Any, None, None]:
    """The contents of the parcels, on the device."""
    with closing(parcels):
        if device.type == "cuda":
            yield from _arrive_on_gpu(parcels, device)
        else:
            for parcel in parcels:
                yield put_on(device, parcel.open())


def put_on(device: torch.device, content: Any) -> Any:
    """At once, on the current stream."""
    if device.type == "cpu":
        return content
    return over(content, lambda leaf: leaf.to(device))


@dataclass(frozen=True)
class _Underway:
    parcel: Parcel
    copied: torch.cuda.Event


def _arrive_on_gpu(parcels: Generator[Parcel, None, None], device: torch.device) -> Generator[Any, None, None]:
    lane = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    coming = _send(next(parcels, None), lane)
    while coming is not None:
        # The next one is sent before this one is handed out. If it is not loaded yet we wait for it: with loaders that
        # keep up it is there, and with those that do not, the time is theirs anyway.
        here, coming = coming, _send(next(parcels, None), lane)
        yield _receive(here, device)


def _send(parcel: Parcel | None, lane: torch.cuda.Stream) -> _Underway | None:
    if parcel is None:
        return None

    def copy(leaf: Any) -> Any:
        return leaf.to(lane.device, non_blocking=True) if is_plain(leaf) else leaf

    with torch.cuda.stream(lane):
        flat = None if parcel.flat is None else copy(parcel.flat)
        sent = Parcel(over(parcel.content, copy), flat)
        return _Underway(sent, lane.record_event())


def _receive(underway: _Underway, device: torch.device) -> Any:
    consumer = torch.cuda.current_stream(device)
    consumer.wait_event(underway.copied)

    def claim(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf.to(device)
        leaf.record_stream(consumer)
        return leaf

    return over(underway.parcel.open(), claim)
