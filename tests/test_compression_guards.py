"""What is done while compressed gradients are used: losses are compared again later (train/loss_comparison.py), and
errors by rounding are measured now and then (step/grad_comm_tuner.py). A harm that begins late is found and told."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.comm.compressed_sum import Scale
from lockstep.step import grad_comm_tuner
from lockstep.step.feedback_bucket import FeedbackBucket
from lockstep.step.grad_comm_tuner import GradCommTuner
from lockstep.step.run_options import GradComm
from lockstep.train import loop_state, loss_comparison
from lockstep.train.loss_comparison import LossComparison, share_moved
from on_workers import on_workers
from runs import PROGRAMS, Program, adamw, mlp, sgd, train, use
from test_loss_comparison import steps_of_a_short_comparison

BY_TOP_K = {"grad_comm": "topk", "topk_ratio": 0.1}
BY_RANK = {"grad_comm": "powersgd", "powersgd_rank": 2}
FIRST, SECOND, THIRD = 10, 20, 40  # steps before which losses are compared
STEPS_IN_ALL = 44
NEVER = 1000
PATCHED: dict[Any, tuple[str, ...]] = {
    grad_comm_tuner: ("COMPARISON", "COMPARISON_FACTOR"),
    loss_comparison: ("STEPS", "COUNTED", "LARGEST_HARM", "LEAST_MOVED"),
    FeedbackBucket: ("start", "result"),
}


def compare_early(harm: float = math.inf, moved: float = 0.7) -> None:
    """Compare after few steps, and again soon. `harm` and `moved` are what is accepted."""
    steps_of_a_short_comparison()
    grad_comm_tuner.COMPARISON_FACTOR, loss_comparison.LARGEST_HARM, loss_comparison.LEAST_MOVED = 2, harm, moved


def lose_everything(since: int) -> None:
    """From this step on compression loses all that it is to send."""
    start, result = FeedbackBucket.start, FeedbackBucket.result

    def note_step(self: Any, step: int, shards: list[int], scale: Scale) -> None:
        self.loses_all = step >= since
        start(self, step, shards, scale)

    def lose(self: Any, where: str) -> tuple[list[Tensor], Tensor]:
        found = result(self, where)
        if self.loses_all:
            self._total[: self._rest_at].zero_()
        return found

    FeedbackBucket.start, FeedbackBucket.result = note_step, lose  # type: ignore[method-assign]


def train_and_note(name: str = "mlp", **options: Any) -> tuple[Any, ...]:
    """Return the digest, the last loss, and before which steps losses were compared with which conclusion."""
    conclude, concluded = GradCommTuner.conclude, list[tuple[int, bool]]()

    def note(self: GradCommTuner, kind: GradComm, number: int, *, is_harmless: bool) -> GradComm:
        concluded.append((number, is_harmless))
        return conclude(self, kind, number, is_harmless=is_harmless)

    GradCommTuner.conclude = note  # type: ignore[method-assign]
    try:
        program = {"mlp": Program(mlp, adamw), "cnn": PROGRAMS["cnn with batch norm"]}[name]
        return *train(program, epochs=16, **options), *concluded
    finally:
        GradCommTuner.conclude = conclude  # type: ignore[method-assign]


def train_healthy(
    rank: int, size: int, backend: str, store: str, repeated: int, options: dict[str, Any]
) -> tuple[Any, ...]:
    use(backend, store, rank, size)
    compare_early()
    grad_comm_tuner.COMPARISON_FACTOR = repeated
    return train_and_note("cnn" if options["grad_comm"] == "powersgd" else "mlp", steps=STEPS_IN_ALL, **options)


@pytest.mark.parametrize("options", [BY_TOP_K, pytest.param(BY_RANK, marks=pytest.mark.slow)])
def test_later_comparisons_of_a_healthy_run_change_no_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """Not even those of the residuals, with which the compressed branch begins."""
    (want,) = on_workers(train_healthy, 1, "gloo", "", NEVER, options)
    assert want[2:] == ((FIRST, True),)
    found = on_workers(train_healthy, 1, "gloo", "", 2, options)
    found += on_workers(train_healthy, 3, "shm", str(tmp_path / "three"), 2, options)
    found += on_workers(train_healthy, 2, "gloo", "", 2, {"shard_optimizer": True} | options)
    assert set(found) == {(*want, (SECOND, True), (THIRD, True))}


def train_harmed(rank: int, size: int, backend: str, store: str, harm: float, moved: float) -> tuple[Any, ...]:
    use(backend, store, rank, size)
    compare_early(harm, moved)
    lose_everything(15)
    return train_and_note(steps=STEPS_IN_ALL, **BY_TOP_K)


@pytest.mark.parametrize(("harm", "moved"), [(math.inf, 0.7), (0.1, -math.inf)])
def test_a_harm_that_begins_later_is_found(tmp_path: Path, harm: float, moved: float) -> None:
    """By how far the weights move, and by the losses alone."""
    found = on_workers(train_harmed, 1, "gloo", "", harm, moved)
    found += on_workers(train_harmed, 3, "shm", str(tmp_path / "three"), harm, moved)
    assert len(set(found)) == 1
    assert found[0][2:] == ((FIRST, True), (SECOND, False))


def test_it_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in PATCHED.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # what is set below is undone after the test
    compare_early()
    lose_everything(15)
    found = train_and_note(steps=SECOND + 4, progress=True, **BY_TOP_K)
    told = re.sub(r"\b\d+(\.\d+)?(?=%| without)", "N", capfd.readouterr().err)
    assert found[2:] == ((FIRST, True), (SECOND, False))
    assert f'grad_comm "topk" from step {FIRST + 1} on' in told
    assert re.search(
        r"to N without and to \S+ with grad_comm=\"topk\" \(the weights moved N% as far in the direction in which they "
        rf"moved without it, at least N% is expected: too harmful\); grad_comm \"fp32\" from step {SECOND + 1} on",
        told,
    )


def resume_guarded(rank: int, size: int, folder: str, stop: int, since: int) -> tuple[Any, ...]:
    use("gloo", "", rank, size)
    compare_early()
    lose_everything(since)
    found = train_and_note(steps=stop, directory=Path(folder), save_every=4, **BY_TOP_K)
    Path(folder, "stopped").unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("since", [15, NEVER])
def test_a_run_that_is_resumed_around_the_second_comparison(tmp_path: Path, since: int) -> None:
    """On other numbers of workers. After the second one a run keeps to its conclusion, though there is no harm now."""
    (want,) = on_workers(resume_guarded, 1, str(tmp_path / "whole"), STEPS_IN_ALL, since)
    concluded = list[tuple[int, bool]]()
    for size, stop, harm in [(3, SECOND - 2, since), (1, SECOND + 5, since), (2, STEPS_IN_ALL, NEVER)]:
        found = on_workers(resume_guarded, size, str(tmp_path / "parts"), stop, harm)
        assert set(found) == {found[0]}
        concluded += found[0][2:]
    assert (*found[0][:2], *concluded) == want


def stop_while_comparing_again(rank: int, size: int, folder: str) -> None:
    original, calls = loop_state.losses_of_steps, list[None]()

    def stopped(*arguments: Any) -> list[float]:
        calls.append(None)
        if len(calls) == 4:  # with compression, before step SECOND
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    loop_state.losses_of_steps = stopped  # type: ignore[assignment]
    with suppress(SystemExit):
        resume_guarded(rank, size, folder, STEPS_IN_ALL, NEVER)


def test_a_request_to_stop_during_the_second_comparison_changes_no_bit(tmp_path: Path) -> None:
    (want,) = on_workers(resume_guarded, 1, str(tmp_path / "whole"), STEPS_IN_ALL, NEVER)
    parts = str(tmp_path / "parts")
    on_workers(stop_while_comparing_again, 1, parts)
    assert Path(parts, "checkpoints", f"step-{SECOND + 1:09}").is_dir()
    assert on_workers(resume_guarded, 2, parts, STEPS_IN_ALL, NEVER) == [(*want[:2], (THIRD, True))] * 2


def train_for_long(kind: str) -> tuple[Any, ...]:
    """With "auto", whose trial has 20 steps here, int4 is chosen."""
    compare_early()
    grad_comm_tuner.MOST_TURN = grad_comm_tuner.LEAST_TURN  # else it depends on times, as it would with more rounds
    grad_comm_tuner.ROUNDS = grad_comm_tuner.MOST_ROUNDS = 1
    grad_comm_tuner.choose = lambda times, errors, kinds: kinds[-1]
    options = {"topk": BY_TOP_K, "auto": {"grad_comm": "auto"}}[kind]
    return train_and_note(steps=STEPS_IN_ALL, directory=Path("run"), save_every=4, **options)


PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from lockstep import faults
from test_compression_guards import train_for_long

kind, step, nth, seen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), []

def kill(place):
    if place == "reduced" and faults.context.get("step") == step and faults.context.get("worker") == "h0.1":
        seen.append(place)
        if len(seen) == nth and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), 9)

faults.hook = kill
print("digest", *train_for_long(kind)[:2], flush=True)
"""


