"""Packing is pure: what goes where follows from sizes, and is what torch would do."""

from __future__ import annotations

import random
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.ddp.bucket import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES, MIB, Bucket, BucketPlan, Caps, Ownership, pack


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(n, dtype=dtype) for n in sizes]


def indices(packs: list[BucketPlan]) -> list[tuple[int, ...]]:
    return [p.indices for p in packs]


def test_a_bucket_is_closed_by_the_parameter_that_reaches_the_limit() -> None:
    packs = pack(parameters(10, 10, 10, 10, 10), (40, 80), sparse=[False] * 5)
    assert indices(packs) == [(3, 4), (1, 2), (0,)]
    assert [p.limit_bytes for p in packs] == [80, 80, 40]


def test_the_last_limit_repeats() -> None:
    packs = pack(parameters(*[10] * 7), (40, 80), sparse=[False] * 7, order=range(7))
    assert indices(packs) == [(0,), (1, 2), (3, 4), (5, 6)]


def test_dtypes_and_sparse_gradients_do_not_mix() -> None:
    mixed = [torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(4), torch.zeros(4)]
    packs = pack(mixed, (sys.maxsize,), sparse=[False, False, True, False])
    assert sorted(indices(packs)) == [(0, 3), (1,), (2,)]


def test_buckets_come_in_the_order_in_which_they_are_complete() -> None:
    packs = pack(parameters(10, 10, 10, 10), (40,), sparse=[False] * 4, order=[2, 0, 3, 1])
    assert indices(packs) == [(2,), (0,), (3,), (1,)]


def test_every_parameter_is_packed_once_whatever_the_sizes() -> None:
    dice = random.Random(0)
    for _ in range(200):
        count = dice.randint(1, 30)
        tensors = [
            torch.empty(dice.choice([0, 1, 7, 300]), dtype=dice.choice([torch.float32, torch.float16]))
            for _ in range(count)
        ]
        sparse = [dice.random() < 0.1 for _ in range(count)]
        order = dice.sample(range(count), count) if dice.random() < 0.5 else None
        limits = tuple(dice.choice([1, 100, 5000]) for _ in range(dice.randint(1, 3)))
        packs = pack(tensors, limits, sparse=sparse, order=order)
        assert sorted(i for p in packs for i in p.indices) == list(range(count))
        assert packs == pack(tensors, limits, sparse=sparse, order=order)
        for p in packs:
            assert len({tensors[i].dtype for i in p.indices}) == 1
            assert len(p.indices) == 1 or not any(sparse[i] for i in p.indices)


@pytest.mark.parametrize("limits", [(sys.maxsize,), (1024, 4096), (512,), (100, 5000, 800)])
def test_the_same_buckets_as_torch(limits: tuple[int, ...]) -> None:
    dice = random.Random(1)
    for _ in range(50):
        count = dice.randint(1, 40)
        tensors = [torch.empty(dice.randint(1, 600)) for _ in range(count)]
        sparse = [dice.random() < 0.1 for _ in range(count)]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, list(limits), sparse)
        ours = pack(tensors, limits, sparse=sparse)
        assert [list(p.indices) for p in ours] == list(reversed(theirs))


def test_caps() -> None:
    default = Caps.from_mib(None, None)
    assert (default.first_bytes, default.cap_bytes) == (FIRST_CAP_BYTES, DEFAULT_CAP_BYTES)
    assert default.before_order_is_known(may_have_unused=False) == (sys.maxsize,)
    assert default.before_order_is_known(may_have_unused=True) == (FIRST_CAP_BYTES, DEFAULT_CAP_BYTES)
    assert Caps.from_mib(1.5, None).once_order_is_known() == (int(1.5 * MIB), int(1.5 * MIB))
    listed = Caps.from_mib(None, [1, 4, 2])
    assert listed.cap_bytes == 4 * MIB
    assert listed.once_order_is_known() == (MIB, 4 * MIB, 2 * MIB)


def _ordinary(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def bucket_of(module: nn.Module) -> Bucket:
    leaves = list(module.parameters())
    return Bucket(0, BucketPlan(tuple(range(len(leaves))), 0), leaves, sparse=False, allocate=_ordinary)


def test_a_buffer_is_used_again_only_when_no_view_of_it_is_left() -> None:
    bucket = bucket_of(nn.Linear(3, 3))
    bucket.open(Ownership.HANDED_OVER)
    first = bucket.flat
    assert first is not None
    place, piece = first.data_ptr(), bucket.views[0]
    del first
    bucket.views = []
    bucket.reset()
    bucket.open(Ownership.HANDED_OVER)
    assert bucket.flat.data_ptr() != place, "a view of it is left"
    place = bucket.flat.data_ptr()
    bucket.views = []
    bucket.reset()
    bucket.open(Ownership.HANDED_OVER)
    assert bucket.flat.data_ptr() == place
    del piece


def test_pieces_have_the_layout_of_their_parameters() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    bucket = bucket_of(module)
    bucket.open(Ownership.HANDED_OVER)
    for view, parameter in zip(bucket.views, module.parameters(), strict=True):
        assert view.shape == parameter.shape
        assert view.stride() == parameter.stride()
        assert not view._is_view()
