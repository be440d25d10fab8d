"""The step of `lockstep.Run` as an arm of a benchmark: the exact one, or the fast one; observed, or not.

One shard for each worker.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.bench.models import OPTIMIZERS, Batch, Workload, digest_of
from lockstep.comm.exact_sum import ShardSum
from lockstep.data.batches import Batch as GlobalBatch
from lockstep.data.batches import Shard
from lockstep.ddp.replica import trained_leaves
from lockstep.train.buffer_exchange import RunningState
from lockstep.train.options import Options
from lockstep.train.precision import LossScale
from lockstep.train.recompute_check import Audit
from lockstep.train.shard_gradients import Gradients
from lockstep.train.step import Training, take_step
from lockstep.train.step_observer import Blind, Observer, Sight
from lockstep.train.trained_parameters import facts_of

EXACT, FAST = "exact", "fast"
KINDS = (EXACT, FAST)
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
        sum_ = ShardSum(group, shares, device=device, exact=name.partition("@")[0] != FAST)
        self._rank, self._size = group.rank(), group.size()
        self._steps: dict[Observer, int] = {}
        self._observer: Observer = Blind(device)
        self._training = Training(
            model=self.model,
            leaves=leaves,
            optimizer=OPTIMIZERS[workload.optimizer](self.model),
            sum=sum_,
            gradients=Gradients(leaves, sum_),
            running=RunningState(self.model, self._size),
            loss_scale=LossScale(),
            audit=Audit(self.model, leaves, every=0, fetch=_nothing_to_fetch),
            observer=self._observer,
            options=Options.of({"precision": precision}),
            seed=SEED,
        )

    def let_see(self, observer: Observer) -> None:
        """The steps from now on. Each observer counts its own."""
        if observer not in self._steps:
            world = {
                "rank": self._rank,
                "size": self._size,
                "backend": self.name,
                "generation": 1,
                "global_batch_size": 1,
            }
            observer.share_out(dict, sees=Sight(writes=self._rank == 0), first=0, **world)
        self._observer = self._training.observer = observer

    def step(self, batch: Batch) -> None:
        rows, number, see = len(batch.inputs), self._steps.get(self._observer, 0), self._observer
        self._steps[see] = number + 1
        whole = GlobalBatch(
            epoch=0,
            step=number,
            number=number,
            count=rows * self._size,
            ends_epoch=False,
            shards=(Shard(self._rank, rows, batch),),
            of_shards=self._size,
        )
        see.top(number)
        see.data_came()
        result = take_step(self._training, loss, whole)
        facts = partial(facts_of, self._training, result)
        see.stepped(number, result.loss, samples=whole.count, epoch=0, facts=facts)

    def bucket_bytes(self) -> tuple[int, ...]:
        return self._training.gradients.bucket_bytes

    def digest(self) -> str:
        return digest_of(self.model)
