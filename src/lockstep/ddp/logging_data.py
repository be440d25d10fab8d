"""The data behind `_get_ddp_logging_data()`, under torch's names, and the clock that times an iteration."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lockstep.ddp.bucket import Bucket, Caps
from lockstep.ddp.unused_parameters import ParameterUsage

FIRST_SAMPLED = 10  # every iteration up to this one is timed, then one in `sample_rate`

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


class IterationClock:
    """Times of the events of one iteration, in nanoseconds, taken on the host."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}

    def mark(self, event: str) -> None:
        self.at[event] = time.time_ns()

    def span_ns(self, begin: str, end: str) -> int | None:
        if begin not in self.at or end not in self.at or self.at[end] < self.at[begin]:
            return None
        return self.at[end] - self.at[begin]


class LoggedOptions(Protocol):
    """The options of a reducer that are logged."""

    @property
    def caps(self) -> Caps: ...
    @property
    def find_unused(self) -> bool: ...
    @property
    def gradient_as_bucket_view(self) -> bool: ...


class LoggedReducer(Protocol):
    """What the logger reads from a reducer."""

    iterations: int
    has_rebuilt: bool
    last_order: list[int]
    clock: IterationClock
    usage: ParameterUsage

    @property
    def parameters(self) -> Sequence[Tensor]: ...
    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def buckets(self) -> Sequence[Bucket]: ...
    @property
    def buckets_reduced(self) -> int: ...
    @property
    def options(self) -> LoggedOptions: ...


class DDPLogger:
    """Collects the logging data. It also records the last error, because torch's tools read it from here."""

    def __init__(self, reducer: LoggedReducer, construction: dict[str, Any]) -> None:
        self._reducer = reducer
        self._samples = 0
        group = reducer.group
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
            "bucket_sizes": ", ".join(str(b.size_bytes) for b in reducer.buckets),
            "initial_bucket_size_limits": ", ".join(str(b.plan.limit_bytes) for b in reducer.buckets),
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
        self.data |= {"has_error": 1, "error": str(error), "iteration": self._reducer.iterations}

    def sample(self) -> None:
        """Called before a forward: record the iteration before it."""
        r = self._reducer
        self._samples += 1
        self.data |= {
            "iteration": r.iterations,
            "num_buckets_reduced": r.buckets_reduced,
            "unused_parameter_size": sum(r.parameters[i].nbytes for i in r.usage.unused),
        }
        if self.data.get("has_rebuilt_buckets") != int(r.has_rebuilt):
            self.data["has_rebuilt_buckets"] = int(r.has_rebuilt)
            if r.has_rebuilt:
                self.data |= {
                    "rebuilt_bucket_sizes": ", ".join(str(b.size_bytes) for b in r.buckets),
                    "rebuilt_bucket_size_limits": ", ".join(str(b.plan.limit_bytes) for b in r.buckets),
                    "rebuilt_per_bucket_param_indices": ", ".join(
                        " ".join(map(str, b.plan.indices)) for b in r.buckets
                    ),
                }
        if r.last_order:
            self.data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, r.last_order))
        for name, (begin, end) in _SPANS.items():
            span = r.clock.span_ns(begin, end)
            self.data[name] = span or 0
            if span is not None:
                before = self.data.get(f"avg_{name}", 0)
                self.data[f"avg_{name}"] = (span + before * (self._samples - 1)) // self._samples
        for name, event in _STARTS.items():
            self.data[name] = r.clock.at.get(event, 0)

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
        return type(
            "DDPLoggingData",
            (),
            {
                "strs_map": {k: v for k, v in self.data.items() if isinstance(v, str)},
                "ints_map": {k: v for k, v in self.data.items() if isinstance(v, int)},
            },
        )()


def _backend_name(group: dist.ProcessGroup) -> str:
    try:
        return str(group.name())
    except (RuntimeError, AttributeError):
        return type(group).__name__  # a process group written in Python may have no name
