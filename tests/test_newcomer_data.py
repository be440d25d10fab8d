"""What a new user does with datasets, samplers and batches: it works, or the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import lockstep
from lockstep.cli import main as cli
from lockstep.data.reader import DataError
from lockstep.errors import UnevenDataError
from on_workers import Failure, on_workers, try_on_workers
from runs import classify, data, mlp, sgd
from test_launch import Stage, stage  # noqa: F401  (stage is a fixture)

# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loaders": 2}, "run.batches has no option 'loaders': it is called num_workers= here"),
        ({"ahead": 2}, "it is called prefetch_factor= here"),
        ({"collate": list}, "it is called collate_fn= here"),
        ({"pin": True}, "it is called pin_memory= here"),
        ({"global_batch": 8}, "it is called global_batch_size= here"),
        ({"batch": 8}, "it is called global_batch_size= here"),
        ({"batch_size": 8}, "give global_batch_size=, the samples of one step over all workers together"),
        ({"shuffle": True}, "samples are shuffled by default.*order=lockstep.Sequential"),
        ({"sampler": None}, "it is called order= here"),
        ({"worker_init_fn": print}, "random numbers of loader processes follow from"),
        ({"persistent_workers": True}, "loader processes are kept over all epochs anyway"),
        ({"num_worker": 1}, "did you mean num_workers=?"),
        ({"Epochs": 1}, "did you mean epochs=?"),
        ({"xyz": 1}, "it has global_batch_size, shards, epochs, drop_last, num_workers"),
    ],
)
def test_an_unknown_option_of_batches_names_the_right_one(options: dict[str, Any], words: str) -> None:
    run = lockstep.Run()  # not entered: nothing is begun when the names are wrong
    with pytest.raises(TypeError, match=words):
        run.batches(data(32), **options)
    with (
        lockstep.Run(progress=False, device="cpu") as run,
        pytest.raises(ValueError, match="the samples of a step, over"),
    ):
        run.batches(data(32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loaders": 2}, "run.evaluate has no option 'loaders': it is called num_workers= here"),
        ({"batch": 2}, "it is called batch_size= here"),
        ({"global_batch_size": 2}, "it is called batch_size= here"),
        ({"shuffle": False}, "every sample is evaluated exactly once, in the order of the dataset"),
        ({"colate_fn": list}, "did you mean collate_fn=?"),
    ],
)
def test_an_unknown_option_of_evaluate_names_the_right_one(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        lockstep.Run().evaluate(classify, data(32), **options)


# ---- a DataLoader where a dataset belongs ----------------------------------------------------------------------------


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.rand(16), 1)] * 32)


@pytest.mark.parametrize("dataset", [data(32), Numbers()], ids=["map", "stream"])
def test_a_data_loader_is_refused_whatever_it_goes_over(dataset: Any) -> None:
    words = "a DataLoader where a dataset belongs: give `loader.dataset`"
    with lockstep.Run(progress=False, device="cpu") as run:
        run.replicate(mlp())
        with pytest.raises(ValueError, match=words):
            run.batches(DataLoader(dataset, batch_size=4), global_batch_size=8, shards=8)
        with pytest.raises(ValueError, match=words):
            run.evaluate(classify, DataLoader(dataset, batch_size=4))


# ---- samples that do not fit together --------------------------------------------------------------------------------


class Ragged(Dataset):  # type: ignore[type-arg]
    """Sample 5 is not like the others."""

    def __init__(self, usual: Any, odd: Any) -> None:
        self.usual, self.odd = usual, odd

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == 5 else self.usual


@pytest.mark.parametrize(
    ("usual", "odd", "words"),
    [
        (torch.zeros(3, 5), torch.zeros(3, 4), r"sample 4 has shape \(3, 5\) and sample 5 has shape \(3, 4\); if"),
        (
            ([1], np.zeros(5)),
            ([1], np.zeros(4)),
            r"sample 4 has shape \(5,\) and sample 5 has shape \(4,\) in field \[1\]",
        ),
        (
            {"x": (0, {"y": [1, 2]})},
            {"x": (0, {"y": [1, 2, 3]})},
            r"sample 4 has 2 elements and sample 5 has 3 elements in field \['x'\]\[1\]\['y'\]",
        ),
        ({"a": 1}, {"b": 1}, "sample 4 has the keys 'a' and sample 5 has the keys 'b'"),
        ((1, torch.ones(2)), (1, None), r"sample 4 has shape \(2,\) and sample 5 is a NoneType in field \[1\]"),
        (torch.ones(2), "text", r"sample 4 has shape \(2,\) and sample 5 is a str"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(usual: Any, odd: Any, words: str) -> None:
    dataset = Ragged(usual, odd)
    with lockstep.Run(progress=False, device="cpu") as run:
        model = run.replicate(mlp())
        with pytest.raises(DataError, match=rf"rank 0: 4 samples .*\(epoch 0, step 0, shard 1\): {words}.*collate_fn="):
            batches = run.batches(dataset, global_batch_size=8, shards=2, order=lockstep.Sequential(8, 8))
            next(run.train(batches, sgd(model.parameters())))


def test_samples_of_a_stream_and_of_an_own_collate_are_named() -> None:
    class Growing(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return (torch.zeros(n // 7) for n in range(12))

    with lockstep.Run(progress=False, device="cpu") as run:
        run.replicate(mlp())
        with pytest.raises(DataError, match=r"sample 4 has shape \(0,\) and sample 7 has shape \(1,\)"):
            list(run.batches(Growing(), global_batch_size=4, shards=1))
        with pytest.raises(DataError, match=r"sample 4 has shape \(0,\) and sample 7 has shape \(1,\)"):
            run.evaluate(lambda model, batch: (0, len(batch)), Growing(), batch_size=4)
        with pytest.raises(DataError, match=r"TypeError: .*, from collate_fn= with samples 4, 5, 6, 7"):
            list(run.batches(Growing(), global_batch_size=4, shards=1, collate_fn=refuse_ones))


def refuse_ones(samples: list[Any]) -> Any:
    return len(1 if any(len(sample) for sample in samples) else samples)


# ---- a torch sampler as the order ------------------------------------------------------------------------------------


class Stepping(Sampler[int]):
    """Knows its epoch, and nothing else; has no length."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, 64, 2))


