"""Torch DDP's own mixed precision: forward and backward on low-precision copies of the parameters.

(Autocast is the usual way to mixed precision, and does not use this module.)
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from itertools import filterfalse
from typing import Any

import torch
from torch import nn

from lockstep._torch import alloc_storage, free_storage, mixed_precision_hook
from lockstep.ddp.autograd_graph import accumulator
from lockstep.ddp.wrapper_interface import TorchInterface


class MixedPrecision:
    """Attributes on parameters (`_mp_param`, `_fp_param`, `_ddp_mp_hook_state`) have the names torch's hook expects."""

    def __init__(self, ddp: TorchInterface) -> None:
        self._ddp = weakref.ref(ddp)
        self._dtype = ddp.mixed_precision.param_dtype
        self._copied: dict[nn.Module, deque[Any]] = {}
        self._stream = torch.Stream()
        self._index = {p: i for i, p in enumerate(ddp.reducer.core.parameters)}
        for parameter in filterfalse(_is_ignored, ddp.module.parameters()):
            self._prepare(parameter)
        for buffer in filterfalse(_is_ignored, ddp.module.buffers()):
            buffer.data = buffer.to(dtype=ddp.mixed_precision.buffer_dtype)
        ddp.module.register_forward_pre_hook(self._make_copies, with_kwargs=True)
        for module in ddp.module.modules():
            module.register_forward_pre_hook(self._use_copies, with_kwargs=True)
        make_state, hook = mixed_precision_hook()
        ddp.register_comm_hook(make_state(ddp_weakref=self._ddp, upcast_stream=torch.Stream()), hook)
        ddp.reducer._set_mixed_precision_param_dtype(self._dtype)

    def _prepare(self, parameter: Any) -> None:
        parameter._mp_param = torch.zeros_like(parameter, dtype=self._dtype, requires_grad=parameter.requires_grad)
        free_storage(parameter._mp_param)  # it has memory only from a forward to the end of its backward pass
        parameter._fp_param = parameter.data

    def _make_copies(self, root: nn.Module, *_: Any) -> None:
        """Called before the root's forward: cast all parameters, module by module, on a separate stream."""
        self._copied = defaultdict(deque)
        with self._stream:
            for module in root.modules():
                for parameter in filterfalse(_is_ignored, module.parameters(recurse=False)):
                    self._make_copy(parameter)
                copied = torch.Event()
                copied.record()
                self._copied[module].append(copied)

    def _make_copy(self, parameter: Any) -> None:
        alloc_storage(parameter._mp_param, parameter.size())
        with torch.no_grad():
            parameter._mp_param.copy_(parameter.data)
            if parameter.grad is not None:  # autograd accumulates in the precision of the new gradient
                parameter.grad.data = parameter.grad.to(self._dtype)
        parameter.data = parameter._mp_param

    def _use_copies(self, module: nn.Module, *_: Any) -> None:
        """Called before a module's forward: wait for its copies, and register hooks on them."""
        if not self._copied.get(module):
            return
        self._copied[module].popleft().wait(stream=torch.accelerator.current_stream())
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not _is_ignored(parameter):
                node = accumulator(parameter)
                handle = node.register_hook(self._hook_for(self._index[parameter]))
                parameter._ddp_mp_hook_state = (node, handle)  # type: ignore[attr-defined]

    def _hook_for(self, index: int) -> Any:
        def on_accumulated(*_: Any) -> None:
            ddp = self._ddp()
            if ddp is not None:
                ddp.reducer._autograd_hook(index)

        return on_accumulated


def _is_ignored(tensor: Any) -> bool:
    return bool(getattr(tensor, "_ddp_ignored", False))
