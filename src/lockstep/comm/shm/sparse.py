"""Sums of sparse tensors: each worker gathers those of all workers and adds them up."""

from __future__ import annotations

import torch

from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import CudaCollectives
from lockstep.comm.shm.reduce_ops import RedOpType, Reduction


def all_reduce(collectives: Collectives | CudaCollectives, tensor: torch.Tensor, op: Reduction) -> None:
    """Replace `tensor` (COO) by the sum over all workers. Raises RuntimeError for other reductions."""
    if op.kind != RedOpType.SUM:
        raise RuntimeError(f"a sparse tensor can be summed, not reduced by {op.kind.name}")
    size = collectives.sync.size
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size)]
    _gather(collectives, torch.tensor([values.shape[0]], device=tensor.device), counts)
    collectives.wait_for_result()
    all_indices = [indices.new_empty(indices.shape[0], int(count)) for count in counts]
    all_values = [values.new_empty(int(count), *values.shape[1:]) for count in counts]
    _gather(collectives, indices, all_indices)
    _gather(collectives, values, all_values)
    collectives.wait_for_result()
    # Concatenated in rank order, and coalesce() adds in that order too: the same bits on every worker.
    indices, values = torch.cat(all_indices, 1), torch.cat(all_values)
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()
    # The tensor gets new indices and values, which must be inference tensors iff it is one. `.data` would be another
    # tensor.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(total)


def _gather(collectives: Collectives | CudaCollectives, data: torch.Tensor, into: list[torch.Tensor]) -> None:
    targets = [target.view(-1).view(torch.uint8) for target in into]
    collectives.move("all_gather", to_all=data.reshape(-1).view(torch.uint8), into=targets)
