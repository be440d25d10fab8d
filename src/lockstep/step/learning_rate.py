"""The learning rate for a large batch: the factor by which it grows, and the warm-up.

Note [A factor that no scheduler sees]
Torch's schedulers read the learning rate of a group and compute the next one from it: chainable ones multiply it,
ReduceLROnPlateau compares it. So the factor is applied during the step of the optimiser only, and then the previous
value is restored. A scheduler written for a small batch works unchanged, and there is nothing to save: the factor is a
function of the step number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lockstep.step.run_options import one_of


class Rule(Enum):
    """The factor of the learning rate when the batch is k times as large."""

    LINEAR = "linear"  # k: for SGD (Goyal et al. 2017)
    SQRT = "sqrt"  # the square root of k: for Adam, LAMB and similar optimisers


class Warmup(Enum):
    """How the learning rate changes from the base one to the scaled one."""

    GRADUAL = "gradual"  # linearly
    CONSTANT = "constant"  # in one step, at the end of the warm-up


@dataclass(frozen=True)
class LRScaling:
    """
    base_batch    the global batch for which the learning rate of the optimiser was tuned
    rule          "linear" or "sqrt"
    warmup_steps  steps before the scaled learning rate is reached
    warmup        "gradual" or "constant"
    """

    base_batch: int
    rule: Rule | str = Rule.LINEAR
    warmup_steps: int = 0
    warmup: Warmup | str = Warmup.GRADUAL

    def __post_init__(self) -> None:
        _check_whole("base_batch", self.base_batch, least=1)
        _check_whole("warmup_steps", self.warmup_steps, least=0)
        object.__setattr__(self, "rule", one_of(Rule, "rule", self.rule))
        object.__setattr__(self, "warmup", one_of(Warmup, "warmup", self.warmup))


def factor(rule: Rule | str, global_batch_size: int, base_batch: int) -> float:
    """The factor of the learning rate after the warm-up."""
    _check_whole("global_batch_size", global_batch_size, least=1)
    _check_whole("base_batch", base_batch, least=1)
    ratio = global_batch_size / base_batch
    return math.sqrt(ratio) if one_of(Rule, "rule", rule) is Rule.SQRT else ratio


def warmup_factor(scaling: LRScaling, global_batch_size: int, step: int) -> float:
    """The factor of the learning rate in this step, counted from 0. Step 0 of a warm-up has the base learning rate."""
    _check_whole("step", step, least=0)
    full = factor(scaling.rule, global_batch_size, scaling.base_batch)
    if step >= scaling.warmup_steps:
        return full
    if scaling.warmup is Warmup.CONSTANT:
        return 1.0
    return 1.0 + (full - 1.0) * (step / scaling.warmup_steps)


class LargeBatch:
    """Scales the learning rate of an optimiser to this global batch during each step. It has no state."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: LRScaling, global_batch_size: int) -> None:
        _check_whole("global_batch_size", global_batch_size, least=1)
        self._optimizer, self._scaling, self._global_batch = optimizer, scaling, global_batch_size

    def factor(self, step: int) -> float:
        return warmup_factor(self._scaling, self._global_batch, step)

    @contextmanager
    def applied(self, step: int) -> Iterator[float]:
        """`with large_batch.applied(step_number): optimizer.step()`. The learning rate is restored afterwards.

        Raises RuntimeError if it was changed within the context.
        """
        times = self.factor(step)
        rates = [_GroupRate(group) for group in _groups_with_own_rate(self._optimizer)]
        try:
            for rate in rates:
                rate.multiply(times)
            yield times
            for rate in rates:
                rate.check_unchanged()
        finally:
            for rate in rates:
                rate.restore()

    def describe(self) -> str:
        """One line for the start of a run."""
        scaling, times = self._scaling, factor(self._scaling.rule, self._global_batch, self._scaling.base_batch)
        # `initial_lr` is what a scheduler, if there is one, starts from: it may already have set the first rate to 0.
        found = [float(group.get("initial_lr", group["lr"])) for group in self._optimizer.param_groups]
        bases = list(dict.fromkeys(found))
        scaled = [rate * times for rate in bases]
        text = (
            f"global batch {self._global_batch}, learning rate {_list(scaled)} = {_list(bases)} x {times:.6g} "
            f"({Rule(scaling.rule).value} from a batch of {scaling.base_batch})"
        )
        if scaling.warmup_steps == 0:
            return text + ", no warm-up"
        return text + f", warm-up {scaling.warmup_steps} steps ({Warmup(scaling.warmup).value})"


