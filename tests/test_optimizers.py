"""Several optimisers in one run: a GAN, and an actor with a critic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import lockstep
from lockstep.data.ledger import prove
from lockstep.errors import LockstepError
from lockstep.recovery.run_directory import pending_stops
from lockstep.train.optimizer_set import OptimizerSet
from on_workers import Failure, on_workers, try_on_workers
from test_launch import nothing_left_behind, outer_env  # noqa: F401  (a fixture among them)

BATCH, SAMPLES, EPOCHS = 16, 56, 3  # a smaller last batch in each epoch
STEPS = 4 * EPOCHS


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def fake(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, 4))  # type: ignore[no-any-return]


def loss_of_critic(model: Gan, x: Tensor) -> Any:
    real, fake = model.critic(x), model.critic(model.fake(len(x)).detach())
    assert all(not p.requires_grad for p in model.generator.parameters())
    accuracy = ((real > 0).sum() + (fake < 0).sum(), 2 * len(x))
    return F.softplus(-real).sum() + F.softplus(fake).sum(), len(x), {"accuracy": accuracy}


def loss_of_generator(model: Gan, x: Tensor) -> tuple[Tensor, int]:
    assert all(not p.requires_grad for p in model.critic.parameters())
    return F.softplus(-model.critic(model.fake(len(x)))).sum(), len(x)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def rewards(x: Tensor, action: Tensor) -> Tensor:
    return x[:, :3].gather(1, action[:, None])[:, 0]


def loss_of_value(model: ActorCritic, x: Tensor) -> tuple[Tensor, int]:
    action = torch.distributions.Categorical(logits=model.actor(x)).sample()
    return F.mse_loss(model.critic(x)[:, 0], rewards(x, action), reduction="sum"), len(x)


def loss_of_policy(model: ActorCritic, x: Tensor) -> tuple[Tensor, int]:
    policy = torch.distributions.Categorical(logits=model.actor(x))
    action = policy.sample()
    advantage = rewards(x, action) - model.critic(x)[:, 0].detach()
    return -(policy.log_prob(action) * advantage).sum(), len(x)


def data(count: int = SAMPLES) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1)) + 1


def train(
    rank: int,
    size: int,
    kind: str,
    directory: Path | None = None,
    steps: int | None = None,
    leave: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> tuple[str, list[float]]:
    """The digest, and the losses of all steps. `leave(number)` is called between the two steps of a batch."""
    losses: list[float] = []
    with lockstep.Run(directory, seed=7, progress=False, device="cpu", **options) as run:
        model: Any = run.replicate(Gan() if kind == "gan" else ActorCritic())
        first, second = (model.critic, model.generator) if kind == "gan" else (model.critic, model.actor)
        loss_1, loss_2 = (loss_of_critic, loss_of_generator) if kind == "gan" else (loss_of_value, loss_of_policy)
        one = torch.optim.Adam(first.parameters(), lr=0.01)
        other = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.5)
        schedulers = [lr_scheduler.StepLR(one, 1, gamma=0.5), lr_scheduler.ExponentialLR(other, 0.9)]
        batches = run.batches(data(), global_batch_size=BATCH, shards=4, epochs=EPOCHS)
        trained = run.train(batches, one, other, scheduler=schedulers, interval="epoch", steps=steps)
        for batch in trained:
            losses.append(run.step(loss_1, batch, optimizer=one).loss)
            leave(batch.number)
            if kind == "actor" or batch.number % 2 == 0:  # a GAN often trains its critic more often
                losses.append(run.step(loss_2, batch, optimizer=other).loss)
        return run.digest(), losses


# ---- what is computed ------------------------------------------------------------------------------------------------


def test_it_trains_as_a_plain_loop_does() -> None:
    """Without random numbers: the gradients of each step are those of its optimiser alone."""

    def distance(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        a, b = model
        return (b(a(x)) - x).square().sum(), len(x)

    def size(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        a, b = model
        return (b(a(x))).abs().sum(), len(x)

    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        return model, torch.optim.AdamW(model[0].parameters(), lr=0.01), torch.optim.SGD(model[1].parameters(), lr=0.1)

    model, one, other = make()
    x = data(32).double()
    for part in x.split(BATCH):
        for loss, optimizer in ((distance, one), (size, other)):
            total, weight = loss(model, part)
            model.zero_grad()
            (total / weight).backward()
            optimizer.step()
    ours, one, other = make()
    with lockstep.Run(seed=0, progress=False, device="cpu") as run:
        run.replicate(ours)
        order = lockstep.Sequential(len(x), BATCH)
        for batch in run.train(run.batches(x, global_batch_size=BATCH, shards=1, order=order), one, other):
            run.step(distance, batch, optimizer=one)
            assert ours[1].weight.grad is None or batch.number > 0
            run.step(size, batch, optimizer=other)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["gan", "actor"])
def test_any_number_of_workers_gives_the_same_bits(kind: str, size: int) -> None:
    alone = train(0, 1, kind)
    assert len(alone[1]) == (2 * STEPS if kind == "actor" else STEPS * 3 // 2)
    assert on_workers(train, size, kind) == [alone] * size


def test_both_steps_draw_their_own_random_numbers() -> None:
    drawn: list[float] = []

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        drawn.append(float(torch.rand(())))
        return model(x).sum(), len(x)

    with lockstep.Run(seed=0, progress=False, device="cpu") as run:
        model = run.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        one, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
        for batch in run.train(run.batches(data(32), global_batch_size=BATCH), one, other):
            for optimizer in (other, one):
                run.step(loss, batch, optimizer=optimizer)
    assert len(set(drawn)) >= 4


def test_schedulers_follow_their_own_optimizer() -> None:
    with lockstep.Run(seed=0, progress=False, device="cpu") as run:
        model = run.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        one, other = (torch.optim.SGD(part.parameters(), lr=1.0) for part in model)
        schedulers = (lr_scheduler.StepLR(other, 1, gamma=0.5), lr_scheduler.StepLR(one, 1, gamma=0.1))
        batches = run.batches(data(64), global_batch_size=BATCH)
        for batch in run.train(batches, one, other, scheduler=schedulers):
            run.step(lambda model, x: (model(x).square().sum(), len(x)), batch, optimizer=one)
            if batch.number == 1:
                run.step(lambda model, x: (model(x).square().sum(), len(x)), batch, optimizer=other)
    assert one.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert other.param_groups[0]["lr"] == 0.5


def test_schedulers_of_epochs_follow_also_an_optimizer_without_a_step_in_the_last_batch() -> None:
    with lockstep.Run(seed=0, progress=False, device="cpu") as run:
        _, one, other = parts(run)
        schedulers = [lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (one, other)]
        batches = run.batches(data(64), global_batch_size=BATCH, epochs=2)
        for batch in run.train(batches, one, other, scheduler=schedulers, interval="epoch"):
            run.step(total, batch, optimizer=other if batch.step == 0 else one)
    assert [optimizer.param_groups[0]["lr"] for optimizer in (one, other)] == [0.025, 0.025]


def test_the_state_is_that_of_one_optimizer_with_all_groups() -> None:
    weights = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    parts = [torch.optim.Adam(weights[:1]), torch.optim.Adam([{"params": [w], "lr": 0.5} for w in weights[1:]])]
    for parameter in weights:
        parameter.grad = torch.ones(3)
    for part in parts:
        part.step()
    state = OptimizerSet(parts).state_dict()
    whole = torch.optim.Adam([{"params": [w]} for w in weights])
    whole.load_state_dict(state)
    assert [group["lr"] for group in whole.param_groups] == [1e-3, 0.5, 0.5]
    fresh = [torch.optim.Adam(weights[:1]), torch.optim.Adam([{"params": [w]} for w in weights[1:]])]
    OptimizerSet(fresh).load_state_dict(whole.state_dict())
    for parameter in weights:
        moments = OptimizerSet(fresh).state[parameter]["exp_avg"]
        assert torch.equal(moments, OptimizerSet(parts).state[parameter]["exp_avg"])


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gan", "actor"])
def test_it_resumes_on_another_number_of_workers(kind: str, tmp_path: Path) -> None:
    alone = train(0, 1, kind)
    on_workers(train, 2, kind, tmp_path, 6)
    assert train(0, 1, kind, tmp_path)[0] == alone[0]


class StoppedHere(Exception):
    pass


@pytest.mark.parametrize("kind", ["gan", "actor"])
def test_a_program_that_fails_between_two_steps_of_a_batch_goes_on_there(kind: str, tmp_path: Path) -> None:
    def leave(number: int) -> None:
        if number == 6:
            raise StoppedHere

    alone = train(0, 1, kind)
    with pytest.raises(StoppedHere):
        train(0, 1, kind, tmp_path, leave=leave)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*6")]
    pending_stops.write()  # as when the process goes on, and the program has caught the exception
    (tmp_path / "stopped.json").unlink()
    digest, losses = train(0, 1, kind, tmp_path)
    assert digest == alone[0]
    assert losses == alone[1][-len(losses) :]  # that of the step in the checkpoint among them
    assert prove(tmp_path).holds


@pytest.mark.parametrize("options", [{"save_every": 1}, {}])
def test_a_break_between_two_steps_is_in_the_last_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    """Also where there is a checkpoint from before the first of them."""

    def start() -> str:
        with lockstep.Run(tmp_path, seed=7, progress=False, device="cpu", **options) as run:
            _, one, other = parts(run)
            batches = run.batches(data(), global_batch_size=BATCH, epochs=EPOCHS)
            for batch in run.train(batches, one, other):
                run.step(total, batch, optimizer=one)
                if batch.number == 4:  # the first of an epoch
                    break
                run.step(total, batch, optimizer=other)
            return run.digest()

    assert start() == start()


def test_parameters_are_unfrozen_with_several_schedulers() -> None:
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model, one, other = parts(run)
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        schedulers = [lr_scheduler.StepLR(one, 2), lr_scheduler.ExponentialLR(other, 0.9)]
        for batch in loop(run, one, other, scheduler=schedulers):
            if batch.number == 3:
                assert torch.equal(model[0].weight, before)
                model[0].requires_grad_(True)
            if batch.number >= 3:
                run.step(total, batch, optimizer=one)
            run.step(total, batch, optimizer=other)
        assert not torch.equal(model[0].weight, before)


def toggled(rank: int, size: int, by_hand: bool) -> str:
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model, one, other = parts(run)
        for batch in run.train(run.batches(data(), global_batch_size=BATCH, shards=4), one, other):
            run.step(total, batch, optimizer=one)
            if by_hand:
                model[0].requires_grad_(False)
            run.step(total, batch, optimizer=other)
            model[0].requires_grad_(True)
        return run.digest()


def test_freezing_the_others_by_hand_changes_nothing() -> None:
    assert on_workers(toggled, 2, True) == [toggled(0, 1, False)] * 2


# ---- workers that are killed -----------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_optimizers import train
import lockstep
print("digest", train(0, 1, sys.argv[1])[0], flush=True)
"""

