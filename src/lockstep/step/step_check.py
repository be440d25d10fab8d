"""Checks whether a step may be applied. All workers check the same values, so all of them decide the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.data.batches import Batch
from lockstep.ddp.replica import Leaf
from lockstep.errors import DesyncError, NonFiniteError, UnevenDataError
from lockstep.step.learning_rate import LargeBatch
from lockstep.step.run_options import OnNonFinite, RunOptions
from lockstep.step.scattered_gradients import ScatteredGradients
from lockstep.step.step_table import StepOutcome

REMOVE_SPLIT: Final = (
    "If it splits itself (by rank, split_dataset_by_node, get_worker_info), remove that, or say "
    '`run.batches(..., split="worker")`'
)
SEED_IT: Final = (
    "If its samples are random, draw from torch, random or numpy.random, which the run seeds, and not from a generator "
    "that seeds itself. Make random data and random splits inside of the `with` block of the Run, or with a seed; sort "
    "lists of files."
)


@dataclass(frozen=True)
class GradientCheck:
    """The result of checking the gradient of the global batch."""

    finite: bool
    norm: float | Tensor | None = None
    why: str = ""  # if it is not finite


def refuse_bad_data(outcome: StepOutcome, number: int) -> None:
    """Check that all workers have a part of the same batch in step `number`, and weights that make a mean.

    Raises UnevenDataError, DesyncError or ValueError, on all workers.
    """
    advice = "An iterable dataset must give every worker the same samples; Lockstep deals them out. " + REMOVE_SPLIT
    if outcome.ended and len(outcome.ended) < len(outcome.samples):
        raise UnevenDataError(
            f"the data of rank {_list(outcome.ended)} ended before step {number}, and other workers have more. {advice}"
        )
    odd = next((rank for rank, taken in enumerate(outcome.numbers) if taken != outcome.numbers[0]), None)
    if odd is not None and not outcome.ended:
        raise DesyncError(
            f"rank 0 takes step {outcome.numbers[0]}, but rank {odd} takes step {outcome.numbers[odd]}; neither was "
            "applied. A worker has left out a batch or taken one twice: look for control flow in the loop that depends "
            "on the rank, or for an exception of run.step that the program catches on one worker"
        )
    odd = next((rank for rank, part in enumerate(outcome.parts) if part != outcome.parts[0]), None)
    if odd is not None and not outcome.ended:
        raise DesyncError(
            f"step {number}: rank 0 takes a step of optimizer {outcome.parts[0]}, but rank {odd} one of optimizer "
            f"{outcome.parts[odd]}; neither was applied. Look for control flow in the loop that depends on the rank"
        )
    for what, values in (("samples", outcome.samples), ("the end of an epoch", outcome.ends_epoch)):
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise UnevenDataError(
                f"step {number}: the workers have different batches ({what}: {values[0]} on rank 0, {values[odd]} on "
                f"rank {odd}). {advice}"
            )
    seen = [rank for rank, content in enumerate(outcome.content) if content]
    odd = next((rank for rank in seen if outcome.content[rank] != outcome.content[seen[0]]), None)
    if odd is not None:
        raise UnevenDataError(
            f"step {number}: rank {odd} has read other samples for this batch than rank {seen[0]}; no worker has taken "
            "the step. Dataset and order must give every worker the same samples; Lockstep deals them out. "
            f"{REMOVE_SPLIT}. {SEED_IT}"
        )
    if outcome.bad_weights:
        shard, weight = next(iter(outcome.bad_weights.items()))
        raise ValueError(
            f"step {number}: the weight of shard {shard} is {weight}; a loss function returns (sum, weight), and the "
            "weight is a number of samples or tokens: finite, and not negative"
        )
    if not outcome.weight > 0 and not outcome.ended:
        raise ValueError(
            f"step {number}: the weights of all shards add up to {outcome.weight}, so there is no mean; "
            "return the number of samples or tokens as the weight of the loss"
        )


def check_gradients(
    leaves: Sequence[Leaf],
    outcome: StepOutcome,
    options: RunOptions,
    *,
    wait: bool,
    shares: Sequence[Sequence[int]],
    scattered: ScatteredGradients | None = None,
) -> GradientCheck:
    """Check that the gradient is finite, compute its norm, and clip it if `max_grad_norm` is set.

    wait       False: do not wait for a GPU to compute the norm; see `DeferredNormCheck`
    shares     the shards of every worker
    scattered  the gradients, if they are distributed over the workers. Then this is a collective call
    """
    if options.on_nonfinite is OnNonFinite.IGNORE and options.max_grad_norm is None:
        return GradientCheck(finite=True)
    if outcome.bad_shards and options.on_nonfinite is not OnNonFinite.IGNORE:
        ranks = [rank for rank, share in enumerate(shares) if set(share) & set(outcome.bad_shards)]
        why = f"the loss of {_shards(outcome.bad_shards)} is not a finite number, on rank {_list(ranks)}"
        more = "" if scattered is not None else f"; of the gradient, {_first_bad(leaves, 'gradient')}"
        return GradientCheck(finite=False, why=f"{why}{more}")
    if scattered is not None:
        length, bad = scattered.norm()
        if bad is not None and options.on_nonfinite is not OnNonFinite.IGNORE:
            why = f"the gradient is not finite: elements of {bad} are infinite or not a number"
            return GradientCheck(finite=False, norm=length, why=why)
        return GradientCheck(finite=True, norm=length)
    gradients = [leaf.parameter.grad for leaf in leaves if leaf.parameter.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norm = torch.nn.utils.get_total_norm(values)
    if wait or not norm.is_cuda:
        length = float(norm)
        if not math.isfinite(length) and options.on_nonfinite is not OnNonFinite.IGNORE:
            why = f"the gradient is not finite: {_first_bad(leaves, 'gradient')}"
            return GradientCheck(finite=False, norm=length, why=why)
    if options.max_grad_norm is not None:
        if norm.is_cuda:
            _torch.foreach_mul_(values, torch.clamp(options.max_grad_norm / (norm + 1e-6), max=1.0))
        elif length > options.max_grad_norm:
            _torch.foreach_mul_(values, options.max_grad_norm / (length + 1e-6))
    return GradientCheck(finite=True, norm=norm if norm.is_cuda else length)


class DeferredNormCheck:
    """Checks the gradient norm of the previous step, which a GPU may still have been computing when it was applied.

    Waiting for the norm would leave the GPU idle once in every step. A loss that is not finite is known in time. A
    gradient that is not finite, though its loss is, has been applied by now: so this is an error, not a skipped step.
    """

    def __init__(self) -> None:
        self._norm: Tensor | None = None
        self._number = 0
        self._leaves: Sequence[Leaf] = ()

    def defer(self, number: int, norm: float | Tensor | None, options: RunOptions, leaves: Sequence[Leaf]) -> None:
        """Keep the norm of step `number`, in which `leaves` were trained, for a later `check`."""
        is_checked = options.on_nonfinite is not OnNonFinite.IGNORE
        self._number, self._norm = number, norm if isinstance(norm, Tensor) and is_checked else None
        self._leaves = leaves

    def check(self) -> None:
        """Raise NonFiniteError if the norm was not finite. Call it where a GPU synchronisation is cheap."""
        norm, self._norm = self._norm, None
        if norm is not None and not math.isfinite(float(norm)):
            raise NonFiniteError(
                f"step {self._number}: the gradient was not finite, and its step has been taken: "
                f"{_first_bad(self._leaves, 'weight')}. Resume from the last checkpoint; "
                'Run(on_nonfinite="skip") waits for the GPU in every step and leaves such batches out'
            )


def _first_bad(leaves: Sequence[Leaf], what: str) -> str:
    for leaf in leaves:
        tensor = leaf.parameter.grad if what == "gradient" else leaf.parameter.detach()
        if tensor is not None:
            values = tensor.coalesce().values() if tensor.is_sparse else tensor
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                return f"{bad} of {values.numel()} elements of {leaf.name} are infinite or not a number"
    return "every element is, but their norm is too large for its precision"


def _shards(numbers: Sequence[int]) -> str:
    return f"shard{'s' if len(numbers) > 1 else ''} {_list(numbers)}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def stop_or_skip(check: GradientCheck, batch: Batch, options: RunOptions) -> None:
    """Raise NonFiniteError if the run is to stop at a gradient that is not finite."""
    if options.on_nonfinite is OnNonFinite.STOP:
        raise NonFiniteError(
            f"step {batch.number} (epoch {batch.epoch}): {check.why}. No worker has taken this step. "
            'Run(on_nonfinite="skip") would leave such batches out; '
            "a lower learning rate, warm-up or max_grad_norm= may help"
        )


def learning_rate(large_batch: LargeBatch | None, number: int) -> AbstractContextManager[Any]:
    """Set the scaled learning rate of step `number` for the duration of the block."""
    return nullcontext() if large_batch is None else large_batch.applied(number)
