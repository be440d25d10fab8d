"""`lockstep.ShardedOptimizer`: the bits of the optimiser itself, 1/N of its state on each worker, and a state that can
be loaded on any number of workers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

import lockstep
from lockstep import DistributedDataParallel as OurDDP, ShardedOptimizer
from lockstep.ddp.optimizer_cells import CELL_NUMEL, Piece, assign_cells, assign_tensors, flat_view
from lockstep.ddp.weight_exchange import WeightExchange
from on_workers import on_workers

# Also with options that change which code of torch runs.
CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adam, maximize": (torch.optim.Adam, {"lr": 0.01, "maximize": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "LARS": (lockstep.LARS, {"lr": 0.1}),
    "LAMB": (lockstep.LAMB, {"lr": 0.01}),
}


class Model(nn.Module):
    """Parameters of many kinds: larger than a cell and smaller, channels last, without dimensions, without elements,
    shared, of another dtype, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.wide, self.narrow = nn.Linear(8, 101), nn.Linear(101, 7)
        self.again = nn.Linear(8, 101, bias=False)
        self.again.weight = self.wide.weight
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(5))
        self.fine = nn.Parameter(torch.ones(70, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x).mean((2, 3))
        hidden = torch.tanh(self.wide(hidden) + self.again(hidden)) * self.scale
        out: Tensor = self.narrow(hidden) + self.nothing.sum() + self.fine.sum().float()
        return out


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def groups(net: Model) -> list[dict[str, Any]]:
    last = list(net.narrow.parameters())
    return [
        {"params": [p for p in net.parameters() if all(p is not one for one in last)]},
        {"params": last, "lr": 0.02, "weight_decay": 0.01},
    ]


def set_gradients(net: nn.Module, step: int, *, but: tuple[str, ...] = ("unused",)) -> None:
    """The same on all workers, as after an average; sometimes a parameter has none."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in net.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        has_none = name in but or (name == "wide.bias" and step == 2)
        parameter.grad = None if has_none else torch.empty_like(parameter).copy_(gradient)


def weights(net: nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of an optimiser are equal bit by bit, with tensors of the same shapes and dtypes."""
    if isinstance(one, Tensor):
        same_kind = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return same_kind and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def fit(net: Model, name: str) -> None:
    """Replace what the optimiser itself does not support."""
    if "fused" in name:
        net.fine = nn.Parameter(torch.ones(70))  # all of one dtype
    if name == "Adafactor":
        net.nothing = nn.Parameter(torch.ones(1, 3))  # it divides by the number of elements


# ---- the assignment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [[1], [64], [65, 63], [10_000, 1, 7, 64, 128, 5000], [3] * 100, [], [100_000]])
def test_every_element_has_one_owner_and_parts_are_even(workers: int, sizes: list[int]) -> None:
    loads = [0] * workers
    found = assign_cells(sizes, loads)
    for size, pieces in zip(sizes, found, strict=True):
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][:-1]
        assert pieces[-1].stop == size
        assert all(piece.start % CELL_NUMEL == 0 for piece in pieces)
        assert len({piece.owner for piece in pieces}) == len(pieces)
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / workers + CELL_NUMEL + max(sizes, default=0) * (
        max(sizes, default=0) < CELL_NUMEL
    )


def test_many_small_groups_are_even() -> None:
    loads = [0] * 4
    for _ in range(100):
        assign_cells([64], loads)
    assert max(loads) - min(loads) <= 64


def test_whole_tensors_are_even() -> None:
    loads = [0] * 3
    found = assign_tensors([5, 100, 50, 50, 95], loads)
    assert [piece.numel for (piece,) in found] == [5, 100, 50, 50, 95]
    assert sorted(loads) == [100, 100, 100]


def test_a_flat_view_is_in_the_order_of_memory() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    last = x.contiguous(memory_format=torch.channels_last)
    flat = flat_view(last)
    assert flat is not None
    assert torch.equal(flat, x.permute(0, 2, 3, 1).reshape(-1))
    flat[0] = -1
    assert last[0, 0, 0, 0] == -1
    assert flat_view(x[..., ::2]) is None
    assert flat_view(torch.ones(3).expand(2, 3)) is None
    assert flat_view(torch.ones(0, 3)) is None


