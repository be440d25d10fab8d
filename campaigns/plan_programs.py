"""The programs whose steps `campaigns/plan_accuracy.py` predicts and measures.

lockstep run -n 2 campaigns/plan_programs.py cnn
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

SAMPLES = 16384 if torch.cuda.is_available() else 4096


class Language(nn.Module):
    """A transformer encoder over short texts, with an output for each token."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions))  # [texts, length, vocabulary]


class Recurrent(nn.Module):
    def __init__(self, *, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(inputs, width, num_layers=2, batch_first=True), nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.rnn(rows)[0][:, -1])


def convolutional(*, width: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def perceptron(*, inputs: int, width: int, layers: int) -> nn.Module:
    sizes = [inputs, *[width] * layers]
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


@dataclass(frozen=True)
class TrainedModel:
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int
    global_batch_size: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def tokens(length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (SAMPLES, length))


MODELS = {
    "mlp": TrainedModel(
        lambda: perceptron(inputs=512, width=1024, layers=4), lambda: torch.randn(SAMPLES, 512), 10, 128, adamw
    ),
    "wide": TrainedModel(
        lambda: perceptron(inputs=1024, width=2048, layers=3), lambda: torch.randn(SAMPLES, 1024), 10, 64, sgd
    ),
    "cnn": TrainedModel(lambda: convolutional(width=32), lambda: torch.randn(SAMPLES, 3, 32, 32), 10, 128, sgd),
    "language": TrainedModel(
        lambda: Language(vocabulary=1024, width=128, layers=3, length=32), lambda: tokens(32, 1024), 0, 64, adamw
    ),
    "transformer": TrainedModel(  # for a GPU
        lambda: Language(vocabulary=8192, width=768, layers=8, length=256), lambda: tokens(256, 8192), 0, 32, adamw
    ),
    "convnet": TrainedModel(lambda: convolutional(width=192), lambda: torch.randn(2048, 3, 64, 64), 10, 256, sgd),
    "recurrent": TrainedModel(
        lambda: Recurrent(inputs=32, width=256, classes=10), lambda: torch.randn(SAMPLES, 16, 32), 10, 128, adamw
    ),
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()


def main(name: str, memory_mib: float | None) -> None:
    chosen = MODELS[name]
    if memory_mib is not None:
        device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_mib * 2**20 / total, device)
    torch.manual_seed(0)
    inputs = chosen.inputs()
    targets = inputs.roll(-1, dims=1) if chosen.classes == 0 else torch.randint(chosen.classes, (len(inputs),))
    with lockstep.Run(seed=7) as run:
        model = run.replicate(chosen.build())
        batches = run.batches(TensorDataset(inputs, targets), global_batch_size=chosen.global_batch_size, epochs=1)
        for batch in run.train(batches, chosen.optimizer(model)):
            run.step(loss, batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--memory-mib", type=float, help="of a GPU that each worker may use")
    arguments = parser.parse_args()
    main(arguments.name, arguments.memory_mib)
