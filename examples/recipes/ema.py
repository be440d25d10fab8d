"""An exponential moving average of the weights: kept beside them, saved with them, evaluated, and exported.

    python ema.py                           one worker
    lockstep run -n 2 ema.py                two, and the same digest
    lockstep checkpoint export runs/ema ema.pt --what ema    the averaged weights, as a file

`run.register_state(ema=ema)` makes the average a part of every checkpoint, and resumes it. The labels are noisy and the
learning rate is high, so the weights jump about: the average is better, and ends above 90 %.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else None


def make_points(count, wrong):
    """Points in a square, and whether they are in a ring; a share of them labelled wrongly."""
    points = 2 * torch.rand(count, 2) - 1
    inside = (points.norm(dim=1) - 0.6).abs() < 0.2
    return TensorDataset(points, (inside ^ (torch.rand(count) < wrong)).long())


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels, reduction="sum"), len(labels)


def correct(model, batch):
    points, labels = batch
    return (model(points).argmax(1) == labels).sum(), len(labels)


with lockstep.Run("runs/ema", seed=1) as run:
    train_set, test_set = make_points(4096, wrong=0.2), make_points(1024, wrong=0.0)
    model = run.replicate(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    run.register_state(ema=ema)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in run.train(run.batches(train_set, global_batch_size=64, shards=8, epochs=5), optimizer, steps=STEPS):
        run.step(loss, batch)
        ema.update_parameters(model)
    plain, averaged, digest = run.evaluate(correct, test_set), run.evaluate(correct, test_set, model=ema), run.digest()
    run.on_main(lambda: print(f"accuracy {averaged:.2%} (of the last weights: {plain:.2%})  digest {digest}"))
