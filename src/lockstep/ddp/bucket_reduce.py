"""Reduces a bucket to its mean over the workers: by an all-reduce, or by the user's communication hook."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep import _torch
from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.comm.peer_watch import PeerWatch
from lockstep.comm.register_backends import backend_name, is_lockstep_group
from lockstep.ddp import comm_hooks
from lockstep.ddp.bucket import Bucket, FillMode, Ownership
from lockstep.ddp.comm_hooks import CommHook, GradBucket
from lockstep.errors import SharedMemoryFullError

logger = logging.getLogger(__name__)


class Exchange:
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        self._hook: tuple[CommHook, object] | None = None
        self.join_work: Any = None  # all-reduce that counts the workers which still have inputs
        self._divisor = 0
        self.set_group(group)

    def set_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        # A process group that the user has written in Python may complete its Futures only, not its Works.
        self.is_python = type(group) is not dist.ProcessGroup and not is_lockstep_group(group)
        self._shares_memory = is_lockstep_group(group)
        self.watch = PeerWatch(group, polls=not self.is_python and self._device.type == "cpu")
        self._can_average = not self.is_python and _is_nccl(group, self._device)

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    def set_hook(self, state: object, hook: CommHook) -> None:
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = (hook, state)

    # -- the divisor -------------------------------------------------------------------------------------------------

    def reset_divisor(self) -> None:
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

    @property
    def _backend_divides(self) -> bool:
        return self._can_average and self.divisor == self.group.size()

    def fill_mode(self, ownership: Ownership, *, divide_flat: bool) -> FillMode:
        """How to fill a bucket. Gradients are not divided for a hook, nor for a backend that divides."""
        if self._hook is not None:
            return FillMode(ownership)
        return FillMode(ownership, divisor=1 if self._backend_divides else self.divisor, divide_flat=divide_flat)

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
        if self._hook is not None:
            bucket.sent = self.run_hook(GradBucket(bucket.number, buffer, bucket.parameters, is_last=is_last))
            return
        options = dist.AllreduceOptions()
        if self._backend_divides:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        work = self.group.allreduce([buffer], options)
        bucket.sent = work.get_future() if self.is_python or bucket.sparse else work

    def result(self, bucket: Bucket, where: str) -> Tensor:
        """Wait for a bucket that was sent. `where` is used in error messages."""
        if isinstance(bucket.sent, _torch.FutureBase):  # the base class of torch.futures.Future
            bucket.sent.wait()
            return comm_hooks.result_of(cast(Future[Any], bucket.sent))
        self.watch.wait(bucket.sent, where)
        assert bucket.flat is not None
        return bucket.flat

    def run_hook(self, bucket: GradBucket) -> Future[Any]:
        if self._hook is None:
            return self.all_reduce(bucket)
        hook, state = self._hook
        return comm_hooks.run(hook, state, bucket)

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
        if self._hook is None:
            bucket.flat.div_(self.divisor)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return "nccl" in backend_name(group, device)