# ---- the same bits ---------------------------------------------------------------------------------------------------


def plain(name: str, steps: int) -> tuple[list[bytes], Any]:
    net = model()
    fit(net, name)
    kind, options = CASES[name]
    optimizer = kind(groups(net), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        set_gradients(net, step)
        optimizer.step()
        scheduler.step()
    return weights(net), optimizer.state_dict()


def sharded_like_plain(rank: int, size: int) -> dict[str, Any]:
    found = {}
    for name, (kind, options) in CASES.items():
        net = model()
        fit(net, name)
        optimizer = ShardedOptimizer(kind, groups(net), bucket_cap_mb=0.001, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(4):
            set_gradients(net, step)
            optimizer.step()
            scheduler.step()
        optimizer.consolidate_state_dict(to=size - 1)
        expected, state = plain(name, 4)
        is_same_state = rank != size - 1 or same_state(optimizer.state_dict(), state)
        found[name] = (weights(net) == expected, is_same_state)
    return found


@functools.cache
def outcomes(size: int) -> list[dict[str, Any]]:
    return on_workers(sharded_like_plain, size)


@pytest.mark.parametrize(
    "size", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_weights_and_state_have_the_bits_of_the_optimiser_itself(size: int, name: str) -> None:
    for rank, found in enumerate(outcomes(size)):
        assert found[name] == (True, True), f"rank {rank}: (weights, state) {found[name]}"


def train(rank: int, size: int, wrapper: Any, make: Callable[[Any], Optimizer], steps: int) -> list[bytes]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 10))
    wrapped, optimizer = wrapper(net), make(net.parameters())
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    return weights(net)


def in_loops(rank: int, size: int) -> list[bool]:
    found = []
    for wrapper in (OurDDP, TorchDDP):
        adam = functools.partial(torch.optim.AdamW, lr=0.01)
        mine = train(rank, size, wrapper, functools.partial(ShardedOptimizer, torch.optim.AdamW, lr=0.01), 5)
        found.append(mine == train(rank, size, wrapper, adam, 5))
    return found


def test_loops_with_our_class_and_torchs_end_with_the_same_weights() -> None:
    assert on_workers(in_loops, 3) == [[True, True]] * 3


# ---- memory ----------------------------------------------------------------------------------------------------------


def bytes_of_state(rank: int, size: int) -> tuple[int, int]:
    net = nn.Sequential(*[nn.Linear(100, 100) for _ in range(5)])
    set_gradients(net, 0)
    own, whole = ShardedOptimizer(torch.optim.AdamW, net.parameters()), torch.optim.AdamW(net.parameters())
    own.step()
    whole.step()
    return own.state_bytes(), sum(value.nbytes for state in whole.state.values() for value in state.values())


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_each_worker_keeps_its_share_of_the_state(size: int) -> None:
    for own, whole in on_workers(bytes_of_state, size):
        assert own <= whole * (1 / size + 0.02)


# ---- the state -------------------------------------------------------------------------------------------------------


def save(rank: int, size: int, path: str) -> list[bytes]:
    net = model()
    optimizer = ShardedOptimizer(torch.optim.AdamW, groups(net), lr=0.01)
    for step in range(6):
        if step == 3:
            optimizer.consolidate_state_dict()
            if rank == 0:
                torch.save([net.state_dict(), optimizer.state_dict()], path)
        set_gradients(net, step)
        optimizer.step()
    return weights(net)


def resume(rank: int, size: int, path: str) -> list[bytes]:
    net, (of_model, of_optimizer) = model(), torch.load(path)
    net.load_state_dict(of_model)
    optimizer = ShardedOptimizer(torch.optim.AdamW, groups(net), lr=0.5)  # the saved lr counts
    optimizer.load_state_dict(of_optimizer)
    for step in range(3, 6):
        set_gradients(net, step)
        optimizer.step()
    return weights(net)


def test_a_state_is_loaded_on_another_number_of_workers_and_without_sharding(tmp_path: Any) -> None:
    path = str(tmp_path / "state.pt")
    expected = on_workers(save, 3, path)[0]
    assert on_workers(resume, 2, path)[1] == expected
    net, (of_model, of_optimizer) = model(), torch.load(path)
    net.load_state_dict(of_model)
    optimizer = torch.optim.AdamW(groups(net), lr=0.5)
    optimizer.load_state_dict(of_optimizer)
    for step in range(3, 6):
        set_gradients(net, step)
        optimizer.step()
    assert weights(net) == expected


def test_the_state_of_an_unsharded_optimiser_is_loaded() -> None:
    expected, _ = plain("AdamW", 6)
    net = model()
    before = torch.optim.AdamW(groups(net), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(before, 0.9)
    for step in range(3):
        set_gradients(net, step)
        before.step()
        scheduler.step()
    optimizer = ShardedOptimizer(torch.optim.AdamW, groups(net))
    optimizer.load_state_dict(before.state_dict())
    scheduler.optimizer = optimizer
    for step in range(3, 6):
        set_gradients(net, step)
        optimizer.step()
        scheduler.step()
    assert weights(net) == expected


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ask_too_early(rank: int, size: int) -> list[str]:
    net = nn.Linear(4, 100)
    optimizer = ShardedOptimizer(torch.optim.AdamW, net.parameters())
    said = [said_by(optimizer.state_dict)]
    optimizer.consolidate_state_dict()
    said.append(said_by(optimizer.state_dict))
    set_gradients(net, 0)
    optimizer.step()
    return [*said, said_by(optimizer.state_dict)]


def test_a_state_that_was_not_collected_since_the_last_step_is_refused() -> None:
    rank0, rank1 = on_workers(ask_too_early, 2)
    assert rank0[1] == ""
    for text in (rank0[0], rank0[2], *rank1):
        assert "call consolidate_state_dict(to=RANK) on all workers" in text
    assert rank1[0].startswith("RuntimeError: rank 1 has only its part")


def test_a_state_dict_is_not_changed_by_later_steps_and_has_the_rate_of_now() -> None:
    net = nn.Linear(4, 3)
    optimizer = ShardedOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_gradients(net, 0)
    optimizer.step()
    optimizer.consolidate_state_dict()
    scheduler.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == 0.05
    for _ in range(2):
        optimizer.load_state_dict(saved)
        for step in range(3):
            set_gradients(net, step)
            optimizer.step()
        assert [float(state["step"]) for state in saved["state"].values()] == [1.0, 1.0]


def test_it_cannot_be_copied() -> None:
    optimizer = ShardedOptimizer(torch.optim.SGD, nn.Linear(4, 3).parameters(), lr=0.1)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_a_state_that_does_not_fit_is_refused() -> None:
    net = nn.Linear(4, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    other = torch.optim.SGD([net.weight], lr=0.1)
    with pytest.raises(
        ValueError, match=r"the state has groups of \[1\] parameters, this optimiser has groups of \[2\]"
    ):
        optimizer.load_state_dict(other.state_dict())
    state = torch.optim.AdamW(nn.Linear(4, 3).parameters()).state_dict()
    state["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(5, 5)}}
    adam = ShardedOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"exp_avg has the shape \(5, 5\), and its parameter \(3, 4\)"):
        adam.load_state_dict(state)
    assert adam.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="to=1: there are ranks 0 to 0"):
        optimizer.consolidate_state_dict(to=1)


# ---- groups that come later, closures, moves -------------------------------------------------------------------------


def later_group(rank: int, size: int) -> bool:
    results = []
    for make in (torch.optim.AdamW, functools.partial(ShardedOptimizer, torch.optim.AdamW)):
        net = model()
        optimizer = make([net.conv.weight], lr=0.01)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(net.wide.parameters()), "lr": 0.1})
            if step == 4:  # other memory
                net.wide.weight.data = net.wide.weight.data.clone()
            set_gradients(net, step)
            optimizer.step()
        results.append(weights(net))
    return results[0] == results[1]


