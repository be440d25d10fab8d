"""Two workers learn handwritten digits, and prove at the end that their replicas are identical.

lockstep demo                              two workers on this machine
lockstep run -n 4 -m lockstep.demo         another number of workers
python -m lockstep.demo                    one
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep

EPOCHS = 12
GLOBAL_BATCH = 64
TEST_SAMPLES = 360
SEED = 7


def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] with values in 0..1, labels [1797], in an order that is the same everywhere."""
    try:
        from sklearn.datasets import load_digits as load  # type: ignore[import-untyped]
    except ImportError:
        sys.exit("the demo trains on the digits that come with scikit-learn; install it: pip install scikit-learn")
    images, labels = load(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    return x[order], torch.from_numpy(labels).long()[order]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mean_over_workers(*values: float, device: torch.device) -> list[float]:
    sums = torch.tensor(values, device=device)
    dist.all_reduce(sums)
    return [float(value) for value in sums / dist.get_world_size()]


def digest(model: nn.Module) -> str:
    """One fingerprint of all weights and buffers: two replicas have the same exactly if no bit differs."""
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(name.encode())
        sha.update(value.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def main() -> int:
    world = lockstep.init()
    started_s = time.perf_counter()
    x, y = (tensor.to(world.device) for tensor in load_digits())
    train_x, train_y, test_x, test_y = x[:-TEST_SAMPLES], y[:-TEST_SAMPLES], x[-TEST_SAMPLES:], y[-TEST_SAMPLES:]
    torch.manual_seed(SEED)
    model = lockstep.DistributedDataParallel(make_model().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if world.rank == 0:
        print(f"{world.size} workers on {world.device.type} over {world.backend}: {len(train_y)} digits to learn from")

    for epoch in range(1, EPOCHS + 1):
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(SEED + epoch)).to(world.device)
        losses = []
        # Every global batch is cut into equal shares, so that the mean of the shares' gradients is the batch's.
        share = max(1, GLOBAL_BATCH // world.size)
        for batch in torch.split(order, share * world.size):
            mine = batch[world.rank :: world.size][: len(batch) // world.size]
            if not len(mine):
                continue  # fewer samples left than workers: so it is for all of them
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_x[mine]), train_y[mine])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            mine = torch.arange(world.rank, TEST_SAMPLES - TEST_SAMPLES % world.size, world.size, device=world.device)
            right = (model(test_x[mine]).argmax(1) == test_y[mine]).float().mean()
        loss_mean, accuracy = mean_over_workers(float(torch.stack(losses).mean()), float(right), device=world.device)
        if world.rank == 0:
            print(f"epoch {epoch:2}/{EPOCHS}   loss {loss_mean:.4f}   test accuracy {accuracy:.1%}")

    digests: list[str] = [""] * world.size
    dist.all_gather_object(digests, digest(model))
    identical = len(set(digests)) == 1
    if world.rank == 0:
        for rank, one in enumerate(digests):
            print(f"weights of rank {rank}: sha256 {one[:16]}…")
        print("identical, to the last bit" if identical else "NOT identical: please report this")
        print(f"{time.perf_counter() - started_s:.1f} s. Next: lockstep run -n 2 your_train.py  ·  lockstep bench step")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
