"""Iterable datasets: one sequence, cut the same way by all workers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import lockstep
from lockstep.cli import main as cli
from lockstep.data.batches import Batch, Batches, BatchSettings, DataError, Position
from lockstep.data.sample_order import shard_ranges
from lockstep.errors import UnevenDataError
from on_workers import on_workers
from samples import (
    SkippingStream,
    Stream,
    batches,
    shards_of,
    union,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("size", [24, 21, 5])
def test_a_stream_is_cut_the_same_way_by_any_number_of_workers_and_loaders(size: int) -> None:
    alone = union(lambda rank, of: batches(Stream(size), BatchSettings(6, 3, epochs=2)), 1)
    each = -(-size // 6)
    for epoch in range(2):
        numbers: list[int] = []
        for position, count, ends, shards in alone[epoch * each : (epoch + 1) * each]:
            assert position.epoch == epoch
            assert ends == (position.step == each - 1)
            assert [shards[n][0] for n in range(3)] == [len(places) for places in shard_ranges(count, 3)]
            for _, data in shards.values():
                if data is not None:
                    numbers += torch.frombuffer(bytearray(data[0][2]), dtype=torch.int64).tolist()
        assert sorted(numbers) == list(range(size))
    for workers, loaders in ((2, 0), (3, 0), (1, 1), (1, 2), (2, 3)):
        other = BatchSettings(6, 3, epochs=2, num_workers=loaders)
        assert union(lambda rank, of, s=other: batches(Stream(size), s, rank=rank, size=of), workers) == alone


def test_a_stream_with_a_length_is_a_stream() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.size

    assert batches(Sized(8), BatchSettings(4, 1)).steps_in_all is None
    assert len(list(batches(Sized(9), BatchSettings(4, 1)))) == 3


def test_a_stream_knows_its_epoch_and_drops_its_last_batch() -> None:
    given = union(lambda rank, of: batches(SkippingStream(9), BatchSettings(4, 1, epochs=2, drop_last=True)), 1)
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
    given = batches(dataset, BatchSettings(5, 1))
    given.seek(Position(0, 6, 6))
    assert [batch.shards[0].data.tolist() for batch in given] == [list(range(30, 35)), list(range(35, 40))]
    assert dataset.last.read == read


def test_a_stream_is_not_begun_before_it_is_used() -> None:
    dataset = Stream(10)
    given = batches(dataset, BatchSettings(5, 1))
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
        list(batches(Stream(0), BatchSettings(4, 1, num_workers=loaders)))
    with pytest.raises(ValueError, match=r"gave fewer samples than one batch of 4 \(drop_last=True\) in epoch 0"):
        list(batches(Stream(3), BatchSettings(4, 1, num_workers=loaders, drop_last=True)))
    with pytest.raises(ValueError, match=r"\(Once\) gave no samples in epoch 1; its __iter__ must start anew"):
        list(batches(Once(4), BatchSettings(4, 1, num_workers=loaders, epochs=2)))
    short = batches(Stream(8), BatchSettings(4, 1, num_workers=loaders))
    short.seek(Position(0, 2, 2))
    with pytest.raises(ValueError, match="ended before sample 8 of epoch 0, where it should continue"):
        list(short)


# ---- a stream that knows where it is ---------------------------------------------------------------------------------

READ: list[int] = []  # the samples that were read in this process


class Counted(IterableDataset):  # type: ignore[type-arg]
    """Its own shuffle per epoch, and a state: {"at": number of the next sample}, or what `note` makes of it."""

    def __init__(self, size: int = 40) -> None:
        self.size, self.epoch, self.at = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": [torch.tensor(self.at)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert state["seen"] == [torch.tensor(self.at)]

    def samples(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.size, generator=generator).tolist()

    def __iter__(self) -> Iterator[Any]:
        first, self.at = self.at, 0
        for n, sample in enumerate(self.samples()[first:], first):
            READ.append(sample)
            self.at = n + 1
            yield sample, torch.rand(())
        self.at = 0


class CountedIterator(Counted):
    """The same, with the state in its iterator."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return Cursor2(self.samples())


