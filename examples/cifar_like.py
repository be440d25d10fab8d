"""A small ResNet with batch norm learns ten kinds of waves, straight or round, whose images are made at the start.

    python examples/cifar_like.py                                  one worker
    lockstep run -n 2 examples/cifar_like.py --loaders 1           two, each with a process that loads ahead
    lockstep run -n 2 examples/cifar_like.py --optimizer lars      a step length for every layer
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, BATCH, SIZE, MARGIN = 8, 64, 16, 2
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "lars": lambda weights: lockstep.LARS(weights, lr=10.0, weight_decay=5e-4),
    "lamb": lambda weights: lockstep.LAMB(weights, lr=0.02),
}


def make_images(count: int) -> tuple[Tensor, Tensor]:
    """[count, 3, SIZE + 2 MARGIN, SIZE + 2 MARGIN] and their kinds [count]: a wavelength of five, and the form."""
    kinds, line = torch.arange(count) % 10, torch.linspace(-1, 1, SIZE + 2 * MARGIN)
    (x, y), angle = torch.rand(2, count, 1, 1) - 0.5, torch.rand(count, 1, 1) * torch.pi
    x, y = line - x, line.view(-1, 1) - y
    way = torch.where(kinds.view(-1, 1, 1) < 5, x * angle.cos() + y * angle.sin(), x.hypot(y))
    waves = (way * torch.pi * (1.5 + kinds % 5).view(-1, 1, 1)).cos().unsqueeze(1)
    return torch.randn(count, 3, 1, 1) * waves + torch.randn(count, 3, *waves.shape[2:]), kinds


class Augmented(TensorDataset):
    """Cut out somewhere and turned over now and then. The draws belong to the sample, whoever loads it."""

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, kind = super().__getitem__(number)
        top, left = torch.randint(2 * MARGIN + 1, (2,)).tolist()
        image = image[:, top : top + SIZE, left : left + SIZE]
        return image.flip(2) if torch.rand(()) < 0.5 else image, kind


class Residual(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def make_model() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for width in (16, 32):
        layers += [Residual(width), Residual(width), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)]
    return nn.Sequential(*layers, Residual(64), nn.ReLU(), nn.AvgPool2d(SIZE // 4), nn.Flatten(), nn.Linear(64, 10))


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, kinds = batch
    return F.cross_entropy(model(images), kinds, reduction="sum"), len(kinds)


def correct(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, kinds = batch
    return (model(images).argmax(1) == kinds).sum(), len(kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--loaders", type=int, default=0, help="processes of each worker that load (default: none)")
    parser.add_argument("--steps", type=int, help=f"stop after so many (default: {EPOCHS} epochs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="for checkpoints, from which the next run goes on (default: none)")
    args = parser.parse_args()

    with lockstep.Run(args.directory, seed=args.seed) as run:
        train_set, (images, kinds) = Augmented(*make_images(2048)), make_images(512)
        test_set = TensorDataset(images[:, :, MARGIN:-MARGIN, MARGIN:-MARGIN], kinds)
        model = run.replicate(make_model())
        optimizer = OPTIMIZERS[args.optimizer](model.parameters())
        batches = run.batches(train_set, global_batch=BATCH, epochs=EPOCHS, loaders=args.loaders)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=batches.steps_in_all)
        for batch in run.track(batches, optimizer, schedule=schedule):
            if batch.number + 1 == args.steps:
                run.stop()
            run.step(loss, batch)
        accuracy, digest = run.evaluate(correct, test_set), run.digest()
        run.once(lambda: print(f"accuracy {accuracy:.2%}  digest {digest}"))


if __name__ == "__main__":
    main()
