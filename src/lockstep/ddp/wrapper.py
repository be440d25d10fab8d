"""The drop-in: torch's class name, torch's arguments, torch's meaning; our reducer.

It derives from torch's class so that `isinstance` holds in every library, and uses nothing else of it. Members with an
underscore are torch's names for things that libraries reach for; they lead to the rooms where the work is done.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lockstep.ddp import replica
from lockstep.ddp.autograd_graph import find_tensors, profiled
from lockstep.ddp.batchnorm import needs_gpu
from lockstep.ddp.bucket import Caps
from lockstep.ddp.comm_hooks import BUILT_IN, CommHook, check_signature
from lockstep.ddp.delayed_all_reduce import DelayedReduce
from lockstep.ddp.grad_hooks import Listening
from lockstep.ddp.join import ShadowHook, any_worker_syncs, highest_rank
from lockstep.ddp.logging_data import Log
from lockstep.ddp.mixed_precision import MixedPrecision
from lockstep.ddp.reducer import Settings
from lockstep.ddp.reducer_interface import TorchReducer

if TYPE_CHECKING:

    class TorchDDP(nn.Module, Joinable):
        """All we use of torch's class: that it is one, and where Dynamo looks for the wrapper that is running."""

        _active_ddp_module: ClassVar[Any]

else:
    from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

logger = logging.getLogger(__name__)

_HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters
_UNEQUAL_START = (
    "With init_sync=False nobody makes them equal: load the same weights on every worker before the first forward, or "
    "leave init_sync at True."
)
_UNEQUAL_COPY = "They were just copied from rank 0, so the process group delivers wrong data: check network and device."