class Cursor2:
    def __init__(self, samples: list[int]) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Cursor2:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.samples):
            raise StopIteration
        self.at += 1
        READ.append(self.samples[self.at - 1])
        return self.samples[self.at - 1], torch.rand(())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(Counted):
    """As with a shuffle buffer that is not a part of the state: some samples are lost behind it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + 1


class Refusing(Counted):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("of another version")


class Odd(Counted):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": [{1, 2}]}


def resume_all(dataset: Any, stop: int, loaders: int, workers: int) -> tuple[list[Any], list[Any]]:
    """What comes after `stop` batches, and what should."""
    settings = BatchSettings(5, 5, epochs=2, num_workers=loaders)
    whole = union(lambda rank, of: batches(dataset, settings), 1)
    first = batches(dataset, settings)
    for _ in itertools.islice(first, stop):
        pass
    state = first.state()
    READ.clear()

    def resumed(rank: int, of: int) -> Batches:
        rest = batches(dataset, settings, rank=rank, size=of)
        rest.restore(state)
        return rest

    return union(resumed, workers), whole[stop:]


@pytest.mark.few(5)
@pytest.mark.parametrize("dataset", [Counted(), CountedIterator(), Counted(38)], ids=["dataset", "iterator", "uneven"])
@pytest.mark.parametrize("stop", [3, 7, 8, 9, 15, 16])
def test_a_stream_is_resumed_from_its_own_state(dataset: Counted, stop: int) -> None:
    given, expected = resume_all(dataset, stop, loaders=0, workers=1)
    assert given == expected
    assert len(READ) == 2 * dataset.size - min(5 * stop, dataset.size) - 5 * max(stop - 8, 0) or stop == 16
    for loaders, workers in ((0, 2), (2, 1)):
        given, expected = resume_all(dataset, stop, loaders, workers)
        assert given == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Forgetful(), "load_state_dict() of the stream did not lead to sample 20 of epoch 0; the samples before that"),
        (Refusing(), "load_state_dict() of the stream did not lead to sample 20 of epoch 0; the samples before that"),
        (Odd(), "state_dict()['more'][0] of the stream is a set, and a checkpoint holds"),
    ],
    ids=["forgetful", "refusing", "odd"],
)
def test_a_state_that_leads_elsewhere_is_not_used(dataset: Any, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    for loaders, workers in ((0, 1), (2, 2)):
        given, expected = resume_all(dataset, 4, loaders, workers)
        assert given == expected
        assert words in capfd.readouterr().err


def test_the_state_is_that_of_the_batch_in_hand_or_of_the_next_one() -> None:
    given = batches(Counted(), BatchSettings(5, 5, num_workers=2, prefetch_factor=4))
    assert "stream" not in given.state()
    for batch in given:
        before, after = given.state(batch.position), given.state()
        assert before.get("stream", {"state": {"at": 0}})["state"]["at"] == 5 * batch.step
        if not batch.ends_epoch:
            assert after["stream"]["state"]["at"] == 5 * batch.step + 5
        assert (before["step"], after["epoch"]) == (batch.step, int(batch.ends_epoch))


def test_a_state_dict_that_fails_is_named() -> None:
    class Broken(Counted):
        def state_dict(self) -> dict[str, Any]:
            raise OSError("no")

    with pytest.raises(
        DataError, match=r"rank 0: state_dict\(\) of the stream \(Broken\) failed at sample 5 of epoch 0"
    ):
        list(batches(Broken(), BatchSettings(5, 5)))


class Plain40(Counted):
    """The same samples, without a state."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


def train(rank: int, size: int, folder: str, kind: type[Counted], steps: int | None = None) -> tuple[str, int]:
    READ.clear()
    with lockstep.Run(folder, seed=7, progress=False, device="cpu") as run:
        model = run.replicate(torch.nn.Linear(1, 1))
        given = run.batches(kind(), global_batch_size=5, shards=4, epochs=2)
        for batch in run.train(given, torch.optim.SGD(model.parameters(), lr=0.01), steps=steps):
            run.step(lambda model, data: (model(data[1].view(-1, 1)).sum() * data[0].sum(), len(data[0])), batch)
        return run.digest(), len(READ)


@pytest.mark.slow
def test_a_run_is_resumed_without_reading_what_it_had(tmp_path: Path) -> None:
    """On two workers and then one, and the other way round, in the first epoch and in the second one."""
    whole, read = train(0, 1, str(tmp_path / "whole"), Counted)
    assert read == 80
    for kind, late, early in ((Counted, 25, 60), (Plain40, 40, 80)):
        folder = str(tmp_path / kind.__name__)
        on_workers(train, 2, folder, kind, 11)  # up to sample 15 of 40 of the second epoch
        assert train(0, 1, folder, kind) == (whole, late)
        folder = str(tmp_path / f"early {kind.__name__}")
        assert train(0, 1, folder, kind, 4)[1] == 25  # one batch is read ahead
        assert on_workers(train, 2, folder, kind) == [(whole, early)] * 2


