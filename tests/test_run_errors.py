"""What is wrong with a program is said on every worker, soon, and in words that help."""

from __future__ import annotations

import errno
import functools
import math
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep import faults
from on_workers import Failure, try_on_workers
from runs import Program, adamw, classify, data, mlp, sgd, train, use
from test_launch import Stage, stage  # noqa: F401  (stage is a fixture)

WORLDS = [2, 3]
SOON_S = 60.0  # on a busy machine; a hang would take 120 and more


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        dataset = data(self.samples)
        return (dataset[n] for n in range(self.samples))


class Promising(Stream):
    def __len__(self) -> int:
        return 96


class SplitStream(IterableDataset):  # type: ignore[type-arg]
    """Gives each worker its own samples, as many as the others; the first `alike` are the same on all."""

    def __init__(self, rank: int, size: int, *, alike: int = 0, noise: bool = False) -> None:
        self.rank, self.size, self.alike, self.noise = rank, size, alike, noise

    def __iter__(self) -> Iterator[Any]:
        dataset = data(64 * self.size)
        own = random.SystemRandom()
        for n in range(self.alike):
            yield dataset[n % 64]
        for n in range(64):
            x, y = dataset[n if self.noise else n * self.size + self.rank]
            yield x + own.random() * self.noise, y


