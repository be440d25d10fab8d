"""What a program does itself in the body of its loop: it happens once for each step, on each worker, whatever is lost.

Also: random numbers that are drawn there, exceptions of `run.step` that are caught there, and steps that are left out.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.seed import preserve_random_state, seed_all
from lockstep.train.loop_check import LoopCheck
from on_workers import Failure, on_workers, run_program, try_on_workers
from test_launch import Stage, outer_env, stage  # noqa: F401
from test_newcomer import dataset, loss, net, quiet
from test_run import error_of

DEADLINE_S = 300.0

# ---- a survivor that is one step behind ------------------------------------------------------------------------------

BEHIND = """
import hashlib, os, random, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
import lockstep
from lockstep import faults
from test_newcomer import dataset, loss


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(8, 2), nn.Linear(8, 2)
        self.target.requires_grad_(False)

    def forward(self, x):
        return self.online(x) + 0.1 * self.target(x)


def move(share):
    with torch.no_grad():
        for mine, its in zip(model.target.parameters(), model.online.parameters()):
            mine.lerp_(its, share)


def act(place):
    '''In each of the named steps rank 1 is stopped before it applies it, and rank 2 killed in the next one.'''
    step, rank = faults.context.get("step"), faults.context.get("rank")
    if run.world.size != 3:
        return
    if place == "reduced" and step in behind and rank == 1 and not Path(f"stopped {{step}}").exists():
        Path("new").write_text(str(os.getpid()))
        Path("new").rename(f"stopped {{step}}")
        os.kill(os.getpid(), 19)
        time.sleep(0.05)
    if place == "forward" and step is not None and step - 1 in behind and rank == 2:
        if not Path(f"killed {{step}}").exists():
            Path(f"killed {{step}}").touch()
            os.kill(os.getpid(), 9)


def wait(until):
    end_s = time.monotonic() + 30
    while not until() and time.monotonic() < end_s:
        time.sleep(0.005)


class OldStyle(torch.optim.Optimizer):
    '''Writes to its gradients through `.data`, as many did before torch 1.5.'''

    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr))

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.data
                gradient.add_(parameter.data, alpha=0.1)
                parameter.data.add_(gradient, alpha=-group["lr"])


behind = [int(text) for text in os.environ.get("BEHIND", "").split()]
with lockstep.Run(seed=7, progress=False, check_every=1000, device=os.environ.get("DEVICE")) as run:
    if behind:
        faults.hook = act
    model = run.replicate(Twin())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    groups = [dict(params=[model.online.weight], lr=0.1), dict(params=[model.online.bias])]
    optimizer = OldStyle(groups, 0.05) if "OLD" in os.environ else torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
    run.register_state(average=average, plateau=plateau)
    drawn = 0.0
    for batch in run.train(run.batches(dataset(), global_batch_size=16, shards=4, epochs=5), optimizer):
        if behind:
            wait(lambda: run.world.size == 3 or run._session.calls.wants_to_move)
        optimizer.param_groups[1]["lr"] *= 0.97  # before the step
        if batch.number % 4 == 0:
            move(1.0)
        scale = 0.5 + random.random()
        result = run.step(lambda model, batch: loss(model, (batch[0] * scale, batch[1])), batch)
        optimizer.param_groups[0]["lr"] *= 1.01  # after the step
        move(0.05)
        plateau.step(result.loss)
        average.update_parameters(model)
    kept = b"".join(value.cpu().numpy().tobytes() for value in average.state_dict().values())
    rates = [group["lr"] for group in optimizer.param_groups]
    print("digest", run.digest(), hashlib.sha256(kept).hexdigest(), rates, plateau.best, plateau.num_bad_epochs)
