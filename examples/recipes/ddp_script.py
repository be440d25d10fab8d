"""A training script for torch's DistributedDataParallel, moved over by one import; its loop stays its own.

    python ddp_script.py                    one worker
    lockstep run -n 2 ddp_script.py         two; torchrun --nproc-per-node 2 does as well
    python ddp_script.py 1                  only one epoch

Same arguments, same state dict, same bits as torch's class. As there, each worker has batches of BATCH // workers, the
loss is a mean, and another number of workers rounds differently: that is what `lockstep.Run` is for. It learns the
distance of two points from their coordinates, and ends with a mean squared error below 0.02.
"""

import hashlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep
from lockstep import DistributedDataParallel as DDP  # was: from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else 6, 64

world = lockstep.init()  # was: init_process_group, RANK, WORLD_SIZE, LOCAL_RANK and set_device
torch.manual_seed(1)
points = torch.rand(2560, 4)
distances = (points[:, :2] - points[:, 2:]).norm(dim=1, keepdim=True)
train_set, test_set = TensorDataset(points[:2048], distances[:2048]), (points[2048:], distances[2048:])

model = DDP(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(world.device))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
sampler = DistributedSampler(train_set, world.size, world.rank)
loader = DataLoader(train_set, batch_size=BATCH // world.size, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x.to(world.device)), y.to(world.device)).backward()  # averages the gradients of all workers
        optimizer.step()

with torch.no_grad():
    error = F.mse_loss(model.module(test_set[0].to(world.device)).cpu(), test_set[1]).item()
digest = hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in model.state_dict().values())).hexdigest()
print(f"squared error {error:.5f}  digest {digest}")  # by every worker: their weights are equal
