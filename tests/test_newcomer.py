"""What people do in their first hour: leaving the loop, Ctrl-C, starting again with other settings, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.differences import setting_changes
from lockstep.errors import CheckpointError, LockstepError
from lockstep.step.loss_check import Evaluated, cut_in_two, is_mean, may_be_mean
from on_workers import on_workers, run_program, try_on_workers
from test_launch import Stage, stage, wait_for  # noqa: F401
from test_run import error_of

SAMPLES, BATCH = 96, 16  # six steps in an epoch
DEVICE = "cpu"  # tests/test_newcomer_cuda.py sets another one


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def quiet(directory: Path | None = None, **options: Any) -> lockstep.Run:
    return lockstep.Run(directory, **({"seed": 7, "progress": False, "device": DEVICE} | options))


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").iterdir())


def train(
    directory: Path | None,
    *,
    body: Callable[[Any], Any] = lambda batch: None,
    lr: float = 0.1,
    epochs: int = 3,
    batch_size: int = BATCH,
    scheduler: Callable[[Any], Any] = lambda optimizer: None,
    options: dict[str, Any] | None = None,
) -> list[int]:
    """The steps that were taken. `body(batch)` is called after each; True: `break`."""
    steps: list[int] = []
    with quiet(directory, **(options or {})) as run:
        model = run.replicate(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        batches = run.batches(dataset(), global_batch_size=batch_size, epochs=epochs, shards=4)
        for batch in run.train(batches, optimizer, scheduler=scheduler(optimizer)):
            run.step(loss, batch)
            steps.append(batch.number)
            if body(batch):
                break
    return steps


# ---- leaving the loop ------------------------------------------------------------------------------------------------


def test_a_break_keeps_the_work_and_ends_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, body=lambda batch: batch.number == 7) == list(range(8))
    assert checkpoints(tmp_path)[-1] == 8
    capfd.readouterr()
    assert train(tmp_path) == []
    said = capfd.readouterr().err
    assert "stopped at step 8 by the program; nothing to train; --fresh" in said
    assert checkpoints(tmp_path)[-1] == 8
    (tmp_path / "stopped.json").unlink()
    assert train(tmp_path) == list(range(8, 18))


def test_a_break_before_the_step_does_not_count_it(tmp_path: Path) -> None:
    with quiet(tmp_path) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=BATCH, shards=4)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            if batch.number == 4:
                break
            run.step(loss, batch)
        digest = run.digest()
    assert checkpoints(tmp_path) == [4]
    (tmp_path / "stopped.json").unlink()
    with quiet(tmp_path) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=BATCH, shards=4)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            assert (batch.number, run.digest()) == (4, digest)
            break


class Enough(Exception):
    pass


def test_an_exception_that_the_program_catches_keeps_the_work_and_ends_the_training(tmp_path: Path) -> None:
    def raises(batch: Any) -> None:
        if batch.number == 8:
            raise Enough

    with pytest.raises(Enough):
        train(tmp_path, body=raises)
    assert checkpoints(tmp_path)[-1] == 9
    assert train(tmp_path) == []  # the program went on, so that was how it ends its training


LEAVES = """
import sys
sys.path.insert(0, {tests!r})
from test_newcomer import *

def leave(batch):
    if batch.number == 7:
        {how}

def main():
    train(Path("run"), body=leave)

main()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "status", "next_steps"),
    [
        ("sys.exit(0)", 0, []),
        ("sys.exit(3)", 3, list(range(8, 18))),
        pytest.param("1 / 0", 1, list(range(8, 18)), marks=pytest.mark.slow),
    ],
)
def test_how_a_process_ends_decides_whether_it_trains_on(
    tmp_path: Path, how: str, status: int, next_steps: Any
) -> None:
    (tmp_path / "train.py").write_text(LEAVES.format(tests=str(Path(__file__).parent), how=how))
    ended, said = run_program(tmp_path / "train.py")
    assert ended == status, said
    assert checkpoints(tmp_path / "run")[-1] == 8
    assert train(tmp_path / "run") == next_steps


def test_an_error_of_ours_saves_nothing(tmp_path: Path) -> None:
    """The state may be what is wrong."""

    def bad(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, weight = loss(model, batch)
        return total * float("nan"), weight

    with pytest.raises(lockstep.NonFiniteError), quiet(tmp_path) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=BATCH, shards=4)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            run.step(bad if batch.number == 2 else loss, batch)
    assert not (tmp_path / "checkpoints").exists()


def test_a_dataset_that_fails_costs_no_step_that_was_taken(tmp_path: Path) -> None:
    class Broken(TensorDataset):
        def __getitem__(self, n: int) -> Any:
            if n == 70:
                raise OSError("unreadable")
            return super().__getitem__(n)

    with pytest.raises(LockstepError, match="unreadable"), quiet(tmp_path) as run:
        model = run.replicate(net())
        order = lockstep.Sequential(SAMPLES, BATCH)
        batches = run.batches(Broken(*dataset().tensors), global_batch_size=BATCH, shards=4, order=order)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            run.step(loss, batch)
    assert checkpoints(tmp_path) == [4]


# ---- signals ---------------------------------------------------------------------------------------------------------

SLOW = """
import pathlib, torch
sys.path.insert(0, {tests!r})
from test_newcomer import dataset, loss, net
import lockstep

with lockstep.Run("run", seed=7) as run:
    model = run.replicate(net())
    loaders = int(os.environ.get("LOADERS", 0))
    batches = run.batches(dataset(), global_batch_size=16, epochs=50, shards=4, num_workers=loaders)
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
        run.step(loss, batch)
        if batch.number == 3:
            pathlib.Path(f"up{{run.world.rank}}").touch()
        time.sleep(float(os.environ.get("PAUSE", 0.05)) if batch.number > 2 else 0)
    print("accuracy of a model that is not trained", flush=True)
print("behind the with block", flush=True)
"""


