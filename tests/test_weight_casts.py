"""Copies of weights that captured passes read instead of casting the weights, on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import _torch
from lockstep.ddp.replica import trained_leaves
from lockstep.step import captured_shard
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.captured_shard import CapturedShard, ShardPass
from lockstep.step.loss_check import ShardLoss, parse_loss
from lockstep.step.weight_casts import WeightCasts, only_uses

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled code, with which there are no copies."""
    monkeypatch.setattr(_torch, "has_compiled_code", lambda: False)


class Tied(nn.Module):
    """An embedding that is also the last layer, a weight whose cast is written to, a layer that is used twice, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.twice, self.norm = (
            nn.Embedding(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
        )
        self.doubled, self.frozen = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.hidden(x + self.embedding(torch.arange(6)))
        found = self.norm(self.frozen(self.twice(found.relu()) + self.twice(found)))
        return F.linear(found, self.embedding.weight) @ self.doubled.to(torch.bfloat16).mul_(2)


class CastCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].shape == (8, 8)
        return func(*args, **(kwargs or {}))


def loss_of(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(X).float().square().sum()


def test_a_pass_with_copies_has_the_bits_of_one_without() -> None:
    torch.manual_seed(1)
    model = Tied()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    casts = WeightCasts(model.parameters())
    with casts.noting() as made:
        loss_of(model).backward()
    cast_weights = {"embedding.weight", "hidden.weight", "hidden.bias", "twice.weight", "twice.bias"}
    assert {names[id(one.weight)] for one in made} >= cast_weights | {"doubled", "frozen.weight", "frozen.bias"}
    assert [names[id(one.weight)] for one in made if one.is_written] == ["doubled"]
    casts.copy(made)
    assert casts.has_copies
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    casts.refresh()

    want = loss_of(model)
    model.zero_grad()
    want.backward()
    gradients = {id(parameter): parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    with CastCounter() as counter, casts.replacing() as made:
        found = loss_of(model)
    assert counter.count == 1  # "doubled", which the pass writes to
    assert not casts.were_written(made)
    assert torch.equal(found, want)
    narrow = {id(one.weight): one.result for one in only_uses(found, made)}
    assert {names[one] for one in narrow} == cast_weights - {"embedding.weight"}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    read = torch.autograd.grad(found, [narrow.get(id(parameter), parameter) for parameter in trained])
    for parameter, gradient in zip(trained, read, strict=True):
        want_gradient = gradients[id(parameter)]
        assert gradient.dtype == (torch.bfloat16 if id(parameter) in narrow else torch.float32)
        assert want_gradient is not None
        assert torch.equal(gradient.float(), want_gradient)


class Codebook(nn.Module):
    """A weight that is cast for the choice of rows, which has no gradient, and whose rows are used; and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.linear(x, self.rows).argmax(1)
        return self.last(F.embedding(chosen, self.rows))  # type: ignore[no-any-return]


def test_a_cast_that_is_not_the_use_of_its_weight_is_left_out() -> None:
    model = Codebook()
    casts = WeightCasts(model.parameters())
    with casts.noting() as made:
        loss = loss_of(model)
    assert any(one.weight is model.rows for one in made)
    assert {id(one.weight) for one in only_uses(loss, made)} == {id(model.last.weight), id(model.last.bias)}


def test_weights_with_hooks_get_their_own_gradient() -> None:
    model = Codebook()
    casts = WeightCasts(model.parameters())
    model.last.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    with casts.noting() as made:
        loss = loss_of(model)
    assert {id(one.weight) for one in only_uses(loss, made)} == {id(model.last.bias)}