def test_a_group_can_be_added_later_and_parameters_can_move() -> None:
    assert on_workers(later_group, 3) == [True] * 3


def with_closure(rank: int, size: int) -> tuple[float, list[bool]]:
    torch.manual_seed(0)
    net = nn.Linear(100, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = net(torch.ones(2, 100)).square().mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure)), calls


def test_a_closure_is_called_once_with_gradients() -> None:
    (loss, calls), other = on_workers(with_closure, 2)
    assert loss > 0
    assert calls == [True]
    assert other == (loss, calls)


# ---- uneven inputs ---------------------------------------------------------------------------------------------------


def uneven(rank: int, size: int, wrapper: Any) -> list[list[bytes]]:
    """Rank r has r + 2 batches. The last worker's weights without sharding, and all workers' with it."""
    results = []
    for make in (torch.optim.AdamW, functools.partial(ShardedOptimizer, torch.optim.AdamW)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 10))
        wrapped, optimizer = wrapper(net), make(net.parameters(), lr=0.01)
        joinables = [wrapped, optimizer] if isinstance(optimizer, ShardedOptimizer) else [wrapped]
        with Join(joinables):
            for step in range(rank + 2):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
        results.append(weights(net))
    return results


@pytest.mark.parametrize("wrapper", [OurDDP, TorchDDP], ids=["ours", "torchs"])
def test_uneven_inputs_under_join(wrapper: Any) -> None:
    by_rank = on_workers(uneven, 3, wrapper)
    for _, sharded in by_rank:
        assert sharded == by_rank[-1][0]