def train_in(rank: int, size: int, folder: str, kind: str) -> tuple[Any, ...]:
    os.chdir(folder)
    return train_for_long(kind)


@pytest.mark.parametrize(("kind", "step"), [("topk", SECOND), pytest.param("auto", 2 * SECOND, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_in_the_second_comparison_changes_no_bit(tmp_path: Path, kind: str, step: int) -> None:
    """In the branch with compression. With top-k all go back to a checkpoint, with int4 they compare again."""
    (tmp_path / "whole").mkdir()
    ((digest, loss, *concluded),) = on_workers(train_in, 1, str(tmp_path / "whole"), kind)
    assert (step, True) in concluded
    (tmp_path / "program.py").write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "program.py", kind, str(step), "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    assert set(re.findall(r"digest (\w+) (\S+)", done.stdout)) == {(digest, str(loss))}


# -- what is compared --------------------------------------------------------------------------------------------------


def test_a_loss_that_hardly_falls_is_compared_with_its_spread() -> None:
    losses = [2.0 + 0.1 * (-1) ** n for n in range(32)]
    for more, moved, is_harmless in [(0.002, 1.0, True), (0.01, 1.0, False), (-0.05, 1.0, True), (-0.05, 0.2, False)]:
        found = LossComparison.of(losses, [loss + more for loss in losses], moved)
        assert found.spread == pytest.approx(0.1 * math.sqrt(2))
        assert found.harm == pytest.approx(more / found.spread)
        assert found.is_harmless == is_harmless
        assert ("too harmful" in found.describe("topk")) != is_harmless
        assert LossComparison.from_json(found.to_json()) == found


def test_how_far_weights_moved() -> None:
    one = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0j])]
    other = [torch.tensor([0.5, 7.0]), torch.tensor([3.0, 2.0j])]
    assert share_moved(one, other) == pytest.approx((0.5 + 4.0) / 5.0)
    assert share_moved(one, [torch.zeros_like(value) for value in one]) == 0.0
    assert share_moved([torch.zeros(2)], [torch.ones(2)]) == 1.0  # nothing moved without compression, either
    infinite = share_moved([torch.ones(2)], [torch.tensor([float("inf"), -float("inf")])])
    assert not LossComparison(1.0, 0.5, 0.5, 0.0, infinite).is_harmless