# ---- streams that split themselves -----------------------------------------------------------------------------------


class Part(IterableDataset):  # type: ignore[type-arg]
    """Sample r, r + size, r + 2 * size, ... of rank r; the first rank may have more than its share."""

    def __init__(self, rank: int, size: int, samples: int, more: int = 0) -> None:
        self.numbers = list(range(rank, samples, size)) + (list(range(1000, 1000 + more)) if rank == 0 else [])

    def __iter__(self) -> Iterator[Any]:
        return ((number, torch.rand(())) for number in self.numbers)


def together(workers: int, make: Callable[[int], Any], settings: BatchSettings, state: Any = None) -> list[list[Batch]]:
    """The batches of several workers that talk to each other, each in a thread; one at a time draws random numbers."""
    barrier, turn, rows = threading.Barrier(workers, timeout=30), threading.Lock(), [[0]] * workers

    def work(rank: int) -> list[Batch] | Exception:
        def exchange(row: list[int]) -> list[list[int]]:
            rows[rank] = row
            turn.release()
            try:
                barrier.wait()
                told = list(rows)
                barrier.wait()
                return told
            finally:
                turn.acquire()

        with turn:
            given = batches(make(rank), settings, rank=rank, size=workers, exchange=exchange)
            if state is not None:
                given.restore(state)
            try:
                return list(given)
            except Exception as error:
                barrier.abort()
                return error

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(work, range(workers)))
    wrong = [one for one in found if isinstance(one, Exception) and not isinstance(one, threading.BrokenBarrierError)]
    if wrong:
        raise wrong[0]
    return [one for one in found if isinstance(one, list)]


