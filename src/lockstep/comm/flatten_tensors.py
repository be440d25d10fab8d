"""Tensors as flat, contiguous memory, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def single_tensor(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the only tensor of a list. Torch passes one tensor for each device of the worker, and there is one."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors where one is expected")
    return tensors[0]


def first_tensor(arguments: Sequence[object]) -> Tensor:
    """Return the first tensor among the arguments, also inside nested lists; an empty one if there is none."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, (list, tuple)) and argument:
            return first_tensor(argument)
    return torch.empty(0)


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in order: a view if the tensor is contiguous, else a copy. Complex numbers become pairs."""
    return _bare(tensor).contiguous().view(-1)


def copy_back(values: Tensor, tensor: Tensor) -> None:
    """Copy the result of `flatten` back into the tensor, unless it is a view of it."""
    bare = _bare(tensor)
    if values.data_ptr() != bare.data_ptr():
        bare.copy_(values.view(bare.shape))


def check_sizes(name: str, *, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(
            f"{name} on {size} workers: {tuple(whole.shape)} of {whole.dtype} is not {size} times "
            f"{tuple(part.shape)} of {part.dtype}"
        )


def check_list(name: str, tensors: Sequence[Tensor], *, like: Tensor, size: int) -> None:
    if len(tensors) != size or any(t.numel() != like.numel() or t.dtype != like.dtype for t in tensors):
        raise ValueError(f"{name} on {size} workers takes as many tensors of {tuple(like.shape)} and {like.dtype}")


def _bare(tensor: Tensor) -> Tensor:
    """Return the tensor without autograd. `.data`, not `.detach()`: a collective must not change version counters."""
    return torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
