"""Uneven inputs: a worker that has run out of batches makes the collective calls that the others wait for.

The context manager is torch's `torch.distributed.algorithms.Join`; this is the hook that it runs.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.ddp import replica
from lockstep.ddp.logging_data import DDPLogger
from lockstep.ddp.reducer_interface import TorchReducer


class JoinableDDP(Protocol):
    """What the join hook uses of the wrapper."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    reducer: TorchReducer
    logger: DDPLogger | None
    parameters_to_ignore: set[str]
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool
    _authoritative_rank: int

    def _check_sync_bufs_pre_fwd(self) -> bool: ...
    def _sync_module_buffers(self, authoritative_rank: int) -> None: ...


class DDPJoinHook(JoinHook):
    def __init__(self, ddp: JoinableDDP, *, divide_by_initial_world_size: bool) -> None:
        assert ddp.logger is not None
        ddp.logger._set_uneven_input_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self.ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """Make the calls of one step of the other workers, in the same order, with contributions of zero."""
        ddp = self.ddp
        ddp.reducer.rebuild()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_module_buffers(highest_rank(ddp.process_group, ddp.device, candidate=False))
        syncs = any_worker_syncs(ddp.process_group, ddp.device, we_do=False, wait=True)
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        watch = ddp.reducer.exchange.watch
        watch.enter()
        for future in [ddp.reducer._run_comm_hook(b) for b in ddp.reducer._get_zeros_like_grad_buckets()]:
            future.wait()
        if ddp.find_unused_parameters and not ddp.static_graph:
            nothing = torch.zeros(len(ddp.reducer.parameters), dtype=torch.int32, device=ddp.device)
            wait_without_limit(ddp.process_group.allreduce([nothing], dist.AllreduceOptions()))
        watch.leave()
        ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All workers end with the weights of the last worker to finish."""
        ddp = self.ddp
        ddp._authoritative_rank = highest_rank(ddp.process_group, ddp.device, candidate=is_last_joiner)
        replica.copy_state(
            ddp.process_group,
            ddp.module,
            ddp.parameters_to_ignore,
            source=ddp._authoritative_rank,
            buffers=ddp.forward_sync_buffers,
        )


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
