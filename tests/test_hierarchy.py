"""`hierarchy`: several hosts, with real workers. That they are hosts is what LOCKSTEP_HOST tells them."""

from __future__ import annotations

import hashlib
import itertools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lockstep
from lockstep.comm.hierarchy import HierarchicalGroup, HierarchyOptions
from lockstep.comm.host_groups import MAX_CHUNK_BYTES, MIN_PIECE_BYTES, chunk_bytes, group_by_host, split_range
from lockstep.comm.pipelined_collectives import SMALL_BYTES
from lockstep.comm.shard_sum import ShardSum
from lockstep.comm.shm import ShmGroup
from lockstep.process_identity import identify_host
from on_workers import WorkerFailedError, on_workers
from plain import FACTOR, FLOATS, INTEGERS, KINDS, NARROW, kinds_of, reduced, same_bits, some

EVEN, MIXED, UNEVEN, SINGLE, APART = "aabb", "abab", "aab", "aa", "ab"
ALL_LAYOUTS = (EVEN, MIXED, UNEVEN, SINGLE, APART)
# Small ones, ones that no number of workers divides, and ones that are cut into chunks.
SIZES = (1, 7, SMALL_BYTES // 8, SMALL_BYTES // 8 + 1, 600_011)
ALL_DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
WAIT = timedelta(seconds=20)

make_premul_sum = torch._C._distributed_c10d._make_nccl_premul_sum


def join(rank: int, hosts: str, **options: Any) -> Any:
    """A group over these hosts; the letter says which host a rank is on."""
    os.environ["LOCKSTEP_HOST"] = hosts[rank]
    store = dist.PrefixStore("hierarchy", dist.distributed_c10d._get_default_store())
    return HierarchicalGroup(store, rank, len(hosts), WAIT, options=HierarchyOptions(**options))


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return some(dtype, numel, seed=rank)


def reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


# ---- pure ------------------------------------------------------------------------------------------------------------


def test_layout_of_hosts_with_different_numbers_of_workers():
    layout = group_by_host(["x", "y", "x", "x", "y"], rank=3)
    assert layout.hosts == ((0, 2, 3), (1, 4))
    assert (layout.host, layout.local_rank, layout.local_ranks) == (0, 2, (0, 2, 3))
    assert (layout.num_columns, layout.has_column, layout.is_even) == (2, False, False)
    assert group_by_host(["x", "y", "x", "x", "y"], rank=4).column == (2, 4)
    assert layout.host_of(4) == 1


def test_every_worker_sees_the_same_hosts_and_is_in_one_column():
    for identities in itertools.product("xyz", repeat=5):
        layouts = [group_by_host(identities, rank) for rank in range(5)]
        assert len({layout.hosts for layout in layouts}) == 1
        columns = {layout.column for layout in layouts if layout.has_column}
        assert len(columns) == layouts[0].num_columns
        for layout in layouts:
            assert layout.local_ranks[layout.local_rank] == layout.rank
            if layout.has_column:
                assert layout.column[layout.host] == layout.rank


@pytest.mark.parametrize("pieces", [1, 4, 64, 1000])
def test_chunks_are_neither_tiny_nor_huge_and_cover_everything(pieces):
    for message in (1, 10_000, 2**20, 25 * 2**20, 2**31):
        size = chunk_bytes(message, pieces)
        assert MIN_PIECE_BYTES * pieces <= size <= max(MAX_CHUNK_BYTES, MIN_PIECE_BYTES * pieces)
    spans = list(split_range(1003, 100))
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(1003))


def test_identity_is_the_kernel_and_its_network_unless_overridden():
    assert identify_host({"LOCKSTEP_HOST": " node7 "}) == "node7"
    assert identify_host({}) == identify_host({"LOCKSTEP_HOST": " "})
    assert os.readlink("/proc/self/ns/net") in identify_host({})


# ---- results ---------------------------------------------------------------------------------------------------------


