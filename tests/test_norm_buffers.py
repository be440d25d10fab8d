"""Buffers of batch norm layers, which are saved, restored and exchanged together: the same bits as one by one, on any
number of workers, whatever a forward pass does to them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.shard_sum import ShardSum
from lockstep.step import buffer_snapshot
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.buffer_snapshot import BufferSnapshot
from on_workers import on_workers
from runs import Program, sgd, train

WAYS = (
    *("plain", "momentum", "instance", "shared", "tied", "double", "untracked", "frozen", "dropped", "checkpoint"),
    *("replaces", "replaces sometimes", "replaces and drops", "writes", "reads", "resets", "registers"),
)


class Norms(nn.Module):
    """Two layers, and something that a forward pass does to the second one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, momentum = way, None if way == "momentum" else 0.1
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(8, momentum=momentum), nn.BatchNorm2d(8, momentum=momentum)
        if way == "instance":
            self.second = nn.InstanceNorm2d(8, track_running_stats=True)
        if way == "shared":
            self.second = self.first
        if way == "tied":
            self.second.running_mean = self.first.running_mean
        if way == "untracked":
            self.second = nn.BatchNorm2d(8, track_running_stats=False)
        self.out = nn.Linear(8, 10)
        if way == "double":
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 4, 4)
        is_odd = bool(x[0, 0, 0, 0] > 0)  # depends on the shard
        x = checkpoint(self.body, x, use_reentrant=False) if self.way == "checkpoint" else self.body(x)
        self.act(x.detach(), is_odd=is_odd)
        if self.way == "reads":
            x = x + self.first.running_mean.view(1, -1, 1, 1) * self.first.num_batches_tracked
        x = self.b(x)
        return self.out(
            (x if self.way in ("dropped", "replaces and drops") and is_odd else x + self.second(x)).mean((2, 3))
        )

    def body(self, x: Tensor) -> Tensor:
        return F.relu(self.first(self.a(x)))

    def act(self, x: Tensor, *, is_odd: bool) -> None:
        mean, second = self.second.running_mean, self.second
        if self.way == "frozen":
            second.eval()
        elif self.way == "replaces":
            second.running_mean = mean * 0.5 + x.mean((0, 2, 3))
        elif self.way == "replaces sometimes" and is_odd:
            second.running_mean = mean * 1.5
        elif self.way == "replaces and drops" and is_odd:
            self.first.running_mean = self.first.running_mean * 1.5
        elif self.way == "writes":
            mean.mul_(0.5)
        elif self.way == "resets":
            second.reset_running_stats()
        elif self.way == "registers" and not hasattr(second, "more"):
            second.register_buffer("more", x.mean((0, 2, 3)))


def train_all(rank: int, size: int, together: bool) -> dict[str, Any]:
    if not together:
        buffer_snapshot.is_ordinary = lambda module, like: False
    return {way: train(Program(functools.partial(Norms, way), sgd, samples=96)) for way in WAYS}


@functools.cache
def results(size: int, *, together: bool = True) -> dict[str, Any]:
    by_rank = on_workers(train_all, size, together)
    assert all(found == by_rank[0] for found in by_rank), "the workers differ from each other"
    return by_rank[0]


@pytest.mark.parametrize("way", WAYS)
def test_together_as_one_by_one(way: str) -> None:
    assert results(1)[way] == results(1, together=False)[way]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_bits(size: int, way: str) -> None:
    assert results(size)[way] == results(1)[way]


# ---- one step by hand ------------------------------------------------------------------------------------------------


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def miss_a_step(rank: int, size: int) -> list[dict[str, list[Any]]]:
    """Take two steps with one copy of a model, and apply what they send to the other. Returns buffers and
    digests of both."""
    model, group = Norms("plain"), dist.group.WORLD
    assert group is not None
    copies = [model, copy.deepcopy(model)]
    exchanges, sum_ = (
        [BufferExchange(one, 2) for one in copies],
        ShardSum(group, [range(2)], device=torch.device("cpu")),
    )
    for _ in range(2):
        before = buffers_of(model)
        for exchange in exchanges:
            exchange.begin()
        changed = []
        for shard in range(2):
            model(torch.randn(4, 16))
            changed.append(exchanges[0].collect(shard))
            exchanges[0].rewind()
            assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
        new = exchanges[0].gather(changed, [4, 4], sum_)
        exchanges[0].apply(new)
        exchanges[1].apply(exchanges[1].decode(exchanges[0].encode(new)))
    return [
        {
            "buffers": [buffer.tolist() for buffer in one.buffers()],
            "digests": [[name, int(digest)] for name, digest in exchange.overwritten_digests().items()],
        }
        for one, exchange in zip(copies, exchanges, strict=True)
    ]


def test_a_worker_that_missed_a_step_gets_the_same_buffers_and_digests() -> None:
    ((first, second),) = on_workers(miss_a_step, 1)
    assert first == second
    assert len(first["digests"]) == 6
    assert first["buffers"][2] == 2  # batches, of two steps


def test_a_buffer_that_is_replaced_or_written_is_restored() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5))
    before, tensors = buffers_of(model), dict(model.named_buffers())
    snapshot = BufferSnapshot(model)
    snapshot.capture()
    assert snapshot.norms is not None
    assert not snapshot.singles
    model[0](torch.randn(4, 3))
    model[1].running_mean = torch.ones(5)
    snapshot.restore()
    assert snapshot.norms is None, "from here on they are handled one by one"
    assert all(buffer is tensors[name] for name, buffer in model.named_buffers())
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    snapshot.capture()
    assert snapshot.norms is not None
    model[0].running_var.data += 1  # which torch does not count
    snapshot.restore()
    assert not torch.equal(before["0.running_var"], tensors["0.running_var"])
    snapshot.restore(always=True)
    assert torch.equal(before["0.running_var"], tensors["0.running_var"])
    model[1].running_mean.resize_(7)
    snapshot.capture()
    assert [place.saved.shape for place in snapshot.places if place.saved is not None][4] == (7,)
