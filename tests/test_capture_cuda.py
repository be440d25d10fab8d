"""Shards that run as CUDA graphs: the bits of eager ones, on any number of workers, or a reason why not."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.step.captured_shard import Lane, recorded_into
from nccl_ranks import on_nccl_ranks
from on_workers import on_workers
from runs import data, train, use
from test_run_cuda import ON_GPU

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EPOCHS = 4  # 16 steps, so that shards are captured in most of them
# Each waits for the GPU, or reads the host, in its forward pass.
NOT_CAPTURED = {"unused branches", "buffer of its own"}


COMPILED = (  # the last has gradient checkpoints
    "mlp, momentum, uneven last batch",
    "cnn with batch norm",
    "gpt with dropout and tied weights, AdamW",
    "bf16, fused AdamW",
    "arrives twice",
)


def train_all(rank: int, size: int, store: str, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    use("shm", store, rank, size)
    return {name: train(ON_GPU[name], device="cuda:0", epochs=EPOCHS, **options) for name in names}


@functools.cache
def results(size: int, capture: Any, *, compiled: bool = False) -> dict[str, Any]:
    names = list(COMPILED if compiled else ON_GPU)
    with tempfile.TemporaryDirectory() as folder:
        options = {"capture": capture, "compile": compiled}
        by_rank = on_workers(train_all, size, f"{folder}/store", names, options)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_captured_shards_give_the_bits_of_eager_ones(size: int, name: str) -> None:
    assert results(size, "auto")[name] == results(1, False)[name]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_compiled_and_captured_shards_give_the_bits_of_compiled_ones(size: int, name: str) -> None:
    assert results(size, "auto", compiled=True)[name] == results(1, False, compiled=True)[name]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_shards_are_captured(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(ON_GPU[name], device="cuda:0", epochs=EPOCHS, progress=True, compile=True)
    assert "shards run as CUDA graphs" in capfd.readouterr().err


@pytest.mark.parametrize("name", ON_GPU)
def test_what_is_captured(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(ON_GPU[name], device="cuda:0", epochs=EPOCHS, progress=True)
    told = capfd.readouterr().err
    print(told)
    assert ("shards run as CUDA graphs" in told) == (name not in NOT_CAPTURED)
    assert ("shards run eagerly, not as CUDA graphs" in told) == (name in NOT_CAPTURED)


# -- programs that cannot be captured, or whose Python values change ---------------------------------------------------

BETA, CALLS, SEEN = [1.0], [0], []  # type: ignore[var-annotated]
CENTER = torch.ones((), device="cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop, self.factor = nn.Linear(16, 10), nn.Dropout(0.1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.lin(x)) * self.factor


def total(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def reads_a_value(model: Any, batch: Any) -> Any:
    loss = total(model, batch)
    return loss * (2.0 if loss.item() > 40 else 1.0), len(batch[1])


def branches_on_data(model: Any, batch: Any) -> Any:
    x, y = batch
    return total(model, (x if x[0, 0] > 0 else -x, y)), len(y)


def selects_by_mask(model: Any, batch: Any) -> Any:
    x, y = batch
    chosen = y > 2
    return total(model, (x[chosen], y[chosen])), chosen.sum()


def draws_on_the_host(model: Any, batch: Any) -> Any:
    return total(model, batch) * (1.0 + random.random()), len(batch[1])


def copies_from_the_host(model: Any, batch: Any) -> Any:
    noise = torch.full((16,), 0.5).to(batch[0].device, non_blocking=True)
    return total(model, (batch[0] + noise, batch[1])), len(batch[1])


def counts_its_calls(model: Any, batch: Any) -> Any:
    CALLS[0] += 1
    return total(model, batch) * (1.0 + CALLS[0] % 3), len(batch[1])


class WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1.0 if gradient.sum().item() < 1e9 else 0.0)


def waits_in_its_backward_pass(model: Any, batch: Any) -> Any:
    return WaitsInBackward.apply(total(model, batch)), len(batch[1])


def writes_to_its_own_state(model: Any, batch: Any) -> Any:
    """As a loss with a running average on the GPU does. It is divided by itself, so that passes repeat."""
    CENTER.mul_(0.9).add_(0.1)
    now = CENTER.clone()
    return total(model, batch) * now / now, len(batch[1])


def keeps_a_history(model: Any, batch: Any) -> Any:
    loss = total(model, batch)
    SEEN.append(loss.detach())
    return loss, len(batch[1])


def reads_beta(model: Any, batch: Any) -> Any:
    return total(model, batch) * BETA[0], len(batch[1])


def ordinary(model: Any, batch: Any) -> Any:
    return total(model, batch), len(batch[1])


REASONS = {
    reads_a_value: "the host waits for the GPU in .*test_capture_cuda.py:",
    branches_on_data: "the host waits for the GPU in .*test_capture_cuda.py:",
    selects_by_mask: "the host waits for the GPU in .*test_capture_cuda.py:",
    draws_on_the_host: "draws random numbers on the host",
    waits_in_its_backward_pass: "Error: .*",
    writes_to_its_own_state: "the pass writes to CENTER, which is no buffer of the model",
    copies_from_the_host: "reads a tensor of the host, in .*test_capture_cuda.py:",
    counts_its_calls: "the pass changes CALLS",
    keeps_a_history: "the pass changes SEEN",
}


def run_model(
    loss: Any, *, capture: Any, steps: int = 24, between: Callable[[Any, int], None] = lambda model, step: None
) -> str:
    BETA[0], CALLS[0] = 1.0, 0
    SEEN.clear()
    with lockstep.Run(seed=3, device="cuda:0", capture=capture) as run:
        model = run.replicate(Model())
        batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=None)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.05), steps=steps):
            between(model, batch.number)
            run.step(loss, batch)
        return run.digest()


@pytest.mark.parametrize("loss", REASONS, ids=lambda loss: loss.__name__)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(loss: Any, capfd: pytest.CaptureFixture[str]) -> None:
    eager = run_model(loss, capture=False)
    seen = len(SEEN)
    capfd.readouterr()
    assert run_model(loss, capture="auto") == eager
    told = capfd.readouterr().err
    assert re.search(f"run eagerly, not as CUDA graphs: .*{REASONS[loss]}", told), told
    assert len(SEEN) == seen
    with pytest.raises(lockstep.LockstepError, match=f"capture=True, but .*{REASONS[loss]}"):
        run_model(loss, capture=True)


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "a global value, once": lambda model, step: BETA.__setitem__(0, 1.0 if step < 12 else 0.5),
    "a global value, in every step": lambda model, step: BETA.__setitem__(0, 1.0 / (1 + step)),
    "an attribute of the model": lambda model, step: setattr(model, "factor", 1.0 if step < 12 else 2.0),
    "eval mode": lambda model, step: model.train(step < 12) and None,
    "a frozen weight": lambda model, step: setattr(model.lin.bias, "requires_grad", step < 12),
    "other memory": lambda model, step: (
        setattr(model.lin.weight, "data", model.lin.weight.data.clone()) if step == 12 else None
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_between_steps_is_noticed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    eager = run_model(reads_beta, capture=False, between=CHANGES[name])
    if "every" in name:
        assert run_model(reads_beta, capture="auto", between=CHANGES[name]) == eager
        assert "BETA[0] changes from step to step" in capfd.readouterr().err.replace("BETA changes", "BETA[0] changes")
    else:  # captured once more, or capture=True would raise
        assert run_model(reads_beta, capture=True, between=CHANGES[name]) == eager
        assert "shards run as CUDA graphs" in capfd.readouterr().err


def normalises_in_place(model: Any, batch: Any) -> Any:
    batch[0].sub_(batch[0].mean()).mul_(1.5)
    return total(model, batch), len(batch[1])


class WritesSilently(Model):
    """Writes to a buffer through `.data`, which torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x * self.codes)