def reduce_everything(rank: int, size: int, hosts: str, exact: bool) -> list[str]:
    """Checks every reduction of every dtype; returns fingerprints of the results."""
    group, digests = join(rank, hosts, exact=exact), []
    large = [(torch.float32, SIZES[-1]), (torch.bfloat16, SIZES[-1])]
    for dtype, numel in [*itertools.product(ALL_DTYPES, SIZES[:-1]), *large]:
        for kind in kinds_of(dtype):
            tensor = values(rank, numel, dtype)
            op = make_premul_sum(FACTOR) if kind == KINDS.PREMUL_SUM else ReduceOp(kind)
            group.allreduce([tensor], reduce_options(op)).wait()
            right = reduced(kind, [values(r, numel, dtype) for r in range(size)])
            alike = same_bits if exact or dtype in INTEGERS else near
            assert alike(tensor, right), f"{kind} of {numel} {dtype}: {tensor[:4]} is not {right[:4]}"
            digests.append(hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest())
    group.shutdown()
    return digests


def near(one: Tensor, other: Tensor) -> bool:
    rough = 5e-2 if one.dtype in NARROW else 1e-5
    return torch.allclose(one, other, rtol=rough, atol=rough)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aabb", *(pytest.param(one, marks=pytest.mark.slow) for one in ("abcd", "aaaa"))])
def test_an_exact_reduction_has_the_bits_of_one_tree_over_all_workers(hosts):
    on_workers(reduce_everything, len(hosts), hosts, True)


@pytest.mark.parametrize("hosts", [UNEVEN, *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in (EVEN, MIXED))])
def test_every_reduction_and_dtype_with_the_same_bits_everywhere(hosts):
    digests = on_workers(reduce_everything, len(hosts), hosts, False)
    assert all(other == digests[0] for other in digests)


def add_shards(rank: int, size: int, hosts: str) -> str:
    """Checks the sum of one shard of each worker; returns how it was computed."""
    os.environ["LOCKSTEP_HOST"] = hosts[rank]
    sum_ = ShardSum(
        dist.new_group(backend="hierarchy", timeout=WAIT),
        [range(r, r + 1) for r in range(size)],
        device=torch.device("cpu"),
    )
    for dtype in (torch.float32, torch.bfloat16):
        buffers = sum_.allocate(SIZES[-1], dtype)
        buffers.rows[0, : SIZES[-1]].copy_(values(rank, SIZES[-1], dtype))
        sum_.start(buffers, lambda: 1.0)
        total = sum_.result(buffers, "a sum")
        right = reduced(KINDS.SUM, [values(r, SIZES[-1], dtype).float() for r in range(size)]).to(dtype)
        assert same_bits(total.clone(), right)
    sum_.close()
    return sum_._method.name


@pytest.mark.parametrize(
    ("hosts", "method"),
    [(EVEN, "ALL_REDUCE"), *(pytest.param(hosts, "TREE", marks=pytest.mark.slow) for hosts in (MIXED, "abc", "aaab"))],
)
def test_gradients_of_hosts_alike_are_added_inside_each_host_first(hosts, method):
    assert set(on_workers(add_shards, len(hosts), hosts)) == {method}


def move_everything(rank: int, size: int, hosts: str) -> None:
    group = join(rank, hosts)
    for numel in SIZES:
        everyone = torch.stack([values(r, numel) for r in range(size)])
        for root in range(size):
            options, tensor = dist.BroadcastOptions(), values(rank, numel)
            options.rootRank = root
            group.broadcast([tensor], options).wait()
            assert torch.equal(tensor, everyone[root])
        whole = torch.empty(size, numel)
        group._allgather_base(whole, values(rank, numel)).wait()
        assert torch.equal(whole, everyone)
        rows = [torch.empty(numel) for _ in range(size)]
        group.allgather([rows], [values(rank, numel)]).wait()
        assert torch.equal(torch.stack(rows), everyone)
        mine = torch.empty(numel)
        group._reduce_scatter_base(mine, everyone * (rank + 1)).wait()
        assert torch.allclose(mine, everyone[rank] * (size * (size + 1) / 2))
        group.reduce_scatter([mine], [list(everyone)]).wait()
        assert torch.allclose(mine, everyone[rank] * size)
    group.shutdown()


