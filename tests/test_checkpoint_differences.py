"""Does a checkpoint belong to this program? All differences are told, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.differences import SHOWN, differences
from test_checkpoint import same


def trained(
    model: nn.Module | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    steps: int = 1,
    **run: Any,
) -> dict[str, Any]:
    """As `Run` makes it."""
    torch.manual_seed(1)
    model = model or nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "schedule": None,
        "loss_scale": {"value": 1.0, "good_steps": 0},
        "batches": {"epoch": 0, "step": steps, "number": steps},
        "run": {"seed": 7, "exact": True, "shards": 8} | run,
    }


def test_the_same_program_fits_at_its_beginning_and_later() -> None:
    assert differences(trained(steps=3), trained(steps=0)) == []
    assert differences(trained(steps=0), trained(steps=0)) == []
    assert differences(trained(steps=3), trained(steps=1)) == []
    schedule = trained()
    schedule["optimizer"]["param_groups"][0]["initial_lr"] = 0.1
    assert differences(schedule, trained(steps=0)) == []
    assert differences(trained(), schedule) == []


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "seed": ({"seed": 8}, ["seed is 7 in the checkpoint and 8 in the program"]),
    "all of the run": (
        {"seed": 8, "exact": False, "shards": 4},
        [
            "seed is 7 in the checkpoint and 8 in the program",
            "exact is True in the checkpoint and False in the program",
            "shards is 8 in the checkpoint and 4 in the program",
        ],
    ),
    "the class of the optimiser": (
        {"optimizer": "Adam"},
        ["optimizer is 'Adam' in the program, and the checkpoint does not say"],
    ),
    "another width": (
        {"model": nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))},
        [
            "0.weight is [2, 3] float32 in the checkpoint and [5, 3] float32 in the program",
            "0.bias is [2] float32 in the checkpoint and [5] float32 in the program",
            "1.weight is [2] float32 in the checkpoint and [5] float32 in the program",
            "1.bias is [2] float32 in the checkpoint and [5] float32 in the program",
            "1.running_mean is [2] float32 in the checkpoint and [5] float32 in the program",
            "1.running_var is [2] float32 in the checkpoint and [5] float32 in the program",
        ],
    ),
    "another dtype": (
        {"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()},
        [
            f"{name} is {shape} float32 in the checkpoint and {shape} float64 in the program"
            for name, shape in [("0.weight", [2, 3]), ("0.bias", [2]), ("1.weight", [2]), ("1.bias", [2]),
                                ("1.running_mean", [2]), ("1.running_var", [2])]
        ],
    ),
    "more and less": (
        {"model": nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 2, bias=False))},
        [
            "2.weight [2, 2] float32 is not in the checkpoint",
            "1.weight [2] float32 is not in the program",
            "1.bias [2] float32 is not in the program",
            "1.running_mean [2] float32 is not in the program",
            "1.running_var [2] float32 is not in the program",
            "1.num_batches_tracked [] int64 is not in the program",
            "group 0 of the optimiser has 4 parameters in the checkpoint and 3 in the program",
        ],
    ),
    "groups": (
        {"make": lambda parameters: torch.optim.AdamW([{"params": [p]} for p in parameters])},
        ["the optimiser has 1 groups of parameters in the checkpoint and 4 in the program"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_difference_is_told(case: str) -> None:
    changes, lines = CASES[case]
    saved, now = trained(), trained(steps=0, **changes)
    assert differences(saved, now) == lines
    assert same(saved, trained())


def test_another_optimiser() -> None:
    now = trained(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=0)
    (line,) = differences(trained(), now)
    assert line.startswith("group 0 of the optimiser has amsgrad, betas, ")
    assert line.endswith("dampening, momentum, nesterov in the program: another optimiser")
    older = trained()
    del older["optimizer"]["param_groups"][0]["fused"]  # of a torch that did not have it yet
    assert differences(older, trained(steps=0)) == []


def test_what_the_optimiser_remembers_is_compared_where_both_do() -> None:
    saved, now = trained(), trained()
    saved["optimizer"]["state"][0]["exp_avg"] = torch.zeros(9)
    del saved["optimizer"]["state"][1]["exp_avg"]
    assert differences(saved, now) == [
        "the optimiser's memory of parameter 0: exp_avg is [9] float32 in the checkpoint and [2, 3] float32 in the "
        "program",
        "the optimiser's memory of parameter 1: exp_avg [2] float32 is not in the checkpoint",
    ]


def test_long_lists_are_cut() -> None:
    saved, now = trained(), trained()
    saved["model"] |= {f"extra.{n}": torch.ones(1) for n in range(100)}
    lines = differences(saved, now)
    assert len(lines) == SHOWN + 1
    assert lines[-1] == "and 92 more like this"


def test_what_else_a_program_keeps() -> None:
    saved, now = trained() | {"kept": {"ema": {"a": 1}, "old": {}}}, trained() | {"kept": {"ema": {}, "new": {}}}
    assert differences(saved, now) == [
        "'new', which the program keeps, is not in the checkpoint",
        "'old', which the checkpoint has, the program does not keep",
    ]
    assert differences(saved, saved) == []
    assert len(differences(saved, trained())) == 2


def test_what_is_no_state_of_a_run() -> None:
    assert differences({"model": 3}, trained()) == [
        f"the checkpoint has no '{part}': a Run did not write it" for part in ("model", "optimizer", "run")
    ]
