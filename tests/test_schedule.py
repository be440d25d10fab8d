"""Learning rates for large batches: the numbers, and that no scheduler ever sees them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from lockstep.step.learning_rate import LargeBatch, LRScaling, Rule, Warmup, factor, warmup_factor


class Recorder(torch.optim.SGD):
    """Remembers the learning rates it was stepped with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append([float(group["lr"]) for group in self.param_groups])
        return super().step(closure)


def optimizer_with(*rates: float | Tensor) -> Recorder:
    return Recorder([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates], lr=9.0)


def test_factors() -> None:
    assert factor("linear", 2048, 256) == 8
    assert factor(Rule.SQRT, 1024, 256) == 2
    assert factor("sqrt", 512, 256) == math.sqrt(2)
    assert factor("linear", 128, 256) == 0.5
    assert factor("linear", 256, 256) == factor("sqrt", 256, 256) == 1


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (LRScaling(10), [8, 8, 8, 8, 8, 8]),
        (LRScaling(10, warmup_steps=4), [1, 2.75, 4.5, 6.25, 8, 8]),
        (LRScaling(10, warmup_steps=4, warmup="constant"), [1, 1, 1, 1, 8, 8]),
        (LRScaling(20, "sqrt", warmup_steps=2), [1, 1.5, 2, 2, 2, 2]),
        (LRScaling(160, warmup_steps=2), [1, 0.75, 0.5, 0.5, 0.5, 0.5]),
        (LRScaling(10, warmup_steps=1), [1, 8, 8, 8, 8, 8]),
    ],
)
def test_warm_up(scaling: LRScaling, expected: list[float]) -> None:
    assert [warmup_factor(scaling, 80, step) for step in range(6)] == expected
    assert [LargeBatch(optimizer_with(1.0), scaling, 80).factor(step) for step in range(6)] == expected


def test_names_become_choices_and_scalings_are_values() -> None:
    assert LRScaling(256, "sqrt", 5, "constant") == LRScaling(256, Rule.SQRT, 5, Warmup.CONSTANT)
    assert hash(LRScaling(256)) == hash(LRScaling(256, "linear"))
    with pytest.raises(AttributeError):
        LRScaling(256).base_batch = 1  # type: ignore[misc]


def test_all_groups_are_scaled_during_the_step_and_only_then() -> None:
    optimizer = optimizer_with(0.1, 0.01)
    before = copy.deepcopy(optimizer.state_dict())
    large = LargeBatch(optimizer, LRScaling(10, warmup_steps=1), 80)
    for step in range(2):
        with large.applied(step) as times:
            optimizer.step()
            assert times == (1, 8)[step]
    assert optimizer.seen == [[0.1, 0.01], [0.1 * 8, 0.01 * 8]]
    assert optimizer.state_dict() == before


def test_the_weights_are_those_of_the_scaled_rate() -> None:
    weights = []
    for rate, scaling in ((0.8, LRScaling(80)), (0.1, LRScaling(10))):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=rate)
        weight.grad = torch.full((3,), 0.5)
        with LargeBatch(optimizer, scaling, 80).applied(0):
            optimizer.step()
        weights.append(weight.detach().clone())
    assert torch.equal(*weights)
    assert weights[0][0] == torch.tensor(1 - 0.8 * 0.5)


def test_tensor_rates_are_changed_in_place_and_shared_ones_once() -> None:
    shared, own = torch.tensor(0.1), torch.tensor(0.3)
    optimizer = optimizer_with(shared, shared, own)
    with LargeBatch(optimizer, LRScaling(10), 80).applied(0):
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [shared, shared, own]
    assert optimizer.seen == [[float(torch.tensor(0.1) * 8)] * 2 + [float(torch.tensor(0.3) * 8)]]
    assert [id(group["lr"]) for group in optimizer.param_groups] == [id(shared), id(shared), id(own)]
    assert torch.equal(torch.stack([shared, own]), torch.tensor([0.1, 0.3]))


