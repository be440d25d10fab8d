"""Datasets for the tests of batches, and what all workers together are given of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

from lockstep.data.batches import Batch, Batches, BatchSettings

CPU = torch.device("cpu")


class Plain(Dataset):  # type: ignore[type-arg]
    """Sample i is its number, and nothing else."""

    is_random = False

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Plain):
    """Every kind of random number that an augmentation may draw."""

    is_random = True

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {
            "index": index,
            "torch": torch.rand(2),
            "python": random.random(),
            "numpy": np.random.rand(),  # loaded by numpy on first use, which may be here
            "again": torch.randint(2**40, ()),
        }


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples 0, 1, 2, ... with a random number each, and a shuffle of its own per epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.begun = size, 0

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None, "a stream that splits itself would lose samples"
        self.begun += 1
        order = torch.randperm(self.size).tolist()  # drawn now, not with the first sample
        return ((index, torch.rand(())) for index in order)


class SkippingStream(Stream):
    """Knows its epoch, and can begin anywhere."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch, self.first, self.read = -1, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, count: int) -> SkippingStream:
        rest = SkippingStream(self.size)
        rest.epoch, rest.first = self.epoch, count
        return rest

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.first, self.size):
            yield 1000 * self.epoch + index, torch.rand(())


def batches(dataset: Any, settings: BatchSettings, *, rank: int = 0, size: int = 1, **options: Any) -> Batches:
    return Batches(dataset, settings, **({"seed": 7, "device": CPU} | options), rank=rank, size=size)


def as_bytes(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return str(data.dtype), tuple(data.shape), data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(data, dict):
        return {key: as_bytes(value) for key, value in data.items()}
    return [as_bytes(value) for value in data] if isinstance(data, list | tuple) else data


def shards_of(batch: Batch) -> dict[int, Any]:
    return {shard.number: (shard.count, as_bytes(shard.data)) for shard in batch.shards}


def union(make: Callable[[int, int], Batches], workers: int) -> list[Any]:
    """What all workers together are given: (place, all shards) of every batch."""
    each = [[(b.position, b.count, b.ends_epoch, shards_of(b)) for b in make(rank, workers)] for rank in range(workers)]
    joined = []
    for parts in zip(*each, strict=True):
        assert len({part[:3] for part in parts}) == 1
        shards: dict[int, Any] = {}
        for part in parts:
            assert not shards.keys() & part[3].keys()
            shards |= part[3]
        joined.append((*parts[0][:3], shards))
    return joined


def samples_of(all_of_it: list[Any]) -> list[list[int]]:
    """Sample numbers of every batch, of a dataset whose samples are numbers."""
    found = []
    for _, count, _, shards in all_of_it:
        rows: list[int] = []
        for number in sorted(shards):
            size, data = shards[number]
            assert (data is None) == (size == 0)
            if data is not None:
                rows += torch.frombuffer(bytearray(data[2]), dtype=torch.int64).tolist()
        assert len(rows) == count
        found.append(rows)
    return found


def masked(items: list[Any]) -> torch.Tensor:
    return torch.rand(len(items))
