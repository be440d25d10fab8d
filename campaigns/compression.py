"""Does a model learn as well with compressed gradients?

    python campaigns/compression.py             three models, five seeds: about ten minutes on two cores
    python campaigns/compression.py --quick     two seeds, fewer steps: about two

A CNN on noisy waves, a GPT on text from a random grammar, and an MLP on the labels of another network, some of them
wrong, are trained by `Run` with each value of `grad_comm`, and with the same seeds; what is compared is the loss on
other data at the end. It holds if the mean over the seeds with compression lies between the smallest and the largest
loss of the seeds without it. One worker trains each model: on several the bits would be the same.

A run compares losses itself before it uses powersgd or topk (docs/compression.md). The last column tells in how many of
the trainings compression was still used at the end. "topk 0.1 %" is a bad choice, which this comparison has to find;
"topk 0.1 %, not compared" shows what it would have cost, and nothing has to hold for it.

Exit status: 0 when all of it holds; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.step.run_options import GradComm

KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"grad_comm": kind} for kind in ("fp32", "int8", "int4", "powersgd", "topk")},
    "topk 0.1 %": {"grad_comm": "topk", "topk_ratio": 0.001},
    (FORCED := "topk 0.1 %, not compared"): {"grad_comm": "topk", "topk_ratio": 0.001, "compare_loss": False},
}
SHARDS, BATCH, CLASSES = 8, 64, 10
SYMBOLS, LENGTH = 24, 32


class Gpt(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(LENGTH, width)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.last = nn.ModuleList([layer(), layer()]), nn.Linear(width, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        out: Tensor = self.last(hidden)
        return out


def cnn() -> nn.Module:
    sizes = [(1, 16), (16, 32), (32, 32)]
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def waves(count: int, dice: torch.Generator) -> TensorDataset:
    """Images of waves with a frequency and direction for each class, at a random phase, under noise."""
    labels = torch.randint(CLASSES, (count,), generator=dice)
    x, y = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    angles, speeds = torch.arange(CLASSES) * 0.6, 0.5 + 0.12 * torch.arange(CLASSES)
    along = x[None] * angles.cos()[:, None, None] + y[None] * angles.sin()[:, None, None]
    phases = 6.3 * torch.rand(count, 1, 1, generator=dice)
    images = (along[labels] * speeds[labels][:, None, None] + phases).sin()
    return TensorDataset((images + 1.2 * torch.randn(count, 12, 12, generator=dice))[:, None], labels)


def grammar(count: int, dice: torch.Generator) -> TensorDataset:
    """Text in which each symbol depends on the two before it. The rules are the same for all data."""
    rules = (2.5 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(5))).softmax(dim=-1)
    text = [torch.randint(SYMBOLS, (count,), generator=dice) for _ in range(2)]
    while len(text) <= LENGTH:
        text.append(torch.multinomial(rules[text[-2], text[-1]], 1, generator=dice).flatten())
    whole = torch.stack(text, dim=1)
    return TensorDataset(whole[:, :-1], whole[:, 1:])


def teacher(count: int, dice: torch.Generator) -> TensorDataset:
    """Labels of a random network; one in ten is replaced by a random one."""
    rules = torch.Generator().manual_seed(6)
    first, second = torch.randn(32, 48, generator=rules), torch.randn(48, CLASSES, generator=rules)
    x = torch.randn(count, 32, generator=dice)
    labels = ((x @ first / 5).tanh() @ second).argmax(dim=1)
    wrong = torch.rand(count, generator=dice) < 0.1
    return TensorDataset(x, torch.where(wrong, torch.randint(CLASSES, (count,), generator=dice), labels))


@dataclass(frozen=True)
class Task:
    build: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], TensorDataset]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int


TASKS = {
    "CNN": Task(cnn, waves, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 200),
    "GPT": Task(Gpt, grammar, lambda p: torch.optim.AdamW(p, lr=2e-3), 300),
    "MLP": Task(mlp, teacher, lambda p: torch.optim.AdamW(p, lr=1e-3), 400),
}


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()


def train(name: str, kind: str, seed: int, steps: int) -> tuple[float, bool]:
    """Return the loss on other data after training, and whether gradients were compressed at its end."""
    task = TASKS[name]
    dice = torch.Generator().manual_seed(1000 + seed)
    data, other = task.data(BATCH * 100, dice), task.data(2000, torch.Generator().manual_seed(9))
    with lockstep.Run(seed=seed, progress=False, trace=False, **KINDS[kind]) as run:
        model = run.replicate(task.build())
        batches = run.batches(data, global_batch_size=BATCH, shards=SHARDS, epochs=1 + steps // 100)
        optimizer = task.optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for batch in run.train(batches, optimizer, scheduler=schedule, steps=steps):
            run.step(loss, batch)
        plan = run._loop.plan
        assert plan is not None
        return float(run.evaluate(loss, other, batch_size=500)), plan.tuner.current is not GradComm.FP32


def work(job: tuple[str, str, int, int]) -> tuple[tuple[str, str, int, int], tuple[float, bool]]:
    torch.set_num_threads(1)
    return job, train(*job)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, a quarter of the steps")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="trainings at a time (default: 2)")
    given = parser.parse_args(argv)
    if given.processes < 1:
        parser.error(f"--processes {given.processes}: at least 1")
    seeds, part = (2, 4) if given.quick else (5, 1)
    jobs = [(name, kind, seed, TASKS[name].steps // part) for name in TASKS for kind in KINDS for seed in range(seeds)]
    began_s, found, compressed = time.monotonic(), dict[tuple[str, str], list[float]](), Counter[tuple[str, str]]()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for n, ((name, kind, seed, _), (value, is_compressed)) in enumerate(pool.imap(work, jobs), 1):
            found.setdefault((name, kind), []).append(value)
            compressed[name, kind] += is_compressed
            print(f"{n} of {len(jobs)}: {name}, {kind}, seed {seed}: {value:.4f}", flush=True)
    print(f"\n{'model':<8}{'grad_comm':<26}{'mean loss':>10}{'smallest':>10}{'largest':>10}  holds  compressed")
    failed = 0
    for (name, kind), values in found.items():
        low, high = min(found[name, "fp32"]), max(found[name, "fp32"])
        mean = statistics.mean(values)
        is_inside = low <= mean <= high
        failed += not is_inside and kind != FORCED
        holds, count = "yes" if is_inside else "NO", f"{compressed[name, kind]} of {seeds}"
        print(f"{name:<8}{kind:<26}{mean:>10.4f}{min(values):>10.4f}{max(values):>10.4f}  {holds:<5}  {count}")
    print(f"{len(jobs)} trainings, {failed} do not hold, {time.monotonic() - began_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