class Here:
    """Which worker we are, and the folder that all share."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.is_last = rank == size - 1

    def last(self, odd: Any, usual: Any) -> Any:
        """Something else on the last worker."""
        return odd if self.is_last else usual

    def run(self, **options: Any) -> lockstep.Run:
        chosen = {"seed": 7, "progress": False, "device": "cpu"} | options
        return lockstep.Run(chosen.pop("directory", None), **chosen)

    def train(
        self,
        loss: Callable[..., Any] = classify,
        *,
        dataset: Any = None,
        model: Callable[[], nn.Module] = mlp,
        batches: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        with self.run(**options) as run:
            net = run.replicate(model())
            chosen = {"global_batch_size": 32, "shards": 8, "epochs": 2} | (batches or {})
            all_batches = run.batches(data(96) if dataset is None else dataset, **chosen)
            before = [p.clone() for p in net.parameters()]
            try:
                for batch in run.train(all_batches, sgd(net.parameters())):
                    before = [p.clone() for p in net.parameters()]
                    run.step(loss, batch)
            except Exception as error:
                unchanged = all(map(torch.equal, before, net.parameters()))
                error.add_note("weights unchanged" if unchanged else "weights changed")
                raise

    def evaluate(self, figures: Callable[..., Any], dataset: Any = None, **options: Any) -> None:
        with self.run() as run:
            run.replicate(mlp())
            run.evaluate(figures, data(96) if dataset is None else dataset, **options)


def many(model: Any, batch: Any) -> tuple[float, int]:
    return 1.0, len(batch[1])


def nan_in(here: Here) -> Callable[..., Any]:
    """On the last worker, whose last shard is number 7 of 8."""

    def loss(model: Any, batch: Any) -> Any:
        total, weight = classify(model, batch)
        return total * here.last(math.nan, 1.0), weight

    return loss


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 3] = math.inf
        return gradient


def infinite(here: Here) -> Callable[..., Any]:
    def loss(model: Any, batch: Any) -> Any:
        total, weight = classify(model, batch)
        return total + InfiniteGradient.apply(model[2].weight).sum() * 0.0 if here.is_last else total, weight

    return loss


def frozen(width: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 10), nn.Linear(3, width))
        model[1].requires_grad_(False)
        model.register_buffer("extra", torch.zeros(width))
        return model

    return build


def strangers(here: Here) -> None:
    with here.run() as run:
        run.replicate(mlp())
        for _ in run.train(run.batches(data(96), global_batch_size=32, shards=8), sgd(mlp().parameters())):
            pass


def before_track(here: Here) -> None:
    with here.run() as run:
        model = run.replicate(mlp())
        batches = run.batches(data(96), global_batch_size=32, shards=8)
        for batch in batches:
            run.step(classify, batch)
        assert model


def not_a_batch(here: Here) -> None:
    with here.run() as run:
        model = run.replicate(mlp())
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=8), sgd(model.parameters())):
            run.step(classify, batch.shards[0].data)


def twice(here: Here, *second: Any) -> None:
    with here.run() as run:
        model = run.replicate(mlp())
        run.replicate(model if not second else second[0])


def without_model(here: Here, call: Callable[[lockstep.Run], Any]) -> None:
    with here.run() as run:
        call(run)


def tracked(run: lockstep.Run, **options: Any) -> None:
    model = options.pop("model", None) or run.replicate(mlp())
    next(iter(run.train(run.batches(data(96), global_batch_size=32, shards=8), sgd(model.parameters()), **options)))


def two_loops(run: lockstep.Run) -> None:
    model = run.replicate(mlp())
    tracked(run, model=model)
    tracked(run, model=model)


def resumed(here: Here, name: str, *, damage: bool = False, **second: Any) -> None:
    """A run, stopped after one step, that goes on with other options."""
    directory = here.folder / name
    program = Program(mlp, sgd, shards=8)
    train(program, steps=1, directory=directory)
    if damage and here.rank == 0:
        path = next((directory / "checkpoints").glob("*/tensors.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with here.run() as run:  # all wait until that is done
        run.on_main(lambda: None)
    here.train(directory=directory, dataset=data(100), **second)


# name -> (what is done, what every worker must say). {size} and {last} stand for numbers.
CASES: dict[str, tuple[Callable[[Here], Any], str]] = {
    # -- sizes
    "dataset shorter than a batch": (
        lambda here: here.train(dataset=data(20)),
        r"ValueError: the dataset \(TensorDataset\) has 20 samples, fewer than one global batch of 32; use a smaller",
    ),
    "fewer shards than workers": (
        lambda here: here.train(batches={"shards": 1}),
        r"ValueError: {size} workers for 1 shards: .* set shards={size} or more",
    ),
    **{
        f"{name}={value}": (
            lambda here, name=name, value=value: here.train(batches={name: value}),
            rf"ValueError: {name}={value}, which must be a whole number of 1 or more",
        )
        for name in ("global_batch_size", "shards", "epochs")
        for value in (0, -2, 1.5)
    },
    **{
        f"evaluate in {value}": (
            lambda here, value=value: here.evaluate(many, batch_size=value),
            rf"ValueError: batch_size={value} must be a whole number, 1 or more",
        )
        for value in (0, -3, 2.5)
    },
    "a loader in place of a dataset": (
        lambda here: here.train(dataset=DataLoader(data(96), batch_size=32)),
        r"ValueError: a DataLoader where a dataset belongs: give `loader.dataset`",
    ),
    "evaluate a loader": (
        lambda here: here.evaluate(many, DataLoader(data(96), batch_size=32)),
        r"ValueError: a DataLoader where a dataset belongs: give `loader.dataset`",
    ),
    "one batch size each": (
        lambda here: here.train(batches={"global_batch_size": here.last(16, 32)}),
        r"ReplicaMismatchError: run.batches: global_batch_size is 32 on rank 0 and 16 on rank {last}; it must be",
    ),
    "one bad batch size": (
        lambda here: here.train(batches={"global_batch_size": here.last(0, 32)}),
        r"ReplicaMismatchError: run.batches: global_batch_size is 32 on rank 0 and 0 on rank {last}",
    ),
    "one dataset each": (
        lambda here: here.train(dataset=data(here.last(20, 96))),
        r"ReplicaMismatchError: run.batches: len\(dataset\) is 96 on rank 0 and 20 on rank {last}",
    ),
    "one order each": (
        lambda here: here.train(batches={"order": here.last(lockstep.Sequential(96, 32), None)}),
        r"ReplicaMismatchError: run.batches: order is None on rank 0 and Sequential on rank {last}",
    ),
    # -- the loss
    "not a number on one": (
        lambda here: here.train(nan_in(here)),
        r"NonFiniteError: step 0 \(epoch 0\): the loss of shards? [\d, ]*7 is not a finite number, on rank [12]; "
        r"of the gradient, 1024 of 1024 elements of 0.weight are infinite or not a number. No worker has taken this"
        r".*weights unchanged",
    ),
    "infinite gradient on one": (
        lambda here: here.train(infinite(here)),
        r"NonFiniteError: step 0 \(epoch 0\): the gradient is not finite: 1 of 4096 elements of 2.weight are infinite"
        r".*weights unchanged",
    ),
    "infinite gradient on one, clipped": (
        lambda here: here.train(infinite(here), max_grad_norm=1.0),
        r"NonFiniteError: step 0 .*2.weight are infinite or.*weights unchanged",
    ),
    "not a number on one, float16": (  # the loss scale is not to blame, so no other one is tried
        lambda here: here.train(nan_in(here), precision="fp16"),
        r"NonFiniteError: step 0 .*the loss of shards? [\d, ]*7 is not a finite number.*weights unchanged",
    ),
    "no pair": (
        lambda here: here.train(lambda model, batch: classify(model, batch)[0]),
        r"TypeError: a loss function returns \(sum, weight\), such as .*; this one returned a Tensor",
    ),
    "not a scalar": (
        lambda here: here.train(lambda model, batch: (model(batch[0]), 4)),
        r"TypeError: .*the sum must be a tensor of one element, not \(4, 10\)",
    ),
    "not a tensor": (
        lambda here: here.train(lambda model, batch: (1.0, 4)),
        r"TypeError: .*the sum must be a tensor of one element, not float",
    ),
    "no graph": (
        lambda here: here.train(lambda model, batch: (classify(model, batch)[0].detach(), 4)),
        r"ValueError: the loss does not depend on any parameter that is trained",
    ),
    "negative weight on one": (
        lambda here: here.train(lambda model, batch: (classify(model, batch)[0], here.last(-1, 4))),
        r"ValueError: step 0: the weight of shard \d is -1.0; .*finite, and not negative.*weights unchanged",
    ),
    "negative tensor on one": (
        lambda here: here.train(lambda model, batch: (classify(model, batch)[0], torch.tensor(here.last(-2, 4)))),
        r"ValueError: step 0: the weight of shard \d is -2.0",
    ),
    "weight is no number on one": (
        lambda here: here.train(lambda model, batch: (classify(model, batch)[0], here.last(math.nan, 4))),
        r"ValueError: step 0: the weight of shard \d is nan",
    ),
    "weight is a string": (
        lambda here: here.train(lambda model, batch: (classify(model, batch)[0], "4")),
        r"TypeError: .*the weight must be a number, or a tensor of one element, not str",
    ),
    "no weight at all": (
        lambda here: here.train(lambda model, batch: (classify(model, batch)[0], 0)),
        r"ValueError: step 0: the weights of all shards add up to 0.0, so there is no mean",
    ),
    # -- the figures
    "other figures on one": (
        lambda here: here.evaluate(lambda model, batch: {"a": (1, 1), here.last("c", "b"): (1, 1)}, batch_size=8),
        r"DesyncError: run.evaluate: rank 0 has the metrics a, b, and rank {last} has a, c; b, c must be there",
    ),
    "other figures in one piece": (
        lambda here: here.evaluate(lambda model, batch: {"a" if len(batch[1]) == 10 else "b": (1, 1)}, batch_size=10),
        r"DesyncError: run.evaluate: .* a, b must be there always or never",
    ),
    "no pair of figures": (
        lambda here: here.evaluate(lambda model, batch: 0.5, batch_size=8),
        r"TypeError: the function given to evaluate returned a float; it must return \(sum, weight\)",
    ),
    "no numbers": (
        lambda here: here.evaluate(lambda model, batch: {"a": ("x", None)}, batch_size=8),
        r"TypeError: the function given to evaluate: a is \('x', None\), which are not two numbers",
    ),
    "nothing to evaluate": (
        lambda here: here.evaluate(many, TensorDataset(torch.empty(0, 16), torch.empty(0))),
        r"ValueError: run.evaluate: the dataset has no samples",
    ),
    "an empty stream": (lambda here: here.evaluate(many, Stream(0)), r"ValueError: .*the dataset has no samples"),
    "evaluate one dataset each": (
        lambda here: here.evaluate(many, data(here.last(90, 96))),
        r"ReplicaMismatchError: run.evaluate: len\(dataset\) is 96 on rank 0 and 90 on rank {last}",
    ),
    "evaluate one stream each": (
        lambda here: here.evaluate(many, Stream(here.last(30, 96)), batch_size=8),
        r"ReplicaMismatchError: run.evaluate: samples in the dataset is 96 on rank 0 and 30 on rank {last}",
    ),
    "evaluate one stream each, of the same length, they say": (
        lambda here: here.evaluate(many, Promising(here.last(30, 96)), batch_size=8),
        r"ReplicaMismatchError: run.evaluate: samples in the dataset is 96 on rank 0 and 30 on rank {last}",
    ),
    "evaluate one empty stream": (
        lambda here: here.evaluate(many, Stream(here.last(0, 96)), batch_size=8),
        r"ReplicaMismatchError: run.evaluate: samples in the dataset is 96 on rank 0 and 0 on rank {last}",
    ),
    "log other names": (
        lambda here: without_model(here, lambda run: run.log(**{here.last("x", "y"): 1})),
        r"DesyncError: run.log: rank 0 has the metrics y, and rank {last} has x; x, y must be there",
    ),
    "log more names": (
        lambda here: without_model(here, lambda run: run.log(a=1, **here.last({"b": 2}, {}))),
        r"DesyncError: run.log: rank 0 has the metrics a, and rank {last} has a, b; b must be there always or never",
    ),
    "log words": (
        lambda here: without_model(here, lambda run: run.log(name="net")),
        r"TypeError: run.log: name is \('net', 1.0\), which are not two numbers",
    ),
    # -- streams
    "a stream that ends early on one": (
        lambda here: here.train(dataset=Stream(here.last(40, 96))),
        r"UnevenDataError: step 1: the workers have different batches \(samples: 32 on rank 0, 8 on rank {last}\)",
    ),
    "a stream that ends with a batch on one": (
        lambda here: here.train(dataset=Stream(here.last(64, 96)), directory=here.folder / "ends"),
        r"UnevenDataError: step 1: .*\(the end of an epoch: False on rank 0, True on rank {last}\)",
    ),
    "a stream that ends early on the first": (
        lambda here: here.train(dataset=Stream(96 if here.rank else 64), directory=here.folder / "ends first"),
        r"UnevenDataError: step 1: .*\(the end of an epoch: True on rank 0, False on rank 1\)",
    ),
    "a stream with a short last batch on one": (
        lambda here: here.train(dataset=Stream(here.last(94, 95))),
        r"UnevenDataError: step 2: .*\(samples: 31 on rank 0, 30 on rank {last}\)",
    ),
    "a stream that is split by rank, in equal halves": (
        lambda here: here.train(dataset=SplitStream(here.rank, here.size)),
        r"UnevenDataError: step 0: rank 1 has read other samples .*remove that, or say `run.batches.*weights unchanged",
    ),
    "a stream that is split by rank, late": (
        lambda here: here.train(dataset=SplitStream(here.rank, here.size, alike=32 * 64)),
        r"UnevenDataError: step 64: rank 1 has read other samples for this batch than rank 0",
    ),
    "a stream that seeds itself": (
        lambda here: here.train(dataset=SplitStream(here.rank, here.size, noise=True)),
        r"UnevenDataError: step 0: rank 1 has read .*draw from torch, random or numpy.random, which the run seeds",
    ),
    "evaluate a stream that is split by rank": (
        lambda here: here.evaluate(many, SplitStream(here.rank, here.size), batch_size=8),
        r"UnevenDataError: run.evaluate: the workers have read different samples.* remove that",
    ),
    # -- one of each
    "one seed each": (
        lambda here: here.train(seed=here.last(8, 7)),
        r"ReplicaMismatchError: Run: seed is 7 on rank 0 and 8 on rank {last}; it must be the same on all workers",
    ),
    "one exactness each": (
        lambda here: here.train(exact=here.last(False, True)),
        r"ReplicaMismatchError: Run: exact is True on rank 0 and False on rank {last}",
    ),
    "one max_grad_norm each": (
        lambda here: here.train(max_grad_norm=here.last(2.0, None)),
        r"ReplicaMismatchError: Run: options is .*max_grad_norm=None.* on rank 0 and .*max_grad_norm=2.0.* on rank",
    ),
    "one width each": (
        lambda here: here.train(model=lambda: nn.Linear(16, here.last(12, 10))),
        r"ReplicaMismatchError: .*params\[0\] \(weight\) on rank {last} with sizes \[12, 16\] appears not to match",
    ),
    "one number of layers each": (
        lambda here: here.train(model=lambda: here.last(mlp(), mlp()[:3])),
        r"ReplicaMismatchError: .*Rank {last} has 6 params, while rank 0 has inconsistent 4 params. .*: 4.weight",
    ),
    "one frozen layer each": (
        lambda here: here.train(model=frozen(here.last(5, 4))),
        r"ReplicaMismatchError: .*\(1.weight\) on rank {last} with sizes \[5, 3\]",
    ),
    "frozen on one": (
        lambda here: here.train(model=lambda: mlp().requires_grad_(not here.is_last)),
        r"ReplicaMismatchError: .*Rank {last} has 0 params, while rank 0 has inconsistent 6 params",
    ),
    # -- programs
    "parameters of another model": (strangers, r"ValueError: the optimiser has 6 parameters that the replicated model"),
    "step before track": (before_track, r"LockstepError: run.step belongs into `for batch in run.train"),
    "not a batch": (not_a_batch, r"TypeError: run.step takes a batch from run.train, not a list"),
    "replicate twice": (twice, r"LockstepError: a Run trains one model: put both into one nn.Module, or"),
    "a second model": (lambda here: twice(here, mlp()), r"LockstepError: a Run trains one model"),
    "not a model": (
        lambda here: without_model(here, lambda run: run.replicate(7)),
        r"TypeError: run.replicate takes a torch.nn.Module, not int",
    ),
    "nothing to train": (
        lambda here: without_model(here, lambda run: run.replicate(nn.ReLU())),
        r"ValueError: ReLU has no parameter that requires a gradient: nothing to train",
    ),
    "track without a model": (
        lambda here: without_model(here, lambda run: tracked(run, model=mlp())),
        r"LockstepError: run.train needs a model: call run.replicate\(model\) first",
    ),
    "two loops": (
        lambda here: without_model(here, two_loops),
        r"LockstepError: a Run has one loop: run.train goes over all epochs",
    ),
    "evaluate without a model": (
        lambda here: without_model(here, lambda run: run.evaluate(many, data(32))),
        r"LockstepError: run.evaluate needs a model",
    ),
    "save too early": (
        lambda here: without_model(here, lambda run: run.save()),
        r"LockstepError: run.save has nothing to save before",
    ),
    "once on no rank": (
        lambda here: without_model(here, lambda run: run.on_main(print, rank=-1)),
        r"ValueError: rank=-1: there are ranks 0 to {last}",
    ),
    "per": (
        lambda here: without_model(here, lambda run: tracked(run, interval="minute")),
        r"""ValueError: interval='minute' is not known; choose "step" or "epoch\"""",
    ),
    # -- options
    "unknown option": (
        lambda here: here.run(clip=1),
        r"TypeError: Run has no option 'clip': it is called max_grad_norm= here",
    ),
    **{
        f"{name}={value!r}": (
            lambda here, name=name, value=value: here.run(**{name: value}),
            rf"(ValueError|TypeError): {name}={re.escape(repr(value))} (is not known; choose|must be)",
        )
        for name, value in (
            ("precision", "fp8"),
            ("grad_comm_dtype", "int8"),
            ("grad_comm", "INT8"),
            ("grad_comm", 8),
            ("grad_comm", False),
            ("on_nonfinite", "cry"),
            ("max_grad_norm", 0.0),
            ("max_grad_norm", "1"),
            ("check_every", 0),
            ("audit_every", -1),
            ("threads", 0),
            ("seed", 1.0),
            ("seed", "7"),
        )
    },
    **{
        f"save_every={value!r}": (
            lambda here, value=value: here.run(save_every=value),
            rf"ValueError: save_every: {re.escape(repr(value))} is not how often to save: a number of steps such as",
        )
        for value in (0, -1, True, 2.5, "0", "0s", "5 minutes", "m", "")
    },
    "one save_every each": (
        lambda here: here.train(save_every=here.last("5m", 5)),
        r"ReplicaMismatchError: Run: options is .*save_every=5,.* on rank 0 and .*save_every='5m'.* on rank {last}",
    ),
    "audit without exactness": (
        lambda here: here.train(audit_every=1, exact=False),
        r"ValueError: audit_every= needs exact=True and a map-style dataset",
    ),
    "audit of a stream": (
        lambda here: here.train(dataset=Stream(96), audit_every=1),
        r"ValueError: audit_every= needs exact=True and a map-style dataset",
    ),
    # -- going on
    "another seed": (
        lambda here: resumed(here, "seed", seed=8),
        r"CheckpointError: .*/seed/checkpoints/step-000000001 is of another run .*seed is 7 in the checkpoint and 8 in "
        r"the program\nUse what it was saved with, or another directory. Nothing was changed. weights unchanged",
    ),
    "another number of shards": (
        lambda here: resumed(here, "shards", batches={"shards": 4}),
        r"CheckpointError: .*shards is 8 in the checkpoint and 4 in the program",
    ),
    "another batch": (
        lambda here: resumed(here, "batch", batches={"global_batch_size": 16}),
        r"ValueError: cannot resume at step 1 of epoch 0, .*: global_batch_size was 32 and is 16",
    ),
    "another model": (
        lambda here: resumed(here, "model", model=lambda: nn.Linear(16, 10)),
        r"CheckpointError: .*weight \[10, 16\] float32 is not in the checkpoint.*weights unchanged",
    ),
    "a damaged checkpoint": (
        lambda here: resumed(here, "damaged", damage=True),
        r"CheckpointError: .*step-000000001/tensors.safetensors is damaged: its SHA-256",
    ),
}


