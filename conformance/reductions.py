"""Values of reductions on a backend: the same as on Gloo.

PyTorch's own tests of all_reduce call it and look at no value: they pass on a backend that adds wrongly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from beside_gloo import BesideGloo

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


class ReductionTests(BesideGloo):
    """The numbers are small whole ones, so that every order of adding gives the same bits."""

    def test_all_reduce_values(self) -> None:
        self.compare_with_gloo(lambda: dict(_every_reduction(_all_reduce)), exact=True)

    def test_reduce_values(self) -> None:
        self.compare_with_gloo(lambda: dict(_every_reduction(_reduce)), exact=True)

    def test_reduce_scatter_values(self) -> None:
        self.compare_with_gloo(lambda: dict(_every_reduction(_reduce_scatter)), exact=True)

    def test_all_reduce_of_any_shape(self) -> None:
        def compute() -> dict[str, Tensor]:
            whole = _numbers((64, 3, 50), torch.float32)
            shapes = {
                "empty": whole[:0],
                "scalar": whole[0, 0, 0].clone(),
                "transposed": whole.transpose(0, 2).clone(memory_format=torch.preserve_format),
                "large": _numbers((3_000_001,), torch.float32),
            }
            for tensor in shapes.values():
                dist.all_reduce(tensor)
            return shapes

        self.compare_with_gloo(compute, exact=True)

    def test_all_reduce_many_in_flight(self) -> None:
        def compute() -> dict[str, Tensor]:
            tensors = {f"{n}": _numbers((n**2 * 7 + 1,), torch.float32) for n in range(60)}
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors.values()]
            for work in reversed(works):
                assert work is not None
                work.wait()
            return tensors

        self.compare_with_gloo(compute, exact=True)

    def test_all_reduce_coalesced_values(self) -> None:
        def compute() -> dict[str, Tensor]:
            tensors = [_numbers((size,), torch.float32) for size in (1, 0, 1000, 400_000)]
            dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
            return {f"{tensor.numel()}": tensor for tensor in tensors}

        self.compare_with_gloo(compute, exact=True)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0 if dtype is torch.bool else 1, 4, shape, generator=generator).to(dtype)


def _every_reduction(reduce: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Those that Gloo refuses are missing on Gloo, and so not compared."""
    for dtype in DTYPES:
        for op in OPS:
            with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
                yield f"{op} {dtype}", reduce(_numbers((60,), dtype), getattr(dist.ReduceOp, op))


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    dist.all_reduce(tensor, op)
    return tensor


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    root = dist.get_world_size() - 1
    dist.reduce(tensor, root, op)
    return tensor if dist.get_rank() == root else tensor.new_empty(0)  # elsewhere the value is anything


def _reduce_scatter(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    out = tensor.new_empty(tensor.numel() // dist.get_world_size())
    dist.reduce_scatter(out, list(tensor.chunk(dist.get_world_size())), op)
    return out
