"""Small training programs, each a case that data parallelism gets wrong easily. Used to compare wrappers bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Sequential):
    def __init__(self, width: int = 64) -> None:
        super().__init__(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.out = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.a(x.view(-1, 1, 4, 4).repeat(1, 1, 2, 2))))
        return self.out(self.b(x).mean((2, 3)))


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 20
        return self.head(self.block(self.embed(tokens))).mean(1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 12, num_layers=2, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.view(-1, 4, 4))[0][:, -1])


class Branches(nn.Module):
    """Which branch is used depends on the worker and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        branch = self.left if (self.turn + int(x[0, 0] > 0)) % 2 else self.right
        return self.out(branch(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = Mlp(), nn.Linear(10, 10)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed((x.abs() * 30).long() % 50).mean(1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.out, self.reentrant = Mlp(), nn.Linear(10, 10), reentrant
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.inside, self.first(x), use_reentrant=self.reentrant))


class TwiceCheckpointed(nn.Module):
    """The same weights in two reentrant checkpoints: only a static graph can carry it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inside, self.first(x), use_reentrant=True)
        return self.out(checkpoint(self.inside, x, use_reentrant=True))


def one_forward(ddp: nn.Module, x: Tensor) -> Tensor:
    return ddp(x).square().mean()


def three_forwards(ddp: nn.Module, x: Tensor) -> Tensor:
    return (ddp(x) + ddp(x * 0.5)).square().mean() + ddp(-x).abs().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[nn.Module, Tensor], Tensor]]] = {
    "mlp": (Mlp, {}, one_forward),
    "mlp in many buckets": (Mlp, {"bucket_cap_mb": 0.002}, one_forward),
    "mlp, gradients are views": (Mlp, {"gradient_as_bucket_view": True}, one_forward),
    "mlp, copied in batches": (Mlp, {"batched_grad_copy": True, "bucket_cap_mb": 0.002}, one_forward),
    "cnn with batch norm": (Cnn, {}, one_forward),
    "channels last": (lambda: Cnn().to(memory_format=torch.channels_last), {"bucket_cap_mb": 0.0005}, one_forward),
    "transformer with tied weights": (TiedTransformer, {"bucket_cap_mb": 0.002}, one_forward),
    "lstm": (Lstm, {}, one_forward),
    "unused branches": (Branches, {"find_unused_parameters": True, "bucket_cap_mb": 0.001}, one_forward),
    "frozen part": (Frozen, {}, one_forward),
    "sparse embedding": (SparseEmbedding, {}, one_forward),
    "reentrant checkpoint": (lambda: Checkpointed(True), {}, one_forward),
    "other checkpoint": (lambda: Checkpointed(False), {}, one_forward),
    "static graph, twice used": (TwiceCheckpointed, {"static_graph": True}, one_forward),
    "three forwards, one backward": (Mlp, {"bucket_cap_mb": 0.002}, three_forwards),
    "double": (lambda: Mlp().double(), {}, one_forward),
}


def digest(tensors: dict[str, Tensor]) -> str:
    """Of names and bits."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        value = value.coalesce().to_dense() if value.is_sparse else value
        sha.update(name.encode() + value.contiguous().numpy().tobytes())
    return sha.hexdigest()


def train(wrapper: type, case: str, rank: int, *, steps: int, set_to_none: bool = True) -> list[str]:
    """Digests of gradients and of weights after every step."""
    build, options, loss = CASES[case]
    torch.manual_seed(1 + rank)  # the wrapper makes them equal
    ddp = wrapper(build(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(100 + rank)
    digests = []
    for _ in range(steps):
        x = torch.randn(6, 16, generator=data, dtype=next(ddp.parameters()).dtype)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(ddp, x).backward()
        digests.append(digest({n: p.grad for n, p in ddp.named_parameters() if p.grad is not None}))
        optimizer.step()
        digests.append(digest(dict(ddp.module.state_dict())))
    return digests
