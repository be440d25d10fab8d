"""What people run on torch.distributed, on shm: the same bits as on Gloo, since two summands have only one order."""

from __future__ import annotations

import functools
import multiprocessing as mp
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset

from lockstep import DistributedDataParallel as OurDDP
from on_workers import on_workers
from programs import CASES, Mlp, digest, train

Program = Callable[[int, int, Path], list[str]]
PROGRAMS: dict[int, list[Program]] = {2: [], 4: []}
BACKENDS = ("gloo", "shm")


def program(workers: int) -> Callable[[Program], Program]:
    """A program for so many workers, that returns what must be the same on every backend."""

    def note(run: Program) -> Program:
        PROGRAMS[workers].append(run)
        return run

    return note


def batch(rank: int, step: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def digests_of_training(model: nn.Module, rank: int, *, steps: int = 3) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        found.append(digest({name: whole(value) for name, value in model.state_dict().items()}))
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def seeded(build: Callable[[], nn.Module] = Mlp) -> nn.Module:
    torch.manual_seed(7)
    return build()


# -------------------------------------------------------------------------------------------------------- the programs


@program(2)
def ddp_of_torch(rank: int, size: int, folder: Path) -> list[str]:
    return [text for case in CASES for text in train(TorchDDP, case, rank, steps=4)]


@program(2)
def ddp_of_ours(rank: int, size: int, folder: Path) -> list[str]:
    return [text for case in CASES for text in train(OurDDP, case, rank, steps=4)]


@program(2)
def ddp_with_a_hook_that_compresses(rank: int, size: int, folder: Path) -> list[str]:
    found = []
    for wrapper in (TorchDDP, OurDDP):
        model: Any = wrapper(seeded())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        found += digests_of_training(model, rank)
    return found


@program(2)
def ddp_with_uneven_inputs_and_a_sharded_optimizer(rank: int, size: int, folder: Path) -> list[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, so not in the test's own process

    model = TorchDDP(seeded())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return [digest(dict(model.module.state_dict()))]


@program(2)
def fsdp(rank: int, size: int, folder: Path) -> list[str]:
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        for from_group in (False, True):
            model: Any = seeded()
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
            if from_group and dist.get_backend() == "shm":
                model.set_allocate_memory_from_process_group_for_comm(True)
            found += digests_of_training(model, rank)
    return found


@program(2)
def checkpoints(rank: int, size: int, folder: Path) -> list[str]:
    model: Any = seeded()
    for layer in (model[0], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    digests_of_training(model, rank, steps=1)
    state = get_model_state_dict(model)
    place = folder / f"checkpoint-{dist.get_backend()}"
    dcp.save(state, checkpoint_id=place)
    wanted = digest({name: whole(value) for name, value in state.items()})
    for value in state.values():
        value.to_local().zero_()
    dcp.load(state, checkpoint_id=place)
    assert digest({name: whole(value) for name, value in state.items()}) == wanted
    dcp.async_save(state, checkpoint_id=folder / f"async-{dist.get_backend()}").result(timeout=30)
    return [wanted]


@program(2)
def a_loader_with_forked_workers_beside(rank: int, size: int, folder: Path) -> list[str]:
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it may have no children
    data = TensorDataset(torch.cat([batch(rank, step) for step in range(4)]))
    model = OurDDP(seeded())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        loader = DataLoader(data, batch_size=6, num_workers=2, multiprocessing_context="fork")
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append(digest(dict(model.module.state_dict())))
    return found


@program(2)
def ddp_with_a_hook_whose_futures_wait_for_others(rank: int, size: int, folder: Path) -> list[str]:
    found = []
    for wrapper in (TorchDDP, OurDDP):
        model: Any = wrapper(seeded())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found += digests_of_training(model, rank, steps=5)
    return found


@program(4)
def hybrid_sharding(rank: int, size: int, folder: Path) -> list[str]:
    model: Any = seeded()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return digests_of_training(model, rank)


@program(4)
def distributed_tensors(rank: int, size: int, folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    # Small whole numbers, so that every order of adding gives the same.
    a = torch.arange(8 * 12).remainder(7).view(8, 12).float()
    b = torch.arange(12 * 6).remainder(5).view(12, 6).float()
    left = distribute_tensor(a, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
    assert torch.equal((left @ right).full_tensor(), a @ b)
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        assert torch.equal(left.redistribute(mesh, placements).full_tensor(), a)
    summands = DTensor.from_local(torch.full((4, 4), float(rank)), mesh, [Partial(), Partial()])
    assert summands.full_tensor().eq(6).all()
    assert summands.redistribute(mesh, [Shard(0), Replicate()]).to_local().eq(6).all()
    model: Any = seeded()
    split = parallelize_module(model, mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return digests_of_training(split, rank)


# ------------------------------------------------------------------------------------------------------------ compared


def on_both(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """{program: {backend: what it returned, or a traceback}}, with each backend as that of the whole world."""
    found: dict[str, dict[str, Any]] = {run.__name__: {} for run in PROGRAMS[size]}
    for backend in BACKENDS:
        if backend == "shm":
            dist.barrier()
            dist.destroy_process_group()
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=15))
        for run in PROGRAMS[size]:
            try:
                found[run.__name__][backend] = run(rank, size, folder)
            except BaseException:
                found[run.__name__][backend] = traceback.format_exc()
                return found  # what comes after would fail as well
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, dict[str, Any]]]]:
    return functools.cache(lambda size: on_workers(on_both, size, tmp_path_factory.mktemp("programs")))


@pytest.mark.parametrize(("name", "workers"), [(run.__name__, size) for size in PROGRAMS for run in PROGRAMS[size]])
def test_the_same_bits_as_on_gloo(name: str, workers: int, outcomes: Callable[[int], Any]) -> None:
    for rank, found in enumerate(outcomes(workers)):
        gloo, shm = (found[name].get(backend) for backend in BACKENDS)
        assert isinstance(gloo, list), f"rank {rank} on gloo: {gloo}"
        assert isinstance(shm, list), f"rank {rank} on shm: {shm}"
        assert shm == gloo, f"rank {rank}"


# ---------------------------------------------------------------------------------------------------- on shm by itself


def buckets_and_repeats(rank: int, size: int) -> Any:
    group: Any = dist.new_group(backend="shm")
    model = OurDDP(seeded(), process_group=group, bucket_cap_mb=0.01)
    digests_of_training(model, rank, steps=2)
    buckets = [bucket.flat for bucket in model.reducer.core.queue.buckets]
    inside = [group._heap._segment.offset_of(flat) is not None for flat in buckets]
    wrappers = [functools.partial(wrapper, process_group=group) for wrapper in (OurDDP, TorchDDP, OurDDP)]
    return inside, [digests_of_training(wrapper(seeded()), rank) for wrapper in wrappers]


@pytest.mark.parametrize("workers", [2, 3])
def test_our_buckets_lie_in_group_memory_and_weights_repeat_bit_for_bit(workers: int) -> None:
    results = on_workers(buckets_and_repeats, workers)
    for inside, _ in results:
        assert len(inside) > 1
        assert all(inside)
    ours, theirs, again = results[0][1]
    assert ours == again == theirs
    assert all(digests == results[0][1] for _, digests in results)