PLACES = ("forward", "table", "backward", "waiting", "reduced", "committed", "optimizer", "applied", "compared")


def killed(folder: Path, kind: str, faults: list[dict[str, Any]]) -> tuple[list[str], str]:
    """The digests of the workers that came to the end, and all that was printed."""
    (folder / "program.py").write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "3", "--min", "1", "--log-dir", str(folder / "logs")]
    env = outer_env(LOCKSTEP_FAULTS=json.dumps(faults), LOCKSTEP_BACKEND="shm")
    done = subprocess.run(
        [*command, "program.py", kind], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"lost"' in (folder / "logs" / "events.jsonl").read_text()
    return re.findall(r"digest (\w+)", done.stdout), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_is_killed_in_either_step_changes_nothing(place: str, call: int, tmp_path: Path) -> None:
    fault = {"at": place, "worker": "h0.1", "step": 4, "nth": call}  # this worker has one of the four shards
    digests, said = killed(tmp_path, "gan", [fault])
    assert set(digests) == {train(0, 1, "gan")[0]}, said
    assert len(digests) >= 2


# ---- wrong use -------------------------------------------------------------------------------------------------------


def parts(run: lockstep.Run) -> tuple[Any, Any, Any]:
    model = run.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return model, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in model)


def loop(run: lockstep.Run, *optimizers: Any, **options: Any) -> Any:
    return run.train(run.batches(data(), global_batch_size=8), *optimizers, **options)


