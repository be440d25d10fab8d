"""Communication hooks that compress gradients, for lockstep's DistributedDataParallel and torch's.

    model.register_comm_hook(None, lockstep.hooks.int8())

They round gradients to integers at random, without bias (comm/integer_codec.py), and return their mean over the
workers. No residual is kept from step to step. Torch's own hooks work with both classes as well.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.comm.compressed_sum import CompressedBuffers, CompressedSum, run_on_current_stream
from lockstep.comm.integer_codec import BLOCK, IntegerCodec
from lockstep.comm.shard_sum import ShardSum
from lockstep.seed import derive_seed


def int8(process_group: dist.ProcessGroup | None = None, *, seed: int = 0) -> IntegerHook:
    """Return a hook that sends about a quarter of the bytes of float32.

    All workers call it, in the same order as other calls of torch.distributed: it creates a process group.

    process_group  whose workers share the gradients; default: all
    seed           of the random numbers; equal on all workers
    """
    return IntegerHook(8, process_group, seed)


def int4(process_group: dist.ProcessGroup | None = None, *, seed: int = 0) -> IntegerHook:
    """Return a hook that sends about an eighth of the bytes of float32. See `int8` for the arguments."""
    return IntegerHook(4, process_group, seed)


class IntegerHook:
    """A communication hook with torch's signature: `hook(state, bucket) -> Future[Tensor]`."""

    def __init__(self, bits: int, process_group: dist.ProcessGroup | None, seed: int) -> None:
        if not dist.is_initialized():
            raise ValueError(f"hooks.int{bits}(): call torch.distributed.init_process_group or lockstep.init first")
        whole: Any = process_group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(whole)
        if dist.get_rank() not in ranks:
            raise ValueError(f"hooks.int{bits}(): rank {dist.get_rank()} is not in the process group of ranks {ranks}")
        # A group of its own: the collectives run in a thread, and must not mix with other collectives of the program.
        self._group = dist.new_group(ranks, backend=dist.get_backend(whole), use_local_synchronization=True)
        self._rank, self._size = ranks.index(dist.get_rank()), len(ranks)
        self._codec, self._seed = IntegerCodec(bits), seed
        self._sums: dict[torch.device, tuple[ShardSum, CompressedSum]] = {}
        self._buffers: dict[tuple[int, int], CompressedBuffers] = {}  # by number and size of the bucket
        self._calls: dict[int, int] = {}  # by number of the bucket
        self.__name__ = self.__qualname__ = f"int{bits}"  # torch logs the name of a hook, and checks its signature
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("state", "bucket")])

    def __call__(self, state: object, bucket: Any) -> Future[Tensor]:
        flat: Tensor = bucket.buffer()
        if flat.is_sparse or not flat.is_floating_point():
            kind = "sparse tensors" if flat.is_sparse else str(flat.dtype)
            raise ValueError(f"hooks.{self.__name__}: gradients that are {kind} cannot be compressed; use no hook")
        number, device = bucket.index(), flat.device
        sum_, compressed = self._sum_for(device)
        buffers = self._buffers_for(compressed, number, flat.numel())
        step = self._calls[number] = self._calls.get(number, -1) + 1
        keys = [derive_seed(self._seed, "hook", step, word) for word in (self._rank, "sum")]
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)

        def add() -> None:
            buffers.shard_keys, buffers.sum_key, row = keys[:1], keys[1], buffers.rows[-1]
            row[: flat.numel()].copy_(flat)
            row[flat.numel() :].zero_()
            flat.copy_(compressed.run(buffers)[: flat.numel()])

        def job() -> Tensor:
            try:
                run_on_current_stream([flat], add)
                future.set_result(flat)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            return flat

        sum_.submit(job)
        return future

    def _sum_for(self, device: torch.device) -> tuple[ShardSum, CompressedSum]:
        if device not in self._sums:
            shares = [range(rank, rank + 1) for rank in range(self._size)]
            sum_ = ShardSum(self._group, shares, device=device, compresses=True)
            self._sums[device] = sum_, sum_.compressed(self._codec)
        return self._sums[device]

    def _buffers_for(self, compressed: CompressedSum, number: int, numel: int) -> CompressedBuffers:
        if (number, numel) not in self._buffers:
            blocks, first = -(-numel // BLOCK), number << 24  # buckets of one step use different random numbers
            buffers = compressed.allocate(torch.arange(first, first + blocks), 0)
            buffers.scale = lambda: 1.0 / self._size
            self._buffers = {key: kept for key, kept in self._buffers.items() if key[0] != number}
            self._buffers[number, numel] = buffers
        return self._buffers[number, numel]