def test_a_worker_that_joins_in_a_later_comparison_sends_what_the_others_send() -> None:
    for is_harmless in (True, False):
        tuner = GradCommTuner(GradComm.TOPK, compares=True)
        for step, want in ((48, GradComm.FP32), (480, GradComm.TOPK)):
            tuner.prepare(step, lambda mine: mine)
            assert tuner.candidate(step - 1) is None
            assert tuner.candidate(step) is GradComm.TOPK
            tuner.conclude(GradComm.TOPK, step, is_harmless=is_harmless or step == 48)
            late = GradCommTuner(GradComm.TOPK, compares=True)
            late.restore(tuner.state())
            late.prepare(step, lambda mine: mine)
            assert late.current is want
            assert late.candidate(step) is GradComm.TOPK
            late.conclude(GradComm.TOPK, step, is_harmless=is_harmless or step == 48)
            assert late.state() == tuner.state()
        tuner.prepare(481, lambda mine: mine)
        assert tuner.current is (GradComm.TOPK if is_harmless else GradComm.FP32)
        assert [tuner.candidate(step) for step in (481, 4799, 4800)] == [
            None,
            None,
            tuner.chosen if is_harmless else None,
        ]


# -- errors by rounding ------------------------------------------------------------------------------------------------


def train_rounded(rank: int, size: int, backend: str, folder: str, stop: int | None, **more: Any) -> tuple[Any, ...]:
    """From step 12 on some elements of the gradient are large, with other signs in other shards.

    Returns the digest, how the last gradients were sent, and the last error that was measured.
    """
    use(backend, f"{folder}/store-{backend}-{size}", rank, size)
    grad_comm_tuner.MEASURED_EVERY = 4
    x = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
    data, last = TensorDataset(x, x[:, :10].argmax(1)), None

    def loss(model: nn.Module, batch: Any, strength: float) -> tuple[Tensor, int]:
        inputs, labels = batch
        total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        weight = model[0].weight  # type: ignore[index]
        return total + strength * inputs[:, 1].sign().sum() * weight[::4, 0].sum(), len(labels)

    options = {"grad_comm": "int4", "progress": False, "save_every": 7} | more
    with lockstep.Run(f"{folder}/run", seed=1, **options) as run:
        model = run.replicate(mlp())
        batches = run.batches(data, global_batch_size=32, shards=8, epochs=3)
        for batch in run.train(batches, sgd(model.parameters()), steps=stop):
            strength = 20.0 * (batch.number >= 12)
            run.step(lambda m, b, s=strength: loss(m, b, s), batch)
            plan = run._loop.plan
            assert plan is not None
            last = plan.tuner.current.value, plan.tuner.last_error
        return run.digest(), last