def total(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def no_optimizer(run: lockstep.Run) -> None:
    _, one, other = parts(run)
    for batch in loop(run, one, other):
        run.step(total, batch)


def unknown_optimizer(run: lockstep.Run) -> None:
    model, one, other = parts(run)
    for batch in loop(run, one, other):
        run.step(total, batch, optimizer=torch.optim.Adam(model.parameters()))


def twice(run: lockstep.Run) -> None:
    _, one, other = parts(run)
    for batch in loop(run, one, other):
        run.step(total, batch, optimizer=one)
        run.step(total, batch, optimizer=one)


def no_step(run: lockstep.Run) -> None:
    _, one, other = parts(run)
    for _ in loop(run, one, other):
        pass


def shared(run: lockstep.Run) -> None:
    model, one, _ = parts(run)
    next(loop(run, one, torch.optim.Adam(model.parameters())))


def given_twice(run: lockstep.Run) -> None:
    _, one, _ = parts(run)
    next(loop(run, one, one))


def frozen(run: lockstep.Run) -> None:
    model, one, other = parts(run)
    model[1].requires_grad_(False)
    for batch in loop(run, one, other):
        run.step(total, batch, optimizer=one)
        run.step(total, batch, optimizer=other)


def in_place(run: lockstep.Run) -> None:
    def change(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return total(model, x.mul_(1.1))

    _, one, other = parts(run)
    for batch in loop(run, one, other):
        run.step(change, batch, optimizer=one)
        run.step(total, batch, optimizer=other)


def late_mean(run: lockstep.Run) -> None:
    _, one, other = parts(run)
    for batch in loop(run, one, other):
        run.step(total, batch, optimizer=one)
        if batch.number == 2:
            run.step(lambda model, x: (model(x).square().mean(), len(x)), batch, optimizer=other)


def other_scheduler(run: lockstep.Run) -> None:
    model, one, other = parts(run)
    scheduler = lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1), 1)
    next(loop(run, one, other, scheduler=scheduler))