"""


def digests(out: str) -> list[str]:
    return re.findall(r"^(?:\[(?:worker|rank) \d+\] )?digest (.*)$", out, re.MULTILINE)


def start(folder: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(["-m", "lockstep", "run", *options] if options else []), "program.py"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=outer_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def continue_stopped(folder: Path, launcher: subprocess.Popen[str]) -> int:
    """Continue each worker that has stopped itself when another one is lost, until the run ends. Returns how many."""
    continued: set[str] = set()
    end_s = time.monotonic() + DEADLINE_S
    while launcher.poll() is None and time.monotonic() < end_s:
        events = folder / "logs" / "events.jsonl"
        lost = (
            sum(json.loads(line)["event"] == "lost" for line in events.read_text().splitlines())
            if events.exists()
            else 0
        )
        for path in folder.glob("stopped *"):
            if path.name not in continued and lost > len(continued):
                time.sleep(0.05)
                continued.add(path.name)
                os.kill(int(path.read_text()), signal.SIGCONT)
        time.sleep(0.01)
    return len(continued)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "program.py").write_text(BEHIND.format(tests=str(Path(__file__).parent)))
    _, out = run_program(folder / "program.py", DEVICE="cpu")
    assert len(digests(out)) == 1, out
    return digests(out)[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_survivor_that_is_one_step_behind_runs_its_body_once(tmp_path: Path, undisturbed: str, backend: str) -> None:
    (tmp_path / "program.py").write_text(BEHIND.format(tests=str(Path(__file__).parent)))
    options = ("-n", "3", "--min", "1", "--log-dir", "logs")
    launcher = start(tmp_path, *options, LOCKSTEP_BACKEND=backend, BEHIND="3 9 14 22", DEVICE="cpu")
    try:
        continued = continue_stopped(tmp_path, launcher)
        out, err = launcher.communicate(timeout=DEADLINE_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, f"{out}\n{err}"
    assert continued == 4
    assert set(digests(out)) == {undisturbed}, f"{out}\n{err}"
    assert len(digests(out)) == 3


LOSSES = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
import lockstep
from torch import nn
from test_newcomer import dataset, loss

is_elastic = "LOSSES" in os.environ
failed = set()


def dies(step):  # rank 1, once
    if is_elastic and run.world.rank == 1 and run.world.size == 3 and not Path(f"died {{step}}").exists():
        Path(f"died {{step}}").touch()
        os.kill(os.getpid(), 9)


def wait():
    end_s = time.monotonic() + 30
    while is_elastic and run.world.size < 3 and not run._session.calls.wants_to_move and time.monotonic() < end_s:
        time.sleep(0.005)


def fragile(model, batch):
    if number == 8 and is_elastic and run.world.size == 2 and number not in failed:
        failed.add(number)  # after the shards were shared out anew, on each worker
        raise torch.OutOfMemoryError("out of memory")
    if number == 18 and is_elastic and number not in failed:
        failed.add(number)
        model.scale.add_(7.0)
        raise torch.OutOfMemoryError("out of memory")
    return loss(model, batch)


def figures(model, batch):
    if number == 13:
        dies(13)
    return loss(model, batch)


with lockstep.Run(seed=7, progress=False, check_every=1) as run:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model.register_buffer("scale", torch.tensor(1.0))
    model = run.replicate(model)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in run.train(run.batches(dataset(), global_batch_size=16, shards=6, epochs=4), optimizer):
        number = batch.number
        wait()
        if number == 3:
            model[0].requires_grad_(True)
        if number in (3, 8):
            dies(number)
        while True:
            try:
                run.step(fragile, batch)
                break
            except torch.OutOfMemoryError:
                model.scale.fill_(0.5)
        if number in (8, 18):
            model.scale.fill_(0.5)
        if number in (13, 18):
            run.evaluate(figures, dataset(40), batch_size=8)
            optimizer.param_groups[0]["lr"] = 0.01 * float(model[0].weight.grad.norm())
    print("digest", run.digest(), float(model.scale))
"""


@pytest.mark.slow
def test_workers_that_are_lost_around_a_step(tmp_path: Path) -> None:
    """While all agree on what is trained; before a step that is taken again; in an evaluation behind the step."""
    (tmp_path / "program.py").write_text(LOSSES.format(tests=str(Path(__file__).parent)))
    (wanted,) = digests(start(tmp_path).communicate(timeout=DEADLINE_S)[0])
    out, err = start(tmp_path, "-n", "3", "--min", "1", LOSSES="1").communicate(timeout=DEADLINE_S)
    assert set(digests(out)) == {wanted}, f"{out}\n{err}"
    assert len(list(tmp_path.glob("died *"))) == 3


@pytest.mark.slow
def test_where_gradients_are_written_a_worker_that_is_behind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BEHIND.format(tests=str(Path(__file__).parent)))
    (wanted,) = digests(start(tmp_path, OLD="1").communicate(timeout=DEADLINE_S)[0])
    launcher = start(tmp_path, "-n", "3", "--min", "1", "--log-dir", "logs", BEHIND="5", OLD="1")
    try:
        continue_stopped(tmp_path, launcher)
        out, err = launcher.communicate(timeout=DEADLINE_S)
    finally:
        launcher.kill()
    assert set(digests(out)) == {wanted}, f"{out}\n{err}"
    assert "has written to the gradients since; it ends and is replaced" in err


