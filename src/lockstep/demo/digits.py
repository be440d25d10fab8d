"""Trains a small convolutional network on the handwritten digits of scikit-learn."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.demo.show import STEP_TIMES

# Two steps in an epoch. A shard is 90 images, which take a core about 60 ms. The fixed cost of a step on every worker
# (the update of 171,000 parameters, the exchange, Python itself) is about 8 ms: two workers are nearly twice as fast.
EPOCHS, BATCH, SHARDS, TEST_SAMPLES, SEED = 30, 720, 8, 360, 7
EVALUATE_EVERY = 5  # epochs
SAVE_EVERY = 50  # steps


def load() -> tuple[TensorDataset, TensorDataset]:
    """Returns 1,437 images for training and 360 for testing."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        sys.exit("the demo trains on the digits that come with scikit-learn; install it: pip install scikit-learn")
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    images = torch.from_numpy(pixels).float()[order].view(-1, 1, 8, 8)
    data = TensorDataset((images - 5) / 6, torch.from_numpy(labels)[order])  # pixels are 0 to 16, 5 in the mean
    return TensorDataset(*data[:-TEST_SAMPLES]), TensorDataset(*data[-TEST_SAMPLES:])


def make_model() -> nn.Module:
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()],
        *[nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()],
        *[nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Flatten(), nn.Linear(96 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10)],
    )


def loss(model: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def correct(model: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, labels = batch
    return (model(images).argmax(1) == labels).sum(), len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="for checkpoints and the trace (default: none)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default: {EPOCHS}")
    args = parser.parse_args()
    directory = args.directory
    train_set, test_set = load()
    with lockstep.Run(directory, seed=SEED, save_every=SAVE_EVERY) as run:
        model = run.replicate(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        batches = run.batches(train_set, global_batch_size=BATCH, shards=SHARDS, epochs=args.epochs)
        for batch in run.train(batches, optimizer):
            run.step(loss, batch)
            if directory is not None and run.world.rank == 0:
                with (directory / STEP_TIMES).open("a") as file:
                    file.write(f"{time.monotonic()} {batch.count}\n")
            if batch.ends_epoch and (batch.epoch + 1) % EVALUATE_EVERY == 0:
                run.log(accuracy=run.evaluate(correct, test_set, batch_size=45))
        accuracy = float(run.evaluate(correct, test_set, batch_size=45))  # type: ignore[arg-type]
        result = {"accuracy": accuracy, "digest": run.digest(), "noise_scale": run.noise_scale}
        run.on_main(lambda: report(directory, f"accuracy {accuracy:.2%}  digest {result['digest']}", result))


def report(directory: Path | None, line: str, result: dict[str, Any]) -> None:
    print(line)
    if directory is not None:
        (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
