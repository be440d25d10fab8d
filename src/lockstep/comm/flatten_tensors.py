"""Torch's tensors as flat memory, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def only(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """Torch passes a list with a tensor for each device of the worker, and there is one."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors where one is expected")
    return tensors[0]


def first_of(arguments: Sequence[object]) -> Tensor:
    """The first tensor, also in lists of lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, (list, tuple)) and argument:
            return first_of(argument)
    return torch.empty(0)


def elements(tensor: Tensor) -> Tensor:
    """In order: the tensor's own memory if it is contiguous, else a copy. Complex numbers as pairs."""
    return _bare(tensor).contiguous().view(-1)


def put(values: Tensor, tensor: Tensor) -> None:
    """Where they are not in the tensor's own memory, they go there."""
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
    """`.data`, not `.detach()`: what a collective writes is no step of a computation, for autograd's counters too."""
    return torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