class _GroupRate:
    """The learning rate of one group. A tensor is changed in place: captured graphs refer to its address."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._lr: float | Tensor = group["lr"]
        self._before = self._copy()
        self._during = self._before

    def multiply(self, times: float) -> None:
        with torch.no_grad():
            if isinstance(self._lr, Tensor):
                self._lr.mul_(times)
            else:
                self._group["lr"] = self._lr * times
        self._during = self._copy()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a scheduler was stepped meanwhile, which `restore` would undo silently.

        Not checked on a GPU, because that would wait for it.
        """
        now = self._group["lr"]
        on_gpu = isinstance(now, Tensor) and now.device.type != "cpu"
        if not on_gpu and now != self._during:
            raise RuntimeError(
                f"the learning rate was set to {float(now):g} during the step of the optimiser; step the scheduler "
                "after `with large_batch.applied(...)`, not inside"
            )

    def restore(self) -> None:
        with torch.no_grad():
            if isinstance(self._lr, Tensor):
                self._lr.copy_(self._before)  # type: ignore[arg-type]
            self._group["lr"] = self._lr

    def _copy(self) -> float | Tensor:
        return _copy_of(self._group["lr"])


def cover_groups(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Add the groups that the program has added to the optimiser since the scheduler was made to the scheduler.

    A scheduler keeps the base learning rate of each group: for a new group that is its current learning rate. Raises
    ValueError, and changes nothing, if the scheduler cannot set the learning rates of all groups even then: it would
    fail after the next step of the optimiser.
    """
    groups, known = optimizer.param_groups, dict[int, tuple[Any, list[Any]]]()
    for one in _parts(scheduler):
        if one.optimizer is optimizer and len(getattr(one, "base_lrs", groups)) < len(groups):
            known[id(one)] = one, one.base_lrs
            one.base_lrs = [*one.base_lrs, *(_copy_of(group["lr"]) for group in groups[len(one.base_lrs) :])]
    for one, _ in known.values():
        problem = _why_not_covered(one, groups)
        if problem:
            for changed, base_lrs in known.values():
                changed.base_lrs = base_lrs
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups since add_param_group, and {type(one).__name__}, "
                f"which was made for fewer, {problem}. Give the optimizer all groups before the scheduler is made "
                "(frozen parameters cost nothing); or use one that multiplies the learning rate of every group, such "
                "as StepLR, MultiStepLR or ExponentialLR; or set group['lr'] in the loop, without scheduler="
            )


def _why_not_covered(scheduler: Any, groups: list[dict[str, Any]]) -> str:
    """Why the scheduler cannot set the learning rate of each of these groups; "" if it can. Changes nothing."""
    before = [dict(group) for group in groups]  # some also set a momentum
    try:
        for name in ("get_lr", "_get_closed_form_lr"):
            scheduler._get_lr_called_within_step = True  # or it would warn
            rates = len(getattr(scheduler, name)()) if hasattr(scheduler, name) else len(groups)
            if rates != len(groups):
                return f"covers {rates} of them"
    except Exception as error:
        return f"fails with them ({type(error).__name__}: {error})"
    finally:
        scheduler._get_lr_called_within_step = False
        for group, options in zip(groups, before, strict=True):
            group.update(options)
    return ""


def _parts(scheduler: Any) -> list[Any]:
    """The scheduler; or those that it is composed of, like SequentialLR, ChainedScheduler and `SchedulerSet`."""
    inner = getattr(scheduler, "_schedulers", None)
    if inner is None:
        return [] if scheduler is None else [scheduler]
    return [one for part in inner for one in _parts(part)]


def _copy_of(rate: float | Tensor) -> float | Tensor:
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def _groups_with_own_rate(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """One group for each learning rate: groups may share one tensor, which must be multiplied once."""
    groups: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        groups.setdefault(id(group["lr"]) if isinstance(group["lr"], Tensor) else -1 - index, group)
    return list(groups.values())


def _list(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, {least} or more")
