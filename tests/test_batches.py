"""Batches through the public door: the same bytes for any number of workers and loader processes, from any position."""

from __future__ import annotations

import collections
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from lockstep.data.batches import Batches, BatchSettings, DataError, Position
from lockstep.data.reader import draws_random_numbers, gather
from lockstep.data.sample_order import ByLength, Order, Sequential, Shuffled, shard_ranges, shards_of_rank
from samples import (
    Augmented,
    Plain,
    SkippingStream,
    Stream,
    as_bytes,
    batches,
    masked,
    samples_of,
    shards_of,
    union,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# ---- every sample once, whichever worker loads it --------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch", "shards"), [(64, 16, 8), (61, 16, 8), (17, 8, 8), (30, 7, 5), (9, 9, 1)])
def test_every_sample_once_per_epoch_and_the_same_for_any_number_of_workers(size: int, batch: int, shards: int) -> None:
    settings = BatchSettings(batch, shards, epochs=2)
    alone = union(lambda rank, of: batches(Plain(size), settings, rank=rank, size=of), 1)
    per_epoch = -(-size // batch)
    numbers = samples_of(alone)
    assert [p.number for p, *_ in alone] == list(range(2 * per_epoch))
    for epoch in range(2):
        these = numbers[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain(*these)) == list(range(size))
        assert these == [Shuffled(size, batch, 7).batch(epoch, step) for step in range(per_epoch)]
    assert numbers[:per_epoch] != numbers[per_epoch:] or size == batch == 9
    assert [ends for *_, ends, _ in alone] == ([False] * (per_epoch - 1) + [True]) * 2
    for workers in (2, 3, 4, 8):
        if workers <= shards:
            assert union(lambda rank, of: batches(Plain(size), settings, rank=rank, size=of), workers) == alone


def test_a_batch_says_what_it_is() -> None:
    given = list(batches(Plain(18), BatchSettings(8, 8), rank=1, size=3))
    last = given[-1]
    assert (last.epoch, last.step, last.number, last.count, last.ends_epoch, last.of_shards) == (0, 2, 2, 2, True, 8)
    assert [shard.number for shard in last.shards] == list(shards_of_rank(8, 3, 1))
    assert last.counts == (0, 0, 0, 1, 0, 0, 0, 1) == tuple(len(places) for places in shard_ranges(2, 8))
    assert [shard.count for shard in last.shards] == [0, 1, 0]
    assert [shard.data is None for shard in last.shards] == [True, False, True]
    assert last.position == Position(0, 2, 2)


def test_the_incomplete_batch_is_dropped_on_request() -> None:
    given = union(lambda rank, of: batches(Plain(30), BatchSettings(8, 4, drop_last=True), rank=rank, size=of), 2)
    assert [count for _, count, _, _ in given] == [8, 8, 8]
    assert given[-1][2]


def test_joined_shards_are_the_same_samples_in_one() -> None:
    settings = BatchSettings(16, 8, epochs=2)
    for workers in (1, 3):
        for rank in range(workers):
            apart = list(batches(Plain(34), settings, rank=rank, size=workers))
            joined = list(batches(Plain(34), settings, rank=rank, size=workers, joined=True))
            for one, other in zip(apart, joined, strict=True):
                (shard,) = other.shards
                pieces = [s.data for s in one.shards if s.data is not None]
                assert shard.count == sum(s.count for s in one.shards)
                assert shard.number == one.shards[0].number
                assert (shard.data is None) if not pieces else torch.equal(shard.data, torch.cat(pieces))


def test_tensors_are_gathered_as_torch_would_collate_them() -> None:
    data = TensorDataset(torch.randn(40, 3), torch.arange(40), torch.rand(40, 2) > 0.5)
    halves = Subset(Subset(data, list(range(39, -1, -1))), torch.arange(0, 40, 2))  # type: ignore[arg-type]
    for dataset in (data, halves):
        quick = gather(dataset, [3, 1, 7])
        slow = torch.utils.data.default_collate([dataset[i] for i in (3, 1, 7)])
        assert type(quick) is type(slow) is list
        assert as_bytes(quick) == as_bytes(slow)

    class Twice(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    assert gather(Twice(torch.ones(3)), [0]) is None


def test_samples_may_be_asked_for_together_if_they_are_not_random() -> None:
    class Together(Plain):
        def __getitems__(self, indices: list[int]) -> list[int]:
            self.calls = getattr(self, "calls", 0) + 1
            return [self[index] for index in indices]

    dataset = Together(16)
    assert union(lambda rank, of: batches(dataset, BatchSettings(8, 2)), 1) == union(
        lambda rank, of: batches(Plain(16), BatchSettings(8, 2)), 1
    )
    assert dataset.calls == 4
    dataset.is_random = True
    list(batches(dataset, BatchSettings(8, 2)))
    assert dataset.calls == 4


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_augmentation_does_not_depend_on_workers_or_loaders_or_what_else_is_drawn() -> None:
    settings = BatchSettings(8, 4, epochs=2)
    alone = union(lambda rank, of: batches(Augmented(20), settings), 1)
    for loaders, workers in ((0, 3), (1, 1), (2, 2)):
        torch.rand(5), random.random(), np.random.rand()
        other = BatchSettings(8, 4, epochs=2, num_workers=loaders)
        assert union(lambda rank, of, s=other: batches(Augmented(20), s, rank=rank, size=of), workers) == alone
    draws = [repr(shards) for *_, shards in alone]
    assert len(set(draws)) == len(draws)
    assert union(lambda rank, of: batches(Augmented(20), settings, seed=8), 1) != alone


def test_a_sample_is_augmented_anew_in_each_epoch_and_no_two_alike() -> None:
    seen = collections.Counter[float]()
    for batch in batches(Augmented(20), BatchSettings(8, 4, epochs=3)):
        for shard in batch.shards:
            for kind in ("torch", "python", "numpy"):
                seen.update(shard.data[kind].flatten().tolist())
    assert len(seen) == 20 * 3 * 4


@pytest.mark.slow
def test_numpy_is_sown_even_if_the_dataset_is_the_first_to_use_it() -> None:
    program = (
        "import sys, torch; from lockstep.data.batches import *; from lockstep.seed import derive_seed, seed_all\n"
        "class Lazy:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): import numpy; return index, numpy.random.rand()\n"
        "if 'numpy.random' in sys.modules: sys.exit('numpy.random is there from the start: nothing to see')\n"
        "given = Batches(Lazy(), BatchSettings(2, 1), seed=7, rank=0, size=1, device=torch.device('cpu'))\n"
        "found = dict(pair for b in given for s in b.shards for pair in zip(*map(torch.Tensor.tolist, s.data)))\n"
        "import numpy\n"
        "for i in range(4):\n"
        "    seed_all(derive_seed(7, 'sample', 0, i)); assert found[i] == numpy.random.rand(), (i, found)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_random_collate_is_keyed_by_the_shard() -> None:
    settings = BatchSettings(8, 4, epochs=2, collate_fn=masked)
    alone = union(lambda rank, of: batches(Plain(20), settings), 1)
    assert len({repr(one) for *_, shards in alone for one in shards.values()}) == 6 * 4
    assert union(lambda rank, of: batches(Plain(20), settings, rank=rank, size=of), 3) == alone
    with_loaders = BatchSettings(8, 4, epochs=2, collate_fn=masked, num_workers=1)
    assert union(lambda rank, of: batches(Plain(20), with_loaders), 1) == alone


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize("dataset", [Augmented(20), Plain(20), Stream(20)], ids=["map", "plain", "stream"])
def test_the_random_numbers_of_the_training_process_go_on_undisturbed(dataset: Any, loaders: int) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    def sow() -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)

    sow()
    undisturbed = [draw() for _ in range(3)]
    sow()
    given = batches(dataset, BatchSettings(8, 4, num_workers=loaders, collate_fn=masked))
    assert [draw() for _ in given] == undisturbed
    if not isinstance(dataset, Stream):
        sow()
        given.fetch(Position(), [0])
        assert draw() == undisturbed[0]


def test_datasets_that_plainly_draw_nothing_are_known() -> None:
    tensors = TensorDataset(torch.zeros(3))
    for plain in (tensors, Subset(tensors, [0]), ConcatDataset([tensors, Subset(tensors, [1])]), [1, 2], Plain(2)):
        assert not draws_random_numbers(plain)
    assert not draws_random_numbers(StackDataset(tensors, tensors))
    for other in (Augmented(2), Subset(Augmented(2), [0]), ConcatDataset([tensors, Augmented(2)]), Stream(2)):
        assert draws_random_numbers(other)


# ---- position, state, resuming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaders", [0, 2])
def test_the_position_is_that_of_the_next_batch_however_much_is_loaded_ahead(loaders: int) -> None:
    given = batches(Plain(20), BatchSettings(8, 4, epochs=2, num_workers=loaders, prefetch_factor=4))
    assert given.position == Position(0, 0, 0)
    places = [(given.position, given.ended) for _ in given]
    assert [place for place, _ in places] == [
        Position(0, 1, 1),
        Position(0, 2, 2),
        Position(1, 0, 3),
        Position(1, 1, 4),
        Position(1, 2, 5),
        Position(2, 0, 6),
    ]
    assert [ended for _, ended in places] == [False] * 5 + [True]
    assert given.steps_in_all == 6
    assert not list(given)


@pytest.mark.few(1)
@pytest.mark.parametrize("dataset", [Augmented(20), Stream(20), SkippingStream(20)], ids=["map", "stream", "skipping"])
def test_any_world_goes_on_from_the_state(dataset: Any) -> None:
    settings = BatchSettings(6, 6, epochs=3)
    whole = union(lambda rank, of: batches(dataset, settings), 1)
    for stop, workers, loaders in ((1, 3, 0), (5, 2, 1), (8, 1, 2), (12, 1, 0)):
        first = batches(dataset, settings)
        for _ in itertools.islice(first, stop):
            pass
        state = first.state()
        assert all(type(value) in (int, str) for value in state.values())

        def resumed(rank: int, of: int, state: Any = state, loaders: int = loaders) -> Batches:
            rest = batches(dataset, BatchSettings(6, 6, epochs=3, num_workers=loaders), rank=rank, size=of)
            rest.restore(state)
            return rest

        assert union(resumed, workers) == whole[stop:]


def test_a_million_samples_are_resumed_at_once() -> None:
    given = batches(Plain(1_000_000), BatchSettings(256, 8, epochs=2))
    began = time.perf_counter()
    given.seek(Position(1, 3000, 7000))
    batch = next(iter(given))
    assert time.perf_counter() - began < 0.5
    assert batch.position == Position(1, 3000, 7000)
    assert batch.shards[0].data.tolist() == Shuffled(1_000_000, 256, 7).batch(1, 3000)[:32]


def test_seeking_while_iterating_changes_what_comes_next() -> None:
    given = batches(Plain(64), BatchSettings(8, 4, num_workers=1))
    seen = []
    for batch in given:
        seen.append(batch.number)
        if len(seen) == 3:
            given.seek(Position(0, 1, 1))
        if len(seen) == 6:
            given.seek(Position(0, 7, 7))
    assert seen == [0, 1, 2, 1, 2, 3, 7]


def test_a_loop_that_was_left_is_taken_up_again() -> None:
    given = batches(Plain(64), BatchSettings(8, 4))
    first = [batch.number for batch in itertools.islice(given, 3)]
    assert first + [batch.number for batch in given] == list(range(8))


def test_a_loop_inside_a_loop_is_refused() -> None:
    given = batches(Plain(64), BatchSettings(8, 4))
    with pytest.raises(RuntimeError, match="rank 0: another loop over these batches has begun"):
        for _ in given:
            next(iter(given))


def test_the_end_of_an_epoch_by_another_name() -> None:
    given = batches(Plain(16), BatchSettings(8, 4, epochs=2))
    given.seek(Position(0, 2, 2))
    assert given.position == Position(1, 0, 2)
    given.seek(Position(2, 0, 4))
    assert given.ended
    with pytest.raises(ValueError, match="epoch 0 has only 2 steps"):
        given.seek(Position(0, 3, 3))
    assert given.position == Position(2, 0, 4)


def test_a_state_of_other_batches_is_refused_inside_an_epoch_only() -> None:
    state = batches(Plain(64), BatchSettings(8, 4)).state() | {"step": 3, "number": 3}
    other = batches(Plain(64), BatchSettings(16, 4), seed=9)
    with pytest.raises(
        ValueError, match=r"at step 3 of epoch 0.*global_batch_size was 8 and is 16; seed was 7 and is 9"
    ):
        other.restore(state)
    with pytest.raises(ValueError, match="samples was 64 and is 65"):
        batches(Plain(65), BatchSettings(8, 4)).restore(state)
    with pytest.raises(ValueError, match="lacks number"):
        other.restore({k: v for k, v in state.items() if k != "number"})
    other.restore(state | {"epoch": 2, "step": 0})
    assert other.position == Position(2, 0, 3)


def test_endless_batches_have_no_end() -> None:
    given = batches(Plain(8), BatchSettings(8, 4, epochs=None))
    epochs = [batch.epoch for batch in itertools.islice(given, 50)]
    assert epochs == list(range(50))
    assert given.steps_in_all is None
    assert not given.ended


def test_any_shard_can_be_fetched_as_its_owner_got_it() -> None:
    settings = BatchSettings(8, 4, epochs=2, collate_fn=None)
    given = batches(Augmented(20), settings, rank=0, size=2)
    theirs = {batch.position: batch for batch in batches(Augmented(20), settings, rank=1, size=2)}
    for batch in given:
        before = given.position
        again = given.fetch(batch.position, [2, 3])
        assert shards_of(again) == shards_of(theirs[batch.position])
        assert (again.count, again.ends_epoch, again.counts) == (batch.count, batch.ends_epoch, batch.counts)
        assert shards_of(given.fetch(batch.position, [1, 0])) == shards_of(batch)
        assert given.position == before
    with pytest.raises(ValueError, match=r"shards=\[4\]: this batch has shards 0 to 3"):
        given.fetch(Position(), [4])
    with pytest.raises(ValueError, match="epoch 0 has only 3 steps"):
        given.fetch(Position(0, 3, 3), [0])
    with pytest.raises(TypeError, match="rank 0: Stream is a stream"):
        batches(Stream(20), settings).fetch(Position(), [0])


# ---- orders ----------------------------------------------------------------------------------------------------------


class Evens:
    """Batches of one size more each, that use half of the samples; another number of steps in each epoch."""

    def steps(self, epoch: int) -> int:
        return 2 + epoch

    def batch(self, epoch: int, step: int) -> Sequence[int]:
        return np.arange(0, 2 * step + 2, 2)  # type: ignore[return-value]


def test_any_order_can_be_given() -> None:
    def given(order: Order, rank: int, of: int, epochs: int = 1, num_workers: int = 0) -> Batches:
        return batches(
            Plain(20), BatchSettings(4, 3, epochs=epochs, num_workers=num_workers), order=order, rank=rank, size=of
        )

    expected = [[0], [0, 2], [0], [0, 2], [0, 2, 4]]
    for workers, loaders in ((1, 0), (3, 0), (2, 1)):
        found = union(lambda rank, of, n=loaders: given(Evens(), rank, of, epochs=2, num_workers=n), workers)
        assert samples_of(found) == expected
    assert given(Evens(), 0, 1, epochs=2).steps_in_all == 5
    by_length = ByLength(list(range(20)), 4, 3)
    assert samples_of(union(lambda rank, of: given(by_length, rank, of), 2)) == [
        by_length.batch(0, s) for s in range(5)
    ]
    few = Sequential(3, 4)
    assert samples_of(union(lambda rank, of: given(few, rank, of), 3)) == [[0, 1, 2]]


class Late:
    """Wrong in its third batch."""

    def __init__(self, wrong: Any) -> None:
        self.wrong = wrong

    def steps(self, epoch: int) -> int:
        return 4

    def batch(self, epoch: int, step: int) -> Any:
        return self.wrong() if step == 2 else [step]


def no_samples() -> Any:
    raise ConnectionError("index server is gone")


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (lambda: [3, 20], ValueError, r"Late.batch\(epoch=0, step=2\) contains sample 20; .* samples 0 to 19"),
        (lambda: [3, -1], ValueError, "contains sample -1"),
        (list, ValueError, "has no samples"),
        (lambda: ["a"], ValueError, "must be a list of sample numbers"),
        (no_samples, DataError, "Late, as order of the samples: index server is gone"),
    ],
)
@pytest.mark.parametrize("loaders", [0, 1])
def test_an_order_that_goes_wrong_costs_only_that_batch(wrong: Any, kind: Any, words: str, loaders: int) -> None:
    seen = []
    with pytest.raises(kind, match=words) as caught:
        for batch in batches(Plain(20), BatchSettings(4, 1, num_workers=loaders, prefetch_factor=4), order=Late(wrong)):
            seen.append(batch.number)
    assert seen == [0, 1]
    assert caught.value.__cause__ is not None
