"""Replicas that are not equal, and computations that do not repeat: found soon, by all workers, and named."""

from __future__ import annotations

import functools
import itertools
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.recovery.replica_check import describe_minority, minority
from on_workers import Failure, try_on_workers
from runs import PROGRAMS, adamw, classify, data, sgd, train, use

WORLDS = [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
STEPS = 8


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    """As memory does it: torch does not notice."""
    raw = tensor.detach().view(-1).view(torch.uint8).numpy()
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


class Tracked(nn.Module):
    """Batch norm, a buffer of its own that every step changes, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.out = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean() + 1
        return self.out(self.norm(self.lin(x)) + self.table.sum())


@dataclass(frozen=True)
class Plant:
    """One bit of one tensor of one worker changes before a step; that of a gradient in the step."""

    what: Callable[[nn.Module, torch.optim.Optimizer], Tensor]
    named: str
    bit: int = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    gradient: bool = False


def of_state(key: str) -> Callable[[nn.Module, torch.optim.Optimizer], Tensor]:
    return lambda model, optimizer: optimizer.state[model.lin.weight][key]


PLANTS = {
    "weight": Plant(lambda model, _: model.lin.weight, "lin.weight"),
    "bias": Plant(lambda model, _: model.out.bias, "out.bias", bit=31),
    "momentum": Plant(of_state("momentum_buffer"), "momentum_buffer of lin.weight", bit=12),
    "exp_avg": Plant(of_state("exp_avg"), "exp_avg of lin.weight", bit=12, optimizer=adamw),
    "exp_avg_sq": Plant(of_state("exp_avg_sq"), "exp_avg_sq of lin.weight", bit=3, optimizer=adamw),
    "gradient": Plant(lambda model, _: model.out.weight.grad, "out.weight", bit=20, gradient=True),
    "gradient, adamw": Plant(lambda model, _: model.lin.bias.grad, "lin.bias", 31, adamw, gradient=True),
    "running mean": Plant(lambda model, _: model.norm.running_mean, "norm.running_mean before a step"),
    "running var": Plant(lambda model, _: model.norm.running_var, "norm.running_var before a step", bit=5),
    "batches": Plant(lambda model, _: model.norm.num_batches_tracked, "norm.num_batches_tracked before a step", bit=40),
    "own buffer": Plant(lambda model, _: model.seen, "seen before a step", bit=9),
    "table": Plant(lambda model, _: model.table, "table", bit=2),
}


def train_with(plant: Plant | None, guilty: int, rank: int, *, every: int | None, at: int = 4) -> str:
    """What it ends with: an error, or the digest."""
    with lockstep.Run(seed=7, progress=False, device="cpu", check_every=every) as run:
        model = run.replicate(Tracked())
        optimizer = (plant or PLANTS["weight"]).optimizer(model.parameters())
        batches = run.batches(data(64), global_batch_size=32, shards=8, epochs=STEPS // 2)
        now = -1

        def change(*_: Any) -> None:
            if plant is not None and now == at and rank == guilty:
                tensor = plant.what(model, optimizer)
                flip(tensor, plant.bit, element=tensor.numel() // 2)

        if plant is not None and plant.gradient:
            optimizer.register_step_pre_hook(change)
        try:
            for batch in run.train(batches, optimizer):
                now = batch.number
                if plant is not None and not plant.gradient:
                    change()
                run.step(classify, batch)
        except lockstep.DivergenceError as error:
            return str(error)
        return run.digest()


def plant_all(rank: int, size: int, backend: str, store: str) -> dict[Any, str]:
    use(backend, store, rank, size)
    found: dict[Any, str] = {("nothing", 0, 1): train_with(None, 0, rank, every=1)}
    for (n, (name, plant)), every in itertools.product(enumerate(PLANTS.items()), (1, 3)):
        guilty = (n + every) % size  # each in turn
        found[name, guilty, every] = train_with(plant, guilty, rank, every=every)
    found["by default", 0, None] = train_with(PLANTS["weight"], 0, rank, every=None, at=0)
    return found


@functools.cache
def outcomes(play: Callable[..., Any], size: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return try_on_workers(play, size, "gloo" if size == 3 else "shm", f"{folder}/store")


def seen(play: Callable[..., Any], size: int) -> Any:
    """What all workers say, if that is the same."""
    found = outcomes(play, size)
    assert not any(isinstance(one, Failure) for one in found), "\n".join(map(str, found))
    assert all(one == found[0] for one in found), found
    return found[0]


planted = functools.partial(seen, plant_all)


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("size", WORLDS)
def test_one_changed_bit_is_found_and_named(size: int, name: str) -> None:
    cases = {key: text for key, text in planted(size).items() if key[0] == name}
    assert len(cases) == 2
    for (_, guilty, every), text in cases.items():
        step = 4 if every == 1 else 5  # every third: after steps 2, 5, 8
        named = re.fullmatch(f"after step {step} the replicas are not equal in (.*?)\\. Rank.*", text)
        assert named, text
        tensors = named[1].split(", ")
        plant = PLANTS[name]
        assert plant.named in tensors
        if " of " in plant.named or plant.gradient:  # it shows in the weight, and in all that is remembered of it
            assert all(tensor.endswith(plant.named.split()[-1]) for tensor in tensors)
        else:
            assert tensors == [plant.named]
        if size >= 3:
            assert f"Rank {guilty} is wrong: the other {size - 1} workers agree." in text
        else:
            assert "Ranks 0, 1 do not agree, and no majority tells who is right." in text


@pytest.mark.parametrize("size", WORLDS)
def test_without_a_change_nothing_is_found(size: int) -> None:
    assert planted(size)["nothing", 0, 1] == train_with(None, 0, 0, every=None)


@pytest.mark.parametrize("size", WORLDS)
def test_by_default_the_first_look_is_after_the_first_step(size: int) -> None:
    assert planted(size)["by default", 0, None].startswith("after step 0 the replicas are not equal in lin.weight. ")


@pytest.mark.parametrize("size", range(1, 6))
def test_the_minority_is_to_blame_if_there_is_one(size: int) -> None:
    for digests in itertools.product(range(min(size, 3)), repeat=size):
        most = max(digests.count(value) for value in digests)
        if most == size:
            continue
        text = describe_minority(minority([[value] for value in digests]), size)
        if 2 * most > size:
            right = max(digests, key=digests.count)
            wrong = [str(rank) for rank, value in enumerate(digests) if value != right]
            assert text.startswith(f"Rank {', '.join(wrong)} is wrong: the other {most} ")
        else:
            assert "no majority" in text


# ---- the audit -----------------------------------------------------------------------------------------------------

DETERMINISTIC = [
    "cnn with batch norm",
    "gpt with dropout and tied weights, AdamW",
    "embedding bag, sparse",
    "fp16 with loss scale",
    "unused branches",
    "arrives twice",
    "buffer of its own",
]
QUICK = ["cnn with batch norm", "fp16 with loss scale", "arrives twice"]  # in `make test`


class Noisy(nn.Module):
    """Adds a number that is not seeded, on one worker."""

    def __init__(self, noise: Callable[[], float]) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise()


class Twice(nn.Module):
    """Calls its part once more, now and then."""

    def __init__(self, again: Callable[[], bool]) -> None:
        super().__init__()
        self.part, self.again = nn.Linear(16, 16), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again():
            self.part(x)
        return self.part(x)


def audited(build: Callable[[], nn.Module], *, every: int = 1, hook: Callable[[Tensor], Tensor] | None = None) -> str:
    options = {"progress": False, "device": "cpu", "check_every": 1000}
    with lockstep.Run(seed=7, audit_every=every, **options) as run:
        model = run.replicate(build())
        if hook is not None:
            model.get_parameter("2.weight").register_hook(hook)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        number = 0
        try:
            for batch in run.train(run.batches(data(320), global_batch_size=32, shards=8), sgd(model.parameters())):
                before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                number = batch.number
                run.step(classify, batch)
        except lockstep.DivergenceError as error:
            same = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
            return f"{error} [{number}, weights {'unchanged' if same else 'changed'}]"
        return "nothing found"


def stack(middle: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(16, 16), middle, nn.Linear(16, 10))


def audit_all(rank: int, size: int, backend: str, store: str) -> dict[str, Any]:
    """Train with audits. Returns what they say, by program, and beside it what it is without them."""
    use(backend, store, rank, size)
    last = rank == size - 1
    system, own, calls = random.SystemRandom(), torch.Generator(), itertools.count()
    own.seed()

    def hook(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        flip(changed, bit=0, element=7)
        return changed

    return {
        "system": audited(stack(Noisy(lambda: system.random() * 1e-3 if last else 0.0))),
        "own generator": audited(stack(Noisy(lambda: float(torch.rand((), generator=own)) if last else 0.0))),
        "every third": audited(stack(Noisy(lambda: system.random() * 1e-3 if last else 0.0)), every=3),
        "sown": audited(stack(Noisy(lambda: float(torch.rand(()))))),
        "twice": audited(stack(Twice(lambda: last and next(calls) % 2 == 0))),
        "gradient": audited(stack(nn.ReLU()), hook=hook if last and size > 1 else None),
    }


def train_twice(rank: int, size: int, backend: str, store: str) -> dict[str, Any]:
    use(backend, store, rank, size)
    names = QUICK if size == 3 else DETERMINISTIC
    return {name: (train(PROGRAMS[name], steps=5), train(PROGRAMS[name], steps=5, audit_every=1)) for name in names}


audits, pairs = functools.partial(seen, audit_all), functools.partial(seen, train_twice)
every_world = pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((3, name) for name in QUICK),
        *(pytest.param(size, name, marks=pytest.mark.slow) for size in (1, 2, 4) for name in DETERMINISTIC),
    ],
)
def test_audits_leave_no_trace(size: int, name: str) -> None:
    plain, with_audits = pairs(size)[name]
    assert plain == with_audits == train(PROGRAMS[name], steps=5)


@every_world
@pytest.mark.parametrize("name", ["system", "own generator", "every third"])
def test_a_module_that_does_not_repeat_is_named(size: int, name: str) -> None:
    text = audits(size)[name]
    assert "the output of 1 (Noisy) is the first that differs" in text
    assert text.endswith("weights unchanged]")
    number = int(text.rpartition("[")[2].split(",")[0])
    assert text.startswith(f"step {number}, shard ")
    assert f"rank {size - 1} computed it" in text
    assert f"2 of 3 agree: rank {size - 1} is wrong" in text if size == 3 else "It does not repeat" in text
    if name == "every third":
        assert (
            number % 3 == 2 or size == 3
        )  # of eight shards one worker has two: it has time for an audit in every step
    assert audits(size)["sown"] == "nothing found"


@every_world
def test_a_module_that_is_called_more_often_is_named(size: int) -> None:
    assert "the output of 1.part (Linear)" in audits(size)["twice"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_one_bit_of_a_gradient_is_found(size: int) -> None:
    text = audits(size)["gradient"]
    assert "the gradient of 2.weight is the first that differs" in text
    assert f"rank {size - 1} computed it" in text
    assert audits(1)["gradient"] == "nothing found"
