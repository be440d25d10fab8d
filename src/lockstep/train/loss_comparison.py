"""Whether a run learns as well with compressed gradients: the same steps are taken with and without, and undone.

Note [Comparison of losses]
Errors of a gradient do not tell whether a model suffers from them: one with larger errors may learn as well as before.
So the same batches are used for STEPS steps twice, from the same weights: once without compression, and once with it.
What counts is the mean loss of the last COUNTED of them, relative to how much the loss has fallen without compression.
After that the weights, the buffers, the state of the optimiser, the residuals and the loss scale are what they were
before, and the next step of the run is the one that it would have taken anyway. All losses are sums along the tree over
shards, so the result, and what follows from it, is the same on any number of workers.

A kind that is used is compared again later (step/grad_comm_tuner.py), from the weights and residuals that it has led
to. Then the loss often falls less within these steps than losses of batches differ. But both branches have the same
batches, so their losses differ by a small part of that spread only: what counts then is their difference relative to
it. And weights that do not move at all may have no larger loss after so few steps. So it also counts how far the
weights move with compression in the direction in which they move without it.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import islice, pairwise
from typing import Any, Final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.data.batches import Batches
from lockstep.data.sample_order import Position
from lockstep.errors import NonFiniteError
from lockstep.step.buffer_snapshot import Owner
from lockstep.step.run_options import GradComm, RunOptions
from lockstep.step.step import take_step
from lockstep.step.step_check import DeferredNormCheck
from lockstep.step.step_types import Loss, StepContext, StepRequests, TrainingPlan
from lockstep.trace.step_observer import NullObserver
from lockstep.train.optimizer_set import OptimizerSet

STEPS: Final = 32
COUNTED: Final = 16  # the last of them
FIRST: Final = 4  # so many losses at the beginning are those from which the loss falls
# Of the loss: one that falls less than that, or less than its spread, is taken to fall so much, or chance would decide.
LEAST_FALL: Final = 0.02
SMALLEST_FALL: Final = 1e-12
LARGEST_HARM: Final = 0.03
LEAST_MOVED: Final = 0.5
PART_NUMEL: Final = 1 << 20  # elements that are converted to float64 at a time

Movement = list[Tensor]  # the differences of parameters from what they were


@dataclass(frozen=True)
class LossComparison:
    """The mean losses at the beginning, and at the end with and without compression; NaN if they are not finite.

    spread  the standard deviation of the losses of batches
    moved   how far the weights moved with compression in the direction in which they moved without it, relative to how
            far they moved without it
    """

    before: float
    without: float
    compressed: float
    spread: float
    moved: float

    @staticmethod
    def of(without: Sequence[float], compressed: Sequence[float], moved: float = 1.0) -> LossComparison:
        """Compare the losses of the steps of two branches."""
        branches = (without, compressed)
        ends = [statistics.fmean(losses[-COUNTED:]) if len(losses) == STEPS else math.nan for losses in branches]
        found = (statistics.fmean(without[:FIRST] or [math.nan]), *ends, spread_of(without), moved)
        return LossComparison(*(value if math.isfinite(value) else math.nan for value in found))

    @property
    def _least_fall(self) -> float:
        return max(self.spread, LEAST_FALL * abs(self.without), SMALLEST_FALL)  # NaN if the first is

    @property
    def harm(self) -> float:
        """By how much the loss falls less with compression, as a share of what it falls without, or of its spread."""
        return (self.compressed - self.without) / max(self.before - self.without, self._least_fall)

    def describe(self, kind: str) -> str:
        """Return the losses and what they mean, for users."""
        is_falling = not self.before - self.without < self._least_fall  # also if a loss is NaN
        losses = f"from {self.before:.4g} to {self.without:.4g} without and to {self.compressed:.4g} with"
        losses = f'the loss {"fell" if is_falling else "went"} {losses} grad_comm="{kind}"'
        if self.is_harmless and not is_falling:
            verdict = "a loss that hardly falls does not show whether this harms; nothing speaks against it"
        elif self.harm <= LARGEST_HARM and not self.is_harmless:
            verdict = f"the weights moved {self.moved:.0%} as far in the direction in which they moved without it, "
            verdict += f"at least {LEAST_MOVED:.0%} is expected: too harmful"
        else:
            less = "less far" if is_falling else f"of {self._least_fall:.3g} higher with it"
            verdict = f"{self.harm:.1%} {less}, at most {LARGEST_HARM:.0%} is accepted: "
            verdict += "harmless" if self.is_harmless else "too harmful"
        return f"{STEPS} steps were tried: {losses} ({verdict})"

    def to_json(self) -> list[float | None]:
        return [None if math.isnan(one) else one for one in astuple(self)]

    @staticmethod
    def from_json(plain: Sequence[float | None]) -> LossComparison:
        return LossComparison(*(math.nan if one is None else one for one in plain))

    @property
    def is_harmless(self) -> bool:
        return self.harm <= LARGEST_HARM and self.moved >= LEAST_MOVED  # not if one is NaN


def spread_of(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses, from how much each differs from the next: they may rise or fall."""
    squares = [(second - first) ** 2 for first, second in pairwise(losses)]
    return math.sqrt(statistics.fmean(squares or [0.0]) / 2)


