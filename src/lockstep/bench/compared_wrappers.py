"""The arms that are compared: a model without wrapper, in torch's DistributedDataParallel, ours, or another class.

An arm is named by its class and, after an @, the backend of its process group: `lockstep@shm`. The default is Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from lockstep.bench.models import OPTIMIZERS, LabeledBatch, Workload, digest_of, loss_of
from lockstep.bench.run_step import KINDS, RunArm

NONE, TORCH, OURS = "none", "torch", "lockstep"
OURS_ON_SHM = "lockstep@shm"
DEFAULT_ARMS = (NONE, TORCH, OURS)
STEP_ARMS = (*DEFAULT_ARMS, OURS_ON_SHM)
CLASSES = {TORCH: "torch.nn.parallel.DistributedDataParallel", OURS: "lockstep.DistributedDataParallel"}
SEED = 7

Wrapper = Callable[..., nn.Module]


def backend_of(arm: str) -> str:
    return arm.partition("@")[2] or "gloo"


def check_backend(arm: str) -> None:
    if backend_of(arm) not in dist.Backend.backend_list:
        known = ", ".join(dist.Backend.backend_list)
        raise ValueError(f"arm {arm!r}: {backend_of(arm)!r} is not a backend; name one of {known}")


def load_wrapper(arm: str) -> Wrapper:
    """The class of an arm: `torch`, `lockstep` or a dotted name. Raises ValueError if it cannot be loaded."""
    name = arm.partition("@")[0]
    dotted = CLASSES.get(name, name)
    module, _, name = dotted.rpartition(".")
    try:
        return cast(Wrapper, getattr(import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join((NONE, *CLASSES))
        raise ValueError(f"arm {arm!r}: cannot load {dotted} ({error}); name one of {known} or a class") from error


@final
class WrapperArm:
    """A wrapped model and its optimizer. All arms initialise their models from the same seed."""

    def __init__(
        self, name: str, workload: Workload, device: torch.device, *, autocast: bool = False, group: Any = None
    ) -> None:
        torch.manual_seed(SEED)
        model = workload.build().to(device)
        if name != NONE:
            ids = None if device.type == "cpu" else [device.index]
            model = load_wrapper(name)(model, device_ids=ids, process_group=group)
        self.name, self.model = name, model
        self.optimizer = OPTIMIZERS[workload.optimizer](model)
        self._precision = torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext()

    def step(self, batch: LabeledBatch) -> None:
        self.optimizer.zero_grad()
        with self._precision:
            loss = loss_of(self.model(batch.inputs), batch.targets)
        torch.autograd.backward(loss)
        self.optimizer.step()

    def bucket_bytes(self) -> tuple[int, ...]:
        """Sizes of the gradient buckets, in the order in which they are reduced; empty without a wrapper."""
        if self.name == NONE:
            return ()
        log = cast(Any, self.model)._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
        return tuple(int(size) for size in str(sizes).split(","))

    def digest(self) -> str:
        return digest_of(self.model)


def make_arm(name: str, workload: Workload, device: torch.device, *, group: Any) -> WrapperArm | RunArm:
    if name.partition("@")[0] in KINDS:
        return RunArm(name, workload, device, group=group)
    return WrapperArm(name, workload, device, group=group)