def last_step(folder: Path) -> int:
    return checkpoints(folder / "run")[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_python_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text("import os, sys, time\n" + SLOW.format(tests=str(Path(__file__).parent)))
    process = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"LOADERS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    try:
        wait_for(lambda: (tmp_path / "up0").exists(), "the training", within_s=90)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 75), err
    assert out == ""
    assert "Traceback" not in err
    assert f"saved at step {last_step(tmp_path)}; the same command continues" in err
    assert 4 <= last_step(tmp_path) < 300


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_ctrl_c_under_the_launcher(stage: Stage, elastic: bool) -> None:  # noqa: F811
    script = stage.script(SLOW.format(tests=str(Path(__file__).parent)))
    launcher = stage.start("-n", "2", *(["--min", "1"] if elastic else []), "--grace-s", "0.3", script, PAUSE="0.4")
    stage.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGINT)
    done = stage.end(launcher)
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count(f"saved at step {last_step(stage.folder)}; the same command continues") == 1
    assert len(done.stderr.splitlines()) < 12, done.stderr


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    program = SLOW.format(tests=str(Path(__file__).parent))
    (tmp_path / "train.py").write_text("import os, sys, time\n" + program)
    process = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PAUSE": "30"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    try:
        wait_for(lambda: (tmp_path / "up0").exists(), "the training", within_s=90)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = [process.stderr.readline(), process.stderr.readline()]
        assert "Ctrl-C again ends at once" in said[1]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err


def test_a_program_may_go_on_after_a_signal_and_knows_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, quiet(tmp_path, exit_on_interrupt=False) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=BATCH, shards=4, epochs=9)
        assert not run.interrupted
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            if batch.number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step(loss, batch)
        assert run.interrupted
        assert batch.number == 2
    assert ended.value.code == 75


# ---- starting again --------------------------------------------------------------------------------------------------


