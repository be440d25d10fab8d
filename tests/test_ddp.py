"""What the drop-in promises, case by case. Where torch's class does the same, both run and must agree."""

from __future__ import annotations

import io
from collections import namedtuple
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep import DistributedDataParallel as OurDDP
from lockstep.ddp.autograd_graph import HookMode
from lockstep.ddp.wrapper_interface import any_worker_syncs, highest_rank
from on_workers import WorkerFailedError, on_workers, try_on_workers
from programs import Mlp, digest

BOTH = [pytest.param(TorchDDP, id="torch"), pytest.param(OurDDP, id="ours")]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def seeded(build: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return build()


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def mean_over_workers(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# -- accumulation ----------------------------------------------------------------------------------------------------


def no_sync(rank: int, size: int, wrapper: type) -> None:
    ddp = wrapper(seeded(Mlp))
    local = seeded(Mlp)
    xs = [torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(3)]
    for x in xs:
        local(x).sum().backward()
    with ddp.no_sync():
        for x in xs[:2]:
            ddp(x).sum().backward()
        mine = ddp.module[0].weight.grad.clone()
        assert not torch.equal(mine, mean_over_workers(mine)), "gradients were averaged inside no_sync"
    ddp(xs[2]).sum().backward()
    for (name, p), q in zip(ddp.module.named_parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean_over_workers(q.grad), msg=name)


@pytest.mark.parametrize("wrapper", BOTH)
def test_no_sync_accumulates_and_the_next_backward_averages_all(wrapper: type) -> None:
    on_workers(no_sync, 2, wrapper)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        return sum((getattr(self, name)(x).sum() for name in use), torch.zeros(()))


def used_only_earlier(rank: int, size: int, wrapper: type) -> None:
    ddp = wrapper(seeded(TwoHeads), find_unused_parameters=True)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    with ddp.no_sync():
        ddp(x, "ab").backward()
    expected = {n: mean_over_workers(p.grad) for n, p in ddp.module.named_parameters() if p.grad is not None}
    ddp(torch.zeros(3, 4), "a").backward()  # b is not used now, but was under no_sync
    torch.testing.assert_close(ddp.module.b.weight.grad, expected["b.weight"])
    assert ddp.module.c.weight.grad is None


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_was_used_only_under_no_sync_is_averaged_too(wrapper: type) -> None:
    on_workers(used_only_earlier, 2, wrapper)


def static_first_under_no_sync(rank: int, size: int) -> None:
    ddp, local = OurDDP(seeded(Mlp), static_graph=True), seeded(Mlp)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        ddp.zero_grad()
        local.zero_grad()
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(2 * x).sum().backward()
        (local(x).sum() + local(2 * x).sum()).backward()
        for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(p.grad, mean_over_workers(q.grad), msg=f"step {step}")


def test_static_graph_with_its_first_backward_under_no_sync() -> None:
    """Torch's class dies here with an internal assertion."""
    on_workers(static_first_under_no_sync, 2)


def two_backwards(rank: int, size: int) -> tuple[str, str]:
    ddp, local = OurDDP(seeded(Mlp)), seeded(Mlp)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        ddp.zero_grad()
        a, b = ddp(x).sum(), ddp(-x).square().sum()
        a.backward()
        b.backward()  # torch's class leaves this one on each worker
        local.zero_grad()
        (local(x).sum() + local(-x).square().sum()).backward()
        for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(p.grad, mean_over_workers(q.grad))
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        again = str(error)
    ddp.zero_grad()
    ddp.module(x).sum().backward()  # the bare module is the user's own business, before and after
    mine = ddp.module[0].weight.grad
    assert not torch.equal(mine, mean_over_workers(mine))
    ddp.zero_grad()
    ddp(x).sum().backward()
    return again, digest(grads(ddp))  # type: ignore[arg-type]


def test_two_forwards_two_backwards_are_both_averaged_and_the_same_backward_twice_is_refused() -> None:
    (first, a), (_, b) = on_workers(two_backwards, 2)
    assert "ran a second time" in first
    assert "no_sync" in first
    assert a == b


# -- unused parameters -----------------------------------------------------------------------------------------------


def unused_somewhere(rank: int, size: int, wrapper: type, view: bool) -> list[dict[str, Any]]:
    ddp = wrapper(seeded(TwoHeads), find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.00005)
    seen = []
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for step, use in enumerate(["ab", "a", "bc", "a"]):
        ddp(x, use if rank == 0 else "a").backward()
        seen.append({n: None if g is None else g.tolist() for n, g in grads(ddp.module).items()})
        if step == 1:
            ddp.zero_grad(set_to_none=True)
            ddp.module.c.bias.grad = torch.full((4,), 7.0)  # not used in the next-but-one step: must stay
    return seen


@pytest.mark.parametrize("view", [False, True])
def test_unused_on_some_workers_gets_the_mean_and_unused_on_all_stays(view: bool) -> None:
    ours, theirs = on_workers(unused_somewhere, 2, OurDDP, view), on_workers(unused_somewhere, 2, TorchDDP, view)
    assert ours == theirs
    assert ours[0][0]["c.weight"] is None
    assert ours[1][0]["b.weight"] is not None


def unused_error(rank: int, size: int) -> str:
    ddp = OurDDP(seeded(TwoHeads))
    x = torch.ones(1, 4)
    ddp(x, "ab").backward()
    try:
        ddp(x, "ab")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_unused_parameter_error_names_parameters_and_modules() -> None:
    for rank, text in enumerate(on_workers(unused_error, 2)):
        assert "Expected to have finished reduction in the prior iteration" in text
        assert f"did not receive grad for rank {rank}: c.weight, c.bias" in text
        assert "By module: c: weight, bias" in text


def skip_unused(rank: int, size: int) -> int:
    ddp = OurDDP(
        seeded(TwoHeads), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.00007
    )
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    ddp(x, "ab").backward()
    assert ddp.module.c.weight.grad is None
    mine = ddp.module.a.weight.grad
    assert torch.equal(mine, mean_over_workers(mine))
    return ddp.reducer.core.queue.buckets_reduced


def test_buckets_of_unused_parameters_can_be_skipped() -> None:
    assert on_workers(skip_unused, 2) == [2, 2]


# -- kinds of gradients and outputs ----------------------------------------------------------------------------------


class Strange(nn.Module):
    """A complex parameter, an empty one, a scalar, and one that is not laid out row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.low = nn.Parameter(torch.randn(2).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        wave = (self.z * x[0, 0]).abs().sum()
        rest = (self.turned * x[:3, :4]).sum() + self.low.float().sum()
        return wave + self.empty.sum() + self.scalar * x.sum() + rest


def strange(rank: int, size: int, wrapper: type, view: bool) -> list[str]:
    ddp = wrapper(seeded(Strange), gradient_as_bucket_view=view)
    digests = []
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * rank + step))).backward()
        assert ddp.module.turned.grad.stride() == ddp.module.turned.stride()
        digests.append(digest({n: g.float() if g.dtype == torch.bfloat16 else g for n, g in grads(ddp.module).items()}))
    return digests


@pytest.mark.few(1)
@pytest.mark.parametrize("view", [False, True])
def test_complex_empty_scalar_and_transposed_parameters(view: bool) -> None:
    assert on_workers(strange, 3, OurDDP, view) == on_workers(strange, 3, TorchDDP, view)


Pair = namedtuple("Pair", "loss extra")


@dataclass
class Boxed:
    loss: Tensor
    note: str = "x"


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.used, self.spare, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Any:
        loss, extra = self.used(x).sum(), self.spare(x).sum()
        match self.kind:
            case "dataclass":
                return Boxed(loss)
            case "namedtuple":
                return Pair(loss, extra)
            case "dict":
                return {"a": {"loss": loss}, "extra": [extra, "text", None]}
            case _:
                return loss, x.detach(), 3  # tensors and others without a gradient


def outputs(rank: int, size: int, kind: str, find_unused: bool, static: bool) -> None:
    ddp = OurDDP(seeded(lambda: Outputs(kind)), find_unused_parameters=find_unused, static_graph=static)
    for step in range(3):
        ddp.zero_grad()
        out = ddp(torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)))
        assert type(out) is {"dataclass": Boxed, "namedtuple": Pair, "dict": dict, "tuple": tuple}[kind]
        loss = out["a"]["loss"] if kind == "dict" else out[0] if isinstance(out, tuple) else out.loss
        loss.backward()  # the other output is not part of the loss
        mine = ddp.module.used.weight.grad
        assert torch.equal(mine, mean_over_workers(mine)), step
        assert ddp.module.spare.weight.grad is None


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "dict", "tuple"])
@pytest.mark.parametrize("mode", ["find unused", "static graph"])
def test_outputs_of_any_kind_of_which_the_loss_uses_one(kind: str, mode: str) -> None:
    on_workers(outputs, 2, kind, mode == "find unused", mode == "static graph")


def create_graph(rank: int, size: int) -> None:
    ddp = OurDDP(seeded(Mlp))
    for _ in range(3):
        ddp.zero_grad()
        x = torch.randn(3, 16, requires_grad=True)
        (slope,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)  # brings no gradient of ours
        (ddp(x).square().mean() + slope.square().mean()).backward(create_graph=True)
        mine = ddp.module[0].weight.grad.detach()
        assert torch.equal(mine, mean_over_workers(mine))


def test_create_graph_and_gradient_penalty() -> None:
    on_workers(create_graph, 2)


def functional(rank: int, size: int) -> None:
    ddp = OurDDP(seeded(Mlp))
    others = {n: (p.detach() * 2).requires_grad_() for n, p in ddp.named_parameters()}
    torch.func.functional_call(ddp, others, (torch.ones(1, 16),)).sum().backward()
    assert all(p.grad is None for p in ddp.parameters())
    assert all(p.grad is not None for p in others.values())


def test_functional_call_leaves_the_modules_own_gradients_alone() -> None:
    on_workers(functional, 2)


# -- who owns the gradients ------------------------------------------------------------------------------------------


def views(rank: int, size: int, view: bool) -> None:
    ddp = OurDDP(seeded(Mlp), gradient_as_bucket_view=view, bucket_cap_mb=0.002)
    weight = ddp.module[0].weight

    def backward() -> None:
        ddp(torch.randn(2, 16)).sum().backward()

    for _ in range(3):
        ddp.zero_grad()
        backward()
    kept, before = weight.grad, weight.grad.clone()
    place = kept.data_ptr()
    ddp.zero_grad(set_to_none=True)
    backward()
    if view:
        assert weight.grad.data_ptr() == place, "views must stay where the bucket is"
        flat = ddp.reducer.core.queue.buckets[-1].flat
        assert flat.data_ptr() <= weight.grad.data_ptr() < flat.data_ptr() + flat.nbytes
    else:
        assert torch.equal(kept, before), "a gradient that the user kept was overwritten by the next step"
        weight.grad.detach_()  # not allowed on a view
    here = weight.grad
    ddp.zero_grad(set_to_none=False)
    backward()
    assert weight.grad.data_ptr() == here.data_ptr(), "a gradient that was there must stay where it is"
    mine = weight.grad.clone()
    assert torch.equal(mine, mean_over_workers(mine))


@pytest.mark.parametrize("view", [False, True])
def test_ownership_of_gradients(view: bool) -> None:
    on_workers(views, 2, view)


def own_buffer(rank: int, size: int) -> None:
    """Gradients that a user has laid out himself are filled where they are."""
    ddp = OurDDP(seeded(Mlp))
    flat = torch.zeros(sum(p.numel() for p in ddp.parameters()))
    for p, piece in zip(ddp.parameters(), flat.split([p.numel() for p in ddp.parameters()]), strict=True):
        p.grad = piece.view(p.shape)
    for _ in range(3):
        flat.zero_()
        ddp(torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))).sum().backward()
        assert flat.abs().sum() > 0
        assert torch.equal(flat, mean_over_workers(flat))


def test_gradients_in_a_buffer_of_the_users_own() -> None:
    on_workers(own_buffer, 2)


class KeepsItsLoss(nn.Module):
    """Its loss is no output, so that no output tells when a backward pass begins."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.used(x).sum()
        return self.used(x)  # type: ignore[no-any-return]


def loss_beside_the_outputs(rank: int, size: int) -> None:
    ddp = OurDDP(seeded(KeepsItsLoss), find_unused_parameters=True)
    for _ in range(3):
        mine = ddp.module.unused.weight.grad = torch.full((3, 3), 7.0)
        ddp.module.used.weight.grad = None
        ddp(torch.full((2, 3), float(rank)))
        ddp.module.loss.backward()
        assert ddp.module.unused.weight.grad is mine
        assert torch.equal(mine, torch.full((3, 3), 7.0))
        assert torch.equal(ddp.module.used.weight.grad, torch.full((3, 3), (size - 1.0)))


def test_a_gradient_of_the_users_own_stays_where_the_loss_is_no_output() -> None:
    on_workers(loss_beside_the_outputs, 2)


def memory(rank: int, size: int) -> int:
    """How many distinct gradient-sized storages exist after a step."""
    import gc

    ddp = OurDDP(nn.Linear(300, 300, bias=False))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(2, 300)).sum().backward()
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, Tensor) and o.numel() == 90000]
    return len({t.untyped_storage().data_ptr() for t in tensors} - {ddp.module.weight.data_ptr()})


