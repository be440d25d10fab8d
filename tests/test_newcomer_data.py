"""What a new user does with datasets, samplers and batches: it works, or the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lockstep
from lockstep.data.reader import DataError
from runs import classify, data, mlp, sgd

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
        ({"persistent_workers": True}, "loader processes live over all epochs anyway"),
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
            run.batches(DataLoader(dataset, batch_size=4), global_batch_size=8)
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
        for batch in run.train(run.batches(data(8), global_batch_size=8), sgd(model.parameters())):
            with pytest.raises(
                kind, match=r"a batch is handed to run.step; the data is inside your loss fun"
            ) as caught:
                use(batch)
            assert "for batch in run.train(batches, optimizer):\n        run.step(loss, batch)" in str(caught.value)
            assert batch
            run.step(classify, batch)
