"""The values that a training step works on and returns: the plan, the context of a step, its update and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.comm.shard_sum import AsyncBarrier, ShardSum
from lockstep.data.batches import Batches
from lockstep.ddp.deferred_weights import DeferredWeights
from lockstep.ddp.replica import Leaf, cheap_digests
from lockstep.ddp.sharded_state import ShardedState
from lockstep.step.audit import AuditSchedule, ShardAudit
from lockstep.step.buffer_changes import NewValue
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.feedback_bucket import CompressedGradients
from lockstep.step.grad_comm_tuner import GradCommTuner
from lockstep.step.learning_rate import LargeBatch
from lockstep.step.precision import LossScale
from lockstep.step.residuals import Residuals
from lockstep.step.run_options import GradComm, RunOptions
from lockstep.step.shard_balance import ShardBalance, SpeedMeter
from lockstep.step.shard_gradients import ShardGradients
from lockstep.step.shard_graphs import ShardGraphs
from lockstep.step.step_check import DeferredNormCheck
from lockstep.trace.metrics import Mean
from lockstep.trace.step_observer import StepObserver

CHECKED_FIRST: Final = 3  # steps: see `GradientWrites`
CHECKED_EVERY: Final = 64

Loss = Callable[[Any, Any], Any]  # (model, batch) -> (sum of the losses, their weight[, metrics])


class Stop(IntEnum):
    """Whether to end the loop after this step. The highest value of all workers counts."""

    NO = 0
    ASKED = 1  # by the program: `run.stop()`
    SIGNAL = 2  # by a signal: the run is to be resumed later


@dataclass(frozen=True)
class StepRequests:
    """What this worker asks of the others in this step."""

    stop: Stop = Stop.NO
    move: int = 0  # number of the generation that is to end after this step; 0: none
    commit: Callable[[], None] = lambda: None  # called before the step is applied; raises if it must not be applied
    check_left: Callable[[], None] = lambda: None  # called before each shard; raises if a worker was lost meanwhile
    save: bool = False  # save after this step; counts on rank 0 only


@dataclass(frozen=True)
class Result:
    """The result of one step; equal on all workers, except for `waited_s`."""

    number: int
    loss: float  # mean over the global batch
    weight: float
    norm: float | Tensor | None
    skipped: bool  # something was not finite, and the weights were not changed
    stop_asked_by: tuple[int, ...]  # ranks that asked to stop
    waited_s: float  # for the other workers, after this worker's backward pass
    stop: Stop = Stop.NO
    move: int = 0
    save: bool = False  # rank 0 has asked to save after this step
    samples: int = 0  # fingerprint of the samples of the global batch (data/ledger.py)
    metrics: Mapping[str, Mean] = field(default_factory=dict)  # of the loss function, over the global batch
    rounding_error: float | None = None  # of compressed gradients, relative to their norm; None: not measured

    def to_json(self) -> dict[str, Any]:
        metrics = {name: [mean.sum, mean.weight] for name, mean in self.metrics.items()}
        return asdict(replace(self, metrics={})) | {"norm": self.grad_norm, "metrics": metrics}

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Result:
        by, stop = tuple(plain["stop_asked_by"]), Stop(plain["stop"])
        metrics = {name: Mean(*pair) for name, pair in plain["metrics"].items()}
        return Result(**(plain | {"stop_asked_by": by, "stop": stop, "metrics": metrics}))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping; None if it was not computed. On a GPU this waits for it."""
        return None if self.norm is None else float(self.norm)


@dataclass
class Update:
    """What one step changes; equal on all workers. A worker that has missed the step gets this and applies it."""

    number: int  # of the batch
    part: int  # which optimiser takes the step: see `StepContext.part`
    index: int  # how many steps were applied before it, those of all optimisers counted
    ends_epoch: bool
    finite: bool  # if not, the weights are not changed
    bad_loss: bool  # a loss was not finite, of which the loss scale is not the cause
    buffers: Sequence[NewValue]  # as returned by `BufferExchange.gather`
    gradients: Sequence[Tensor | None]  # by parameter, as passed to the optimiser
    versions: Sequence[int]  # `_version` of each gradient
    digests: Sequence[int] | None = None  # of the gradients; only in some steps
    compressed_gradients: CompressedGradients = field(default_factory=dict)  # see `BucketSet.compressed_gradients`
    receipt: AsyncBarrier | None = None  # completes when all workers have applied the step

    @property
    def is_intact(self) -> bool:
        """Whether, as far as is known, neither the optimiser nor the program has written to the gradients since."""
        pairs = zip(self.gradients, self.versions, strict=True)
        if not all(gradient is None or gradient._version == version for gradient, version in pairs):
            return False
        return self.digests is None or cheap_digests(g for g in self.gradients if g is not None) == self.digests