def samplers() -> dict[str, Any]:
    """Random numbers from torch, from a generator, none; samples and batches; each once and with replacement."""
    generator = torch.Generator().manual_seed(5)
    weights = [1.0 + n % 7 for n in range(64)]
    return {
        "weighted": WeightedRandomSampler(weights, 80),
        "subset": SubsetRandomSampler(list(range(0, 64, 3)), generator=generator),
        "sequential": SequentialSampler(data(64)),
        "random": RandomSampler(data(64), generator=generator),
        "batch": BatchSampler(RandomSampler(data(64)), 16, drop_last=True),
        "batch weighted": BatchSampler(WeightedRandomSampler(weights, 40), 16, drop_last=False),
        "set_epoch": Stepping(),
    }


def train_sampled(sampler: Any, folder: Path, steps: int | None = None) -> str:
    with lockstep.Run(folder, seed=7, progress=False, device="cpu") as run:
        model = run.replicate(mlp())
        batches = run.batches(data(64), global_batch_size=16, shards=8, epochs=3, order=sampler)
        for batch in run.train(batches, sgd(model.parameters()), steps=steps):
            run.step(classify, batch)
            torch.rand(1 + run.world.rank)  # what else a program draws does not matter
        return run.digest()


def sample_all(rank: int, size: int, folder: Path, steps: int | None) -> dict[str, str]:
    return {name: train_sampled(sampler, folder / name, steps) for name, sampler in samplers().items()}


@pytest.mark.slow
def test_a_sampler_gives_the_same_digest_on_one_worker_and_two_and_after_a_resume(tmp_path: Path) -> None:
    alone = {name: train_sampled(sampler, tmp_path / "alone" / name) for name, sampler in samplers().items()}
    assert len(set(alone.values())) == len(alone)
    before = on_workers(sample_all, 2, tmp_path / "resumed", 3)[0]  # in the middle of an epoch
    assert all(before[name] != alone[name] for name in alone)
    assert on_workers(sample_all, 2, tmp_path / "two", None) == [alone, alone]
    assert {name: train_sampled(one, tmp_path / "resumed" / name) for name, one in samplers().items()} == alone


def test_the_ledger_does_not_ask_a_sampler_for_each_sample(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("weighted", "subset", "sequential", "batch"):
        train_sampled(samplers()[name], tmp_path / name)
        assert cli.main(["ledger", str(tmp_path / name)]) == 0, capfd.readouterr().out
        said = capfd.readouterr().out
        if name in ("sequential", "batch"):
            assert said.count("each sample once") == 3
            assert said.endswith("proven\n")
        else:
            assert said.count("Sampler, which need not use each sample once") == 3
            assert "proven" not in said


class Rng(Sampler[int]):
    """Goes on with its own random numbers wherever it is."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(64).tolist())


def test_samplers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    shared = DistributedSampler(data(64), num_replicas=2, rank=0)
    with lockstep.Run(progress=False, device="cpu") as run:
        for sampler in (shared, BatchSampler(shared, 16, drop_last=False)):
            with pytest.raises(ValueError, match="a DistributedSampler, which gives each worker its own part"):
                run.batches(data(64), global_batch_size=16, shards=8, order=sampler)
        with pytest.raises(
            ValueError, match=r"BatchSampler\(RandomSampler\) has batches of 4, but global_batch_size=16"
        ):
            run.batches(
                data(64),
                global_batch_size=16,
                shards=8,
                order=BatchSampler(RandomSampler(data(64)), 4, drop_last=False),
            )
        with pytest.raises(ValueError, match=r"SequentialSampler.* an iterable dataset has the order it comes in"):
            run.batches(Numbers(), global_batch_size=16, shards=8, order=SequentialSampler(data(64)))
    train_sampled(Rng(), tmp_path, steps=10)
    with pytest.raises(ValueError, match=r"step 2 of epoch 2: Rng, as order .*gives another order there than when"):
        train_sampled(Rng(), tmp_path)


class ByRank(Sampler[int]):
    """Splits the samples itself, under a name of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 64, 2))


