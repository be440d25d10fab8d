"""The training step of `lockstep.Run` as an arm of a benchmark: exact or fast, with or without an observer.

Each worker has one shard, except in the arms whose name begins with `exact8`, in which all workers share eight.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.bench.models import OPTIMIZERS, LabeledBatch, Workload, digest_of
from lockstep.bench.workers import finish_of
from lockstep.comm.agreement import Broadcast
from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch as GlobalBatch, Shard
from lockstep.data.sample_order import shards_of_rank
from lockstep.ddp.deferred_weights import DeferredWeights
from lockstep.ddp.replica import Leaf, trained_leaves
from lockstep.ddp.sharded_state import ShardedState
from lockstep.seed import derive_seed
from lockstep.step import determinism
from lockstep.step.audit import AuditSchedule, ShardAudit
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.captured_shard import StepStream
from lockstep.step.compiled_model import REGIONAL, compile_model
from lockstep.step.precision import LossScale
from lockstep.step.residuals import Residuals
from lockstep.step.run_options import GradComm, RunOptions
from lockstep.step.scattered_gradients import ScatteredGradients
from lockstep.step.shard_bucket import Compression, Rounding
from lockstep.step.shard_gradients import ShardGradients
from lockstep.step.shard_graphs import Capture, ShardGraphs
from lockstep.step.step import take_step
from lockstep.step.step_types import StepContext
from lockstep.trace.step_observer import NullObserver, ObserverConfig, StepObserver
from lockstep.train.training_plan import lr_and_grad_norm
from lockstep.world.freed_memory import keep_freed_memory

EXACT, FAST, EXACT_8, EXACT_8_EAGER = "exact", "fast", "exact8", "exact8-eager"
EXACT_COMPILED, EXACT_8_COMPILED = "exact-compiled", "exact8-compiled"
EXACT_REGIONAL, EXACT_8_REGIONAL = "exact-regional", "exact8-regional"
EXACT_AUDITED, EXACT_8_AUDITED = "exact-audited", "exact8-audited"
EXACT_SHARDED, EXACT_8_SHARDED = "exact-sharded", "exact8-sharded"
EXACT_INT8, EXACT_INT4, EXACT_8_INT8 = "exact-int8", "exact-int4", "exact8-int8"
EXACT_POWERSGD, EXACT_TOPK = "exact-powersgd", "exact-topk"
KINDS = (
    *(EXACT, FAST, EXACT_8, EXACT_8_EAGER, EXACT_COMPILED, EXACT_8_COMPILED, EXACT_REGIONAL, EXACT_8_REGIONAL),
    *(EXACT_AUDITED, EXACT_8_AUDITED),
    *(EXACT_SHARDED, EXACT_8_SHARDED, EXACT_INT8, EXACT_INT4, EXACT_8_INT8, EXACT_POWERSGD, EXACT_TOPK),
)
SEED = 7


def loss(model: nn.Module, batch: LabeledBatch) -> tuple[Tensor, int]:
    logits, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), len(targets)


@final
class RunArm:
    """A model that is trained by Run's step. All arms initialise their models from the same seed.

    Until `close` it sets what the arithmetic of its kind requires.
    """

    def __init__(self, name: str, workload: Workload, device: torch.device, *, group: Any) -> None:
        torch.manual_seed(SEED)
        self.name, self.model = name, workload.build().to(device)
        kind, self._rank, self._size = name.partition("@")[0], group.rank(), group.size()
        exact, is_cut = kind != FAST, kind.startswith(EXACT_8)
        shards = workload.shards(self._size) if is_cut else self._size
        shares = [shards_of_rank(shards, self._size, rank) for rank in range(self._size)]
        self._mine, self._shards, self._shares, self._group = shares[self._rank], shards, shares, group
        self._is_audited = kind.endswith("-audited")
        self._batch: LabeledBatch | None = None  # with audits all workers compute the same batch, so that any can audit
        if device.type == "cpu":
            keep_freed_memory(os.environ)
        self._settings = determinism.arithmetic(device, exact=exact, threads=torch.get_num_threads())
        self._settings.__enter__()
        is_regional = kind.endswith(f"-{REGIONAL}")
        compile_model(self.model, {REGIONAL: True} if is_regional else kind.endswith("-compiled"), device)
        self._stream = StepStream(device)
        comm = next((comm for comm in GradComm if kind.endswith(f"-{comm.value}")), GradComm.FP32)
        key = partial(derive_seed, SEED, "codec", 0)
        self._compression: Compression | None = None if comm.codec is None else Rounding(comm.codec, key)
        method = RunOptions(grad_comm=comm).error_feedback
        if method is not None:
            self._compression = Residuals(method, shards, dict(self.model.named_parameters()), SEED)
        compresses = self._compression is not None
        leaves = trained_leaves(self.model, set())
        capture = Capture.OFF if kind == EXACT_8_EAGER else Capture.AUTO
        optimizer = OPTIMIZERS[workload.optimizer](self.model)
        sharded: ShardedState | None = None
        self._weights: DeferredWeights | None = None
        if kind.endswith("-sharded"):
            sharded = ShardedState(
                [optimizer], whole_tensors=[False], redundancy=0, scatters=device.type == "cpu", queues=True
            )
            sharded.assign(group, device)
        self._sharded, scatters = sharded, sharded is not None and sharded.scatters
        sum_ = ShardSum(group, shares, device=device, exact=exact, compresses=compresses, in_thread=scatters)
        scattered: ScatteredGradients | None = None
        if sharded is not None and scatters:
            scattered = ScatteredGradients(sharded, leaves, sum_)
            self._weights = DeferredWeights(self.model, announce=print)
            self._weights.sum = sum_
        self._steps: dict[StepObserver, int] = {}
        self._observer: StepObserver = NullObserver(device)
        self._training = StepContext(
            model=self.model,
            leaves=leaves,
            optimizer=optimizer,
            sharded_state=sharded,
            weights=self._weights,
            sum=sum_,
            gradients=self._make_gradients(leaves, sum_, scattered),
            buffers=BufferExchange(self.model, shards),
            loss_scale=LossScale(),
            audit=ShardAudit(
                dict(self.model.named_modules()),
                leaves,
                schedule=AuditSchedule("auto" if self._is_audited else 0),
                fetch=self._fetch,
            ),
            observer=self._observer,
            options=RunOptions.from_keywords({"precision": workload.precision}),
            seed=SEED,
            graphs=ShardGraphs.on_device(device, self.model, capture, exact=exact, announce=lambda text: None),
        )

    def _make_gradients(
        self, leaves: list[Leaf], sum_: ShardSum, scattered: ScatteredGradients | None
    ) -> ShardGradients:
        with self._stream.active():
            return ShardGradients(leaves, sum_, compression=self._compression, scattered=scattered)

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

    def _fetch(self, batch: GlobalBatch, number: int) -> Shard:
        """Return a shard of another worker."""
        assert self._batch is not None
        share = next(share for share in self._shares if number in share)
        part = self._parts(self._batch)[list(share).index(number)]
        return Shard(number, len(part.inputs), part)

    def _parts(self, batch: LabeledBatch) -> list[LabeledBatch]:
        inputs, targets = batch.inputs.chunk(len(self._mine)), batch.targets.chunk(len(self._mine))
        return [LabeledBatch(*pair) for pair in zip(inputs, targets, strict=True)]

    def step(self, batch: LabeledBatch) -> None:
        if self._is_audited and self._batch is None:
            self._batch = LabeledBatch(batch.inputs.clone(), batch.targets.clone())
            Broadcast(keep=False)(self._group, [self._batch.inputs, self._batch.targets])
        batch = batch if self._batch is None else self._batch
        rows, number, observer = len(batch.inputs), self._steps.get(self._observer, 0), self._observer
        self._steps[observer] = number + 1
        parts = self._parts(batch)
        whole = GlobalBatch(
            epoch=0,
            step=number,
            number=number,
            count=rows * self._size,
            ends_epoch=False,
            shards=tuple(Shard(n, len(one.inputs), one) for n, one in zip(self._mine, parts, strict=True)),
            of_shards=self._shards,
        )
        observer.begin_iteration(number)
        observer.end_data_wait()
        with self._stream.active():
            result = take_step(self._training, loss, whole)
            if self._sharded is not None:
                device = self._training.sum.device
                self._sharded.exchange_weights(0, self._group, device, confirms=False, deferred=self._weights)
        facts = partial(lr_and_grad_norm, self._training, result)
        observer.end_step(number, result.loss, samples=whole.count, epoch=0, facts=facts)

    @property
    def is_deferred(self) -> bool:
        """Whether a step leaves new weights to the next one."""
        return self._weights is not None

    def finish(self) -> None:
        """Wait until all steps are complete, with the weights that would arrive in the next one."""
        if self._weights is not None:
            self._weights.finish()
        finish_of(self._training.sum.device)()

    def close(self) -> None:
        """Restore the settings of the process."""
        self._settings.__exit__(None, None, None)

    def bucket_bytes(self) -> tuple[int, ...]:
        return self._training.gradients.buckets.sent_bytes

    def digest(self) -> str:
        return digest_of(self.model)
