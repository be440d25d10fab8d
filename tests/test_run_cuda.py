"""One digest on a GPU: several workers that share it, and the backends that can carry their gradients."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from on_workers import Failure, on_workers, try_on_workers
from runs import PROGRAMS, Gpt, Program, adamw, data, predict_tokens, train, use

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Torch has no deterministic kernel for these.
WITHOUT_ORDER = {"embedding bag, sparse"}
ON_GPU = {name: program for name, program in PROGRAMS.items() if name not in WITHOUT_ORDER}
ON_GPU["bf16, fused AdamW"] = Program(
    Gpt,
    lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    predict_tokens,
    options={"precision": "bf16", "max_grad_norm": 1.0},
)


def train_all(rank: int, size: int, backend: str, store: str, names: list[str]) -> dict[str, Any]:
    use(backend, store, rank, size)
    return {name: train(ON_GPU[name], device="cuda:0") for name in names}


@functools.cache
def results(size: int, backend: str, names: tuple[str, ...] = tuple(ON_GPU)) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_workers(train_all, size, backend, f"{folder}/store", list(names))
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_workers_that_share_a_gpu_give_the_bits_of_one(size: int, name: str) -> None:
    assert results(size, "shm")[name] == results(1, "shm")[name]


@pytest.mark.parametrize(("size", "backend"), [(3, "gloo"), (1, "nccl"), (1, "cpu:shm,cuda:nccl")])
def test_other_backends_give_the_same_bits(size: int, backend: str) -> None:
    names = ("gpt with dropout and tied weights, AdamW", "unused branches", "cnn with batch norm")
    found = results(size, backend, names)
    assert found == {name: results(1, "shm")[name] for name in names}


def train_sharded(rank: int, size: int, backend: str, store: str, redundancy: int) -> dict[str, Any]:
    use(backend, store, rank, size)
    options = {"device": "cuda:0", "shard_optimizer": True, "redundancy": redundancy}
    return {name: train(program, **options) for name, program in ON_GPU.items()}


@pytest.mark.parametrize(("size", "redundancy"), [(1, 0), (2, 0), (2, 1), (3, 0), (4, 1)])
def test_a_distributed_state_of_the_optimiser_gives_the_same_bits(size: int, redundancy: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in on_workers(train_sharded, size, "shm", f"{folder}/store", redundancy):
            assert found == results(1, "shm")


def train_compressed(rank: int, size: int, backend: str, store: str, names: tuple[str, ...]) -> dict[str, Any]:
    use(backend, store, rank, size)
    found = {f"{n}, {c}": train(ON_GPU[n], device="cuda:0", grad_comm=c) for n in names for c in ("int8", "int4")}
    for options in ({"grad_comm": "powersgd", "powersgd_rank": 1}, {"grad_comm": "topk", "topk_ratio": 0.05}):
        options |= {"compare_loss": False, "epochs": 4}  # not in the first steps
        kind = options["grad_comm"]
        found |= {f"{n}, {kind}": train(ON_GPU[n], device="cuda:0", **options) for n in names}
    return found


@functools.cache
def compressed(size: int, backend: str) -> dict[str, Any]:
    names = ("gpt with dropout and tied weights, AdamW", "unused branches", "cnn with batch norm", "clipped")
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_workers(train_compressed, size, backend, f"{folder}/store", names)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


@pytest.mark.parametrize(
    ("size", "backend"), [(2, "shm"), (3, "shm"), (4, "shm"), (8, "shm"), (3, "gloo"), (1, "nccl")]
)
def test_compressed_gradients_give_the_same_bits(size: int, backend: str) -> None:
    assert compressed(size, backend) == compressed(1, "shm")


LIMIT_BYTES = 2_200_000_000


def train_within_limit(rank: int, size: int, store: str, options: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """A model of 100 million parameters: weights and gradients 0.8 GB, the state of AdamW with amsgrad 1.2 GB."""
    use("shm", store, rank, size)
    is_limited = options.pop("is_limited")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total if is_limited else 1.0)
    x = torch.randn(32, 2048, generator=torch.Generator().manual_seed(1))
    with lockstep.Run(seed=1, progress=False, device="cuda:0", **options) as run:
        model = run.replicate(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))))
        batches = run.batches(TensorDataset(x, x[:, :10].argmax(1)), global_batch_size=8, shards=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, foreach=False)
        for batch in run.train(batches, optimizer):
            run.step(PROGRAMS["clipped"].loss, batch)
        return run.digest(), run.memory()


def test_a_model_whose_whole_state_does_not_fit_is_trained_by_four_workers() -> None:
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for n, (size, options) in enumerate(
            [
                (1, {"is_limited": False}),
                (4, {"is_limited": True, "shard_optimizer": True}),
                (4, {"is_limited": True}),
            ]
        ):
            outcomes.append(try_on_workers(train_within_limit, size, f"{folder}/{n}", options))
    (whole,), sharded, unsharded = outcomes
    print(whole, sharded)
    assert [digest for digest, _ in sharded] == [whole[0]] * 4
    assert any(isinstance(one, Failure) and "OutOfMemoryError" in one for one in unsharded), unsharded


def train_with_audits(rank: int, size: int, store: str) -> str:
    """With a shard in a while computed again, and batches that are copied ahead from pinned memory."""
    use("shm", store, rank, size)
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    with lockstep.Run(seed=1, progress=False, device="cuda:0", audit_every=2) as run:
        model = run.replicate(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4)))
        batches = run.batches(TensorDataset(x, x[:, :4].argmax(1)), global_batch_size=32, shards=8, epochs=2)
        for batch in run.train(batches, adamw(model.parameters())):
            run.step(PROGRAMS["clipped"].loss, batch)
        run.evaluate(lambda m, b: ((m(b[0]).argmax(1) == b[1]).sum(), len(b[1])), TensorDataset(x, x[:, :4].argmax(1)))
        return run.digest()


def test_audits_and_evaluation_on_a_gpu() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, two = (on_workers(train_with_audits, n, f"{folder}/{n}")[0] for n in (1, 2))
    assert one == two


def overflow(rank: int, size: int, store: str, policy: str) -> str:
    """The third step has a finite loss and an infinite gradient."""
    use("shm", store, rank, size)
    seen = []

    def loss(model: Any, batch: Any) -> Any:
        total, weight = PROGRAMS["clipped"].loss(model, batch)
        if torch.is_grad_enabled():  # the first step tries the loss without gradients as well
            seen.append(0)
        root = torch.sqrt((model[0].weight * 0).sum())  # is 0, and its gradient is not finite
        return (total + root if len(seen) > 2 * 8 // size else total), weight

    with lockstep.Run(seed=1, progress=False, device="cuda:0", on_nonfinite=policy) as run:
        model = run.replicate(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 10)))
        try:
            for batch in run.train(run.batches(data(128), global_batch_size=32, shards=8), adamw(model.parameters())):
                run.step(loss, batch)
        except lockstep.NonFiniteError as error:
            return str(error)
        return str(all(bool(torch.isfinite(p).all()) for p in model.parameters()))


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_that_is_not_finite_is_found_in_time(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stopped = on_workers(overflow, size, f"{folder}/a", "stop")
        skipped = on_workers(overflow, size, f"{folder}/b", "skip")
    assert all("step 2: the gradient was not finite" in text and "0.weight" in text for text in stopped)
    assert set(skipped) == {"True"}


def train_ddp_with_amp(rank: int, size: int, store: str, backend: str) -> list[float]:
    use(backend, store, rank, size)
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank)).cuda()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()]).cpu()
    of_all = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(of_all, weights)
    assert all(torch.equal(other, weights) for other in of_all)
    return losses


@pytest.mark.parametrize(("size", "backend"), [(3, "shm"), (1, "cpu:shm,cuda:nccl")])
def test_the_drop_in_with_mixed_precision_and_loss_scale(size: int, backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = on_workers(train_ddp_with_amp, size, f"{folder}/store", backend)[0]
    assert losses[-1] < 0.9 * losses[0]
