"""Sparse tensors: the sum of what everybody has, gathered."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.reduce import Reduction


def all_reduce(on: Collectives, tensor: torch.Tensor, how: Reduction) -> None:
    """`tensor` (COO) becomes the sum of everybody's."""
    if how.kind is not ReduceOp.SUM:
        raise RuntimeError(f"a sparse tensor can be summed, not reduced by {how.kind.name}")
    size = on.team.size
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    _gather(on, torch.tensor([values.shape[0]]), counts)
    all_indices = [indices.new_empty(indices.shape[0], int(count)) for count in counts]
    all_values = [values.new_empty(int(count), *values.shape[1:]) for count in counts]
    _gather(on, indices, all_indices)
    _gather(on, values, all_values)
    # In rank order, and coalesce() adds in that order too: the same bits on every worker.
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape).coalesce()
    tensor.data.sparse_resize_(tensor.shape, tensor.sparse_dim(), tensor.dense_dim())
    tensor.data.copy_(total)


def _gather(on: Collectives, data: torch.Tensor, into: list[torch.Tensor]) -> None:
    targets = [target.view(-1).view(torch.uint8) for target in into]
    on.move("all_gather", to_all=data.reshape(-1).view(torch.uint8), into=targets)
