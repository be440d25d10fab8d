"""Gradients that are sent in half precision or as integers (`grad_comm`): parameters of every dtype have the same bits
on any number of workers, and complex ones lose nothing."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.step import grad_comm_tuner
from lockstep.step.run_options import GradComm
from on_workers import on_workers
from runs import Bags, Program, adamw, mlp, sgd, train, use


class Complex(nn.Module):
    """Complex weights; and with `mixed` real ones beside them."""

    def __init__(self, dtype: torch.dtype = torch.complex64, *, mixed: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 8, dtype=dtype) * 0.3)
        self.second = nn.Parameter(torch.randn(8, 10, dtype=dtype) * 0.3)
        self.phase = nn.Parameter(torch.tensor(0.5 + 0.5j, dtype=dtype))  # without a dimension
        self.out = nn.Linear(10, 10) if mixed else None

    def forward(self, x: Tensor) -> Tensor:
        found = ((x.to(self.first.dtype) @ self.first * self.phase) @ self.second).abs().float()
        return found if self.out is None else self.out(found)


class HalfBags(Bags):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, sparse=True).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bag((x.abs() * 30).long() % 50).float())


class Scaled(nn.Module):
    """A parameter without a dimension, and one that only some shards use."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale, self.some = nn.Linear(16, 10), nn.Parameter(torch.tensor(1.5)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.scale + (self.some(x) if x[0, 0] > 0 else 0.0)


def with_comm(comm: str, build: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]) -> Program:
    return Program(build, optimizer, options={"grad_comm": comm} if comm else {})


def plain_sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "complex64": (Complex, adamw),
    "complex128": (lambda: Complex(torch.complex128), sgd),
    "complex and real": (lambda: Complex(mixed=True), sgd),
    "float64": (lambda: mlp().double(), sgd),
    "bfloat16": (lambda: mlp().bfloat16(), sgd),
    "float16": (lambda: mlp().half(), plain_sgd),
    "sparse": (Bags, plain_sgd),
    "sparse bfloat16": (HalfBags, plain_sgd),
    "no dimension, unused": (Scaled, sgd),
}
COMMS = ("", "bf16", "fp16", "int8", "int4")
STEPS = 5  # the fourth is that of a smaller batch
CASES = {f"{name}, {comm or 'as it is'}": with_comm(comm, *MODELS[name]) for name in MODELS for comm in COMMS}


QUICK = list(CASES)[::4]  # of each model one or two: `make test` has these, `make test-all` all


def train_all(rank: int, size: int, backend: str, store: str, names: list[str]) -> dict[str, tuple[str, float]]:
    use(backend, store, rank, size)
    return {name: train(CASES[name], steps=STEPS) for name in names}


@functools.cache
def alone(name: str) -> tuple[str, float]:
    return train(CASES[name], steps=STEPS)


@pytest.mark.parametrize(
    ("size", "backend", "names"),
    [
        (2, "shm", QUICK),
        *(
            pytest.param(size, backend, list(CASES), marks=pytest.mark.slow)
            for size, backend in [(2, "shm"), (3, "gloo"), (3, "shm"), (2, "gloo"), (8, "shm")]
        ),
    ],
)
def test_the_same_bits_on_any_number_of_workers(tmp_path: Path, size: int, backend: str, names: list[str]) -> None:
    for found in on_workers(train_all, size, backend, str(tmp_path / "store"), names):
        assert {name: found[name] for name in names if found[name] != alone(name)} == {}


def test_complex_gradients_are_not_narrowed() -> None:
    for name in ("complex64", "complex128"):
        assert len({alone(f"{name}, {comm or 'as it is'}") for comm in COMMS}) == 1
    assert alone("complex and real, bf16") != alone("complex and real, as it is")  # the real ones are
    assert alone("float64, bf16") != alone("float64, as it is")


# -- integers ----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Two buckets, one of them of 4.7 MB: several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 1100), nn.Linear(1100, 1070)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).view(-1, 107, 10).sum(dim=1)  # every weight has a gradient


