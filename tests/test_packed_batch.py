"""How batches travel: between processes, and to a GPU."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    TensorDataset,
)

from lockstep.data.batches import BatchSettings, Position
from lockstep.data.packed_batch import ALIGN_BYTES, map_leaves, pack
from lockstep.data.sample_order import Sequential
from samples import (
    CPU,
    Plain,
    as_bytes,
    batches,
    masked,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


Point = collections.namedtuple("Point", "x y")


def nested() -> Any:
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4)
    return {
        "list": [torch.ones(3), "words", 4, None],
        "point": Point(torch.zeros(2, 0), torch.tensor(5)),
        "pair": Pair(torch.tensor([True, False]), (torch.tensor([1 + 2j]), torch.ones(2, dtype=torch.bfloat16))),
        "format": images.contiguous(memory_format=torch.channels_last),
        "sparse": torch.eye(3).to_sparse(),
        "packed": pack_sequence([torch.ones(3), torch.ones(1)]),
        "array": np.arange(3),
        "more": collections.defaultdict(list, {"int8": torch.ones(5, dtype=torch.int8)}),
    }


def collate_nested(items: list[Any]) -> Any:
    return nested()


def test_any_structure_comes_through_loader_processes_as_it_was() -> None:
    (batch,) = batches(Plain(4), BatchSettings(4, 2, num_workers=1, collate_fn=collate_nested))
    expected = nested()
    for shard in batch.shards:
        data = shard.data
        assert data.keys() == expected.keys()
        assert data["list"][1:] == ["words", 4, None]
        assert type(data["point"]) is Point
        assert type(data["pair"]) is Pair
        assert type(data["more"]) is collections.defaultdict
        assert type(data["packed"]) is PackedSequence
        for path in (
            lambda d: d["list"][0],
            lambda d: d["point"].x,
            lambda d: d["point"].y,
            lambda d: d["pair"].left,
            lambda d: d["pair"].right[0],
            lambda d: d["pair"].right[1],
            lambda d: d["format"],
            lambda d: d["more"]["int8"],
            lambda d: d["packed"].data,
            lambda d: d["sparse"].to_dense(),
        ):
            got, wanted = path(data), path(expected)
            assert got.dtype == wanted.dtype
            assert got.stride() == wanted.stride()
            assert torch.equal(got, wanted)
        assert data["array"].tolist() == [0, 1, 2]


def test_a_packed_batch_is_one_aligned_buffer_and_its_tensors_do_not_overlap() -> None:
    content = [torch.full((n,), n, dtype=dtype) for n, dtype in ((3, torch.int64), (200, torch.uint8), (5, torch.half))]
    packed = pack(content)
    assert packed.flat is not None
    assert packed.flat.is_shared()
    opened = packed.unpack()
    for tensor in opened:
        assert tensor.untyped_storage().data_ptr() == packed.flat.untyped_storage().data_ptr()
        assert (tensor.data_ptr() - packed.flat.data_ptr()) % ALIGN_BYTES == 0
    assert as_bytes(opened) == as_bytes(content)
    opened[1].zero_()
    assert as_bytes(opened[::2]) == as_bytes(content[::2])
    assert pack(["nothing"]).flat is None


def test_changing_a_structure_leaves_the_old_one_alone() -> None:
    data = nested()
    twin = map_leaves(data, lambda leaf: leaf + 1 if type(leaf) is torch.Tensor and not leaf.is_sparse else leaf)
    assert torch.equal(data["list"][0], torch.ones(3))
    assert torch.equal(twin["list"][0], torch.full((3,), 2.0))
    assert torch.equal(twin["more"]["int8"] - 1, data["more"]["int8"])
    assert map_leaves(data, lambda leaf: leaf) is data


def test_on_another_device_everything_is_moved() -> None:
    """Without a GPU: `meta` is a device too."""
    (batch,) = batches(Plain(4), BatchSettings(4, 2, collate_fn=masked), device=torch.device("meta"))
    assert all(shard.data.is_meta for shard in batch.shards)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("loaders", [0, 2])
    def test_the_same_bytes_arrive(self, loaders: int) -> None:
        device = torch.device("cuda", 0)
        data = TensorDataset(torch.randn(512, 256, 64), torch.arange(512))
        here = list(batches(data, BatchSettings(64, 8, epochs=2)))
        there = batches(data, BatchSettings(64, 8, epochs=2, num_workers=loaders), device=device)
        kept = []
        for one, other in zip(here, there, strict=True):
            x = other.shards[3].data[0]
            for _ in range(20):  # keep the GPU behind, so that a copy that is not waited for would be seen
                x = (x @ x.transpose(1, 2) @ x) * 1e-3
            kept.append(other)
            assert {t.device for s in other.shards for t in s.data} == {device}
            assert one.position == other.position
        for one, other in zip(here, kept, strict=True):
            for mine, theirs in zip(one.shards, other.shards, strict=True):
                assert as_bytes(mine.data) == as_bytes([t.cpu() for t in theirs.data])

    def test_memory_is_not_reused_while_the_consumer_still_reads_it(self) -> None:
        device = torch.device("cuda", 0)
        data = TensorDataset(torch.arange(64.0)[:, None].repeat(1, 1 << 16))
        given = batches(data, BatchSettings(8, 1, num_workers=1), device=device, order=Sequential(64, 8))
        sums = []
        for batch in given:
            x = batch.shards[0].data[0]
            torch.cuda._sleep(20_000_000)
            sums.append(x.double().mean(1))  # runs long after the next batches were sent
            del x, batch
        assert torch.cat(sums).tolist() == list(range(64))

    def test_objects_move_themselves(self) -> None:
        device = torch.device("cuda", 0)
        for loaders in (0, 1):
            (batch,) = batches(
                Plain(4), BatchSettings(4, 2, num_workers=loaders, collate_fn=collate_nested), device=device
            )
            for shard in batch.shards:
                assert shard.data["packed"].data.device == device
                assert shard.data["packed"].batch_sizes.device == CPU
                assert shard.data["sparse"].device == device
                assert shard.data["format"].is_contiguous(memory_format=torch.channels_last)
                assert shard.data["pair"].right[1].device == device
        fetched = batches(Plain(4), BatchSettings(4, 2, collate_fn=collate_nested), device=device).fetch(
            Position(), [1]
        )
        assert fetched.shards[0].data["point"].y.device == device

    def test_nothing_waits_for_the_whole_device(self) -> None:
        device = torch.device("cuda", 0)
        given = iter(batches(TensorDataset(torch.zeros(64, 8)), BatchSettings(8, 2, num_workers=1), device=device))
        next(given)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        began = time.perf_counter()
        for _ in range(3):
            next(given)
        assert time.perf_counter() - began < 0.5
        assert not torch.cuda.current_stream(device).query()