def go_wrong(rank: int, size: int, backend: str, folder: Path) -> dict[str, Any]:
    use(backend, str(folder / "store"), rank, size)
    here, found = Here(rank, size, folder), {}
    for name, (call, _) in CASES.items():
        print(f"{size} workers: rank {rank}: {name}", flush=True)
        began = time.monotonic()
        try:
            call(here)
            said = "no error"
        except Exception as error:
            said = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        found[name] = (said, time.monotonic() - began)
    return found


@functools.cache
def outcomes(size: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return try_on_workers(go_wrong, size, "gloo" if size == 3 else "shm", Path(folder))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_workers_say_what_is_wrong(size: int, name: str) -> None:
    for rank, found in enumerate(outcomes(size)):
        assert not isinstance(found, Failure), found
        said, took_s = found[name]
        expected = CASES[name][1].replace("{size}", str(size)).replace("{last}", str(size - 1))
        assert re.match(expected, said, re.DOTALL), f"rank {rank} said: {said}"
        assert took_s < SOON_S


# ---- batches that are left out -----------------------------------------------------------------------------------


def skip_some(rank: int, size: int, backend: str, store: str) -> Any:
    """Steps 1 and 4 have a shard whose loss is not a number, step 2 one whose gradient is infinite."""
    use(backend, store, rank, size)
    results = []
    with lockstep.Run(seed=7, progress=False, device="cpu", on_nonfinite="skip") as run:
        model = run.replicate(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
        optimizer = adamw(model.parameters())
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=8, epochs=3), optimizer):
            number = batch.number

            def loss(model: Any, batch: Any, number: int = number) -> Any:
                x, y = batch
                out = model(x)
                odd = bool((y == 3).any())  # some shards, whichever worker runs them
                total = nn.functional.cross_entropy(
                    InfiniteGradient.apply(out) if odd and number == 2 else out, y, reduction="sum"
                )
                return total * (math.nan if odd and number in (1, 4) else 1.0), len(y)

            result = run.step(loss, batch)
            results.append((result.skipped, repr(result.loss), repr(result.grad_norm)))
        return results, run.digest()


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_skip_together_and_go_on_with_the_same_bits(size: int) -> None:
    found = skipped(size)
    assert not any(isinstance(one, Failure) for one in found), found
    assert all(one == skipped(1)[0] for one in found)
    results, _ = found[0]
    assert [was_skipped for was_skipped, _, _ in results] == [n in (1, 2, 4) for n in range(9)]
    assert [loss == "nan" for _, loss, _ in results] == [n in (1, 4) for n in range(9)]


