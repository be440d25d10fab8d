"""The reducer and its logging data under the names that torch's own code and other libraries use."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.ddp import autograd_graph
from lockstep.ddp.backward_pass import GraphUse
from lockstep.ddp.bucket_reduce import CommHook, GradBucket
from lockstep.ddp.reducer import Reducer

_ENVIRONMENT = {
    "any": {
        "master_port": "MASTER_PORT",
        "master_addr": "MASTER_ADDR",
        "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
        "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    },
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}
_GLOO_THREADS = 2  # number of threads that torch starts for each Gloo group
_C_NAMES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}

# Time spans: name -> (event at its begin, event at its end); the events are those of `IterationClock`.
_SPANS = {
    "forward_compute_time": ("forward_start", "backward_start"),
    "backward_compute_time": ("backward_start", "backward_end"),
    "backward_comm_time": ("comm_start", "comm_end"),
    "backward_compute_comm_overlap_time": ("comm_start", "backward_end"),
}
_STARTS = {
    "forward_compute_time_start": "forward_start",
    "backward_compute_time_start": "backward_start",
    "backward_comm_time_start": "comm_start",
    "backward_compute_time_end": "backward_end",
    "backward_comm_time_end": "comm_end",
}


class DDPLogger:
    """Collects the logging data. It also records the last error, because torch's tools read it from here."""

    def __init__(self, reducer: Reducer, construction: dict[str, Any]) -> None:
        self._reducer = reducer
        self._samples = 0
        group, buckets = reducer.exchange.group, reducer.queue.buckets
        backend = _backend_name(group)
        sizes = [p.numel() * p.element_size() for p in reducer.parameters]
        dtypes = {_C_NAMES.get(n, n) for n in (str(p.dtype).removeprefix("torch.") for p in reducer.parameters)}
        self.data: dict[str, Any] = {
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": 0,
            "num_parameter_tensors": len(sizes),
            "total_parameter_size_bytes": sum(sizes),
            "dtypes": ", ".join(sorted(dtypes)),
            "bucket_sizes": _join(b.size_bytes for b in buckets),
            "initial_bucket_size_limits": _join(b.plan.limit_bytes for b in buckets),
            "bucket_cap_bytes": reducer.options.caps.cap_bytes,
            "find_unused_parameters": int(reducer.options.find_unused),
            "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
            "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
            "backend_name": backend,
            **construction,
        }
        for name, variable in (_ENVIRONMENT["any"] | _ENVIRONMENT.get(backend, {})).items():
            self.data[name] = os.environ.get(variable, "N/A")
        if backend == "gloo":
            self.data["gloo_num_threads"] = _GLOO_THREADS

    def error(self, error: BaseException) -> None:
        self.data |= {"has_error": 1, "error": str(error), "iteration": self._reducer.clock.iterations}

    def sample(self) -> None:
        """Called before a forward: record the iteration before it."""
        queue, clock = self._reducer.queue, self._reducer.clock
        self._samples += 1
        self.data |= {
            "iteration": clock.iterations,
            "num_buckets_reduced": queue.buckets_reduced,
            "unused_parameter_size": sum(self._reducer.parameters[i].nbytes for i in self._reducer.usage.unused),
        }
        if self.data.get("has_rebuilt_buckets") != int(queue.has_rebuilt):
            self.data["has_rebuilt_buckets"] = int(queue.has_rebuilt)
            if queue.has_rebuilt:
                self.data |= {
                    "rebuilt_bucket_sizes": _join(b.size_bytes for b in queue.buckets),
                    "rebuilt_bucket_size_limits": _join(b.plan.limit_bytes for b in queue.buckets),
                    "rebuilt_per_bucket_param_indices": _join(
                        " ".join(map(str, b.plan.indices)) for b in queue.buckets
                    ),
                }
        if queue.last_order:
            self.data["prev_iteration_grad_ready_order_indices"] = _join(queue.last_order)
        for name, (begin, end) in _SPANS.items():
            span = clock.span_ns(begin, end)
            self.data[name] = span or 0
            if span is not None:
                before = self.data.get(f"avg_{name}", 0)
                self.data[f"avg_{name}"] = (span + before * (self._samples - 1)) // self._samples
        for name, event in _STARTS.items():
            self.data[name] = clock.at.get(event, 0)

    # The names below are torch's; libraries and torch's own join and communication hooks call them.
    def set_error_and_log(self, message: str) -> None:
        self.error(RuntimeError(message))

    def set_runtime_stats_and_log(self) -> None:
        self.sample()

    def _set_uneven_input_join(self) -> None:
        self.data["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.data["static_graph"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self.data["comm_hook"] = name

    def _get_ddp_logging_data(self) -> Any:
        return SimpleNamespace(
            strs_map={k: v for k, v in self.data.items() if isinstance(v, str)},
            ints_map={k: v for k, v in self.data.items() if isinstance(v, int)},
        )


def _join(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _backend_name(group: dist.ProcessGroup) -> str:
    try:
        return str(group.name())
    except (RuntimeError, AttributeError):
        return type(group).__name__  # a process group written in Python may have no name


class TorchReducer:
    """The interface of torch's C++ reducer."""

    def __init__(self, core: Reducer) -> None:
        self.core = core

    def set_logger(self, logger: DDPLogger) -> None:
        self.core.error_log = weakref.WeakMethod(logger.error)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        with self.core.logging_errors():
            self.core.exchange.set_hook(state, hook)
        self.core.configure()

    def prepare_for_forward(self) -> None:
        self.core.prepare_for_forward()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        self.core.prepare_for_backward(outputs)

    def _run_comm_hook(self, bucket: GradBucket) -> Future[Any]:
        return self.core.exchange.run_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return self.core.exchange.all_reduce(bucket)

    def _autograd_hook(self, index: int) -> None:
        self.core.gradient_arrived(index)

    def _rebuild_buckets(self) -> bool:
        return self.core.rebuild()

    def _push_all_rebuilt_params(self) -> None:
        if self.core.queue.should_rebuild and not self.core.queue.last_order:
            self.core.queue.last_order = list(range(len(self.core.parameters)))

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        buckets = self.core.queue.buckets
        return [GradBucket(b.number, b.zeros(), b.parameters, is_last=b is buckets[-1]) for b in buckets]

    def _get_local_used_map(self) -> Tensor:
        return self.core.usage.on_device()

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.core.exchange.join_work = None if use_static_world_size else work

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        self.core.futures += list(futures)

    def _set_static_graph(self) -> None:
        with self.core.logging_errors():
            if self.core.clock.iterations:
                raise RuntimeError(
                    "set_static_graph() should be called before training loop starts and after "
                    "DistributedDataParallel is constructed."
                )
        self.core.usage.set_graph(GraphUse.LEARNING)

    def _set_optimizer_in_backward(self) -> None:
        self.core.queue.optimizer_in_backward = True

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self.core.queue.set_dtype(dtype)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.core.clock.sample_rate = sample_rate

    def _set_sparse_metadata(self, metadata: object) -> None:
        """Ignored: a hint for backends that make sparse gradients dense; the result is the same without it."""

    def _ddp_graph_static(self) -> bool:
        return self.core.usage.never_changed

    def _remove_autograd_hooks(self) -> None:
        self.core.hooks.remove()
        autograd_graph.unregister_listener(self.core, self.core.parameters)

    def _check_reducer_finalized(self) -> None:
        self.core.check_finished()

    def _reset_state(self) -> None:
        self.core.reset()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.core.exchange.set_group(group)
        self.core.configure()
