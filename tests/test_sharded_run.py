"""`Run(shard_optimizer=True)`: the bits of the run that is not sharded, in less memory, and through checkpoints."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli import main as cli
from lockstep.ddp.optimizer_cells import choose_buddies
from lockstep.ddp.optimizer_state import WorkerFacts, choose_known
from lockstep.errors import LostStateError
from on_workers import Failure, on_workers, try_on_workers
from runs import PROGRAMS, Cnn, Gpt, Program, classify, data, mlp, predict_tokens, train, use

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=2e-3),
    "LARS": lambda p: lockstep.LARS(p, lr=0.5, momentum=0.9, weight_decay=1e-4),
    "LAMB": lambda p: lockstep.LAMB(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
}
MODELS: dict[str, Any] = {"mlp": (mlp, classify), "cnn": (Cnn, classify), "gpt": (Gpt, predict_tokens)}
CASES: dict[str, Program] = {
    f"{optimizer}, {model}": Program(build, make, loss, samples=64)
    for model, (build, loss) in MODELS.items()
    for optimizer, make in OPTIMIZERS.items()
} | {name: program for name, program in PROGRAMS.items() if "sparse" not in name}
QUARTERS = [tuple(CASES)[first::4] for first in range(4)]
WORLDS = [
    (size, backend, redundancy)
    for size, backend in [(1, "gloo"), (2, "shm"), (2, "gloo"), (3, "gloo"), (3, "shm"), (4, "hierarchy"), (8, "shm")]
    for redundancy in (0, 1)
]
FAST = {(3, "gloo", 1): 1}


def train_all(rank: int, size: int, backend: str, store: str, names: tuple[str, ...], options: Any) -> dict[str, Any]:
    use(backend, store, rank, size)
    return {name: train(CASES[name], **options) for name in names}


@functools.cache
def results(size: int, backend: str, names: tuple[str, ...], redundancy: int | None) -> dict[str, Any]:
    """The results of some cases; `redundancy` None: not sharded."""
    options = {} if redundancy is None else {"shard_optimizer": True, "redundancy": redundancy}
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_workers(train_all, size, backend, f"{folder}/store", names, options)
    assert all(found == by_rank[0] for found in by_rank), "the workers differ from each other"
    return by_rank[0]


def worlds_and_quarters() -> list[Any]:
    return [
        pytest.param(*world, quarter, marks=[] if FAST.get(world) == quarter else [pytest.mark.slow])
        for world in WORLDS
        for quarter in range(4)
    ]


@pytest.mark.parametrize(("size", "backend", "redundancy", "quarter"), worlds_and_quarters())
def test_sharding_does_not_change_the_bits(size: int, backend: str, redundancy: int, quarter: int) -> None:
    names = QUARTERS[quarter]
    assert results(size, backend, names, redundancy) == results(1, "gloo", names, None)


# -- checkpoints -------------------------------------------------------------------------------------------------------

PARTS = [(3, "gloo", True), (2, "shm", False), (2, "gloo", True), (1, "gloo", False)]  # workers, and whether sharded
RESUMED = ("AdamW, gpt", "LAMB, mlp", "SGD, cnn", "fp16 with loss scale")


def train_part(
    rank: int, size: int, backend: str, folder: str, sharded: bool, steps: int | None, index: int
) -> dict[str, Any]:
    use(backend, f"{folder}/store-{index}", rank, size)
    return {
        name: train(CASES[name], steps=steps, directory=Path(folder) / str(n), shard_optimizer=sharded)
        for n, name in enumerate(RESUMED)
    }


def test_a_checkpoint_is_read_on_other_numbers_of_workers_sharded_or_not() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for n, (size, backend, sharded) in enumerate(PARTS):
            steps = None if n == len(PARTS) - 1 else n + 1
            by_rank = on_workers(train_part, size, backend, folder, sharded, steps, n)
            assert all(found == by_rank[0] for found in by_rank)
    assert by_rank[0] == results(1, "gloo", RESUMED, None)


# -- memory ------------------------------------------------------------------------------------------------------------


def measure(rank: int, size: int) -> list[int]:
    found = []
    for redundancy in (None, 0, 1):
        options = {} if redundancy is None else {"shard_optimizer": True, "redundancy": redundancy}
        with lockstep.Run(None, seed=7, progress=False, device="cpu", **options) as run:
            model = run.replicate(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12))))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            samples = TensorDataset(torch.randn(16, 64), torch.zeros(16, dtype=torch.long))
            for batch in run.train(run.batches(samples, global_batch_size=16, shards=8), optimizer):
                run.step(classify, batch)
            found.append(run.memory()["optimizer"])
    return found


@pytest.mark.parametrize(
    "size", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_each_worker_keeps_its_part_only(size: int) -> None:
    for whole, plain, redundant in on_workers(measure, size):
        assert plain <= whole * (1 / size + 0.02)
        assert redundant <= whole * (2 / size + 0.02)


# -- programs that do more ---------------------------------------------------------------------------------------------


class TwoParts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(16, 10), torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x)


def train_unusually(rank: int, size: int, backend: str, store: str, options: dict[str, Any]) -> list[str]:
    use(backend, store, rank, size)
    return [_with_two_optimizers(options), _with_a_new_group(options), _with_scheduler_and_clipping(options)]


def _with_two_optimizers(options: dict[str, Any]) -> str:
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(TwoParts())
        first = torch.optim.AdamW(model.one.parameters(), lr=1e-2)
        second = lockstep.LAMB(model.other.parameters(), lr=1e-2)
        for batch in run.train(run.batches(data(64), global_batch_size=16, shards=4), first, second):
            run.step(classify, batch, optimizer=first)
            if batch.number % 2:
                run.step(classify, batch, optimizer=second)
        return run.digest()


def _with_a_new_group(options: dict[str, Any]) -> str:
    """Parts of the model are frozen first, and one comes to the optimiser later."""
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(
            torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 24), torch.nn.Linear(24, 10))
        )
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        optimizer = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], lr=1e-2)
        for batch in run.train(run.batches(data(128), global_batch_size=16, shards=4), optimizer):
            if batch.number == 2:
                model[0].requires_grad_(True)
            if batch.number == 4:
                model[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
            run.step(classify, batch)
            with torch.no_grad():
                model[1].weight.renorm_(2, 0, 1.5)  # the program changes weights between the steps
        return run.digest()


def _with_scheduler_and_clipping(options: dict[str, Any]) -> str:
    options = options | {"max_grad_norm": 0.1, "grad_comm_dtype": "bf16"}
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8)
        batches = run.batches(data(128), global_batch_size=16, shards=4)
        for batch in run.train(batches, optimizer, scheduler=schedule, scaling=lockstep.LRScaling(base_batch=8)):
            run.step(classify, batch)
        return run.digest()


def test_other_programs_have_the_same_bits_too() -> None:
    found = []
    for size, backend, options in (
        (1, "gloo", {}),
        (2, "shm", {"shard_optimizer": True, "redundancy": 1}),
        (3, "gloo", {"shard_optimizer": True}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            found += on_workers(train_unusually, size, backend, f"{folder}/store", options)
    assert all(one == found[0] for one in found)


# -- errors ------------------------------------------------------------------------------------------------------------


def begin(optimizer: Any, model: Any = mlp, **options: Any) -> None:
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True, **options) as run:
        replica = run.replicate(model())
        for _ in run.train(run.batches(data(8), global_batch_size=8), optimizer(replica.parameters())):
            raise AssertionError("not reached")


class Own(torch.optim.SGD):
    pass


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "model", "error", "text"),
    [
        (lambda p: Own(p, lr=0.1), mlp, TypeError, "not known whether Own updates each tensor on its own"),
        (with_hook, mlp, ValueError, "this SGD has step hooks"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda: torch.nn.Embedding(4, 4, sparse=True),
            ValueError,
            "the gradient of weight is sparse",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(optimizer: Any, model: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        begin(optimizer, model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"redundancy": 2, "shard_optimizer": True}, "redundancy=2 is not known; choose 0, 1 or None"),
        ({"redundancy": True, "shard_optimizer": True}, "redundancy=True is not known"),
        ({"redundancy": 1}, "add shard_optimizer=True"),
        ({"defer_weights": False}, "add shard_optimizer=True"),
        ({"shard_optimizer": 1}, "shard_optimizer=1 must be True or False"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lockstep.Run(None, **options)


def digest_on_one(rank: int, size: int, where: str) -> str:
    os.environ["LOCKSTEP_TIMEOUT_S"] = "5"
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True) as run:
        model, found = run.replicate(mlp()), ""
        batches = run.batches(data(16), global_batch_size=8, shards=2)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            run.step(classify, batch)
            if where == "in the loop" and rank == 0:
                run.digest()
            if where == "in the loop, on_main":
                run.on_main(run.digest)
        run.evaluate(lambda m, b: ((m(b[0]).argmax(1) == b[1]).sum(), len(b[1])), data(16))
        if where == "after the loop, on_main":
            found = run.on_main(run.digest)
        elif rank == 0:
            found = run.digest()
        return found


def test_one_worker_alone_can_ask_for_the_digest_after_the_loop() -> None:
    (whole,) = on_workers(digest_on_one, 1, "after the loop")
    assert on_workers(digest_on_one, 2, "after the loop") == [whole, ""]
    assert on_workers(digest_on_one, 2, "after the loop, on_main") == [whole] * 2


@pytest.mark.parametrize(
    ("where", "text"), [("in the loop", "run.digest"), ("in the loop, on_main", "compute it together")]
)
def test_a_digest_on_one_worker_in_the_loop_is_an_error_that_says_so(where: str, text: str) -> None:
    first, *_ = try_on_workers(digest_on_one, 2, where, timeout_s=60)
    assert isinstance(first, Failure)
    assert text in first


def corrupt(rank: int, size: int) -> None:
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True, redundancy=1, check_every=1) as run:
        model = run.replicate(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in run.train(run.batches(data(64), global_batch_size=8), optimizer):
            run.step(classify, batch)
            if batch.number == 2 and rank == 1:
                state = run._loop.plan.sharded_state.parts._states[0]
                next(iter(state.values()))["exp_avg_sq"][3] += 1e-3


def test_a_part_that_differs_from_its_copy_is_found() -> None:
    for outcome in try_on_workers(corrupt, 3):
        assert "DivergenceError" in outcome, outcome
        assert "rank 1 and rank 2 have different weights" in outcome or "rank 0 and rank 1 have different" in outcome


def save_sharded(rank: int, size: int, folder: str) -> None:
    train(CASES["AdamW, cnn"], directory=Path(folder) / "run", shard_optimizer=True)


def test_an_exported_state_is_that_of_the_optimiser_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_workers(save_sharded, 3, str(tmp_path))
    assert (
        cli.main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "optimizer.pt"), "--what", "optimizer"])
        == 0
    )
    model = Cnn()
    assert f"{3 * len(list(model.parameters()))} tensors of optimizer" in capsys.readouterr().out
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(CASES["AdamW, cnn"], directory=tmp_path / "plain")
    saved = CheckpointStore(tmp_path / "plain").newest()
    assert saved is not None
    for number, parameter in enumerate(model.parameters()):
        for name, value in saved.state["optimizer"]["state"][number].items():
            assert torch.equal(optimizer.state[parameter][name], value), (number, name)
    assert optimizer.param_groups[0]["lr"] == 3e-3


@pytest.mark.parametrize(
    "use_it", [lambda optimizer: optimizer.state_dict(), lambda optimizer: optimizer.load_state_dict({})]
)
def test_a_state_dict_that_would_lack_the_state_is_refused(use_it: Any) -> None:
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True) as run:
        model = run.replicate(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = optimizer.state_dict()
        optimizer.load_state_dict(before)
        for batch in run.train(run.batches(data(16), global_batch_size=8), optimizer):
            run.step(classify, batch)
            with pytest.raises(lockstep.LockstepError, match="is distributed over the workers"):
                use_it(optimizer)


def go_on_with_a_loaded_state(rank: int, size: int, options: dict[str, Any]) -> str:
    """The program itself has loaded a state before it trains."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    with lockstep.Run(None, progress=False, device="cpu", **options) as run:
        replica = run.replicate(model)
        for batch in run.train(run.batches(data(32), global_batch_size=8, shards=4), optimizer):
            run.step(classify, batch)
        assert replica is model
        return run.digest()