def test_rates_come_back_after_an_error() -> None:
    rate = torch.tensor(0.1)
    optimizer = optimizer_with(0.1, rate)
    with pytest.raises(ZeroDivisionError), LargeBatch(optimizer, LRScaling(10), 80).applied(0):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(rate, torch.tensor(0.1))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_a_scheduler_that_is_stepped_inside_is_an_error(rate: float | Tensor) -> None:
    optimizer = optimizer_with(rate)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(RuntimeError, match="step the scheduler after"):
        with LargeBatch(optimizer, LRScaling(10), 80).applied(0):
            optimizer.step()
            scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == float(torch.tensor(0.1)) or optimizer.param_groups[0]["lr"] == 0.1


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "chainable": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "steps": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=13),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "two after one another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.PolynomialLR(o, 8)], [4]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5, min_lr=0.15),
}


def rates_between_steps(name: str, rate: float | Tensor, scaling: LRScaling | None) -> tuple[list[Any], Recorder]:
    optimizer = Recorder([torch.nn.Parameter(torch.ones(2))], lr=rate, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    large = LargeBatch(optimizer, scaling or LRScaling(80), 80)
    found = []
    for step in range(12):
        with large.applied(step):
            optimizer.step()
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
        found.append((float(optimizer.param_groups[0]["lr"]), [float(r) for r in scheduler.get_last_lr()]))
    return found, optimizer


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_never_see_the_factor(name: str, kind: str) -> None:
    def rate() -> float | Tensor:
        return 0.2 if kind == "float" else torch.tensor(0.2, dtype=torch.float64)

    scaling = LRScaling(10, warmup_steps=5)
    plain, plainly_stepped = rates_between_steps(name, rate(), None)
    scaled, stepped = rates_between_steps(name, rate(), scaling)
    assert scaled == plain  # to the last bit, though ReduceLROnPlateau and chainable ones read it back
    assert len({lr for lr, _ in plain}) > 1
    assert stepped.seen == [[lr * warmup_factor(scaling, 80, step)] for step, [lr] in enumerate(plainly_stepped.seen)]


def test_description() -> None:
    def describe(scaling: LRScaling, *rates: float | Tensor) -> str:
        return LargeBatch(optimizer_with(*rates), scaling, 2048).describe()

    assert describe(LRScaling(256, warmup_steps=100), 0.1) == (
        "global batch 2048, learning rate 0.8 = 0.1 x 8 (linear from a batch of 256), warm-up 100 steps (gradual)"
    )
    assert describe(LRScaling(512, "sqrt"), 0.1, torch.tensor(0.01), 0.1) == (
        "global batch 2048, learning rate 0.2, 0.02 = 0.1, 0.01 x 2 (sqrt from a batch of 512), no warm-up"
    )
    optimizer = optimizer_with(0.1)
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # starts at 0
    assert "learning rate 0.8 = 0.1 x 8" in LargeBatch(optimizer, LRScaling(256), 2048).describe()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: LRScaling(0), r"base_batch=0 must be a whole number, 1 or more"),
        (lambda: LRScaling(2.5), r"base_batch=2.5 must be"),  # type: ignore[arg-type]
        (lambda: LRScaling(True), r"base_batch=True must be"),
        (lambda: LRScaling(256, warmup_steps=-1), r"warmup_steps=-1 must be a whole number, 0 or more"),
        (lambda: LRScaling(256, "cubic"), r"rule='cubic' is not known; choose one of 'linear', 'sqrt'"),
        (lambda: LRScaling(256, warmup="slow"), r"warmup='slow' is not known; choose one of 'gradual', 'constant'"),
        (lambda: factor("linear", 0, 256), r"global_batch_size=0 must be"),
        (lambda: factor("linear", 256, -1), r"base_batch=-1 must be"),
        (lambda: warmup_factor(LRScaling(256), 256, -1), r"step=-1 must be"),
        (lambda: LargeBatch(optimizer_with(0.1), LRScaling(256), 0), r"global_batch_size=0 must be"),
    ],
)
def test_bad_input(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
