"""Iterable datasets: one sequence, cut the same way by everybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.data.batches import Position, Settings
from lockstep.data.order import cut
from samples import (
    SkippingStream,
    Stream,
    batches,
    union,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("size", [24, 21, 5])
def test_a_stream_is_cut_the_same_way_by_any_number_of_workers_and_loaders(size: int) -> None:
    alone = union(lambda rank, of: batches(Stream(size), Settings(6, 3, epochs=2)), 1)
    each = -(-size // 6)
    for epoch in range(2):
        numbers: list[int] = []
        for position, count, ends, shards in alone[epoch * each : (epoch + 1) * each]:
            assert position.epoch == epoch
            assert ends == (position.step == each - 1)
            assert [shards[n][0] for n in range(3)] == [len(places) for places in cut(count, 3)]
            for _, data in shards.values():
                if data is not None:
                    numbers += torch.frombuffer(bytearray(data[0][2]), dtype=torch.int64).tolist()
        assert sorted(numbers) == list(range(size))
    for workers, loaders in ((2, 0), (3, 0), (1, 1), (1, 2), (2, 3)):
        other = Settings(6, 3, epochs=2, num_workers=loaders)
        assert union(lambda rank, of, s=other: batches(Stream(size), s, rank=rank, size=of), workers) == alone


def test_a_stream_with_a_length_is_a_stream() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.size

    assert batches(Sized(8), Settings(4, 1)).steps_in_all is None
    assert len(list(batches(Sized(9), Settings(4, 1)))) == 3


def test_a_stream_knows_its_epoch_and_drops_its_last_batch() -> None:
    given = union(lambda rank, of: batches(SkippingStream(9), Settings(4, 1, epochs=2, drop_last=True)), 1)
    numbers = [torch.frombuffer(bytearray(shards[0][1][0][2]), dtype=torch.int64).tolist() for *_, shards in given]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007]]
    assert [ends for *_, ends, _ in given] == [False, True, False, True]


class Cursor:
    def __init__(self, size: int) -> None:
        self.next, self.size, self.read = 0, size, 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> int:
        if self.next >= self.size:
            raise StopIteration
        self.next, self.read = self.next + 1, self.read + 1
        return self.next - 1


class JumpingCursor(Cursor):
    def skip(self, count: int) -> None:
        self.next = count


class Numbers:
    """Iterable, and no more than that."""

    def __init__(self, size: int, cursor: type[Cursor]) -> None:
        self.size, self.cursor = size, cursor

    def __iter__(self) -> Cursor:
        self.last = self.cursor(self.size)
        return self.last


@pytest.mark.parametrize(("cursor", "read"), [(Cursor, 40), (JumpingCursor, 10)])
def test_a_stream_is_resumed_by_skipping_or_else_by_reading(cursor: type[Cursor], read: int) -> None:
    dataset = Numbers(40, cursor)
    given = batches(dataset, Settings(5, 1))
    given.seek(Position(0, 6, 6))
    assert [batch.shards[0].data.tolist() for batch in given] == [list(range(30, 35)), list(range(35, 40))]
    assert dataset.last.read == read


def test_a_stream_is_not_begun_before_it_is_used() -> None:
    dataset = Stream(10)
    given = batches(dataset, Settings(5, 1))
    assert dataset.begun == 0
    assert given.steps_in_all is None
    list(given)
    assert dataset.begun == 1


class Once(Stream):
    """Gives samples in its first epoch only."""

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return iter(range(self.size) if self.begun == 1 else ())


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_stream_without_samples_is_an_error(loaders: int) -> None:
    with pytest.raises(ValueError, match=r"rank 0: the stream \(Stream\) gave no samples in epoch 0"):
        list(batches(Stream(0), Settings(4, 1, num_workers=loaders)))
    with pytest.raises(ValueError, match=r"gave fewer samples than one batch of 4 \(drop_last=True\) in epoch 0"):
        list(batches(Stream(3), Settings(4, 1, num_workers=loaders, drop_last=True)))
    with pytest.raises(ValueError, match=r"\(Once\) gave no samples in epoch 1; its __iter__ must start anew"):
        list(batches(Once(4), Settings(4, 1, num_workers=loaders, epochs=2)))
    short = batches(Stream(8), Settings(4, 1, num_workers=loaders))
    short.seek(Position(0, 2, 2))
    with pytest.raises(ValueError, match="ended before sample 8 of epoch 0, where it should go on"):
        list(short)