FURTHER = {
    "several chunks": (Program(Wide, plain_sgd), {}),
    "sharded optimizer": (Program(mlp, adamw), {"shard_optimizer": True}),
    "audits": (Program(mlp, sgd), {"audit_every": 2}),
    "complex beside it": (Program(lambda: Complex(mixed=True), sgd), {}),
    "fp16, clipped": (Program(mlp, sgd), {"precision": "fp16", "max_grad_norm": 0.5, "on_nonfinite": "skip"}),
}


def train_further(rank: int, size: int, backend: str, store: str) -> dict[str, tuple[str, float]]:
    use(backend, store, rank, size)
    return {
        f"{name}, {comm}": train(program, steps=3, grad_comm=comm, **options)
        for name, (program, options) in FURTHER.items()
        for comm in ("int8", "int4")
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "backend"),
    [
        *((n, "hierarchy") for n in (3, 4)),  # hosts of two and one, and of two and two
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(2, "shm"), (3, "gloo"), (5, "hierarchy")]),
    ],
)
def test_integers_in_other_runs_and_over_hosts(tmp_path: Path, size: int, backend: str) -> None:
    (tmp_path / "one").mkdir()
    want = on_workers(train_further, 1, "gloo", str(tmp_path / "one" / "store"))[0]
    for found in on_workers(train_further, size, backend, str(tmp_path / "store")):
        assert {name: found[name] for name in want if found[name] != want[name]} == {}


def skip_a_step(rank: int, size: int) -> list[bool]:
    """The gradient of the second step is not finite. What the others leave behind a parameter must not be, either."""
    x, skipped = torch.randn(64, 5, generator=torch.Generator().manual_seed(1)), []
    with lockstep.Run(seed=1, progress=False, grad_comm="int8", on_nonfinite="skip") as run:
        model = run.replicate(nn.Linear(5, 3))  # blocks that are mostly padding
        batches = run.batches(TensorDataset(x), global_batch_size=16, shards=4)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            factor = float("inf") if batch.number == 1 else 1.0
            result = run.step(lambda m, b, f=factor: ((m(b[0]) * f).square().sum(), len(b[0])), batch)
            skipped.append(result.skipped)
    return skipped


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_that_is_not_finite_costs_one_step(size: int) -> None:
    assert on_workers(skip_a_step, size) == [[False, True, False, False]] * size


def train_not_exact(rank: int, size: int) -> tuple[str, float]:
    return train(Program(mlp, sgd), grad_comm="int8", exact=False)


def test_integers_without_exactness() -> None:
    assert len(set(on_workers(train_not_exact, 3))) == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_by_rounding_is_estimated_from_the_scales(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_comm_tuner, "MOST_TURN", grad_comm_tuner.LEAST_TURN)
    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(3))
    estimated, found = list[float](), list[float]()
    with lockstep.Run(seed=5, progress=False, grad_comm="auto") as run:
        model = run.replicate(nn.Linear(40, 300))
        batches = run.batches(TensorDataset(x), global_batch_size=24, shards=4, epochs=12)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.0)):
            twin = copy.deepcopy(model)
            sum((twin(shard.data[0]).sin().square().sum() for shard in batch.shards), torch.zeros(())).backward()
            run.step(lambda m, b: (m(b[0]).sin().square().sum(), len(b[0])), batch)
            plan = run._loop.plan
            assert plan is not None
            if plan.tuner.current is GradComm(f"int{bits}"):
                assert twin.weight.grad is not None
                assert model.weight.grad is not None
                exact = twin.weight.grad / 24
                estimated.append(plan.tuner._errors[GradComm(f"int{bits}")])
                found.append(float((model.weight.grad - exact).norm() / exact.norm()))
    assert len(found) >= 12
    assert estimated[-1] == pytest.approx(sum(found) / len(found), rel=0.2)  # it is the largest of three steps


# -- grad_comm="auto" --------------------------------------------------------------------------------------------------


def test_the_first_steps_are_not_compressed_and_the_kinds_take_turns() -> None:
    kinds = [grad_comm_tuner.trial_kind(step, turn=5) for step in range(grad_comm_tuner.trial_length(turn=5))]
    assert set(kinds[: grad_comm_tuner.WARM_UP]) == {GradComm.FP32}
    tried = kinds[grad_comm_tuner.WARM_UP :]
    assert {kind: tried.count(kind) for kind in set(tried)} == {kind: 30 for kind in grad_comm_tuner.KINDS}
    assert tried == tried[:15] * grad_comm_tuner.ROUNDS


