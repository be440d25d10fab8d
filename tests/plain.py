"""What collectives have to give, as plain loops over the tensors of all ranks. To compare with, in every bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.tree_order import tree_pairs

KINDS: Any = ReduceOp.RedOpType
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
NARROW = (torch.float16, torch.bfloat16)
FACTOR = 0.3  # of PREMUL_SUM

_FUNCTIONS = {
    KINDS.SUM: torch.add,
    KINDS.AVG: torch.add,
    KINDS.PREMUL_SUM: torch.add,
    KINDS.PRODUCT: torch.mul,
    KINDS.MIN: torch.minimum,
    KINDS.MAX: torch.maximum,
    KINDS.BAND: torch.bitwise_and,
    KINDS.BOR: torch.bitwise_or,
    KINDS.BXOR: torch.bitwise_xor,
}


def kinds_of(dtype: torch.dtype) -> list[Any]:
    """The reductions that mean something for tensors of this dtype."""
    if dtype.is_complex:
        return [KINDS.SUM, KINDS.AVG, KINDS.PREMUL_SUM]
    kinds = [KINDS.SUM, KINDS.PRODUCT, KINDS.MIN, KINDS.MAX]
    if dtype.is_floating_point:
        return [*kinds, KINDS.AVG, KINDS.PREMUL_SUM]
    kinds += [KINDS.BAND, KINDS.BOR, KINDS.BXOR]
    return kinds if dtype is torch.bool else [*kinds, KINDS.AVG]


def reduced(kind: Any, operands: Sequence[Tensor]) -> Tensor:
    """The reduction, along the tree; narrow floats in float32, rounded once; complex numbers as pairs."""
    dtype, size = operands[0].dtype, len(operands)
    if dtype.is_complex:
        return torch.view_as_complex(reduced(kind, [torch.view_as_real(operand) for operand in operands]))
    values = [operand.clone() for operand in operands]
    if kind == KINDS.PREMUL_SUM:
        values = [value * FACTOR for value in values]
    if dtype in NARROW:
        values = [value.float() for value in values]
    for dst, src in tree_pairs(size):
        values[dst] = _FUNCTIONS[kind](values[dst], values[src])
    if kind == KINDS.AVG and dtype.is_floating_point:
        values[0] = values[0] / size
    elif kind == KINDS.AVG:
        values[0] = values[0].div(size, rounding_mode="trunc")
    return values[0].to(dtype)


def some(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Values, the same for the same seed wherever they are made."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(numel, 2, generator=generator)).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=generator).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not b.dtype or a.numel() != b.numel():
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    # Copied, because a single element can have any stride and yet be contiguous.
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1)).view(torch.uint8)