def test_a_start_tells_which_settings_have_changed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def cosine(optimizer: Any, steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    train(tmp_path, epochs=1, lr=0.1, scheduler=lambda optimizer: cosine(optimizer, 100))
    capfd.readouterr()
    train(tmp_path, epochs=1, lr=0.1, scheduler=lambda optimizer: cosine(optimizer, 100))
    said = capfd.readouterr().err
    assert train(tmp_path, epochs=1, options={"precision": "bf16"}, scheduler=lambda o: cosine(o, 100)) == []
    assert train(tmp_path, epochs=1, scheduler=lambda o: cosine(o, 100)) == []
    told = capfd.readouterr().err  # a start that trains nothing does not change what is saved
    assert told.count("precision: fp32 in the checkpoint, bf16 in the program") == told.count("precision") == 1
    assert "finished at step 6; nothing to train; --fresh" in said
    assert "counts" not in said
    options = {"precision": "bf16", "max_grad_norm": 1.0}
    scheduler = lambda optimizer: cosine(optimizer, 50)  # noqa: E731
    train(tmp_path, epochs=2, lr=0.3, batch_size=24, options=options, scheduler=scheduler)
    said = capfd.readouterr().err
    for line in (
        "learning rate: 0.1 in the checkpoint, 0.3 in the program; the checkpoint's counts",
        "global_batch_size: 16 in the checkpoint, 24 in the program; the program's counts",
        "precision: fp32 in the checkpoint, bf16 in the program; the program's counts",
        "max_grad_norm: none in the checkpoint, 1 in the program; the program's counts",
        "epochs: 1 in the checkpoint, 2 in the program; the program's counts",
        "T_max of the scheduler: 100 in the checkpoint, 50 in the program; the checkpoint's counts",
    ):
        assert line in said, said
    assert said.count("counts") == 6 + said.count("base_lrs")


def test_what_counts_is_what_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The learning rate of the checkpoint, also in a third start; a scheduler of another class starts by itself."""
    train(tmp_path, epochs=1, lr=0.1)
    seen: list[float] = []
    for epochs in (2, 3):
        with quiet(tmp_path) as run:
            model = run.replicate(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
            batches = run.batches(dataset(), global_batch_size=BATCH, epochs=epochs, shards=4)
            capfd.readouterr()
            for batch in run.train(batches, optimizer):
                run.step(loss, batch)
                seen.append(optimizer.param_groups[0]["lr"])
            assert "learning rate: 0.1 in the checkpoint, 0.3 in the program" in capfd.readouterr().err
    assert seen == [0.1] * 12
    train(tmp_path, epochs=4, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    assert "scheduler: none in the checkpoint, StepLR in the program; the program's counts" in capfd.readouterr().err


def test_changes_are_told_of_what_both_have() -> None:
    saved = {"options": {"precision": "fp32"}, "optimizer": [{"lr": 0.1}, {"lr": 0.2}], "scheduler": {"gamma": 0.1}}
    now = {"options": {"precision": "fp32", "new": 1}, "optimizer": [{"lr": 0.1}, {"lr": 0.4}], "scheduler": {}}
    assert [str(change) for change in setting_changes(saved, now)] == [
        "learning rate of parameter group 1: 0.2 in the checkpoint, 0.4 in the program; the checkpoint's counts"
    ]
    assert setting_changes({}, now) == []


def test_starting_over_moves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(tmp_path, epochs=1)
    assert train(tmp_path, epochs=1, options={"resume": False}) == first
    assert checkpoints(tmp_path) == [6]
    assert checkpoints(tmp_path / "previous-1") == [6]
    monkeypatch.setenv("LOCKSTEP_FRESH", "1")
    assert train(tmp_path, epochs=1) == first
    assert checkpoints(tmp_path / "previous-2") == [6]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun starts again what failed: of this very run
    assert train(tmp_path, epochs=1) == []
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    monkeypatch.setenv("LOCKSTEP_RUN_ID", "a job")
    assert train(tmp_path, epochs=1) == first
    assert train(tmp_path, epochs=1) == []  # a replaced worker of the same job
    with pytest.raises(TypeError, match="resume='no' must be True or False"):
        quiet(tmp_path, resume="no")


def block_checkpoints(directory: Path) -> None:
    """Make it impossible to write another checkpoint there."""
    (directory / "checkpoints").rename(directory / "written")
    (directory / "checkpoints").write_text("")


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_at_the_end(tmp_path: Path) -> None:
    after = []
    with pytest.raises(CheckpointError, match=r"step 18, the last one, is not saved in .*start the same command again"):
        with quiet(tmp_path, save_every=5) as run:
            model = run.replicate(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in run.train(run.batches(dataset(), global_batch_size=BATCH, epochs=3, shards=4), optimizer):
                run.step(loss, batch)
                if batch.number == 16:
                    block_checkpoints(tmp_path)
            after.append(run.digest())  # the program is not kept from using what it has trained
    assert len(after) == 1
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "written").rename(tmp_path / "checkpoints")
    assert train(tmp_path, options={"save_every": 5})[-1] == 17


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [(), ("--min", "1", "--max", "2")], ids=["fixed", "elastic"])
def test_the_launcher_fails_if_the_last_checkpoint_cannot_be_written(stage: Stage, elastic: tuple[str, ...]) -> None:  # noqa: F811
    script = stage.script(
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_newcomer import *\n"
        "def block(batch):\n"
        "    if batch.number == 16 and rank == 0:\n"
        "        block_checkpoints(Path('run'))\n"
        "train(Path('run'), body=block)\n"
    )
    done = stage.run(*(elastic or ("-n", "2")), script)
    assert done.returncode == 1, done.stderr
    assert "step 18, the last one, is not saved" in done.stderr


@pytest.mark.slow
def test_lockstep_run_fresh(stage: Stage) -> None:  # noqa: F811
    script = stage.script(
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_newcomer import *\n"
        "print('steps', len(train(Path('run'), epochs=1)), flush=True)\n"
    )
    train(stage.folder / "run", epochs=1)
    for arguments, steps in (((), 0), (("--fresh",), 6)):
        done = stage.run("-n", "2", *arguments, script)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] steps {steps}" for rank in range(2)]
    assert checkpoints(stage.folder / "run" / "previous-1") == [6]


# ---- wrong use -------------------------------------------------------------------------------------------------------


def loop(body: Callable[[lockstep.Run, Any, nn.Module, Any], Any], **options: Any) -> None:
    """`body(run, batch, model, optimizer)` in a loop of six steps."""
    with quiet(**options) as run:
        model = run.replicate(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in run.train(run.batches(dataset(), global_batch_size=BATCH, shards=4), optimizer):
            body(run, batch, model, optimizer)


def test_two_steps_with_one_batch_are_refused() -> None:
    kept: list[Any] = []

    def twice(run: lockstep.Run, batch: Any, *_: Any) -> None:
        run.step(loss, batch)
        run.step(loss, batch)

    def old(run: lockstep.Run, batch: Any, *_: Any) -> None:
        kept.append(batch)
        run.step(loss, kept[0])

    with pytest.raises(LockstepError, match=r"batch 0 has had its step. .*takes one step for each batch"):
        loop(twice)
    with pytest.raises(LockstepError, match="batch 0 is not the current one, 1"):
        loop(old)


def test_an_iteration_without_a_step_is_refused() -> None:
    with pytest.raises(LockstepError, match=r"batch 0 was handed out, .* without run.step\(loss, batch\)"):
        loop(lambda run, batch, *_: None)
    with pytest.raises(LockstepError, match="batch 2 was handed out"):
        loop(lambda run, batch, *_: run.step(loss, batch) if batch.number != 2 else None)


def test_an_optimizer_step_of_ones_own_is_refused_and_a_backward_told(capfd: pytest.CaptureFixture[str]) -> None:
    def own_step(run: lockstep.Run, batch: Any, model: nn.Module, optimizer: Any) -> None:
        run.step(loss, batch)
        optimizer.step()

    def own_backward(run: lockstep.Run, batch: Any, model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss(model, dataset()[:4])[0].backward()
        run.step(loss, batch)

    def zeroed(run: lockstep.Run, batch: Any, model: nn.Module, optimizer: Any) -> None:
        run.step(loss, batch)
        optimizer.zero_grad()

    with pytest.raises(LockstepError, match=r"optimizer.step\(\) was called inside the training loop: run.step"):
        loop(own_step)
    capfd.readouterr()
    loop(zeroed)
    loop(lambda run, batch, *_: run.step(loss, batch))
    assert capfd.readouterr().err == ""
    loop(own_backward)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "was made or changed by the program before step 0, and is dropped" in said


def test_an_optimizer_may_be_used_after_the_loop() -> None:
    with quiet() as run:
        model = run.replicate(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in run.train(run.batches(dataset(), global_batch_size=BATCH, shards=4), optimizer, steps=2):
            run.step(loss, batch)
    loss(model, dataset()[:4])[0].backward()
    optimizer.step()


def test_an_optimizer_of_some_parameters_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet() as run:
        model = run.replicate(net())
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        for batch in run.train(run.batches(dataset(), global_batch_size=BATCH, shards=4), optimizer, steps=2):
            run.step(loss, batch)
    said = capfd.readouterr().err
    assert "the optimizer has 2 of the 4 parameters that require a gradient; not trained: 0.weight, 0.bias." in said


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "words"),
    [
        (lambda p: [torch.optim.SGD(p, lr=0.1)], None, "takes an optimizer, not a list of 1"),
        (lambda p: torch.optim.LBFGS(p), None, "cannot use LBFGS, which evaluates the loss several times"),
        (lambda p: 0.1, None, "takes an optimizer such as torch.optim.AdamW, not a float"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            r"does not know the value to follow. .*plateau.step\(run.evaluate\(...\)\).*register_state",
        ),
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda o: 0.1, "scheduler= takes one of torch.optim.lr_scheduler"),
    ],
)
def test_what_cannot_be_driven_is_refused_before_a_step(optimizer: Any, scheduler: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words), quiet() as run:
        model = run.replicate(net())
        chosen = optimizer(model.parameters())
        batches = run.batches(dataset(), global_batch_size=BATCH, shards=4)
        for _ in run.train(batches, chosen, scheduler=scheduler(chosen) if scheduler else None):
            pytest.fail("a batch was handed out")


def test_options_of_run_name_the_right_one() -> None:
    for name, words in {
        "num_workers": r"run.batches\(dataset",
        "wire": "grad_comm= here",
        "compression": "grad_comm= here",
        "precison": "did you mean precision=?",
        "clip_norm": "max_grad_norm= here",
        "zzz": "it has directory, seed, exact, resume, precision",
    }.items():
        with pytest.raises(TypeError, match=f"Run has no option '{name}'.*{words}"):
            lockstep.Run(**{name: 1})


# ---- parameters that are frozen and unfrozen -------------------------------------------------------------------------


def unfreezing(rank: int, size: int, directory: str | None = None, steps: int | None = None) -> tuple[str, list[float]]:
    """The first layer is frozen until step 3, and the last from step 8 on."""
    losses = []
    with quiet(Path(directory) if directory else None, check_every=1) as run:
        model = run.replicate(net())
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = run.batches(
            dataset(), global_batch_size=BATCH, shards=4, epochs=2, order=lockstep.Sequential(SAMPLES, BATCH)
        )
        for batch in run.train(batches, optimizer, steps=steps):
            if batch.number == 3:
                model[0].requires_grad_(True)
            if batch.number == 8:
                model[2].requires_grad_(False)
            losses.append(run.step(loss, batch).loss)
        return run.digest(), losses


def plain_unfreezing(start: nn.Module) -> list[float]:
    """The same in a plain loop, from the same weights."""
    start[0].requires_grad_(False)
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(12):
        if number == 3:
            start[0].requires_grad_(True)
        if number == 8:
            start[2].requires_grad_(False)
        first = number % 6 * BATCH
        x, y = (column[first : first + BATCH] for column in dataset().tensors)
        optimizer.zero_grad()
        value = F.cross_entropy(start(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def test_parameters_that_are_unfrozen_are_trained_as_in_a_plain_loop(tmp_path: Path) -> None:
    digest, losses = unfreezing(0, 1)
    with quiet() as run:
        start = run.replicate(net())
    assert losses == pytest.approx(plain_unfreezing(start), rel=1e-5)
    assert on_workers(unfreezing, 2) == [(digest, losses)] * 2
    unfreezing(0, 1, str(tmp_path), 5)  # frozen no more, and that is part of the state
    assert unfreezing(0, 1, str(tmp_path))[0] == digest


UNFROZEN_ON_ONE = """
import torch
sys.path.insert(0, {tests!r})
from test_newcomer import dataset, loss, net, quiet

with quiet() as run:
    model = run.replicate(net())
    model[0].requires_grad_(False)
    batches = run.batches(dataset(), global_batch_size=16, shards=4)
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
        model[0].requires_grad_(rank == 1 and batch.number == 2)
        run.step(loss, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_unfrozen_on_one_worker_only_is_an_error(stage: Stage, backend: str) -> None:  # noqa: F811
    script = stage.script(UNFROZEN_ON_ONE.format(tests=str(Path(__file__).parent)))
    done = stage.run("-n", "2", script, LOCKSTEP_BACKEND=backend)
    assert done.returncode == 1
    assert "run.step: what is trained" in done.stderr


# ---- loss functions --------------------------------------------------------------------------------------------------


def as_mean(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y), len(y)


def test_a_mean_passed_off_as_a_sum_is_refused_in_the_first_step(tmp_path: Path) -> None:
    for model in (net, lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))):
        with (
            pytest.raises(ValueError, match=r"returns a mean as if it were a sum: .*reduction=\"sum\""),
            quiet(tmp_path) as run,
        ):
            trained = run.replicate(model())
            before = [p.clone() for p in (*trained.parameters(), *trained.buffers())]
            batches = run.batches(dataset(), global_batch_size=BATCH, shards=4)
            for batch in run.train(batches, torch.optim.SGD(trained.parameters(), lr=0.1)):
                run.step(as_mean, batch)
        assert all(map(torch.equal, before, (*trained.parameters(), *trained.buffers())))
        assert not (tmp_path / "checkpoints").exists()  # there was nothing to keep


