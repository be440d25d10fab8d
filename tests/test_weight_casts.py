"""Copies of weights that captured passes read instead of casting the weights, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.step.weight_casts import WeightCasts, only_uses

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


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
    assert casts
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
    assert torch.equal(found, want)
    narrow = only_uses(found, made)
    assert {names[id(one.weight)] for one in narrow} == cast_weights - {"embedding.weight"}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in {id(one.weight) for one in narrow}]
    found.backward(inputs=[*(one.result for one in narrow), *others])  # type: ignore[no-untyped-call]
    for one in narrow:
        assert one.result.grad is not None
        assert one.result.grad.dtype == torch.bfloat16
        want_gradient = gradients[id(one.weight)]
        assert want_gradient is not None
        assert torch.equal(one.result.grad.float(), want_gradient)
    for parameter in others:
        want_gradient = gradients[id(parameter)]
        assert parameter.grad is not None
        assert want_gradient is not None
        assert torch.equal(parameter.grad, want_gradient)


def test_weights_with_hooks_of_the_program_get_their_own_gradient() -> None:
    hooks: list[Callable[[Any], object]] = [
        lambda weight: weight.register_hook(lambda gradient: gradient * 2),
        lambda weight: weight.register_post_accumulate_grad_hook(lambda _: None),
    ]
    for register in hooks:
        model = Tied()
        casts = WeightCasts(model.parameters())
        register(model.hidden.weight)
        with casts.noting() as made:
            loss = loss_of(model)
        assert not any(one.weight is model.hidden.weight for one in only_uses(loss, made))
        assert any(one.weight is model.hidden.bias for one in only_uses(loss, made))


def test_without_casts_there_are_no_copies() -> None:
    model = Tied()
    casts = WeightCasts(model.parameters())
    with casts.noting() as made:
        model.hidden(X).sum().backward()
    casts.copy(made)
    casts.refresh()
    assert not made
    assert not casts
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
    assert not casts
