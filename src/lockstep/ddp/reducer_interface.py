"""The reducer under the method names that torch's own code and other libraries call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.ddp import grad_hooks
from lockstep.ddp.comm_hooks import CommHook, GradBucket
from lockstep.ddp.logging_data import DDPLogger
from lockstep.ddp.reducer import Reducer


class TorchReducer(Reducer):
    """The reducer of DistributedDataParallel, with the interface of torch's C++ reducer."""

    def set_logger(self, logger: DDPLogger) -> None:
        self._logger = weakref.ref(logger)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        with self._logging_errors():
            self.exchange.set_hook(state, hook)
        self._configure()

    def _run_comm_hook(self, bucket: GradBucket) -> Future[Any]:
        return self.exchange.run_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return self.exchange.all_reduce(bucket)

    def _autograd_hook(self, index: int) -> None:
        self._gradient_arrived(index)

    def _rebuild_buckets(self) -> bool:
        return self.rebuild()

    def _push_all_rebuilt_params(self) -> None:
        if self.should_rebuild and not self.last_order:
            self.last_order = list(range(len(self.parameters)))

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = len(self.buckets) - 1
        return [GradBucket(b.number, b.zeros(), b.parameters, is_last=b.number == last) for b in self.buckets]

    def _get_local_used_map(self) -> Tensor:
        return self.usage.on_device()

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.exchange.join_work = None if use_static_world_size else work

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        self._futures += list(futures)

    def _set_static_graph(self) -> None:
        with self._logging_errors():
            if self.iterations:
                raise RuntimeError(
                    "set_static_graph() should be called before training loop starts and after "
                    "DistributedDataParallel is constructed."
                )
        self.static_graph = True

    def _set_optimizer_in_backward(self) -> None:
        self.queue.optimizer_in_backward = True

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self.queue.set_dtype(dtype)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate

    def _set_sparse_metadata(self, metadata: object) -> None:
        """Ignored: a hint for backends that make sparse gradients dense; the result is the same without it."""

    def _ddp_graph_static(self) -> bool:
        return self.usage.never_changed

    def _remove_autograd_hooks(self) -> None:
        self._grad_hooks.remove()
        grad_hooks.unregister_listener(self, self.parameters)

    def _check_reducer_finalized(self) -> None:
        self.check_finished()

    def _reset_state(self) -> None:
        self.reset()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.exchange.set_group(group)
        self._configure()
