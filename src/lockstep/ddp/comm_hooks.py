"""Communication hooks: user code that reduces a bucket in place of the all-reduce.

A hook has torch's signature `hook(state, bucket) -> Future[Tensor]` and gets a `GradBucket` with torch's methods,
so that the hooks in `torch.distributed.algorithms.ddp_comm_hooks` run on it unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep import _torch

CommHook = Callable[[Any, Any], "Future[Tensor]"]


class GradBucket:
    """The bucket that a communication hook gets. torch's own class cannot be constructed in Python."""

    def __init__(self, index: int, buffer: Tensor, parameters: Sequence[Tensor], *, is_last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """One piece of the buffer for each parameter, in the parameter's shape."""
        if self._buffer.is_sparse:
            return [self._buffer]
        pieces, at = [], 0
        for p in self._parameters:
            pieces.append(self._buffer.narrow(0, at, p.numel()).view(p.shape))
            at += p.numel()
        return pieces

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._is_last


def check_signature(hook: Any) -> None:
    """The checks that torch makes when a hook is registered, with torch's messages, on which programs rely."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = _signature(hook)
    if "bucket" not in signature.parameters:
        raise TypeError(f"Communication hook {_name(hook)} must take a parameter named 'bucket'; it takes {signature}.")
    wanted = signature.parameters["bucket"].annotation
    if not isinstance(wanted, str) and wanted not in (inspect.Parameter.empty, _torch.GradBucket, GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if not isinstance(returned, str) and returned not in (inspect.Signature.empty, Future[Tensor]):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
    if _name(hook) in ("bf16_compress_hook", "bf16_compress_wrapper_hook") and not _supports_bf16():
        raise TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL")


def _signature(hook: Any) -> inspect.Signature:
    try:
        return inspect.signature(hook, eval_str=True)
    except (NameError, TypeError):  # postponed annotations with names that cannot be resolved here
        return inspect.signature(hook)


def _name(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def _supports_bf16() -> bool:
    on_gpu = torch.version.cuda is not None or torch.version.hip is not None
    if on_gpu and dist.is_nccl_available():
        return bool(torch.cuda.nccl.version() >= (2, 10))  # type: ignore[no-untyped-call]
    return bool(dist.is_xccl_available() and torch.xpu.is_available())


def run(hook: CommHook, state: object, bucket: GradBucket) -> Future[Any]:
    returned = hook(state, bucket)
    if not isinstance(returned, _torch.FutureBase):
        raise RuntimeError(
            "callback must return a torch.futures.Future object, but got "
            f"{type(returned)}: communication hook {_name(hook)}, bucket {bucket.index()}."
        )
    return returned


def result_of(future: Future[Any]) -> Tensor:
    """The tensor of a hook's future; `Work.get_future()` returns a list of one tensor."""
    value = future.value()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise TypeError(f"the future of a communication hook must hold one tensor, but it holds {type(value)}.")
    return value


def all_reduce_mean(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Any]:
    """torch's built-in ALLREDUCE hook: divides before it adds, so that half precision does not overflow."""
    return group.allreduce([bucket.buffer().div_(group.size())], dist.AllreduceOptions()).get_future()


def all_reduce_fp16(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Any]:
    """torch's built-in FP16_COMPRESS hook: sends 16 bits per value."""
    half = bucket.buffer().to(torch.float16).div_(group.size())
    future = group.allreduce([half], dist.AllreduceOptions()).get_future()
    return future.then(lambda done: bucket.buffer().copy_(result_of(done)))


BUILT_IN: dict[Any, CommHook] = {
    _torch.BuiltinCommHookType.ALLREDUCE: all_reduce_mean,
    _torch.BuiltinCommHookType.FP16_COMPRESS: all_reduce_fp16,
}
