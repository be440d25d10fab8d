"""LARS and LAMB against their formulas, one parameter at a time in float64; and what torch expects of an optimiser."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lockstep.train import optim
from lockstep.train.optim import LAMB, LARS

CLOSE = 1e-12
KINDS: list[Any] = [LARS, LAMB]
SHAPES = {"matrix": (5, 4), "bias": (4,), "kernel": (3, 2, 3, 3), "scalar": (), "zero": (3, 3), "large": (70, 80)}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    start = {name: numbers(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    start["zero"] = torch.zeros(3, 3, dtype=torch.float64)
    return {name: nn.Parameter(value.to(dtype)) for name, value in start.items()}


def gradients(step: int, name: str) -> Tensor | None:
    """Of this step: all zeros at times, and at times none at all."""
    seed = 100 * step + sorted(SHAPES).index(name)
    if (name, step) == ("matrix", 2):
        return None
    return torch.zeros(SHAPES[name]).double() if (name, step) == ("kernel", 1) else numbers(*SHAPES[name], seed=seed)


def give_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    for name, weight in params.items():
        grad = gradients(step, name)
        weight.grad = None if grad is None else grad.to(weight.dtype)


def run(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def assert_close(got: dict[str, Any], expected: dict[str, Tensor], limit: float = CLOSE) -> None:
    for name, value in expected.items():
        difference = (got[name].detach().double() - value).abs().max() / value.abs().max()
        assert difference < limit, f"{name}: relative difference {difference}"


# ---- the formulas ---------------------------------------------------------------------------------------------------


def adapted(weight: Tensor, adapt: bool | None) -> bool:
    return weight.ndim > 1 if adapt is None else adapt


def reference_lars(start: dict[str, Tensor], steps: range, o: dict[str, Any]) -> dict[str, Tensor]:
    weights, velocities = dict(start), {name: torch.zeros_like(w) for name, w in start.items()}
    for step in steps:
        for name, w in weights.items():
            g = gradients(step, name)
            if g is None:
                continue
            g = -g if o["maximize"] else g
            decay = o["weight_decay"] if adapted(w, o["adapt"]) or o["adapt"] is not None else 0
            ratio = 1.0
            if adapted(w, o["adapt"]) and w.norm() > 0 and g.norm() > 0:
                ratio = float(o["trust"] * w.norm() / (g.norm() + decay * w.norm()))
            change = o["lr"] * ratio * (g + decay * w)
            velocities[name] = o["momentum"] * velocities[name] + change
            weights[name] = w - (change + o["momentum"] * velocities[name] if o["nesterov"] else velocities[name])
    return weights


def reference_lamb(start: dict[str, Tensor], steps: range, o: dict[str, Any]) -> dict[str, Tensor]:
    weights, count = dict(start), dict.fromkeys(start, 0)
    m, v = ({name: torch.zeros_like(w) for name, w in start.items()} for _ in range(2))
    (b1, b2), clamp = o["betas"], o["norm_range"]
    for step in steps:
        for name, w in weights.items():
            g = gradients(step, name)
            if g is None:
                continue
            g = -g if o["maximize"] else g
            count[name] += 1
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            update = (m[name] / (1 - b1 ** count[name])) / ((v[name] / (1 - b2 ** count[name])).sqrt() + o["eps"])
            decay = o["weight_decay"] if adapted(w, o["adapt"]) or o["adapt"] is not None else 0
            update = update + decay * w
            ratio = 1.0
            if adapted(w, o["adapt"]):
                phi = float(w.norm()) if clamp is None else min(max(float(w.norm()), clamp[0]), clamp[1])
                ratio = phi / float(update.norm()) if phi > 0 and update.norm() > 0 else 1.0
            weights[name] = w - o["lr"] * ratio * update
    return weights


CASES = [
    (LARS, {}),
    (LARS, {"weight_decay": 0.1, "lr": 2.0}),
    (LARS, {"weight_decay": 0.1, "nesterov": True, "trust": 0.02}),
    (LARS, {"weight_decay": 0.1, "momentum": 0.0, "maximize": True}),
    (LARS, {"weight_decay": 0.1, "adapt": True}),
    (LARS, {"weight_decay": 0.1, "adapt": False, "lr": 0.01}),
    (LAMB, {}),
    (LAMB, {"weight_decay": 0.0, "lr": 0.1}),
    (LAMB, {"betas": (0.5, 0.6), "eps": 1e-3, "norm_range": None}),
    (LAMB, {"norm_range": (0.5, 2.0), "maximize": True}),
    (LAMB, {"adapt": True, "weight_decay": 0.2}),
    (LAMB, {"adapt": False, "weight_decay": 0.2}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_like_the_formulas(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    start = {name: p.detach().clone() for name, p in params.items()}
    optimizer = kind(params.values(), **options)
    run(optimizer, params, range(6))
    reference = reference_lars if kind is LARS else reference_lamb
    assert_close(params, reference(start, range(6), optimizer.defaults))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_have_their_own_options(kind: Any) -> None:
    params = parameters()
    start = {name: p.detach().clone() for name, p in params.items()}
    halves = [list(params)[:3], list(params)[3:]]
    own = {"lr": 0.5, "adapt": True, "weight_decay": 0.3}
    optimizer = kind([{"params": [params[n] for n in halves[0]]}, {"params": [params[n] for n in halves[1]], **own}])
    run(optimizer, params, range(4))
    reference = reference_lars if kind is LARS else reference_lamb
    for names, options in zip(halves, [optimizer.defaults, optimizer.defaults | own], strict=True):
        assert_close(params, reference({n: start[n] for n in names}, range(4), options))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_norm_the_ratio_is_one(kind: Any) -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = kind([weight], lr=0.5, weight_decay=0.0)
    weight.grad = torch.full((4, 4), 0.25)
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.tensor(-0.5 * (0.25 if kind is LARS else 1.0)))
    still = nn.Parameter(torch.ones(4, 4))
    still.grad = torch.zeros(4, 4)
    kind([still], lr=0.5, weight_decay=0.0).step()
    assert torch.equal(still.detach(), torch.ones(4, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_stepped_in_float32(kind: Any, dtype: torch.dtype) -> None:
    low = parameters(dtype)
    low["tall"] = nn.Parameter(torch.full((3000, 100), 4.0, dtype=dtype))  # its sum of squares is beyond float16
    wide = {name: nn.Parameter(p.detach().float()) for name, p in low.items()}
    optimizers = [kind(params.values(), lr=0.1) for params in (low, wide)]
    for step in range(4):
        for params, optimizer in zip((low, wide), optimizers, strict=True):
            give_gradients({name: params[name] for name in SHAPES}, step)
            params["tall"].grad = torch.full_like(params["tall"], 1e-4)
            for weight in params.values():  # the same number for both
                weight.grad = None if weight.grad is None else weight.grad.to(dtype).to(weight.dtype)
            optimizer.step()
        with torch.no_grad():
            assert all(torch.equal(low[name], wide[name].to(dtype)) for name in low)
            for name in low:
                wide[name].copy_(low[name])
    assert all(t.dtype is torch.float32 for state in optimizers[0].state.values() for t in state.values())


def test_norms_do_not_depend_on_the_number_of_threads() -> None:
    tensors = [torch.randn(3_000_017), torch.randn(50, 60).t(), torch.randn(4097), torch.zeros(0), torch.ones(())]
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(optim._norms(tensors).tolist())
    torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx([float(t.double().norm()) for t in tensors], rel=1e-6)


# ---- what torch expects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_from_a_state_dict_it_goes_on_with_the_same_bits(kind: Any, dtype: torch.dtype, tmp_path: Any) -> None:
    through = parameters(dtype)
    optimizer = kind(through.values(), lr=0.1)
    run(optimizer, through, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state")
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in through.items()}
    other = kind(resumed.values(), lr=0.7)
    other.load_state_dict(torch.load(tmp_path / "state"))
    run(optimizer, through, range(3, 8))
    run(other, resumed, range(3, 8))
    assert all(torch.equal(through[name], resumed[name]) for name in through)
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_as_learning_rate_and_a_scheduler(kind: Any) -> None:
    found = []
    for rate in (0.25, torch.tensor(0.25)):
        params = parameters(torch.float32)
        optimizer = kind(params.values(), lr=rate)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.25, total_steps=10)
        for step in range(8):
            run(optimizer, params, range(step, step + 1))
            scheduler.step()
        found.append(params)
    for name in SHAPES:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_closures_and_gradients_are_left_alone(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = kind([weight], lr=0.1, maximize=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 18
    assert torch.equal(weight.grad, torch.full((2, 3), 3.0))
    assert (weight > 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_and_complex_gradients_are_refused_before_anything_changes(kind: Any) -> None:
    table, dense = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    dense(table(torch.tensor([1, 2]))).sum().backward()
    before = copy.deepcopy(dense.state_dict())
    optimizer = kind([{"params": dense.parameters()}, {"params": table.parameters()}])
    message = rf"{kind.__name__} does not support sparse gradients, and parameter 0 of group 1, of shape \(5, 3\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    assert not optimizer.state

    wave = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(RuntimeError, match="real numbers only"):
        kind([wave]).step()


def bad_arguments() -> Iterator[tuple[Any, dict[str, Any], str]]:
    for kind in KINDS:
        yield kind, {"lr": -1.0}, "lr=-1.0: must be"
        yield kind, {"lr": math.nan}, "lr=nan: must be"
        yield kind, {"lr": torch.ones(2)}, "must have no dimensions"
        yield kind, {"weight_decay": -0.1}, "weight_decay=-0.1: must be"
        yield kind, {"adapt": "all"}, "adapt='all': must be"
    yield LARS, {"momentum": 1.0}, "momentum=1.0: must be"
    yield LARS, {"trust": 0.0}, "trust=0.0: must be"
    yield LARS, {"nesterov": True, "momentum": 0.0}, "nesterov=True: needs a momentum"
    yield LAMB, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): must be"
    yield LAMB, {"betas": (0.9,)}, "must be two numbers"
    yield LAMB, {"eps": -1.0}, "eps=-1.0: must be"
    yield LAMB, {"norm_range": (2.0, 1.0)}, r"norm_range=\(2.0, 1.0\): must be"


@pytest.mark.parametrize(("kind", "options", "message"), list(bad_arguments()))
def test_bad_arguments(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.ones(2))], **options)
    optimizer = kind([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_nothing_is_waited_for(kind: Any, dtype: torch.dtype) -> None:
    for rate in (0.25, torch.tensor(0.25), torch.tensor(0.25, device="cuda")):
        host = parameters(dtype)
        device = {name: nn.Parameter(p.detach().cuda()) for name, p in host.items()}
        optimizer, on_host = kind(device.values(), lr=rate), kind(host.values(), lr=0.25)
        for step in range(4):
            give_gradients(host, step)
            for name, weight in device.items():
                grad = host[name].grad
                weight.grad = None if grad is None else grad.cuda()
            on_host.step()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        limit = CLOSE if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
        assert_close({n: p.cpu() for n, p in device.items()}, {n: p.detach().double() for n, p in host.items()}, limit)


# ---- training -------------------------------------------------------------------------------------------------------


def accuracy_after(build: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
    """40 steps with a batch of 2048: two rings of points, one around the other."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 32), nn.Linear(32, 32)
    model = nn.Sequential(first, nn.BatchNorm1d(32), nn.ReLU(), second, nn.ReLU(), nn.Linear(32, 2))
    optimizer = build(model)
    schedule = lr_scheduler.PolynomialLR(optimizer, total_iters=40, power=2)
    y = torch.arange(2048) % 2
    x = F.normalize(torch.randn(2048, 2)) * (1 + y[:, None]) + 0.2 * torch.randn(2048, 2)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.slow
def test_both_train_with_a_large_batch() -> None:
    assert accuracy_after(lambda m: LARS(m.parameters(), lr=1.0, trust=0.02, weight_decay=1e-4)) > 0.95
    assert accuracy_after(lambda m: LAMB(m.parameters(), lr=0.05)) > 0.95
    assert accuracy_after(lambda m: LARS(m.parameters(), lr=0.0)) < 0.8