def as_list(run: lockstep.Run) -> None:
    _, one, other = parts(run)
    next(loop(run, [one, other]))


def own_step(run: lockstep.Run) -> None:
    _, one, other = parts(run)
    for batch in loop(run, one, other):
        run.step(total, batch, optimizer=one)
        other.step()


def added_group(run: lockstep.Run) -> None:
    model, one, _ = parts(run)
    other = torch.optim.SGD([model[1].weight], lr=0.1)
    for batch in loop(run, one, other):
        run.step(total, batch, optimizer=one)
        other.add_param_group({"params": [model[1].bias]})


def in_another_order(rank: int, size: int) -> None:
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        _, one, other = parts(run)
        for batch in loop(run, one, other):
            for optimizer in (one, other) if rank == 0 or batch.number < 2 else (other, one):
                run.step(total, batch, optimizer=optimizer)


def test_workers_in_steps_of_different_optimizers_are_told_before_one_is_applied() -> None:
    for outcome in try_on_workers(in_another_order, 2):
        assert isinstance(outcome, Failure)
        assert "DesyncError" in outcome
        assert "optimizer 1" in outcome


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (no_optimizer, TypeError, r"run.train was given 2 optimizers; say which one takes this step"),
        (unknown_optimizer, ValueError, r"this Adam was not given to run.train"),
        (twice, LockstepError, r"run.step: batch 0 has had its step"),
        (no_step, LockstepError, r"batch 0 was handed out, and the next one asked for without run.step"),
        (shared, ValueError, r"optimizers 0 and 1 both have 0.weight, 0.bias: a parameter belongs to one"),
        (given_twice, ValueError, r"optimizer 1 was given before"),
        (frozen, ValueError, r"run.step: optimizer 1 has no parameter that requires a gradient"),
        (in_place, LockstepError, r"the loss function of optimizer 0 has changed the samples of batch 0 in place"),
        (late_mean, ValueError, r"mean"),
        (other_scheduler, ValueError, r"the StepLR was made for an optimizer that run.train has not been given"),
        (as_list, TypeError, r"not a list of 2. For several losses give them one by one, `run.train\(batches, opt_a"),
        (own_step, LockstepError, r"optimizer.step\(\) was called inside the training loop"),
        (added_group, ValueError, r"the groups of each must be complete before run.train"),
    ],
)
def test_wrong_use_is_refused(
    program: Callable[[lockstep.Run], None], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        with lockstep.Run(seed=0, progress=False, device="cpu") as run:
            program(run)
    assert not os.listdir(tmp_path)
