"""The gradients of some shards, added as far as the tree over shards allows (comm/tree_order.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.comm.shard_sum import add_coalesced, coalesced

GROUP_BYTES: Final = 512 * 1024  # of parameters whose gradients are added together, so that two stay in the L2 cache
TENSOR_AND_STORAGE: Final = 2  # uses of the memory of a tensor: by it, and by Python's object for the storage


@dataclass
class SubtreeGradients:
    """The summed gradients of one subtree of shards, None where there is none.

    is_owned  nothing else refers to these tensors, so they may be written to
    is_lent   they belong to a captured pass, whose next replay overwrites them
    """

    values: list[Tensor | None]
    is_owned: bool = False
    is_lent: bool = False

    def may_be_written(self, dense: Sequence[int]) -> bool:
        return self.is_owned or (not self.is_lent and own_their_memory([self.values[i] for i in dense]))


@final
class GradientAdder:
    """Adds the gradients of neighbouring subtrees of shards."""

    def __init__(self, parameters: Sequence[Tensor], sparse: Sequence[int]) -> None:
        """`sparse`: which of these parameters have sparse gradients."""
        self._sparse, dense = sparse, sorted(set(range(len(parameters))) - set(sparse))
        self.dense = dense
        self._groups = pack_groups(parameters, dense)

    def add_all(self, sums: Sequence[SubtreeGradients], last: SubtreeGradients) -> SubtreeGradients:
        """Return `last` added to the first of `sums`, the result to the second one, and so on."""
        return self.add_and_scale(sums, last, None)

    def add_and_scale(
        self, sums: Sequence[SubtreeGradients], last: SubtreeGradients, scale: float | Tensor | None
    ) -> SubtreeGradients:
        """Return the sum, times `scale`. It is written to the memory of the last of `sums` if nothing else uses that,
        because new memory costs page faults.

        All is done with some of the gradients before the others, because reading them takes longer than adding them.
        """
        if not sums and scale is None:
            return last
        total = list(last.values)
        may_write = [one.may_be_written(self.dense) for one in sums]
        may_scale = bool(sums) or scale is None or last.may_be_written(self.dense)
        for group in self._groups:
            value = [total[i] for i in group]
            for one, writes in zip(sums, may_write, strict=True):
                value = add_dense([one.values[i] for i in group], value, writes=writes)
            if scale is not None:
                value = multiply_dense(value, scale, writes=may_scale)
            for i, tensor in zip(group, value, strict=True):
                total[i] = tensor
        for i in self._sparse:
            for one in sums:
                total[i] = add_sparse(one.values[i], total[i])
        return SubtreeGradients(total, is_owned=bool(sums))


def pack_groups(parameters: Sequence[Tensor], dense: Sequence[int]) -> list[list[int]]:
    """Return groups of parameters whose gradients stay in the cache while they are added. On a GPU, where few large
    kernels are faster, they are one group."""
    groups: list[list[int]] = [[]]
    size = 0
    for i in dense:
        nbytes = parameters[i].nbytes if parameters[i].device.type == "cpu" else 0
        if size and size + nbytes > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += nbytes
    return groups


def add_dense(left: list[Tensor | None], right: list[Tensor | None], *, writes: bool) -> list[Tensor | None]:
    """Return the sums of pairs of dense gradients. `writes`: to the memory of the left ones."""
    if any(one is None for one in (*left, *right)):
        both = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a is not None and b is not None]
        sums = iter(add_dense([left[i] for i in both], [right[i] for i in both], writes=writes) if both else ())
        pairs = zip(left, right, strict=True)
        return [keep_one(a, b) if a is None or b is None else next(sums) for a, b in pairs]
    if writes:
        _torch.foreach_add_(left, right)  # type: ignore[arg-type]
        return left
    return list(_torch.foreach_add(left, right))  # type: ignore[arg-type]


def keep_one(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the one of two dense gradients that is there, with zeros added: Note [Zeros] in shard_gradients.py."""
    one = right if left is None else left
    return None if one is None else one + 0.0


def multiply_dense(values: list[Tensor | None], scale: float | Tensor, *, writes: bool) -> list[Tensor | None]:
    there = [value for value in values if value is not None]
    if writes and there:
        _torch.foreach_mul_(there, scale)
    elif there:
        there = list(_torch.foreach_mul(there, scale))
    products = iter(there)
    return [None if value is None else next(products) for value in values]


def add_sparse(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two sparse gradients, None if there is none."""
    if left is None or right is None:
        return right if left is None else left
    return add_coalesced(left, right)


def own_their_memory(gradients: Sequence[Tensor | None]) -> bool:
    """Whether no other tensor has the memory of one of these: autograd may return views of one tensor, or of a tensor
    that the program keeps."""
    count = _torch.storage_use_count
    return all(g is None or count(g.untyped_storage()._cdata) <= TENSOR_AND_STORAGE for g in gradients)


def no_rows(parameter: Tensor) -> Tensor:
    """The sparse gradient of an embedding in which nothing was looked up."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return coalesced(indices, values, parameter.shape)