# ---- random numbers in the body --------------------------------------------------------------------------------------


def mixup(rank: int, size: int, directory: str | None = None, steps: int | None = None) -> str:
    """Draws from each generator before the step, and after it."""
    with quiet(Path(directory) if directory else None, check_every=1) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=16, shards=4, epochs=2)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps):
            scale = 0.5 + random.random() + float(torch.rand(())) + np.random.random()
            run.step(lambda model, batch, s=scale: loss(model, (batch[0] * s, batch[1])), batch)
            random.random(), torch.rand(3), np.random.random()
        return run.digest()


def noise_on_weights(rank: int, size: int, directory: str | None = None, steps: int | None = None) -> str:
    """Adds noise to the weights after each step (Langevin dynamics)."""
    with quiet(Path(directory) if directory else None, check_every=1) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=16, shards=4, epochs=2)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps):
            run.step(loss, batch)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1e-3 * torch.randn_like(parameter)
        return run.digest()


def random_rate(rank: int, size: int, directory: str | None = None, steps: int | None = None) -> str:
    """Draws the learning rate of each step, and how many numbers are drawn depends on it."""
    with quiet(Path(directory) if directory else None, check_every=1) as run:
        model = run.replicate(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        batches = run.batches(dataset(), global_batch_size=16, shards=4, epochs=2)
        for batch in run.train(batches, optimizer, steps=steps):
            optimizer.param_groups[0]["lr"] = random.choice([0.1, 0.03, 0.01])
            while np.random.random() < 0.5:
                optimizer.param_groups[0]["lr"] *= 0.9
            run.step(loss, batch)
        return run.digest()


@pytest.mark.few(1)
@pytest.mark.parametrize("program", [mixup, noise_on_weights, random_rate])
def test_random_numbers_of_the_body_follow_from_the_step(program: Callable[..., str], tmp_path: Path) -> None:
    digest = program(0, 1)
    assert program(0, 1, str(tmp_path), 5) != digest
    random.seed(99), torch.manual_seed(99), np.random.seed(99)
    assert program(0, 1, str(tmp_path)) == digest
    assert on_workers(program, 2) == [digest] * 2


def test_random_numbers_of_the_body_differ_from_step_to_step() -> None:
    with quiet() as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=16, shards=4, epochs=1)
        drawn = []
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            drawn += [random.random(), float(torch.rand(())), np.random.random()]
            run.step(loss, batch)
    assert len(set(drawn)) == len(drawn) == 18


# ---- what else a body changes ----------------------------------------------------------------------------------------


def freezes_averages(run: lockstep.Run, model: nn.Module, optimizer: Any, number: int) -> None:
    if number == 3:
        model[1].eval()


def transposes(run: lockstep.Run, model: nn.Module, optimizer: Any, number: int) -> None:
    if number == 3:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()


def drops_buffer(run: lockstep.Run, model: nn.Module, optimizer: Any, number: int) -> None:
    if number == 2:
        del model.scale
    elif hasattr(model, "scale"):
        optimizer.param_groups[0]["lr"] = 0.05 + float(model.scale)


own = {"torch": torch.Generator(), "random": random.Random(), "numpy": np.random.default_rng()}


def draws_from_its_own(run: lockstep.Run, model: nn.Module, optimizer: Any, number: int) -> None:
    drawn = float(torch.rand((), generator=own["torch"])) + own["random"].random() + own["numpy"].random()
    optimizer.param_groups[0]["lr"] = 0.05 * drawn


def changing(rank: int, size: int, name: str, directory: str | None = None, steps: int | None = None) -> str:
    own["torch"].manual_seed(3), own["random"].seed(4)
    own["numpy"].bit_generator.state = np.random.default_rng(5).bit_generator.state
    with quiet(Path(directory) if directory else None, check_every=1) as run:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        model.register_buffer("scale", torch.tensor(0.25))
        model = run.replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.register_state(**own)
        batches = run.batches(dataset(), global_batch_size=16, shards=4, epochs=2)
        for batch in run.train(batches, optimizer, steps=steps):
            globals()[name](run, model, optimizer, batch.number)
            run.step(loss, batch)
        return run.digest()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["freezes_averages", "transposes", "drops_buffer", "draws_from_its_own"])
