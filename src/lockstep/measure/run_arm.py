"""The step of `lockstep.Run` as an arm of a benchmark: the exact one, or the fast one. One shard for each worker."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.exact import ShardSum
from lockstep.data.batches import Batch as GlobalBatch
from lockstep.data.batches import Shard
from lockstep.measure.models import OPTIMIZERS, Batch, Workload, digest_of
from lockstep.replicate.gradients import Gradients
from lockstep.replicate.replica import trained_leaves
from lockstep.replicate.running import RunningState
from lockstep.train.audit import Audit
from lockstep.train.chronicle import Chronicle
from lockstep.train.observer import Observer, Sight
from lockstep.train.options import Options
from lockstep.train.precision import LossScale
from lockstep.train.step import Training, take_step

EXACT, FAST = "exact", "fast"
SEED = 7


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), len(targets)


def _nothing_to_fetch(batch: GlobalBatch, number: int) -> Shard:
    raise AssertionError("benchmarks do not audit")


@final
class RunArm:
    """A model of its own, from the same seed as every other arm's."""

    def __init__(
        self, name: str, workload: Workload, device: torch.device, *, group: Any, precision: str = "fp32"
    ) -> None:
        torch.manual_seed(SEED)
        self.name, self.model = name, workload.build().to(device)
        leaves = trained_leaves(self.model, set())
        shares = [range(rank, rank + 1) for rank in range(group.size())]
        sum_ = ShardSum(group, shares, device=device, exact=name.partition("@")[0] == EXACT)
        self._rank, self._size = group.rank(), group.size()
        self._steps = 0
        observer = self._observer = Observer(Chronicle(None, name, device), device)
        observer.share_out(dict, sees=Sight(), first=0, size=self._size)
        self._training = Training(
            model=self.model,
            leaves=leaves,
            optimizer=OPTIMIZERS[workload.optimizer](self.model),
            sum=sum_,
            gradients=Gradients(leaves, sum_),
            running=RunningState(self.model, self._size),
            loss_scale=LossScale(),
            audit=Audit(self.model, leaves, every=0, fetch=_nothing_to_fetch),
            observer=observer,
            options=Options.of({"precision": precision}),
            seed=SEED,
        )

    def step(self, batch: Batch) -> None:
        rows = len(batch.inputs)
        whole = GlobalBatch(
            epoch=0,
            step=self._steps,
            number=self._steps,
            count=rows * self._size,
            ends_epoch=False,
            shards=(Shard(self._rank, rows, batch),),
            of_shards=self._size,
        )
        self._observer.top(self._steps)
        take_step(self._training, loss, whole)
        self._steps += 1

    def bucket_bytes(self) -> tuple[int, ...]:
        return self._training.gradients.bucket_bytes

    def digest(self) -> str:
        return digest_of(self.model)
