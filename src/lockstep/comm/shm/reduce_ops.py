"""Reductions of a list of tensors (sums, products, minima, ...) in a fixed order. No communication here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.tree_order import tree_pairs

Combine = Callable[..., Tensor]
RedOpType: Any = ReduceOp.RedOpType  # torch's stub files do not know its members

_COMBINE: Final[dict[Any, Combine]] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PREMUL_SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
_KINDS: Final = tuple(_COMBINE)
_BITWISE: Final = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
_NARROW: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Reduction:
    """A reduction over `size` workers."""

    kind: Any  # a RedOpType
    size: int
    factor: float | Tensor | None = None  # the factor of PREMUL_SUM
    scale: Callable[[], float] | None = None  # multiplies the sum; called when the sum is there
    code: int = field(init=False)  # equal on all workers
    combine: Combine = field(init=False)
    averages: bool = field(init=False)
    multiplies: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.kind not in _COMBINE:
            raise RuntimeError(f"ReduceOp.{self.kind.name} is not known to shm")
        # Comparing torch's enumerations takes longer than adding a small tensor, so it is done once.
        for name, value in (
            ("code", _KINDS.index(self.kind)),
            ("combine", _COMBINE[self.kind]),
            ("averages", self.kind == RedOpType.AVG),
            ("multiplies", self.kind == RedOpType.PREMUL_SUM),
        ):
            object.__setattr__(self, name, value)

    def check(self, dtype: torch.dtype) -> None:
        """Raise RuntimeError if this reduction is not defined for `dtype`. Called before anything is sent."""
        if self.kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
            raise RuntimeError(f"Cannot use ReduceOp.{self.kind.name} with {dtype}; it takes integers and bool only")
        if dtype.is_complex and self.kind in (RedOpType.MIN, RedOpType.MAX):
            raise RuntimeError(f"Cannot use ReduceOp.{self.kind.name} with {dtype}: complex numbers have no order")
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if (dtype is torch.bool and self.kind == RedOpType.AVG) or (whole and self.kind == RedOpType.PREMUL_SUM):
            raise RuntimeError(f"Cannot use ReduceOp.{self.kind.name} with {dtype}: there are no fractions of it")
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise RuntimeError(f"{dtype} can be sent but not reduced; convert it to bfloat16 first")

    def prepare(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        """Multiply this worker's own operand by the factor of PREMUL_SUM, in place or in a copy. Returns the result."""
        if self.factor is None:
            return tensor
        factor = self.factor.to(tensor.device) if isinstance(self.factor, Tensor) else self.factor
        return (tensor.clone() if copy else tensor).mul_(factor)

    def run(self, operands: Sequence[Tensor], out: Tensor, *, free: Sequence[bool]) -> None:
        """Combine the operands along the tree into `out`. `free[i]`: operand i may be overwritten.

        `out` may be one of the operands. Narrow floats are added in float32 and rounded once.
        """
        values, pairs, combine = list(operands), tree_pairs(len(operands)), self.combine
        if not pairs:
            if out.data_ptr() != values[0].data_ptr():
                out.copy_(values[0])
        elif len(pairs) == 1 and not (out.dtype in _NARROW and (self.averages or self.scale is not None)):
            combine(values[0], values[1], out=out)  # torch itself adds two narrow floats in float32
        elif out.dtype in _NARROW and combine in (torch.add, torch.mul):
            for dst, src in pairs:
                if values[dst].dtype is not torch.float32:
                    values[dst] = values[dst].float()
                combine(values[dst], values[src], out=values[dst])
            self._finish(values[0])
            out.copy_(values[0])
            return
        else:
            for dst, src in pairs[:-1]:
                if values[dst] is operands[dst] and not free[dst]:
                    values[dst] = combine(values[dst], values[src])
                else:
                    combine(values[dst], values[src], out=values[dst])
            combine(values[0], values[pairs[-1][1]], out=out)
        self._finish(out)

    def _finish(self, total: Tensor) -> None:
        if self.scale is not None:
            total.mul_(self.scale())
        if self.averages and self.size > 1:
            if total.dtype.is_complex:
                total = torch.view_as_real(total)  # as torch does where it passes pairs of reals itself
            if total.dtype.is_floating_point:
                total.div_(self.size)
            else:
                total.div_(self.size, rounding_mode="trunc")


def parse_reduction(op: Any, size: int, dtype: torch.dtype) -> Reduction:
    """The Reduction for torch's `op`. Raises RuntimeError if it is not defined for `dtype`."""
    kind = getattr(op, "op", op)
    how = _checked_reduction(kind, size, dtype)
    if how.multiplies:
        how = Reduction(kind, size, op.__getstate__()[1])  # torch before 2.12 gives out the factor only for pickling
    return how


@cache
def _checked_reduction(kind: Any, size: int, dtype: torch.dtype) -> Reduction:
    how = Reduction(kind, size)
    how.check(dtype)
    return how