# ---- what is refused -------------------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    pass


def test_what_cannot_be_sharded_is_refused_with_the_reason() -> None:
    net = nn.Linear(4, 3)
    with pytest.raises(TypeError, match="LBFGS cannot be sharded: it treats all parameters as one vector"):
        ShardedOptimizer(torch.optim.LBFGS, net.parameters())
    with pytest.raises(TypeError, match="SparseAdam cannot be sharded: gradients that are sparse"):
        ShardedOptimizer(torch.optim.SparseAdam, net.parameters())
    with pytest.raises(TypeError, match=r"not known whether Own updates each tensor on its own.*whole_tensors=True"):
        ShardedOptimizer(Own, net.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"takes the class of an optimiser first, such as torch.optim.AdamW, not Linear"
    ):
        ShardedOptimizer(net, torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_cap_mb=0 must be positive"):
        ShardedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1, bucket_cap_mb=0)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ShardedOptimizer(torch.optim.SGD, net.parameters(), learning_rate=0.1)
    ShardedOptimizer(Own, net.parameters(), lr=0.1, whole_tensors=True)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = ShardedOptimizer(torch.optim.SGD, table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of a parameter of shape \(10, 3\) is sparse"):
        optimizer.step()


class Picky(torch.optim.SGD):
    """Refuses a parameter that only one worker has."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(parameter.numel() == 13 for parameter in self.param_groups[-1]["params"]):
            raise ValueError("13 elements")


def mistakes(rank: int, size: int) -> dict[str, str]:
    """What each worker says, if the workers differ or one of them cannot do its part."""
    sgd = functools.partial(ShardedOptimizer, torch.optim.SGD, lr=0.1)
    net, table = nn.Linear(100, 100), nn.Embedding(10, 3, sparse=True)
    strided = nn.Parameter(torch.ones(4, 4)[:, :: 1 + rank])
    found = {
        "shapes": said_by(lambda: sgd(nn.Linear(4, 3 + rank).parameters())),
        "counts": said_by(lambda: sgd([{"params": [net.weight] if rank else []}])),
        "caps": said_by(lambda: sgd([net.weight], bucket_cap_mb=1 + rank)),
        "strides": said_by(lambda: sgd([strided])),
        "gaps": said_by(lambda: sgd([nn.Parameter(torch.ones(4, 4)[:, ::2])])),
        "twice": said_by(lambda: sgd([net.weight, net.weight])),
    }
    picky = [nn.Parameter(torch.ones(13)), nn.Parameter(torch.ones(20))]
    found["one worker"] = said_by(lambda: ShardedOptimizer(Picky, picky, lr=0.1, whole_tensors=True))
    optimizer = ShardedOptimizer(Picky, net.parameters(), lr=0.1, whole_tensors=True)
    found["later group"] = said_by(lambda: optimizer.add_param_group({"params": picky}))
    set_gradients(net, 0)
    optimizer.step()  # as if the group had never been added
    mixed = sgd([*net.parameters(), *table.parameters()])
    table(torch.tensor([1])).sum().backward()
    found["sparse"] = said_by(mixed.step)
    conv = nn.Conv2d(3, 4, 3)
    adam = ShardedOptimizer(torch.optim.AdamW, conv.parameters())
    set_gradients(conv, 0)
    adam.step()
    conv.to(memory_format=torch.channels_last)
    found["format"] = said_by(adam.step)
    return found


def test_all_workers_say_what_is_wrong_and_none_waits() -> None:
    by_rank = on_workers(mistakes, 2)
    for found in by_rank:
        for name in ("shapes", "counts", "caps", "strides"):
            assert "ReplicaMismatchError: the workers' parameters or options differ" in found[name], name
        assert "[0, 1] tensors" in found["counts"]
        assert "parameter 0 of group 0, of shape (4, 2), is a view with gaps" in found["gaps"]
        assert "of shape (100, 100), is twice in its group" in found["twice"]
        assert "the gradient of a parameter of shape (10, 3) is sparse" in found["sparse"]
        assert "the memory format of a parameter of shape (4, 3, 3, 3) has changed" in found["format"]
    for name in ("one worker", "later group"):
        texts = sorted(found[name] for found in by_rank)
        assert texts[1] == "ValueError: 13 elements"
        assert texts[0].endswith("failed with its part of the parameters: ValueError: 13 elements")


def many_threads(rank: int, size: int) -> list[str]:
    """The optimisers of which an odd number of elements is split between threads in another way than in parts."""
    torch.set_num_threads(4)
    differ = []
    for name, (kind, options) in CASES.items():
        results = []
        for make in (kind, functools.partial(ShardedOptimizer, kind)):
            torch.manual_seed(0)
            weight = nn.Parameter(torch.randn(200_003) if kind is not torch.optim.Adafactor else torch.randn(9, 9))
            optimizer = make([weight], **options)
            for step in range(2):
                weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
                optimizer.step()
            results.append(weight.detach().numpy().tobytes())
        if results[0] != results[1]:
            differ.append(name)
    return differ


def test_the_same_bits_with_many_threads() -> None:
    assert on_workers(many_threads, 2) == [[], []]


def complex_and_half(rank: int, size: int) -> list[bool]:
    same = []
    for dtype in (torch.complex64, torch.bfloat16):
        results = []
        for make in (torch.optim.AdamW, functools.partial(ShardedOptimizer, torch.optim.AdamW)):
            weight = nn.Parameter(torch.linspace(0, 1, 300_333).to(dtype))  # large enough for a broadcast
            optimizer = make([weight, nn.Parameter(torch.ones(3))], lr=0.01)
            for step in range(3):
                weight.grad = torch.randn(300_333, generator=torch.Generator().manual_seed(step)).to(dtype)
                optimizer.step()
            results.append(weight.detach().clone())
        same.append(torch.equal(*results))
    return same


def test_complex_and_half_precision_parameters() -> None:
    assert on_workers(complex_and_half, 3) == [[True, True]] * 3


def train_a_part(rank: int, size: int) -> list[Any]:
    """A large frozen layer before a small one that is trained, as in fine-tuning; then the large one is trained too."""
    net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 8))
    net[0].requires_grad_(False)
    optimizer = ShardedOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1)
    nn.init.constant_(net[0].weight, float(rank))  # would be overwritten if it was exchanged
    trained = torch.full_like(net[1].weight, 0.5)
    net[1].weight.grad, net[1].bias.grad = trained, torch.ones_like(net[1].bias)
    optimizer.step()
    found = [optimizer.state_bytes(), float(net[0].weight[0, 0]), weights(net[1])]
    nn.init.zeros_(net[0].weight)
    net[0].requires_grad_(True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [*found, weights(net)]


def test_frozen_parameters_are_not_exchanged_and_do_not_make_the_parts_uneven() -> None:
    found = on_workers(train_a_part, 3)
    state = 2 * 4 * (300 * 8 + 8)
    for rank, (size, frozen, _, _) in enumerate(found):
        assert size <= state / 3 + 0.02 * state + 4 * 64 * 2 + 16  # a cell more, and counters
        assert frozen == rank
    assert all(one[2:] == found[0][2:] for one in found)


def too_early(rank: int, size: int, folder: str) -> str:
    dist.destroy_process_group()
    net = nn.Linear(4, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return said_by(optimizer.step)


def test_one_that_was_made_before_the_process_group_is_refused(tmp_path: Any) -> None:
    for text in on_workers(too_early, 2, str(tmp_path)):
        assert "was made before the process group" in text


def over_shm(rank: int, size: int, folder: str) -> bool:
    dist.destroy_process_group()
    dist.init_process_group("shm", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mine = train(rank, size, OurDDP, functools.partial(ShardedOptimizer, torch.optim.AdamW, lr=0.01), 3)
    return mine == train(rank, size, OurDDP, functools.partial(torch.optim.AdamW, lr=0.01), 3)


def test_over_shm(tmp_path: Any) -> None:
    assert on_workers(over_shm, 3, str(tmp_path)) == [True] * 3


def test_a_run_refuses_it() -> None:
    with lockstep.Run(seed=1, progress=False) as run:
        net = run.replicate(nn.Linear(4, 3))
        batches = run.batches(torch.ones(8, 4), global_batch_size=4, shards=1, epochs=1)
        with pytest.raises(TypeError, match="a ShardedOptimizer is for a loop of your own"):
            next(iter(run.train(batches, ShardedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1))))


# -- the exchange of weights -------------------------------------------------------------------------------------------


def exchange(rank: int, size: int, device: str, backend: str) -> list[str]:
    """Weights that only their owner has, and its buddy, are sent to all workers; what differs is told."""
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    wrong = []

    def is_buddy(_: Tensor, piece: Piece) -> bool:
        return (piece.owner + 1) % size == rank

    shapes = [(200_000,), (7,), (0,), (300, 301), (90_001,)]
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    whole[-1] = whole[-1].bfloat16()
    in_one = torch.zeros(1 + 77_777, dtype=torch.bfloat16, device=device)  # a weight at an odd offset of its memory
    whole.append(torch.arange(77_777).bfloat16())
    divisions = {
        "even": assign_cells([one.numel() for one in whole], [0] * size),
        "most on one": [[Piece(size - 1, 0, one.numel())] if one.numel() else [] for one in whole],
    }
    for division, owned in divisions.items():
        for spans_hosts in (False, True):
            for bucket_bytes in (25 * 2**20, 299_999):
                weights = [torch.full_like(one, -1.0, device=device) for one in whole[:-1]]
                weights.append(in_one.fill_(-1.0)[1:])
                pieces = dict(zip(weights, owned, strict=True))
                for weight, one in zip(weights, whole, strict=True):
                    for piece in pieces[weight]:
                        if rank in (piece.owner, (piece.owner + 1) % size):
                            weight.view(-1)[piece.start : piece.stop] = one.view(-1)[piece.start : piece.stop].to(
                                device
                            )
                sent = WeightExchange(group, pieces, bucket_bytes, spans_hosts=spans_hosts, has_own=is_buddy)
                sent.run()
                sent.run()
                for number, (weight, one) in enumerate(zip(weights, whole, strict=True)):
                    if not torch.equal(weight.cpu(), one):
                        wrong.append(f"{number}: {division}, {spans_hosts}, {bucket_bytes}")
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_new_weights_arrive_whichever_way_they_are_sent(backend: str) -> None:
    assert on_workers(exchange, 3, "cpu", backend) == [[], [], []]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_new_weights_arrive_on_a_gpu() -> None:
    assert on_workers(exchange, 3, "cuda:0", "shm") == [[], [], []]


def test_a_sharded_optimizer_between_hosts_has_buckets_of_any_size() -> None:
    assert on_workers(train_between_hosts, 2) == [True, True]


def train_between_hosts(rank: int, size: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_HOST", f"host {rank}")
        torch.manual_seed(0)
        model, alone = nn.Linear(500, 500), nn.Linear(500, 500)
        alone.load_state_dict(model.state_dict())
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1, bucket_cap_mb=0.7)
        optimizers = [optimizer, torch.optim.AdamW(alone.parameters(), lr=0.1)]
        for one, its in zip((model, alone), optimizers, strict=True):
            one(torch.ones(2, 500)).square().sum().backward()
            its.step()
    return optimizer._spans_hosts and all(map(torch.equal, model.parameters(), alone.parameters()))
