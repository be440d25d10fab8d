"""The drop-in for torch's DistributedDataParallel: torch's class name, arguments and semantics, with our reducer.

It derives from torch's class so that `isinstance` holds in every library, and uses nothing else of it. The names of
most members that begin with an underscore are torch's, because libraries use them. Methods that are not part of
construction or of a training step are in wrapper_interface.py.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from lockstep import _torch
from lockstep._torch import cast_forward_inputs, move_to_device
from lockstep.ddp import arguments, replica
from lockstep.ddp.autograd_graph import HookMode, find_tensors, profiled
from lockstep.ddp.batchnorm import needs_gpu
from lockstep.ddp.bucket import Caps
from lockstep.ddp.bucket_queue import ReducerOptions
from lockstep.ddp.bucket_reduce import DelayedReduce
from lockstep.ddp.mixed_precision import MixedPrecision
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.reducer_interface import DDPLogger, TorchReducer
from lockstep.ddp.wrapper_interface import TorchDDP, TorchInterface, any_worker_syncs

logger = logging.getLogger(__name__)

_UNEQUAL_START = (
    "With init_sync=False they are not made equal: load the same weights on every worker before the first forward, or "
    "leave init_sync at True."
)
_UNEQUAL_COPY = "They were just copied from rank 0, so the process group delivers wrong data: check network and device."


class DistributedDataParallel(TorchInterface):
    """Drop-in for `torch.nn.parallel.DistributedDataParallel`: its arguments, its methods, its state dict.

    Results have the same bits as torch's on Gloo with up to three workers. Errors name the worker and the parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _exclude_from_dynamo()
        self.logger: DDPLogger | None = None
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.process_group = arguments.choose_group(module, process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        delayed = list(delay_all_reduce_named_params or ())
        self.parameters_to_ignore |= {name for name, _ in delayed}
        self._delay_all_reduce_params = [p for _, p in delayed]
        self._delay_trigger = [param_to_hook_all_reduce]  # in a list, so that nn.Module does not register it
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        arguments.check_parameters(self._module_parameters, has_delayed=bool(delayed))
        reduced = self._module_parameters or self._delay_all_reduce_params
        devices = arguments.choose_devices(reduced, device_ids, output_device)
        self.is_multi_device_module = devices.is_multi_device
        self.device_type = devices.type
        self.device_ids = devices.ids
        self.output_device = devices.output

        self.dim = dim
        self.module = module
        self.device = reduced[0].device
        buffer_sync = arguments.choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = buffer_sync.before_forward
        self.static_graph = False
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        self._set_caps(Caps.from_mib(bucket_cap_mb, bucket_cap_mb_list))
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self._use_python_reducer = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._values_checked = init_sync
        self._divide_by_initial_world_size = True
        self._authoritative_rank = 0
        self._ddp_sink_clone = True  # kept for torch's setter; outputs are never cloned
        self._accum_grad_hooks: list[Any] = []

        self._delayed = DelayedReduce(self.process_group, self._delay_all_reduce_params, param_to_hook_all_reduce)
        leaves = replica.trained_leaves(module, self.parameters_to_ignore)
        self._delay_all_reduce_all_params = bool(delayed) and not leaves
        if self._delay_all_reduce_all_params:
            return
        if init_sync:
            replica.check_same_shapes(self.process_group, leaves, self.device)
            replica.copy_state(
                self.process_group, module, self.parameters_to_ignore, source=0, buffers=buffer_sync.at_start
            )
            if self.process_group.size() > 1:
                self._check_values(buffers=buffer_sync.at_start, advice=_UNEQUAL_COPY)
        self._build(leaves, static_graph=static_graph)
        if mixed_precision is not None:
            self._mixed = MixedPrecision(self)
        if static_graph:
            self._set_static_graph()

    # -- construction ------------------------------------------------------------------------------------------------

    def _set_caps(self, caps: Caps) -> None:
        self._caps = caps
        # Read by TorchDynamo, which splits its graphs at the ends of buckets, and by programs.
        self.bucket_bytes_cap = caps.cap_bytes
        self.bucket_bytes_cap_list = list(caps.each_bytes)
        self.bucket_bytes_cap_default = caps.first_bytes < caps.cap_bytes

    def _check_values(self, *, buffers: bool, advice: str) -> None:
        replica.check_same_values(
            self.process_group, self.module, self.parameters_to_ignore, self.device, buffers=buffers, advice=advice
        )

    def _build(self, leaves: Sequence[replica.Leaf], *, static_graph: bool) -> None:
        self._buffers_of_module = replica.ReplicaBuffers(self.module, self.parameters_to_ignore)
        options = ReducerOptions(
            caps=self._caps,
            find_unused=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=static_graph,
            skip_unused=self.skip_all_reduce_unused_params,
            batched_copy=self.batched_grad_copy,
        )
        self.reducer = TorchReducer(Reducer(leaves, group=self.process_group, options=options))
        self.logger = DDPLogger(
            self.reducer.core,
            {
                "module_name": type(self.module).__name__,
                "device_ids": ", ".join(map(str, self.device_ids or ())),
                "output_device": -1 if self.output_device is None else self.output_device,
                "broadcast_buffers": int(self.forward_sync_buffers),
                "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())),
            },
        )
        if static_graph:
            self.logger._set_static_graph()
        self.reducer.set_logger(self.logger)
        if self.device_type == "cpu" and needs_gpu(self.module):
            self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")

    # -- one step ----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with profiled("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._delay_all_reduce_all_params:
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._setup_in_backward_optimizers()
            self._lazy_init_ran = True
        has_grad = torch.is_grad_enabled()
        if has_grad and self.require_backward_grad_sync:
            if self.reducer.core.clock.is_sampled:
                assert self.logger is not None
                self.logger.sample()
            self.reducer.core.prepare_for_forward()
        join_work = Join.notify_join_context(self)
        if join_work:
            self.reducer._set_forward_pass_work_handle(join_work, self._divide_by_initial_world_size)
        if has_grad and self.reducer.core.rebuild():
            logger.info("buckets rebuilt in the order in which gradients arrived")
            self._has_rebuilt_buckets = True
        if not self._values_checked and has_grad and not self._join_config.enable:
            self._values_checked = True
            self._check_values(buffers=False, advice=_UNEQUAL_START)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            any_worker_syncs(self.process_group, self.device, we_do=self.require_backward_grad_sync, wait=False)
        return self._move_inputs(inputs, kwargs)

    def _move_inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move inputs to the module's device, and cast them for mixed precision."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            if (
                not kwargs
                and self.mixed_precision is None
                and all(type(x) is Tensor and x.device == device for x in inputs)
            ):
                return inputs, kwargs
            moved, moved_kwargs = move_to_device(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with _torch.running_wrapper(self):
            return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if self._delay_all_reduce_all_params:
            self._delayed.point_gradients_at_buffer()
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            if not self.require_forward_param_sync:  # nn.Module makes assignments expensive
                self.require_forward_param_sync = True
            reducer = self.reducer.core
            outputs = () if reducer.hooks.mode is HookMode.LAST_PARAMETER else tuple(find_tensors(output))
            reducer.prepare_for_backward(outputs)
        else:
            # Buffers are not synchronised before a forward that follows one without gradient synchronisation.
            self.require_forward_param_sync = False
        self._delayed.point_gradients_at_buffer()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context gradients accumulate on this worker; the first backward after it averages the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _setup_in_backward_optimizers(self) -> None:
        """Make optimisers that are attached to parameters step when the gradient has been averaged, not before."""
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            return
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter in self._module_parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):  # type: ignore[no-untyped-call]
                handle.remove()
        hook = _torch.optimizer_in_backward_hook()(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self.reducer._set_optimizer_in_backward()

    # -- saving and loading ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        if self.mixed_precision is not None:
            raise RuntimeError(
                "a wrapper with mixed_precision cannot be pickled: its low-precision copies belong to this process. "
                "Save `model.module.state_dict()` instead, and wrap the module again after loading."
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_buffers_of_module", "_delayed", "_mixed"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = _torch.get_default_group()
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("require_forward_param_sync", True)
        self.__dict__.setdefault("require_backward_grad_sync", True)
        self._delayed = DelayedReduce(
            self.process_group, self._delay_all_reduce_params, self._delay_trigger[0], make_equal=False
        )
        if self._delay_all_reduce_all_params:
            return
        self._build(replica.trained_leaves(self.module, self.parameters_to_ignore), static_graph=self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()
        self._has_rebuilt_buckets = False

    def _check_default_group(self) -> None:
        if not dist.is_initialized() or self.process_group != _torch.get_default_group():
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor",
            )


@cache
def _exclude_from_dynamo() -> None:
    """Make torch.compile compile the module inside the wrapper but not the wrapper itself, as with torch's own."""
    _torch.exclude_from_compiler("lockstep.ddp")


def install_ddp() -> None:
    """Make `torch.nn.parallel.DistributedDataParallel` our class, also in modules that have imported it before.

    Rebinds every module-level name that refers to torch's class; modules that are imported later get ours from
    torch's modules. Calling it again does nothing.
    """
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] == "lockstep":
            continue
        try:
            names = [key for key, value in vars(module).items() if value is TorchDDP]
        except TypeError:  # some programs put objects into sys.modules that are not modules
            continue
        for key in names:
            setattr(module, key, DistributedDataParallel)