@functools.cache
def skipped(size: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return try_on_workers(skip_some, size, "gloo" if size == 3 else "shm", f"{folder}/store")


# ---- one worker fails alone -------------------------------------------------------------------------------------


def fail_alone(rank: int, size: int, backend: str, store: str, place: str) -> None:
    """On rank 1: an exception that ends its process, or a kill."""
    use(backend, store, rank, size)

    def fail(*_: Any) -> Any:
        if rank == 1 and place.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise ArithmeticError("of my own")
        return 0

    def loss(model: Any, batch: Any) -> Any:
        if "loss" in place and batches.position.number == 3:
            fail()
        return classify(model, batch)

    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model = run.replicate(mlp())
        batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=2)
        for batch in run.train(batches, sgd(model.parameters())):
            run.step(loss, batch)
        if "evaluate" in place:
            run.evaluate(lambda model, batch: (fail(), 1), data(96), batch_size=8)
        if "log" in place:
            fail()
            run.log(a=1)
        if "once" in place:
            run.on_main(lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)
        if "end" in place:
            fail()


@pytest.mark.few(4)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("place", ["loss", "killed in loss", "evaluate", "log", "killed in once", "end"])
def test_the_others_name_the_one_that_failed(place: str, backend: str, tmp_path: Path) -> None:
    began = time.monotonic()
    found = try_on_workers(fail_alone, 3, backend, str(tmp_path / "store"), place, timeout_s=SOON_S)
    assert time.monotonic() - began < SOON_S
    assert ("died without an error message" if "killed" in place else "ArithmeticError: of my own") in found[1]
    for rank in (0, 2):
        assert re.search(r"PeerLostError: rank 1 \(pid \d+", found[rank]), found[rank]


