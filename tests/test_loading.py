"""What can go wrong while loading, and who is left behind."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    Dataset,
)

from lockstep.data.batches import BatchSettings, DataError
from lockstep.data.sample_order import Sequential
from samples import (
    Plain,
    Stream,
    batches,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BatchSettings(0, 8), "global_batch_size=0, which must be a whole number of 1 or more"),
        (lambda: BatchSettings(8.0, 8), "global_batch_size=8.0"),  # type: ignore[arg-type]
        (lambda: BatchSettings(8, 0), "shards=0"),
        (lambda: BatchSettings(8, True), "shards=True"),
        (
            lambda: BatchSettings(8, 8, epochs=0),
            "epochs=0, which must be a whole number of 1 or more, or None for no end",
        ),
        (lambda: BatchSettings(8, 8, epochs="3"), "epochs='3'"),  # type: ignore[arg-type]
        (lambda: BatchSettings(8, 8, num_workers=-1), "num_workers=-1, which must be a whole number of 0 or more"),
        (lambda: BatchSettings(8, 8, prefetch_factor=0), "prefetch_factor=0"),
        (lambda: BatchSettings(8, 8, timeout_s=0), "timeout_s=0"),
        (lambda: BatchSettings(8, 8, collate_fn=3), "collate_fn=3 cannot be called"),  # type: ignore[arg-type]
        (
            lambda: BatchSettings(4, 8),
            "shards=8 of a batch of 4 samples: .* set shards=4 or less, or a larger global_batch_size",
        ),
        (lambda: batches(Plain(7), BatchSettings(8, 8)), r"\(Plain\) has 7 samples, fewer than one global batch of 8"),
        (lambda: batches(Plain(8), BatchSettings(8, 8), size=9), "9 workers for 8 shards"),
        (lambda: batches(Plain(8), BatchSettings(8, 8), rank=2, size=2), "rank=2 is not one of 2 workers"),
        (lambda: batches(Plain(8), BatchSettings(8, 8), seed="a"), "seed='a' is a str; give a plain int"),
        (
            lambda: batches(Plain(8), BatchSettings(8, 8), order=Sequential(9, 8)),
            "an order of 9 samples, but the dataset has 8",
        ),
        (
            lambda: batches(Plain(8), BatchSettings(8, 8), order=Sequential(8, 4)),
            "batches of 4, but global_batch_size=8",
        ),
        (
            lambda: batches(Plain(8), BatchSettings(8, 8, drop_last=True), order=Sequential(8, 8)),
            "drop_last=True with Sequential",
        ),
        (
            lambda: batches(Plain(8), BatchSettings(8, 8), order=[3]),
            r"order=\[3\] is no torch Sampler, and has no steps\(epoch\) and",
        ),
        (
            lambda: batches(Stream(8), BatchSettings(8, 8), order=Sequential(8, 8)),
            "for a Stream: an iterable dataset has the order",
        ),
        (lambda: batches(3, BatchSettings(8, 8)), "a int is no dataset: it needs __getitem__ and __len__"),
        (lambda: batches(Dataset(), BatchSettings(8, 8)), "a Dataset is no dataset"),
        (lambda: batches((i for i in range(9)), BatchSettings(8, 8)), "a generator can be iterated over only once"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("first", "words"),
    [([], "has no samples"), ([20], "contains sample 20"), (7, "must be a list of sample numbers"), (None, "must be")],
)
def test_the_first_batch_of_an_order_is_looked_at_before_anything_is_loaded(first: Any, words: str) -> None:
    class Wrong:
        def steps(self, epoch: int) -> int:
            return 1

        def batch(self, epoch: int, step: int) -> Any:
            return first

    with pytest.raises(ValueError, match=rf"Wrong.batch\(epoch=0, step=0\) {words}"):
        batches(Plain(20), BatchSettings(4, 2), order=Wrong())


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Broken(Plain):
    """Sample 15 cannot be read."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__(20)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 15:
            raise self.error()
        return index


