"""Runs a function on several NCCL ranks that share one GPU.

NCCL refuses that on one host. Each rank has a host id of its own, so that it takes the others for other hosts, and they
communicate through sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep._torch import PrefixStore, get_default_store
from lockstep.comm.abortable_group import share_gpu_over_nccl
from on_workers import on_workers

WAIT = timedelta(seconds=120)


def on_nccl_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300) -> list[Any]:
    """`[function(rank, size, *args) for every rank]`, each in a process whose default group is NCCL's, on GPU 0.

    Raises WorkerFailedError if any fails.
    """
    return on_workers(_be_nccl_rank, ranks, function, args, timeout_s=timeout_s)


def _be_nccl_rank(rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    share_gpu_over_nccl(rank)
    gpu = torch.device("cuda:0")
    torch.cuda.set_device(gpu)
    store = PrefixStore("nccl", get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=WAIT, device_id=gpu)
    return function(rank, size, *args)