class DistributedDataParallel(TorchDDP):
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
        _keep_dynamo_out()
        self.logger: Log | None = None
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            self._log_and_throw(
                ValueError,
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
            )
        self._choose_group(module, process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        delayed = list(delay_all_reduce_named_params or ())
        self.parameters_to_ignore |= {name for name, _ in delayed}
        self._delay_all_reduce_params = [p for _, p in delayed]
        self._delay_trigger = [param_to_hook_all_reduce]  # in a list, so that it is not a parameter of ours
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        self._check_parameters()
        self._choose_devices(device_ids, output_device)

        self.dim = dim
        self.module = module
        self.device = (self._module_parameters or self._delay_all_reduce_params)[0].device
        init_sync_buffers = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
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
        self._ddp_sink_clone = True  # we need no clone of the outputs either way
        self._accum_grad_hooks: list[Any] = []

        self._delayed = DelayedReduce(self.process_group, self._delay_all_reduce_params, param_to_hook_all_reduce)
        leaves = replica.trained_leaves(module, self.parameters_to_ignore)
        self._delay_all_reduce_all_params = bool(delayed) and not leaves
        if self._delay_all_reduce_all_params:
            return
        if init_sync:
            self._make_equal(leaves, buffers=init_sync_buffers)
        self._build(leaves, static_graph=static_graph)
        if mixed_precision is not None:
            self._mixed = MixedPrecision(self)
        if static_graph:
            self._set_static_graph()

    # -- construction ------------------------------------------------------------------------------------------------

    def _choose_group(self, module: nn.Module, process_group: dist.ProcessGroup | None, mesh: Any) -> None:
        if process_group is not None and mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if mesh is None:
            self.process_group = process_group or dist.distributed_c10d._get_default_group()
            return
        if mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
        self.device_mesh = mesh
        self.process_group = mesh.get_group(mesh_dim=0)
        if mesh._get_root_mesh() != mesh:  # one dimension of several: tensor parallelism inside, we outside
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)

    def _check_parameters(self) -> None:
        if not any(p.requires_grad for p in self._module_parameters) and not self._delay_all_reduce_params:
            self._log_and_throw(
                RuntimeError,
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient.",
            )
        for parameter in self._module_parameters:
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                self._log_and_throw(
                    RuntimeError,
                    "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                    "Run a dummy forward pass to correctly initialize the modules",
                )

    def _choose_devices(self, device_ids: Sequence[Any] | None, output_device: Any) -> None:
        if device_ids is not None and len(device_ids) > 1:
            self._log_and_throw(ValueError, "device_ids can only be None or contain a single element.")
        devices = {p.device for p in self._module_parameters or self._delay_all_reduce_params}
        types = {d.type for d in devices}
        if len(types) != 1:
            self._log_and_throw(
                ValueError,
                "DistributedDataParallel's input module must be on the same type of devices, but input module "
                f"parameters locate in {types}.",
            )
        self.is_multi_device_module = len(devices) > 1
        self.device_type = next(iter(types))
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                self._log_and_throw(
                    ValueError,
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    "single-device/multiple-device GPU modules or CPU modules, but got "
                    f"device_ids {device_ids}, output_device {output_device}, and module parameters {devices}.",
                )
            return
        self.device_ids = [_get_device_index(x, True) for x in device_ids]
        self.output_device = _get_device_index(device_ids[0] if output_device is None else output_device, True)
        (at,) = devices
        if at.index is not None and at.index != self.device_ids[0]:
            self._log_and_throw(
                ValueError,
                f"device_ids={list(device_ids)}, but the module's parameters are on {at}: move the module there first, "
                f"or pass device_ids=[{at.index}].",
            )

    def _choose_buffer_sync(self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
        """Sets whether buffers are synchronised before forwards; returns whether they are at the start."""
        if broadcast_buffers is not None and _HAS_FORWARD_SYNC:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
                "and its value is ignored when `forward_sync_buffers` is provided."
                if forward_sync_buffers is not None
                else "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. Note that "
                "`forward_sync_buffers=False` still syncs buffers at the start, `broadcast_buffers=False` does not.",
                FutureWarning,
                stacklevel=3,
            )
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = True if broadcast_buffers is None else bool(broadcast_buffers)
        return self.forward_sync_buffers

    def _set_caps(self, caps: Caps) -> None:
        self._caps = caps
        # Read by TorchDynamo, which cuts its graphs where our buckets end, and by programs.
        self.bucket_bytes_cap = caps.cap_bytes
        self.bucket_bytes_cap_list = list(caps.each_bytes)
        self.bucket_bytes_cap_default = caps.first_bytes < caps.cap_bytes

    def _make_equal(self, leaves: Sequence[replica.Leaf], *, buffers: bool) -> None:
        replica.check_same_shapes(self.process_group, leaves, self.device)
        replica.copy_state(self.process_group, self.module, self.parameters_to_ignore, source=0, buffers=buffers)
        if self.process_group.size() > 1:
            self._check_values(buffers=buffers, advice=_UNEQUAL_COPY)

    def _check_values(self, *, buffers: bool, advice: str) -> None:
        replica.check_same_values(
            self.process_group, self.module, self.parameters_to_ignore, self.device, buffers=buffers, advice=advice
        )

    def _build(self, leaves: Sequence[replica.Leaf], *, static_graph: bool) -> None:
        self._buffers_of_module = replica.Buffers(self.module, self.parameters_to_ignore)
        self.reducer = TorchReducer(
            [leaf.parameter for leaf in leaves],
            names=[leaf.name for leaf in leaves],
            sparse=[leaf.sparse for leaf in leaves],
            group=self.process_group,
            settings=Settings(
                caps=self._caps,
                find_unused=self.find_unused_parameters,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                static_graph=static_graph,
                skip_unused=self.skip_all_reduce_unused_params,
                batched_copy=self.batched_grad_copy,
            ),
        )
        sync_bn = any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())
        self.logger = Log(
            self.reducer,
            {
                "module_name": type(self.module).__name__,
                "device_ids": ", ".join(map(str, self.device_ids or ())),
                "output_device": -1 if self.output_device is None else self.output_device,
                "broadcast_buffers": int(self.forward_sync_buffers),
                "has_sync_bn": int(sync_bn),
            },
        )
        if static_graph:
            self.logger._set_static_graph()
        self.reducer.set_logger(self.logger)
        if self.device_type == "cpu" and needs_gpu(self.module):
            self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")

    def _log_and_throw(self, kind: type[Exception], message: str) -> NoReturn:
        error = kind(message)
        if self.logger is not None:
            self.logger.error(error)
        raise error

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
        learns = torch.is_grad_enabled()
        if learns and self.require_backward_grad_sync:
            if self.reducer.is_sampled:
                assert self.logger is not None
                self.logger.sample()
            self.reducer.prepare_for_forward()
        still_here = Join.notify_join_context(self)
        if still_here:
            self.reducer._set_forward_pass_work_handle(still_here, self._divide_by_initial_world_size)
        if learns and self.reducer.rebuild():
            logger.info("buckets rebuilt in the order in which gradients arrived")
            self._has_rebuilt_buckets = True
        if not self._values_checked and learns and not self._join_config.enable:
            self._values_checked = True
            self._check_values(buffers=False, advice=_UNEQUAL_START)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            any_worker_syncs(self, self.require_backward_grad_sync, wait=False)
        return self._move(inputs, kwargs)

    def _move(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs to the module's device, and to its precision."""
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            if not kwargs and self.mixed_precision is None and all(_is_there(x, device) for x in inputs):
                return inputs, kwargs
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # TorchDynamo asks torch's class which wrapper is running, to cut its graphs where our buckets end.
        before = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = before

    def _post_forward(self, output: Any) -> Any:
        if self._delay_all_reduce_all_params:
            self._delayed.point_gradients_at_buffer()
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            if not self.require_forward_param_sync:  # nn.Module makes an assignment expensive
                self.require_forward_param_sync = True
            outputs = () if self.reducer.listening is Listening.TO_VERY_LAST else tuple(find_tensors(output))
            self.reducer.prepare_for_backward(outputs)
        else:
            # Buffers are not synchronised before a forward that follows one without synchronisation.
            self.require_forward_param_sync = False
        self._delayed.point_gradients_at_buffer()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to the gradients of this worker; the first one after it averages the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _setup_in_backward_optimizers(self) -> None:
        """Optimisers attached to parameters run when their gradient has been averaged, not when it has arrived."""
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            return
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter in self._module_parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):  # type: ignore[no-untyped-call]
                handle.remove()
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self.reducer._set_optimizer_in_backward()

    # -- buffers -----------------------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self._buffers_of_module.named.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        return self._buffers_of_module.named

    def will_sync_module_buffers(self) -> bool:
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffers_of_module.named)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_place() is not _BufferCommHookLocation.POST_FORWARD

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_place() is _BufferCommHookLocation.POST_FORWARD

    def _buffer_hook_place(self) -> Any:
        hook = getattr(self, "buffer_hook", None)
        return None if hook is None else hook.buffer_comm_hook_location

    def _sync_buffers(self) -> None:
        with torch.no_grad():
            # While workers are joining, rank 0 may have left: the highest rank still here has the current buffers.
            source = highest_rank(self, candidate=True) if self._join_config.enable else 0
            self._assign_modules_buffers()
            # An earlier forward may have saved these tensors for its backward, which is still to come and right.
            with (
                _unsafe_preserve_version_counter(tuple(self.modules_buffers)),
                self.reducer.exchange.watch.explains("the synchronisation of buffers"),
            ):
                self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        self._buffers_of_module.send_from(self.process_group, authoritative_rank, bufs)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._buffers_of_module.send_from(self.process_group, authoritative_rank, tensors)

    def _assign_modules_buffers(self) -> None:
        self._buffers_of_module.look_up()

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, {name: buffer})` instead of the broadcast from rank 0; it may return a list of futures."""
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = _BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    # -- communication hooks -----------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """`hook(state, bucket) -> Future[Tensor]` reduces a bucket in place of the all-reduce. Only once."""
        self._check_comm_hook(hook)
        assert self.logger is not None
        self.reducer.register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__name__))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        assert self.logger is not None
        self.reducer.register_comm_hook(self.process_group, BUILT_IN[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _check_comm_hook(self, hook: Any) -> None:
        try:
            check_signature(hook)
        except (TypeError, ValueError) as error:
            self._log_and_throw(type(error), str(error))

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Sequence[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """An optimiser that steps each parameter as soon as its gradient has been averaged."""
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import (
            _as_overlapped_optim,
        )

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP; use SGD, Adam or AdamW, or step it after backward."
            ) from error

    # -- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with unequal numbers of batches: a worker that is through shadows the collectives of the others."""
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return ShadowHook(self, divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # -- saving and loading ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        if self.mixed_precision is not None:
            raise RuntimeError(
                "a wrapper with mixed_precision cannot be pickled: its low-precision copies hang on this process. Save "
                "`model.module.state_dict()` instead, and wrap the module again after loading."
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_buffers_of_module", "_delayed", "_mixed"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = dist.distributed_c10d._get_default_group()
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
        if not dist.is_initialized() or self.process_group != dist.distributed_c10d._get_default_group():
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor",
            )

    # -- small things with torch's names -----------------------------------------------------------------------------

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        nn.Module.train(self, mode)
        return self

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _set_static_graph(self) -> None:
        """The graph never changes: learned from the first backward pass, never searched again."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        assert self.logger is not None
        self.reducer._set_static_graph()
        self.static_graph = True
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect "
                "unused parameters automatically, so you do not need to set find_unused_parameters=true, just be sure "
                "these unused parameters will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        assert self.logger is not None
        return dict(self.logger.data)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self._ddp_sink_clone = val

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another group of workers. Buckets are learned anew, so that all members do so together."""
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        if new_process_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.process_group = new_process_group
            self.reducer._update_process_group(new_process_group)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        leaves = replica.trained_leaves(self.module, self.parameters_to_ignore)
        self._assign_modules_buffers()
        return [leaf.parameter for leaf in leaves], [leaf.sparse for leaf in leaves]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        index_of = {p: i for i, p in enumerate(parameters)}
        names: dict[int, str] = {}
        for leaf in replica.trained_leaves(self.module, self.parameters_to_ignore):
            if leaf.parameter not in index_of:
                self._log_and_throw(
                    ValueError, f"Param with name {leaf.name} found in module parameters, but not DDP parameters."
                )
            names[index_of[leaf.parameter]] = leaf.name
        if len(index_of) != len(names):
            self._log_and_throw(
                ValueError,
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(index_of)} vs {len(names)}.",
            )
        return names

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        for module in m.modules() if recurse else [m]:
            yield from module.parameters(recurse=False)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for item in module.named_parameters() if named_params else module.parameters():
            parameter = item[1] if named_params else item
            if not getattr(parameter, "_ddp_ignored", False):
                yield item

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave these, by full name, to the user: neither made equal at the start nor averaged."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        named: list[Mapping[str, Tensor]] = [dict(module.named_parameters()), dict(module.named_buffers())]
        for tensors in named:
            for name, tensor in tensors.items():
                if name in params_and_buffers_to_ignore:
                    tensor._ddp_ignored = True  # type: ignore[attr-defined]


def _is_there(value: Any, device: torch.device) -> bool:
    return type(value) is Tensor and value.device == device


def _keep_dynamo_out() -> None:
    """torch.compile shall compile the module inside the wrapper, and leave the wrapper itself alone, as torch's own."""
    import torch._dynamo

    if not getattr(_keep_dynamo_out, "done", False):
        torch._dynamo.trace_rules.add("lockstep.ddp")
        _keep_dynamo_out.done = True  # type: ignore[attr-defined]
