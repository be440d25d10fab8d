"""Torch's methods of the wrapper that are not part of a training step: buffers, communication hooks, uneven inputs, and
what libraries call.

`DistributedDataParallel` in wrapper.py derives from `TorchInterface`, and sets the attributes that are declared there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lockstep import _torch
from lockstep._torch import BufferCommHook, BufferCommHookLocation, move_to_device, preserve_version_counter
from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.ddp import replica
from lockstep.ddp.bucket_reduce import BUILT_IN, CommHook, check_signature
from lockstep.ddp.reducer_interface import DDPLogger, TorchReducer

if TYPE_CHECKING:

    class TorchDDP(nn.Module, Joinable):
        """What is used of torch's class: its bases, and the attribute in which Dynamo looks for the running wrapper."""

        _active_ddp_module: ClassVar[Any]

else:
    from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP


class TorchInterface(TorchDDP):
    module: nn.Module
    process_group: dist.ProcessGroup
    reducer: TorchReducer
    logger: DDPLogger | None
    device: torch.device
    device_type: str
    dim: int
    parameters_to_ignore: set[str]
    static_graph: bool
    find_unused_parameters: bool
    mixed_precision: Any  # torch's _MixedPrecision
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    use_side_stream_for_tensor_copies: bool
    _buffers_of_module: replica.ReplicaBuffers
    _has_rebuilt_buckets: bool
    _ddp_sink_clone: bool
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _divide_by_initial_world_size: bool
    _authoritative_rank: int

    def _log_and_throw(self, kind: type[Exception], message: str) -> NoReturn:
        error = kind(message)
        if self.logger is not None:
            self.logger.error(error)
        raise error

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
        return self.will_sync_module_buffers() and self._buffer_hook_place() is not BufferCommHookLocation.POST_FORWARD

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_place() is BufferCommHookLocation.POST_FORWARD

    def _buffer_hook_place(self) -> Any:
        hook = getattr(self, "buffer_hook", None)
        return None if hook is None else hook.buffer_comm_hook_location

    def _sync_buffers(self) -> None:
        with torch.no_grad():
            # With uneven inputs rank 0 may have joined: the highest rank that still has inputs has current buffers.
            source = highest_rank(self.process_group, self.device, candidate=True) if self._join_config.enable else 0
            self._assign_modules_buffers()
            # An earlier forward may have saved these tensors for a backward pass that has not run; it stays valid.
            with (
                preserve_version_counter(tuple(self.modules_buffers)),
                self.reducer.core.exchange.watch.explain_errors("the synchronisation of buffers"),
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
        self._buffers_of_module.broadcast(self.process_group, authoritative_rank, bufs)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._buffers_of_module.broadcast(self.process_group, authoritative_rank, tensors)

    def _assign_modules_buffers(self) -> None:
        self._buffers_of_module.refresh()

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """Use `hook(state, {name: buffer})` instead of the broadcast from rank 0. It may return a list of futures."""
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    # -- communication hooks -----------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce buckets with `hook(state, bucket) -> Future[Tensor]` instead of the all-reduce. Only once."""
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
        """Register an optimiser that steps each parameter as soon as its gradient has been averaged."""
        overlapped = _torch.overlapped_optimizer()(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP; use SGD, Adam or AdamW, or step it after backward."
            ) from error

    # -- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Train with unequal numbers of batches: a worker without inputs takes part in the others' collectives."""
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return DDPJoinHook(self, divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # -- torch's other methods ---------------------------------------------------------------------------------------

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        device = torch.device(self.device_type, device_id)
        return move_to_device(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def train(self, mode: bool = True) -> Self:
        nn.Module.train(self, mode)
        return self

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _set_static_graph(self) -> None:
        """Declare that the graph never changes: it is learned from the first backward pass."""
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
        """Continue with another group. Buckets are rebuilt, so that all members of the group use the same ones."""
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
        """Parameters and buffers with these full names are neither made equal at the start nor averaged."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        named: Iterator[tuple[str, Any]] = chain(module.named_parameters(), module.named_buffers())
        for name, tensor in named:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True


class DDPJoinHook(JoinHook):
    """Uneven inputs: a worker that has run out of batches makes the collective calls that the others wait for.

    The context manager that runs it is torch's `torch.distributed.algorithms.Join`.
    """

    def __init__(self, ddp: TorchInterface, *, divide_by_initial_world_size: bool) -> None:
        assert ddp.logger is not None
        ddp.logger._set_uneven_input_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self.ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """Make the calls of one step of the other workers, in the same order, with contributions of zero."""
        ddp = self.ddp
        ddp.reducer.core.rebuild()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_module_buffers(highest_rank(ddp.process_group, ddp.device, candidate=False))
        syncs = any_worker_syncs(ddp.process_group, ddp.device, we_do=False, wait=True)
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        watch = ddp.reducer.core.exchange.watch
        watch.enter()
        for future in [ddp.reducer._run_comm_hook(b) for b in ddp.reducer._get_zeros_like_grad_buckets()]:
            future.wait()
        if ddp.find_unused_parameters and not ddp.static_graph:
            nothing = torch.zeros(len(ddp.reducer.core.parameters), dtype=torch.int32, device=ddp.device)
            wait_without_limit(ddp.process_group.allreduce([nothing], dist.AllreduceOptions()))
        watch.leave()
        ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All workers end with the weights of the last worker to finish."""
        ddp = self.ddp
        ddp._authoritative_rank = highest_rank(ddp.process_group, ddp.device, candidate=is_last_joiner)
        source, buffers = ddp._authoritative_rank, ddp.forward_sync_buffers
        replica.copy_state(ddp.process_group, ddp.module, ddp.parameters_to_ignore, source=source, buffers=buffers)


def any_worker_syncs(group: dist.ProcessGroup, device: torch.device, *, we_do: bool, wait: bool) -> bool:
    """Whether the backward pass of this step will be reduced. Collective.

    A worker that still has inputs knows the answer, and returns `we_do` at once; one that has joined waits for it.
    """
    count = torch.full((1,), float(we_do), device=device)
    work = group.allreduce([count], dist.AllreduceOptions())
    if not wait:
        return we_do
    wait_without_limit(work)
    return bool(count.item() != 0)


def highest_rank(group: dist.ProcessGroup, device: torch.device, *, candidate: bool) -> int:
    """The highest rank among the workers that pass `candidate=True`; equal on all workers. Collective."""
    ours = group.rank() if candidate else -1
    rank = torch.tensor([ours], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    wait_without_limit(group.allreduce([rank], options))
    highest = int(rank.item())
    assert highest >= 0, "no worker was a candidate"
    return highest
