"""Uneven inputs: a worker that has run out of batches makes the calls that the others expect of it.

The context manager is torch's `torch.distributed.algorithms.Join`; this is what it runs for us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.ddp import replica

if TYPE_CHECKING:
    from lockstep.ddp.wrapper import DistributedDataParallel


class ShadowHook(JoinHook):
    def __init__(self, ddp: DistributedDataParallel, *, divide_by_initial_world_size: bool) -> None:
        assert ddp.logger is not None
        ddp.logger._set_uneven_input_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self.ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """One step of the others, call by call in the same order, contributing nothing."""
        ddp = self.ddp
        ddp.reducer.rebuild()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_module_buffers(highest_rank(ddp, candidate=False))
        syncs = any_worker_syncs(ddp, False, wait=True)
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
        """Everybody ends with the weights of the last worker to finish."""
        ddp = self.ddp
        ddp._authoritative_rank = highest_rank(ddp, candidate=is_last_joiner)
        replica.copy_state(
            ddp.process_group,
            ddp.module,
            ddp.parameters_to_ignore,
            source=ddp._authoritative_rank,
            buffers=ddp.forward_sync_buffers,
        )


def any_worker_syncs(ddp: DistributedDataParallel, we_do: bool, *, wait: bool) -> bool:
    """Whether the backward pass of this step will be reduced. Those who go on know; those who are through ask."""
    count = torch.full((1,), float(we_do), device=ddp.device)
    work = ddp.process_group.allreduce([count], dist.AllreduceOptions())
    if not wait:
        return we_do
    wait_without_limit(work)
    return bool(count.item() != 0)


def highest_rank(ddp: DistributedDataParallel, *, candidate: bool) -> int:
    """The highest rank among the candidates: the same answer on every worker."""
    ours = ddp.process_group.rank() if candidate else -1
    rank = torch.tensor([ours], device=ddp.device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    wait_without_limit(ddp.process_group.allreduce([rank], options))
    highest = int(rank.item())
    assert highest >= 0, "no worker was a candidate"
    return highest
