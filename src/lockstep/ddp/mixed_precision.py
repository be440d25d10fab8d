"""Torch DDP's own mixed precision: forward and backward on low-precision copies of the parameters.

(Autocast is the usual way to mixed precision, and needs none of this.)
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.utils import _alloc_storage, _free_storage

from lockstep.ddp.autograd_graph import accumulator

if TYPE_CHECKING:
    from lockstep.ddp.wrapper import DistributedDataParallel


class MixedPrecision:
    """Attributes on parameters (`_mp_param`, `_fp_param`, `_ddp_mp_hook_state`) have the names torch's hook expects."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
            _AllreduceUpcastHookState,
            _reducer_allreduce_and_upcast_hook,
        )

        self._ddp = weakref.ref(ddp)
        self._dtype = ddp.mixed_precision.param_dtype
        self._copied: dict[nn.Module, deque[Any]] = {}
        self._stream = torch.Stream()
        self._index = {p: i for i, p in enumerate(ddp.reducer.parameters)}
        for parameter in ddp.module.parameters():
            if not _is_ignored(parameter):
                self._prepare(parameter)
        for buffer in ddp.module.buffers():
            if not _is_ignored(buffer):
                buffer.data = buffer.to(dtype=ddp.mixed_precision.buffer_dtype)
        ddp.module.register_forward_pre_hook(self._make_copies, with_kwargs=True)
        for module in ddp.module.modules():
            module.register_forward_pre_hook(self._use_copies, with_kwargs=True)
        state = _AllreduceUpcastHookState(ddp_weakref=self._ddp, upcast_stream=torch.Stream())
        ddp.register_comm_hook(state, _reducer_allreduce_and_upcast_hook)
        ddp.reducer._set_mixed_precision_param_dtype(self._dtype)

    def _prepare(self, parameter: Any) -> None:
        parameter._mp_param = torch.zeros_like(parameter, dtype=self._dtype, requires_grad=parameter.requires_grad)
        _free_storage(parameter._mp_param)  # it has memory only between a forward and the end of its backward
        parameter._fp_param = parameter.data

    def _make_copies(self, root: nn.Module, *_: Any) -> None:
        """Before the root's forward: cast everything, on a stream of its own, module by module."""
        self._copied = defaultdict(deque)
        with self._stream:
            for module in root.modules():
                for parameter in module.parameters(recurse=False):
                    if not _is_ignored(parameter):
                        self._make_copy(parameter)
                copied = torch.Event()
                copied.record()
                self._copied[module].append(copied)

    def _make_copy(self, parameter: Any) -> None:
        _alloc_storage(parameter._mp_param, parameter.size())
        with torch.no_grad():
            parameter._mp_param.copy_(parameter.data)
            if parameter.grad is not None:  # autograd adds in the precision of the gradient that comes
                parameter.grad.data = parameter.grad.to(self._dtype)
        parameter.data = parameter._mp_param

    def _use_copies(self, module: nn.Module, *_: Any) -> None:
        """Before a module's forward: its copies must be there, and be listened to."""
        if not self._copied.get(module):
            return
        self._copied[module].popleft().wait(stream=torch.accelerator.current_stream())
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not _is_ignored(parameter):
                node = accumulator(parameter)
                handle = node.register_hook(self._listener(self._index[parameter]))
                parameter._ddp_mp_hook_state = (node, handle)  # type: ignore[attr-defined]

    def _listener(self, index: int) -> Any:
        def on_accumulated(*_: Any) -> None:
            ddp = self._ddp()
            if ddp is not None:
                ddp.reducer._autograd_hook(index)

        return on_accumulated


def _is_ignored(tensor: Any) -> bool:
    return bool(getattr(tensor, "_ddp_ignored", False))
