"""Programs for `lockstep.Run`, each a case in which the number of workers could show. Used by several tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep

WIDTH, CLASSES = 16, 10


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.out = nn.Conv2d(8, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.a(x.view(-1, 1, 4, 4))))
        return self.out(self.b(x).mean((2, 3)))


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(2)
        )
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 4, 4))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.out(x.mean((2, 3)))


class Gpt(nn.Module):
    """Tokens made from the samples; with dropout, and its first and last weights tied."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 20
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device).to(self.embed.weight.dtype)
        return self.head(self.block(self.embed(tokens), src_mask=mask))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 12, num_layers=2, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.view(-1, 4, 4))[0][:, -1])


class Bags(nn.Module):
    """Sparse gradients of an embedding bag, and dense ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bag((x.abs() * 30).long() % 50))


class Branches(nn.Module):
    """Which weights a shard uses depends on its samples, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.left if x[0, 0] > 0 else self.right)(x))[:, :CLASSES]


class TwiceCheckpointed(nn.Module):
    """The same weights in two reentrant checkpoints: their gradient arrives twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inside, self.first(x), use_reentrant=True)
        return self.out(checkpoint(self.inside, x, use_reentrant=True))


class Counting(nn.Module):
    """A buffer of the user's own, which every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean() + torch.tensor([0.0, 1.0], device=x.device)
        return self.lin(x) + self.seen[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def classify(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y, reduction="sum"), len(y)


def predict_tokens(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Samples weigh as much as they have tokens, and those differ."""
    x, y = batch
    tokens, length = (x.abs() * 10).long() % 20, y + 3
    wanted = torch.arange(1, x.shape[1], device=x.device) < length[:, None]
    logits = model(x)[:, :-1].transpose(1, 2)
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    each = F.cross_entropy(logits, tokens[:, 1:], reduction="none")
    return (each * wanted).sum(), wanted.sum()


@dataclass(frozen=True)
class Program:
    build: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[Any, Any], Any] = classify
    samples: int = 100  # with a batch of 32 the last one has 4, fewer than shards
    shards: int = 8
    options: dict[str, Any] = field(default_factory=dict)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


PROGRAMS = {
    "mlp, momentum, uneven last batch": Program(mlp, sgd),
    "cnn with batch norm": Program(Cnn, sgd, samples=96),
    "resnet, LARS": Program(Resnet, lambda p: lockstep.LARS(p, lr=0.5, momentum=0.9, weight_decay=1e-4), samples=96),
    "gpt with dropout and tied weights, AdamW": Program(Gpt, adamw, predict_tokens),
    "lstm": Program(Lstm, adamw),
    "embedding bag, sparse": Program(Bags, lambda p: torch.optim.SGD(p, lr=0.1)),
    "bf16": Program(Gpt, adamw, predict_tokens, options={"precision": "bf16"}),
    "fp16 with loss scale": Program(mlp, adamw, options={"precision": "fp16"}),
    "gradients travel as bf16": Program(mlp, sgd, options={"grad_comm_dtype": "bf16"}),
    "clipped": Program(mlp, adamw, options={"max_grad_norm": 0.1}),
    "accumulation": Program(mlp, sgd, shards=16),
    "12 shards": Program(mlp, sgd, shards=12),
    "unused branches": Program(Branches, adamw),
    "arrives twice": Program(TwiceCheckpointed, sgd),
    "buffer of its own": Program(Counting, sgd),
    "double": Program(lambda: mlp().double(), lambda p: lockstep.LAMB(p, lr=0.01)),
}


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def train(
    program: Program, *, steps: int | None = None, directory: Path | None = None, epochs: int = 2, **options: Any
) -> tuple[str, float]:
    """Two epochs, or up to `steps`. The digest of everything that was learned, and the loss of the last step."""
    chosen = {"progress": False, "device": "cpu", **program.options, **options}
    with lockstep.Run(directory, seed=7, **chosen) as run:
        model = run.replicate(program.build())
        optimizer = program.optimizer(model.parameters())
        batches = run.batches(data(program.samples), global_batch_size=32, shards=program.shards, epochs=epochs)
        loss = float("nan")
        for batch in run.train(batches, optimizer):
            if batch.number + 1 == steps:
                run.stop()
            loss = run.step(program.loss, batch).loss
        return run.digest(), loss


def use(backend: str, store: str, rank: int, size: int) -> None:
    """The workers have a group on Gloo; from now on they communicate through `backend`. Two of them are a host."""
    os.environ["LOCKSTEP_HOST"] = f"host {rank // 2}"
    if backend != "gloo":
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
