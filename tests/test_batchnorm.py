"""Batch norm over the global batch: as one worker with all rows, on any backend, however the rows are shared out."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep import DistributedDataParallel as OurDDP
from lockstep.comm.tree_order import tree_pairs
from lockstep.ddp import batchnorm
from lockstep.ddp.batchnorm import SyncBatchNorm
from on_workers import on_workers
from programs import digest

CLOSE = 1e-12  # of float64, relative to the largest value
FEATURES = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")


def layer_2d(**options: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(FEATURES, dtype=torch.float64, **options)


LAYERS: dict[str, tuple[Any, tuple[int, ...], torch.memory_format]] = {
    "rows": (lambda: nn.BatchNorm1d(FEATURES, dtype=torch.float64), (FEATURES,), torch.contiguous_format),
    "1d": (lambda: nn.BatchNorm1d(FEATURES, dtype=torch.float64), (FEATURES, 5), torch.contiguous_format),
    "2d": (layer_2d, (FEATURES, 4, 5), torch.contiguous_format),
    "channels last": (layer_2d, (FEATURES, 4, 5), torch.channels_last),
    "3d": (lambda: nn.BatchNorm3d(FEATURES, dtype=torch.float64), (FEATURES, 2, 4, 5), torch.channels_last_3d),
    "not affine": (lambda: layer_2d(affine=False), (FEATURES, 4, 5), torch.contiguous_format),
    "cumulative": (lambda: layer_2d(momentum=None), (FEATURES, 4, 5), torch.contiguous_format),
    "untracked": (lambda: layer_2d(track_running_stats=False), (FEATURES, 4, 5), torch.contiguous_format),
}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(got: Tensor | None, expected: Tensor | None, what: str, limit: float = CLOSE) -> None:
    assert (got is None) == (expected is None), what
    if got is None or expected is None or expected.numel() == 0:
        return
    difference = ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    assert got.shape == expected.shape, what
    assert difference < limit, f"{what}: relative difference {difference}"


def bits_of(tensors: Any) -> str:
    return digest({name: value.cpu() for name, value in dict(tensors).items()})


def on_every_backend(run: Any, rank: int, *args: Any) -> list[Any]:
    """[with gloo, with shm]"""
    return [run(rank, *args, dist.new_group(backend=backend)) for backend in ("gloo", "shm")]


# ---- against one worker ---------------------------------------------------------------------------------------------


def share_out(rank: int, size: int, shares: tuple[int, ...], device: str) -> list[Any]:
    return [on_every_backend(two_steps, rank, shares, device, name) for name in LAYERS]


def two_steps(rank: int, shares: tuple[int, ...], device: str, name: str, group: Any) -> str:
    """Compares with nn.BatchNorm on all rows; returns the bits of what must be equal everywhere."""
    build, shape, memory_format = LAYERS[name]
    whole_layer = build()
    if whole_layer.affine:
        whole_layer.weight.data, whole_layer.bias.data = numbers(FEATURES, seed=1), numbers(FEATURES, seed=2)
    whole_layer.to(device)
    layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole_layer), group)
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    for step in range(2):
        x = (3 + numbers(sum(shares), *shape, seed=10 + step)).to(device).contiguous(memory_format=memory_format)
        direction = numbers(*x.shape, seed=20 + step).to(device)
        whole_x, my_x = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        whole_y, my_y = whole_layer(whole_x), layer(my_x)
        (whole_y * direction).sum().backward()
        (my_y * direction[mine]).sum().backward()
        assert_close(my_y, whole_y[mine], f"{name}: output")
        assert my_y.stride() == whole_y[mine].stride()
        assert whole_x.grad is not None
        assert_close(my_x.grad, whole_x.grad[mine], f"{name}: gradient of the input")
    for (key, mine_), (_, whole) in zip(layer.named_parameters(), whole_layer.named_parameters(), strict=True):
        total = mine_.grad.clone()
        dist.all_reduce(total)
        assert_close(total, whole.grad, f"{name}: gradient of {key}")
    for key, buffer in whole_layer.named_buffers():
        assert_close(layer.get_buffer(key).double(), buffer.double(), f"{name}: {key}")
    return bits_of(layer.named_buffers())


@pytest.mark.few(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shares",
    [(5, 5), (18, 2), (10, 0), (4, 4, 4), (18, 1, 1), (0, 7, 3)],
    ids=lambda shares: "+".join(map(str, shares)),
)
def test_like_one_worker_with_all_rows(shares: tuple[int, ...], device: str) -> None:
    results = on_workers(share_out, len(shares), shares, device)
    for on_layer in zip(*results, strict=True):
        assert len({bits for by_backend in on_layer for bits in by_backend}) == 1  # all workers, gloo and shm


@pytest.mark.parametrize("size", range(1, 10))
def test_sums_are_formed_along_the_tree(size: int) -> None:
    table = numbers(size, 50, seed=size)
    rows = list(table.clone())
    for dst, src in tree_pairs(size):
        rows[dst] = rows[dst] + rows[src]
    assert torch.equal(batchnorm._sum_rows(table), rows[0])


# ---- in programs ----------------------------------------------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.second, self.norm_second, self.out = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.out(self.norm_second(self.second(x)).relu().mean((2, 3)))


def train(model: nn.Module, mine: slice, rows: int, workers: int) -> list[str]:
    """20 steps of one program, with the mean over the global batch; digests of the weights after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(20):
        x, y = numbers(rows, 1, 8, 8, seed=step)[mine], (torch.arange(rows) % 5)[mine]
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") * workers / rows).backward()
        optimizer.step()
        found.append(digest(dict(model.state_dict())))
    return found


