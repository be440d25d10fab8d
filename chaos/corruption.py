"""Changes bits of workers that train, as a faulty machine does, and checks that it is found and leaves no trace.

A case is a small training with audits on 2 to 5 workers. One worker, at one step, gets wrong bits: in a gradient or an
activation that it computes (once, or in every pass from then on), in a weight, in the state of the optimiser, or in a
gradient that it received. Then the training is resumed from the last verified checkpoint without that worker.

A fault that stays must be found within the promised number of steps and, with three or more workers, be blamed on the
right worker; the resumed training must end with the digest of a clean one. A fault that is not found must have changed
nothing: a small bit may be rounded away. A fault of a single moment in a gradient or an activation is found only if it
hits an audited shard; how many were is told.

Clean trainings, in which every step is audited, must raise no alarm. Trainings with `audit_every="auto"` on two workers
show what audits cost: how much longer steps with audits take than the steps around them, and what the schedule costs in
the other steps. It is CPU time, which other programs disturb less than time.

    python chaos/corruption.py                      5,000 faults, 200,000 audits without a fault, the cost of "auto"
    python chaos/corruption.py --quick              200 faults, 5,000 audits, fewer steps
    python chaos/corruption.py --seed 7 --faults 50 --audits 0 --cost-steps 0

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which an optimiser imports in its first step: here once, for all workers
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.bench.models import OPTIMIZERS, WORKLOADS, loss_of
from lockstep.step.audit import ShardAudit

STEPS, SAVE_EVERY, SHARDS = 12, 2, 8
CLEAN_STEPS = 300  # of a training in which every step is audited
CLEAN_WORLDS = ((2, 2), (3, 8), (2, 2), (2, 8))  # (workers, shards) of such trainings, in turn
CLEAN_PER_LAUNCH = 12
MAX_SHARE = 0.01  # of the time that audits may take with "auto"
STEPS_AROUND = 20  # before and after an audited step, with which it is compared
AUDIT_EVERY = (2, 4, 5)
PER_LAUNCH = 60  # a Run leaves its process group open
STAYS = ("gradients", "activations", "weight", "optimizer", "received")
ONCE = ("gradient once", "activation once")
KINDS = (*STAYS, *ONCE)


@dataclass(frozen=True)
class Fault:
    """Which bits change: of which tensor, from 0 to 1 in a list of those there are, and of which of its elements."""

    kind: str
    rank: int
    step: int
    tensor: float
    elements: tuple[float, ...]
    bit: int


@dataclass(frozen=True)
class Case:
    number: int
    program: str
    workers: int
    audit_every: int
    fault: Fault | None
    steps: int = STEPS
    shards: int = SHARDS


@dataclass(frozen=True)
class Outcome:
    """How a training ended: with a digest, or with an error at a step."""

    digest: str
    error: str
    wrong_ranks: tuple[int, ...] | None
    step: int


# -- programs ----------------------------------------------------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x.view(-1, 1, 4, 4)))).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 5))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 8)), layer, nn.Flatten(), nn.Linear(16, 5))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "mlp, AdamW": (mlp, lambda p: torch.optim.AdamW(p, lr=0.01)),
    "cnn, momentum": (Cnn, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "attention, RMSprop": (attention, lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5)),
}


CLEAN_PROGRAMS = (*PROGRAMS, *["mlp, AdamW"] * 3)  # the fastest one more often: there are to be many audits


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


# -- faults ------------------------------------------------------------------------------------------------------------


def flip(tensor: Tensor, fault: Fault) -> None:
    """Change bits as memory does it: torch does not count it as a write."""
    raw, size = tensor.detach().view(-1).view(torch.uint8).numpy(), tensor.element_size()
    for where in {int(one * tensor.numel()) for one in fault.elements}:
        raw[where * size + fault.bit // 8 % size] ^= 1 << fault.bit % 8


class _Replace(torch.autograd.Function):
    """Replaces the value of a tensor. Adding the difference would keep a zero of which only the sign changes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Injector:
    """Injects one fault into the training of one worker."""

    def __init__(self, fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._fault, self._optimizer = fault, optimizer
        self._parameters = list(model.parameters())
        self._now, self._is_done = -1, False
        if fault.kind in ("gradients", "gradient once"):
            self._choose(self._parameters).register_hook(self._wrong_copy)
        elif fault.kind in ("activations", "activation once"):
            leaves = [m for m in model.modules() if not list(m.children()) and not isinstance(m, nn.Dropout)]
            module = self._choose([m for m in leaves if type(m) in (nn.Linear, nn.Conv2d, nn.ReLU, nn.LayerNorm)])
            module.register_forward_hook(lambda _module, _inputs, output: self._wrong_copy(output))
        elif fault.kind == "received":
            optimizer.register_step_pre_hook(lambda *_: self._write(lambda parameter: parameter.grad))

    def begin_step(self, number: int) -> None:
        self._now = number
        if self._fault.kind == "weight":
            self._write(lambda parameter: parameter)
        if self._fault.kind == "optimizer":
            self._write(self._some_state)

    def _choose(self, candidates: Sequence[Any]) -> Any:
        return candidates[int(self._fault.tensor * len(candidates))]

    def _some_state(self, parameter: Tensor) -> Tensor:
        state = self._optimizer.state[parameter]
        return self._choose([value for value in state.values() if isinstance(value, Tensor) and value.dim()])

    def _write(self, of: Callable[[Tensor], Any]) -> None:
        if self._now == self._fault.step and not self._is_done:
            self._is_done = True
            flip(of(self._choose(self._parameters)), self._fault)

    def _wrong_copy(self, tensor: Tensor) -> Tensor:
        stays = self._fault.kind in STAYS
        if not (self._now >= self._fault.step if stays else self._now == self._fault.step and not self._is_done):
            return tensor
        self._is_done = True
        changed = tensor.detach().clone()
        flip(changed, self._fault)
        if not tensor.requires_grad:
            return changed
        return _Replace.apply(tensor, changed.nan_to_num(1e30, math.inf, -math.inf))


# -- trainings ---------------------------------------------------------------------------------------------------------


def train(case: Case, folder: Path, *, is_clean: bool) -> Outcome:
    """One training in this process, together with those of the other workers."""
    build, make_optimizer = PROGRAMS[case.program]
    generator, number = torch.Generator().manual_seed(0), -1
    x = torch.randn(160, 16, generator=generator)
    data = TensorDataset(x, x[:, :5].argmax(1))
    save_every = SAVE_EVERY if case.fault is not None else case.steps
    options: Any = {"progress": False, "trace": False, "device": "cpu", "backend": "shm", "save_every": save_every}
    try:
        with lockstep.Run(folder, seed=7, audit_every=case.audit_every, **options) as run:
            model = run.replicate(build())
            optimizer = make_optimizer(model.parameters())
            fault = None if is_clean else case.fault
            is_victim = fault is not None and run.world.rank == fault.rank
            injector = Injector(fault, model, optimizer) if fault is not None and is_victim else None
            batches = run.batches(data, global_batch_size=16, shards=case.shards, epochs=None)
            for batch in run.train(batches, optimizer, steps=case.steps):
                number = batch.number
                if injector is not None:
                    injector.begin_step(number)
                run.step(loss, batch)
            return Outcome(run.digest(), "", None, number)
    except lockstep.DivergenceError as error:
        return Outcome("", str(error), error.wrong_ranks, number)
    except lockstep.NonFiniteError as error:
        return Outcome("", str(error), None, number)


def train_all(cases: Sequence[Case], folder: Path, is_clean: bool) -> list[Outcome]:
    """The outcomes on rank 0. Runs on every worker; the error is the same on all of them."""
    outcomes = []
    for case in cases:
        outcomes.append(train(case, folder / str(case.number), is_clean=is_clean))
        if dist.is_initialized() and dist.get_world_size() > 1:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, outcomes[-1])
            assert all(one == told[0] for one in told), told
    return outcomes


