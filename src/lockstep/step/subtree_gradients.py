"""The gradients of some shards, added as far as the tree over shards allows (comm/tree_order.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.comm.shard_sum import add_coalesced, coalesced

TENSOR_AND_STORAGE = 2  # uses of the memory of a tensor: by it, and by Python's object for the storage


@dataclass
class SubtreeGradients:
    """The summed gradients of one subtree of shards, None where there is none.

    `is_owned`: nothing else refers to these tensors, so they may be written to.
    """

    values: list[Tensor | None]
    is_owned: bool = False

    def add(self, right: SubtreeGradients, dense: Sequence[int], sparse: Sequence[int]) -> SubtreeGradients:
        """Return the sum, written to the memory of this one if nothing else uses that: new memory costs page faults."""
        total = list(self.values)
        both = [i for i in dense if self.values[i] is not None and right.values[i] is not None]
        a, b = [self.values[i] for i in both], [right.values[i] for i in both]
        if both and (self.is_owned or own_their_memory(a)):
            _torch.foreach_add_(a, b)  # type: ignore[arg-type]
        elif both:
            for i, value in zip(both, _torch.foreach_add(a, b), strict=True):  # type: ignore[arg-type]
                total[i] = value
        for i in set(dense) - set(both):
            one = right.values[i] if self.values[i] is None else self.values[i]
            total[i] = None if one is None else one + 0.0  # Note [Zeros] in shard_gradients.py
        for i in sparse:
            total[i] = add_sparse(self.values[i], right.values[i])
        return SubtreeGradients(total, is_owned=True)


def add_sparse(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two sparse gradients, None if there is none."""
    if left is None or right is None:
        return right if left is None else left
    return add_coalesced(left, right)


def own_their_memory(gradients: Sequence[Tensor | None]) -> bool:
    """Whether no other tensor has the memory of one of these: autograd may return views of one tensor, or of a tensor
    that the program keeps."""
    dense = (g.untyped_storage() for g in gradients if g is not None and g.layout is torch.strided)
    return all(_torch.storage_use_count(storage._cdata) <= TENSOR_AND_STORAGE for storage in dense)


def no_rows(parameter: Tensor) -> Tensor:
    """The sparse gradient of an embedding in which nothing was looked up."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return coalesced(indices, values, parameter.shape)