def of_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    weights = (x[:, 0] > 0).float() + 0.25
    return (F.cross_entropy(model(x), y, reduction="none") * weights).sum(), weights.sum()


@pytest.mark.parametrize(
    "right",
    [
        loss,
        of_tokens,
        lambda model, batch: (as_mean(model, batch)[0], 1),  # each shard has the same weight
        lambda model, batch: (as_mean(model, batch)[0] * len(batch[1]), len(batch[1])),
        lambda model, batch: (sum(p.square().sum() for p in model.parameters()) * len(batch[0]), len(batch[0])),
    ],
)
def test_other_losses_are_not_taken_for_a_mean(right: Any) -> None:
    loop(lambda run, batch, *_: run.step(right, batch))


MEANS = {
    "cross_entropy": lambda x, z, y: F.cross_entropy(x, y),
    "label smoothing": lambda x, z, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "soft targets": lambda x, z, y: F.cross_entropy(x, z.softmax(1)),
    "mse_loss": lambda x, z, y: F.mse_loss(x, z),
    "l1_loss": lambda x, z, y: F.l1_loss(x, z),
    "binary": lambda x, z, y: F.binary_cross_entropy_with_logits(x, z.sigmoid()),
    ".mean()": lambda x, z, y: (x - z).square().mean(),
    "sum / n": lambda x, z, y: F.cross_entropy(x, y, reduction="none").sum() / len(y),
    "with a penalty": lambda x, z, y: F.cross_entropy(x, y) + 0.01 * x.square().sum(),
    "batchmean": lambda x, z, y: F.kl_div(x.log_softmax(1), z.softmax(1), reduction="batchmean"),
}
SUMS = {
    "cross_entropy": lambda x, z, y: F.cross_entropy(x, y, reduction="sum"),
    "label smoothing": lambda x, z, y: F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1),
    "mse_loss": lambda x, z, y: F.mse_loss(x, z, reduction="sum"),
    ".sum()": lambda x, z, y: (x - z).square().sum() * 0.5,
    "masked": lambda x, z, y: (F.cross_entropy(x, y, reduction="none") * (y > 0)).sum(),
}