def why_impossible(batches: Batches, optimizer: Any, options: RunOptions) -> str | None:
    """Why losses cannot be compared in a run that would have to; None if they can be, or need not be."""
    comm = options.grad_comm
    if not options.compare_loss or not (comm.has_residuals or comm is GradComm.AUTO):
        return None
    if batches.is_stream:
        return "batches of a stream cannot be read twice"
    if isinstance(optimizer, OptimizerSet):
        return "the run has several optimizers"
    return "the optimizer has hooks, which cannot be undone" if _torch.has_step_hooks(optimizer) else None


@contextmanager
def undone(plan: TrainingPlan) -> Iterator[Callable[[], Movement]]:
    """Undo, at the end of this context, what steps inside of it change. Copies are kept in the memory of the CPU.

    Yields a function that returns how far each parameter that is trained has moved since then.
    """
    optimizer, scale = plan.optimizer, plan.loss_scale.state()
    owners = [Owner(name, module) for name, module in plan.model.named_modules()]
    # `load_state_dict` would convert a state in float32 to the dtype of its parameter.
    mappings: list[Any] = [*optimizer.param_groups, *(owner.module._buffers for owner in owners)]
    mappings += [entry for entry in optimizer.state.values() if isinstance(entry, MutableMapping)]
    undo_more = [] if plan.residuals is None else [plan.residuals.make_undo()]
    if plan.sharded_state is not None:
        mappings += plan.sharded_state.parts.mappings()
        undo_more.append(plan.sharded_state.parts.make_undo())
    with torch.no_grad():
        weights = [(parameter, copy_of(parameter)) for parameter in plan.model.parameters()]
        trained = [(parameter, copied) for parameter, copied in weights if parameter.requires_grad]
        saved = [entries_of(mapping) for mapping in [optimizer.state, *mappings]]
    for owner in owners:
        owner.capture_numbers()

    def movement() -> Movement:
        if plan.weights is not None:
            plan.weights.finish()
        return [parameter.detach().to("cpu") - copied for parameter, copied in trained]

    try:
        yield movement
        if plan.weights is not None:
            plan.weights.finish()
    finally:
        for undo in undo_more:
            undo()
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
            for owner in owners:
                owner.restore()
            for mapping, entries in zip([optimizer.state, *mappings], saved, strict=True):
                restore_entries(mapping, entries)
            for owner in owners:
                owner.restore_order()
        plan.loss_scale.restore(scale)


def share_moved(without: Movement, compressed: Movement) -> float:
    """Return how far parameters moved along the direction of `without`, relative to its length; 1 if none moved.

    NaN if a parameter is not finite.
    """
    length = sum(product(one, one) for one in without)
    along = sum(product(one, other) for one, other in zip(without, compressed, strict=True))
    if not (math.isfinite(length) and math.isfinite(along)):
        return math.nan
    return along / length if length > 0 else 1.0


def product(one: Tensor, other: Tensor) -> float:
    """Return the sum of the products of all elements, in float64."""
    left, right = (torch.view_as_real(value) if value.is_complex() else value for value in (one, other))
    parts = zip(left.reshape(-1).split(PART_NUMEL), right.reshape(-1).split(PART_NUMEL), strict=True)  # type: ignore[no-untyped-call]
    return sum(float((a.double() * b.double()).sum()) for a, b in parts)


def copy_of(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def entries_of(mapping: MutableMapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Return each entry of a mapping and a copy of its value; of a mapping, or of parameters, there is no copy."""
    found = {key: mapping[key] for key in mapping.keys()}  # noqa: SIM118  (the buffers of a scripted module)
    is_whole = {key: key == "params" or isinstance(value, MutableMapping) for key, value in found.items()}
    return {key: (value, value if is_whole[key] else copy_of(value)) for key, value in found.items()}


def restore_entries(mapping: MutableMapping[Any, Any], entries: Mapping[Any, tuple[Any, Any]]) -> None:
    """Make these the entries of a mapping: see `entries_of`. Tensors remain the same objects."""
    for key in [key for key in mapping.keys() if key not in entries]:  # noqa: SIM118
        del mapping[key]
    for key, (value, copied) in entries.items():
        if isinstance(value, Tensor):
            value.copy_(copied)
            copied = value
        if key not in mapping or mapping[key] is not copied:
            mapping[key] = copied


def losses_of_steps(
    context: StepContext,
    batches: Batches,
    loss: Loss,
    here: Position,
    requests: StepRequests,
    exchange: Callable[[], None],
) -> list[float]:
    """Take STEPS steps from this position on, and return their losses; fewer if a gradient was not finite.

    context   is used for these steps only
    requests  what this worker asks of the others in these steps
    exchange  sends new weights to the other workers after a step, if the state of the optimiser is distributed
    """
    context.observer, context.norm_check = NullObserver(context.sum.device), DeferredNormCheck()
    context.keeps_update = False
    losses = list[float]()
    try:
        for batch in islice(batches.read_again(here), STEPS):
            losses.append(take_step(context, loss, batch, requests).loss)
            exchange()
    except NonFiniteError:
        pass
    except Exception as error:
        error.add_note(
            "This was in steps that compare the loss with and without compression, for which the batch is read again. "
            "Run(compare_loss=False) does without them."
        )
        raise
    finally:
        context.buffers.abort()  # a step that has failed would restore buffers later, after all of it is undone
    return losses
