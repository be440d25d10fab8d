"""Reduces gradients to their mean over the workers: by an all-reduce, or by the user's communication hook.

A communication hook has torch's signature `hook(state, bucket) -> Future[Tensor]` and gets a `GradBucket` with torch's
methods, so that the hooks in `torch.distributed.algorithms.ddp_comm_hooks` run on it unchanged.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lockstep import _torch
from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.comm.agreement import Broadcast
from lockstep.comm.peer_watch import PeerWatch
from lockstep.comm.register_backends import is_lockstep_group
from lockstep.ddp.bucket import Bucket, FillMode, Ownership
from lockstep.errors import SharedMemoryFullError

logger = logging.getLogger(__name__)

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


class Exchange:
    """Sends the buckets of one model, and waits for them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        self.hook: tuple[CommHook, object] | None = None
        self.join_work: Any = None  # all-reduce that counts the workers which still have inputs
        self._divisor = 0
        self.set_group(group)

    def set_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        # A process group that the user has written in Python may complete its Futures only, not its Works.
        self.is_python = type(group) is not dist.ProcessGroup and not is_lockstep_group(group)
        self._shares_memory = is_lockstep_group(group)
        self.watch = PeerWatch(group, polls=not self.is_python and self._device.type == "cpu")

    def set_hook(self, state: object, hook: CommHook) -> None:
        if self.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.hook = (hook, state)

    # -- the divisor -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a backward pass: the number of workers is not known yet."""
        self._divisor = 0

    @property
    def divisor(self) -> int:
        """Workers in this step: all; with `join(divide_by_initial_world_size=False)`, those that still have inputs."""
        if not self._divisor:
            self._divisor = self.group.size()
            if self.join_work is not None:
                wait_without_limit(self.join_work)
                self._divisor = int(self.join_work.result()[0].item())
        return self._divisor

    def fill_mode(self, ownership: Ownership, *, divide_flat: bool) -> FillMode:
        """How to fill a bucket. Gradients are not divided for a hook.

        They are divided here and not by NCCL (ReduceOp.AVG), which rounds once where torch's class rounds twice.
        """
        if self.hook is not None:
            return FillMode(ownership)
        return FillMode(ownership, divisor=self.divisor, divide_flat=divide_flat)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a bucket: the group's shared memory if it has any, so that peers access it directly."""
        backend: Any = self.group._get_backend(device) if self._shares_memory else None
        if backend is not None and backend.supports_tensor_alloc(device):
            try:
                return cast(Tensor, backend.allocate_tensor(numel, dtype=dtype, device=device))
            except SharedMemoryFullError as error:
                logger.warning("%s. Until then gradients are copied once more on their way", error)
                self._shares_memory = False
        return torch.empty(numel, dtype=dtype, device=device)

    # -- sending and waiting -----------------------------------------------------------------------------------------

    def send(self, bucket: Bucket, *, is_last: bool) -> None:
        if bucket.sparse:
            self._load_sparse(bucket)
        buffer = bucket.comm_buffer()
        if self.hook is not None:
            bucket.sent = self.run_hook(GradBucket(bucket.number, buffer, bucket.parameters, is_last=is_last))
            return
        work = self.group.allreduce([buffer], dist.AllreduceOptions())
        bucket.sent = work.get_future() if self.is_python or bucket.sparse else work

    def result(self, bucket: Bucket, where: str) -> Tensor:
        """Wait for a bucket that was sent. `where` is used in error messages."""
        if isinstance(bucket.sent, _torch.FutureBase):  # the base class of torch.futures.Future
            bucket.sent.wait()
            return result_of(cast(Future[Any], bucket.sent))
        self.watch.wait(bucket.sent, where)
        assert bucket.flat is not None
        return bucket.flat

    def run_hook(self, bucket: GradBucket) -> Future[Any]:
        if self.hook is None:
            return self.all_reduce(bucket)
        hook, state = self.hook
        returned = hook(state, bucket)
        if not isinstance(returned, _torch.FutureBase):
            raise RuntimeError(
                "callback must return a torch.futures.Future object, but got "
                f"{type(returned)}: communication hook {_name(hook)}, bucket {bucket.index()}."
            )
        return returned

    def broadcast_order(self, order: Sequence[int]) -> list[int]:
        """Returns the order in which gradients arrived on rank 0. Collective."""
        tensor = torch.tensor(order, dtype=torch.int64, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self.watch.explain_errors("the exchange of the order of gradients"):
            wait_without_limit(self.group.broadcast([tensor], options))
        return cast("list[int]", tensor.tolist())

    def all_reduce(self, bucket: GradBucket) -> Future[Any]:
        return self.group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()

    def _load_sparse(self, bucket: Bucket) -> None:
        """Use a sparse gradient itself as the buffer; without a gradient, an empty sparse tensor."""
        gradient = bucket.parameters[0].grad
        if gradient is None:
            bucket.flat = bucket.zeros()
            return
        if not gradient.is_sparse:
            raise RuntimeError(
                f"Expected variable to have sparse gradient: parameter {bucket.plan.indices[0]} belongs to an "
                "embedding with sparse=True, but its gradient is dense."
            )
        bucket.flat = gradient
        if self.hook is None:
            bucket.flat.div_(self.divisor)


class DelayedReduce:
    """Averages the gradients of some parameters in one all-reduce, when the gradient of `trigger` is ready."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
        trigger: nn.Parameter | None,
        *,
        make_equal: bool = True,
    ) -> None:
        self._group = group
        self._parameters = list(parameters)
        if not self._parameters:
            return
        assert trigger is not None
        first = self._parameters[0]
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters), dtype=first.dtype, device=first.device)
        pieces = torch.split(self._flat, [p.numel() for p in self._parameters])
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]
        if make_equal:
            Broadcast(keep=False)(group, [p.detach() for p in self._parameters])
        trigger.register_hook(self._reduce)  # type: ignore[no-untyped-call]

    def _reduce(self, gradient: Tensor) -> Tensor:
        self._flat.div_(self._group.size())
        work = self._group.allreduce([self._flat], dist.AllreduceOptions())
        # torch's class does not wait, so an optimiser may read an incomplete sum.
        _torch.call_when_backward_ends(partial(wait_without_limit, work))
        return gradient

    def point_gradients_at_buffer(self) -> None:
        """Called after a forward: gradients are accumulated in the buffer, from zero where there is none yet."""
        if not self._parameters:
            return
        fresh = [p.grad is None for p in self._parameters]
        if all(fresh):
            self._flat.zero_()
        for parameter, view, is_fresh in zip(self._parameters, self._views, fresh, strict=True):
            if is_fresh:
                if not all(fresh):
                    view.zero_()
                parameter.grad = view
