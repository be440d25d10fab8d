"""Workers with unequal numbers of batches, in `with ddp.join():`; torch's class beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep import DistributedDataParallel as OurDDP
from on_workers import on_workers, try_on_workers
from programs import Mlp, digest


class WithNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def uneven(rank: int, size: int, wrapper: type, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(1)
    model = WithNorm() if options.get("norm") else Mlp()
    ddp = wrapper(model, bucket_cap_mb=0.002, find_unused_parameters=options.get("find_unused", False))
    if options.get("hook"):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp.register_comm_hook(None, allreduce_hook)
    optimizer: Any = (
        ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        if options.get("zero")
        else torch.optim.SGD(ddp.parameters(), lr=0.1)
    )
    joined = [ddp, optimizer] if options.get("zero") else [ddp]
    batches = options["batches"][rank]
    context = (
        Join(joined)
        if options.get("zero")
        else ddp.join(divide_by_initial_world_size=options.get("divide_by_initial", True))
    )
    seen = []
    with context:
        for step in range(batches):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            if options.get("no_sync") and step % 2 == 0:
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
                continue
            ddp(x).square().mean().backward()
            seen.append(digest({n: p.grad for n, p in ddp.named_parameters()}))
            optimizer.step()
    seen.append(digest(dict(ddp.named_parameters())))
    seen.append(int(ddp._authoritative_rank))
    return seen


CASES = {
    "one fewer": {"batches": [5, 4, 5]},
    "none at all": {"batches": [4, 0, 3]},
    "rank 0 leaves first": {"batches": [1, 5, 3]},
    "divide by those who are left": {"batches": [2, 5, 4], "divide_by_initial": False},
    "batch norm": {"batches": [2, 5, 4], "norm": True},
    "find unused": {"batches": [2, 5, 4], "find_unused": True},
    "communication hook": {"batches": [2, 5, 4], "hook": True},
    "no_sync": {"batches": [4, 8, 6], "no_sync": True},
    "zero redundancy optimizer": {"batches": [2, 5, 4], "zero": True},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_uneven_inputs(case: str) -> None:
    ours = on_workers(uneven, 3, OurDDP, CASES[case])
    assert ours == on_workers(uneven, 3, TorchDDP, CASES[case])
    assert len({tuple(seen[-2:]) for seen in ours}) == 1, "workers end with different weights"
    batches = CASES[case]["batches"]
    assert ours[0][-1] == max(r for r in range(3) if batches[r] == max(batches)), "weights of the last to finish"


def throws(rank: int, size: int) -> int:
    ddp = OurDDP(Mlp())
    done = 0
    try:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(3 + rank):
                ddp(torch.ones(2, 16)).sum().backward()
                done += 1
    except RuntimeError as error:
        assert "at least one rank having exhausted its inputs" in str(error).lower() or "exhausted" in str(error)
        return done
    return -1


def test_join_can_throw_when_the_first_worker_is_through() -> None:
    assert on_workers(throws, 2) == [3, 3]


def disabled(rank: int, size: int) -> bool:
    ddp = OurDDP(Mlp())
    with ddp.join(enable=False):
        for _ in range(3):
            ddp(torch.ones(2, 16)).sum().backward()
    return bool(ddp._get_ddp_logging_data().get("join_uneven_inputs", 0))


def test_join_can_be_switched_off() -> None:
    on_workers(disabled, 2)


def fewer_batches(rank: int, size: int) -> None:
    ddp = OurDDP(Mlp())
    for _ in range(3 - rank):
        ddp(torch.ones(2, 16)).sum().backward()
    if rank == 1:
        dist.barrier()


def test_without_join_a_worker_with_fewer_batches_is_named() -> None:
    outcomes = try_on_workers(with_short_patience, 2, timeout_s=150)
    assert "DesyncError: rank 0 waits in backward pass 3" in outcomes[0]
    assert "rank 1, after 2 backward passes, has called another collective" in outcomes[0]


def with_short_patience(rank: int, size: int) -> None:
    import os

    os.environ["LOCKSTEP_STALL_S"] = "2"
    fewer_batches(rank, size)
