"""The training step of `lockstep.Run` as an arm of a benchmark: exact or fast, with or without an observer.

Each worker has one shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.bench.models import OPTIMIZERS, LabeledBatch, Workload, digest_of
from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch as GlobalBatch, Shard
from lockstep.ddp.replica import trained_leaves
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.options import RunOptions
from lockstep.step.precision import LossScale
from lockstep.step.recompute_check import RecomputeCheck
from lockstep.step.shard_gradients import ShardGradients
from lockstep.step.step import take_step
from lockstep.step.step_types import StepContext
from lockstep.trace.step_observer import NullObserver, ObserverConfig, StepObserver
from lockstep.train.trained_parameters import lr_and_grad_norm

EXACT, FAST = "exact", "fast"
KINDS = (EXACT, FAST)
SEED = 7


def loss(model: nn.Module, batch: LabeledBatch) -> tuple[Tensor, int]:
    logits, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), len(targets)


def _nothing_to_fetch(batch: GlobalBatch, number: int) -> Shard:
    raise AssertionError("benchmarks do not audit")


@final
class RunArm:
    """A model that is trained by Run's step. All arms initialise their models from the same seed."""

    def __init__(
        self, name: str, workload: Workload, device: torch.device, *, group: Any, precision: str = "fp32"
    ) -> None:
        torch.manual_seed(SEED)
        self.name, self.model = name, workload.build().to(device)
        leaves = trained_leaves(self.model, set())
        shares = [range(rank, rank + 1) for rank in range(group.size())]
        sum_ = ShardSum(group, shares, device=device, exact=name.partition("@")[0] != FAST)
        self._rank, self._size = group.rank(), group.size()
        self._steps: dict[StepObserver, int] = {}
        self._observer: StepObserver = NullObserver(device)
        self._training = StepContext(
            model=self.model,
            leaves=leaves,
            optimizer=OPTIMIZERS[workload.optimizer](self.model),
            sum=sum_,
            gradients=ShardGradients(leaves, sum_),
            buffers=BufferExchange(self.model, self._size),
            loss_scale=LossScale(),
            recompute_check=RecomputeCheck(self.model, leaves, every=0, fetch=_nothing_to_fetch),
            observer=self._observer,
            options=RunOptions.from_keywords({"precision": precision}),
            seed=SEED,
        )

    def set_observer(self, observer: StepObserver) -> None:
        """Use `observer` from the next step on. Each observer has its own step count."""
        if observer not in self._steps:
            world = {
                "rank": self._rank,
                "size": self._size,
                "backend": self.name,
                "generation": 1,
                "global_batch_size": 1,
            }
            observer.set_world(dict, config=ObserverConfig(writes=self._rank == 0), first=0, **world)
        self._observer = self._training.observer = observer

    def step(self, batch: LabeledBatch) -> None:
        rows, number, observer = len(batch.inputs), self._steps.get(self._observer, 0), self._observer
        self._steps[observer] = number + 1
        whole = GlobalBatch(
            epoch=0,
            step=number,
            number=number,
            count=rows * self._size,
            ends_epoch=False,
            shards=(Shard(self._rank, rows, batch),),
            of_shards=self._size,
        )
        observer.begin_iteration(number)
        observer.end_data_wait()
        result = take_step(self._training, loss, whole)
        facts = partial(lr_and_grad_norm, self._training, result)
        observer.end_step(number, result.loss, samples=whole.count, epoch=0, facts=facts)

    def bucket_bytes(self) -> tuple[int, ...]:
        return self._training.gradients.bucket_bytes

    def digest(self) -> str:
        return digest_of(self.model)
