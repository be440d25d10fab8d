"""The models that the benchmarks train: short, and with different ratios of computation to communication."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LabeledBatch:
    inputs: Tensor
    targets: Tensor  # class indices, one for each row of logits

    def to(self, device: torch.device) -> LabeledBatch:
        return LabeledBatch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Workload:
    """A model, data and an optimizer. `batch` draws a worker's share of a global batch; models return logits."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], LabeledBatch]
    optimizer: str  # a key of OPTIMIZERS
    about: str
    precision: str = "fp32"  # of the forward pass

    def shards(self, workers: int) -> int:
        """Eight shards of a global batch; fewer if it has fewer rows."""
        return min(8, workers * len(self.batch(torch.Generator().manual_seed(0)).inputs))


SGD = "SGD with momentum"
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    SGD: lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def digest_of(model: nn.Module) -> str:
    """SHA-256 of the bits of all parameters."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()


# ------------------------------------------------------------------------------------------------------------ models


def mlp(*, width: int, layers: int) -> nn.Module:
    hidden = [module for _ in range(layers - 1) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, width))


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.short = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.short(images))


def cnn(*, width: int, classes: int) -> nn.Module:
    """A small residual network with BatchNorm, so that there are buffers to synchronise, too."""
    return nn.Sequential(
        ResidualBlock(3, width, stride=1),
        *(ResidualBlock(factor * width, 2 * factor * width, stride=2) for factor in (1, 2, 4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


@dataclass(frozen=True)
class GptShape:
    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int


GPT2_124M = GptShape(layers=12, heads=12, width=768, vocabulary=50257, context=1024)
GPT_SMALL = GptShape(layers=4, heads=4, width=256, vocabulary=4096, context=128)


class GptBlock(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.after_attention = nn.Linear(shape.width, shape.width)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width], as is the result
        x = x + self.attend(self.before_attention(x))
        return x + cast(Tensor, self.mlp(self.before_mlp(x)))

    def attend(self, x: Tensor) -> Tensor:
        # [batch, length, 3 * width] -> three times [batch, heads, length, width / heads]
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.after_attention(mixed.transpose(1, 2).flatten(2)))


class GptModel(nn.Module):
    """GPT-2: learned positions, pre-norm layers, the output layer tied to the embedding."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(GptBlock(shape) for _ in range(shape.layers))
        self.last_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_init_weights)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.last_norm(x)))


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# --------------------------------------------------------------------------------------------------------- workloads


def draw_rows(generator: torch.Generator, *, rows: int, width: int) -> LabeledBatch:
    return LabeledBatch(
        torch.randn(rows, width, generator=generator), torch.randint(width, (rows,), generator=generator)
    )


def draw_images(generator: torch.Generator, *, images: int, side: int, classes: int) -> LabeledBatch:
    pixels = torch.randn(images, 3, side, side, generator=generator)
    return LabeledBatch(pixels, torch.randint(classes, (images,), generator=generator))


def draw_tokens(generator: torch.Generator, *, rows: int, length: int, vocabulary: int) -> LabeledBatch:
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    return LabeledBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gpt2(*, rows: int, length: int, about: str) -> Workload:
    return Workload(
        build=lambda: GptModel(GPT2_124M),
        batch=partial(draw_tokens, rows=rows, length=length, vocabulary=50257),
        optimizer="AdamW, fused",
        about=about,
        precision="bf16",
    )


WORKLOADS = {
    "small": Workload(
        build=partial(mlp, width=192, layers=4),
        batch=partial(draw_rows, rows=64, width=192),
        optimizer=SGD,
        about="4 square layers of 37 thousand parameters each, 64 rows: a step is a few milliseconds",
    ),
    "mlp": Workload(
        build=partial(mlp, width=2240, layers=5),
        batch=partial(draw_rows, rows=16, width=2240),
        optimizer=SGD,
        about="5 square layers, 16 rows: bound by communication",
    ),
    "cnn": Workload(
        build=partial(cnn, width=32, classes=100),
        batch=partial(draw_images, images=32, side=32, classes=100),
        optimizer=SGD,
        about="4 residual blocks with BatchNorm, 32 images of 32x32",
    ),
    "cnn-small": Workload(
        build=partial(cnn, width=16, classes=10),
        batch=partial(draw_images, images=32, side=20, classes=10),
        optimizer=SGD,
        about="the same blocks, half as wide, 32 images of 20x20: a step takes some tens of milliseconds",
    ),
    "gpt": Workload(
        build=partial(GptModel, GPT_SMALL),
        batch=partial(draw_tokens, rows=4, length=128, vocabulary=4096),
        optimizer="AdamW",
        about="4 layers, 256 wide, causal attention, tied embedding, 4x128 tokens",
    ),
    "gpt2": gpt2(rows=8, length=1024, about="GPT-2 with 124 million parameters, bf16, 8x1024 tokens: for a GPU"),
    "gpt2-short": gpt2(rows=8, length=256, about="the same with 8x256 tokens: bound by launching kernels"),
    "gpt2-16x1024": gpt2(rows=16, length=1024, about="the same with 16x1024 tokens"),
    "gpt2-32x1024": gpt2(rows=32, length=1024, about="the same with 32x1024 tokens: takes 50 GB of memory"),
    "tiny": Workload(
        build=partial(mlp, width=64, layers=3),
        batch=partial(draw_rows, rows=4, width=64),
        optimizer=SGD,
        about="3 square layers of 64: for trying the benchmark itself",
    ),
}
DEFAULT_MODELS = ("mlp", "cnn", "gpt")