@pytest.mark.parametrize(("step_s", "turn"), [(1.0, 4), (0.05, 4), (0.01, 20), (0.001, 32)])
def test_turns_are_longer_if_steps_are_short(step_s: float, turn: int) -> None:
    assert grad_comm_tuner.turn_for(step_s) == turn


class Clock:
    """A clock that a worker's steps advance by what they take with each kind."""

    def __init__(self, steps_s: dict[GradComm, float]) -> None:
        self.now_s, self.steps_s = 0.0, steps_s


def run_trial(
    workers: list[tuple[grad_comm_tuner.GradCommTuner, Clock]],
    steps: range,
    monkeypatch: pytest.MonkeyPatch,
    factor: Callable[[int, GradComm], float] = lambda step, kind: 1.0,
) -> list[GradComm]:
    """Let workers take these steps together. Returns the kinds that they used; fails if they use different ones.

    `factor`: by which a step takes longer than the clock says.
    """
    used = list[GradComm]()
    for step in steps:
        asked: list[list[list[float]]] = [[] for _ in workers]
        # An agreement needs what all workers say: the first round of calls finds that out, and changes nothing.
        for number, (tuner, clock) in enumerate(workers):
            monkeypatch.setattr(grad_comm_tuner.time, "perf_counter", lambda clock=clock: clock.now_s)
            said_by = asked[number]
            copy.deepcopy(tuner).prepare(step, lambda mine, said_by=said_by: said_by.append(mine) or mine)
        assert len({len(one) for one in asked}) == 1
        agreed = [[max(values) for values in zip(*said, strict=True)] for said in zip(*asked, strict=True)]
        for tuner, clock in workers:
            monkeypatch.setattr(grad_comm_tuner.time, "perf_counter", lambda clock=clock: clock.now_s)
            answers = iter(agreed)
            tuner.prepare(step, lambda _, answers=answers: next(answers))
        (kind,) = {tuner.current for tuner, _ in workers}
        used.append(kind)
        for _, clock in workers:
            clock.now_s += clock.steps_s[kind] * factor(step, kind)
    return used


