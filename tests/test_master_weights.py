"""`master_weights=True`: optimisers that update float32 copies of 16-bit weights, with any number of workers."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError
from on_workers import on_workers
from runs import Gpt, classify, data, mlp, predict_tokens, use

OPTIMIZERS: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "LAMB": (lockstep.LAMB, {"lr": 0.01}),
}


class OwnCopies(torch.optim.Optimizer):
    """What a program without `master_weights` would write: an optimiser of copies, which are rounded after a step."""

    def __init__(self, parameters: Any, made_by: tuple[Any, dict[str, Any]]) -> None:
        super().__init__(parameters, {})
        self._weights: list[Tensor] = self.param_groups[0]["params"]
        self._copies = [weight.detach().float() for weight in self._weights]
        self._inner = made_by[0](self._copies, **made_by[1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight, copy in zip(self._weights, self._copies, strict=True):
            if not torch.equal(copy.to(weight.dtype), weight):  # the program has changed some elements
                copy[copy.to(weight.dtype) != weight] = weight.float()[copy.to(weight.dtype) != weight]
            copy.grad = None if weight.grad is None else weight.grad.float()
        self._inner.step()
        for weight, copy in zip(self._weights, self._copies, strict=True):
            weight.copy_(copy)


def sha(model: nn.Module) -> str:
    weights = [parameter.detach().cpu().view(torch.int16).numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def half_mlp() -> nn.Module:
    return mlp().to(torch.bfloat16)


def half_gpt() -> nn.Module:
    return Gpt().to(torch.bfloat16)


def train(optimizer: Any, build: Any = half_mlp, folder: Path | None = None, **options: Any) -> tuple[str, str]:
    """Returns the digest of everything, and that of the weights."""
    steps = options.pop("steps", None)
    with lockstep.Run(folder, seed=7, progress=False, **{"device": "cpu"} | options) as run:
        model = run.replicate(build())
        loss = predict_tokens if build is half_gpt else classify
        batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=2)
        for batch in run.train(batches, optimizer(model.parameters())):
            if batch.number + 1 == steps:
                run.stop()
            run.step(loss, batch)
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.2, 0.2)  # the program changes weights between the steps
        return run.digest(), sha(model)


def make(name: str, parameters: Any) -> torch.optim.Optimizer:
    made_by, defaults = OPTIMIZERS[name]
    return made_by(parameters, **defaults)  # type: ignore[no-any-return]


def train_all(rank: int, size: int, backend: str, store: str, hosts: bool, options: Any) -> dict[str, Any]:
    use(backend, store, rank, size)
    if hosts:
        os.environ["LOCKSTEP_HOST"] = f"host {rank}"
    return {
        f"{name}, {build.__name__}": train(functools.partial(make, name), build, **options)
        for name in OPTIMIZERS
        for build in (half_mlp, half_gpt)
    }


def by_program(rank: int, size: int) -> dict[str, Any]:
    return {
        f"{name}, {build.__name__}": train(lambda p, made=made: OwnCopies(p, made), build)[1]
        for name, made in OPTIMIZERS.items()
        for build in (half_mlp, half_gpt)
    }


@functools.cache
def on_one_worker() -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of one worker, and the weights that programs with copies of their own end with."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"shard_optimizer": True, "master_weights": True}
        (found,) = on_workers(train_all, 1, "gloo", f"{folder}/store", False, options)
    (expected,) = on_workers(by_program, 1)
    return found, expected


def test_weights_are_those_of_a_program_with_copies_of_its_own() -> None:
    found, expected = on_one_worker()
    assert {case: weights for case, (_, weights) in found.items()} == expected
    with tempfile.TemporaryDirectory() as folder:  # and others than without copies
        (without,) = on_workers(train_all, 1, "gloo", f"{folder}/store", False, {"shard_optimizer": True})
    assert all(weights != expected[case] for case, (_, weights) in without.items())


@pytest.mark.parametrize(
    ("size", "backend", "hosts", "redundancy"),
    [
        (3, "gloo", False, 1),
        (2, "gloo", True, 0),  # gradients are reduce-scattered, and weights arrive in the next forward pass
        pytest.param(2, "shm", False, 0, marks=pytest.mark.slow),
        pytest.param(4, "hierarchy", False, 1, marks=pytest.mark.slow),
        pytest.param(8, "shm", False, 0, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_on_any_number_of_workers(size: int, backend: str, hosts: bool, redundancy: int) -> None:
    options = {"shard_optimizer": True, "master_weights": True, "redundancy": redundancy}
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_workers(train_all, size, backend, f"{folder}/store", hosts, options)
    assert by_rank == [on_one_worker()[0]] * size


# -- checkpoints -------------------------------------------------------------------------------------------------------


def train_part(rank: int, size: int, folder: str, steps: int | None) -> tuple[str, str]:
    options = {"shard_optimizer": True, "master_weights": True, "steps": steps}
    return train(functools.partial(make, "AdamW"), folder=Path(folder), **options)


def test_copies_are_in_checkpoints(tmp_path: Path) -> None:
    for size, steps in ((3, 1), (2, 3), (1, None)):
        found = on_workers(train_part, size, str(tmp_path), steps)
    assert found == [on_one_worker()[0]["AdamW, half_mlp"]]
    for options in ({}, {"shard_optimizer": True}):
        with pytest.raises(CheckpointError, match="float32 copies of the weights, which would be lost"):
            train(functools.partial(make, "AdamW"), folder=tmp_path, **options)


def test_a_run_without_copies_goes_on_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    train(functools.partial(make, "AdamW"), folder=folders[0], steps=2, shard_optimizer=True)
    shutil.copytree(*folders)
    options = {"shard_optimizer": True, "master_weights": True}
    found = train(functools.partial(make, "AdamW"), folder=folders[0], **options)
    said = "master_weights: False in the checkpoint, True in the program; the program's counts"
    assert said in capsys.readouterr().err
    assert on_workers(train_part, 2, str(folders[1]), None) == [found] * 2


# -- frozen parameters -------------------------------------------------------------------------------------------------


def freeze_and_thaw(rank: int, size: int, folder: str) -> tuple[str, list[list[str]]]:
    """Returns the digest, and which parameters have a copy in the checkpoints after two and after six steps."""
    options: dict[str, Any] = {"shard_optimizer": True, "master_weights": True, "redundancy": 0}
    found = []
    with lockstep.Run(folder, seed=7, progress=False, device="cpu", **options) as run:
        model = run.replicate(half_mlp())
        model[0].requires_grad_(False)
        optimizer = make("AdamW", model.parameters())
        batches = run.batches(data(128), global_batch_size=16, shards=4)
        for batch in run.train(batches, optimizer, steps=8):
            if batch.number in (2, 6):  # what was asked for in the body before was saved when that ended
                run.on_main(lambda: run._session.checkpoints.drain(lambda: None))
                saved = CheckpointStore(Path(folder)).newest()
                assert saved is not None
                states = saved.state["optimizer"]["state"]
                names = enumerate(dict(model.named_parameters()))
                found.append([name for n, name in names if "master_weight" in states.get(n, {})])
            if batch.number == 4:
                model[0].requires_grad_(True)
                model[2].requires_grad_(False)
            run.step(classify, batch)
            if batch.number == 1:  # no memory is taken for frozen ones
                parts = [part for part, _ in run._loop.plan.sharded_state.parts]
                assert all(part.has_master == part.parameter.requires_grad for part in parts)
            if batch.number in (1, 5):
                run.save()
        return run.digest(), found


def test_frozen_parameters_have_no_copies_before_they_are_trained(tmp_path: Path) -> None:
    by_rank = [found for size in (1, 3) for found in on_workers(freeze_and_thaw, size, str(tmp_path / str(size)))]
    assert by_rank == [by_rank[0]] * 4
    trained, others = ["2.weight", "2.bias", "4.weight", "4.bias"], ["0.weight", "0.bias"]
    assert by_rank[0][1] == [trained, others + trained]


def test_a_state_that_torch_has_rounded_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    train(functools.partial(make, "AdamW"), folder=tmp_path, steps=2, shard_optimizer=True, master_weights=True)
    saved = CheckpointStore(tmp_path).newest()
    assert saved is not None

    def loaded(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make("AdamW", parameters)
        optimizer.load_state_dict(saved.state["optimizer"])
        return optimizer

    train(loaded, shard_optimizer=True, master_weights=True)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def train_on_gpu(rank: int, size: int, folder: str, name: str, build: Any, steps: int | None) -> tuple[str, str]:
    use("shm", f"{folder}-store-{size}", rank, size)
    options = {"shard_optimizer": True, "master_weights": True, "device": "cuda:0", "steps": steps}
    return train(functools.partial(make, name), build, Path(folder), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "build"), [("AdamW", half_mlp), ("LAMB", half_gpt)])
def test_on_a_gpu_and_through_checkpoints(name: str, build: Any, tmp_path: Path) -> None:
    (expected,) = on_workers(train_on_gpu, 1, str(tmp_path / "whole"), name, build, None)
    on_workers(train_on_gpu, 3, str(tmp_path / "parts"), name, build, 2)
    assert on_workers(train_on_gpu, 2, str(tmp_path / "parts"), name, build, None) == [expected] * 2


# -- in a loop of one's own --------------------------------------------------------------------------------------------


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    for n, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + n)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def parameters_of_three_kinds() -> list[nn.Parameter]:
    kinds = [(torch.bfloat16, (200, 7)), (torch.bfloat16, (333,)), (torch.float32, (65, 3))]
    values = [torch.linspace(0.5, 1, torch.Size(shape).numel()).view(shape).to(dtype) for dtype, shape in kinds]
    return [nn.Parameter(value) for value in values]


def own_loop(rank: int, size: int, path: str, first: int, last: int) -> list[Any]:
    """The bits of the weights after some steps, and whether the state has what it should have."""
    parameters = parameters_of_three_kinds()
    optimizer = lockstep.ShardedOptimizer(torch.optim.AdamW, parameters, lr=3e-3, master_weights=True)
    if first:
        weights, state = torch.load(path)
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data.copy_(weight)
        optimizer.load_state_dict(state)
    for step in range(first, last):
        set_gradients(parameters, step)
        optimizer.step()
    optimizer.consolidate_state_dict()
    if rank == 0:
        state = optimizer.state_dict()
        torch.save(([parameter.detach() for parameter in parameters], state), path)
        names = ["master_weight" in state["state"][n] for n in range(3)]
        assert names == [True, True, False]
        assert torch.equal(state["state"][0]["master_weight"].bfloat16(), parameters[0])
    return [parameter.detach().float().tolist() for parameter in parameters]


def by_hand(steps: int) -> list[Any]:
    parameters = parameters_of_three_kinds()
    optimizer = OwnCopies(parameters, OPTIMIZERS["AdamW"])
    for step in range(steps):
        set_gradients(parameters, step)
        optimizer.step()
    return [parameter.detach().float().tolist() for parameter in parameters]


def test_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    assert on_workers(own_loop, 3, path, 0, 2) == [by_hand(2)] * 3
    assert on_workers(own_loop, 2, path, 2, 5) == [by_hand(5)] * 2
    plain = lockstep.ShardedOptimizer(torch.optim.AdamW, parameters_of_three_kinds(), lr=3e-3)
    with pytest.raises(ValueError, match="use master_weights=True"):
        plain.load_state_dict(torch.load(path)[1])


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master_weights": True}, "add shard_optimizer=True, which also works on one worker"),
        ({"master_weights": 1, "shard_optimizer": True}, "master_weights=1 must be True or False"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lockstep.Run(None, **options)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "no parameter of the model is in bfloat16"),
        (torch.float16, "small gradients of float16 parameters are 0"),
    ],
)
def test_models_for_which_copies_are_of_no_use_are_refused(dtype: torch.dtype, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(functools.partial(make, "SGD"), lambda: mlp().to(dtype), shard_optimizer=True, master_weights=True)


def test_float16_is_refused_in_a_loop_of_ones_own_too() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="small gradients of float16 parameters are 0"):
        lockstep.ShardedOptimizer(torch.optim.SGD, [weight], lr=0.1, master_weights=True)


def test_a_copy_of_another_shape_is_refused_before_anything_is_changed() -> None:
    parameters = parameters_of_three_kinds()[:1]
    optimizer = lockstep.ShardedOptimizer(lockstep.LAMB, parameters, lr=0.01, master_weights=True)
    set_gradients(parameters, 0)
    optimizer.step()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    before = state["state"][0]["master_weight"].clone()
    state["state"][0]["master_weight"] = torch.ones(7)
    with pytest.raises(ValueError, match=r"master_weight has the shape \(7,\)"):
        optimizer.load_state_dict(state)
    optimizer.consolidate_state_dict()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"], before)