# -- judging -----------------------------------------------------------------------------------------------------------


def plan(seed: int, count: int) -> list[Case]:
    random, cases = Random(f"corruption {seed}"), []
    for number in range(count):
        workers, every = random.choice((2, 3, 3, 4, 5)), random.choice(AUDIT_EVERY)
        kind = random.choice(KINDS)
        elements = tuple(random.random() for _ in range(random.choice((1, 1, 8))))
        step = random.randrange(1, STEPS - every)
        fault = Fault(kind, random.randrange(workers), step, random.random(), elements, random.randrange(32))
        cases.append(Case(number, random.choice(list(PROGRAMS)), workers, every, fault))
    return cases


def judge(case: Case, outcome: Outcome, resumed: str | None, clean: str) -> str:
    """What is wrong with the outcome; "" if nothing is."""
    fault = case.fault
    assert fault is not None
    if not outcome.error:
        return f"not found: {fault}" if fault.kind in STAYS and outcome.digest != clean else ""
    if outcome.step >= fault.step + case.audit_every:
        return f"found only at step {outcome.step}: {fault}"
    if outcome.step < fault.step:
        return f"a false alarm at step {outcome.step}: {outcome.error}"
    if fault.kind in STAYS and case.workers >= 3 and outcome.wrong_ranks != (fault.rank,):
        return f"blamed on {outcome.wrong_ranks}: {fault}: {outcome.error}"
    return "" if resumed == clean else f"resumed with another digest: {fault}: {outcome.error}"


