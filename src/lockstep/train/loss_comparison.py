"""Whether a run learns as well with compressed gradients: the same steps are taken with and without, and undone.

Note [Comparison of losses]
Errors of a gradient do not tell whether a model suffers from them: one with larger errors may learn as well as before.
So the same batches are used for STEPS steps twice, from the same weights: once without compression, and once with it.
What counts is the mean loss of the last COUNTED of them, relative to how much the loss has fallen without compression.
After that the weights, the buffers, the state of the optimiser and the loss scale are what they were before, and the
next step of the run is the one that it would have taken anyway. All losses are sums along the tree over shards, so the
result, and what follows from it, is the same on any number of workers.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.data.batches import Batches
from lockstep.data.sample_order import Position
from lockstep.errors import NonFiniteError
from lockstep.step.run_options import RunOptions
from lockstep.step.step import take_step
from lockstep.step.step_check import DeferredNormCheck
from lockstep.step.step_types import Loss, StepContext, StepRequests, TrainingPlan
from lockstep.trace.step_observer import NullObserver
from lockstep.train.optimizer_set import OptimizerSet

STEPS: Final = 32
COUNTED: Final = 16  # the last of them
FIRST: Final = 4  # so many losses at the beginning are those from which the loss falls
LEAST_FALL: Final = 0.02  # of the loss: one that falls less is taken to fall so much, or chance would decide
SMALLEST_FALL: Final = 1e-12
LARGEST_HARM: Final = 0.03


@dataclass(frozen=True)
class LossComparison:
    """The mean losses at the beginning, and at the end with and without compression; NaN if they are not finite."""

    before: float
    without: float
    compressed: float

    @staticmethod
    def of(without: Sequence[float], compressed: Sequence[float]) -> LossComparison:
        """Compare the losses of the steps of two branches."""
        branches = (without, compressed)
        ends = [statistics.fmean(losses[-COUNTED:]) if len(losses) == STEPS else math.nan for losses in branches]
        return LossComparison(statistics.fmean(without[:FIRST] or [math.nan]), *ends)

    @property
    def harm(self) -> float:
        """By how much the loss falls less with compression, as a share of what it falls without."""
        fall = max(self.before - self.without, LEAST_FALL * abs(self.without), SMALLEST_FALL)
        return (self.compressed - self.without) / fall

    def describe(self, kind: str) -> str:
        """Return the losses and what they mean, for users."""
        losses = f"the loss fell from {self.before:.4g} to {self.without:.4g} without and to {self.compressed:.4g} with"
        verdict = "harmless" if self.is_harmless else "too harmful"
        share = f"{self.harm:.1%} less far, at most {LARGEST_HARM:.0%} is accepted: {verdict}"
        return f'{STEPS} steps were tried: {losses} grad_comm="{kind}" ({share})'

    def to_json(self) -> list[float | None]:
        return [loss if math.isfinite(loss) else None for loss in (self.before, self.without, self.compressed)]

    @staticmethod
    def from_json(plain: Sequence[float | None]) -> LossComparison:
        return LossComparison(*(math.nan if loss is None else loss for loss in plain))

    @property
    def is_harmless(self) -> bool:
        return self.harm <= LARGEST_HARM  # not if it is NaN


def why_impossible(batches: Batches, optimizer: Any, options: RunOptions) -> str | None:
    """Why losses cannot be compared in a run; None if they can be."""
    if batches.is_stream:
        return "batches of a stream cannot be read twice"
    if isinstance(optimizer, OptimizerSet):
        return "the run has several optimizers"
    return "the state of the optimizer is distributed" if options.shard_optimizer else None


@contextmanager
def undone(plan: TrainingPlan) -> Iterator[None]:
    """Undo, at the end of this context, what steps inside of it change."""
    optimizer, scale = plan.optimizer, plan.loss_scale.state()
    groups = [dict(group) for group in optimizer.param_groups]
    # `load_state_dict` would convert a state in float32 to the dtype of its parameter.
    mappings: list[Any] = [optimizer.state[parameter] for parameter in optimizer.state]
    mappings += [module._buffers for module in plan.model.modules()]
    with torch.no_grad():
        weights = [(parameter, parameter.clone()) for parameter in plan.model.parameters()]
        saved = [{key: (mapping[key], copy_of(mapping[key])) for key in mapping.keys()} for mapping in mappings]  # noqa: SIM118  (scripted modules)
    before = set(optimizer.state)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
            for mapping, entries in zip(mappings, saved, strict=True):
                restore_entries(mapping, entries)
        for parameter in set(optimizer.state) - before:
            del optimizer.state[parameter]
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)
        plan.loss_scale.restore(scale)
        if plan.residuals is not None:
            plan.residuals.restore(None)


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def restore_entries(mapping: MutableMapping[str, Any], entries: Mapping[str, tuple[Any, Any]]) -> None:
    """Make these the entries of a mapping. Tensors remain the same objects.

    entries  what each of them was, and a copy of its value
    """
    for key in [key for key in mapping.keys() if key not in entries]:  # noqa: SIM118
        del mapping[key]
    for key, (value, copied) in entries.items():
        if isinstance(value, Tensor):
            value.copy_(copied)
            copied = value
        if key not in mapping or mapping[key] is not copied:
            mapping[key] = copied


def losses_of_steps(context: StepContext, batches: Batches, loss: Loss, here: Position) -> list[float]:
    """Take STEPS steps from this position on, and return their losses; fewer if a gradient was not finite.

    context  is used for these steps only
    """
    context.observer, context.norm_check = NullObserver(context.sum.device), DeferredNormCheck()
    context.keeps_update = False
    losses = list[float]()
    try:
        for batch in islice(batches.read_again(here), STEPS):
            losses.append(take_step(context, loss, batch, StepRequests()).loss)
    except NonFiniteError:
        pass
    except Exception as error:
        error.add_note(
            "This was in steps that compare the loss with and without compression, for which the batch is read again. "
            "Run(compare_loss=False) does without them."
        )
        raise
    return losses