def test_errors_that_grow_later_are_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors in steps 12, 16 and 20 are too large. The same on several workers, which resume in between."""
    monkeypatch.setattr(grad_comm_tuner, "MEASURED_EVERY", 4)
    folders = [str(tmp_path / name) for name in ("whole", "parts", "ignored")]
    for folder in folders:
        Path(folder).mkdir()
    want = train_rounded(0, 1, "gloo", folders[0], None, progress=True)
    told = capfd.readouterr().err
    number = r"\d\.\d+"
    assert re.search(
        rf"errors by rounding were {number}, {number}, {number} of the norm of the gradient with grad_comm=\"int4\" in "
        r'steps 12, 16, 20 \(at most 0\.7 is used\): grad_comm "fp32" from step 21 on',
        told,
    )
    assert want[1] == ("fp32", None)
    (trace,) = Path(folders[0], "run", "trace").glob("*.jsonl")
    assert '"rounding_error":' in trace.read_text()
    for size, backend, stop in [(3, "shm", 18), (2, "gloo", 25), (1, "gloo", None)]:
        found = on_workers(train_rounded, size, backend, folders[1], stop)
        assert len(set(found)) == 1
    assert found[0] == want
    digest, (kind, error) = train_rounded(0, 1, "gloo", folders[2], None, compare_loss=False)
    assert digest != want[0]
    assert kind == "int4"
    assert error is not None


def measured_errors(rank: int, size: int, backend: str, folder: str) -> list[float | None]:
    return [train_rounded(rank, size, backend, f"{folder}/{stop}", stop)[1][1] for stop in (5, 17)]


def test_errors_are_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    found = list[list[float | None]]()
    for size, backend in [(1, "gloo"), (2, "gloo"), (3, "shm")]:
        folder = tmp_path / f"{size}"
        for stop in (5, 17):
            (folder / str(stop)).mkdir(parents=True)
        found += on_workers(measured_errors, size, backend, str(folder))
    assert all(one == found[0] for one in found)
    small, large = found[0]
    assert small is not None
    assert large is not None
    assert 0.05 < small < 0.7 < large


def test_single_errors_change_nothing_and_a_late_worker_decides_alike() -> None:
    tuner = GradCommTuner(GradComm.INT8, compares=True)
    for step, error in [(0, 0.9), (64, 0.9), (128, 0.1), (192, 0.9), (256, 0.8)]:
        tuner.add_error(step, error)
        assert tuner.prepare(step + 1, lambda mine: mine) is None
    tuner.add_error(320, 0.75)
    late = GradCommTuner(GradComm.INT8, compares=True)
    late.restore(tuner.state())  # it joins in step 320, which the others have taken
    assert late.prepare(320, lambda mine: mine) is None
    late.add_error(320, 0.75)
    assert late.state() == tuner.state()
    for one in (tuner, late):
        assert "0.9, 0.8, 0.75 of the norm" in str(one.prepare(321, lambda mine: mine))
        assert one.current is GradComm.FP32
    later = GradCommTuner(GradComm.INT8, compares=True)
    later.restore(tuner.state())  # it joins in step 321
    assert later.prepare(321, lambda mine: mine) is None
    assert later.current is GradComm.FP32
    assert later.describe_change() == ', grad_comm="int8" no longer: its errors were too large'
    asked = GradCommTuner(GradComm.INT8, compares=False)
    asked.restore(tuner.state())
    asked.prepare(322, lambda mine: mine)
    assert asked.current is GradComm.INT8
    assert not asked.describe_change()


def test_auto_falls_back_to_the_next_best() -> None:
    tuner = GradCommTuner(GradComm.AUTO, compares=True)
    tuner._began, tuner._turn, tuner.chosen, tuner._next_best = 0, 4, GradComm.INT4, GradComm.INT8
    for first, want in ((512, GradComm.INT8), (768, GradComm.FP32)):
        for step in range(first, first + 192, 64):
            tuner.add_error(step, 0.9)
        assert f'grad_comm "{want.value}" from step' in str(tuner.prepare(first + 130, lambda mine: mine))
        assert tuner.current is want
