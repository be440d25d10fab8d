"""Handwritten digits: a small convolutional network learns 8x8 images to about 99 %, in a few seconds.

    python examples/digits.py                        one worker
    lockstep run -n 3 examples/digits.py             three, and the same digest
    python examples/digits.py --batch 256            eight times the batch, and as good

The learning rate was found for --base-batch and follows --batch from there. Needs scikit-learn, which has the images.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, WARMUP_EPOCHS, TEST_SAMPLES = 12, 2, 360


class Net(nn.Sequential):
    def __init__(self, width: int = 24) -> None:
        super().__init__(
            *[nn.Conv2d(1, width, 3, padding=1), nn.ReLU()],
            *[nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Flatten(), nn.Linear(2 * width * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10)],
        )


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to learn from and 360 to test with, the same ones whatever the seed."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float()[order].view(-1, 1, 8, 8)
    data = TensorDataset((images - 5) / 6, torch.from_numpy(labels)[order])  # pixels are 0 to 16, 5 in the mean
    return TensorDataset(*data[:-TEST_SAMPLES]), TensorDataset(*data[-TEST_SAMPLES:])


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def correct(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, labels = batch
    return (model(images).argmax(1) == labels).sum(), len(labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, over all workers (default: 32)")
    parser.add_argument("--base-batch", type=int, default=32, help="what the learning rate is for (default: 32)")
    parser.add_argument("--steps", type=int, help=f"end after so many (default: {EPOCHS} epochs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="for checkpoints, from which the next run goes on (default: none)")
    args = parser.parse_args()

    train_set, test_set = load()
    with lockstep.Run(args.directory, seed=args.seed) as run:
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        batches = run.batches(train_set, global_batch_size=args.batch, shards=8, epochs=EPOCHS)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=batches.steps_in_all)
        warmup_steps = WARMUP_EPOCHS * batches.steps_in_all // EPOCHS
        scaling = lockstep.LRScaling(base_batch=args.base_batch, rule="linear", warmup_steps=warmup_steps)
        for batch in run.train(batches, optimizer, scheduler=schedule, scaling=scaling, steps=args.steps):
            run.step(loss, batch)
        accuracy, digest = run.evaluate(correct, test_set), run.digest()
        run.on_main(lambda: print(f"accuracy {accuracy:.2%}  digest {digest}"))
