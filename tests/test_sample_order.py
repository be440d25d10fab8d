"""Which sample is in which batch and shard: pure, so it is tried for everything small, and pinned by a known order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from lockstep.data.sample_order import (
    ByLength,
    Division,
    Order,
    Position,
    SamplerOrder,
    Sequential,
    Shuffled,
    count_all_steps,
    positions_from,
    shard_ranges,
    shards_of_rank,
)

SIZES = [(1, 1), (7, 3), (8, 8), (9, 8), (10, 4), (64, 16), (100, 7), (101, 100)]  # (samples, global batch)
LENGTHS = torch.randint(1, 200, (1000,), generator=torch.Generator().manual_seed(3))


def epoch_of(order: Order, epoch: int) -> list[list[int]]:
    return [list(order.batch(epoch, step)) for step in range(order.steps(epoch))]


def orders(size: int, batch: int, *, drop_last: bool = False) -> list[Order]:
    lengths = [(7 * i) % 5 for i in range(size)]
    return [
        Shuffled(size, batch, 1, drop_last),
        Sequential(size, batch, drop_last),
        ByLength(lengths, batch, 1, drop_last, pool=2),
    ]


# ---- cut and share ---------------------------------------------------------------------------------------------------


def test_shards_cover_the_batch_once_in_order_and_differ_by_one_at_most() -> None:
    for count, shards in itertools.product(range(40), range(1, 17)):
        cuts = shard_ranges(count, shards)
        assert len(cuts) == shards
        assert [place for places in cuts for place in places] == list(range(count))
        sizes = {len(places) for places in cuts}
        assert max(sizes) - min(sizes) <= 1
        assert (min(sizes) == 0) == (count < shards)


def test_few_samples_are_spread_over_the_workers() -> None:
    assert [len(places) for places in shard_ranges(4, 8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [len(places) for places in shard_ranges(10, 8)].count(2) == 2


def test_workers_cover_the_shards_once_in_order() -> None:
    for shards in range(1, 17):
        for workers in range(1, shards + 1):
            shares = [shards_of_rank(shards, workers, rank) for rank in range(workers)]
            assert [shard for mine in shares for shard in mine] == list(range(shards))
            assert min(len(mine) for mine in shares) >= 1
            assert max(len(mine) for mine in shares) - min(len(mine) for mine in shares) <= 1


def test_more_workers_than_shards_are_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"9 workers for 8 shards: 1 would have nothing to do; set shards=9 or more"):
        shards_of_rank(8, 9, 0)
    with pytest.raises(ValueError, match="rank=2 is not one of 2 workers"):
        shards_of_rank(8, 2, 2)


def test_a_division_gives_every_position_to_one_worker() -> None:
    for count, shards in itertools.product((1, 3, 8, 21), (1, 3, 8)):
        for workers in range(1, shards + 1):
            for joined in (False, True):
                divisions = [Division(shards, shards_of_rank(shards, workers, rank), joined) for rank in range(workers)]
                parts = [part for division in divisions for part in division.of(count)]
                assert [place for _, places in parts for place in places] == list(range(count))
                assert len(parts) == (workers if joined else shards)
                if not joined:
                    assert [number for number, _ in parts] == list(range(shards))


# ---- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch"), SIZES)
def test_every_sample_comes_once_per_epoch(size: int, batch: int) -> None:
    for order in orders(size, batch):
        assert isinstance(order, Order)
        for epoch in range(3):
            batches = epoch_of(order, epoch)
            assert sorted(sample for samples in batches for sample in samples) == list(range(size))
            assert [len(samples) for samples in batches[:-1]] == [batch] * (len(batches) - 1)
            assert len(batches[-1]) == (size % batch or batch)


@pytest.mark.parametrize(("size", "batch"), SIZES)
def test_dropping_the_last_drops_the_incomplete_batch_only(size: int, batch: int) -> None:
    for order in orders(size, batch, drop_last=True):
        samples = [sample for batch_of in epoch_of(order, 0) for sample in batch_of]
        assert len(samples) == len(set(samples)) == size - size % batch
        assert order.steps(0) == size // batch


def test_epochs_differ_and_seeds_differ_and_the_same_is_the_same() -> None:
    for make in (lambda seed: Shuffled(100, 10, seed), lambda seed: ByLength([1] * 100, 10, seed)):
        assert epoch_of(make(1), 0) == epoch_of(make(1), 0)
        assert epoch_of(make(1), 0) != epoch_of(make(1), 1)
        assert epoch_of(make(1), 0) != epoch_of(make(2), 0)
    assert epoch_of(Sequential(5, 2), 0) == epoch_of(Sequential(5, 2), 7) == [[0, 1], [2, 3], [4]]


def test_it_does_not_matter_what_was_asked_before() -> None:
    for order, twin in zip(orders(50, 8), orders(50, 8), strict=True):
        places = [(epoch, step) for epoch in range(3) for step in range(order.steps(epoch))]
        forward = {place: list(order.batch(*place)) for place in places}
        backward = {place: list(twin.batch(*place)) for place in reversed(places)}
        assert forward == backward


def test_the_order_is_this_one() -> None:
    """If it changes, no run can be resumed: change it only on purpose."""
    assert epoch_of(Shuffled(20, 6, 7), 0) == [
        [8, 12, 1, 3, 11, 2],
        [7, 4, 6, 18, 13, 10],
        [0, 9, 16, 19, 5, 14],
        [17, 15],
    ]
    assert epoch_of(Shuffled(20, 6, 7), 1)[0] == [11, 4, 8, 7, 16, 5]
    assert epoch_of(ByLength([i % 4 for i in range(12)], 5, 7, pool=2), 0) == [
        [10, 2, 11, 7, 3],
        [4, 0, 8, 1, 5],
        [6, 9],
    ]


def test_an_order_is_a_value() -> None:
    one, other = Shuffled(20, 6, 7), Shuffled(20, 6, 7)
    one.batch(3, 0)
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == "Shuffled(size=20, global_batch_size=6, seed=7, drop_last=False)"


def padding(batches: Sequence[Sequence[int]]) -> int:
    return sum(int(LENGTHS[list(b)].max()) * len(b) - int(LENGTHS[list(b)].sum()) for b in batches)


def test_by_length_pads_less_and_a_larger_pool_less_still() -> None:
    shuffled = padding(epoch_of(Shuffled(1000, 16, 5), 0))
    small, large = (padding(epoch_of(ByLength(LENGTHS, 16, 5, pool=pool), 0)) for pool in (4, 60))
    assert large < small < shuffled
    assert large < 0.1 * shuffled


def test_by_length_mixes_the_batches() -> None:
    """Lengths must not rise over an epoch, and an incomplete batch is not the one with the longest."""
    order = ByLength(LENGTHS, 16, 5, pool=60)
    means = [float(LENGTHS[samples].float().mean()) for samples in epoch_of(order, 0)]
    half = len(means) // 2
    assert abs(sum(means[:half]) / half - sum(means[half:]) / (len(means) - half)) < 40
    assert means != sorted(means)
    last = LENGTHS[epoch_of(order, 0)[-1]]
    assert int(last.max() - last.min()) > 50


def test_by_length_takes_any_numbers() -> None:
    seconds = [0.5, 2.5, 0.1, 9.0]
    for lengths in (seconds, torch.tensor(seconds), torch.tensor(seconds).numpy()):
        batches = epoch_of(ByLength(lengths, 2, 0), 0)
        assert sorted(sorted(b) for b in batches) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shuffled(0, 4, 1), r"Shuffled: size=0, which must be a whole number of 1 or more"),
        (lambda: Shuffled(10, 0, 1), r"Shuffled: global_batch_size=0"),
        (lambda: Shuffled(10, 2.5, 1), r"Shuffled: global_batch_size=2.5"),  # type: ignore[arg-type]
        (lambda: Shuffled(10, 2, 1.0), r"seed=1.0 is a float; give a plain int"),  # type: ignore[arg-type]
        (lambda: Sequential(3, 4, drop_last=True), r"Sequential: 3 samples make no batch of 4 with drop_last=True"),
        (lambda: ByLength([[1, 2]], 1, 1), r"ByLength: lengths has shape \(1, 2\); give one number"),  # type: ignore
        (lambda: ByLength([1, 2], 1, 1, pool=0), r"ByLength\(pool=0\)"),
        (lambda: ByLength([], 1, 1), r"ByLength: size=0"),
        (lambda: Shuffled(10, 4, 1).batch(0, 3), r"Shuffled: epoch 0 has steps 0 to 2, and no step 3"),
        (lambda: Sequential(10, 4).batch(0, -1), r"Sequential: epoch 0 has steps 0 to 2, and no step -1"),
        (lambda: Position(epoch=-1), r"Position\(epoch=-1\): batches are counted 0, 1, 2"),
        (lambda: Position(step=True), r"Position\(step=True\)"),
    ],
)
def test_what_cannot_be_is_said(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


# ---- walking ---------------------------------------------------------------------------------------------------------


def test_a_walk_from_anywhere_is_the_rest_of_the_walk() -> None:
    order = Sequential(10, 4)
    whole = list(positions_from(order, Position(), 3))
    assert [(p.epoch, p.step, p.number, ends) for p, ends in whole[:4]] == [
        (0, 0, 0, False),
        (0, 1, 1, False),
        (0, 2, 2, True),
        (1, 0, 3, False),
    ]
    assert len(whole) == 9
    for place, (position, _) in enumerate(whole):
        assert list(positions_from(order, position, 3)) == whole[place:]
    assert list(itertools.islice(positions_from(order, Position(), None), 9)) == whole
    assert not list(positions_from(order, Position(epoch=3, number=9), 3))


def test_any_number_of_epochs_is_counted_at_once() -> None:
    for size, batch in SIZES:
        for order in orders(size, batch):
            assert count_all_steps(order, 3) == sum(order.steps(epoch) for epoch in range(3))
            assert count_all_steps(order, 10**12) == 10**12 * order.steps(0)


def test_an_epoch_without_batches_is_refused() -> None:
    class Empty:
        def steps(self, epoch: int) -> int:
            return 1 - epoch

        def batch(self, epoch: int, step: int) -> Sequence[int]:
            return [0]

    with pytest.raises(ValueError, match=r"Empty.steps\(1\) is 0; an epoch has at least one batch"):
        list(positions_from(Empty(), Position(), 3))


# ---- samplers of torch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_a_sampler_draws_from_seed_and_epoch_alone(has_generator: bool, is_batched: bool) -> None:
    generator = torch.Generator().manual_seed(3) if has_generator else None
    sampler: Any = RandomSampler(range(20), generator=generator)
    sampler = BatchSampler(sampler, 6, drop_last=False) if is_batched else sampler

    def epochs(order: SamplerOrder, numbers: Sequence[int]) -> list[list[list[int]]]:
        return [[order.batch(epoch, step) for step in range(order.steps(epoch))] for epoch in numbers]

    first = epochs(SamplerOrder(sampler, 6, 7), range(3))
    assert [len(batch) for batch in first[0]] == [6, 6, 6, 2]
    assert all(sorted(itertools.chain(*epoch)) == list(range(20)) for epoch in first)
    assert first[0] != first[1] != first[2] != first[0]
    torch.manual_seed(1)
    before = generator.get_state() if generator is not None else None
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert epochs(SamplerOrder(sampler, 6, 7), [2, 0, 1]) == [first[2], first[0], first[1]]
    assert torch.equal(torch.rand(3), drawn)
    assert generator is None or before is None or torch.equal(generator.get_state(), before)
    assert epochs(SamplerOrder(sampler, 6, 8), [0]) != first[:1]
    if not is_batched:
        assert epochs(SamplerOrder(sampler, 6, 7, drop_last=True), [0]) == [first[0][:3]]
