"""A model that torch.compile makes faster: compiled in place, so its state dict and its checkpoints have no prefix.

    python compiled.py                      one worker
    lockstep run -n 2 compiled.py           two, and the same digest
    python compiled.py 10                   only ten steps

In a Run the model is compiled once for each shape, so that the bits do not depend on which shapes a worker has met
before; `dynamic=True` compiles once for all. Without a C++ compiler the backend "aot_eager" takes the place of
"inductor". It learns the product of two numbers, and ends with a mean squared error below 0.01.
"""

import shutil
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else None
BACKEND = sys.argv[2] if len(sys.argv) > 2 else "inductor" if shutil.which("g++") else "aot_eager"


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.out = nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, factors):
        return self.out(self.norm(nn.functional.gelu(self.wide(factors))))


def make_products(count):
    factors = 2 * torch.rand(count, 2) - 1
    return TensorDataset(factors, factors.prod(1, keepdim=True))


def squared_error(model, batch):
    factors, product = batch
    return (model(factors) - product).square().sum(), len(product)


with lockstep.Run(seed=1, compile={"backend": BACKEND}) as run:
    run.on_main(lambda: print(f"torch.compile with the backend {BACKEND}"))
    train_set, test_set = make_products(2000), make_products(512)
    model = run.replicate(Product())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in run.train(run.batches(train_set, global_batch_size=60, shards=8, epochs=5), optimizer, steps=STEPS):
        run.step(squared_error, batch)
    error, digest = run.evaluate(squared_error, test_set), run.digest()
    run.on_main(lambda: print(f"squared error {error:.5f}  digest {digest}"))