@pytest.mark.parametrize("replaced_at", [None, 1, 8, 9, 40, 200, 475, 476])
def test_workers_agree_on_turns_and_on_the_choice(replaced_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers takes 8 ms, the other 4, with int8 half; one of them is replaced by a new one."""
    fp32, int8, int4 = grad_comm_tuner.KINDS
    slow, fast = {fp32: 2**-7, int8: 2**-8, int4: 2**-6}, {fp32: 2**-8, int8: 2**-9, int4: 2**-7}
    workers = [(grad_comm_tuner.GradCommTuner(GradComm.AUTO), Clock(steps_s)) for steps_s in (slow, fast)]
    length, used = grad_comm_tuner.trial_length(26), list[GradComm]()
    if replaced_at is not None:
        used += run_trial(workers, range(replaced_at), monkeypatch)
        new = grad_comm_tuner.GradCommTuner(GradComm.AUTO)
        new.restore(workers[0][0].state())
        workers[1] = new, Clock(fast)
    used += run_trial(workers, range(len(used), length + 30), monkeypatch)
    assert used == [grad_comm_tuner.trial_kind(step, 26) for step in range(length)] + [int8] * 30
    assert {tuner.state()["turn"] for tuner, _ in workers} == {26}  # type: ignore[index]


@pytest.mark.parametrize("resumed_at", [8, 30])
def test_a_trial_whose_turns_are_not_known_warms_up_once_more(resumed_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32, int8, int4 = grad_comm_tuner.KINDS
    tuner, clock = grad_comm_tuner.GradCommTuner(GradComm.AUTO), Clock({fp32: 2**-7, int8: 2**-8, int4: 2**-6})
    run_trial([(tuner, clock)], range(5), monkeypatch)
    again = grad_comm_tuner.GradCommTuner(GradComm.AUTO)
    again.restore({name: value for name, value in (tuner.state() or {}).items() if name != "turn"})
    used = run_trial([(again, clock)], range(resumed_at, resumed_at + 500), monkeypatch)
    length = grad_comm_tuner.trial_length(26)
    assert used[:length] == [grad_comm_tuner.trial_kind(step, 26) for step in range(length)]
    assert set(used[length:]) == {int8}


def test_a_worker_that_joins_in_the_step_of_an_agreement_makes_the_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are numbered, and it has the state of a worker that has made this one already."""
    fp32, int8, int4 = grad_comm_tuner.KINDS
    tuner, clock = grad_comm_tuner.GradCommTuner(GradComm.AUTO), Clock({fp32: 2**-7, int8: 2**-8, int4: 2**-6})
    decided = grad_comm_tuner.trial_length(26)
    joins = lambda: grad_comm_tuner.GradCommTuner(GradComm.AUTO)  # noqa: E731
    for step in range(decided + 2):
        made, during = list[list[float]](), joins()

        def agree(mine: list[float], made: list[list[float]] = made, during: Any = during) -> list[float]:
            during.restore(json.loads(json.dumps(tuner.state())))  # another one joins in the middle of the call
            made.append(mine)
            return mine

        monkeypatch.setattr(grad_comm_tuner.time, "perf_counter", lambda: clock.now_s)
        tuner.prepare(step, agree)
        assert len(made) == (step in (grad_comm_tuner.WARM_UP, decided)), step
        after = joins()
        after.restore(json.loads(json.dumps(tuner.state())))
        for new in (during, after) if made else (after,):
            made_by_new = list[list[float]]()
            new.prepare(step, lambda mine, to=made_by_new, results=tuple(made): to.append(mine) or results[0])
            # One that joins in the call takes part, with as many numbers; for one that joins later it is over.
            assert [len(one) for one in made_by_new] == [len(one) if new is during else 0 for one in made]
            assert (new.current, new.chosen) == (tuner.current, tuner.chosen)
        clock.now_s += clock.steps_s[tuner.current]


@pytest.mark.parametrize("replaced_at", [None, 476, 500, 944])
def test_a_trial_goes_on_while_the_times_vary(replaced_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In three of the first six rounds int8 takes longer than no compression, and later half as long."""
    fp32, int8, int4 = grad_comm_tuner.KINDS
    steps_s, length = {fp32: 2**-7, int8: 2**-8, int4: 2**-6}, grad_comm_tuner.trial_length(26, 12)
    slow = lambda step, kind: 2.6 if kind is int8 and step < grad_comm_tuner.trial_length(26, 3) else 1.0  # noqa: E731
    workers = [(grad_comm_tuner.GradCommTuner(GradComm.AUTO), Clock(steps_s)) for _ in range(2)]
    used = run_trial(workers, range(replaced_at or 0), monkeypatch, slow)
    if replaced_at is not None:
        new = grad_comm_tuner.GradCommTuner(GradComm.AUTO)
        new.restore(json.loads(json.dumps(workers[0][0].state())))
        workers[1] = new, Clock(steps_s)
    used += run_trial(workers, range(len(used), length + 30), monkeypatch, slow)
    assert used == [grad_comm_tuner.trial_kind(step, 26) for step in range(length)] + [int8] * 30


def test_a_trial_goes_on_if_all_workers_were_resumed_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no times of the rounds before. The state is that of a version that knew no further rounds."""
    fp32, int8, int4 = grad_comm_tuner.KINDS
    clock, length = Clock({fp32: 2**-7, int8: 2**-8, int4: 2**-6}), grad_comm_tuner.trial_length(26)
    tuner, again = grad_comm_tuner.GradCommTuner(GradComm.AUTO), grad_comm_tuner.GradCommTuner(GradComm.AUTO)
    used = run_trial([(tuner, clock)], range(length - 100), monkeypatch)
    again.restore({name: value for name, value in (tuner.state() or {}).items() if name != "rounds"})
    last = grad_comm_tuner.trial_length(26, 2 * grad_comm_tuner.ROUNDS)
    used += run_trial([(again, clock)], range(len(used), last + 20), monkeypatch)
    assert used == [grad_comm_tuner.trial_kind(step, 26) for step in range(last)] + [int8] * 20


def test_a_trial_whose_times_always_vary_ends() -> None:
    rounds = [dict(zip(grad_comm_tuner.KINDS, (1.0, 1.3 if n % 2 else 0.7, 2.0), strict=True)) for n in range(24)]
    fp32, int8, _ = grad_comm_tuner.KINDS
    assert grad_comm_tuner.may_be_faster(int8, fp32, rounds[:6])
    assert not grad_comm_tuner.may_be_faster(fp32, int8, [{**one, int8: 0.7} for one in rounds[:6]])
    tuner = grad_comm_tuner.GradCommTuner(GradComm.AUTO)
    tuner._began, tuner._turn, step = 0, grad_comm_tuner.LEAST_TURN, 0
    while tuner.chosen is None:
        step = tuner._trial_steps
        for n, times in enumerate(rounds):
            tuner._times.update({(n, kind): [time_s] for kind, time_s in times.items()})
        assert tuner.prepare(step, lambda mine: mine)
    assert step == grad_comm_tuner.trial_length(grad_comm_tuner.LEAST_TURN, grad_comm_tuner.MOST_ROUNDS)


def test_times_are_compared_within_each_round() -> None:
    """The machine is twice as slow in some rounds, and one round is not complete."""
    fp32, int8, int4 = grad_comm_tuner.KINDS
    slow, fast, cut = {fp32: 20.0, int8: 18.0, int4: 30.0}, {fp32: 10.0, int8: 9.0, int4: 15.0}, {fp32: 1.0, int8: 9.0}
    times = grad_comm_tuner.step_times([slow, fast, fast, slow, fast, {**cut, int4: 0.0}])
    assert times == {fp32: 10.0, int8: 9.0, int4: 15.0}
    assert not any(grad_comm_tuner.step_times([{**cut, int4: 0.0}]).values())


@pytest.mark.parametrize(
    ("fp32", "int8", "int4", "error", "want"),
    [
        (100, 101, 103, 0.2, "fp32"),
        (100, 98, 99, 0.2, "fp32"),  # it must gain 3 %
        (100, 60, 59, 0.2, "int8"),  # int4 must gain 3 % more
        (100, 60, 40, 0.2, "int4"),
        (100, 60, 40, 0.8, "int8"),  # its errors are too large
        (100, 99, 90, 0.2, "int4"),
    ],
)
def test_what_is_chosen(fp32: float, int8: float, int4: float, error: float, want: str) -> None:
    times = {GradComm.FP32: fp32, GradComm.INT8: int8, GradComm.INT4: int4}
    errors = {GradComm.FP32: 0.0, GradComm.INT8: 0.02, GradComm.INT4: error}
    assert grad_comm_tuner.choose(times, errors, grad_comm_tuner.KINDS) is GradComm(want)


def train_auto(rank: int, size: int, backend: str, folder: str, steps: int | None, choice: str) -> tuple[str, str]:
    """Train for 120 steps with a choice that does not depend on the times."""
    use(backend, f"{folder}/store-{backend}-{size}", rank, size)
    grad_comm_tuner.MOST_TURN, grad_comm_tuner.MOST_ROUNDS = grad_comm_tuner.LEAST_TURN, 0  # else it depends on times
    grad_comm_tuner.choose = lambda times, errors, kinds: GradComm(choice)
    x = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
    data, chosen = TensorDataset(x, x[:, :10].argmax(1)), ""
    with lockstep.Run(f"{folder}/run", seed=1, progress=False, grad_comm="auto", save_every=7) as run:
        model = run.replicate(mlp())
        batches = run.batches(data, global_batch_size=32, shards=6, epochs=8)
        for batch in run.train(batches, sgd(model.parameters()), steps=steps):
            run.step(lambda m, b: (nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[1])), batch)
            chosen = run._loop.plan.tuner.current.value
        return run.digest(), chosen


@pytest.mark.parametrize("choice", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_choice_is_kept_when_a_run_is_resumed_on_another_number_of_workers(tmp_path: Path, choice: str) -> None:
    """The other choice of the later starts would be made again if the first one were lost."""
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    for folder in (whole, parts):
        Path(folder).mkdir()
    want = on_workers(train_auto, 1, "gloo", whole, None, choice)[0]
    for size, backend, steps, later in [(2, "shm", 20, choice), (3, "gloo", 90, choice), (1, "gloo", None, "fp32")]:
        found = on_workers(train_auto, size, backend, parts, steps, later)
        assert len(set(found)) == 1
    assert found[0] == want
    assert want[1] == choice