@pytest.mark.parametrize(("name", "is_suspect"), [*((n, True) for n in MEANS), *((n, False) for n in SUMS)])
def test_which_losses_are_looked_at_closer(name: str, is_suspect: bool) -> None:
    x, z = torch.randn(8, 5, requires_grad=True), torch.randn(8, 5)
    total = (MEANS if is_suspect else SUMS)[name](x, z, torch.arange(8) % 5)
    assert may_be_mean(total) is is_suspect


def test_a_loss_that_is_a_sum_is_called_once_for_each_shard() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        calls.append(len(batch[1]))
        return loss(model, batch)

    loop(lambda run, batch, *_: run.step(counted, batch))
    assert calls == [4] * 24


def test_what_tells_a_mean() -> None:
    def shard(value: float, weight: float, samples: int) -> Evaluated:
        return Evaluated(value, weight, samples)

    assert is_mean(shard(2.0, 8, 8), shard(1.5, 4, 4), shard(2.5, 4, 4))
    assert is_mean(shard(2.0, 7, 7), shard(2.0, 3, 3), shard(2.0, 4, 4))
    assert not is_mean(shard(16.0, 8, 8), shard(7.0, 4, 4), shard(9.0, 4, 4))  # a sum
    assert not is_mean(shard(2.0, 1, 8), shard(1.5, 1, 4), shard(2.5, 1, 4))  # a weight that does not grow
    assert not is_mean(shard(0.0, 8, 8), shard(0.0, 4, 4), shard(0.0, 4, 4))  # nothing can be told
    assert not is_mean(shard(float("nan"), 8, 8), shard(1.0, 4, 4), shard(1.0, 4, 4))
    assert not is_mean(shard(5.0, 8, 8), shard(1.0, 4, 4), shard(2.5, 4, 4))  # neither


