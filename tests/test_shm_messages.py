"""Messages on shm: send, receive, tags, any source, batches; more of them than fit, and of the wrong size."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checks import Checks
from lockstep.errors import DesyncError, PeerLostError
from plain import same_bits, some

CHECKS = Checks()
LONG = 500_000


def full(value: float, numel: int = 5) -> Tensor:
    return torch.full((numel,), float(value))


@CHECKS.workers(2)
def tags_in_another_order(rank: int, size: int, group: Any) -> None:
    if rank == 0:
        for tag in (3, 1, 2, 1):
            dist.send(full(tag), group_dst=1, tag=tag, group=group)
        return
    for tag in (1, 2, 3):
        got = full(0)
        assert dist.recv(got, group_src=0, tag=tag, group=group) == 0
        assert got.eq(tag).all()
    later, sooner = full(0), full(0)
    expected = [dist.irecv(later, group_src=0, tag=4, group=group), dist.irecv(sooner, group_src=0, tag=1, group=group)]
    expected[1].wait()
    assert sooner.eq(1).all()
    assert not expected[0].is_completed()


@CHECKS.workers(2)
def both_directions_at_once_and_large(rank: int, size: int, group: Any) -> None:
    other, ours = 1 - rank, [some(torch.float32, 3_000_000, seed) for seed in range(2)]
    dist.send(ours[rank], group_dst=other, group=group)  # does not wait for its receive
    got = torch.empty(3_000_000)
    dist.recv(got, group_src=other, group=group)
    assert same_bits(got, ours[other])
    got.zero_()
    works = [dist.isend(ours[rank], group_dst=other, group=group), dist.irecv(got, group_src=other, group=group)]
    for work in reversed(works):
        work.wait()
    assert same_bits(got, ours[other])


@CHECKS.workers(2)
def messages_of_every_shape(rank: int, size: int, group: Any) -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn):
        for numel in (0, 1, 7, 20_000):
            data = some(dtype, numel, numel)
            gaps = torch.stack([data, data], dim=1).view(-1)[::2]
            if rank == 0:
                for message in (data, gaps, data):
                    dist.send(message, group_dst=1, group=group)
                continue
            targets = [torch.zeros_like(data), torch.zeros(2 * numel, dtype=dtype)[::2]]
            targets.append(group.allocate_tensor(numel, dtype=dtype, device=torch.device("cpu")))
            for target in targets:
                dist.recv(target, group_src=0, group=group)
                assert same_bits(target, data), f"{numel} x {dtype}"


@CHECKS.workers(3)
def from_any_source(rank: int, size: int, group: Any) -> None:
    if rank != 1:
        dist.send(full(rank), group_dst=1, tag=7, group=group)
        return
    senders = []
    for _ in range(2):
        got = full(-1)
        senders.append(dist.recv(got, tag=7, group=group))
        assert got.eq(senders[-1]).all()
    assert sorted(senders) == [0, 2]


@CHECKS.workers(2)
def more_messages_than_the_ring_holds(rank: int, size: int, group: Any) -> None:
    for turn in range(300):
        message = full(turn)
        if rank == 0:
            dist.send(message, group_dst=1, group=group)
        else:
            dist.recv(message.zero_(), group_src=0, group=group)
            assert message.eq(turn).all()


@CHECKS.workers(2)
def sends_that_wait_go_out_while_the_sender_is_in_a_collective(rank: int, size: int, group: Any) -> None:
    if rank == 0:
        works = [dist.isend(full(turn), group_dst=1, group=group) for turn in range(300)]
        dist.barrier(group=group)
        for work in works:
            work.wait()
        return
    time.sleep(0.1)  # the ring is full by now
    for turn in range(300):
        got = full(-1)
        dist.recv(got, group_src=0, group=group)
        assert got.eq(turn).all()
    dist.barrier(group=group)


@CHECKS.workers(3)
def a_batch_around_the_ring(rank: int, size: int, group: Any) -> None:
    right, left, got = (rank + 1) % size, (rank - 1) % size, [full(0), full(0, LONG)]
    operations = []
    for tag, target in enumerate(got):
        sent = full(rank, target.numel())
        operations.append(dist.P2POp(dist.irecv, target, group_peer=left, tag=tag, group=group))
        operations.append(dist.P2POp(dist.isend, sent, group_peer=right, tag=tag, group=group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(target.eq(left).all() for target in got)


@CHECKS.workers(2)
def a_receive_counts_its_time_from_the_wait(rank: int, size: int, group: Any) -> None:
    group.set_timeout(timedelta(seconds=1))
    if rank == 0:
        work = dist.irecv(got := full(0), group_src=1, group=group)
        time.sleep(1.2)
        work.wait()
        assert got.eq(1).all()
    else:
        time.sleep(1.3)
        dist.send(full(1), group_dst=0, group=group)


@CHECKS.workers(3)
def a_receive_that_gets_nothing_ends_at_its_deadline(rank: int, size: int, group: Any) -> None:
    group.set_timeout(timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"^rank 2 \(pid \d+\) .*recv from rank 2 ") as caught:
            dist.recv(full(0), group_src=2, group=group)
        assert caught.value.rank == 2
    alone: Any = dist.new_group(backend="shm", timeout=timedelta(seconds=6))
    if rank == 0:
        alone.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(PeerLostError, match="recv from any rank"):
            dist.recv(full(0), group=alone)


@CHECKS.workers(2)
def a_receive_asked_now_and_then(rank: int, size: int, group: Any) -> None:
    if rank == 0:
        time.sleep(0.1)
        dist.send(full(4), group_dst=1, group=group)
        return
    got, end_s = torch.zeros(10)[::2], time.monotonic() + 5
    work = dist.irecv(got, group_src=0, group=group)
    while not work.is_completed() and time.monotonic() < end_s:
        time.sleep(0.001)
    assert work.is_completed()
    assert got.eq(4).all()


@CHECKS.workers(2)
def a_message_of_another_size_is_refused_by_name(rank: int, size: int, group: Any) -> None:
    if rank == 0:
        dist.send(full(1, 5), group_dst=1, group=group)
        dist.send(full(2, 7), group_dst=1, group=group)
        return
    with pytest.raises(DesyncError, match=r"rank 0 \(pid \d+\) sent 20 bytes .* rank 1 .* 28"):
        dist.recv(full(0, 7), group_src=0, group=group)
    got = full(0, 7)
    dist.recv(got, group_src=0, group=group)
    assert got.eq(2).all()


@pytest.mark.parametrize(("name", "size"), CHECKS.cases())
def test_messages(name: str, size: int) -> None:
    failures = CHECKS.failures(name, size)
    assert not failures, failures