def test_a_state_that_the_program_has_loaded_is_used() -> None:
    (whole,) = on_workers(go_on_with_a_loaded_state, 1, {})
    assert on_workers(go_on_with_a_loaded_state, 3, {"shard_optimizer": True}) == [whole] * 3


@pytest.mark.parametrize(
    "use_it", [lambda state, p: state[p], lambda state, p: state.clear(), lambda state, p: state.update({p: {}})]
)
def test_the_state_outside_of_a_step_cannot_be_used(use_it: Any) -> None:
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True) as run:
        model = run.replicate(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in run.train(run.batches(data(8), global_batch_size=8), optimizer):
            run.step(classify, batch)
            with pytest.raises(lockstep.LockstepError, match="is empty, and cannot be written to"):
                use_it(optimizer.state, next(model.parameters()))
    with (
        lockstep.Run(None, progress=False, device="cpu") as run,
        pytest.raises(ValueError, match="make another optimizer"),
    ):
        next(iter(run.train(run.batches(data(8), global_batch_size=8), optimizer)))


def load_on_one(rank: int, size: int) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank == 0:
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True) as run:
        run.replicate(model)
        next(iter(run.train(run.batches(data(8), global_batch_size=8), optimizer)))


def test_a_state_that_only_one_worker_has_loaded_is_refused() -> None:
    for outcome in try_on_workers(load_on_one, 2):
        assert "ReplicaMismatchError" in outcome
        assert "load it on all of them" in outcome


