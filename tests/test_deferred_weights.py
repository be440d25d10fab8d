"""New weights of a sharded optimiser that arrive in the next forward pass: no program ever sees old ones.

The exchange is delayed in every worker, so that a read that does not wait for it finds old weights for certain.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.comm.reduce_scatter import ReduceScatter, ScatterMethod, in_chunks
from lockstep.ddp.deferred_weights import PendingWeight
from lockstep.ddp.optimizer_cells import assign_cells
from lockstep.ddp.weight_exchange import WeightExchange
from on_workers import Failure, on_workers, try_on_workers
from runs import classify, data, mlp, predict_tokens

DELAY_S = 0.02


def on_hosts_of_their_own(rank: int, delay_s: float = DELAY_S) -> None:
    os.environ["LOCKSTEP_HOST"] = f"host {rank}"
    run = WeightExchange.run

    def run_late(self: WeightExchange, *arguments: Any, **options: Any) -> None:
        time.sleep(delay_s)
        run(self, *arguments, **options)

    WeightExchange.run = run_late  # type: ignore[method-assign]


def is_pending(model: nn.Module) -> bool:
    return any(isinstance(parameter, PendingWeight) for parameter in model.parameters())


def sha(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


# -- reads between two steps -------------------------------------------------------------------------------------------


def read_in_thread(model: nn.Module) -> list[Tensor]:
    found = list[Tensor]()
    thread = threading.Thread(target=lambda: found.extend(p + 0 for p in model.parameters()))
    thread.start()
    thread.join()
    return found


def train_beside_a_thread(rank: int, size: int, options: dict[str, Any]) -> tuple[str, int, int]:
    """A thread uses the weights all the time, as an evaluation in the background does."""
    on_hosts_of_their_own(rank)
    sys.setswitchinterval(1e-6)
    deferred, reads, ended = 0, 0, threading.Event()

    def read() -> None:
        nonlocal reads
        while not ended.is_set():
            for parameter in model.parameters():
                assert (parameter + 0).shape == parameter.shape
                reads += 1

    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        thread = threading.Thread(target=read)
        thread.start()
        try:
            for batch in run.train(run.batches(data(256), global_batch_size=8, shards=4), optimizer):
                run.step(classify, batch)
                deferred += is_pending(model)
        finally:
            ended.set()
            thread.join()
        return run.digest(), deferred, reads


def test_nothing_is_deferred_while_the_program_has_other_threads() -> None:
    ((expected, _, _),) = on_workers(train_beside_a_thread, 1, {})
    for digest, deferred, reads in on_workers(train_beside_a_thread, 2, {"shard_optimizer": True}):
        assert (digest, deferred) == (expected, 0)
        assert reads > 100


class ParameterList(list[Tensor]):
    """A list that torch takes for one tensor when it looks for arguments."""


def read_in_a_fork(model: nn.Module) -> list[Tensor]:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with open(writer, "wb") as file:
            file.write(sha(list(model.parameters())).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    return [torch.frombuffer(bytearray(found), dtype=torch.uint8)]


def write_gradients(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter, requires_grad=False)
        parameter.grad = None
        parameter.grad = torch.full(parameter.shape, 2.0)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def functional(model: nn.Module) -> list[Tensor]:
    return [torch.func.functional_call(model, dict(model.named_parameters()), (torch.ones(2, 16),))]


def per_sample(model: nn.Module) -> list[Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).sum()

    return list(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.ones(3, 16)).values())


READS: dict[str, Callable[[nn.Module], Sequence[Tensor]]] = {
    "the model": lambda m: [m(torch.ones(2, 16))],
    "state_dict": lambda m: list(m.state_dict().values()),
    "data": lambda m: [p.data for p in m.parameters()],
    "detach": lambda m: [p.detach() for p in m.parameters()],
    "a list": lambda m: torch._foreach_mul(list(m.parameters()), 2.0),
    "deepcopy of the model": lambda m: list(copy.deepcopy(m).parameters()),
    "deepcopy of one": lambda m: [copy.deepcopy(next(m.parameters()))],
    "pickle": lambda m: list(pickle.loads(pickle.dumps(m)).parameters()),
    "numpy": lambda m: [torch.from_numpy(p.numpy(force=True)) for p in m.parameters()],
    "one element": lambda m: [torch.tensor(p.flatten()[-1].item()) for p in m.parameters()],
    "out=": lambda m: [torch.mul(p, 1.0, out=torch.empty(p.shape)) for p in map(Tensor.detach, m.parameters())],
    "a vector": lambda m: [nn.utils.parameters_to_vector(m.parameters())],
    "another thread": read_in_thread,
    "functional_call": functional,
    "torch.func": per_sample,
    "a list of another class": lambda m: [torch.cat(ParameterList(p.flatten() for p in m.parameters()))],
    "a fork": read_in_a_fork,
    "its own gradients": write_gradients,
    "the last first": lambda m: [p.sum() for p in reversed(list(m.parameters()))],
}


def read_between_steps(rank: int, size: int, options: dict[str, Any]) -> tuple[dict[str, list[str]], str, int]:
    on_hosts_of_their_own(rank)
    found: dict[str, list[str]] = {name: [] for name in READS}
    deferred = 0
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in run.train(run.batches(data(256), global_batch_size=8, shards=4), optimizer):
            run.step(classify, batch)
            deferred += is_pending(model)
            name = list(READS)[batch.number % len(READS)]
            found[name].append(sha(READS[name](model)))
        return found, run.digest(), deferred


def test_a_program_never_reads_old_weights() -> None:
    ((expected, digest, _),) = on_workers(read_between_steps, 1, {})
    for found, own, deferred in on_workers(read_between_steps, 2, {"shard_optimizer": True}):
        assert {name: found[name] == expected[name] for name in READS} == dict.fromkeys(READS, True)
        assert own == digest
        assert deferred >= 4


def average_weights(rank: int, size: int, options: dict[str, Any]) -> tuple[str, str]:
    """A program that keeps its own tensors of the weights' memory: they show no use of the parameters."""
    on_hosts_of_their_own(rank)
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(mlp())
        sources = [p.detach() for p in model.parameters()]
        average = [one.clone() for one in sources]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in run.train(run.batches(data(128), global_batch_size=8, shards=4), optimizer):
            run.step(classify, batch)
            torch._foreach_lerp_(average, sources, 0.5)
        return sha(average), run.digest()


