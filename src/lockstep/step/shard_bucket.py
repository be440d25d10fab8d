"""The gradients of shards that are sent together, in one piece of memory.

Note [Alignment]
A kernel that sums a tensor handles its first elements one by one if they are not aligned, so the norm of a gradient
depends on its address. In a bucket every gradient begins at a multiple of 64 bytes, as memory of its own would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.shard_sum import HALF_DTYPES, ShardSum
from lockstep.ddp.bucket import piece_of
from lockstep.ddp.replica import Leaf

ALIGN_BYTES = 64  # Note [Alignment]
USED = 32768.0  # the mark: nonzero after division by any weight times loss scale up to 5e11, also in float16


def comm_dtype_of(own: torch.dtype, comm_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which gradients of dtype `own` are rounded before they are added; None: they are not rounded.

    Complex gradients are sent as they are: torch has no complex dtype as narrow as bfloat16.
    """
    return comm_dtype if own.is_floating_point else None


def round_gradient(leaf: Leaf, gradient: Tensor | None, comm_dtype: torch.dtype | None) -> Tensor | None:
    """Round a gradient to the dtype in which it would be sent; and widen it, because sums are formed in float32."""
    if gradient is None:
        return None
    if gradient.is_sparse != leaf.sparse:
        raise RuntimeError(
            f"the gradient of {leaf.name} is {'sparse' if gradient.is_sparse else 'dense'}, but its embedding has "
            f"sparse={leaf.sparse}; a parameter must be used in one way only"
        )
    if leaf.sparse:
        return gradient.coalesce()
    narrow = comm_dtype_of(gradient.dtype, comm_dtype)
    if narrow is not None:
        return gradient.to(narrow).to(torch.float32)
    return gradient.float() if gradient.dtype in HALF_DTYPES else gradient


def copy_rounded(view: Tensor, gradient: Tensor | None, comm_dtype: torch.dtype | None) -> None:
    """Write a gradient into `view`, rounded to the dtype in which it is sent; zeros if there is none."""
    if gradient is None:
        view.zero_()
        return
    narrow = comm_dtype_of(gradient.dtype, comm_dtype)
    view.copy_(gradient if narrow is None or narrow == view.dtype else gradient.to(narrow))


@dataclass
class GradientMark:
    """A point in a captured backward pass: once `event` has happened, the gradients `indices` are complete."""

    indices: list[int] = field(default_factory=list)
    event: Any = None  # None: at the end of the backward pass
    size_bytes: int = 0


class ShardBucket:
    """Parameters whose gradients are sent together, followed by the marks of those that were used."""

    def __init__(
        self, indices: Sequence[int], leaves: Sequence[Leaf], sum_: ShardSum, comm_dtype: torch.dtype | None
    ) -> None:
        self.indices = list(indices)
        self.parameters = [leaves[i].parameter for i in indices]
        self.offsets, self.numel = [], 0
        step = ALIGN_BYTES // self.parameters[0].element_size()
        for parameter in self.parameters:
            self.offsets.append(self.numel)
            self.numel += -(-parameter.numel() // step) * step
        own = self.parameters[0].dtype
        self.buffers = sum_.allocate(self.numel + len(self.indices), comm_dtype_of(own, comm_dtype) or own)
        self.rows = list(self.buffers.rows)
        self.views = [self.cut(row) for row in self.rows]
        self.marks = [row[self.numel : self.numel + len(self.indices)] for row in self.rows]
        self.all_used = torch.full_like(self.marks[0], USED)
        self.pending = len(self.indices)

    def cut(self, flat: Tensor) -> list[Tensor]:
        pieces = (piece_of(flat, p, at) for p, at in zip(self.parameters, self.offsets, strict=True))
        return [piece.data for piece in pieces]

    def marks_for(self, used: Sequence[bool]) -> Tensor:
        """Return the marks of a row: nonzero for each parameter that was used."""
        return self.all_used if all(used) else self.all_used * torch.tensor(used, device=self.all_used.device)