def test_how_samples_are_cut_in_two() -> None:
    x = torch.arange(6).view(3, 2)
    halves = cut_in_two({"x": x, "more": [x, (x,)]}, 3)
    assert halves is not None
    assert [len(half["more"][1][0]) for half in halves] == [1, 2]
    assert cut_in_two([x, torch.zeros(2)], 3) is None
    assert cut_in_two(object(), 3) is None
    assert cut_in_two(["a", "b", "c"], 3) == (["a"], ["b", "c"])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            lambda total, n: (total, n, 3),
            r"returned 3 values: \(Tensor, int, int\). A third value is a dict of metrics",
        ),
        (lambda total, n: (total, n, {}, 1), r"returned 4 values: \(Tensor, int, dict, int\)"),
        (lambda total, n: total, "this one returned a Tensor"),
        (lambda total, n: (total, n, {"acc": 0.5}), "returned a float as the metric 'acc'; a metric is"),
        (lambda total, n: (total, n, {"acc": (1, 2, 3)}), r"returned 3 values: \(int, int, int\) as the metric 'acc'"),
    ],
)
def test_what_a_loss_function_may_return(returned: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        loop(lambda run, batch, *_: run.step(lambda m, b: returned(*loss(m, b)), batch))


def with_metrics(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
    x, y = batch
    guess = model(x)
    right = (guess.argmax(1) == y).sum()
    return F.cross_entropy(guess, y, reduction="sum"), len(y), {"b": (float(x.sum()), 1), "accuracy": (right, len(y))}


def metrics_of_steps(rank: int, size: int) -> list[Any]:
    found = []
    with quiet() as run:
        model = run.replicate(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in run.train(run.batches(dataset(40), global_batch_size=16, shards=4, epochs=2), optimizer):
            metrics = run.step(with_metrics, batch).metrics
            found.append({name: (float(mean), mean.sum, mean.weight) for name, mean in metrics.items()})
        found.append(run.log(accuracy=metrics["accuracy"]))
    return found


def test_metrics_of_the_loss_are_the_same_on_any_number_of_workers() -> None:
    alone = metrics_of_steps(0, 1)
    assert [sorted(one) for one in alone[:-1]] == [["accuracy", "b"]] * 6
    assert [one["accuracy"][2] for one in alone[:-1]] == [16, 16, 8] * 2
    assert on_workers(metrics_of_steps, 2) == [alone] * 2


def test_metrics_that_are_not_always_there_are_refused() -> None:
    def sometimes(model: nn.Module, batch: Any) -> Any:
        total, weight, metrics = with_metrics(model, batch)
        return total, weight, {} if float(batch[0][0, 0]) > 0 else metrics

    with pytest.raises(ValueError, match=r"returned the metrics .* for one shard and .* for another; .*weight of 0"):
        loop(lambda run, batch, *_: run.step(sometimes, batch))


def test_a_mark_that_is_damaged_is_no_mark(tmp_path: Path) -> None:
    train(tmp_path, body=lambda batch: batch.number == 7)
    for text in ("", "{", "[]", json.dumps({"step": "8"})):
        (tmp_path / "stopped.json").write_text(text)
        assert train(tmp_path, body=lambda batch: True)[:1] == [checkpoints(tmp_path)[-1] - 1]


# ---- what people look for --------------------------------------------------------------------------------------------


class Numbered(TensorDataset):
    """Samples whose prediction is known: their number."""

    def __init__(self, samples: int) -> None:
        super().__init__(torch.arange(samples).float())


def found_by_evaluate(rank: int, size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with quiet(Path(folder) / f"of-{size}") as run:
        model = run.replicate(net())
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        run.register_state(ema=ema)
        batches = run.batches(dataset(), global_batch_size=BATCH, shards=4)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.5)):
            run.step(loss, batch)
            ema.update_parameters(model)
            accuracy = run.evaluate(lambda m, b: ((m(b[0]).argmax(1) == b[1]).sum(), len(b[1])), dataset())
            found[f"best {batch.number}"] = run.save_best(accuracy)
            found[f"accuracy {batch.number}"] = float(accuracy)
        is_training = []
        figure = lambda m, b: (is_training.append(m.training), (m(b[0]).sum().double(), 1))[1]  # noqa: E731
        found["of the average"] = float(run.evaluate(figure, dataset(), model=ema, batch_size=10))
        found["of the model"] = float(run.evaluate(figure, dataset(), batch_size=10))
        found["in training mode"] = any(is_training)
        found["numbers"] = run.predict(lambda m, b: b[0], Numbered(37), batch_size=5).tolist()
        pair = run.predict(lambda m, b: {"a": b[0], "b": -b[0].long()}, Numbered(3), batch_size=2)
        found["pair"] = {name: (str(rows.dtype), rows.tolist()) for name, rows in pair.items()}
        if size == 1:  # else it is an error on the worker that has the samples
            found["no rows"] = error_of(lambda: run.predict(lambda m, b: b[0].sum(), Numbered(3)))
            found["no row each"] = error_of(lambda: run.predict(lambda m, b: b[0][:1], Numbered(3)))
        before = run.digest()
        run.load(Path(folder) / f"of-{size}" / "best")
        found["best accuracy"] = float(
            run.evaluate(lambda m, b: ((m(b[0]).argmax(1) == b[1]).sum(), len(b[1])), dataset())
        )
        found["no checkpoint"] = error_of(lambda: run.load(folder + "/nothing"))
        found["no part"] = error_of(lambda: run.load(Path(folder) / f"of-{size}", "emma"))
        run.load(Path(folder) / f"of-{size}", "ema")
        found["loaded average"] = float(run.evaluate(figure, dataset(), batch_size=10))
        run.load(Path(folder) / f"of-{size}")
        found["back"] = run.digest() == before
    return found


def test_evaluating_other_models_predictions_and_the_best_checkpoint(tmp_path: Path) -> None:
    alone = found_by_evaluate(0, 1, str(tmp_path))
    accuracies = [alone[f"accuracy {n}"] for n in range(6)]
    assert [alone[f"best {n}"] for n in range(6)] == [a > max([0.0, *accuracies[:n]]) for n, a in enumerate(accuracies)]
    assert alone["best accuracy"] == max(accuracies)
    assert alone["of the average"] != alone["of the model"]
    assert alone["loaded average"] == alone["of the average"]
    assert not alone["in training mode"]
    assert alone["back"]
    assert alone["numbers"] == list(range(37))
    assert alone["pair"] == {"a": ("torch.float32", [0.0, 1.0, 2.0]), "b": ("torch.int64", [0, -1, -2])}
    assert "the function given to predict returned a scalar; it must return a tensor with a row for" in alone["no rows"]
    assert "returned 1 rows for 3 samples" in alone["no row each"]
    assert "nothing is neither a run directory with checkpoints nor a checkpoint" in alone["no checkpoint"]
    assert "has no part 'emma'; it has " in alone["no part"]
    same = {name: value for name, value in alone.items() if not name.startswith("no ")}
    for theirs in on_workers(found_by_evaluate, 2, str(tmp_path)):
        assert {name: value for name, value in theirs.items() if not name.startswith("no ")} == same


def epochs_of(run: lockstep.Run, epochs: int) -> Iterator[int]:
    """Train, and yield the number of each epoch at its end."""
    model = run.replicate(net())
    batches = run.batches(dataset(), global_batch_size=BATCH, shards=4, epochs=epochs)
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.5)):
        run.step(loss, batch)
        if batch.ends_epoch:
            yield batch.epoch