@pytest.mark.few(2)
@pytest.mark.parametrize("hosts", ALL_LAYOUTS)
def test_what_is_moved_arrives(hosts):
    on_workers(move_everything, len(hosts), hosts)


def call_through_torch(rank: int, size: int, hosts: str) -> None:
    os.environ["LOCKSTEP_HOST"] = hosts[rank]
    group = dist.new_group(backend="hierarchy", timeout=WAIT)
    assert dist.get_backend(group) == "hierarchy"
    strided = torch.ones(40_000, 2)[:, rank % 2]  # every second element
    dist.all_reduce(strided, group=group)
    assert (strided == size).all()
    dist.all_reduce(empty := torch.empty(0), group=group)
    assert empty.numel() == 0
    numbers = torch.full((3,), 1 + 1j)
    dist.all_reduce(numbers, group=group)
    assert (numbers == size * (1 + 1j)).all()
    group.allreduce_coalesced(pair := [torch.ones(3), torch.ones(50_000)]).wait()
    assert all((t == size).all() for t in pair)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(size)]
    dist.broadcast_object_list(told := [rank], src=1, group=group)
    assert told == [1]
    # the flat way
    rows = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), rows, group=group)
    assert rows is None or [r[0].item() for r in rows] == list(range(size))
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.full((size,), float(rank)), group=group)
    assert out.tolist() == list(range(size))
    dist.reduce(total := torch.full((3,), 2.0 * rank), dst=1, op=ReduceOp.AVG, group=group)
    assert (total == (size - 1 if rank == 1 else 2 * rank)).all()
    if rank == 0:
        dist.send(torch.arange(3), dst=size - 1, group=group)
    elif rank == size - 1:
        dist.recv(got := torch.empty(3, dtype=torch.int64), src=0, group=group)
        assert got.tolist() == [0, 1, 2]
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse, group=group)
    assert sparse.to_dense().tolist() == [1.0] * size
    dist.barrier(group=group)
    dist.monitored_barrier(group=group, timeout=WAIT)
    few = dist.new_group([0, 1], backend="hierarchy", timeout=WAIT)
    if rank < 2:
        dist.all_reduce(two := torch.ones(5), group=few)
        assert (two == 2).all()
        dist.destroy_process_group(few)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN])
def test_torch_distributed_works_on_it(hosts):
    on_workers(call_through_torch, len(hosts), hosts)


def run_ahead(rank: int, size: int, hosts: str) -> list[float]:
    group = join(rank, hosts)
    works, tensors = [], []
    for number in range(30):
        numel = SIZES[number % len(SIZES)]
        tensors.append(torch.full((numel,), float(number)))
        works.append(group.allreduce([tensors[-1]]))
    futures = [work.get_future() for work in works[::3]]
    for future in futures:
        future.wait()
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    group.shutdown()
    return [tensor.unique().item() for tensor in tensors]


def test_many_in_flight_end_in_order():
    for found in on_workers(run_ahead, 4, EVEN):
        assert found == [4.0 * number for number in range(30)]


def without_shared_memory(rank: int, size: int) -> float:
    def refuse(*args: Any, **options: Any) -> None:
        if rank == 1:
            raise RuntimeError("no shared memory today")
        raise RuntimeError("nor here")

    group = join(rank, EVEN, local=refuse)
    assert not group.supports_tensor_alloc(torch.device("cpu"))
    tensor = torch.ones(300_001)
    group.allreduce([tensor]).wait()
    group.shutdown()
    return float(tensor.unique())


def test_without_shared_memory_it_still_works():
    assert on_workers(without_shared_memory, 4) == [4.0] * 4


def bucket_memory(rank: int, size: int) -> float:
    group = join(rank, EVEN)
    cpu = torch.device("cpu")
    assert group.supports_tensor_alloc(cpu)
    bucket = group.allocate_tensor(700_001, dtype=torch.float32, device=cpu)
    bucket.fill_(rank)
    group.allreduce([bucket]).wait()
    found = float(bucket.unique())
    group.shutdown()
    return found


