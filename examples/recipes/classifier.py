"""A small convolutional network with batch norm learns to tell four patterns apart, under noise and random shifts.

    python classifier.py                    one worker
    lockstep run -n 2 classifier.py         two, and the same digest
    python classifier.py 10                 only ten steps

The augmentation is in `__getitem__`: its random numbers belong to the sample, whichever worker loads it. The loss
function returns the accuracy as a metric. On images that it has not seen it ends above 95 %.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else None


def make_images(count):
    """[count, 1, 8, 8] and their kinds [count]: rows, columns, two diagonals; in noise."""
    kinds, line = torch.arange(count) % 4, torch.arange(8)
    x, y = line.view(1, 8), line.view(8, 1)
    patterns = torch.stack([(way % 4 < 2).float() for way in (x + 0 * y, y + 0 * x, x + y, x - y)])
    return patterns[kinds].unsqueeze(1) + 0.5 * torch.randn(count, 1, 8, 8), kinds


class Shifted(TensorDataset):
    def __getitem__(self, index):
        image, kind = super().__getitem__(index)
        return image.roll(torch.randint(8, (2,)).tolist(), (1, 2)), kind


def loss(model, batch):
    images, kinds = batch
    guess = model(images)
    accuracy = (guess.argmax(1) == kinds).sum(), len(kinds)
    return F.cross_entropy(guess, kinds, reduction="sum"), len(kinds), {"accuracy": accuracy}


with lockstep.Run(seed=1) as run:
    train_set, test_set = Shifted(*make_images(2048)), Shifted(*make_images(512))
    features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4))
    model = run.replicate(nn.Sequential(features, nn.Flatten(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in run.train(run.batches(train_set, global_batch_size=64, shards=8, epochs=4), optimizer, steps=STEPS):
        result = run.step(loss, batch)
        if batch.ends_epoch:
            run.log(train_accuracy=result.metrics["accuracy"])
    found, digest = run.evaluate(loss, test_set), run.digest()
    run.on_main(lambda: print(f"accuracy {found['accuracy']:.2%}  digest {digest}"))
