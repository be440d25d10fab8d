"""Measures sums of gradients between the workers of this start, as `Run` computes them, for `lockstep doctor --links`.

    lockstep run -n 2 -m lockstep.bench.links FILE

Every kind of sum is measured for several sizes; rank 0 writes FILE. A size takes as long as on the slowest worker. The
CPU time of a worker includes that of its threads: a sum behind the backward pass takes that time from it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.bench.workers import largest
from lockstep.comm.integer_codec import IntegerCodec
from lockstep.comm.shard_sum import ShardSum
from lockstep.ddp.replica import trained_leaves
from lockstep.step.shard_bucket import RoundedBucket, Rounding, ShardBucket
from lockstep.world.world import World

SIZES: Final = (1024, 256 * 2**10, 2 * 2**20, 8 * 2**20, 25 * 2**20)
ROW_S: Final = 0.25  # about how long a size is measured in a round
MAX_CALLS: Final = 30
ROUNDS: Final = 3
CODECS: Final = {"fp32": None, "int8": 8, "int4": 4}


def make_sum(world: World, size_bytes: int, bits: int | None) -> Callable[[], object]:
    """Return a function that sums a gradient of so many bytes over all workers, each of which has one shard."""
    group: Any = dist.group.WORLD
    leaves = trained_leaves(nn.ParameterList([nn.Parameter(torch.zeros(size_bytes // 4, device=world.device))]), set())
    shares = [range(rank, rank + 1) for rank in range(world.size)]
    sum_ = ShardSum(group, shares, device=world.device, compresses=bits is not None)
    if bits is None:
        plain = ShardBucket([0], leaves, sum_, None)

        def add() -> object:
            sum_.start(plain.buffers, lambda: 0.5)
            return plain.result("a sum")

        return add
    coded = RoundedBucket([0], leaves, sum_, Rounding(IntegerCodec(bits), lambda *words: 1), [0])
    coded.rows[0].normal_()

    def add_coded() -> object:
        coded.start(0, [world.rank], lambda: 0.5)
        return coded.result("a sum")

    return add_coded


def measure(world: World, size_bytes: int, bits: int | None) -> dict[str, float]:
    """Returns the median time of a call, its CPU time on this worker, and the spread of the rounds."""
    call = make_sum(world, size_bytes, bits)
    finish: Callable[[], None] = torch.cuda.synchronize if world.device.type == "cuda" else (lambda: None)
    for _ in range(2):
        call()
    finish()
    dist.barrier()
    began_s = time.perf_counter()
    call()
    finish()
    calls = max(2, min(MAX_CALLS, int(ROW_S / max(1e-6, largest(time.perf_counter() - began_s)))))
    rounds, cpu_s = [], 0.0
    for _ in range(ROUNDS):
        dist.barrier()
        cpu_before_s, began_s = time.process_time(), time.perf_counter()
        for _ in range(calls):
            call()
        finish()
        rounds.append(largest(time.perf_counter() - began_s) / calls)
        cpu_s += (time.process_time() - cpu_before_s) / calls / ROUNDS
    return {"bytes": size_bytes, "seconds": statistics.median(rounds), "cpu_s": cpu_s, "low_s": min(rounds)}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    world = lockstep.init()
    hosts = world.size // world.local_size
    found = []
    for name, bits in CODECS.items():
        points = [measure(world, size, bits) for size in SIZES if bits is None or size >= 256 * 2**10]
        where = {"backend": world.backend, "hosts": hosts, "workers_per_host": world.local_size, "grad_comm": name}
        found.append({**where, "device": world.device.type, "points": points})
    if world.rank == 0:
        facts = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        path.write_text(json.dumps({**facts, "sums": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