def groups_of(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases with the same number of workers, which are run together; all numbers of workers in turn."""
    groups: dict[int, list[list[Case]]] = {}
    for case in cases:
        same = groups.setdefault(case.workers, [[]])
        if len(same[-1]) == PER_LAUNCH:
            same.append([])
        same[-1].append(case)
    by_turn = itertools.zip_longest(*groups.values())
    return [group for turn in by_turn for group in turn if group is not None]


@dataclass
class FaultCounts:
    """How many faults of one kind were injected, had no effect, were found, and were blamed on the right worker."""

    injected: int = 0
    no_effect: int = 0
    found: int = 0
    found_by_three: int = 0  # by three or more workers
    named_by_three: int = 0

    def add(self, case: Case, outcome: Outcome, clean: str) -> None:
        assert case.fault is not None
        self.injected += 1
        self.no_effect += outcome.digest == clean
        self.found += bool(outcome.error)
        if case.workers >= 3:
            self.found_by_three += bool(outcome.error)
            self.named_by_three += outcome.wrong_ranks == (case.fault.rank,)


def run_faults(seed: int, count: int, folder: Path, within_s: float) -> tuple[int, list[str]]:
    """Run the cases and print a table. Returns how many were run in the time, and what went wrong."""
    alone = [Case(n, name, 1, 0, None) for n, name in enumerate(PROGRAMS)]
    outcomes = lockstep.launch(train_all, alone, folder / "clean", True, workers=1)
    clean = {case.program: outcome.digest for case, outcome in zip(alone, outcomes, strict=True)}
    wrong, counts_by_kind, began_s, done = list[str](), {kind: FaultCounts() for kind in KINDS}, time.monotonic(), 0
    for group in groups_of(plan(seed, count)):
        workers = group[0].workers
        outcomes = lockstep.launch(train_all, group, folder, False, workers=workers)
        again = [case for case, outcome in zip(group, outcomes, strict=True) if outcome.error]
        resumed = lockstep.launch(train_all, again, folder, True, workers=workers - 1) if again else []
        digests = {case.number: one.digest for case, one in zip(again, resumed, strict=True)}
        for case, outcome in zip(group, outcomes, strict=True):
            assert case.fault is not None
            counts_by_kind[case.fault.kind].add(case, outcome, clean[case.program])
            problem = judge(case, outcome, digests.get(case.number), clean[case.program])
            if problem:
                wrong.append(f"case {case.number} ({case.program}, {workers} workers): {problem}")
                print(wrong[-1], flush=True)
            shutil.rmtree(folder / str(case.number), ignore_errors=True)
        done += len(group)
        took_s = time.monotonic() - began_s
        print(f"{done} of {count} faults, {len(wrong)} failed, {took_s:.0f} s", flush=True)
        if took_s > within_s:
            break
    print(f"{'fault':<18}{'injected':>9}{'no effect':>11}{'found':>7}   on 3 to 5 workers{'found':>7}{'named':>7}")
    for kind, one in counts_by_kind.items():
        three = f"{'':>21}{one.found_by_three:>7}{one.named_by_three:>7}"
        print(f"{kind:<18}{one.injected:>9}{one.no_effect:>11}{one.found:>7}{three}")
    return done, wrong


def run_audits(count: int, folder: Path) -> tuple[int, list[str]]:
    """Audit every step of clean trainings. Returns how many audits there were, and the false alarms."""
    alarms, done = list[str](), 0
    worlds = itertools.cycle(CLEAN_WORLDS)
    while done < count:
        workers, shards = next(worlds)
        per_training = workers * CLEAN_STEPS  # each worker is audited in every step
        trainings = range(min(CLEAN_PER_LAUNCH, -(-(count - done) // per_training)))
        kinds = zip(trainings, itertools.cycle(CLEAN_PROGRAMS), strict=False)
        cases = [Case(n, name, workers, 1, None, CLEAN_STEPS, shards) for n, name in kinds]
        outcomes = lockstep.launch(train_all, cases, folder / "audits", True, workers=workers)
        alarms += [one.error for one in outcomes if one.error]
        done += per_training * len(cases)
        shutil.rmtree(folder / "audits", ignore_errors=True)
        print(f"{done} audits, {len(alarms)} false alarms", flush=True)
    return done, alarms


# -- the cost of "auto" ------------------------------------------------------------------------------------------------


@dataclass
class Costs:
    """What audits cost in one training, in seconds of CPU time."""

    rounds: int = 0
    audits: int = 0  # steps with audits
    audits_s: float = 0.0  # how much longer these steps took than those around them
    others_s: float = 0.0  # of the schedule, in the other steps
    all_s: float = 0.0

    @property
    def share(self) -> float:
        return (self.audits_s + self.others_s) / self.all_s

    def __str__(self) -> str:
        audits = f"{self.audits} audited steps in {self.rounds} rounds: {self.audits_s / self.all_s:.2%} of the time"
        return f"{audits}; other steps: {self.others_s / self.all_s:.2%}; together {self.share:.2%}"


def measure_cost(model: str, steps: int) -> Costs:
    """Train with audit_every="auto". CPU time, since other programs do not change it much."""
    workload, begin, costs = WORKLOADS[model], ShardAudit.begin, Costs()
    took_s, audited, idle_s = list[float](), set[int](), list[float]()
    generator = torch.Generator().manual_seed(0)
    shares = [workload.batch(generator) for _ in range(2)]  # of two workers
    data = TensorDataset(torch.cat([one.inputs for one in shares]), torch.cat([one.targets for one in shares]))

    def begin_and_time(audit: ShardAudit, batch: Any, sum_: Any, recompute: Any) -> None:
        began_s = time.process_time()
        begin(audit, batch, sum_, recompute)
        if audit._tasks:
            audited.add(batch.number)
            costs.rounds += audit.is_round
        else:
            idle_s.append(time.process_time() - began_s)

    with mock.patch.object(ShardAudit, "begin", begin_and_time):
        with lockstep.Run(seed=7, audit_every="auto", progress=False, trace=False, device="cpu", backend="shm") as run:
            net = run.replicate(workload.build())
            batches = run.batches(data, global_batch_size=len(data), shards=SHARDS, epochs=None)
            optimizer = OPTIMIZERS[workload.optimizer](net)
            for batch in run.train(batches, optimizer, steps=steps):
                began_s = time.process_time()
                run.step(lambda net, rows: (loss_of(net(rows[0]), rows[1]) * len(rows[0]), len(rows[0])), batch)
                took_s.append(time.process_time() - began_s)
    costs.audits, costs.all_s, costs.others_s = len(audited), sum(took_s), sum(idle_s)
    for n in audited:
        around = [
            took_s[other]
            for other in range(n - STEPS_AROUND, n + STEPS_AROUND)
            if other not in audited and 0 <= other < steps
        ]
        costs.audits_s += took_s[n] - statistics.median(around)
    return costs


def run_cost(steps: int) -> list[str]:
    """Print what audits cost. Returns what costs more than is promised."""
    wrong = []
    for model, workers in (("small", 2), ("cnn", 2), ("gpt", 2), ("small", 3)):
        costs = lockstep.launch(measure_cost, model, steps, workers=workers)
        print(f'{model}, {workers} workers, audit_every="auto", {steps} steps: {costs}', flush=True)
        if costs.share > MAX_SHARE or not costs.rounds:
            wrong.append(
                f"{model}, {workers} workers: audits take {costs.share:.2%} of the time, {costs.rounds} rounds"
            )
    return wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of all")
    parser.add_argument("--faults", type=int, help="how many faults")
    parser.add_argument("--audits", type=int, help="how many audits without a fault")
    parser.add_argument("--cost-steps", type=int, help='steps of each training that shows the cost of "auto"')
    parser.add_argument("--within-s", type=float, default=math.inf, help="begin no more faults after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    faults = chosen.faults if chosen.faults is not None else 200 if chosen.quick else 5000
    audits = chosen.audits if chosen.audits is not None else 5000 if chosen.quick else 200_000
    cost_steps = chosen.cost_steps if chosen.cost_steps is not None else 200 if chosen.quick else 1000
    if min(faults, audits, cost_steps, chosen.within_s) < 0:
        parser.error("--faults, --audits, --cost-steps and --within-s must not be negative")
    with tempfile.TemporaryDirectory(prefix="corruption-") as folder:
        done, wrong = run_faults(chosen.seed, faults, Path(folder), chosen.within_s) if faults else (0, [])
        audits, alarms = run_audits(audits, Path(folder)) if audits else (0, [])
    too_much = run_cost(cost_steps) if cost_steps else []
    print(f"{done} faults, {len(wrong)} failed; {audits} audits without a fault, {len(alarms)} false alarms")
    for text in too_much:
        print(f"TOO MUCH: {text}")
    return 1 if wrong or alarms or too_much else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
