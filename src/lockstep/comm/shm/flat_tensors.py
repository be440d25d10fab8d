"""Tensors of any layout as flat contiguous memory, the only form that the collectives accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import CudaCollectives
from lockstep.comm.shm.reduce_ops import Reduction

AnyCollectives = Collectives | CudaCollectives


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order: the tensor's own memory if it is contiguous, else a copy. Keeps the dtype, complex too."""
    # `.data`, not `.detach()`: writes of a collective are no part of the autograd graph, nor of its version counters.
    # Not reshape(-1), which returns a one-dimensional tensor with gaps unchanged.
    return tensor.data.contiguous().view(-1)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    if flat.stride(0) != 1:  # at most one element; torch calls it contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def write_into(
    collectives: AnyCollectives,
    targets: Sequence[torch.Tensor],
    write: Callable[[list[torch.Tensor]], None],
    *,
    read: bool = False,
) -> None:
    """Call `write` with each target's flat memory; one that is not contiguous gets a buffer that is copied back.

    `read`: `write` also reads the targets' contents.
    """
    flats, back = [], []
    for target in targets:
        bare = target.data
        if bare.is_contiguous():
            flats.append(bare.view(-1))
            continue
        flat = flatten(bare) if read else torch.empty(bare.numel(), dtype=bare.dtype, device=bare.device)
        flats.append(flat)
        back.append((bare, flat))
    write(flats)
    if back:
        collectives.wait_for_result()
    for bare, flat in back:
        bare.copy_(flat.view(bare.shape))


def all_reduce(collectives: AnyCollectives, tensor: torch.Tensor, op: Reduction, *, root: int | None = None) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.data)
    if tensor.is_contiguous():
        collectives.all_reduce(tensor.data.view(-1), op, root=root)
        return
    write_into(collectives, [tensor], lambda flat: collectives.all_reduce(flat[0], op, root=root), read=True)


def reduce_scatter(
    collectives: AnyCollectives, sections: Sequence[torch.Tensor], op: Reduction, flat: Sequence[torch.Tensor]
) -> None:
    collectives.reduce_scatter(sections, flat[0], op)


def check_alike(name: str, target: torch.Tensor, data: torch.Tensor) -> None:
    if target.dtype is not data.dtype or target.numel() != data.numel():
        raise ValueError(
            f"{name}: a tensor of {target.numel()} x {target.dtype} for data of {data.numel()} x {data.dtype}; "
            "make them the same"
        )


def cut(which: str, tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Number of elements for each rank: `splits[rank]` rows of dimension 0, or equal parts. Raises ValueError."""
    if not splits:
        if tensor.numel() and tensor.shape[0] % size:
            raise ValueError(f"all_to_all: the {which} has {tensor.shape[0]} rows, not a multiple of {size} workers")
        return [tensor.numel() // size] * size
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {which} splits {list(splits)} for {size} workers and {rows} rows; they must add up"
        )
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]
