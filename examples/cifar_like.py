"""A small ResNet with batch norm learns images of ten kinds, which are made at the start, to about 97 %.

python examples/cifar_like.py                                            one worker
lockstep run -n 2 examples/cifar_like.py --num-workers 1 --optimizer lars    two, each with a process that loads ahead
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, BATCH, SIZE, WIDTH, BLOCKS = 5, 64, 16, 32, 4
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "lars": lambda weights: lockstep.LARS(weights, lr=1.0, trust=0.01, weight_decay=5e-4),
    "lamb": lambda weights: lockstep.LAMB(weights, lr=0.02),
}


def make_images(count: int) -> tuple[Tensor, Tensor]:
    """[count, 3, SIZE, SIZE] and their kinds [count]: straight or round waves of five lengths, in noise."""
    kinds, line = torch.arange(count).view(-1, 1, 1) % 10, torch.linspace(-1, 1, SIZE)
    angle, left, top = torch.rand(3, count, 1, 1) - 0.5
    x, y = line - left / 2, line.view(-1, 1) - top / 2
    way = torch.where(kinds < 5, x * (6 * angle).cos() + y * (6 * angle).sin(), x.hypot(y))
    waves = torch.randn(count, 3, 1, 1) * (way * (4 + 3 * (kinds % 5))).cos().unsqueeze(1)
    return waves + 0.3 * torch.randn_like(waves), kinds.flatten()


class Augmented(TensorDataset):
    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, kind = super().__getitem__(number)
        top, left = torch.randint(5, (2,)).tolist()  # draws that belong to the sample, whichever worker loads it
        image = nn.functional.pad(image, [2, 2, 2, 2])[:, top : top + SIZE, left : left + SIZE]
        return image.flip(2) if torch.rand(()) < 0.5 else image, kind


class Residual(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, kinds = batch
    return nn.functional.cross_entropy(model(images), kinds, reduction="sum"), len(kinds)


def correct(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, kinds = batch
    return (model(images).argmax(1) == kinds).sum(), len(kinds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of each worker that load (default: none)")
    parser.add_argument("--steps", type=int, help=f"end after so many (default: {EPOCHS} epochs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="for checkpoints, from which the next run goes on (default: none)")
    args = parser.parse_args()

    with lockstep.Run(args.directory, seed=args.seed) as run:
        train_set, test_set = Augmented(*make_images(8192)), TensorDataset(*make_images(1024))
        stem, blocks = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), [Residual() for _ in range(BLOCKS)]
        model = run.replicate(nn.Sequential(stem, *blocks, nn.AvgPool2d(SIZE // 2), nn.Flatten(), nn.Linear(WIDTH, 10)))
        optimizer = OPTIMIZERS[args.optimizer](model.parameters())
        batches = run.batches(train_set, global_batch_size=BATCH, shards=8, epochs=EPOCHS, num_workers=args.num_workers)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=batches.steps_in_all)
        for batch in run.train(batches, optimizer, scheduler=schedule, steps=args.steps):
            run.step(loss, batch)
        accuracy, digest = run.evaluate(correct, test_set), run.digest()
        run.on_main(lambda: print(f"accuracy {accuracy:.2%}  digest {digest}"))