@pytest.mark.parametrize(
    ("build", "loss", "options"),
    [
        (Model, normalises_in_place, {}),
        (WritesSilently, ordinary, {}),
        (Model, ordinary, {"audit_every": 5}),
        (Model, ordinary, {"precision": "fp16", "on_nonfinite": "skip"}),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)), ordinary, {"audit_every": 3}),
    ],
    ids=["batch changed in place", "silent write", "audits", "fp16", "batch norm and audits"],
)
@pytest.mark.parametrize("shards", [1, 8])
def test_captured_gives_the_bits_of_eager(build: Any, loss: Any, options: dict[str, Any], shards: int) -> None:
    digests, kept = [], []
    for capture in (False, True):
        with lockstep.Run(seed=3, device="cuda:0", capture=capture, progress=False, **options) as run:
            model = run.replicate(build())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            batches = run.batches(data(96), global_batch_size=32, shards=shards, epochs=None)
            for batch in run.train(batches, optimizer, steps=24):
                run.step(loss, batch)
                first = next(model.parameters())
                if batch.number == 20:
                    assert first.grad is not None
                    kept.append((first.grad, first.grad.clone()))
                if batch.number == 12 and options.get("precision") == "fp16":
                    run._loop.state.plan.loss_scale.value /= 4  # type: ignore[union-attr]
            digests.append(run.digest())
            assert not capture or run._loop.state.plan.graphs.count > 0  # type: ignore[union-attr]
    assert digests[0] == digests[1]
    assert all(torch.equal(gradient, copy) for gradient, copy in kept), (
        "a gradient that the program keeps was overwritten"
    )


