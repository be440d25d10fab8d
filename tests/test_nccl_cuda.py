"""Two to four NCCL ranks on one GPU: the drop-in has the bits of torch's class, `Run` has one digest."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import test_batchnorm
import test_cuda
import test_hooks
import test_sharded_optimizer
from lockstep import DistributedDataParallel as OurDDP, ShardedOptimizer
from nccl_ranks import on_nccl_ranks
from programs import CASES
from runs import train
from test_run_cuda import ON_GPU, results

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SPARSE = "sparse embedding"


def same_bits_as_torch(rank: int, size: int) -> list[str]:
    """Return the cases in which ours and torch's class differ."""
    differ = []
    for case in [case for case in CASES if case != SPARSE]:  # NCCL has no sparse all-reduce
        ours, theirs = (test_cuda.train(wrapper, case, rank) for wrapper in (OurDDP, TorchDDP))
        if ours != theirs:
            differ.append(case)
    return differ


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_drop_in_has_the_bits_of_torchs_class(ranks: int) -> None:
    assert on_nccl_ranks(same_bits_as_torch, ranks) == [[]] * ranks


def hooks(rank: int, size: int) -> dict[str, list[list[str]]]:
    """Return, for each hook, the digests of the gradients after each step with our class and with torch's."""
    found: dict[str, list[list[str]]] = {}
    for hook in test_hooks.HOOKS:
        for view in (False, True):
            name = f"{hook}, {'views' if view else 'copies'}"
            found[name] = [test_hooks.train(rank, size, wrapper, hook, view) for wrapper in (OurDDP, TorchDDP)]
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_hooks_give_the_bits_that_they_give_with_torchs_class(ranks: int) -> None:
    for found in on_nccl_ranks(hooks, ranks):
        for name, (ours, theirs) in found.items():
            assert ours == theirs, name


def batch_norm(rank: int, size: int, shares: tuple[int, ...]) -> list[str]:
    return [test_batchnorm.two_steps(rank, shares, "cuda", name, dist.group.WORLD) for name in test_batchnorm.LAYERS]


@pytest.mark.parametrize("shares", [(5, 5), (10, 0), (18, 1, 1), (3, 3, 3, 3)])
def test_batch_norm_over_all_ranks_is_that_of_one_worker(shares: tuple[int, ...]) -> None:
    by_rank = on_nccl_ranks(batch_norm, len(shares), shares)
    assert all(bits == by_rank[0] for bits in by_rank)


def train_all(rank: int, size: int) -> dict[str, Any]:
    return {name: train(program, device="cuda:0") for name, program in ON_GPU.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_has_the_digest_of_one_worker_over_shm(ranks: int) -> None:
    for found in on_nccl_ranks(train_all, ranks):
        assert found == results(1, "shm")


def train_sharded(rank: int, size: int) -> dict[str, Any]:
    return {name: train(program, device="cuda:0", shard_optimizer=True) for name, program in ON_GPU.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_with_a_sharded_optimiser_has_the_same_digest(ranks: int) -> None:
    for found in on_nccl_ranks(train_sharded, ranks):
        assert found == results(1, "shm")


def sharded(rank: int, size: int) -> list[str]:
    """Return the optimisers with which a sharded one on this GPU has other weights than the optimiser itself."""
    differ = []
    for name, (kind, options) in test_sharded_optimizer.CASES.items():
        results = []
        for make in (kind, functools.partial(ShardedOptimizer, kind)):
            torch.manual_seed(0)
            shapes = [(300, 301), (7,), (64, 3, 3, 3)]
            weights = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
            optimizer = make(weights, **options)
            for step in range(3):
                generator = torch.Generator("cuda").manual_seed(step)
                for weight in weights:
                    weight.grad = torch.randn(weight.shape, generator=generator, device="cuda")
                optimizer.step()
            results.append([weight.detach().cpu() for weight in weights])
        if not all(map(torch.equal, *results)):
            differ.append(name)
    optimizer.consolidate_state_dict()
    assert (rank == 0) == (optimizer._consolidated is not None)
    return differ


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sharded_optimiser_has_the_bits_of_the_optimiser_itself(ranks: int) -> None:
    assert on_nccl_ranks(sharded, ranks) == [[]] * ranks
