"""Averages the gradients of some parameters in one all-reduce, when the gradient of a chosen parameter is ready."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.comm.broadcast import Broadcast
from lockstep.ddp.autograd_graph import when_backward_ends


class DelayedReduce:
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
        when_backward_ends(partial(wait_without_limit, work))
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