def train_in_wrappers(rank: int, size: int) -> list[list[str]]:
    torch.manual_seed(0)
    start, rows = Cnn().double(), 10
    mine = slice(0, 7) if rank == 0 else slice(7, 10)
    alone = copy.deepcopy(start)
    train(alone, slice(0, rows), rows, 1)

    found = []
    for wrapper, backend in [(OurDDP, "gloo"), (TorchDDP, "gloo"), (OurDDP, "shm")]:
        group = dist.new_group(backend=backend)
        module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start), group)
        found.append(train(wrapper(module, process_group=group), mine, rows, size))
        for (name, got), expected in zip(module.state_dict().items(), alone.state_dict().values(), strict=True):
            assert_close(got.double(), expected.double(), f"{name} after 20 steps", limit=1e-9)
    return found


def test_in_our_wrapper_and_in_torchs_replicas_stay_equal_and_train_like_one() -> None:
    first, second = on_workers(train_in_wrappers, 2)
    assert first == second
    ours, torchs, ours_on_shm = first
    assert len(set(ours)) == 20
    assert ours == torchs == ours_on_shm


def refuse_torchs_own(rank: int, size: int) -> list[str]:
    found = []
    for wrapper in (OurDDP, TorchDDP):
        with pytest.raises(ValueError, match="only work with GPU modules") as caught:
            wrapper(nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3), nn.SyncBatchNorm(3)))
        found.append(str(caught.value))
    return found


def test_torchs_own_layer_is_still_refused_on_a_cpu() -> None:
    assert len(on_workers(refuse_torchs_own, 2)[0]) == 2


# ---- who is asked, and how often ------------------------------------------------------------------------------------


def count_collectives(rank: int, size: int) -> dict[str, Any]:
    calls: list[int] = []
    gather = batchnorm._all_gather
    batchnorm._all_gather = lambda *a, **o: (calls.append(a[1].numel()), gather(*a, **o))[1]
    layer, counts = SyncBatchNorm(FEATURES), {}

    def during(what: str, act: Any) -> Any:
        calls.clear()
        result = act()
        counts[what] = len(calls)
        return result

    x = numbers(4, FEATURES, seed=rank, dtype=torch.float32).requires_grad_()
    y = during("forward", lambda: layer(x))
    during("backward", y.sum().backward)
    y = layer(x.detach())
    during("backward without input gradient", y.sum().backward)
    assert layer.weight.grad is not None
    during("no_grad", lambda: torch.no_grad()(layer)(x))
    layer.eval()
    if rank == 0:  # no answer
        during("eval", lambda: layer(x))
        during("eval, untracked", lambda: SyncBatchNorm(FEATURES, track_running_stats=False).eval()(x))

    layer.train()
    pair = dist.new_group([0, 1])
    layer.process_group = pair
    y = during("subgroup" if rank < 2 else "outside the group", lambda: layer(x))
    if rank == 2:
        assert torch.equal(y, F.batch_norm(x, None, None, training=True))
    return counts


