"""`shm` on GPU tensors: several workers on one GPU. Skips itself where there is none."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.bench.models import GPT2_124M, GPT_SMALL, GptModel, GptShape, draw_tokens, loss_of
from lockstep.comm.tree_order import tree_pairs
from on_workers import on_workers, try_on_workers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = (0, 1, 5, 1000, 100_003, 3_000_001)


def tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    values = list(values)
    for dst, src in tree_pairs(len(values)):
        values[dst] = values[dst] + values[src]
    return values[0]


def everything(rank: int, size: int) -> list[str]:
    """Every collective against a plain reference; what differs is told."""
    torch.cuda.set_device(0)
    group: Any = dist.new_group(backend="shm")
    wrong: list[str] = []

    def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(f"{what}: {got.flatten()[:4].tolist()} is not {want.flatten()[:4].tolist()}")

    for numel in SIZES:
        generator = torch.Generator("cuda").manual_seed(numel)
        all_ = [torch.randn(numel, device="cuda", generator=generator) for _ in range(size)]
        mine, total = all_[rank], tree_sum(all_)
        x = mine.clone()
        dist.all_reduce(x, group=group)
        check(f"all_reduce {numel}", x, total)
        x = torch.stack([mine, mine], 1)[:, 0]  # not contiguous
        dist.all_reduce(x, group=group)
        check(f"all_reduce strided {numel}", x, total)
        x = mine.clone()
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
        check(f"all_reduce avg {numel}", x, total / size)
        x = mine.clone()
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        check(f"all_reduce max {numel}", x, torch.stack(all_).amax(0) if numel else x)
        x = mine.bfloat16()
        dist.all_reduce(x, group=group)
        check(f"all_reduce bf16 {numel}", x, tree_sum([a.bfloat16().float() for a in all_]).bfloat16())
        for root in range(size):
            x = mine.clone()
            dist.broadcast(x, root, group=group)
            check(f"broadcast {numel} from {root}", x, all_[root])
            x = mine.clone()
            dist.reduce(x, root, group=group)
            check(f"reduce {numel} to {root}", x, total if rank == root else mine)
        outs = [torch.empty(numel, device="cuda") for _ in range(size)]
        dist.all_gather(outs, mine, group=group)
        check(f"all_gather {numel}", torch.cat(outs), torch.cat(all_))
        out = torch.empty(numel * size, device="cuda")
        dist.all_gather_into_tensor(out, mine, group=group)
        check(f"all_gather_into_tensor {numel}", out, torch.cat(all_))
        rolled = [torch.cat([all_[(i + j) % size] for j in range(size)]) for i in range(size)]
        own = [r[rank * numel : (rank + 1) * numel] for r in rolled]
        out = torch.empty(numel, device="cuda")
        dist.reduce_scatter_tensor(out, rolled[rank], group=group)
        check(f"reduce_scatter {numel}", out, tree_sum(own))
        out = torch.empty(numel * size, device="cuda")
        dist.all_to_all_single(out, rolled[rank], group=group)
        check(f"all_to_all {numel}", out, torch.cat(own))
        lists = [torch.full((numel,), float(i), device="cuda") for i in range(size)] if rank == 0 else None
        out = torch.empty(numel, device="cuda")
        dist.scatter(out, lists, 0, group=group)
        check(f"scatter {numel}", out, torch.full_like(out, rank))
        gathered = [torch.empty(numel, device="cuda") for _ in range(size)] if rank == 0 else None
        dist.gather(mine, gathered, 0, group=group)
        if gathered is not None:
            check(f"gather {numel}", torch.cat(gathered), torch.cat(all_))
    generator = torch.Generator("cuda").manual_seed(5)
    many = [
        torch.randn(size, i * i * i, device="cuda", generator=generator) for i in range(150)
    ]  # 0 to 13 MiB, in several batches
    roots = [i * 7 % size for i in range(len(many))]
    received = [rows[rank].clone() for rows in many]
    broadcast = group.prepare_broadcasts(received, roots)
    broadcast().wait()
    for i, (got, rows, root) in enumerate(zip(received, many, roots, strict=True)):
        check(f"broadcast {i} of many", got, rows[root])
        got += 1
    broadcast().wait()
    for i, (got, rows, root) in enumerate(zip(received, many, roots, strict=True)):
        check(f"broadcast {i} of many, once more", got, rows[root] + 1)
    if size > 1:
        there, back = torch.full((1000,), float(rank), device="cuda"), torch.empty(1000, device="cuda")
        sent = dist.isend(there, (rank + 1) % size, group=group)
        dist.irecv(back, (rank - 1) % size, group=group).wait()
        sent.wait()
        check("send and receive", back, torch.full_like(back, (rank - 1) % size))
    return wrong


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_collective(workers: int) -> None:
    assert on_workers(everything, workers) == [[] for _ in range(workers)]


def streams(rank: int, size: int) -> list[str]:
    """What is queued before a collective is in it, what is queued after sees it, whatever the streams."""
    torch.cuda.set_device(0)
    group = dist.new_group(backend="shm")
    wrong = []
    side = torch.cuda.Stream()
    for i in range(20):
        x = torch.zeros(1_000_000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # the kernel below comes late
            x += rank + 1 + i
            work = dist.all_reduce(x, group=group, async_op=True)
            work.wait()
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        want = 2.0 * sum(r + 1 + i for r in range(size))
        if not bool((y == want).all()):
            wrong.append(f"round {i}: {y[0].item()} is not {want}")
    # Many under way at once, waited for in another order.
    tensors = [torch.full((100_000,), float(rank + i), device="cuda") for i in range(30)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    for i, t in enumerate(tensors):
        if not bool((t == sum(r + i for r in range(size))).all()):
            wrong.append(f"tensor {i} of many: {t[0].item()}")
    # An unrelated stream that is busy is not waited for.
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(3_000_000_000)
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x, group=group)
    torch.cuda.current_stream().synchronize()
    if busy.query():
        wrong.append("the whole device was waited for")
    return wrong


def test_streams() -> None:
    assert on_workers(streams, 2) == [[], []]


def memory_comes_and_goes(rank: int, size: int) -> list[str]:
    """Addresses are used again for other memory; the peers must not see the old."""
    torch.cuda.set_device(0)
    group = dist.new_group(backend="shm")
    wrong = []
    for i in range(40):
        x = torch.full(((1 + i % 5) * 3_000_000,), float(rank + i), device="cuda")
        dist.all_reduce(x, group=group)
        want = float(sum(r + i for r in range(size)))
        if not bool((x == want).all()):
            wrong.append(f"{i}: {x[0].item()} is not {want}")
        del x
        if i % 3 == 0:
            torch.cuda.empty_cache()
    return wrong


def test_memory_comes_and_goes() -> None:
    assert on_workers(memory_comes_and_goes, 2) == [[], []]


def broadcast_many(rank: int, size: int) -> list[str]:
    """More allocations than a worker maps at a time; most of them are freed, and others made, between two calls."""
    torch.cuda.set_device(0)
    group: Any = dist.new_group(backend="shm")
    wrong = []
    for round_ in range(3):
        many = [torch.full((3_000_000 + i,), float(rank + i + round_), device="cuda") for i in range(300)]
        broadcast = group.prepare_broadcasts(many, [i % size for i in range(300)])
        broadcast().wait()
        broadcast().wait()
        wrong += [f"{round_}: {i}" for i, x in enumerate(many) if not bool((x == i % size + i + round_).all())]
        del many, broadcast
        if round_ == 1:
            torch.cuda.empty_cache()
    return wrong


def test_many_tensors_are_broadcast_at_once() -> None:
    assert on_workers(broadcast_many, 3) == [[], [], []]


def unshareable(rank: int, size: int) -> list[str]:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return everything(rank, size) + memory_comes_and_goes(rank, size)


def test_memory_that_cannot_be_shared() -> None:
    assert on_workers(unshareable, 2) == [[], []]


def train(rank: int, size: int, kind: str, backend: str) -> list[list[float]]:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    group: Any = dist.new_group(backend=backend)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    ).cuda()
    wrapper = lockstep.DistributedDataParallel if kind == "ours" else torch.nn.parallel.DistributedDataParallel
    wrapped = wrapper(model, process_group=group, bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(8):
        x = torch.randn(32, 64, device="cuda", generator=generator).chunk(size)[rank]
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_training_gives_the_same_weights_as_on_gloo(kind: str) -> None:
    on_gloo = on_workers(train, 2, kind, "gloo")
    on_shm = on_workers(train, 2, kind, "shm")
    assert on_shm == on_gloo


def train_gpt(rank: int, size: int, shape: GptShape, steps: int) -> list[list[float]]:
    """Plain fp32, the same global batches on any number of workers. Returns some of each parameter's elements."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = GptModel(shape).cuda()
    group: Any = dist.new_group(backend="shm")
    wrapped = lockstep.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = draw_tokens(generator, rows=8, length=64, vocabulary=shape.vocabulary)
        inputs, targets = (t.chunk(size)[rank].cuda() for t in (batch.inputs, batch.targets))
        optimizer.zero_grad()
        loss_of(wrapped(inputs), targets).backward()
        optimizer.step()
    flat = [p.detach().flatten() for p in model.parameters()]
    return [p[:: max(1, p.numel() // 100)].tolist() for p in flat]


@pytest.mark.parametrize("shape", [GPT_SMALL, GPT2_124M], ids=["small", "124M"])
def test_a_gpt_has_the_same_weights_on_1_2_and_4_workers(shape: GptShape) -> None:
    outcomes = [on_workers(train_gpt, workers, shape, 10) for workers in (1, 2, 4)]
    for of_workers in outcomes:
        assert all(one == of_workers[0] for one in of_workers), "replicas differ"
        for ours, alone in zip(of_workers[0], outcomes[0][0], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(alone), rtol=1e-4, atol=1e-6)


def queue_weights(rank: int, size: int) -> list[str]:
    """Broadcasts that only streams wait for: the bits are right, and no host waits."""
    torch.cuda.set_device(0)
    group: Any = dist.new_group(backend="shm")
    wrong, weights = [], [torch.zeros(300_000 + i, device="cuda") for i in range(300)]
    broadcast = group.prepare_broadcasts(weights, [i % size for i in range(300)])
    busy = torch.zeros(4_000_000, device="cuda")
    side = torch.cuda.Stream()
    for step in range(30):
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(20_000_000 if step % 3 == rank else 0)  # one of them is late
            for i, one in enumerate(weights):
                if i % size == rank:
                    one += step + rank
            works = [dist.all_reduce(busy, group=group, async_op=True) for _ in range(4 if step % 5 == 0 else 0)]
            began_s = time.perf_counter()
            broadcast(queues=True).wait()
            took_s = time.perf_counter() - began_s
            for work in works:
                work.wait()
            least, most = (torch.stack([pick(one) for one in weights]) for pick in (torch.amin, torch.amax))
        torch.cuda.current_stream().wait_stream(side)
        side.wait_stream(torch.cuda.current_stream())
        if step == 29 and took_s > 0.008:
            wrong.append(f"the call took {took_s} s")
        want = [sum(s + i % size for s in range(step + 1)) for i in range(300)]
        if least.tolist() != want or most.tolist() != want:
            wrong.append(f"step {step}: {least[:4].tolist()} to {most[:4].tolist()} is not {want[:4]}")
    return wrong


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_weights_that_only_streams_wait_for(workers: int) -> None:
    assert on_workers(queue_weights, workers) == [[] for _ in range(workers)]


def lose_a_worker(rank: int, size: int, lost: int, how: str, folder: str) -> None:
    """A worker dies, with its weights on their way: the others get its error before they can read theirs."""
    torch.cuda.set_device(0)
    group: Any = dist.new_group(backend="shm")
    weights = [torch.full((1_000_000,), float(rank), device="cuda") for _ in range(size)]
    broadcast = group.prepare_broadcasts(weights, list(range(size)))
    broadcast(queues=True).wait()
    torch.cuda.synchronize()
    if rank == lost:
        torch.cuda._sleep(20_000_000_000)
        broadcast(queues=True).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    began_s, read, outcome = time.monotonic(), list[float](), "no error"
    try:
        broadcast(queues=True).wait()
        if how == "reads":
            read = [one[0].item() for one in weights]  # blocked in CUDA
        while time.monotonic() < began_s + 10:
            time.sleep(0.01)
    except lockstep.errors.PeerLostError as error:
        outcome = f"rank {error.rank}, {read} was read, in time: {time.monotonic() < began_s + 3}"
    torch.cuda.synchronize()  # the streams continue
    group.shutdown()
    (Path(folder) / str(rank)).write_text(outcome)


@pytest.mark.parametrize("how", ["reads", "computes"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_that_dies_with_weights_on_their_way(lost: int, how: str, tmp_path: Path) -> None:
    try_on_workers(lose_a_worker, 3, lost, how, str(tmp_path))
    outcomes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert outcomes == {str(r): f"rank {lost}, [] was read, in time: True" for r in range(3) if r != lost}