def change(run: lockstep.Run, model: Any, optimizer: Any, what: str) -> None:
    match what:
        case "memory format":
            model.to(memory_format=torch.channels_last)
        case "removed":
            del optimizer.param_groups[0]["params"][1]


@pytest.mark.parametrize(
    ("what", "text"), [("memory format", "the memory format of a parameter"), ("removed", "has removed parameters")]
)
def test_changes_that_would_mix_up_the_parts_are_refused(what: str, text: str) -> None:
    with lockstep.Run(None, progress=False, device="cpu", shard_optimizer=True) as run:
        model = run.replicate(Cnn())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with pytest.raises(ValueError, match=text):
            for batch in run.train(run.batches(data(32), global_batch_size=8), optimizer):
                if batch.number == 2:
                    change(run, model, optimizer, what)
                run.step(classify, batch)


def test_an_exception_is_saved_if_one_worker_has_all_parts(tmp_path: Path) -> None:
    with (
        pytest.raises(ArithmeticError),
        lockstep.Run(tmp_path, progress=False, device="cpu", shard_optimizer=True) as run,
    ):
        model = run.replicate(mlp())
        for batch in run.train(run.batches(data(64), global_batch_size=8), torch.optim.AdamW(model.parameters())):
            run.step(classify, batch)
            if batch.number == 4:
                raise ArithmeticError
    saved = CheckpointStore(tmp_path).newest()
    assert saved is not None
    assert saved.step == 5
    assert set(saved.state["optimizer"]["state"]) == set(range(6))


