"""What reproducible results require: a private process group, deterministic arithmetic, and checks of SyncBatchNorm."""

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

from lockstep import _torch
from lockstep.comm.register_backends import backend_name
from lockstep.data.batches import Batch
from lockstep.errors import LockstepError
from lockstep.world.world import World

COMPILED_SHAPES: Final = 32  # per model, in exact runs: two sizes of shards, those of the last batch, evaluation, ...


def private_group(world: World) -> dist.ProcessGroup:
    """Return a group for gradients, so that collectives of the program (SyncBatchNorm, say) never interfere.

    With NCCL it is the default group: its streams keep the order, and two communicators could deadlock.
    """
    whole = dist.group.WORLD
    assert whole is not None
    if world.size == 1 or "nccl" in backend_name(whole, world.device):
        return whole
    group: dist.ProcessGroup = dist.new_group(timeout=_timeout_of(whole, world.device))
    return group


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of the collectives of a group; None if unknown. Torch would not apply it to a new group."""
    backend: Any = group._get_backend(device)
    if hasattr(backend, "options"):
        return getattr(backend.options, "_timeout", None)
    sync = getattr(backend, "_sync", None)  # an ShmGroup's GroupSync
    return None if sync is None else timedelta(seconds=sync.timeout_s)


@contextmanager
def arithmetic(device: torch.device, *, exact: bool, threads: int) -> Iterator[None]:
    """Within the context, compute the same operations in the same order on any number of workers, if `exact`.

    On a CPU the number of threads decides how sums are split, so it must not depend on the number of workers.
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
        with _compile_per_shape():
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        deterministic.fill_uninitialized_memory = fill


@contextmanager
def _compile_per_shape() -> Iterator[None]:
    """Within the context, let the code that torch.compile generates depend only on the shapes of the call.

    By default it compiles for dynamic shapes as soon as it has seen a second size, and falls back to eager after eight
    compilations. Which sizes a process sees, and in which order, depends on its shards, so on the number of workers;
    and code for dynamic shapes rounds differently. Here it compiles once for each size, and raises an error instead of
    falling back. Functions compiled with `dynamic=True` are not affected. Kernels are not chosen by how fast they are
    on this worker ("max-autotune"), which could choose another one, with other bits, on another.
    """
    config: Any = _torch.dynamo().config
    with (
        config.patch(
            automatic_dynamic_shapes=False,
            recompile_limit=max(COMPILED_SHAPES, config.recompile_limit),
            accumulated_recompile_limit=config.accumulated_recompile_limit,  # which may be raised
            fail_on_recompile_limit_hit=True,
        ),
        _torch.inductor_config().patch(deterministic=True),
    ):
        yield


def synced_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]


def refuse_empty_shards(layer: str, batch: Batch, shares: Sequence[range], *, exact: bool) -> None:
    """Raise ValueError if a worker has no samples: it would run no forward pass, and a SyncBatchNorm waits for all."""
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
    """Check `run.batches(split=)`: raise LockstepError if the workers may change, and warn of what it costs."""
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
    """Raise or warn if SyncBatchNorm does not see the global batch, but only the shards that run at the same time."""
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
