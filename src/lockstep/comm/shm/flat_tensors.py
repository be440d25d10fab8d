"""Torch's tensors as flat memory, which is all that the collectives know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import DeviceCollectives
from lockstep.comm.shm.reduce_ops import Reduction

AnyCollectives = Collectives | DeviceCollectives


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order: the tensor's own memory if it is contiguous, else a copy. Complex numbers as pairs."""
    # `.data`, not `.detach()`: what a collective writes is no step of a computation, for autograd's counters too.
    # Not reshape(-1), which leaves a one-dimensional tensor with gaps as it is.
    return tensor.data.contiguous().view(-1)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    if flat.stride(0) != 1:  # none or one element; torch lets it have any stride and call itself contiguous
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def write_into(
    on: AnyCollectives,
    targets: Sequence[torch.Tensor],
    write: Callable[[list[torch.Tensor]], None],
    *,
    read: bool = False,
) -> None:
    """Call `write` with the targets' flat memory; for those that are not contiguous, with room that is copied back.

    `read`: their contents are wanted too.
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
        on.settle()
    for bare, flat in back:
        bare.copy_(flat.view(bare.shape))


def all_reduce(on: AnyCollectives, tensor: torch.Tensor, how: Reduction, *, root: int | None = None) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.data)
    if tensor.is_contiguous():
        on.all_reduce(tensor.data.view(-1), how, root=root)
        return
    write_into(on, [tensor], lambda flat: on.all_reduce(flat[0], how, root=root), read=True)


def reduce_scatter(
    on: AnyCollectives, sections: Sequence[torch.Tensor], how: Reduction, flat: Sequence[torch.Tensor]
) -> None:
    on.reduce_scatter(sections, flat[0], how)


def check_alike(name: str, target: torch.Tensor, data: torch.Tensor) -> None:
    if target.dtype is not data.dtype or target.numel() != data.numel():
        raise ValueError(
            f"{name}: a tensor of {target.numel()} x {target.dtype} for data of {data.numel()} x {data.dtype}; "
            "make them the same"
        )


def cut(which: str, tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Elements for each rank: `splits` rows of the first dimension, or equal parts."""
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