@pytest.mark.slow
def test_the_launcher_ends_all_and_says_why(stage: Stage) -> None:  # noqa: F811
    script = stage.script(
        f"import lockstep\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from runs import classify, data, mlp, sgd\n"
        "def loss(model, batch):\n"
        "    if rank == 1 and batches.position.number == 3: raise ArithmeticError('of my own')\n"
        "    return classify(model, batch)\n"
        "with lockstep.Run(seed=7, progress=False) as run:\n"
        "    model = run.replicate(mlp())\n"
        "    batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=2)\n"
        "    for batch in run.train(batches, sgd(model.parameters())):\n"
        "        run.step(loss, batch)\n"
    )
    began = time.monotonic()
    done = stage.run("-n", "2", script)
    assert time.monotonic() - began < 2 * SOON_S
    assert done.returncode != 0
    assert "ArithmeticError: of my own" in done.stderr + done.stdout


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_that_could_not_be_saved_does_not_say_that_it_was(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(place: str) -> None:
        if place == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options: dict[str, Any] = {"shard_optimizer": sharded, "progress": False}
    with pytest.raises(SystemExit), lockstep.Run(tmp_path, device="cpu", **options) as run:
        model = run.replicate(mlp())
        batches = run.batches(data(64), global_batch_size=16, shards=2)
        for batch in run.train(batches, adamw(model.parameters())):
            run.step(classify, batch)
            if batch.number == 1:
                monkeypatch.setattr(faults, "hook", fail)
                os.kill(os.getpid(), signal.SIGTERM)
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "could not be saved; the same command continues from the last checkpoint" in said
    assert "saved at step" not in said