def test_the_best_so_far_survives_a_resume(tmp_path: Path) -> None:
    def go(epochs: int, metric: float) -> list[bool]:
        with quiet(tmp_path) as run:
            return [run.save_best(metric, mode="min") for _ in epochs_of(run, epochs)]

    assert go(1, 0.5) == [True]
    assert go(2, 0.7) == [False]
    assert go(3, float("nan")) == [False]
    assert go(4, 0.4) == [True]
    assert checkpoints(tmp_path / "best") == [6, 24]
    with pytest.raises(ValueError, match="mode='best' is not known"), quiet() as run:
        run.save_best(1.0, mode="best")


def save_best_on_a_bad_disk(rank: int, size: int, folder: str) -> list[bool]:
    """The first checkpoint of the best cannot be written: a file is where its folder would be."""
    directory, found = Path(folder) / "run", list[bool]()
    with quiet(directory) as run:
        for epoch in epochs_of(run, 3):
            if rank == 0 and epoch == 0:
                (directory / "best").write_text("in the way")
            found.append(run.save_best([0.5, 0.6, 0.7][epoch], mode="min"))
            time.sleep(0.5 if rank == 0 else 0.0)  # until the writer has given up
            if rank == 0 and epoch == 0:
                (directory / "best").unlink()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_best_checkpoint_that_was_not_written_does_not_count(size: int, tmp_path: Path) -> None:
    assert on_workers(save_best_on_a_bad_disk, size, str(tmp_path)) == [[True, True, False]] * size
    assert checkpoints(tmp_path / "run" / "best") == [12]


def test_a_best_checkpoint_that_was_not_written_does_not_count_after_a_resume(tmp_path: Path) -> None:
    def go(epochs: int, metric: float, *, is_blocked: bool) -> bool:
        best, found = tmp_path / "best", False
        with quiet(tmp_path) as run:
            for _ in epochs_of(run, epochs):
                if is_blocked:
                    best.rename(tmp_path / "away")
                    best.write_text("in the way")
                found = run.save_best(metric)
        if is_blocked:
            best.unlink()
            (tmp_path / "away").rename(best)
        return found

    assert go(1, 2.0, is_blocked=False)
    assert go(2, 9.0, is_blocked=True)
    assert go(3, 5.0, is_blocked=False)
    assert not go(4, 3.0, is_blocked=False)


def test_a_folder_of_the_best_that_was_removed_is_made_again(tmp_path: Path) -> None:
    with quiet(tmp_path) as run:
        for epoch in epochs_of(run, 2):
            assert run.save_best([0.6, 0.5][epoch], mode="min")
            if epoch == 0:
                wait_for(
                    (tmp_path / "best" / "checkpoints" / "step-000000006").exists, "the first checkpoint of the best"
                )
                shutil.rmtree(tmp_path / "best")
    assert checkpoints(tmp_path / "best") == [12]