def test_audits_need_copies() -> None:
    with pytest.raises(ValueError, match="needs redundancy=1"):
        begin(torch.optim.AdamW, audit_every=2, redundancy=0)


def save_by_time(rank: int, size: int, folder: str) -> list[int]:
    with lockstep.Run(folder, progress=False, device="cpu", shard_optimizer=True, save_every="0.05s") as run:
        model = run.replicate(mlp())
        for batch in run.train(
            run.batches(data(64), global_batch_size=8, shards=4), torch.optim.AdamW(model.parameters())
        ):
            run.step(classify, batch)
            time.sleep(0.03)
    return []


def test_checkpoints_by_time_are_agreed_on(tmp_path: Path) -> None:
    on_workers(save_by_time, 2, str(tmp_path))
    saved = CheckpointStore(tmp_path).newest()
    assert saved is not None
    assert saved.step == 8


def facts(parameters: int = 0, initial: int | None = None, **more: Any) -> WorkerFacts:
    values = {"host": "a", "trained": [parameters], "is_complete": True, "is_forgotten": False}
    return WorkerFacts(**(values | {"parameters": parameters, "initial": initial} | more))


def test_which_state_is_divided() -> None:
    new, begun, forgotten = facts(initial=1), facts(4, initial=1), facts(initial=1, is_forgotten=True)
    trained, has_added = facts(4), facts(6)
    assert choose_known([new, begun, forgotten]) == (0, [0])  # every worker begins with what the program gave it
    assert choose_known([new, has_added, trained, forgotten]) == (4, [4])
    with pytest.raises(LostStateError):  # not an empty state: steps were taken, and only the weights are left
        choose_known([forgotten, forgotten])
    with pytest.raises(lockstep.ReplicaMismatchError, match="load it on all of them"):
        choose_known([new, facts(initial=2)])


@pytest.mark.parametrize(
    ("hosts", "elsewhere"), [("ab", 2), ("aabb", 4), ("abab", 4), ("aabbcc", 6), ("aaab", 2), ("aaa", 0), ("abcde", 5)]
)
def test_copies_are_on_other_hosts_where_that_is_possible(hosts: str, elsewhere: int) -> None:
    buddies = choose_buddies(list(hosts))
    assert sorted(buddies) == list(range(len(hosts)))  # each has one copy
    assert all(rank != buddy for rank, buddy in enumerate(buddies))
    assert sum(hosts[rank] != hosts[buddy] for rank, buddy in enumerate(buddies)) == elsewhere