def test_a_failed_capture_leaves_the_allocator_as_it_was() -> None:
    """Or it would never use the memory of a batch again."""
    reserved: list[int] = []
    run_model(
        waits_in_its_backward_pass,
        capture="auto",
        steps=200,
        between=lambda model, step: reserved.append(torch.cuda.memory_reserved()),
    )
    torch.cuda.empty_cache()  # asserts that no capture is under way
    assert reserved[-1] <= reserved[30] + 2**24


def test_garbage_collection_does_not_end_a_capture() -> None:
    """The garbage is an older graph, as a run before this one leaves it; to destroy it would end the capture."""
    lane, thresholds = Lane(torch.device("cuda:0")), gc.get_threshold()
    older, newer, result = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda:0")
    with lane.active(), recorded_into(older, lane.pool):
        result += 1
    older.replay()
    gc.collect()
    cycle: list[Any] = [older]  # young, so that the next collection finds it
    cycle.append(cycle)
    del older
    gc.set_threshold(100_000, 1, 1)
    try:
        with lane.active(), recorded_into(newer, lane.pool):
            del cycle
            kept = [[] for _ in range(300_000)]  # type: ignore[var-annotated]
            result += 1
    finally:
        gc.set_threshold(*thresholds)
    newer.replay()
    assert gc.isenabled()
    assert len(kept) == 300_000
    assert result.item() == 2


def test_what_no_check_can_see_stops_the_run() -> None:
    """A value that comes from outside of Python objects: the comparison with an eager pass finds it."""

    def reads_the_environment(model: Any, batch: Any) -> Any:
        return total(model, batch) * float(os.environ.get("LOCKSTEP_TEST_FACTOR", "1")), len(batch[1])

    def between(model: Any, step: int) -> None:
        os.environ["LOCKSTEP_TEST_FACTOR"] = "1" if step < 10 else "2"

    with pytest.raises(lockstep.DivergenceError, match=r"captured in step 4.*capture=False"):
        run_model(reads_the_environment, capture="auto", between=between)


def test_one_step_with_an_infinite_loss_is_skipped() -> None:
    def sometimes_infinite(model: Any, batch: Any) -> Any:
        x, y = batch
        return total(model, batch) / (x.sum() != BAD[0]), len(y)

    BAD = [torch.tensor(float("nan"), device="cuda")]

    def train_skipping(capture: Any) -> tuple[str, int]:
        skipped = 0
        with lockstep.Run(seed=3, device="cuda:0", capture=capture, on_nonfinite="skip", progress=False) as run:
            model = run.replicate(Model())
            batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=None)
            for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.05), steps=12):
                BAD[0].copy_(batch.shards[0].data[0].sum() if batch.number == 8 else torch.tensor(float("nan")))
                skipped += run.step(sometimes_infinite, batch).skipped
            return run.digest(), skipped

    eager, captured = train_skipping(False), train_skipping("auto")
    assert eager == captured
    assert eager[1] == 1


CAPTURED_OVER_NCCL = (
    "gpt with dropout and tied weights, AdamW",
    "cnn with batch norm",
    "mlp, momentum, uneven last batch",
)


def train_over_nccl(rank: int, size: int) -> dict[str, Any]:
    return {name: train(ON_GPU[name], device="cuda:0", epochs=4) for name in CAPTURED_OVER_NCCL}


@pytest.mark.parametrize("size", [2, 3])
def test_captured_shards_over_nccl_give_the_bits_of_one_worker(size: int) -> None:
    by_rank = on_nccl_ranks(train_over_nccl, size)
    assert all(found == by_rank[0] for found in by_rank)
    for name, found in by_rank[0].items():
        assert tuple(found) == results(1, False)[name]