def numbers_of(each: list[list[Batch]]) -> list[list[int]]:
    """The samples of each global batch."""
    found = []
    for parts in zip(*each, strict=True):
        shards = {shard.number: shard for batch in parts for shard in batch.shards}
        assert len({(b.position, b.count, b.ends_epoch, b.counts, b.seen) for b in parts}) == 1
        assert [shards[n].count for n in sorted(shards)] == list(parts[0].counts)
        assert sum(parts[0].counts) == parts[0].count == len(parts[0].seen)
        found.append([n for s in sorted(shards) if shards[s].count for n in shards[s].data[0].tolist()])
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize(("samples", "more"), [(48, 0), (45, 0), (45, 17), (12, 0)])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_make_up_global_batches_and_no_sample_is_lost(workers: int, samples: int, more: int) -> None:
    def make(rank: int) -> Part:
        return Part(rank, workers, samples, more)

    settings = BatchSettings(12, 6, epochs=2, split="worker")
    each = together(workers, make, settings)
    given, all_of_them = numbers_of(each), sorted([*range(samples), *range(1000, 1000 + more)])
    ends = [n + 1 for n, batch in enumerate(each[0]) if batch.ends_epoch]
    assert ends[0] * 2 == ends[1] == len(given)
    for epoch in (given[: ends[0]], given[ends[0] :]):
        assert sorted(itertools.chain(*epoch)) == all_of_them
    assert [len(one) for one in given[: samples // 12]] == [12] * (samples // 12)
    for stop in range(1, len(given)):
        before = each[0][stop].position
        state = {"epoch": before.epoch, "step": before.step, "number": stop, "workers": workers}
        state |= {"global_batch_size": 12, "samples": -1, "seed": 7}
        rest = together(workers, make, settings, state)
        assert numbers_of(rest) == given[stop:]
        assert [list(map(shards_of, one)) for one in rest] == [list(map(shards_of, one[stop:])) for one in each]


def test_parts_with_loader_processes_and_joined_shards_are_the_same_samples() -> None:
    alone = numbers_of([list(batches(Part(0, 1, 45), BatchSettings(12, 6, epochs=2, split="worker")))])
    loaded = numbers_of([list(batches(Part(0, 1, 45), BatchSettings(12, 6, epochs=2, split="worker", num_workers=2)))])
    assert loaded == alone
    for batch, numbers in zip(
        batches(Part(0, 1, 45), BatchSettings(12, 6, epochs=2, split="worker"), joined=True), alone, strict=True
    ):
        assert batch.shards[0].data[0].tolist() == numbers


def test_an_epoch_of_parts_ends_before_the_first_incomplete_batch_if_that_is_dropped() -> None:
    settings = BatchSettings(12, 6, epochs=2, split="worker", drop_last=True)
    given = numbers_of(together(2, lambda rank: Part(rank, 2, 45, 17), settings))
    assert [len(one) for one in given] == [12] * 6
    assert given[:3] == given[3:]


def test_workers_with_parts_draw_other_random_numbers() -> None:
    each = together(2, lambda rank: Part(rank, 2, 48), BatchSettings(12, 6, split="worker"))
    drawn = [value for one in each for batch in one for s in batch.shards for value in s.data[1].tolist()]
    assert len(set(drawn)) == len(drawn) == 48


def test_parts_that_are_the_same_are_refused_and_so_is_what_cannot_be_split() -> None:
    class Whole(Part):
        is_random = False

        def __iter__(self) -> Iterator[Any]:
            return iter(range(48))

    with pytest.raises(
        UnevenDataError, match=r"step 0: rank 1 has the same samples as rank 0; split=\"worker\" is for"
    ):
        together(2, lambda rank: Whole(rank, 2, 48), BatchSettings(12, 6, split="worker"))
    with pytest.raises(ValueError, match="split='rank' is not known"):
        BatchSettings(12, 6, split="rank")
    with pytest.raises(ValueError, match=r'split="worker" for a list: a map-style dataset is not split'):
        batches(list(range(48)), BatchSettings(12, 6, split="worker"))
    with pytest.raises(ValueError, match="gave no samples in epoch 0"):
        together(2, lambda rank: Part(rank, 2, 1), BatchSettings(12, 6, split="worker"))


def train_parts(rank: int, size: int, folder: str, case: str, steps: int | None = None) -> Any:
    """`case`: how the stream is split."""
    kinds = {"env": SplitByEnvironment(), "overlap": Overlapping(rank)}
    losses = []
    with lockstep.Run(folder, seed=7, progress=False, device="cpu", exact=case == "env") as run:
        model = run.replicate(torch.nn.Linear(1, 1))
        given = run.batches(kinds[case], global_batch_size=8, shards=4, epochs=2, split="worker")
        for batch in run.train(given, torch.optim.SGD(model.parameters(), lr=1e-5), steps=steps):
            result = run.step(lambda model, x: (model(x.view(-1, 1)).sum(), len(x)), batch)
            losses.append((batch.count, round(result.weight)))
        return run.digest(), losses


class SplitByEnvironment(IterableDataset):  # type: ignore[type-arg]
    """As libraries do it: by the rank that torch knows. Rank 1 has less."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (torch.tensor(float(n)) for n in range(rank, 41 if rank == 0 else 20, size))


class Overlapping(IterableDataset):  # type: ignore[type-arg]
    """Two samples are in both parts."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(float(n)) for n in (range(20) if self.rank == 0 else range(18, 38)))


def resume_parts(rank: int, size: int, folder: str) -> Any:
    """Everything that two workers can try, in two processes."""
    whole = train_parts(rank, size, f"{folder}/whole", "env")
    train_parts(rank, size, f"{folder}/resumed", "env", 6)
    resumed = train_parts(rank, size, f"{folder}/resumed", "env")
    assert resumed[0] == whole[0]
    train_parts(rank, size, f"{folder}/mid", "env", 2)
    return [whole, train_parts(rank, size, f"{folder}/overlap", "overlap")]


def test_a_run_over_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = on_workers(resume_parts, 2, str(tmp_path))
    assert one == other
    (_, counts), (_, overlap) = one
    assert [count for count, _ in counts] == [8, 8, 6, 4, 4, 1] * 2  # 21 samples on rank 0, 10 on rank 1
    assert all(count == weight for count, weight in counts + overlap)
    with pytest.raises(
        ValueError, match=r"split=\"worker\" the samples of a step depend on the number of workers.* was 2"
    ):
        train_parts(0, 1, str(tmp_path / "mid"), "env")
    assert "split='worker': the samples of a step, and so the bits, depend on the number" in capfd.readouterr().err
    for name in ("whole", "resumed"):
        assert cli.main(["ledger", str(tmp_path / name)]) == 0
        said = capfd.readouterr().out
        assert said.count("6 steps, 31 samples: 31 of them compared by content, none came twice") == 2
    assert cli.main(["ledger", str(tmp_path / "overlap")]) == 1
    assert "2 of 40 samples that were compared came twice" in capfd.readouterr().out
