"""What has to be so around a run: a process group of its own, one kind of arithmetic, and the right batch norm."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.register_backends import backend_name
from lockstep.data.batches import Batch
from lockstep.errors import LockstepError
from lockstep.world.world import World

COMPILED_SHAPES: Final = 32  # of one model, in exact runs: shards of two sizes, those of a last batch, evaluation, ...


def private_group(world: World) -> dist.ProcessGroup:
    """For gradients, so that what the program itself sends (SyncBatchNorm, say) never comes between.

    With NCCL it is the program's group: its streams keep the order, and two communicators could wait for each other.
    """
    whole = dist.group.WORLD
    assert whole is not None
    if world.size == 1 or "nccl" in backend_name(whole, world.device):
        return whole
    group: dist.ProcessGroup = dist.new_group(timeout=_timeout_of(whole, world.device))
    return group


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long its collectives wait; None if it does not tell. Torch would not hand it on to another group."""
    backend: Any = group._get_backend(device)
    if hasattr(backend, "options"):
        return getattr(backend.options, "_timeout", None)
    team = getattr(backend, "_team", None)  # shm
    return None if team is None else timedelta(seconds=team.timeout_s)


@contextmanager
def arithmetic(device: torch.device, *, exact: bool, threads: int) -> Iterator[None]:
    """The same operations in the same order, on any number of workers.

    On a CPU the number of threads decides how sums are cut up, so it must not follow from the number of workers.
    """
    if not exact:
        yield
        return
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    benchmark, fill = torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory
    try:
        if device.type == "cpu":
            torch.set_num_threads(threads)
        else:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            deterministic.fill_uninitialized_memory = False
        with _compiling_by_shape():
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        deterministic.fill_uninitialized_memory = fill


@contextmanager
def _compiling_by_shape() -> Iterator[None]:
    """Let what torch.compile makes of a call follow from the shapes of this call alone.

    By itself it compiles for any size as soon as it has seen a second one, and gives up after eight compilations. Which
    sizes a process sees, and in which order, depends on its shards, so on the number of workers; and code for any size
    rounds differently. Here it compiles once for each size, and raises an error where it would give up. What the
    program asks for with `dynamic=True` stays as it is.
    """
    import torch._dynamo  # which the first optimiser imports anyway

    config: Any = torch._dynamo.config
    with config.patch(
        automatic_dynamic_shapes=False,
        recompile_limit=max(COMPILED_SHAPES, config.recompile_limit),
        fail_on_recompile_limit_hit=True,
    ):
        yield


def synced_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]


def refuse_empty_shards(layer: str, batch: Batch, shares: Sequence[range], *, exact: bool) -> None:
    """A worker without samples runs no forward pass, and `layer`, a SyncBatchNorm, waits for all."""
    runs = [range(n, n + 1) for n in range(batch.of_shards)] if exact else shares
    if any(sum(batch.counts[n] for n in run) == 0 for run in runs):
        raise ValueError(
            f"step {batch.number}: {layer} is a SyncBatchNorm, and a batch of {batch.count} samples leaves some of "
            f"{len(runs)} shards without any: the others would wait for them. Use drop_last=True, or fewer shards"
        )


def describe_synced(layer: str) -> str:
    return (
        f"{layer} is a SyncBatchNorm: what it computes depends on the number of workers, and `lockstep run --min` may "
        "change that at any time. Use BatchNorm, whose running averages are those of all shards here anyway; or start "
        "without --min and --max; or give Run exact=False"
    )


def check_split(split: str | None, *, exact: bool, is_elastic: bool, is_main: bool) -> None:
    """Of `run.batches(split=)`: raise where the workers may change; say what it costs."""
    if split is None:
        return
    if is_elastic:
        raise LockstepError(
            f"split={split!r} with workers that may come and go: a stream that splits itself cannot be split anew in "
            "an epoch. Start without --min, --max and --hosts; or leave split= out, and let each worker read all of it"
        )
    if exact and is_main:
        print(
            f"lockstep: split={split!r}: the samples of a step, and so the bits, depend on the number of workers",
            file=sys.stderr,
            flush=True,
        )


def check_sync_batch_norm(model: nn.Module, shares: Sequence[range], *, exact: bool, is_main: bool) -> None:
    """SyncBatchNorm sees the shards that run at the same time. Only if all do, that is the global batch."""
    layers = synced_layers(model)
    most, fewest = max(map(len, shares)), min(map(len, shares))
    if not layers or not exact or most == 1:
        return
    if most != fewest:
        raise ValueError(
            f"{layers[0]} is a SyncBatchNorm, and {sum(map(len, shares))} shards on {len(shares)} workers leave some "
            f"with {fewest} and some with {most}: they would not come together. Let the shards be a multiple of the "
            "workers, or use BatchNorm, whose running averages are those of all shards here anyway"
        )
    if is_main:
        warnings.warn(
            f"{layers[0]} is a SyncBatchNorm, and every worker runs {most} shards one after the other: its statistics "
            f"are those of {len(shares)} shards at a time, not of the global batch, and depend on the number of "
            "workers. With as many shards as workers they are exact",
            stacklevel=4,
        )
