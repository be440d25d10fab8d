"""Losses with and without compression are compared before it is used (train/loss_comparison.py): the steps are undone,
all workers draw the same conclusion, and a run that is resumed keeps to it."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.low_rank_sum import LowRank
from lockstep.comm.top_k_sum import TopK
from lockstep.step import grad_comm_tuner
from lockstep.step.precision import LossScale
from lockstep.step.run_options import GradComm
from lockstep.train import loop_state, loss_comparison
from lockstep.train.loss_comparison import LossComparison, undone
from on_workers import on_workers
from runs import PROGRAMS, Program, adamw, mlp, train, use

CNN = PROGRAMS["cnn with batch norm"]
BY_RANK = {"grad_comm": "powersgd", "powersgd_rank": 1}
STEPS_IN_ALL = 24


def steps_of_a_short_comparison() -> None:
    """Compare after a few steps, so that runs can be short."""
    grad_comm_tuner.COMPARISON, loss_comparison.STEPS, loss_comparison.COUNTED = 10, 6, 3


def train_compared(
    rank: int, size: int, backend: str, store: str, limit: float, name: str, options: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the digest, the last loss, and the losses that were compared."""
    use(backend, store, rank, size)
    return train_and_compare(limit, name, options)


def train_and_compare(limit: float, name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    steps_of_a_short_comparison()
    loss_comparison.LARGEST_HARM = limit
    compare, found = LossComparison.of, list[LossComparison]()
    loss_comparison.LossComparison.of = staticmethod(lambda *both: found.append(compare(*both)) or found[-1])  # type: ignore[method-assign]
    program = {"cnn": CNN, "mlp": Program(mlp, adamw), "bfloat16": Program(lambda: mlp().bfloat16(), adamw)}[name]
    trained = train(program, steps=STEPS_IN_ALL, epochs=9, **BY_RANK, **options)
    (losses,) = found
    return *trained, *losses.to_json()


@pytest.mark.parametrize("name", ["cnn", pytest.param("mlp", marks=pytest.mark.slow)])
def test_all_workers_draw_the_same_conclusion_and_the_steps_are_undone(tmp_path: Path, name: str) -> None:
    """With buffers and a state of the optimiser. Without a harm that is accepted the run is one without compression."""
    program = {"cnn": CNN, "mlp": Program(mlp, adamw)}[name]
    plain = train(program, steps=STEPS_IN_ALL, epochs=9)
    for limit in (-math.inf, math.inf):
        folder = tmp_path / str(limit)
        folder.mkdir()
        found = on_workers(train_compared, 1, "gloo", str(folder / "one"), limit, name, {})
        found += on_workers(train_compared, 3, "shm", str(folder / "three"), limit, name, {})
        sharded = {"shard_optimizer": True}
        found += on_workers(train_compared, 2, "gloo", str(folder / "sharded"), limit, name, sharded)
        assert len(set(found)) == 1
        assert (found[0][:2] == plain) == (limit < 0)


@pytest.mark.parametrize("redundancy", [0, 1])
def test_master_weights_are_undone(tmp_path: Path, redundancy: int) -> None:
    """Of three workers each updates a part, and with redundancy another one, too."""
    options = {"shard_optimizer": True, "master_weights": True, "redundancy": redundancy}
    plain = train(Program(lambda: mlp().bfloat16(), adamw), steps=STEPS_IN_ALL, epochs=9, **options)
    for limit in (-math.inf, math.inf):
        store = str(tmp_path / str(limit))
        found = on_workers(train_compared, 3, "shm", store, limit, "bfloat16", options)
        assert len(set(found)) == 1
        assert (found[0][:2] == plain) == (limit < 0)


def train_compared_over_hosts(rank: int, size: int, limit: float) -> tuple[Any, ...]:
    os.environ["LOCKSTEP_HOST"] = f"host {rank}"
    return train_and_compare(limit, "mlp", {"shard_optimizer": True})


def test_weights_that_arrive_later_are_undone() -> None:
    """Between hosts new weights arrive in the next forward pass, as differences from the old ones."""
    plain = train(Program(mlp, adamw), steps=STEPS_IN_ALL, epochs=9)
    for limit in (-math.inf, math.inf):
        found = on_workers(train_compared_over_hosts, 2, limit)
        found += on_workers(train_compared, 1, "gloo", "", limit, "mlp", {})
        assert len(set(found)) == 1
        assert (found[0][:2] == plain) == (limit < 0)


def resume_compared(rank: int, size: int, folder: str, stop: int, limit: float) -> tuple[str, float]:
    use("gloo", "", rank, size)
    steps_of_a_short_comparison()
    loss_comparison.LARGEST_HARM = limit
    found = train(
        Program(mlp, adamw, options=BY_RANK | {"save_every": 4}), steps=stop, directory=Path(folder), epochs=9
    )
    Path(folder, "stopped").unlink(missing_ok=True)
    return found


def test_a_run_that_is_resumed_keeps_to_its_conclusion(tmp_path: Path) -> None:
    """It is stopped before the comparison and after it; then another one would come to another conclusion."""
    (want,) = on_workers(resume_compared, 1, str(tmp_path / "whole"), STEPS_IN_ALL, math.inf)
    for size, stop, limit in [(2, 6, -math.inf), (1, 15, math.inf), (3, STEPS_IN_ALL, -math.inf)]:
        found = on_workers(resume_compared, size, str(tmp_path / "parts"), stop, limit)
        assert set(found) == {found[0]}
    assert found[0] == want


def stop_while_comparing(rank: int, size: int, folder: str) -> None:
    original = loop_state.losses_of_steps

    def stopped(*arguments: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    loop_state.losses_of_steps = stopped  # type: ignore[assignment]
    with suppress(SystemExit):
        resume_compared(rank, size, folder, STEPS_IN_ALL, math.inf)


def test_a_request_to_stop_during_the_comparison_changes_no_bit(tmp_path: Path) -> None:
    (want,) = on_workers(resume_compared, 1, str(tmp_path / "whole"), STEPS_IN_ALL, math.inf)
    parts = str(tmp_path / "parts")
    on_workers(stop_while_comparing, 1, parts)
    assert Path(parts, "checkpoints", "step-000000011").is_dir()
    assert on_workers(resume_compared, 2, parts, STEPS_IN_ALL, -math.inf) == [want] * 2


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_loss_comparison import resume_compared
print("digest", resume_compared(0, 1, "run", int(sys.argv[1]), float("inf"))[0])
"""


def test_an_elastic_run_that_starts_again_sends_its_first_gradients_in_the_same_way(tmp_path: Path) -> None:
    """Its workers prepare steps before they read the checkpoint, which says that gradients are compressed."""
    (want,) = on_workers(resume_compared, 1, str(tmp_path / "whole"), STEPS_IN_ALL, math.inf)
    (tmp_path / "program.py").write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    for stop in (15, STEPS_IN_ALL):
        command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "program.py", str(stop)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"digest (\w+)", done.stdout)) == {want[0]}


def test_what_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_comm_tuner, "COMPARISON", 10)
    for limit, verdict, chosen in ((-math.inf, "too harmful", "fp32"), (math.inf, "harmless", "powersgd")):
        monkeypatch.setattr(loss_comparison, "LARGEST_HARM", limit)
        train(Program(mlp, adamw), steps=13, epochs=9, progress=True, **BY_RANK)
        told = re.sub(r"\b\d+(\.\d+)?", "N", capfd.readouterr().err)
        assert 'N steps were tried: the loss fell from N to N without and to N with grad_comm="powersgd"' in told
        assert f'{verdict}); grad_comm "{chosen}" from step N on' in told


def test_a_ratio_that_is_far_too_small_is_not_used(capfd: pytest.CaptureFixture[str]) -> None:
    """By the comparison as users have it: of each gradient a single element would be sent."""
    program, steps = Program(mlp, adamw), grad_comm_tuner.COMPARISON + 4
    plain = train(program, steps=steps, epochs=30)
    assert train(program, steps=steps, epochs=30, progress=True, grad_comm="topk", topk_ratio=0.001) == plain
    assert "too harmful" in capfd.readouterr().err
    assert train(program, steps=steps, epochs=30, grad_comm="topk", topk_ratio=0.001, compare_loss=False) != plain


def test_it_is_told_if_losses_cannot_be_compared(capfd: pytest.CaptureFixture[str]) -> None:
    def with_hook(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    for options, told in ((BY_RANK, True), (BY_RANK | {"compare_loss": False}, False), ({"grad_comm": "int4"}, False)):
        train(Program(mlp, with_hook), steps=1, progress=True, **options)
        why = "losses with and without compression are not compared: the optimizer has hooks, which cannot be undone"
        assert (why in capfd.readouterr().err) == told


class OddOptimizer(torch.optim.Optimizer):
    """Has a state in float32 for weights in bfloat16, a list, and a new entry in its second step."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group.setdefault("sum", torch.zeros(1)).add_(1.0)
            self.state["calls"] = self.state.get("calls", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if "exact" in state:
                    state["second"] = torch.ones(1)
                state.setdefault("exact", parameter.detach().float().clone()).add_(0.001)
                state.setdefault("seen", []).append(float(state["exact"].sum()))
                parameter.data.copy_(state["exact"])


class Growing(nn.Module):
    """Has a buffer that is replaced by a larger one, one that is registered later, one that is deleted; a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.ones(3).bfloat16()), None
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("old", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(2))
        self.length = 2

    def forward(self, x: Tensor) -> Tensor:
        self.length += 1
        self.seen = torch.zeros(self.length)
        self._buffers.pop("old", None)
        self.register_buffer(f"late{len(self.seen)}", torch.ones(1))
        return self.norm(x) * self.weight.float()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale) -> str:
    entries = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    others = optimizer.state.get("calls"), getattr(model, "length", None), list(model._buffers)
    return str([list(model.state_dict().items()), entries, groups, scale.state(), others])


def test_everything_is_as_it_was() -> None:
    model, scale = Growing(), LossScale(8.0, grows_after=2)
    optimizer = OddOptimizer([model.weight], {"lr": 0.1})
    plan: Any = SimpleNamespace(
        model=model, optimizer=optimizer, loss_scale=scale, residuals=None, sharded_state=None, weights=None
    )

    def step() -> None:
        model(torch.randn(4, 3))
        optimizer.step()
        scale.update(finite=False)

    for _ in range(2):  # once without a state of the optimiser
        before, buffer, exact = state_of(model, optimizer, scale), model.seen, optimizer.state.get(model.weight, {})
        with undone(plan):
            step()
            step()
            assert state_of(model, optimizer, scale) != before
        assert state_of(model, optimizer, scale) == before
        assert model.seen is buffer
        assert optimizer.state.get(model.weight, {}).get("exact") is exact.get("exact")
        step()


@pytest.mark.parametrize(
    ("without", "compressed", "harm"),
    [
        ([4.0] * 16 + [2.0] * 16, [4.0] * 16 + [2.1] * 16, 0.05),
        ([4.0] * 16 + [2.0] * 16, [4.0] * 16 + [1.9] * 16, -0.05),
        ([2.0] * 32, [2.0] * 16 + [2.02] * 16, 0.5),  # it does not fall: by chance it might
        ([3.0] * 16 + [2.0] * 16, [3.0] * 7, math.nan),  # not finite after seven steps
        ([], [], math.nan),
        ([0.0] * 32, [0.0] * 32, 0.0),
        ([math.inf] + [2.0] * 31, [2.0] * 32, math.nan),
    ],
)
def test_harm(without: list[float], compressed: list[float], harm: float) -> None:
    found = LossComparison.of(without, compressed)
    assert found.harm == pytest.approx(harm, nan_ok=True)
    assert found.is_harmless == (harm <= 0.03)
    assert str(LossComparison.from_json(found.to_json())) == str(found)


def test_a_loss_that_does_not_fall_is_not_said_to_show_that_nothing_is_harmed() -> None:
    told = LossComparison.of([1.1] * 16 + [1.12] * 16, [1.1] * 16 + [1.12] * 16).describe("int4")
    assert "the loss went from 1.1 to 1.12 without and to 1.12 with" in told
    assert "a loss that hardly falls does not show whether this harms" in told
    assert "harmless" not in told
    assert "too harmful" in LossComparison.of([2.0] * 32, [2.0] * 16 + [2.1] * 16).describe("int4")
    assert "too harmful" in LossComparison.of([2.0] * 32, [2.0] * 7).describe("int4")


class Overflows:
    """A loss that is not finite in a step of a comparison, and never in one of the run itself."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    @property
    def has_overflowed(self) -> bool:
        return self._left <= 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self._left -= 1
        total = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return total * (math.inf if self._left == 0 else 1.0), len(batch[1])


def test_a_step_that_is_not_finite_in_a_comparison_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the buffers of batch norm, which a failed step would restore to what they were in the branch."""
    monkeypatch.setattr(grad_comm_tuner, "COMPARISON", 10)
    monkeypatch.setattr(loss_comparison, "STEPS", 6)
    monkeypatch.setattr(loss_comparison, "LARGEST_HARM", -math.inf)
    plain = train(Program(CNN.build, CNN.optimizer, loss=Overflows(0)), steps=14, epochs=9)
    for step in (
        2,
        8,
    ):  # in the first and in the second branch, after ten steps of the run; else this would end the run
        loss = Overflows((10 + step) * CNN.shards - 1)
        assert train(Program(CNN.build, CNN.optimizer, loss=loss), steps=14, epochs=9, **BY_RANK) == plain
        assert loss.has_overflowed


def test_a_kind_that_the_program_asks_for_counts_when_it_resumes(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"grad_comm": kind} for kind in ("int8", "fp32", "bf16")]
    options += [BY_RANK, BY_RANK | {"compare_loss": False}, {"grad_comm": "auto"}]
    for number, (first, second) in enumerate(itertools.permutations(options, 2)):
        tuners = [
            grad_comm_tuner.GradCommTuner(GradComm(one["grad_comm"]), compares=one.get("compare_loss", True))
            for one in (first, second)
        ]
        tuners[0].prepare(3, lambda mine: mine)
        if number % 2 and tuners[0].candidate(50) is not None:
            tuners[0].conclude(GradComm.POWERSGD, 50, is_harmless=bool(number % 4))
        fresh = grad_comm_tuner.GradCommTuner(GradComm(second["grad_comm"]), compares=second.get("compare_loss", True))
        tuners[1].restore(tuners[0].state())
        if first["grad_comm"] == second["grad_comm"]:  # with and without a comparison
            continue
        for step in (60, 61):
            for tuner in (tuners[1], fresh):
                tuner.prepare(step, lambda mine: mine)
            assert (tuners[1].current, tuners[1].candidate(step)) == (fresh.current, fresh.candidate(step))


def test_a_comparison_of_another_ratio_or_rank_does_not_count() -> None:
    for kind, methods in ((GradComm.TOPK, (TopK(0.001), TopK(0.1))), (GradComm.POWERSGD, (LowRank(1), LowRank(4)))):
        for is_harmless in (True, False):
            first, same, other = (
                grad_comm_tuner.GradCommTuner(kind, compares=True, method=method) for method in (methods[0], *methods)
            )
            first.conclude(kind, 48, is_harmless=is_harmless)
            same.restore(first.state())
            other.restore(first.state())
            assert (same.chosen, same.candidate(60)) == (kind if is_harmless else GradComm.FP32, None)
            assert (other.chosen, other.candidate(60)) == (None, kind)


def test_states_of_auto_from_before_there_was_a_comparison() -> None:
    for chosen in (None, "int4"):
        tuner = grad_comm_tuner.GradCommTuner(GradComm.AUTO, compares=True)
        tuner.restore({"began": 3, "chosen": chosen})
        assert tuner.chosen is (None if chosen is None else GradComm.INT4)


def test_without_a_comparison_the_candidate_is_used() -> None:
    """After a comparison has failed, such as for want of memory, the program starts with compare_loss=False."""
    tuner, again = (grad_comm_tuner.GradCommTuner(GradComm.AUTO, compares=compares) for compares in (True, False))
    tuner._began, tuner._candidate = 0, GradComm.INT4
    again.restore(tuner.state())
    again.prepare(60, lambda mine: mine)
    assert again.current is GradComm.INT4
    assert again.candidate(60) is None


def test_auto_compares_what_is_fastest_and_takes_the_next_best() -> None:
    for is_harmless, want in ((True, GradComm.INT4), (False, GradComm.INT8)):
        tuner = grad_comm_tuner.GradCommTuner(GradComm.AUTO, compares=True)
        tuner._began, tuner._turn = 0, grad_comm_tuner.LEAST_TURN
        for n in range(grad_comm_tuner.ROUNDS):
            tuner._times.update({(n, GradComm.FP32): [3.0], (n, GradComm.INT8): [2.0], (n, GradComm.INT4): [1.0]})
        step = grad_comm_tuner.trial_length(grad_comm_tuner.LEAST_TURN)
        assert "if the loss does not suffer" in str(tuner.prepare(step, lambda mine: mine))
        assert tuner.current is GradComm.FP32
        assert tuner.candidate(step) is GradComm.INT4
        resumed = grad_comm_tuner.GradCommTuner(GradComm.AUTO, compares=True)
        resumed.restore(tuner.state())
        for one in (tuner, resumed):
            assert one.conclude(GradComm.INT4, step, is_harmless=is_harmless) is want
            late = grad_comm_tuner.GradCommTuner(GradComm.AUTO, compares=True)
            late.restore(one.state())  # a worker that joins in the step in which the others have compared
            late.prepare(step, lambda mine: mine)
            assert late.current is GradComm.FP32
            assert late.candidate(step) is GradComm.INT4
            one.prepare(step + 1, lambda mine: mine)
            assert one.current is want
            assert one.candidate(step + 1) is None