def test_the_group_gives_memory_for_buckets():
    assert on_workers(bucket_memory, 4) == [6.0] * 4


def disagree(rank: int, size: int) -> None:
    join(rank, APART, exact=rank == 1)


def test_workers_must_agree_on_exactness():
    with pytest.raises(WorkerFailedError, match=r"exact=True.*exact=False.*LOCKSTEP_EXACT"):
        on_workers(disagree, 2)


def wrong_arguments(rank: int, size: int) -> None:
    group = join(rank, APART)
    with pytest.raises(ValueError, match="is not 2 times"):
        group._allgather_base(torch.empty(3), torch.empty(2))
    with pytest.raises(RuntimeError, match=r"BAND.*float32"):
        group.allreduce([torch.ones(2)], reduce_options(ReduceOp.BAND))
    group.allreduce([tensor := torch.ones(2)]).wait()  # nothing was sent, so nothing is broken
    assert tensor.tolist() == [2, 2]
    group.shutdown()


def test_wrong_arguments_are_refused_before_anything_is_sent():
    on_workers(wrong_arguments, 2)


# ---- training --------------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 4))


def train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def weights_after(rank: int, group: Any, sort: str) -> Tensor:
    model = net()
    if sort == "fsdp":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        train(model, rank)
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    wrap = nn.parallel.DistributedDataParallel if sort == "torch" else lockstep.DistributedDataParallel
    model = wrap(model, process_group=group)
    train(model, rank)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_twice(rank: int, size: int, hosts: str, sort: str) -> tuple[bytes, bytes]:
    """The weights on the hierarchy, and on Gloo."""
    os.environ["LOCKSTEP_HOST"] = hosts[rank]
    groups = dist.new_group(backend="hierarchy", timeout=WAIT), dist.group.WORLD
    here, on_gloo = [weights_after(rank, group, sort) for group in groups]
    assert torch.allclose(here, on_gloo, atol=1e-6)
    return here.numpy().tobytes(), on_gloo.numpy().tobytes()


@pytest.mark.few(1)
@pytest.mark.parametrize("sort", ["torch", "ours", "fsdp"])
@pytest.mark.parametrize("hosts", [EVEN, UNEVEN])
def test_training_gives_what_it_gives_on_gloo(hosts, sort):
    assert len({here for here, _ in on_workers(train_twice, len(hosts), hosts, sort)}) == 1


def test_on_two_workers_training_has_the_bits_it_has_on_gloo():
    assert all(here == on_gloo for here, on_gloo in on_workers(train_twice, 2, APART, "ours"))


def beside_gloo(rank: int, size: int) -> str:
    """Torch gives us the whole group and tells us later that CPU tensors are Gloo's."""
    os.environ["LOCKSTEP_HOST"] = APART[rank]
    group: Any = dist.new_group(backend="cpu:gloo,cuda:hierarchy", timeout=WAIT)
    before = group._calls
    dist.all_reduce(tensor := torch.ones(50_000), group=group)
    dist.broadcast(tensor, 0, group=group)
    assert (tensor == 2).all()
    assert group._calls == before
    dist.destroy_process_group(group)
    return type(group).__name__


def test_beside_another_backend_it_leaves_that_one_its_devices():
    assert on_workers(beside_gloo, 2) == ["HierarchicalGroup"] * 2


@pytest.mark.parametrize("group", [HierarchicalGroup, ShmGroup])
def test_no_collective_runs_by_a_method_of_torch_that_holds_the_interpreter_lock(group):
    """See Note [Interpreter lock] in comm/fallback_group.py."""
    returns = {name: (getattr(dist.ProcessGroup, name).__doc__ or "") for name in dir(dist.ProcessGroup)}
    collectives = {name for name, text in returns.items() if "-> c10d::Work" in text}
    assert len(collectives) >= 18
    own = {name for one in group.__mro__ if one.__module__.startswith("lockstep.") for name in vars(one)}
    assert collectives - own - {"_end_coalescing"} == set()  # which calls no backend that would coalesce