def test_one_collective_each_way_and_none_where_there_is_nothing_to_ask() -> None:
    zero, one, two = on_workers(count_collectives, 3)
    both = {"forward": 1, "backward": 1, "backward without input gradient": 0, "no_grad": 1}
    assert zero == both | {"eval": 0, "eval, untracked": 0, "subgroup": 1}
    assert one == both | {"subgroup": 1}
    assert two == both | {"outside the group": 0}


def compare_alone(rank: int = 0, size: int = 1) -> None:
    ours, torchs = SyncBatchNorm(FEATURES), nn.BatchNorm2d(FEATURES)
    for rows in (6, 0, 4):
        x = numbers(rows, FEATURES, 2, 2, seed=rows, dtype=torch.float32)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = ours(mine), torchs(theirs)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.equal(a, b)
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert digest(ours.state_dict()) == digest(torchs.state_dict())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours(torch.ones(1, FEATURES, 1, 1))


def test_without_a_group_and_in_a_world_of_one_it_is_ordinary_batch_norm() -> None:
    compare_alone()
    on_workers(compare_alone, 1)


# ---- edges ----------------------------------------------------------------------------------------------------------


def try_few_values(rank: int, size: int) -> list[Any]:
    layer = SyncBatchNorm(FEATURES)
    before = digest(layer.state_dict())
    found: list[Any] = []
    try:
        layer(torch.ones(1 - rank, FEATURES))
    except ValueError as error:
        found.append(str(error))
    assert digest(layer.state_dict()) == before

    x = torch.full((1, FEATURES), float(rank), requires_grad=True)  # one value each: two in all
    y = layer(x)
    y.sum().backward()
    found.append(y[0, 0].sign().item())

    middle = digest({"mean": layer.running_mean, "var": layer.running_var})
    y = layer(torch.ones(0, FEATURES, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, FEATURES)
    assert digest({"mean": layer.running_mean, "var": layer.running_var}) == middle
    assert layer.num_batches_tracked.item() == 2
    return found


def test_one_value_per_channel_in_the_whole_world_is_an_error_on_all_workers() -> None:
    found = on_workers(try_few_values, 2)
    for rank in range(2):
        assert "Expected more than 1 value per channel when training" in found[rank][0]
        assert f"on rank {rank}" in found[rank][0]
    assert [f[1] for f in found] == [-1, 1]


def try_bad_calls(rank: int, size: int) -> None:
    layer = SyncBatchNorm(FEATURES)
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.ones(FEATURES))
    with pytest.raises(ValueError, match=r"expected 3 channels in dimension 1, got an input of shape \(4, 2\)"):
        layer(torch.ones(4, 2))
    assert layer.num_batches_tracked.item() == 0
    x = torch.randn(4, FEATURES, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_bad_input_is_refused_before_anything_is_sent_and_so_is_a_second_derivative() -> None:
    on_workers(try_bad_calls, 2)


def low_precision(rank: int, size: int, dtype: torch.dtype, device: str) -> None:
    for parameters in (torch.float32, dtype):
        layer = SyncBatchNorm(FEATURES, dtype=parameters, device=device)
        x = (5 + numbers(2000, FEATURES, 4, seed=3, dtype=torch.float32)).to(device, dtype)
        mine = x[:1500] if rank == 0 else x[1500:]
        exact = nn.BatchNorm1d(FEATURES, dtype=torch.float64, device=device)
        whole_x, my_x = x.double().requires_grad_(), mine.clone().requires_grad_()
        direction = numbers(*x.shape, seed=4).to(device, dtype)
        whole_y, my_y = exact(whole_x), layer(my_x)
        (whole_y * direction.double()).sum().backward()
        part = slice(0, 1500) if rank == 0 else slice(1500, 2000)
        my_y.backward(direction[part])
        assert my_y.dtype is dtype
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is parameters
        assert whole_x.grad is not None
        assert my_x.grad is not None
        rounding = torch.finfo(dtype).eps
        assert_close(my_y.double(), whole_y[part], "output", limit=rounding)
        assert_close(my_x.grad.double(), whole_x.grad[part], "gradient", limit=rounding)
        limit = 1e-6 if parameters is torch.float32 else rounding
        assert_close(layer.running_mean.double(), exact.running_mean, "running mean", limit)
        assert_close(layer.running_var.double(), exact.running_var, "running var", limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_have_statistics_in_float32(dtype: torch.dtype, device: str) -> None:
    on_workers(low_precision, 2, dtype, device)


def far_from_zero(rank: int, size: int) -> None:
    """The deviation is a ten-thousandth of the mean: sums of squares in float32 would have no digit left."""
    x = numbers(400, FEATURES, 8, seed=5, dtype=torch.float32) + 10_000
    layer, exact = SyncBatchNorm(FEATURES, momentum=1.0), nn.BatchNorm1d(FEATURES, momentum=1.0, dtype=torch.float64)
    layer(x[:100] if rank == 0 else x[100:])
    exact(x.double())
    assert_close(layer.running_var.double(), exact.running_var, "running var", limit=1e-5)


def test_a_large_mean_costs_no_digits() -> None:
    on_workers(far_from_zero, 2)


def autocast(rank: int, size: int) -> str:
    torch.manual_seed(0)
    model = SyncBatchNorm.convert_sync_batchnorm(Cnn())
    model.first.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(numbers(4, 1, 8, 8, seed=rank, dtype=torch.float32)).square().mean()
    loss.backward()
    assert model.norm.bias.grad is None
    assert model.norm.weight.grad.dtype is torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    return digest(dict(model.named_buffers()))


def test_under_autocast_with_a_frozen_part() -> None:
    first, second = on_workers(autocast, 2)
    assert first == second


def without_waiting(rank: int, size: int) -> None:
    """Like torch's own layer on NCCL; and what reads a GPU's result raises an error meanwhile."""
    group = dist.new_group([rank], backend="nccl")  # one GPU carries one worker of NCCL
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(8, 6, 5, 5, device="cuda").contiguous(memory_format=memory_format)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, torchs = SyncBatchNorm(6, process_group=group).cuda(), nn.BatchNorm2d(6).cuda()
        ours._sync_group = lambda: group  # as in a group of several workers
        direction = torch.randn_like(x)
        torch.cuda.set_sync_debug_mode("error")
        y = ours(mine)
        y.backward(direction)
        torch.cuda.set_sync_debug_mode("default")
        expected = torchs(theirs)
        expected.backward(direction)
        assert_close(y, expected, "output", limit=1e-5)
        assert_close(mine.grad, theirs.grad, "gradient", limit=1e-5)
        assert_close(ours.running_var, torchs.running_var, "running var", limit=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_waits_for_a_gpu() -> None:
    on_workers(without_waiting, 1)


# ---- conversion -----------------------------------------------------------------------------------------------------


def test_conversion_keeps_tensors_flags_and_sharing() -> None:
    shared = nn.BatchNorm1d(4, eps=1e-3, momentum=None)
    model = nn.ModuleDict(
        {
            "a": shared,
            "b": shared,
            "deep": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm3d(4, dtype=torch.float64).eval()),
            "torch": nn.SyncBatchNorm(4, affine=False),
            "bare": nn.BatchNorm2d(4, track_running_stats=False),
            "other": nn.InstanceNorm1d(4),
        }
    )
    shared.weight.requires_grad_(False)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    keys = list(model.state_dict())
    group = object()
    converted = SyncBatchNorm.convert_sync_batchnorm(model, group)

    assert converted is model
    assert list(model.state_dict()) == keys
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensors[name] for name in tensors)
    layers = [model["a"], model["deep"][1], model["torch"], model["bare"]]
    assert all(type(layer) is SyncBatchNorm and layer.process_group is group for layer in layers)
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    assert model["a"] is model["b"]
    assert (model["a"].eps, model["a"].momentum, model["a"].weight.requires_grad) == (1e-3, None, False)
    assert [layer.training for layer in layers] == [True, False, True, True]
    assert [layer.affine for layer in layers] == [True, True, False, True]
    assert [layer.track_running_stats for layer in layers] == [True, True, True, False]
    assert model["deep"][1].weight.dtype is torch.float64
    assert type(model["other"]) is nn.InstanceNorm1d


def test_conversion_of_a_layer_itself_and_of_one_that_is_not_ready() -> None:
    layer = nn.BatchNorm2d(4)
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(converted) is SyncBatchNorm
    assert converted.weight is layer.weight
    assert copy.deepcopy(converted).state_dict().keys() == layer.state_dict().keys()
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its number of channels yet"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_constructor_takes_torchs_arguments() -> None:
    options = {"eps": 1e-4, "momentum": 0.2, "affine": False, "track_running_stats": False, "dtype": torch.float64}
    ours, torchs = (functools.partial(kind, 5, **options)() for kind in (SyncBatchNorm, nn.SyncBatchNorm))
    assert repr(ours) == repr(torchs)