def split_twice(rank: int, size: int, folder: Path) -> str:
    with pytest.raises(UnevenDataError, match="step 0: rank 1 has read other samples for this batch than rank 0"):
        train_sampled(ByRank(rank), folder)
    return "refused"


def test_a_sampler_that_splits_by_rank_is_noticed(tmp_path: Path) -> None:
    assert on_workers(split_twice, 2, tmp_path) == ["refused"] * 2


# ---- a stream that splits itself -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_split_stream_is_refused_where_workers_come_and_go(stage: Stage) -> None:  # noqa: F811
    script = stage.script(
        "import lockstep, torch\n"
        "class Part(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(range(8))\n"
        "with lockstep.Run(progress=False, device='cpu') as run:\n"
        "    run.batches(Part(), global_batch_size=8, shards=8, split='worker')\n"
    )
    done = stage.run("-n", "1", "--min", "1", script)
    assert done.returncode != 0
    assert "split='worker' with workers that may come and go" in done.stderr


# ---- a batch is no tuple ---------------------------------------------------------------------------------------------


def unpack(batch: Any) -> None:
    _, _ = batch


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (unpack, TypeError),
        (lambda batch: batch[0], TypeError),
        (lambda batch: batch["x"], TypeError),
        (len, TypeError),
        (lambda batch: batch.to("cpu"), AttributeError),
    ],
    ids=["unpack", "index", "key", "len", "to"],
)
def test_a_batch_says_where_its_data_is(use: Callable[[Any], object], kind: type[Exception]) -> None:
    with lockstep.Run(progress=False, device="cpu") as run:
        model = run.replicate(mlp())
        for batch in run.train(run.batches(data(8), global_batch_size=8, shards=8), sgd(model.parameters())):
            with pytest.raises(
                kind, match=r"a batch is handed to run.step; the data is inside your loss fun"
            ) as caught:
                use(batch)
            assert "for batch in run.train(batches, optimizer):\n        run.step(loss, batch)" in str(caught.value)
            assert batch
            run.step(classify, batch)


# ---- another dataset on each worker ----------------------------------------------------------------------------------


def random_split_of(seed: int) -> Any:
    return random_split(data(64), [48, 16], generator=torch.Generator().manual_seed(seed))[0]


class OwnDice(Dataset[Any]):
    """Other samples each time: nothing can be said about them."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> Any:
        x, y = data(64)[number]
        return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape)).to(x.dtype), y


def trained_on(rank: int, size: int, case: str) -> int:
    torch.manual_seed(rank)
    datasets: dict[str, Callable[[], Any]] = {
        "split": lambda: random_split_of(seed=rank),
        "the same split": lambda: random_split_of(seed=1),
        "noise": lambda: TensorDataset(torch.randn(48, 16), torch.zeros(48).long()),
        "own dice": OwnDice,
    }
    dataset, steps = datasets[case](), 0
    order = RandomSampler(dataset) if case == "noise" else None
    with lockstep.Run(seed=1, progress=False, device="cpu") as run:
        model = run.replicate(mlp())
        batches = run.batches(dataset, global_batch_size=16, shards=4, order=order)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            run.step(classify, batch)
            steps += 1
    return steps


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["split", "noise"])
def test_another_dataset_on_each_worker_is_refused_before_a_step_is_applied(case: str) -> None:
    for outcome in try_on_workers(trained_on, 2, case):
        assert isinstance(outcome, Failure)
        number = 1 if case == "noise" else 0  # with a sampler of the program's own the first one compares the order
        assert f"UnevenDataError: step {number}: rank 1 has read other samples for this batch than rank 0" in outcome
        assert "Make random data and random splits inside of the `with` block of the Run" in outcome


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["the same split", "own dice"])
def test_the_same_dataset_and_one_that_is_different_each_time_are_not(case: str) -> None:
    assert on_workers(trained_on, 2, case) == [3, 3]