@dataclass
class LastUpdate:
    """The update of the last step of any optimiser, until all workers are known to have applied it."""

    update: Update | None = None


@final
class GradientWrites:
    """Detects whether the optimiser or the program writes to gradients through `.data`, which torch does not count.

    In the first steps, and in one of CHECKED_EVERY after that, the digests of the gradients before the step is applied
    and when its update is dropped are compared.
    """

    def __init__(self) -> None:
        self.were_found = False
        self._steps = 0

    def digests(self, gradients: Sequence[Tensor | None]) -> list[int] | None:
        """Return the digests of the gradients if this step is one of those that are checked, else None."""
        self._steps += 1
        if self.were_found or (self._steps > CHECKED_FIRST and self._steps % CHECKED_EVERY):
            return None
        return cheap_digests(gradient for gradient in gradients if gradient is not None)


@dataclass
class TrainingPlan:
    """What is trained, and on what data: all that does not depend on the workers."""

    model: nn.Module
    leaves: list[Leaf]  # what is trained; what the program changes of that counts from its next step on
    optimizer: Any  # a torch optimiser, or an `OptimizerSet`
    batches: Batches
    loss_scale: LossScale
    synced: list[str]  # names of the SyncBatchNorm layers
    large_batch: LargeBatch | None
    schedule: Any = None
    interval: str = "step"  # what the schedule counts: "step" or "epoch"
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # as the program gave them: see `settings_of` in training_plan.py
    norm_check: DeferredNormCheck = field(default_factory=DeferredNormCheck)
    gradient_writes: GradientWrites = field(default_factory=lambda: GradientWrites())
    graphs: ShardGraphs = field(default_factory=lambda: ShardGraphs.disabled())
    audits: AuditSchedule = field(default_factory=lambda: AuditSchedule(0))
    sharded_state: ShardedState | None = None  # of the optimisers; None: every worker has the whole state
    weights: DeferredWeights | None = None  # of the step before, which arrive in the forward pass; None: all are here
    known_digest: tuple[list[int], str] | None = None  # of a distributed state: see `Run.digest`
    residuals: Residuals | None = None  # of compressed gradients; None: nothing is kept of them
    tuner: GradCommTuner = field(default_factory=lambda: GradCommTuner(GradComm.FP32))  # how gradients are sent
    finished: dict[int, Result] = field(default_factory=dict)  # steps that were taken with the current batch, by part
    group_sizes: list[int] | None = None  # of the optimiser, when `leaves` were set; None: those that it has now

    @property
    def is_distributed(self) -> bool:
        """Whether a part of the state is distributed over the workers."""
        return self.sharded_state is not None or self.residuals is not None


@dataclass
class StepContext:
    """What a step works on: the plan, and what depends on the current workers. Each optimiser has its own."""

    model: nn.Module
    leaves: list[Leaf]
    optimizer: torch.optim.Optimizer
    sum: ShardSum
    gradients: ShardGradients
    buffers: BufferExchange
    loss_scale: LossScale
    audit: ShardAudit
    observer: StepObserver
    options: RunOptions
    seed: int
    part: int = 0  # the number of the optimiser, if there are several
    frozen: Sequence[nn.Parameter] = ()  # trainable parameters that this optimiser does not have
    applied_steps: int = 0  # before the step that is taken: see `Update.index`
    large_batch: LargeBatch | None = None
    sharded_state: ShardedState | None = None
    weights: DeferredWeights | None = None
    norm_check: DeferredNormCheck = field(default_factory=DeferredNormCheck)
    gradient_writes: GradientWrites = field(default_factory=lambda: GradientWrites())
    graphs: ShardGraphs = field(default_factory=lambda: ShardGraphs.disabled())
    balance: ShardBalance = field(default_factory=lambda: ShardBalance(1, 1))  # shared by all contexts
    meter: SpeedMeter = field(default_factory=lambda: SpeedMeter(torch.device("cpu")))
    metric_names: tuple[str, ...] | None = None  # of the loss function; None until the first step
    is_loss_checked: bool = False  # it was checked that the loss function returns a sum
    is_exchanging: bool = False  # this worker is in the exchange of a step, and cannot repeat the step alone
    keeps_update: bool = False  # workers may be lost; one that missed a step gets it from another worker
    last: LastUpdate = field(default_factory=LastUpdate)  # shared by the contexts of all optimisers

    def waited_for_weights_s(self) -> float:
        """Return how long this worker has waited for deferred weights so far."""
        return 0.0 if self.weights is None else self.weights.waited_s
