"""FSDP2, DTensor, tensor parallelism, DCP and ZeRO on a backend: the same results as on Gloo, in the same processes.

PyTorch's own tests of these are not in the installed package.
"""

from __future__ import annotations

import copy
import os
import tempfile
import unittest
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from beside_gloo import BesideGloo

WIDTH, STEPS = 24, 3


class ShardingTests(BesideGloo):
    def test_fsdp2(self) -> None:
        self.compare_with_gloo(lambda: _train(_sharded(_mesh())))

    def test_fsdp2_mixed_precision(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.compare_with_gloo(lambda: _train(_sharded(_mesh(), mp_policy=policy)))

    def test_fsdp2_no_reshard(self) -> None:
        self.compare_with_gloo(lambda: _train(_sharded(_mesh(), reshard_after_forward=False)))

    def test_fsdp2_buffers_of_the_group(self) -> None:
        """FSDP takes its all-gather and reduce-scatter buffers from the group, where it has any to give."""

        def compute() -> dict[str, Tensor]:
            model = _sharded(_mesh())
            if dist.get_backend() != "gloo":
                model.set_allocate_memory_from_process_group_for_comm(True)
            return _train(model)

        self.compare_with_gloo(compute)

    def test_fsdp2_accumulation(self) -> None:
        def compute() -> dict[str, Tensor]:
            model = _sharded(_mesh())
            model.set_requires_gradient_sync(False)
            _loss(model, step=0).backward()
            model.set_requires_gradient_sync(True)
            _loss(model, step=1).backward()
            return {name: _full(parameter.grad) for name, parameter in model.named_parameters()}

        self.compare_with_gloo(compute)

    def test_fsdp2_with_replicas(self) -> None:
        """Sharded inside pairs, replicated between them."""
        if dist.get_world_size() % 2:
            raise unittest.SkipTest("needs pairs")
        sizes = (dist.get_world_size() // 2, 2)
        self.compare_with_gloo(
            lambda: _train(_sharded(init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))))
        )

    def test_tensor_parallel(self) -> None:
        def compute() -> dict[str, Tensor]:
            torch.manual_seed(0)
            heads = 12  # divides by 2, 3 and 4
            model = nn.Sequential(nn.Linear(WIDTH, heads * 2), nn.GELU(), nn.Linear(heads * 2, WIDTH))
            parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return _train(model, same_batch=True)

        self.compare_with_gloo(compute)

    def test_dtensor_redistribution(self) -> None:
        def compute() -> dict[str, Tensor]:
            mesh = _mesh()
            torch.manual_seed(0)
            rows = distribute_tensor(torch.randn(13, 7, requires_grad=True), mesh, [Shard(0)])  # uneven on purpose
            columns = rows.redistribute(placements=[Shard(1)])
            whole = columns.redistribute(placements=[Replicate()])
            product = distribute_tensor(torch.randn(5, 13), mesh, [Shard(1)]) @ rows
            assert product.placements == (Partial(),)
            scattered = product.redistribute(placements=[Shard(0)])
            found = {"columns": columns, "whole": whole, "sum": product, "scattered": scattered}
            (grad,) = torch.autograd.grad(scattered.sum(), [rows])
            return {name: _full(tensor) for name, tensor in {**found, "grad": grad}.items()}

        self.compare_with_gloo(compute)

    def test_checkpoint(self) -> None:
        """Saved and loaded by all ranks together, also in the background."""

        def compute() -> dict[str, Tensor]:
            with tempfile.TemporaryDirectory() as own:
                [folder] = _from_rank_0([own])
                model = _sharded(_mesh())
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                _take_steps(model, optimizer)
                weights, states = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": states}, checkpoint_id=os.path.join(folder, "now"))
                dcp.async_save({"model": weights}, checkpoint_id=os.path.join(folder, "later")).result()
                other = _sharded(_mesh(), seed=1)
                other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
                weights, states = get_state_dict(other, other_optimizer)
                state = {"model": weights, "optimizer": states}
                dcp.load(state, checkpoint_id=os.path.join(folder, "now"))
                set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states)
                later = {"model": get_model_state_dict(_sharded(_mesh(), seed=2))}
                dcp.load(later, checkpoint_id=os.path.join(folder, "later"))
                dist.barrier()  # no worker removes the folder while another still reads
            for loaded in (_weights(other), {name: _full(tensor) for name, tensor in later["model"].items()}):
                assert_close(loaded, _weights(model), rtol=0, atol=0)
            _take_steps(other, other_optimizer)
            return _weights(other)

        self.compare_with_gloo(compute)

    def test_full_state_from_rank_0(self) -> None:
        def compute() -> dict[str, Tensor]:
            torch.manual_seed(3)
            whole = _blocks().state_dict() if dist.get_rank() == 0 else {}
            model = _sharded(_mesh())
            set_model_state_dict(
                model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            )
            return _train(model)

        self.compare_with_gloo(compute)

    def test_zero_redundancy_optimizer(self) -> None:
        def compute() -> dict[str, Tensor]:
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(_blocks())
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
            _take_steps(model, optimizer)
            optimizer.consolidate_state_dict(to=0)
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}

        self.compare_with_gloo(compute)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _blocks() -> nn.Sequential:
    block = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 1), nn.GELU(), nn.Linear(2 * WIDTH + 1, WIDTH)
    )
    blocks = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.1)
    return blocks


def _sharded(mesh: DeviceMesh, *, seed: int = 0, **options: Any) -> FSDPModule:
    torch.manual_seed(seed)
    model = _blocks()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _loss(model: Any, *, step: int, same_batch: bool = False) -> Tensor:
    rank = 0 if same_batch else dist.get_rank()
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = (model(batch).float() - batch).square().mean()
    return loss


def _take_steps(model: Any, optimizer: torch.optim.Optimizer, *, same_batch: bool = False) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step=step, same_batch=same_batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _train(model: Any, *, same_batch: bool = False) -> dict[str, Tensor]:
    _take_steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), same_batch=same_batch)
    return _weights(model)


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: _full(parameter.detach()) for name, parameter in model.named_parameters()}


def _full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _from_rank_0(objects: list[Any]) -> list[Any]:
    dist.broadcast_object_list(objects, src=0)
    return objects