def test_what_a_body_changes_is_part_of_the_state(name: str, tmp_path: Path) -> None:
    digest = changing(0, 1, name)
    assert on_workers(changing, 3, name) == [digest] * 3
    changing(0, 1, name, str(tmp_path), 5)
    assert changing(0, 1, name, str(tmp_path)) == digest


def test_what_cannot_be_followed_is_refused() -> None:
    model = nn.Linear(8, 2)
    model.register_buffer("shared", torch.zeros(1).expand(4))
    with quiet() as run, pytest.raises(ValueError, match="shared is an expanded tensor"):
        run.replicate(model)
    with quiet() as run:
        model = run.replicate(net())
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        for batch in run.train(run.batches(dataset(), global_batch_size=16, shards=8), optimizer):
            if batch.number == 2:
                optimizer.param_groups.pop()
                with pytest.raises(ValueError, match="has taken parameters out of optimizer"):
                    run.step(loss, batch)
                break
            run.step(loss, batch)


# ---- exceptions that the program catches, and steps that are left out ------------------------------------------------


def catching(rank: int, size: int, how: str) -> str:
    """In step 2 the last worker fails, or leaves the step out; what it does then is `how`."""
    failures = shards = 0

    def fragile(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        nonlocal failures, shards
        if rank < size - 1 or number != 2 or failures == 2:
            return loss(model, batch)
        shards += 1
        if how == "backward":
            total, weight = loss(model, batch)
            if shards == 4 // size:  # the last one of this worker: buckets leave during its backward pass
                total.register_hook(lambda gradient: 1 / 0)
            return total, weight
        failures += 1
        model[0].weight.grad = torch.ones(16, 8)  # what half a backward pass leaves behind
        raise torch.OutOfMemoryError("out of memory")

    if how == "skips":
        LoopCheck.end_iteration = lambda self: None  # type: ignore[method-assign]  # in a way that it does not see
    with quiet(check_every=1) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=16, shards=4, epochs=1)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            number = batch.number
            while not (how == "skips" and rank == size - 1 and number == 2):
                try:
                    run.step(loss if how in ("nothing", "skips") else fragile, batch)
                    break
                except (torch.OutOfMemoryError, ZeroDivisionError):
                    if how == "continues":
                        break
        return run.digest()


SAID = {
    "continues": "run.step failed for batch 2 on this worker (OutOfMemoryError: out of memory), and the program caught",
    "backward": "LockstepError: run.step: run.step failed on this worker before, in the middle of the exchange",
    "skips": "DesyncError: rank 0 takes step 2, but rank 1 takes step 3; neither was applied",
}


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_a_step_that_failed_before_the_exchange_may_be_taken_again(size: int) -> None:
    assert on_workers(catching, size, "tries again") == [catching(0, 1, "nothing")] * size


@pytest.mark.parametrize("how", SAID)
def test_a_program_cannot_go_on_without_the_step(how: str) -> None:
    began_s = time.monotonic()
    said = try_on_workers(catching, 2, how)
    assert SAID[how] in said[1]
    assert isinstance(said[0], Failure)
    assert time.monotonic() - began_s < 30
    if how != "skips":
        assert SAID[how] in error_of(lambda: catching(0, 1, how))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tries again", *(pytest.param(how, marks=pytest.mark.slow) for how in SAID)])
def test_so_it_is_on_shm(stage: Stage, how: str) -> None:  # noqa: F811
    tests = str(Path(__file__).parent)
    lines = [f"sys.path.insert(0, {tests!r})", "from test_loop_body import catching"]
    script = stage.script("\n".join([*lines, f"print('digest', catching(rank, 2, {how!r}))"]))
    done = stage.run("-n", "2", script, LOCKSTEP_BACKEND="shm")
    if how == "tries again":
        assert set(digests(done.stdout)) == {catching(0, 1, "nothing")}
    else:
        assert done.returncode == 1
        assert SAID[how] in done.stderr


@pytest.mark.parametrize("is_seeded", [False, True])
def test_what_is_drawn_in_a_block_does_not_show_after_it(is_seeded: bool) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    seed_all(5)
    expected = draw() + draw()
    seed_all(5)
    found = draw()
    with preserve_random_state(is_seeded=is_seeded):
        seed_all(6)
        inner = draw()
        with preserve_random_state(is_seeded=is_seeded):
            seed_all(7)
            draw()
        inner += draw()
    found += draw()
    seed_all(6)
    assert found == expected
    assert inner == draw() + draw()