def test_there_are_no_gradients_beside_the_bucket() -> None:
    """On a GPU too: test_cuda.py."""
    assert on_workers(memory, 2) == [1, 1]


# -- buckets, order and overlap --------------------------------------------------------------------------------------


class Recorder(dist.ProcessGroup):
    """A process group written in Python: passes calls on, and writes them down."""

    def __init__(self, inner: dist.ProcessGroup, work: type | None = None) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner, self.events, self._work = inner, [], work or RecordedWork
        self.waits = self.futures = 0

    def getBackendName(self) -> str:
        return "recorder"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self.events.append(("allreduce", tensors[0].numel()))
        return self._work(self, self._inner.allreduce(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self.events.append(("broadcast", tensors[0].numel()))
        return self._work(self, self._inner.broadcast(tensors, opts))


class RecordedWork(dist._Work):
    def __init__(self, group: Recorder, work: Any) -> None:
        super().__init__()
        self._group, self._work = group, work

    def wait(self, timeout: Any = None) -> bool:
        self._group.waits += 1
        return bool(self._work.wait())

    def get_future(self) -> Any:
        self._group.futures += 1
        return self._work.get_future()


def overlap(rank: int, size: int) -> tuple[list[Any], int, int]:
    group = Recorder(dist.group.WORLD)
    ddp = OurDDP(seeded(Mlp), process_group=group, bucket_cap_mb=0.002)
    for p_name, p in ddp.module.named_parameters():
        p.register_hook(lambda g, n=p_name: group.events.append(("grad", n)))
    for _ in range(3):
        group.events.clear()
        ddp.zero_grad()
        ddp(torch.randn(2, 16)).sum().backward()
    return group.events, group.waits, group.futures


def test_every_bucket_is_sent_while_the_backward_pass_runs_and_through_a_python_group() -> None:
    for events, waits, futures in on_workers(overlap, 2):
        sent = [i for i, (kind, _) in enumerate(events) if kind == "allreduce"]
        last_gradient = max(i for i, (kind, _) in enumerate(events) if kind == "grad")
        assert len(sent) == 3
        assert sent[0] < sent[1] < last_gradient, "sent only after the backward pass"
        assert [size for kind, size in events if kind == "allreduce"] == [650, 4160, 1088]
        assert waits > 0
        assert futures > 0


class WorkWithALimit(RecordedWork):
    """Like those of many groups written in Python: torch always passes the limit, so they require it."""

    def wait(self, timeout: timedelta) -> bool:
        self._group.waits += 1
        return bool(self._work.wait(timeout))


def trained_over(group: dist.ProcessGroup, **options: Any) -> str:
    net = seeded(Mlp)
    if options.pop("delayed", False):
        delayed = [(name, p) for name, p in net.named_parameters() if not name.startswith("0")]
        options |= {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": net[0].weight}
    ddp = OurDDP(net, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        ddp(x).sum().backward()
        optimizer.step()
    return digest(ddp.module.state_dict())


def works_with_a_limit(rank: int, size: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"delayed": True}):
        group = Recorder(dist.group.WORLD, WorkWithALimit)
        assert trained_over(group, **options) == trained_over(dist.group.WORLD, **options), options
        assert group.waits > 0
    ddp = OurDDP(seeded(Mlp), process_group=group)
    assert highest_rank(ddp.process_group, ddp.device, candidate=True) == size - 1
    assert any_worker_syncs(ddp.process_group, ddp.device, we_do=rank == 0, wait=True)


def test_a_python_group_whose_works_must_be_given_a_time_limit() -> None:
    on_workers(works_with_a_limit, 2)


def no_collective_at_start(rank: int, size: int) -> list[Any]:
    group = Recorder(dist.group.WORLD)
    OurDDP(seeded(Mlp), process_group=group, init_sync=False)
    return group.events


def test_without_init_sync_nothing_is_sent_at_construction() -> None:
    assert on_workers(no_collective_at_start, 2) == [[], []]


class RankOrder(nn.Module):
    """The workers go through the layers in different orders."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.layers = rank, nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if self.rank else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def rank_order(rank: int, size: int) -> None:
    ddp = OurDDP(seeded(lambda: RankOrder(rank)), bucket_cap_mb=0.0001)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.randn(2, 8)).sum().backward()
        for p in ddp.parameters():
            assert torch.equal(p.grad, mean_over_workers(p.grad))
    assert len(ddp.reducer.core.queue.buckets) > 4


def test_workers_whose_gradients_arrive_in_different_orders_still_send_in_one() -> None:
    on_workers(rank_order, 2)


# -- buffers ---------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        self.at_forward = float(self.seen)
        self.seen += float(x[0, 0])
        return self.linear(x)


def buffers(rank: int, size: int, wrapper: type) -> list[float]:
    ddp = wrapper(seeded(lambda: Counter(5.0 + rank)))
    x = torch.full((1, 2), 1.0 + rank)
    seen = []

    def forward() -> None:
        ddp(x)
        seen.append(ddp.module.at_forward)

    forward()  # synchronised: at construction
    with ddp.no_sync():
        forward()  # synchronised: the forward before it was an ordinary one
        forward()  # not synchronised: the forward before it was inside no_sync
    forward()  # not synchronised either, for the same reason
    forward()  # synchronised again
    with torch.no_grad():
        forward()
    forward()
    return seen


def test_buffers_follow_the_state_of_the_forward_before() -> None:
    ours = on_workers(buffers, 2, OurDDP)
    assert ours == on_workers(buffers, 2, TorchDDP)
    assert ours[0][0] == ours[1][0]
    assert ours[0][2] != ours[1][2]


def buffer_options(rank: int, size: int, wrapper: type, options: dict[str, bool]) -> list[float]:
    ddp = wrapper(seeded(lambda: Counter(5.0 + rank)), **options)
    start = float(ddp.module.seen)
    ddp(torch.full((1, 2), 1.0 + rank))
    ddp(torch.full((1, 2), 1.0 + rank))
    return [start, ddp.module.at_forward]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [{"forward_sync_buffers": False}, {"broadcast_buffers": False}, {"broadcast_buffers": True}, {}],
    ids=str,
)
def test_buffers_at_start_and_before_forwards(options: dict[str, bool]) -> None:
    ours = on_workers(buffer_options, 2, OurDDP, options)
    assert ours == on_workers(buffer_options, 2, TorchDDP, options)
    equal_at_start = ours[0][0] == ours[1][0]
    assert equal_at_start == (options != {"broadcast_buffers": False})


class Replaced(Counter):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen = self.seen.clone() + x[0, 0]  # another tensor in the buffer's place
        return out


def replaced_buffer(rank: int, size: int) -> float:
    ddp = OurDDP(seeded(lambda: Replaced(0.0)))
    for _ in range(3):
        ddp(torch.full((1, 2), 1.0 + rank))
    return ddp.module.at_forward


def test_a_buffer_that_was_replaced_is_still_synchronised() -> None:
    first, second = on_workers(replaced_buffer, 2)
    assert first == second


# -- saving ----------------------------------------------------------------------------------------------------------


def saved(rank: int, size: int) -> str:
    ddp = OurDDP(seeded(Mlp), bucket_cap_mb=0.002)
    ddp(torch.ones(1, 16)).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is OurDDP
    assert list(loaded.state_dict()) == [f"module.{n}" for n in Mlp().state_dict()]
    for _ in range(3):
        loaded.zero_grad()
        loaded(torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))).sum().backward()
    mine = loaded.module[0].weight.grad
    assert torch.equal(mine, mean_over_workers(mine))
    return digest(grads(loaded))  # type: ignore[arg-type]


def test_a_saved_wrapper_works_after_loading() -> None:
    a, b = on_workers(saved, 2)
    assert a == b


def other_group(rank: int, size: int) -> str:
    ddp = OurDDP(seeded(Mlp), process_group=dist.new_group([0, 1]))
    try:
        torch.save(ddp, io.BytesIO())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_wrapper_over_another_group_says_that_it_cannot_be_saved() -> None:
    assert "default process group" in on_workers(other_group, 2)[0]


# -- starting equal --------------------------------------------------------------------------------------------------


def start_equal(rank: int, size: int) -> str:
    ddp = OurDDP(seeded(Mlp, seed=rank))
    return digest(dict(ddp.module.named_parameters()))


def test_replicas_start_from_the_weights_of_rank_0() -> None:
    a, b, c = on_workers(start_equal, 3)
    assert a == b == c
    assert a == digest(dict(seeded(Mlp, seed=0).named_parameters()))


def start_different(rank: int, size: int) -> None:
    ddp = OurDDP(seeded(Mlp, seed=1), init_sync=False)
    if rank == 2:
        with torch.no_grad():
            ddp.module[2].weight[0, 0] += 1
    ddp(torch.ones(1, 16)).sum().backward()


def test_replicas_that_start_different_are_detected_and_named() -> None:
    for outcome in try_on_workers(start_different, 3):
        assert "ReplicaMismatchError" in outcome
        assert "2.weight differs between rank 0 and rank 2" in outcome


def other_model(rank: int, size: int, what: str) -> None:
    if what == "shape":
        module: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + (rank == 1)))
    elif what == "count":
        module = nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if rank == 1 else []))
    else:
        module = nn.Sequential(nn.Linear(4, 4)).to(torch.float64 if rank == 1 else torch.float32)
    OurDDP(module)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["rank 1", "1.weight", "[5, 4]"]),
        ("count", ["Rank 1 has 4 params", "1.weight"]),
        ("dtype", ["float64"]),
    ],
)
def test_different_models_are_refused_by_all_with_rank_and_parameter(what: str, words: list[str]) -> None:
    for outcome in try_on_workers(other_model, 2, what, timeout_s=150):
        assert "ReplicaMismatchError" in outcome
        for word in words:
            assert word in outcome


# -- compile ---------------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """With a forward of its own: Dynamo leaves torch's containers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(width=600)  # large enough for Dynamo to cut the graph at bucket borders

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * 2


def compiled(rank: int, size: int, where: str) -> None:
    ddp, local = OurDDP(seeded(Written), bucket_cap_mb=1), seeded(Written)
    if where == "around":
        model: Any = torch.compile(ddp, backend="aot_eager")
    else:
        ddp.module.compile(backend="aot_eager")
        model = ddp
    for step in range(4):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp.zero_grad()
        local.zero_grad()
        F.cross_entropy(model(x), torch.arange(3)).backward()
        F.cross_entropy(local(x), torch.arange(3)).backward()
        for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(p.grad, mean_over_workers(q.grad))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.slow  # tests/test_ddp_arguments.py has one that is not
@pytest.mark.parametrize("where", ["around", "inside"])
def test_torch_compile(where: str) -> None:
    on_workers(compiled, 2, where)


# -- few hooks (see Note [Few hooks] in ddp/autograd_graph.py) ---------------------------------------------------------


class Order(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


FORWARD, BACKWARD, LACKING = [0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 2, 3, 4]


def few_hooks(rank: int, size: int) -> list[bool]:
    ddp = OurDDP(seeded(Order), batched_grad_copy=True, bucket_cap_mb=0.0005)
    local = seeded(Order)
    few = []

    def step(order: list[int], *, accumulate: bool = False) -> None:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(len(few) * 10 + rank))
        if not accumulate:
            ddp.zero_grad()
            local.zero_grad()
        before = [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
        ddp(x, order).sum().backward()
        local.zero_grad()
        local(x, order).sum().backward()
        for p, q, g in zip(ddp.parameters(), local.parameters(), before, strict=True):
            expected = mean_over_workers(q.grad) + (0 if g is None else g)
            torch.testing.assert_close(p.grad, expected)
        few.append(ddp.reducer.core.hooks.mode is HookMode.LAST_OF_BUCKET)

    for _ in range(8):
        step(FORWARD)
    assert few[-1], "never changed over to few hooks"
    assert len(ddp.reducer.core.queue.buckets) == 3
    step(BACKWARD)  # gradients come in another order
    assert not few[-1]
    for _ in range(8):
        step(FORWARD)
    assert few[-1]
    step(FORWARD, accumulate=True)  # gradients are there before the backward pass
    assert not few[-1]
    for _ in range(8):
        step(FORWARD)
    assert few[-1]
    ddp.zero_grad()
    ddp(torch.ones(1, 8), LACKING).sum().backward()  # the last bucket never becomes complete
    try:
        ddp(torch.ones(1, 8), FORWARD)
    except RuntimeError as error:
        assert "layers.0.weight, layers.0.bias" in str(error)
    else:
        raise AssertionError("no error for an unused parameter")
    return few


def test_few_hooks_notice_every_change_of_the_graph() -> None:
    a, b = on_workers(few_hooks, 2)
    assert a == b


def world_of_one(rank: int, size: int) -> int:
    ddp, local = OurDDP(seeded(Order)), seeded(Order)
    x = torch.randn(2, 8)
    for _ in range(10):
        for model in (ddp, local):
            model.zero_grad()
            model(x, FORWARD).sum().backward()
        for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert ddp.reducer.core.hooks.mode is HookMode.LAST_PARAMETER
    for steps in range(1, 40):
        ddp.zero_grad()
        try:
            ddp(x, [0, 2, 3, 4]).sum().backward()
        except RuntimeError as error:
            assert "did not receive grad for rank 0: layers.1.weight, layers.1.bias" in str(error)
            return steps
    return 0


def test_a_world_of_one_hardly_listens_and_still_notices_an_unused_parameter() -> None:
    assert 0 < on_workers(world_of_one, 1)[0] <= 19


# -- wrappers in wrappers, install -----------------------------------------------------------------------------------


def nested(rank: int, size: int) -> None:
    inner = OurDDP(seeded(Mlp))
    outer, local = OurDDP(inner), seeded(Mlp)
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        outer.zero_grad()
        outer(x).sum().backward()
        local.zero_grad()
        local(x).sum().backward()
        for p, q in zip(outer.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(p.grad, mean_over_workers(q.grad))


def test_a_wrapper_inside_a_wrapper() -> None:
    on_workers(nested, 2)


def rewrapped(rank: int, size: int) -> None:
    """A wrapper that is gone leaves nothing on the module."""
    module = seeded(Mlp)
    for _ in range(3):
        ddp = OurDDP(module)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.randn(2, 16)).sum().backward()
        assert not ddp.reducer.core.is_shared
        del ddp
    module.zero_grad()
    module(torch.full((1, 16), float(rank))).sum().backward()
    assert torch.equal(module[0].bias.grad, mean_over_workers(module[0].bias.grad)) == (size == 1)


def test_a_wrapper_that_is_gone_leaves_no_hooks() -> None:
    on_workers(rewrapped, 2)


def install_everywhere(rank: int, size: int) -> None:
    import torch.nn.parallel.distributed as home

    import lockstep

    early = home.DistributedDataParallel
    lockstep.install_ddp()
    lockstep.install_ddp()
    assert home.DistributedDataParallel is torch.nn.parallel.DistributedDataParallel is OurDDP
    ddp = torch.nn.parallel.DistributedDataParallel(seeded(Mlp))
    assert isinstance(ddp, OurDDP)
    assert isinstance(ddp, early)


def test_install_puts_our_class_in_torchs_place() -> None:
    on_workers(install_everywhere, 2)


def update_group(rank: int, size: int) -> None:
    """A step that failed, then the same wrapper over another group."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    ddp = OurDDP(seeded(Mlp))
    ddp(torch.randn(2, 16)).sum().backward()
    ddp._update_process_group(alone if rank == 2 else pair)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((2, 16), float(rank))).sum().backward()
    total = ddp.module[4].bias.grad.clone()
    mine = seeded(Mlp)
    mine(torch.full((2, 16), float(rank))).sum().backward()
    if rank == 2:
        assert torch.equal(total, mine[4].bias.grad)


def test_the_process_group_can_be_changed() -> None:
    on_workers(update_group, 3)


def test_wrong_arguments() -> None:
    with pytest.raises(WorkerFailedError, match="doesn't have any parameter that requires a gradient"):
        on_workers(wrong, 1, "nothing to train")
    with pytest.raises(WorkerFailedError, match="single element"):
        on_workers(wrong, 1, "two devices")
    with pytest.raises(WorkerFailedError, match="only work with"):
        on_workers(wrong, 1, "device of a cpu module")
    with pytest.raises(WorkerFailedError, match="same type of devices"):
        on_workers(wrong, 1, "mixed devices")


def wrong(rank: int, size: int, what: str) -> None:
    if what == "nothing to train":
        OurDDP(nn.Linear(2, 2).requires_grad_(False))
    elif what == "two devices":
        OurDDP(nn.Linear(2, 2), device_ids=[0, 1])
    elif what == "device of a cpu module":
        OurDDP(nn.Linear(2, 2), device_ids=[0])
    else:
        OurDDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


# -- what a fresh reader found ---------------------------------------------------------------------------------------


class SharedMemory(nn.Module):
    """Autograd gives both parameters one and the same memory as their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(512, 1024)), nn.Parameter(torch.ones(512, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a.unsqueeze(0) + self.b.unsqueeze(0)) * x).sum()


def shared_memory(rank: int, size: int, wrapper: type) -> list[Any]:
    ddp = wrapper(SharedMemory())
    seen = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.full((1, 512, 1024), 1.0 + 2 * rank)).backward()
        seen.append([p.grad.unique().tolist() for p in ddp.parameters()])
    return seen


def test_gradients_that_share_memory() -> None:
    assert on_workers(shared_memory, 2, OurDDP) == [[[[2.0], [2.0]]] * 4] * 2


def skipped_keeps(rank: int, size: int) -> list[float]:
    ddp = OurDDP(
        seeded(TwoHeads), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.00007
    )
    seen = []
    for use in ("abc", "ab", "ab", "ab"):
        ddp(torch.ones(1, 4), use).backward()
        seen.append(float(ddp.module.c.bias.grad[0]))
    return seen


def test_a_skipped_bucket_leaves_its_gradients_as_they_are() -> None:
    assert on_workers(skipped_keeps, 2) == [[1.0] * 4] * 2


def used_up(rank: int, size: int) -> bool:
    """An optimiser inside the backward pass sets gradients to None; hooks on accumulators are the user's."""
    ddp = OurDDP(seeded(Mlp))
    weight = ddp.module[0].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    calls = []
    node.register_hook(lambda *_: calls.append(1))
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", None))
    for _ in range(40):
        ddp(torch.ones(1, 16)).sum().backward()
    return len(calls) == 40


def test_a_world_of_one_with_an_optimizer_in_backward_and_a_hook_on_an_accumulator() -> None:
    assert on_workers(used_up, 1) == [True]


def renewed(rank: int, size: int) -> list[int]:
    from lockstep.ddp import autograd_graph

    counts, renew = [], autograd_graph.renew_accumulators
    autograd_graph.renew_accumulators = lambda parameters: (counts.append(len(parameters)), renew(parameters))[1]
    for held in (0, 2):
        ddp = OurDDP(seeded(Mlp))
        nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in list(ddp.parameters())[:held]]
        for _ in range(8):
            ddp.zero_grad()
            loss = ddp(torch.ones(1, 16)).sum()
            loss.backward()
        assert len(nodes) == held
    return counts


def test_only_accumulators_without_other_references_are_renewed() -> None:
    assert on_workers(renewed, 1) == [[6, 4]]


def two_losses(rank: int, size: int) -> float:
    ddp = OurDDP(nn.Linear(1, 1, bias=False))
    for _ in range(10):
        ddp.zero_grad()
        out = ddp(torch.ones(1, 1))
        out.sum().backward(retain_graph=True)
        (out * 2).sum().backward()
    return float(ddp.module.weight.grad)


def test_a_world_of_one_may_go_backward_twice() -> None:
    assert on_workers(two_losses, 1) == [3.0]


def raised_midway(rank: int, size: int) -> list[bool]:
    ddp = OurDDP(seeded(Mlp))
    x = torch.ones(1, 16)
    with ddp.no_sync():
        ddp(x).sum().backward()
    handle = ddp.module[0].weight.register_hook(lambda g: 1 / 0)
    try:
        ddp(x).sum().backward()
    except ZeroDivisionError:
        handle.remove()
    try:
        ddp(x)
    except RuntimeError:
        return [p.grad is not None for p in ddp.parameters()]
    return []


def test_gradients_accumulated_before_an_error_are_given_back() -> None:
    assert on_workers(raised_midway, 2) == [[True] * 6] * 2
