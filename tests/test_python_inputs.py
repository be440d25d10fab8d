"""Every change of what the Python code of a model and a loss function reads is noticed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lockstep.step.python_inputs import PythonInputs, code_of

FACTOR = 1.0
SETTINGS = {"nested": {"factor": 1.0}, "names": ["a"]}
CONFIG = SimpleNamespace(loss=SimpleNamespace(factor=1.0), history=[])


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR * SETTINGS["nested"]["factor"] * CONFIG.loss.factor


class Scaled(nn.Module):
    temperature = 1.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.factor, self.masks = nn.Linear(4, 4), 1.0, {"a": torch.ones(4)}
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.lin(x) * self.factor) / self.temperature


class Trainer:
    def __init__(self) -> None:
        self.smoothing, self.teacher = 0.1, Scaled()

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch).sum() * self.smoothing, len(batch)


def plain_loss(model: Any, batch: Any, factor: float = 1.0) -> Any:
    return scaled(model(batch)).sum() * factor, len(batch) + len(CONFIG.history)


def assign(owner: Any, name: str, value: Any) -> Callable[[], None]:
    def change() -> None:
        owner[name] = value if isinstance(owner, dict) else setattr(owner, name, value)

    return change


MODEL, TRAINER = Scaled(), Trainer()
CHANGES: dict[str, tuple[Any, Callable[[], None], Callable[[], None]]] = {
    "FACTOR": (
        plain_loss,
        lambda: setattr(sys.modules[__name__], "FACTOR", 2.0),
        lambda: setattr(sys.modules[__name__], "FACTOR", 1.0),
    ),
    "nested.factor": (
        plain_loss,
        lambda: SETTINGS["nested"].update(factor=2.0),
        lambda: SETTINGS["nested"].update(factor=1.0),
    ),
    "loss.factor": (
        plain_loss,
        lambda: setattr(CONFIG.loss, "factor", 2.0),
        lambda: setattr(CONFIG.loss, "factor", 1.0),
    ),
    "history": (plain_loss, lambda: CONFIG.history.append(1), CONFIG.history.clear),
    "the model.factor": (plain_loss, lambda: setattr(MODEL, "factor", 2.0), lambda: setattr(MODEL, "factor", 1.0)),
    "temperature": (
        plain_loss,
        lambda: setattr(Scaled, "temperature", 2.0),
        lambda: setattr(Scaled, "temperature", 1.0),
    ),
    "masks.a": (plain_loss, lambda: MODEL.masks.update(a=torch.zeros(4)), lambda: None),
    "training": (plain_loss, MODEL.eval, MODEL.train),
    "bias": (plain_loss, lambda: MODEL.lin.bias.requires_grad_(False), lambda: MODEL.lin.bias.requires_grad_(True)),
    "weight": (plain_loss, lambda: setattr(MODEL.lin.weight, "data", torch.ones(4, 4)), lambda: None),
    "offset": (plain_loss, lambda: setattr(MODEL, "offset", torch.ones(4)), lambda: None),
    "smoothing": (TRAINER.loss, lambda: setattr(TRAINER, "smoothing", 0.2), lambda: setattr(TRAINER, "smoothing", 0.1)),
    "teacher.factor": (TRAINER.loss, lambda: setattr(TRAINER.teacher, "factor", 2.0), lambda: None),
    "the hooks of the model": (
        plain_loss,
        lambda: MODEL.register_forward_hook(lambda *_: None) and None,
        MODEL._forward_hooks.clear,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(name: str) -> None:
    loss, change, undo = CHANGES[name]
    inputs = PythonInputs(loss, MODEL)
    assert inputs.changed(loss) is None
    try:
        change()
        assert name in str(inputs.changed(loss))
    finally:
        undo()


def test_an_attribute_that_is_new_or_gone() -> None:
    model = Scaled()
    inputs = PythonInputs(plain_loss, model)
    model.extra = 1
    assert "extra" in str(inputs.changed(plain_loss))
    del model.extra, model.factor
    assert "factor" in str(inputs.changed(plain_loss))


def loss_with(factor: float, seen: list[int]) -> Any:
    return lambda model, batch: (model(batch).sum() * factor, len(seen))


def test_a_function_that_is_made_anew_is_the_same_if_it_holds_the_same() -> None:
    seen: list[int] = []
    inputs = PythonInputs(loss_with(1.0, seen), MODEL)
    assert code_of(loss_with(1.0, seen)) == code_of(loss_with(2.0, seen))
    assert inputs.changed(loss_with(1.0, seen)) is None
    assert "factor" in str(inputs.changed(loss_with(2.0, seen)))
    assert "seen" in str(inputs.changed(loss_with(1.0, [1])))


def test_arguments_of_a_partial_and_defaults() -> None:
    inputs = PythonInputs(functools.partial(plain_loss, factor=1.0), MODEL)
    assert inputs.changed(functools.partial(plain_loss, factor=1.0)) is None
    assert inputs.changed(functools.partial(plain_loss, factor=2.0)) is not None


class Config:
    """A class that is used as a namespace."""

    beta = 1.0
    table = {"factor": 1.0}


@dataclass(slots=True)
class Slotted:
    weight: float = 1.0


SLOTTED, ARRAY = Slotted(), numpy.ones(3)


def reads_more(model: Any, batch: Any) -> Any:
    scale = Config.beta * Config.table["factor"] * SLOTTED.weight * float(ARRAY.sum())
    return model(batch).sum() * scale, getattr(TRAINER, "smoothing", 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(Config, "beta", 2.0),
        lambda: Config.table.update(factor=2.0),
        lambda: setattr(SLOTTED, "weight", 2.0),
        lambda: ARRAY.fill(2.0),
        lambda: MODEL.lin.weight.register_hook(lambda gradient: None) and None,
        lambda: setattr(TRAINER, "smoothing", TRAINER.smoothing / 2),
    ],
)
def test_classes_slots_arrays_and_hooks_of_parameters(change: Callable[[], None]) -> None:
    inputs = PythonInputs(reads_more, MODEL)
    assert inputs.changed(reads_more) is None
    change()
    assert inputs.changed(reads_more) is not None


def test_what_the_code_does_not_read_may_change() -> None:
    """Counters of a trainer, and globals with the name of an attribute that the code reads."""
    global weight
    weight = 0.0  # the code reads SLOTTED.weight
    trainer = Trainer()
    inputs = PythonInputs(trainer.loss, MODEL)
    trainer.steps_done = 1  # type: ignore[attr-defined]
    assert inputs.changed(trainer.loss) is None
    more = PythonInputs(reads_more, MODEL)
    weight = 1.0
    assert more.changed(reads_more) is None


def test_too_many_objects_are_told() -> None:
    assert PythonInputs(plain_loss, MODEL).is_complete
    many = nn.ModuleList(nn.Sequential(nn.Identity()) for _ in range(12_000))
    assert not PythonInputs(plain_loss, many).is_complete


def test_a_long_list_is_compared_by_its_length() -> None:
    CONFIG.history[:] = range(2_000)
    inputs = PythonInputs(plain_loss, MODEL)
    CONFIG.history.append(1)
    try:
        assert "history" in str(inputs.changed(plain_loss))
    finally:
        CONFIG.history.clear()


def test_a_large_model_is_checked_fast() -> None:
    """Equality in C for each module: a transformer of 150 modules must not cost a noticeable part of a step."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(24)))
    inputs = PythonInputs(plain_loss, model)
    assert inputs.changed(plain_loss) is None
    assert len(inputs._mappings) < 2000
