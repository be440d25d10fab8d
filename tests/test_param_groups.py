"""Parameters that a program gives to its optimiser in the loop, by `add_param_group`: on any number of workers, through
resume, and for a worker that replaces another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.checkpoint.differences import differences
from lockstep.step.learning_rate import cover_groups
from on_workers import on_workers, try_on_workers
from runs import classify, data, use
from test_recovery import Play, kill, perform

STEPS = 12  # 4 epochs of 3
SCHEDULERS = torch.optim.lr_scheduler


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))


class HeadLater:
    """The last layer joins at step 5, with a learning rate of its own."""

    def begin(self, model: nn.Sequential) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(model[:4].parameters(), lr=0.05, momentum=0.9), None

    def between(self, model: nn.Sequential, optimizer: torch.optim.Optimizer, number: int, epoch: int) -> None:
        if number == 5:
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.02})


class UnfreezeByEpoch(HeadLater):
    """What was frozen joins in the second epoch; the program looks whether it has done that already."""

    def begin(self, model: nn.Sequential) -> tuple[torch.optim.Optimizer, Any]:
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        return optimizer, SCHEDULERS.StepLR(optimizer, step_size=4, gamma=0.5)

    def between(self, model: nn.Sequential, optimizer: torch.optim.Optimizer, number: int, epoch: int) -> None:
        if len(optimizer.param_groups) == 1 and epoch >= 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3, "weight_decay": 0.1})


class Gradual(HeadLater):
    """Two layers join one after the other, by name, under a scheduler that knows the learning rate of each group."""

    def begin(self, model: nn.Sequential) -> tuple[torch.optim.Optimizer, Any]:
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam(model[4].named_parameters(), lr=3e-3)
        return optimizer, SCHEDULERS.CosineAnnealingWarmRestarts(optimizer, T_0=5)

    def between(self, model: nn.Sequential, optimizer: torch.optim.Optimizer, number: int, epoch: int) -> None:
        for step, layer in ((2, 2), (6, 0)):
            if number == step:
                model[layer].requires_grad_(True)
                named = ((f"{layer}.{name}", p) for name, p in model[layer].named_parameters())
                optimizer.add_param_group({"params": list(named), "lr": 1e-3})


PROGRAMS: dict[str, Callable[[], HeadLater]] = {
    "head": HeadLater,
    "by epoch": UnfreezeByEpoch,
    "gradual": Gradual,
}


def train(
    name: str,
    *,
    directory: Path | None = None,
    steps: int | None = None,
    before: Callable[[Any], None] = lambda run: None,
) -> tuple[str, list[float]]:
    program, losses = PROGRAMS[name](), []
    with lockstep.Run(directory, seed=7, progress=False, device="cpu", check_every=1) as run:
        model = run.replicate(net())
        optimizer, scheduler = program.begin(model)
        order = lockstep.Sequential(96, 32)
        batches = run.batches(data(96), global_batch_size=32, shards=6, epochs=4, order=order)
        for batch in run.train(batches, optimizer, scheduler=scheduler, steps=steps):
            program.between(model, optimizer, batch.number, batch.epoch)
            before(run)
            losses.append(run.step(classify, batch).loss)
        return run.digest(), losses


def plain(name: str) -> list[float]:
    """The same in a plain loop of torch, from the same weights."""
    program, losses, (x, y) = PROGRAMS[name](), [], data(96).tensors
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model = run.replicate(net())
    optimizer, scheduler = program.begin(model)
    for number in range(STEPS):
        program.between(model, optimizer, number, number // 3)
        part = slice(number % 3 * 32, number % 3 * 32 + 32)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[part]), y[part])
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def train_all(rank: int, size: int, backend: str, store: str, folder: str) -> dict[str, list[str]]:
    """Each program from the start, and from the checkpoints of one worker: before, between and behind its groups."""
    use(backend, store, rank, size)
    found = {}
    for name in PROGRAMS:
        resumed = [train(name, directory=Path(folder) / f"{name} {cut}")[0] for cut in (3, 6, 8)]
        found[name] = [train(name)[0], *resumed]
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[str, list[float]]]:
    return {name: train(name) for name in PROGRAMS}


@pytest.mark.parametrize("name", ["head", "by epoch"])  # torch's own scheduler refuses the groups of the third
def test_it_trains_as_in_a_plain_loop(name: str, alone: dict[str, tuple[str, list[float]]]) -> None:
    assert alone[name][1] == pytest.approx(plain(name), rel=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "backend"),
    [(2, "gloo"), (3, "shm"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "gloo"), (2, "shm")))],
)
def test_the_same_digest_on_any_number_of_workers_and_after_resume(
    tmp_path: Path, size: int, backend: str, alone: dict[str, tuple[str, list[float]]]
) -> None:
    for name in PROGRAMS:
        for cut in (3, 6, 8):
            train(name, directory=tmp_path / f"{name} {cut}", steps=cut)
    wanted = {name: [digest] * 4 for name, (digest, _) in alone.items()}
    store = str(tmp_path / "store")
    assert on_workers(train_all, size, backend, store, str(tmp_path)) == [wanted] * size


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from test_param_groups import train

def whole(run):
    end_s = time.monotonic() + 30
    while run.world.size < 3 and not run._session.calls.wants_to_move and time.monotonic() < end_s:
        time.sleep(0.005)

print("digest", train(sys.argv[1], before=whole)[0], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("head", marks=pytest.mark.slow), pytest.param("by epoch", marks=pytest.mark.slow), "gradual"]
)
def test_a_replacement_gets_the_groups_that_were_added(
    tmp_path: Path, name: str, alone: dict[str, tuple[str, list[float]]]
) -> None:
    """One is lost between its groups, one behind the last; those who come are told of them with the state."""
    faults = (kill("reduced", 1, 3), kill("forward", 0, 7), kill("committed", 3, 9))
    program = KILLED.replace("sys.argv[1]", repr(name))
    show = perform(tmp_path / "run", Play(program=program, faults=faults))
    assert show.status == 0, show.text
    assert set(show.lost) == {"h0.1", "h0.0", "h0.3"}, show.text
    assert show.digests == [alone[name][0]] * 3, show.text


# ---- what cannot be --------------------------------------------------------------------------------------------------


def on_one(rank: int, size: int) -> None:
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model = run.replicate(net())
        optimizer = torch.optim.SGD(model[:4].parameters(), lr=0.1)
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=6), optimizer):
            if batch.number == 1 and rank == 1:
                optimizer.add_param_group({"params": model[4].parameters()})
            run.step(classify, batch)


def test_a_group_that_one_worker_adds_is_an_error() -> None:
    outcomes = try_on_workers(on_one, 2)
    assert any("run.step: what is trained" in str(outcome) for outcome in outcomes), outcomes
    assert all("Error" in str(outcome) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "lambda",
            r"2 parameter groups since add_param_group, and LambdaLR, which was made for fewer, fails with them",
        ),
        ("one cycle", r"2 parameter groups since add_param_group, and OneCycleLR, .*fails with them \(KeyError"),
        ("stranger", r"the optimiser has 2 parameters that the replicated model has not: make it from"),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused_before_the_step(case: str, words: str) -> None:
    with pytest.raises(ValueError, match=words), lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model = run.replicate(net())
        optimizer, scheduler = torch.optim.SGD(model[:4].parameters(), lr=0.1), None
        if case == "lambda":
            scheduler = SCHEDULERS.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        if case == "one cycle":
            scheduler = SCHEDULERS.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        added = nn.Linear(2, 2) if case == "stranger" else model[4]
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=8), optimizer, scheduler=scheduler):
            if batch.number == 1:
                optimizer.add_param_group({"params": added.parameters(), "lr": 0.3})
                before = run.digest()
            try:
                run.step(classify, batch)
            except ValueError:
                assert run.digest() == before
                assert optimizer.param_groups[1]["lr"] == 0.3
                raise


def test_which_schedulers_cover_a_group_that_was_added() -> None:
    made: dict[str, Callable[[Any], Any]] = {
        "StepLR": lambda o: SCHEDULERS.StepLR(o, 2),
        "Exponential": lambda o: SCHEDULERS.ExponentialLR(o, 0.9),
        "Cosine": lambda o: SCHEDULERS.CosineAnnealingLR(o, 3),
        "Linear": lambda o: SCHEDULERS.LinearLR(o, total_iters=4),
        "Sequential": lambda o: SCHEDULERS.SequentialLR(
            o, [SCHEDULERS.LinearLR(o, total_iters=2), SCHEDULERS.CosineAnnealingLR(o, 3)], milestones=[3]
        ),
        "Chained": lambda o: SCHEDULERS.ChainedScheduler(
            [SCHEDULERS.ConstantLR(o, total_iters=2), SCHEDULERS.ExponentialLR(o, 0.9)]
        ),
    }
    for name, make in made.items():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        scheduler = make(optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.add_param_group({"params": [model.bias], "lr": 0.4})
        cover_groups(optimizer, scheduler)
        for _ in range(12):  # none fails later on either
            optimizer.step()
            scheduler.step()
        assert len(optimizer.param_groups) == 2, name
    cover_groups(optimizer, None)


def test_a_checkpoint_with_other_groups_is_refused_where_they_do_not_fit() -> None:
    def state(*groups: list[str]) -> dict[str, Any]:
        listed = [{"params": list(range(len(group))), "lr": 0.1} for group in groups]
        weights = {name: torch.zeros(1) for name in "abc"}
        return {
            "run": {},
            "model": weights,
            "optimizer": {"param_groups": listed, "state": {}},
            "groups": list(groups),
        }

    assert differences(state(["a"], ["b"]), state(["a"])) == []
    assert "2 groups of parameters in the checkpoint and 1 in" in differences(state(["a"], ["x"]), state(["a"]))[0]
    assert "1 groups of parameters in the checkpoint and 2 in" in differences(state(["a"]), state(["a"], ["b"]))[0]
    swapped = differences(state(["a", "b"]), state(["b", "a"]))
    assert swapped[0] == "group 0 of the optimiser has a in the checkpoint where it has b in the program"
    old = state(["a"], ["b"]) | {"groups": None}
    assert "2 groups of parameters in the checkpoint and 1 in" in differences(old, state(["a"]))[0]


def unfreeze_behind_the_step(directory: Path | None, *, stops_at: int | None) -> str:
    with lockstep.Run(directory, seed=1, progress=False, device="cpu", save_every=1) as run:
        model = run.replicate(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 10)))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in run.train(run.batches(data(64), global_batch_size=8, shards=2), optimizer):
            run.step(classify, batch)
            if batch.number == 3:
                model[0].requires_grad_(True)  # behind the step: the checkpoint of this step must have it
            if batch.number == stops_at:
                run.stop()
        return run.digest()


def test_what_is_unfrozen_behind_a_step_is_in_the_checkpoint_of_it(tmp_path: Path) -> None:
    whole = unfreeze_behind_the_step(None, stops_at=None)
    unfreeze_behind_the_step(tmp_path, stops_at=2)  # after the next step
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-000000004"
    assert unfreeze_behind_the_step(tmp_path, stops_at=None) == whole