class BrokenStream(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(13)
        raise OSError("cable pulled")


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize(
    ("error", "cause"),
    [(lambda: KeyError("x"), KeyError), (lambda: Unpicklable(1, 2), Exception), (StopIteration, StopIteration)],
)
def test_a_sample_that_cannot_be_read_is_named_at_its_turn(error: Any, cause: type[Exception], loaders: int) -> None:
    seen = []
    with pytest.raises(DataError, match=r"rank 1: dataset\[15\] failed in epoch 0, step 3: ") as caught:
        for batch in batches(
            Broken(error),
            BatchSettings(4, 2, num_workers=loaders, prefetch_factor=4),
            rank=1,
            size=2,
            order=Sequential(20, 4),
        ):
            seen.append(batch.number)
    assert seen == [0, 1, 2]
    assert isinstance(caught.value.__cause__, cause)
    assert str(error()) in str(caught.value)
    if loaders:
        assert "in __getitem__" in "".join(caught.value.__cause__.__notes__)


def test_what_cannot_be_put_together_or_streamed_is_named() -> None:
    class Ragged(Plain):
        def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
            return torch.zeros(index)

    with pytest.raises(DataError, match=r"rank 0: 4 samples .* \(epoch 0, step 0, shard 0\): .*give collate_fn="):
        list(batches(Ragged(8), BatchSettings(8, 2)))
    for loaders in (0, 1):
        with pytest.raises(DataError, match=r"rank 0: the stream \(BrokenStream\) failed at sample 13 of epoch 0: OSE"):
            list(batches(BrokenStream(20), BatchSettings(4, 2, num_workers=loaders)))


class Sleepy(Plain):
    def __getitem__(self, index: int) -> int:
        time.sleep(1.5 if index == 5 else 0)
        return index


class Suicidal(Plain):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_loader_process_that_hangs_is_an_error_and_gone_while_that_is_held() -> None:
    with pytest.raises(
        DataError, match=r"rank 0: loading with 1 loader processes failed: .*timed out.* raise timeout_s"
    ):
        try:
            list(batches(Sleepy(8), BatchSettings(2, 2, num_workers=1, timeout_s=0.5), order=Sequential(8, 2)))
        finally:
            assert not loaders_alive()


class DiesOnce(Suicidal):
    def __init__(self, length: int, died: Path) -> None:
        super().__init__(length)
        self.died = died

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.died.exists():
            self.died.touch()
            return super().__getitem__(index)
        return index


def test_a_loader_process_that_is_lost_is_replaced_and_no_sample_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Torch's handler of SIGCHLD raises wherever the program happens to be. It may come too late, or not at all.
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_set_SIGCHLD_handler", lambda: None)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        began_s = time.monotonic()
        found = list(
            batches(DiesOnce(8, tmp_path / "died"), BatchSettings(2, 2, num_workers=1), order=Sequential(8, 2))
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [shard.data.tolist() for batch in found for shard in batch.shards] == [[n] for n in range(8)]
    assert time.monotonic() - began_s < 10
    assert "another one is started" in capfd.readouterr().err


def test_a_loader_process_that_is_lost_does_not_end_what_its_parent_is_doing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = []
    for batch in batches(Plain(40), BatchSettings(2, 2, num_workers=1), order=Sequential(40, 2)):
        found += [shard.data.item() for shard in batch.shards]
        if batch.number == 3:
            (loader,) = loaders_alive()
            os.kill(loader, signal.SIGKILL)
            time.sleep(0.3)  # the signal of its death comes
    assert found == list(range(40))
    assert "another one is started" in capfd.readouterr().err


def test_a_loader_process_makes_no_files_in_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed would leave them."""
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", None)  # a call of it fails
    found = list(batches(Tensors(8), BatchSettings(2, 2, num_workers=1), order=Sequential(8, 2)))
    assert torch.cat([shard.data for batch in found for shard in batch.shards]).tolist() == list(range(8))


class Tensors(Plain):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_a_loader_process_that_dies_is_an_error() -> None:
    # Either we find out first, or torch's handler of SIGCHLD does, which raises wherever the program happens to be.
    with pytest.raises(
        RuntimeError, match=r"if a process was killed, the machine may be|DataLoader worker .* killed by"
    ):
        list(batches(Suicidal(8), BatchSettings(2, 2, num_workers=1), order=Sequential(8, 2)))


# ---- loader processes ------------------------------------------------------------------------------------------------


class Slow(Plain):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def is_gone(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    return True


def loaders_alive() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid and not is_gone(child.pid)]


@pytest.mark.parametrize("dataset", [Plain(80), Stream(80)], ids=["map", "stream"])
def test_loader_processes_live_over_all_epochs_and_go_with_the_loop(dataset: Any) -> None:
    assert not loaders_alive()
    given = batches(dataset, BatchSettings(8, 4, epochs=3, num_workers=2))
    assert not loaders_alive()
    pids = {tuple(sorted(loaders_alive())) for _ in itertools.islice(given, 25)}
    assert len(pids) == 1
    assert len(pids.pop()) == 2
    gc.collect()
    assert not loaders_alive()
    for _ in given:
        assert len(loaders_alive()) == 2
        break
    assert not loaders_alive()
    held = iter(given)
    next(held)
    assert len(loaders_alive()) == 2
    del held, given
    assert not loaders_alive()


def test_loader_processes_go_when_the_loop_fails_even_while_the_traceback_is_held() -> None:
    given = batches(Broken(lambda: KeyError("x")), BatchSettings(4, 2, num_workers=2, prefetch_factor=4))
    try:
        list(given)
    except DataError as error:
        kept = error
        assert not loaders_alive()
    assert kept.__traceback__ is not None
    given = batches(Plain(20), BatchSettings(4, 2, num_workers=2))

    def train() -> None:
        for _ in given:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()
    assert not loaders_alive()


def train_forever(tell: Connection, wait_for_batch: bool) -> None:
    given = iter(batches(Slow(80), BatchSettings(8, 4, num_workers=2)))
    if wait_for_batch:
        next(given)
        tell.send([child.pid for child in multiprocessing.active_children()])
        time.sleep(60)
    start = os.fork

    def fork_and_die() -> int:
        pid = start()
        if pid:
            tell.send([pid])
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    os.fork = fork_and_die
    next(given)


@pytest.mark.parametrize("wait_for_batch", [True, False], ids=["working", "just begun"])
def test_loader_processes_do_not_outlive_a_killed_trainer(wait_for_batch: bool) -> None:
    mine, theirs = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=train_forever, args=(theirs, wait_for_batch))
    trainer.start()
    assert mine.poll(30)
    pids = mine.recv()
    trainer.kill()
    trainer.join()
    assert len(pids) == (2 if wait_for_batch else 1)
    end = time.monotonic() + 3  # torch's own watchdog takes 5, or does not notice
    while not all(map(is_gone, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert all(map(is_gone, pids))


class Threads(Plain):
    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


def test_a_loader_process_uses_one_thread() -> None:
    assert {int(s.data.max()) for b in batches(Threads(8), BatchSettings(4, 2, num_workers=1)) for s in b.shards} == {1}


@pytest.mark.parametrize("loaders", [0, 1])
def test_waiting_is_the_consumers_waiting_only(loaders: int) -> None:
    given = batches(Slow(12), BatchSettings(4, 2, num_workers=loaders))
    began = time.perf_counter()
    for _ in given:
        time.sleep(0.1)
    elapsed = time.perf_counter() - began
    assert given.wait_s < elapsed - 0.3
    assert given.wait_s > (0.08 if loaders else 0.24)


class Bomb:
    """In a cycle, so only the garbage collector finds it. Tells in which process it did."""

    def __init__(self, told: Path) -> None:
        self.me, self.told = self, told

    def __del__(self) -> None:
        with self.told.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Plain):
    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return super().__getitem__(index)


def test_a_loader_process_does_not_collect_what_is_its_parents(tmp_path: Path) -> None:
    """A process group among it would wait there for threads that only the parent has."""
    told = tmp_path / "told"
    gc.collect()
    gc.disable()
    try:
        Bomb(told)
        assert len(list(batches(Collecting(6), BatchSettings(2, 2, num_workers=1)))) == 3
    finally:
        gc.enable()
    assert not told.exists()
    gc.collect()
    assert told.read_text() == f"{os.getpid()}\n"