def test_weights_that_do_not_fit_are_refused_whole(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    with quiet() as run:
        model = run.replicate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
        before = run.digest()
        with pytest.raises(lockstep.CheckpointError, match=r"2.weight is \[2, 16\] float32 in the checkpoint"):
            run.load(tmp_path)
        assert run.digest() == before
        assert model


def test_a_loss_function_with_metrics_can_be_evaluated() -> None:
    def with_accuracy(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
        right = (model(batch[0]).argmax(1) == batch[1]).sum()
        return *loss(model, batch), {"accuracy": (right, len(batch[1]))}

    with quiet() as run:
        run.replicate(net())
        found = run.evaluate(with_accuracy, dataset(), batch_size=10)
        assert isinstance(found, dict)
        assert set(found) == {"loss", "accuracy"}
        assert found["loss"] == run.evaluate(loss, dataset(), batch_size=10)
        assert found["accuracy"].weight == SAMPLES
        with pytest.raises(TypeError, match=r"returned 3 values; it must return \(sum, weight\)"):
            run.evaluate(lambda model, batch: (*loss(model, batch), 1), dataset())


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_model_is_compiled_for_each_size_of_a_shard_whatever_was_seen_before() -> None:
    """Code for any size rounds differently, and which sizes come first depends on the number of workers."""
    compiled: list[list[Any]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        compiled.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    def config() -> tuple[Any, ...]:
        now: Any = torch._dynamo.config
        return now.automatic_dynamic_shapes, now.recompile_limit, now.fail_on_recompile_limit_hit

    torch._dynamo.reset()
    before, x = config(), torch.randn(46, 8)
    with quiet() as run:
        model = run.replicate(Scaled(8, 2))
        model.compile(backend=backend)
        batches = run.batches(TensorDataset(x, torch.zeros(46).long()), global_batch_size=14, shards=4)  # 3, 4; 1
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            run.step(loss, batch)
    assert compiled == [[], [], []]
    assert config() == before


def is_regional(options: Any) -> bool:
    return options == "regional" or (isinstance(options, dict) and "regional" in options)


def train_compiled(rank: int, size: int, options: Any, samples: int) -> str:
    torch._dynamo.reset()
    with quiet(compile=options) as run:
        model = run.replicate(Layers() if is_regional(options) else Deep())
        batches = run.batches(dataset(samples), global_batch_size=BATCH, shards=4)
        for batch in run.train(batches, torch.optim.AdamW(model.parameters(), lr=0.01)):
            run.step(loss, batch)
        assert all(not name.startswith("_orig_mod") for name in model.state_dict())
        return run.digest()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).softmax(1).log()  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Layers in a list, in a sequence, and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.alone, self.last = nn.Linear(8, 16), Layer(), nn.Linear(16, 2)
        self.layers, self.more = nn.ModuleList([Layer(), Layer()]), nn.Sequential(Layer(), nn.Tanh(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        x = self.alone(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.last(self.more(x)).softmax(1).log()  # type: ignore[no-any-return]


def test_with_regional_compilation_only_repeated_blocks_are_compiled_and_their_code_once() -> None:
    torch._dynamo.reset()
    graphs = list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with quiet(compile={"regional": True, "backend": backend}) as run:
        model = run.replicate(Layers())
        batches = run.batches(dataset(BATCH), global_batch_size=BATCH, shards=2)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.01)):
            run.step(loss, batch)
    assert [name for name, one in model.named_modules() if one._compiled_call_impl is not None] == [
        *("layers.0", "layers.1", "more.0", "more.2")
    ]
    assert len(graphs) == 1
    assert set(model.state_dict()) == set(Layers().state_dict())


class NumberedLayer(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 0.01 * self.number)


def test_blocks_that_differ_in_a_number_are_compiled_one_by_one() -> None:
    """There are more of them than sets of shapes that one function may be compiled for."""
    torch._dynamo.reset()
    before, count = torch._dynamo.config.recompile_limit, 40
    with quiet(compile={"regional": True, "backend": "eager"}) as run:
        model = run.replicate(nn.Sequential(nn.Linear(8, 16), nn.Sequential(*map(NumberedLayer, range(count)))))
        batches = run.batches(dataset(BATCH), global_batch_size=BATCH, shards=2)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.01)):
            run.step(lambda m, b: (m(b[0]).square().sum(), len(b[0])), batch)
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "aot_eager"},
        pytest.param({"backend": "aot_eager", "regional": True}, marks=pytest.mark.slow),
        pytest.param("regional", marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.slow),
        pytest.param({"mode": "max-autotune"}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_has_the_same_bits_on_any_number_of_workers(options: Any) -> None:
    alone = train_compiled(0, 1, options, 70)  # shards of 4 samples; in the last batch of 1 and 2
    for size in (2, 4) if options is True else (2,):
        assert on_workers(train_compiled, size, options, 70) == [alone] * size


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ("yes", TypeError, r"compile='yes' must be True, False, \"regional\", or a dict of options of torch.compile"),
        ({"regional": 2}, TypeError, r"compile={'regional': 2} must be True or False"),
        ({"regional": True, "backend": "aot_eager"}, ValueError, r'Run\(compile="regional"\): .*; use compile=True'),
        ({"fast": True}, ValueError, r"compile={'fast': ...} is not an option of torch.compile; it has fullgraph"),
        ({"backend": "nope"}, ValueError, r"Run\(compile={'backend': 'nope'}\): Invalid backend: 'nope'"),
        (True, ValueError, r"needs a C\+\+ compiler on a CPU, and there is neither"),
    ],
)
def test_compile_options_that_cannot_be(
    options: Any, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(error, match=text), quiet(compile=options) as run:
        run.replicate(net())


# ---- the number of shards, where the program does not set it -------------------------------------------------------


def train_without_shards(rank: int, size: int, directory: Path | None, steps: int | None) -> tuple[int, str]:
    """Into how many shards a batch was cut, and the digest of the weights."""
    with quiet(directory, progress=True) as run:
        model = run.replicate(net())
        batches = run.batches(dataset(), global_batch_size=BATCH)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps):
            run.step(loss, batch)
        return batches.settings.shards, run.digest()


def test_there_are_as_many_shards_as_workers_at_the_first_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_without_shards(0, 1, None, 1)[0] == 1
    assert "1 shard on 1 worker (shm), the same bits on 1 worker (shards=8 allows up to 8)" in capfd.readouterr().err
    shards, whole = on_workers(train_without_shards, 2, None, None)[0]
    assert shards == 2
    on_workers(train_without_shards, 2, tmp_path, 3)
    for outcome in try_on_workers(train_without_shards, 3, tmp_path, None):
        assert "3 workers for 2 shards: the run in" in outcome
        assert "Start at most 2 workers, or start over (--fresh), then with run.batches(shards=3) or more" in outcome
    monkeypatch.setenv("LOCKSTEP_SHARDS", "5")  # the run that is resumed has its own number
    assert train_without_shards(0, 1, tmp_path, None) == (2, whole)
    said = capfd.readouterr().err
    assert "2 shards on 1 worker (shm), the same bits on 1 or 2 workers (shards=8 allows up to 8)" in said
    assert train_without_shards(0, 1, None, 1)[0] == 5
    (tmp_path / "shards.json").write_text('{"shards": true}')
    assert train_without_shards(0, 1, tmp_path, None) == (2, whole)  # that of the checkpoint
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "shards.json").write_text('{"shards": 3}')  # of a start that came to no checkpoint
    assert train_without_shards(0, 1, tmp_path / "new", 1)[0] == 5
    monkeypatch.setenv("LOCKSTEP_SHARDS", "100")  # more than samples in a batch
    assert train_without_shards(0, 1, None, 1)[0] == BATCH
    monkeypatch.setenv("LOCKSTEP_SHARDS", "0")
    with pytest.raises(ValueError, match=r"LOCKSTEP_SHARDS='0' is not a whole number of 1 or more"):
        train_without_shards(0, 1, None, 1)
