"""`hierarchy` on GPU tensors: shared memory inside a host, NCCL between hosts. Skips itself where there is no GPU.

All workers are on one GPU. NCCL refuses that on one host, but they tell it that they are on several (LOCKSTEP_HOST).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.comm.hierarchy import HierarchicalGroup, HierarchyOptions
from lockstep.comm.pipelined_collectives import PipelinedCollectives, StagedCollectives
from on_workers import on_workers
from plain import KINDS, reduced, same_bits, some

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = (1, 7, 8193, 100_003, 3_000_001)
WAIT = timedelta(seconds=60)


def join(rank: int, hosts: str, **options: Any) -> Any:
    os.environ["LOCKSTEP_HOST"] = hosts[rank]
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)
    store = dist.PrefixStore("hierarchy", dist.distributed_c10d._get_default_store())
    return HierarchicalGroup(store, rank, len(hosts), WAIT, options=HierarchyOptions(**options))


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return some(dtype, numel, seed=rank)


def reduce_options(kind: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(kind)
    return options


def everything(rank: int, size: int, hosts: str, exact: bool) -> str:
    group = join(rank, hosts, exact=exact)
    for dtype, kind in (
        (torch.float32, KINDS.SUM),
        (torch.float32, KINDS.AVG),
        (torch.bfloat16, KINDS.SUM),
        (torch.float64, KINDS.MAX),
        (torch.int32, KINDS.BXOR),
    ):
        for numel in SIZES:
            tensor = values(rank, numel, dtype).cuda()
            group.allreduce([tensor], reduce_options(kind)).wait()
            right = reduced(kind, [values(r, numel, dtype) for r in range(size)])
            rough = 5e-2 if dtype == torch.bfloat16 else 1e-5
            alike = same_bits(tensor.cpu(), right) if exact else torch.allclose(tensor.cpu(), right, rough, rough)
            assert alike, f"{kind} of {numel} {dtype}: {tensor[:4]} is not {right[:4]}"
    for numel in SIZES:
        everyone = torch.stack([values(r, numel) for r in range(size)]).cuda()
        for root in range(size):
            options, tensor = dist.BroadcastOptions(), everyone[rank].clone()
            options.rootRank = root
            group.broadcast([tensor], options).wait()
            assert torch.equal(tensor, everyone[root])
        whole, mine = torch.empty_like(everyone), torch.empty(numel, device="cuda")
        group._allgather_base(whole, everyone[rank]).wait()
        assert torch.equal(whole, everyone)
        group._reduce_scatter_base(mine, everyone * (rank + 1)).wait()
        assert torch.allclose(mine, everyone[rank] * (size * (size + 1) / 2))
    assert isinstance(group._on_gpu, (PipelinedCollectives, StagedCollectives))
    sort = type(group._on_gpu).__name__
    torch.cuda.synchronize()
    group.barrier().wait()
    group.shutdown()
    return sort


@pytest.mark.parametrize(("hosts", "exact"), [("aabb", True), ("aabb", False), ("aab", False), ("ab", True)])
def test_every_collective(hosts, exact):
    assert set(on_workers(everything, len(hosts), hosts, exact)) == {"PipelinedCollectives"}


def refuse(*args: Any, **options: Any) -> None:
    raise RuntimeError("no shared memory today")


def through_host_memory(rank: int, size: int) -> str:
    group = join(rank, "aabb", local=refuse)
    tensor = torch.ones(300_001, device="cuda")
    group.allreduce([tensor]).wait()
    assert bool((tensor == size).all())
    group.shutdown()
    return type(group._on_gpu).__name__


def test_without_shared_memory_it_goes_through_host_memory():
    assert on_workers(through_host_memory, 4) == ["StagedCollectives"] * 4


def follow_streams(rank: int, size: int) -> bool:
    """What is queued before a collective counts, and what is queued after it sees its result."""
    group = join(rank, "aabb")
    busy = torch.randn(4096, 4096, device="cuda")
    right = True
    for step in range(10):
        tensor = torch.zeros(2_000_003, device="cuda")
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        tensor += step + busy[0, 0] * 0  # after all of that
        works = [group.allreduce([tensor]) for _ in range(3)]
        for work in works:
            work.wait()
        doubled = tensor * 2
        del tensor
        torch.empty(2_000_003, device="cuda").fill_(-1)  # in the same memory, if it were free too early
        right = right and bool((doubled == 2 * step * size**3).all())
    future = group.allreduce([again := torch.ones(100_000, device="cuda")]).get_future()
    right = right and bool((future.then(lambda done: done.value()[0] * 2).wait() == 2 * size).all())
    right = right and bool((again == size).all())
    torch.cuda.synchronize()
    group.barrier().wait()
    group.shutdown()
    return right


def test_collectives_are_ordered_on_streams():
    assert all(on_workers(follow_streams, 4))


def train(rank: int, size: int, sort: str) -> tuple[bytes, bool]:
    join(rank, "aabb").shutdown()  # sets the environment
    found = []
    for group in (dist.new_group(backend="hierarchy", timeout=WAIT), dist.group.WORLD):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(256, 1000), nn.ReLU(), nn.Linear(1000, 256)).cuda()
        wrap = nn.parallel.DistributedDataParallel if sort == "torch" else lockstep.DistributedDataParallel
        model = wrap(model, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(16, 256, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu())
    torch.cuda.synchronize()
    return found[0].numpy().tobytes(), torch.allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize("sort", ["torch", "ours"])
def test_training_gives_what_it_gives_on_gloo(sort):
    results = on_workers(train, 4, sort)
    assert len({weights for weights, _ in results}) == 1
    assert all(near for _, near in results)


def beside_nccl(rank: int, size: int) -> tuple[str, int]:
    """Torch gives us the whole of "cpu:hierarchy,cuda:nccl", and tells us later that GPU tensors are NCCL's."""
    os.environ["LOCKSTEP_HOST"] = "ab"[rank]
    os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_HOSTID"] = "lo", "ab"[rank]
    torch.cuda.set_device(0)
    group: Any = dist.new_group(backend="cpu:hierarchy,cuda:nccl", timeout=WAIT)
    for device in ("cuda", "cpu", "cuda"):
        dist.all_reduce(tensor := torch.ones(50_000, device=device), group=group)
        whole = torch.empty(100_000, device=device)
        dist.all_gather_into_tensor(whole, tensor, group=group)
        assert bool((whole == 2).all())
    dist.send(tensor, 1, group=group) if rank == 0 else dist.recv(tensor, 0, group=group)
    torch.cuda.synchronize()
    calls = group._calls
    dist.destroy_process_group(group)
    return type(group).__name__, calls


def test_beside_nccl_it_has_the_tensors_of_the_cpu_only():
    assert on_workers(beside_nccl, 2) == [("HierarchicalGroup", 2)] * 2
