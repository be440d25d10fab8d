"""How shm is called: works and futures, many at a time, groups, threads, functional collectives, kinds of tensors."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from checks import Checks
from lockstep.comm.shm import ShmGroup
from lockstep.errors import LockstepError, PeerLostError
from plain import KINDS, reduced, same_bits, some

CHECKS = Checks()
LONG = 500_000


def full(value: float, numel: int = 5) -> Tensor:
    return torch.full((numel,), float(value))


# ------------------------------------------------------------------------------------------------- works and futures


@CHECKS.workers(2, 3)
def futures_and_what_follows_them(rank: int, size: int, group: Any) -> None:
    total = sum(range(size))
    ours = full(rank)
    work = dist.all_reduce(ours, group=group, async_op=True)
    tenfold = work.get_future().then(lambda future: future.value()[0] * 10)
    assert tenfold.wait().eq(10 * total).all()
    assert work.result()[0] is ours
    work.wait()
    assert work.get_future().done(), "taken when all is over"


@CHECKS.workers(2)
def what_follows_may_wait_for_another_collective(rank: int, size: int, group: Any) -> None:
    """As communication hooks do: PowerSGD."""

    def reduce_again(future: Any) -> Tensor:
        total: Tensor = group.allreduce([future.value()[0].clone()]).get_future().wait()[0]
        return total

    twice, end_s = group.allreduce([full(rank)]).get_future().then(reduce_again), time.monotonic() + 5
    while not twice.done() and time.monotonic() < end_s:
        time.sleep(0.001)
    assert twice.done()
    assert twice.value().eq(2).all()


@CHECKS.workers(2)
def an_error_reaches_the_future(rank: int, size: int, group: Any) -> None:
    future = group.allreduce([full(1, 3 + rank)]).get_future()
    with pytest.raises(RuntimeError, match="all_reduce #1"):
        future.wait()


@CHECKS.workers(2)
def a_wait_with_a_timeout_ends_in_time_and_the_collective_goes_on(rank: int, size: int, group: Any) -> None:
    if rank == 1:
        time.sleep(1.5)
    work, began_s = dist.all_reduce(ours := full(rank), group=group, async_op=True), time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(seconds=0.2))
        assert 0.15 < time.monotonic() - began_s < 1.2
        assert not work.is_completed()
    work.wait()
    assert ours.eq(1).all()


@CHECKS.workers(2)
def a_work_that_is_not_waited_for_ends_too(rank: int, size: int, group: Any) -> None:
    works = [dist.all_reduce(full(rank, LONG), group=group, async_op=True) for _ in range(3)]
    end_s = time.monotonic() + 5
    while not all(work.is_completed() for work in works) and time.monotonic() < end_s:
        time.sleep(0.001)
    assert all(work.is_completed() for work in works)
    group._wait_for_pending_works()


@CHECKS.workers(2, 3)
def one_tensor_in_several_collectives_at_once(rank: int, size: int, group: Any) -> None:
    for numel in (5, LONG):
        tensor = full(1, numel)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(4)]
        works[-1].wait()
        assert tensor.eq(size**4).all()
        assert all(work.is_completed() for work in works)


@CHECKS.workers(2)
def a_work_that_is_over_keeps_no_memory(rank: int, size: int, group: Any) -> None:
    tensor = group.allocate_tensor(LONG, dtype=torch.float32, device=torch.device("cpu")).fill_(rank)
    at, gone = tensor.data_ptr(), weakref.ref(tensor)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert tensor.eq(1).all()
    del tensor, work
    gc.collect()
    assert gone() is None
    assert group.allocate_tensor(LONG, dtype=torch.float32, device=torch.device("cpu")).data_ptr() == at


# ---------------------------------------------------------------------------------------------------- several at once


@CHECKS.workers(2, 3)
def coalesced(rank: int, size: int, group: Any) -> None:
    """The manager with and without a device, synchronous or not, for all that torch can coalesce."""
    for device in (None, torch.device("cpu")):
        for numel in (8 * size, 100_000 * size):
            ours = [full(rank + i, numel) for i in range(3)]
            with dist._coalescing_manager(group, device, async_ops=True) as manager:
                for tensor in ours:
                    dist.all_reduce(tensor, group=group)
            manager.wait()
            totals = [sum(range(size)) + i * size for i in range(3)]
            assert [tensor.unique().tolist() for tensor in ours] == [[total] for total in totals]
            parts = [torch.empty(numel // size) for _ in ours]
            with dist._coalescing_manager(group, device):
                for out, tensor in zip(parts, ours, strict=True):
                    dist.reduce_scatter_tensor(out, tensor, group=group)
            assert [part.unique().tolist() for part in parts] == [[total * size] for total in totals]
            wholes = [torch.empty(numel) for _ in ours]
            with dist._coalescing_manager(group, device):
                for out, part in zip(wholes, parts, strict=True):
                    dist.all_gather_into_tensor(out, part + rank, group=group)
            for whole, total in zip(wholes, totals, strict=True):
                assert whole.view(size, -1)[:, 0].tolist() == [total * size + r for r in range(size)]
    mixed = [full(rank, 4), torch.tensor([rank]), torch.zeros(6)[::2] + rank]
    group.allreduce_coalesced(mixed).wait()
    assert [tensor[0].item() for tensor in mixed] == [sum(range(size))] * 3


@CHECKS.workers(2)
def two_groups_from_two_threads(rank: int, size: int, group: Any) -> None:
    another, wrong = dist.new_group(backend="shm"), []

    def reduce_again_and_again(group: Any, numel: int) -> None:
        for turn in range(60):
            tensor = full(rank + turn, numel)
            dist.all_reduce(tensor, group=group)
            if not tensor.eq(2 * turn + 1).all():
                wrong.append((numel, turn))

    threads = [threading.Thread(target=reduce_again_and_again, args=of) for of in ((group, 10), (another, 100_000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@CHECKS.workers(2)
def one_group_from_two_threads(rank: int, size: int, group: Any) -> None:
    """Collectives in one, messages in the other: as pipelines do."""
    wrong: list[int] = []

    def talk() -> None:
        for turn in range(100):
            got = full(0)
            dist.send(full(turn), group_dst=1 - rank, group=group)
            dist.recv(got, group_src=1 - rank, group=group)
            if not got.eq(turn).all():
                wrong.append(turn)

    thread = threading.Thread(target=talk)
    thread.start()
    for turn in range(100):
        tensor = full(rank + turn, 20_000)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(2 * turn + 1).all()
    thread.join(20)
    assert not thread.is_alive()
    assert wrong == []


# ------------------------------------------------------------------------------------------------------------ groups


@CHECKS.workers(3)
def subgroups(rank: int, size: int, group: Any) -> None:
    for ranks in ([0, 2], [2, 1], [1]):
        part: Any = dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=6))
        if rank not in ranks:
            assert part is dist.GroupMember.NON_GROUP_MEMBER
            continue
        members = dist.get_process_group_ranks(part)
        assert dist.get_group_rank(part, rank) == part.rank() == members.index(rank)
        assert (part.size(), part.name(), dist.get_backend(part)) == (len(ranks), "shm", "shm")
        tensor = full(rank)
        dist.all_reduce(tensor, group=part)
        assert tensor.eq(sum(ranks)).all()
        dist.broadcast(tensor.fill_(rank), src=ranks[-1], group=part)
        assert tensor.eq(ranks[-1]).all()
        dist.destroy_process_group(part)
        with pytest.raises(LockstepError, match="destroyed"):
            part.allreduce([tensor])


@CHECKS.workers(2)
def a_group_of_one(rank: int, size: int, group: Any) -> None:
    alone = ShmGroup(dist.HashStore(), 0, 1, timedelta(seconds=6))
    for numel in (0, 3, LONG):
        ours, out = full(7, numel), full(0, numel)
        for kind in (KINDS.SUM, KINDS.AVG, KINDS.MAX):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(kind)
            alone.allreduce([ours], options).wait()
        alone.broadcast([ours]).wait()
        for call in (
            lambda out, ours: alone.allgather([[out]], [ours]),
            lambda out, ours: alone.reduce_scatter([out], [[ours]]),
            lambda out, ours: alone.all_to_all_single(out, ours),
            lambda out, ours: alone.gather([[out]], [ours]),
            lambda out, ours: alone.scatter([out], [[ours]]),
        ):
            call(out.zero_(), ours).wait()
            assert torch.equal(out, full(7, numel))
        assert ours.eq(7).all()
    alone.barrier().wait()
    with pytest.raises(ValueError, match="rank 0 is not another worker of this group of 1"):
        alone.send([full(1)], 0, 0)
    alone.shutdown()


@CHECKS.workers(2)
def memory_of_a_group_in_another_and_after_its_end(rank: int, size: int, group: Any) -> None:
    other: Any = dist.new_group(backend="shm", timeout=timedelta(seconds=6))
    lent = other.allocate_tensor(LONG, dtype=torch.float32, device=torch.device("cpu")).fill_(rank)
    dist.all_reduce(lent, group=group)
    assert lent.eq(1).all()
    dist.destroy_process_group(other)
    del other
    gc.collect()
    dist.all_reduce(lent, group=group)
    assert lent.eq(2).all()


@CHECKS.workers(2)
def a_group_over_a_tcp_store(rank: int, size: int, group: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else None]
    dist.broadcast_object_list(port, src=0)
    store = store or dist.TCPStore("127.0.0.1", port[0], size, is_master=False)
    direct = ShmGroup(dist.PrefixStore("here", store), rank, size, timedelta(seconds=6))
    direct.allreduce([tensor := full(rank)]).wait()
    assert tensor.eq(1).all()
    dist.barrier()  # the store goes with rank 0


@CHECKS.workers(2, 3)
def a_barrier_holds_all_workers(rank: int, size: int, group: Any) -> None:
    for barrier in (dist.barrier, dist.monitored_barrier):
        time.sleep(0.05 * rank)
        came_s = time.monotonic()
        barrier(group=group)
        times: list[Any] = [None] * size
        dist.all_gather_object(times, (came_s, time.monotonic()))
        assert max(came for came, _ in times) <= min(went for _, went in times)


@CHECKS.workers(3)
def a_monitored_barrier_names_who_is_missing(rank: int, size: int, group: Any) -> None:
    if rank == 1:
        return
    with pytest.raises(PeerLostError, match=r"rank 1 \(pid \d+\).* monitored_barrier #1") as caught:
        dist.monitored_barrier(group=group, timeout=timedelta(seconds=0.3))
    assert caught.value.rank == 1


@CHECKS.workers(2, 3)
def objects(rank: int, size: int, group: Any) -> None:
    all_of_them: list[Any] = [None] * size
    dist.all_gather_object(all_of_them, {"rank": rank, "text": "x" * 1000 * rank}, group=group)
    assert [(o["rank"], len(o["text"])) for o in all_of_them] == [(r, 1000 * r) for r in range(size)]
    for root in range(size):
        listed = [rank, {"from": rank}]
        dist.broadcast_object_list(listed, group_src=root, group=group)
        assert listed == [root, {"from": root}]
        given: list[Any] = [None]
        dist.scatter_object_list(given, [f"for {r}" for r in range(size)], group_src=root, group=group)
        assert given == [f"for {rank}"]
        gathered = [None] * size if rank == root else None
        dist.gather_object((rank, root), gathered, group_dst=root, group=group)
        assert gathered == ([(r, root) for r in range(size)] if rank == root else None)
    if rank == 0:
        dist.send_object_list([{"a": [1, 2]}, None], group_dst=1, group=group)
    elif rank == 1:
        dist.recv_object_list(got := [None, 1], group_src=0, group=group)
        assert got == [{"a": [1, 2]}, None]


# ------------------------------------------------------------------------------------------------- kinds of tensors


@CHECKS.workers(2, 3)
def functional_collectives(rank: int, size: int, group: Any) -> None:
    every = [some(torch.float32, 4 * size, r) for r in range(size)]
    ours, total = every[rank], reduced(KINDS.SUM, every)
    before, mine = ours.clone(), slice(4 * rank, 4 * rank + 4)
    assert same_bits(functional.all_reduce(ours, "sum", group), total)
    assert same_bits(functional.all_reduce(ours, "avg", group), reduced(KINDS.AVG, every))
    assert same_bits(functional.all_gather_tensor(ours, 0, group), torch.cat(every))
    assert same_bits(functional.reduce_scatter_tensor(ours, "sum", 0, group), total[mine])
    assert same_bits(functional.all_to_all_single(ours, None, None, group), torch.cat([o[mine] for o in every]))
    assert same_bits(functional.broadcast(ours, size - 1, group), every[-1])
    assert same_bits(functional.permute_tensor(ours, [(r + 1) % size for r in range(size)], group), every[rank - 1])
    twice = functional.all_reduce_coalesced([ours, ours + 1], "max", group)
    assert same_bits(twice[1], reduced(KINDS.MAX, [o + 1 for o in every]))
    gathered = functional.all_gather_into_tensor_coalesced([ours, ours + 1], group)
    assert same_bits(gathered[1], torch.cat([o + 1 for o in every]))
    scattered = functional.reduce_scatter_tensor_coalesced([ours, ours], "sum", [0, 0], group)
    assert same_bits(scattered[1], total[mine])
    turning = torch.view_as_complex(ours.view(-1, 2))
    assert same_bits(functional.all_reduce(turning, "sum", group), torch.view_as_complex(total.view(-1, 2)))
    assert same_bits(ours, before)


@CHECKS.workers(2)
def tensors_of_inference_mode_and_of_autograd(rank: int, size: int, group: Any) -> None:
    for turn in range(5):
        with torch.inference_mode():
            frozen = full(rank + 1)
            dist.all_reduce(frozen, group=group)
        dist.all_reduce(ordinary := full(turn), group=group)
        assert ordinary.eq(2 * turn).all(), "as many elements, after one of inference mode"
    dist.broadcast(frozen, group_src=0, group=group)
    if rank == 0:
        dist.recv(torch.empty(0).set_(frozen)[::2], group_src=1, group=group)
    else:
        dist.send(full(3, 3), group_dst=0, group=group)
    assert frozen.tolist() == [3] * 5
    parameter = torch.nn.Parameter(full(rank + 1, 6).view(2, 3))
    dist.all_reduce(parameter, group=group)
    dist.broadcast(parameter.t(), group_src=0, group=group)
    gathered = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(gathered, parameter, group=group)
    assert all(tensor.eq(3).all() and not tensor.requires_grad and not tensor.is_inference() for tensor in gathered)
    (parameter * 2).sum().backward()
    assert parameter.is_leaf
    assert parameter.grad is not None
    assert parameter.grad.eq(2).all()


@CHECKS.workers(2, 3)
def sparse_tensors(rank: int, size: int, group: Any) -> None:
    def of(rank: int) -> Tensor:
        indices = torch.tensor([[0, 2, 2, 3], [1, 0, rank, 0]])[:, : 4 - rank]
        return torch.sparse_coo_tensor(indices, some(torch.float32, 4 - rank, rank), (5, 3))

    ours, want = of(rank), of(0).to_dense()
    for other in range(1, size):
        want = want + of(other).to_dense()
    dist.all_reduce(ours, group=group)
    assert torch.allclose(ours.to_dense(), want)
    of_all: list[Any] = [None] * size
    dist.all_gather_object(of_all, ours.coalesce().values().tolist())
    assert all(values == of_all[0] for values in of_all)
    ours.div_(2)  # it is an ordinary tensor afterwards
    with pytest.raises(RuntimeError, match="sparse"):
        dist.all_reduce(of(rank), op=dist.ReduceOp.MAX, group=group)


@pytest.mark.parametrize(("name", "size"), CHECKS.cases())
def test_calls(name: str, size: int) -> None:
    failures = CHECKS.failures(name, size)
    assert not failures, failures
