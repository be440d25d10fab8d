"""Does `lockstep plan --branch` predict the steps to a loss at four times the batch? Two models, several seeds.

    python campaigns/plan_branches.py             about five minutes on one core
    python campaigns/plan_branches.py --seeds 1   about two minutes
    python campaigns/plan_branches.py --json branches.json

For each model and seed: a short training run makes the first checkpoint; branches at half, once and twice the batch
predict the steps to three losses at four times the batch, with the learning rate of the model's rule; then a run with
four times the batch is measured, over twice as many samples as a branch has.
Exit status: 0 when every prediction is within 15 % of what is measured; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.plan.batch_size import (
    BranchPlan,
    LearningRateRule,
    fit_curve,
    forecast,
    run_branch,
    run_branches,
    steps_to,
)

MOST_ERROR = 0.15
SHARES = (0.4, 0.6, 0.8)  # of the slowest branch, after which it has the loss that is aimed at
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Data:
    inputs: Tensor
    targets: Tensor


def teacher_labels(seed: int, *, samples: int = 65536, inputs: int = 32, classes: int = 10) -> Data:
    """Random vectors with the classes that a random network gives them; one in twenty labels is random."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(samples, inputs, generator=random)
    hidden = torch.relu(rows @ torch.randn(inputs, 64, generator=random))
    labels = (hidden @ torch.randn(64, classes, generator=random)).argmax(1)
    is_random = torch.rand(samples, generator=random) < 0.05
    return Data(rows, torch.where(is_random, torch.randint(classes, (samples,), generator=random), labels))


def markov_texts(seed: int, *, samples: int = 32768, length: int = 16, vocabulary: int = 24) -> Data:
    """Texts in which each token depends on the two before it; the target of a token is the next one."""
    random = torch.Generator().manual_seed(seed)
    # Few tokens are likely after a given one.
    scores = torch.randn(2, vocabulary, vocabulary, generator=random).mul(2.5).softmax(-1)
    tokens = torch.randint(vocabulary, (samples, length + 1), generator=random)
    for place in range(2, length + 1):
        chances = (scores[0, tokens[:, place - 1]] + scores[1, tokens[:, place - 2]]) / 2
        tokens[:, place] = torch.multinomial(chances, 1, generator=random)[:, 0]
    return Data(tokens[:, :-1], tokens[:, 1:])


class Recurrent(nn.Module):
    def __init__(self, *, vocabulary: int = 24, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(tokens))[0])  # [texts, length, vocabulary]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


@dataclass(frozen=True)
class Case:
    """A model with its data, and the branches: `first_steps` make the checkpoint, `steps` are those of one batch."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Data]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rule: LearningRateRule
    global_batch_size: int
    first_steps: int
    steps: int


CASES = {
    "mlp": Case(
        perceptron,
        teacher_labels,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        LearningRateRule.LINEAR,
        global_batch_size=128,
        first_steps=40,
        steps=300,
    ),
    "language": Case(
        Recurrent,
        markov_texts,
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        LearningRateRule.SQRT,
        global_batch_size=32,
        first_steps=60,
        steps=300,
    ),
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()


def train(name: str, seed: int, directory: Path, steps: int | None) -> None:
    """The program that is planned for."""
    case = CASES[name]
    data = case.data(seed)
    with lockstep.Run(directory, seed=seed, progress=False) as run:
        model = run.replicate(case.build())
        batches = run.batches(TensorDataset(data.inputs, data.targets), global_batch_size=case.global_batch_size)
        for batch in run.train(batches, case.optimizer(model), steps=steps):
            run.step(loss, batch)


@dataclass(frozen=True)
class Row:
    model: str
    seed: int
    target_loss: float
    critical_batch_size: float | None
    global_batch_size: int  # four times that of the program
    predicted_steps: float
    low: float
    high: float
    measured_steps: float

    @property
    def error(self) -> float:
        return self.predicted_steps / self.measured_steps - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= MOST_ERROR

    def __str__(self) -> str:
        inside = "inside" if self.low <= self.measured_steps <= self.high else "outside"
        return (
            f"{self.model:9} {self.seed:4} {self.target_loss:7.3f} {self.global_batch_size:6} "
            f"{self.predicted_steps:9.1f} {f'{self.low:.1f} to {self.high:.1f}':>15} {self.measured_steps:9.1f} "
            f"{100 * self.error:+6.1f} % {inside}"
        )


HEADER = "model     seed    loss  batch predicted        interval  measured    error"


def compare(name: str, seed: int, folder: Path) -> list[Row]:
    """Predict the steps at four times the batch from branches, to several losses, then measure them."""
    case = CASES[name]
    start, batch = folder / "start", case.global_batch_size
    program = [str(Path(__file__).resolve()), "--train", name, "--seed", str(seed), "--directory", str(start)]
    subprocess.run([sys.executable, *program, "--steps", str(case.first_steps)], check=True, timeout=DEADLINE_S)
    plan = BranchPlan(
        start=start, batches=(batch // 2, batch, 2 * batch), base_batch_size=batch, steps=case.steps, rule=case.rule
    )
    branches = run_branches(plan, program, folder=folder / "branches", timeout_s=DEADLINE_S)
    how = plan.run_at(4 * batch)
    large = run_branch(replace(how, steps=2 * how.steps), program, folder / "large", DEADLINE_S)
    rows = []
    for share in SHARES:
        target = max(curve.at(share * curve.steps) for curve in map(fit_curve, branches))
        found = forecast(branches, base_batch_size=batch, target_loss=target)
        predicted, measured = found.predict(4 * batch), steps_to(large, target)
        figures = (predicted.steps, predicted.low, predicted.high, measured.steps)
        rows.append(Row(name, seed, target, found.critical_batch_size, 4 * batch, *figures))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--train", choices=CASES, help=argparse.SUPPRESS)  # the program itself
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.train:
        train(chosen.train, chosen.seed, chosen.directory, chosen.steps)
        return 0
    print(HEADER, flush=True)
    rows = []
    for name in CASES:
        for seed in range(chosen.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found = compare(name, seed, Path(folder))
            print(*found, sep="\n", flush=True)
            rows += found
    errors = sorted(abs(row.error) for row in rows)
    print(f"largest error {100 * errors[-1]:.1f} %, median {100 * errors[len(errors) // 2]:.1f} %")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) | {"error": row.error} for row in rows], indent=1))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
