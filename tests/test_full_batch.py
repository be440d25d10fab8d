"""Shards on workers give the gradient of the whole batch: one process takes it in one go, in float64, to compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.data.sample_order import Shuffled, shard_ranges
from on_workers import on_workers
from runs import PROGRAMS, Bags, Cnn, Gpt, Program, Resnet, data, mlp, predict_tokens, sgd, use

BATCH, EPOCHS, SEED = 32, 2, 7
CLOSE = 1e-12


def heavy_first(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Few samples weigh a hundred times as much as the others: the mean of means would be far off."""
    x, y = batch
    weight = torch.where(y < 2, 100.0, 1.0).to(x.dtype)
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum(), weight.sum()


def double(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().double()


def of_doubles(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda model, batch: loss(model, (batch[0].double(), batch[1]))


CASES = {
    "mlp": Program(double(mlp), sgd),
    "cnn with batch norm": Program(double(Cnn), sgd, samples=96),
    "resnet, LARS": Program(double(Resnet), PROGRAMS["resnet, LARS"].optimizer, samples=96),
    # Not AdamW: the bias of attention keys has a gradient of zero, and AdamW makes a step of its rounding error.
    "gpt": Program(double(lambda: Gpt(dropout=0.0)), sgd, of_doubles(predict_tokens)),
    "lstm": Program(double(PROGRAMS["lstm"].build), PROGRAMS["lstm"].optimizer),
    "embedding bag, sparse": Program(double(Bags), PROGRAMS["embedding bag, sparse"].optimizer),
    "clipped": Program(double(mlp), sgd, options={"max_grad_norm": 0.1}),
    "accumulation": Program(double(mlp), sgd, shards=16),
    "uneven weights": Program(double(mlp), sgd, of_doubles(heavy_first)),
    "uneven weights of two shards": Program(double(mlp), sgd, of_doubles(heavy_first), shards=3),
}


class InShards(nn.Module):
    """Batch norm that sees a whole batch and normalises each of its shards by itself."""

    def __init__(self, norm: nn.Module, shards: int) -> None:
        super().__init__()
        self.norm, self.shards = norm, shards

    def forward(self, x: Tensor) -> Tensor:
        before = [b.clone() for b in self.norm.buffers()]
        outputs, after = [], [torch.zeros_like(b) for b in before]
        for span in shard_ranges(len(x), self.shards):
            for buffer, start in zip(self.norm.buffers(), before, strict=True):
                buffer.data = start.clone()
            outputs.append(self.norm(x[span.start : span.stop]))
            for total, buffer in zip(after, self.norm.buffers(), strict=True):
                total += (buffer * (len(span) / len(x))).to(total.dtype) if buffer.is_floating_point() else 0
        for buffer, total in zip(self.norm.buffers(), after, strict=True):
            if buffer.is_floating_point():
                buffer.data = total
        return torch.cat(outputs)


def with_shards(module: nn.Module, shards: int) -> nn.Module:
    for name, child in module.named_children():
        replaced = InShards(child, shards) if isinstance(child, nn.BatchNorm2d) else with_shards(child, shards)
        setattr(module, name, replaced)
    return module


def in_one_go(program: Program, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """A plain loop for one process."""
    torch.manual_seed(0)
    model = program.build()
    model.load_state_dict(initial)
    model = with_shards(model, program.shards)
    optimizer = program.optimizer(model.parameters())
    samples = data(program.samples)
    order = Shuffled(len(samples), BATCH, SEED)
    for epoch in range(EPOCHS):
        for step in range(order.steps(epoch)):
            optimizer.zero_grad()
            total, weight = program.loss(model, samples[order.batch(epoch, step)])
            (total / weight).backward()
            if "max_grad_norm" in program.options:
                nn.utils.clip_grad_norm_(model.parameters(), program.options["max_grad_norm"])
            optimizer.step()
    state = dict(model.state_dict())
    for prefix in [name for name, module in model.named_modules() if isinstance(module, InShards)]:
        state = {name.replace(f"{prefix}.norm.", f"{prefix}."): value for name, value in state.items()}
    return state


def gradients_of_all(rank: int, size: int, backend: str, store: str) -> dict[str, Any]:
    use(backend, store, rank, size)
    found = {}
    for name, program in CASES.items():
        with lockstep.Run(seed=SEED, progress=False, **program.options) as run:
            model = run.replicate(program.build())
            initial = {n: v.clone() for n, v in model.state_dict().items()}
            batches = run.batches(data(program.samples), global_batch_size=BATCH, shards=program.shards, epochs=EPOCHS)
            for batch in run.train(batches, program.optimizer(model.parameters())):
                run.step(program.loss, batch)
            found[name] = tuple({n: v.numpy() for n, v in state.items()} for state in (initial, model.state_dict()))
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, "gloo"), marks=pytest.mark.slow), (3, "shm")],
    ids=lambda world: f"{world[0]}-{world[1]}",
)
def trained(request: pytest.FixtureRequest) -> dict[str, Any]:
    size, backend = request.param
    with tempfile.TemporaryDirectory() as folder:
        return on_workers(gradients_of_all, size, backend, f"{folder}/store")[0]


@pytest.mark.parametrize("name", CASES)
def test_shards_give_the_gradient_of_the_whole_batch(name: str, trained: dict[str, Any]) -> None:
    initial, ours = ({n: torch.as_tensor(v) for n, v in state.items()} for state in trained[name])
    theirs = in_one_go(CASES[name], initial)
    for key, value in theirs.items():
        if value.is_floating_point():
            difference = float((ours[key] - value).norm() / value.norm())
            assert difference < CLOSE, f"{key} differs by {difference:.2g}"


def test_the_mean_of_means_would_be_far_off() -> None:
    """So that the comparison above says something: this is what averaging over workers gives for uneven weights."""
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data(BATCH)[:]

    def gradient(parts: list[range]) -> Tensor:
        model.zero_grad()
        for part in parts:
            total, weight = of_doubles(heavy_first)(model, (x[part.start : part.stop], y[part.start : part.stop]))
            (total / weight / len(parts)).backward()
        return torch.cat([p.grad.view(-1).clone() for p in model.parameters()])  # type: ignore[union-attr]

    right, means = gradient(shard_ranges(BATCH, 1)), gradient(shard_ranges(BATCH, 8))
    assert float((right - means).norm() / right.norm()) > 0.3
