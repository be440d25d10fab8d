"""Sparse tensors: the sum of what everybody has, gathered."""

from __future__ import annotations

import torch

from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import DeviceCollectives
from lockstep.comm.shm.reduce_ops import RedOpType, Reduction


def all_reduce(on: Collectives | DeviceCollectives, tensor: torch.Tensor, how: Reduction) -> None:
    """`tensor` (COO) becomes the sum of everybody's."""
    if how.kind != RedOpType.SUM:
        raise RuntimeError(f"a sparse tensor can be summed, not reduced by {how.kind.name}")
    size = on.team.size
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size)]
    _gather(on, torch.tensor([values.shape[0]], device=tensor.device), counts)
    on.settle()
    all_indices = [indices.new_empty(indices.shape[0], int(count)) for count in counts]
    all_values = [values.new_empty(int(count), *values.shape[1:]) for count in counts]
    _gather(on, indices, all_indices)
    _gather(on, values, all_values)
    on.settle()
    # In rank order, and coalesce() adds in that order too: the same bits on every worker.
    indices, values = torch.cat(all_indices, 1), torch.cat(all_values)
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()
    # The tensor gets new indices and values, so they have to be of its own kind. `.data` would be another tensor.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(total)


def _gather(on: Collectives | DeviceCollectives, data: torch.Tensor, into: list[torch.Tensor]) -> None:
    targets = [target.view(-1).view(torch.uint8) for target in into]
    on.move("all_gather", to_all=data.reshape(-1).view(torch.uint8), into=targets)