def test_tensors_that_share_memory_with_weights_never_have_old_ones() -> None:
    (expected,) = on_workers(average_weights, 1, {})
    assert on_workers(average_weights, 2, {"shard_optimizer": True}) == [expected] * 2


# -- forward passes ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Predicts tokens; the weights of the first layer are also those of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(20, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens((x.abs() * 10).long() % 20)
        for layer in self.layers:
            hidden = hidden + F.dropout(layer(self.norm(hidden)), 0.1, self.training)
        return F.linear(hidden, self.tokens.weight)


def train_tied(rank: int, size: int, backend: str, store: str, options: dict[str, Any]) -> tuple[str, int, float]:
    on_hosts_of_their_own(rank)
    deferred = 0
    if backend != "gloo":
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(Tied())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        norms = list[float]()
        for batch in run.train(run.batches(data(48), global_batch_size=8, shards=4), optimizer):
            result = run.step(predict_tokens, batch)
            assert result.norm is not None
            norms.append(float(result.norm))
            deferred += is_pending(model)
        return run.digest(), deferred, sum(norms)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))


@pytest.mark.parametrize("backend", ["gloo", "hierarchy"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_bits_are_those_of_one_worker(size: int, backend: str, tmp_path: Path) -> None:
    ((expected, _, norm),) = on_workers(train_tied, 1, "gloo", "", {})
    where = (backend, str(tmp_path / "store"))
    for digest, deferred, own_norm in on_workers(train_tied, size, *where, {"shard_optimizer": True}):
        assert digest == expected
        assert deferred >= 2  # not in steps after which the replicas are compared
        assert own_norm == pytest.approx(norm, rel=1e-5)


def test_copies_of_parts_get_the_same_gradients_on_a_slow_link() -> None:
    """The elements that a worker adds up may be on their way to the worker that keeps a copy of its part."""
    ((expected, _),) = on_workers(train_model, 1, wide, {})
    for digest, deferred in on_workers(train_model, 3, wide, {"shard_optimizer": True, "redundancy": 1}):
        assert digest == expected
        assert deferred


def test_weights_are_here_when_they_are_not_to_be_deferred() -> None:
    ((expected, _, _),) = on_workers(train_tied, 1, "gloo", "", {})
    options = {"shard_optimizer": True, "defer_weights": False}
    for digest, deferred, _ in on_workers(train_tied, 2, "gloo", "", options):
        assert (digest, deferred) == (expected, 0)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.jit.script(nn.Linear(16, 32)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.inner(x).relu())
        return found


class Compiled(nn.Module):
    """A part of it is compiled as a function, which no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 10)
        self._apply_inner = torch.compile(lambda x, w, b: F.linear(x, w, b).relu(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self._apply_inner(x, self.inner.weight, self.inner.bias))
        return found


def train_model(rank: int, size: int, make: Any, options: dict[str, Any]) -> tuple[str, int]:
    on_hosts_of_their_own(rank)
    deferred = 0
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in run.train(run.batches(data(64), global_batch_size=8, shards=4), optimizer):
            run.step(classify, batch)
            deferred += is_pending(model)
        return run.digest(), deferred


@pytest.mark.parametrize("make", [Scripted, Compiled])
def test_nothing_is_deferred_where_code_reads_weights_unseen(make: Any) -> None:
    ((expected, _),) = on_workers(train_model, 1, make, {})
    for digest, deferred in on_workers(train_model, 2, make, {"shard_optimizer": True}):
        assert (digest, deferred) == (expected, 0)


class Unseen(nn.Module):
    """Its forward pass uses a weight as an extension in C++ does: without telling torch's Python functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32, bias=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            hidden = F.linear(x, self.inner.weight)
        found: Tensor = self.outer(hidden.relu())
        return found


class Transformed(nn.Module):
    """Its forward pass differentiates a function of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16, bias=False), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda w: F.linear(x, w).square().mean())(self.inner.weight)
        found: Tensor = self.outer(F.linear(x, slope))
        return found


@pytest.mark.parametrize("make", [Unseen, Transformed])
def test_a_use_that_is_not_seen_is_an_error_that_says_what_to_do(make: Any) -> None:
    for outcome in try_on_workers(train_model, 2, make, {"shard_optimizer": True}):
        assert isinstance(outcome, Failure)
        assert "The new weights of inner.weight" in outcome or "PeerLostError" in outcome
        assert "defer_weights=False" in outcome or "PeerLostError" in outcome
    ((expected, _),) = on_workers(train_model, 1, make, {})
    options = {"shard_optimizer": True, "defer_weights": False}
    assert {digest for digest, _ in on_workers(train_model, 2, make, options)} == {expected}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.outer = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.layer(x[:, None] * torch.arange(1.0, 7.0)[:, None])[:, 0])
        return found


def evaluate_between_steps(rank: int, size: int, options: dict[str, Any]) -> tuple[list[str], str]:
    on_hosts_of_their_own(rank)
    found = []
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(Attention())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in run.train(run.batches(data(64), global_batch_size=8, shards=4), optimizer):
            run.step(classify, batch)
            model.eval()
            with torch.no_grad():
                found.append(sha([model(torch.linspace(-1, 1, 1024).view(64, 16))]))
            model.train()
        return found, run.digest()


def test_modules_with_a_fast_path_take_it_as_without_sharding() -> None:
    (expected,) = on_workers(evaluate_between_steps, 1, {})
    assert on_workers(evaluate_between_steps, 2, {"shard_optimizer": True}) == [expected] * 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = mlp(), mlp()


def take_turns(rank: int, size: int, options: dict[str, Any]) -> str:
    """Two optimisers, as in a GAN: a step of one does not use the weights of the other."""
    on_hosts_of_their_own(rank)
    with lockstep.Run(None, seed=3, progress=False, device="cpu", **options) as run:
        model = run.replicate(Two())
        first = torch.optim.AdamW(model.one.parameters(), lr=1e-2)
        second = torch.optim.SGD(model.other.parameters(), lr=1e-1, momentum=0.9)
        for batch in run.train(run.batches(data(128), global_batch_size=8, shards=4), first, second):
            run.step(lambda m, b: classify(m.one, b), batch, optimizer=first)
            run.step(lambda m, b: classify(m.other, b), batch, optimizer=second)
        return run.digest()


def test_the_weights_of_several_optimisers_arrive() -> None:
    (expected,) = on_workers(take_turns, 1, {})
    assert on_workers(take_turns, 2, {"shard_optimizer": True}) == [expected] * 2


def freeze_and_thaw(rank: int, size: int, options: dict[str, Any]) -> str:
    """What is trained changes, a step is skipped, and two optimisers take turns."""
    on_hosts_of_their_own(rank)
    with lockstep.Run(None, seed=3, progress=False, device="cpu", on_nonfinite="skip", **options) as run:
        model = run.replicate(mlp())
        layers = [module for module in model if isinstance(module, nn.Linear)]
        first = torch.optim.AdamW(layers[0].parameters(), lr=1e-2)
        second = torch.optim.AdamW([p for layer in layers[1:] for p in layer.parameters()], lr=1e-2)

        def spoiled(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            loss, weight = classify(model, batch)
            return loss * torch.inf, weight

        for batch in run.train(run.batches(data(128), global_batch_size=8, shards=4), first, second):
            layers[1].requires_grad_(batch.number % 5 != 2)
            run.step(spoiled if batch.number == 6 else classify, batch, optimizer=first)
            run.step(classify, batch, optimizer=second)
        return run.digest()


def test_what_is_trained_may_change_and_steps_may_be_skipped() -> None:
    (expected,) = on_workers(freeze_and_thaw, 1, {})
    assert on_workers(freeze_and_thaw, 2, {"shard_optimizer": True}) == [expected] * 2


# -- lost workers ------------------------------------------------------------------------------------------------------


def die_meanwhile(rank: int, size: int) -> str:
    on_hosts_of_their_own(rank, delay_s=0.2)
    os.environ["LOCKSTEP_TIMEOUT_S"] = "60"
    model = mlp()
    try:
        with lockstep.Run(None, seed=3, progress=False, device="cpu", shard_optimizer=True) as run:
            run.replicate(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for batch in run.train(run.batches(data(64), global_batch_size=8, shards=4), optimizer):
                run.step(classify, batch)
                if batch.number == 2 and rank == 1:
                    assert is_pending(model)
                    os.kill(os.getpid(), signal.SIGKILL)
    except lockstep.PeerLostError as error:
        reads = [lambda: model.state_dict(), lambda: model(torch.ones(1, 16)), lambda: copy.deepcopy(model)]
        os.write(2, f"{error}; {[fails(read) for read in reads]}\n".encode())
        assert all(map(fails, reads)), "weights that did not arrive were read"
        raise
    return "not reached"


def fails(read: Callable[[], object]) -> bool:
    try:
        read()
    except lockstep.PeerLostError:
        return True
    return False


@pytest.mark.slow
def test_a_worker_that_is_lost_while_weights_are_on_their_way_is_named() -> None:
    began_s = time.monotonic()
    first, second = try_on_workers(die_meanwhile, 2, timeout_s=60)
    assert "PeerLostError" in first, first
    assert "AssertionError" not in first, first
    assert "rank 1" in first
    assert second == "died without an error message"
    assert time.monotonic() - began_s < 55


# -- pure parts --------------------------------------------------------------------------------------------------------


def test_sections_are_sent_in_chunks_of_neighbours() -> None:
    assert in_chunks([], 4) == []
    assert in_chunks([range(2), range(2, 4), range(8, 9)], 8) == [[range(4), range(8, 9)]]
    assert in_chunks([range(10)], 4) == [[range(4)], [range(4, 8)], [range(8, 10)]]
    assert in_chunks([range(3), range(5, 9)], 4) == [[range(3), range(5, 6)], [range(6, 9)]]


class SlowWorkers:
    """In the place of other workers: they send ones, and read what they get only when this worker waits for that."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.received: list[Tensor] = []

    def exchange_chunks(self, outputs: Any, inputs: Any) -> Any:
        for of_rank in outputs[1:]:
            for chunk in of_rank:
                for row in chunk:
                    row.fill_(1.0)
        leaving = [row for of_rank in inputs[1:] for chunk in of_rank for row in chunk]

        def finish() -> None:
            self.received = [row.clone() for row in leaving]

        return [lambda: None] * len(outputs[0]), finish


def test_what_is_on_its_way_is_not_overwritten() -> None:
    """Sections may overlap: the elements that this worker adds up are also sent to others."""
    rows, workers = torch.arange(8.0).view(1, 8), SlowWorkers(3)
    sections = [[range(6)], [range(2, 8)], [range(2), range(4, 8)]]

    def add(found: list[Tensor]) -> Tensor:
        for row in found[1:]:
            found[0].add_(row)
        return found[0]

    one = ReduceScatter(
        rows,
        sections,
        dtype=torch.float32,
        method=ScatterMethod.CHUNKS,
        workers=workers,  # type: ignore[arg-type]
        counts=[1, 1, 1],
        add=add,
    )
    assert one.run(0.5).tolist() == [(n + 2) / 2 for n in range(6)]
    assert torch.cat(workers.received).tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0, 1.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_stripes_give_every_worker_a_part_of_every_stretch(workers: int) -> None:
    sizes, stripe = [1000, 64, 7, 5000, 3], 1024
    pieces = assign_cells(sizes, [0] * workers, stripe=stripe)
    owners = [piece.owner for of_one in pieces for piece in of_one for _ in range(piece.numel)]
    assert [sum(piece.numel for piece in of_one) for of_one in pieces] == sizes
    assert all(piece.start % 64 == 0 for of_one in pieces for piece in of_one)
    for first in range(0, len(owners) - stripe, stripe):
        assert set(owners[first : first + stripe]) == set(range(workers))
