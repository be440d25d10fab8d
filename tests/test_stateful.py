"""State that a state dict lacks, and buffers that a forward pass makes, grows or writes: the same bits on any number of
workers, after resuming, after a lost worker, and after an evaluation; or one error that names it."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.step.buffer_exchange import BufferExchange
from on_workers import on_workers
from runs import use
from stateful import FAR, OPTIMIZERS, Zoo, data, loss_of, train
from test_recovery import KILLED, Play, kill, perform


def train_all(rank: int, size: int, backend: str, store: str, device: str) -> dict[str, Any]:
    use(backend, store, rank, size)
    return {name: train(name, device=device) for name in OPTIMIZERS}


@functools.cache
def results(size: int, backend: str, device: str = "cpu") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_workers(train_all, size, backend, f"{folder}/store", device)
    assert all(found == by_rank[0] for found in by_rank), "the workers differ from each other"
    return by_rank[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("size", "backend"),
    [(2, "shm"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((3, "gloo"), (8, "shm")))],
)
def test_any_number_of_workers_gives_the_same_bits(size: int, backend: str, optimizer: str) -> None:
    assert results(size, backend)[optimizer] == results(1, "gloo")[optimizer]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_workers_that_share_a_gpu_give_the_bits_of_one(size: int, optimizer: str) -> None:
    assert results(size, "shm", "cuda:0")[optimizer] == results(1, "shm", "cuda:0")[optimizer]


def test_whole_numbers_are_not_rounded() -> None:
    steps = results(1, "gloo")["nadam"]["many"][0] - FAR
    assert steps == 8
    assert results(1, "gloo")["nadam"]["many"][1] == -FAR + steps


# ---- after an interruption -------------------------------------------------------------------------------------------


def train_part(rank: int, size: int, backend: str, folder: str, steps: int | None) -> dict[str, Any]:
    use(backend, f"{folder}/store-{size}-{backend}", rank, size)
    return {name: train(name, directory=Path(folder) / name, steps=steps) for name in OPTIMIZERS}


@functools.cache
def results_of_parts() -> dict[str, Any]:
    """Two steps on two workers, two on three over another backend, and the rest on one."""
    with tempfile.TemporaryDirectory() as folder:
        for size, backend, steps in ((2, "shm", 2), (3, "gloo", 4), (1, "gloo", None)):
            found: dict[str, Any] = on_workers(train_part, size, backend, folder, steps)[0]
        state = CheckpointStore(Path(folder) / "nadam").newest()
        assert state is not None
        found["state"] = {part: sorted(state.state["raw"]["model"][part]) for part in ("tensors", "grown", "numbers")}
        found["model"] = sorted(state.state["model"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_gives_the_same_bits(optimizer: str) -> None:
    assert results_of_parts()[optimizer] == results(1, "gloo")[optimizer]


def test_what_a_state_dict_lacks_is_a_part_of_its_own() -> None:
    """The part `model` is what torch calls a state dict: `lockstep checkpoint export` and `run.load` rely on it."""
    raw, model = results_of_parts()["state"], results_of_parts()["model"]
    assert raw["tensors"] == ["counters.brief", "lazy.shadow", "rotary.table", "silent.center"]
    assert raw["grown"] == ["bank.rows", "lazy.mask", "lazy.shadow", "observer.low", "rotary.table"]
    assert raw["numbers"] == ["rotary.length"]
    assert not set(raw["tensors"]) & set(model)
    assert {"lazy.mask", "bank.rows", "observer.low", "complex.phase"} <= set(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["nadam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("asgd", "masters"))]
)
def test_a_lost_worker_changes_nothing(optimizer: str, tmp_path: Path) -> None:
    """One in the step in which buffers are made, one when a step is half applied; newcomers have no such buffers."""
    program = (Path(__file__).parent / "stateful.py").read_text().replace("{", "{{").replace("}", "}}")
    inherited = os.environ.get("PYTHONPATH", "")
    play = Play(
        workers=2,
        faults=(kill("reduced", 1, step=0), kill("committed", 0, step=5)),
        env={"OPTIMIZER": optimizer, "PYTHONPATH": f"{Path(lockstep.__file__).parent.parent}:{inherited}"},
        program=program,
    )
    show = perform(tmp_path / "run", play)
    assert show.status == 0, show.text
    assert show.lost == {"h0.1": KILLED, "h0.0": KILLED}, show.text
    expected = results(1, "gloo")[optimizer]
    said = " ".join(f"{name}={value}".replace(" ", "") for name, value in expected.items())
    assert show.digests, show.text
    assert set(show.digests) == {said}, show.text


# ---- weights of a checkpoint, in a model that has not been trained ---------------------------------------------------


def load_into_new(rank: int, size: int, folder: str) -> tuple[str, str]:
    path = Path(folder) / "run"
    with lockstep.Run(path, seed=3, progress=False, trace=False) as run:
        model = run.replicate(Zoo())
        optimizer = OPTIMIZERS["asgd"](model.parameters())
        for batch in run.train(run.batches(data(), global_batch_size=32, shards=8), optimizer, steps=2):
            run.step(loss_of, batch)
        trained = float(run.evaluate(loss_of, data()))
    with lockstep.Run(seed=4, progress=False, trace=False) as run:
        run.replicate(Zoo())
        run.load(path)
        return trained.hex(), float(run.evaluate(loss_of, data())).hex()


def test_weights_are_loaded_into_a_model_whose_buffers_have_not_grown(tmp_path: Path) -> None:
    for trained, loaded in on_workers(load_into_new, 2, str(tmp_path)):
        assert trained == loaded


# ---- evaluation ------------------------------------------------------------------------------------------------------


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(x) * self.calls


class RemembersSamples(CountsCalls):
    """By another tensor, of another shape, with a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.register_buffer("memory", torch.zeros(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.memory = torch.cat([self.memory, x.detach()])
        self.rows += len(x)
        assert self.rows == len(self.memory) - 1
        return self.out(x + self.memory.mean(0))


class Adapts(CountsCalls):
    """Its batch norm is in training mode in an evaluation too, and written without a count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train()
        self.offset.data += 1
        x = self.norm(x) + self.norm.running_mean + self.offset
        self.norm.eval()
        if not hasattr(self, "made"):
            self.register_buffer("made", x.detach().mean(0))
        return self.out(x + self.made)


def evaluate_all(rank: int, size: int) -> dict[str, Any]:
    """For each model: a figure, the same figure once more, predictions, and whether the state is what it was."""
    found = {}
    x = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
    for kind in (CountsCalls, RemembersSamples, Adapts):
        with lockstep.Run(seed=1, progress=False, trace=False) as run:
            model = run.replicate(kind())
            before = run.digest()

            def total(model: Any, batch: Any) -> Any:
                return model(batch[0]).sum(), len(batch[0])

            figures = [float(run.evaluate(total, TensorDataset(x), batch_size=4)).hex() for _ in range(2)]
            rows = run.predict(lambda model, batch: model(batch[0]), TensorDataset(x), batch_size=4)
            other = float(run.evaluate(total, TensorDataset(x), batch_size=4, model=model)).hex()
            assert isinstance(rows, Tensor)
            found[kind.__name__] = [*figures, other, rows.tolist(), before, run.digest(), sorted(model._buffers)]
    return found


def test_an_evaluation_leaves_no_trace() -> None:
    one, *others = [on_workers(evaluate_all, size) for size in (1, 2, 3)]
    for name, (first, second, other, _, before, after, buffers) in one[0].items():
        assert first == second == other, name
        assert before == after, name
        assert "made" not in buffers
    for by_rank in others:
        assert all(found == one[0] for found in by_rank)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Odd:
    """Has a state that no checkpoint can hold."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"inside": self.state}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("not asked for")


class OddOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = {1, 2}


def linear(**buffers: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 1))
    for name, buffer in buffers.items():
        model[0].register_buffer(name, buffer)
    return model


class Writes(nn.Module):
    """Three ways to write to weights in a forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.out, self.table, self.target = nn.Linear(4, 1), nn.Embedding(5, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mul(4).long()[:, 0]
        bound = 0.01 if self.how == "embedding" else None
        found = self.out(x) + nn.functional.embedding(rows, self.table.weight, max_norm=bound)
        with torch.no_grad():
            if self.how == "target":
                self.target.weight.lerp_(self.out.weight, 0.1)
            if self.how == "data":
                self.out.bias.data.clamp_(min=5)
        return found + self.target(x)


def refuse_all(rank: int, size: int, folder: str) -> list[tuple[str, str, int]]:
    """What is said of each case, and how many steps were taken before."""
    samples = TensorDataset(torch.rand(8, 4))
    wide = torch.ones(2, dtype=torch.complex128)
    embedding = nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 1, max_norm=1.0))
    bag = nn.Sequential(nn.EmbeddingBag(5, 1, max_norm=0.5))
    cases: list[tuple[nn.Module, Any, Any]] = [
        (linear(wide=wide), None, torch.optim.SGD),
        (linear(), {"a", "b"}, torch.optim.SGD),
        (linear(), [torch.ones(2).to_sparse()], torch.optim.SGD),
        (linear(), None, OddOptimizer),
        (linear(hole=torch.eye(2).to_sparse()), None, torch.optim.SGD),
        (linear(hole=torch.eye(2).to_sparse_csr()), None, torch.optim.SGD),
        (embedding, None, torch.optim.SGD),
        (bag, None, torch.optim.SGD),
        *((Writes(how), None, torch.optim.SGD) for how in ("embedding", "target", "data")),
    ]
    said = []
    for number, (model, registered, optimizer) in enumerate(cases):
        steps = 0
        try:
            with lockstep.Run(f"{folder}/{number}", seed=1, progress=False, trace=False) as run:
                run.replicate(model)
                if registered is not None:
                    run.register_state(thing=Odd(registered))
                batches = run.batches(samples, global_batch_size=4, shards=2)
                for batch in run.train(batches, optimizer(model.parameters(), lr=0.1)):
                    run.step(lambda model, batch: (model(batch[0]).sum(), len(batch[0])), batch)
                    steps += 1
        except (lockstep.CheckpointError, ValueError) as error:
            said.append((type(error).__name__, str(error), steps))
    return said


def test_what_cannot_be_saved_or_exchanged_is_named_before_anything_is_lost(tmp_path: Path) -> None:
    by_rank = on_workers(refuse_all, 2, str(tmp_path))
    assert by_rank[0] == by_rank[1]
    kinds, texts, steps = zip(*by_rank[0], strict=True)
    assert kinds == ("CheckpointError",) * 4 + ("ValueError",) * 7
    assert steps == (0,) * 11
    expected = ["model/0.wide", "kept/thing/inside", "kept/thing/inside/0", "optimizer/state/0/seen"]
    expected += ["0.hole", "0.hole", "1 is an Embedding", "0 is an EmbeddingBag"]
    expected += ["written to table.weight", "written to target.weight", "written to out.bias"]
    for text, words in zip(texts, expected, strict=True):
        assert words in text
    assert "complex128" in texts[0]
    assert "at step 1" in texts[3]
    assert "renorm_(2, 0, 0.5)" in texts[7]


def test_a_worker_whose_first_shards_are_empty_is_not_taken_for_a_model_that_writes_to_its_weights() -> None:
    model = nn.Linear(2, 1)
    buffers = BufferExchange(model, shards=2)
    buffers.begin()  # it has no samples in this step: no forward pass
    with torch.no_grad():
        model.weight += 1  # by the optimiser
    buffers.begin()
    buffers.collect(0)
    for step in range(2):
        buffers.begin()
        with torch.no_grad():
            model.weight += 1
        buffers.collect(step)  # checked once
    writes = BufferExchange(model, shards=2)
    writes.begin()
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(ValueError, match="the forward pass has written to weight"):
        writes.collect(0)