class OwnFunction(torch.autograd.Function):
    """With an attribute that has the name of one of autograd's leaves."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.variable = x
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        return gradient * 2


def test_functions_of_the_program_are_followed() -> None:
    layer = nn.Linear(8, 8)
    casts = WeightCasts(layer.parameters())
    with casts.noting() as made, torch.autocast("cpu", torch.bfloat16):
        y = layer(X)
        loss = (OwnFunction.apply(y) + y).float().sum() + layer.weight.sum()  # type: ignore[no-untyped-call]
    assert [one.weight is layer.bias for one in only_uses(loss, made)] == [True]


def test_a_pass_that_writes_to_a_cast_ends_the_use_of_its_copy() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    reads, writes = (lambda: weight.to(torch.bfloat16)), (lambda: weight.to(torch.bfloat16).mul_(2))
    casts = WeightCasts([weight])
    with casts.noting() as made:
        reads()
    assert casts.copy(made)
    assert casts.nbytes == 2 * weight.numel()
    with casts.noting() as made:
        writes()
    assert not casts.copy(made)
    with casts.replacing() as made:
        writes()
    assert casts.were_written(made)

    casts = WeightCasts([weight])
    for one in (writes, reads):
        with casts.noting() as made:
            one()
        assert casts.copy(made)
    assert not casts.has_copies


def test_weights_of_another_shape_are_noticed() -> None:
    weight = nn.Parameter(torch.randn(1, 4))
    casts = WeightCasts([weight])
    with casts.noting() as made:
        weight.to(torch.bfloat16)
    casts.copy(made)
    assert casts.refresh()
    weight.data = torch.randn(3, 4)
    assert not casts.refresh()


def test_without_casts_there_are_no_copies() -> None:
    model = Tied()
    casts = WeightCasts(model.parameters())
    with casts.noting() as made:
        model.hidden(X).sum().backward()
    casts.copy(made)
    casts.refresh()
    assert not made
    assert not casts.has_copies
    with casts.replacing() as made:
        loss_of(model)
    assert not made


def test_dropped_copies_are_not_used_and_not_made_again() -> None:
    model = Tied()
    casts = WeightCasts(model.parameters())
    with casts.noting() as made:
        loss_of(model)
    casts.copy(made)
    casts.drop()
    with casts.noting() as again:
        loss_of(model)
    casts.copy(again)
    assert not casts.has_copies


class NotRecorded:
    """In place of a lane and of a CUDA graph: what would be recorded is computed."""

    pool = stream = None

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_gradients_of_a_captured_pass(is_sent: bool, is_hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are narrow if nothing is sent while the pass runs, and if no hook has to see the whole gradient."""
    monkeypatch.setattr(captured_shard, "recorded_into", lambda graph, pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NotRecorded)
    model = nn.Sequential(Tied(), nn.LayerNorm(8))
    leaves = trained_leaves(model, set())

    def run(data: list[Tensor]) -> ShardLoss:
        with torch.autocast("cpu", torch.bfloat16):
            return parse_loss((model(data[0]).float().square().sum(), len(data[0])))

    casts = WeightCasts(model.parameters())
    with casts.noting() as made:
        run([X]).total.backward()  # type: ignore[no-untyped-call]
    assert casts.copy(made)
    want = [leaf.parameter.grad for leaf in leaves]
    for leaf in leaves:
        leaf.parameter.grad = None
    if is_hooked:
        hooked: Any = leaves[-1].parameter
        hooked.register_post_accumulate_grad_hook(lambda _: None)
    buffers, lane = BufferExchange(model, 1), cast(Any, NotRecorded())
    one = ShardPass(run, [X], 1, leaves, buffers, scaled=lambda total: total, scale=1.0, is_sent=is_sent)
    graph = CapturedShard(one, [], lane, casts)
    found = [gradient.dtype for gradient in graph._gradients if gradient is not None]
    assert (torch.bfloat16 in found) == (not is_sent and not is_hooked)
    for copied in (False, True):
        for read, kept, wanted in zip(graph.read_gradients(copied=copied), graph._gradients, want, strict=True):
            assert read is not None
            assert kept is not None
            assert wanted is not None
            assert read.dtype == wanted.dtype
            assert read.stride() == wanted.stride()
            assert torch.equal(read, wanted)
            assert (read is kept) == (not copied and kept.dtype == wanted.dtype)
    assert sorted(index for mark in graph.marks for index in mark.indices) == list(range(len(leaves)))
