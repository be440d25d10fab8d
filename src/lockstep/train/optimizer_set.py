"""Several optimisers, each of its own part of one model (a GAN, an actor and a critic), treated as one.

Checkpoints, digests and settings need the groups and the state of all optimisers: `OptimizerSet` has them in the form
of one torch optimiser. A step is that of one of them: `run.step(loss, batch, optimizer=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.ddp.sharded_optimizer import ShardedOptimizer
from lockstep.train.loop_check import refuse_optimizer, refuse_scheduler

NAMED: Final = 4  # parameters in a message
NO_NEW_GROUPS: Final = (
    "with several optimizers the groups of each must be complete before run.train; freeze what is to be trained later "
    "with requires_grad_(False)"
)


@final
class OptimizerSet:
    """Optimisers without a parameter in common. The groups of the first come first."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one optimiser with all groups would: parameters are numbered through."""
        found: dict[str, Any] = {"state": {}, "param_groups": []}
        first = 0
        for one in self.optimizers:
            part = one.state_dict()
            found["state"] |= {first + number: state for number, state in part["state"].items()}
            found["param_groups"] += [
                {**group, "params": [first + number for number in group["params"]]} for group in part["param_groups"]
            ]
            first += _count_parameters(one)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        first = taken = 0
        for one in self.optimizers:
            last, groups = first + _count_parameters(one), state["param_groups"][taken : taken + len(one.param_groups)]
            one.load_state_dict(
                {
                    "state": {number - first: s for number, s in state["state"].items() if first <= number < last},
                    "param_groups": [{**g, "params": [number - first for number in g["params"]]} for g in groups],
                }
            )
            first, taken = last, taken + len(one.param_groups)

    def register_step_pre_hook(self, hook: Callable[..., None]) -> _Handles:
        return _Handles([one.register_step_pre_hook(hook) for one in self.optimizers])

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError: groups of one of them would change the places of those of the others."""
        raise ValueError(NO_NEW_GROUPS)


@final
class _Handles:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@final
class SchedulerSet:
    """Learning-rate schedulers of several optimisers; each follows the steps of the one that it was made for."""

    def __init__(self, schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ValueError if a scheduler is of none of the optimisers."""
        self._schedulers = list(schedulers)
        self._part_of = [_index_of(scheduler, optimizers) for scheduler in schedulers]

    def step(self, part: int) -> None:
        """Step the schedulers of this optimiser, given by its number."""
        for scheduler, own in zip(self._schedulers, self._part_of, strict=True):
            if own == part:
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): scheduler.state_dict() for number, scheduler in enumerate(self._schedulers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, scheduler in enumerate(self._schedulers):
            scheduler.load_state_dict(state[str(number)])


def parts_of(optimizer: torch.optim.Optimizer | OptimizerSet) -> tuple[torch.optim.Optimizer, ...]:
    return optimizer.optimizers if isinstance(optimizer, OptimizerSet) else (optimizer,)


def number_of(optimizer: torch.optim.Optimizer | None, trained: torch.optim.Optimizer | OptimizerSet) -> int:
    """Return the number of the optimiser that takes a step. Raises TypeError or ValueError if that is not clear."""
    parts = parts_of(trained)
    if optimizer is None and len(parts) > 1:
        raise TypeError(
            f"run.step(loss, batch, optimizer=...): run.train was given {len(parts)} optimizers; say which one takes "
            "this step"
        )
    for number, one in enumerate(parts):
        if optimizer is None or optimizer is one:
            return number
    raise ValueError(
        f"run.step(loss, batch, optimizer=...): this {type(optimizer).__name__} was not given to run.train; give it "
        "there: run.train(batches, opt_a, opt_b)"
    )


def class_names(one: Any) -> str:
    """The class of an optimiser or a scheduler; those of all in a set."""
    parts = [one]
    if isinstance(one, OptimizerSet):
        parts = list(one.optimizers)
    elif isinstance(one, SchedulerSet):
        parts = one._schedulers
    return ", ".join(type(part).__name__ for part in parts)


def join_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> Any:
    """Return the optimiser, or an OptimizerSet of several.

    Raises ValueError if two have a parameter in common, TypeError for a ShardedOptimizer.
    """
    if any(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers):
        raise TypeError(
            "run.train takes the optimiser itself: a ShardedOptimizer is for a loop of your own, since a Run could not "
            "save its state or continue when a worker is lost"
        )
    _refuse_shared_parameters(optimizers, model)
    return OptimizerSet(optimizers) if len(optimizers) > 1 else optimizers[0]


def join_schedulers(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the scheduler; a SchedulerSet of several schedulers or optimisers; None if there is none.

    scheduler  one, a list of them, or None

    Raises TypeError for an optimiser or a scheduler that `run.train` cannot drive, and ValueError for a scheduler that
    was made for another optimiser.
    """
    for one in optimizers:
        refuse_optimizer(one)
    schedulers = scheduler if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    for one in schedulers:
        refuse_scheduler(one)
    if len(schedulers) > 1 or (schedulers and len(optimizers) > 1):
        return SchedulerSet(schedulers, optimizers)
    return schedulers[0] if schedulers else None


def _refuse_shared_parameters(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Raise ValueError if an optimiser was given twice, or if two have a parameter in common."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, int] = {}
    for number, one in enumerate(optimizers):
        if any(one is other for other in optimizers[:number]):
            raise ValueError(f"run.train: optimizer {number} was given before; give each optimizer once")
        own = [parameter for group in one.param_groups for parameter in group["params"]]
        shared = [parameter for parameter in own if id(parameter) in owner]
        if shared:
            named = ", ".join(names.get(id(parameter), "a parameter") for parameter in shared[:NAMED])
            raise ValueError(
                f"run.train: optimizers {owner[id(shared[0])]} and {number} both have {named}"
                f"{f' and {len(shared) - NAMED} more' if len(shared) > NAMED else ''}: a parameter belongs to one. "
                "For several losses of the same parameters return their sum from one loss function"
            )
        owner |= {id(parameter): number for parameter in own}


def _count_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _index_of(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The number of the optimiser that a scheduler was made for."""
    parts = getattr(scheduler, "_schedulers", None) or [scheduler]
    own = getattr(scheduler, "optimizer", None) or getattr(parts[0], "optimizer", None)
    for number, one in enumerate(optimizers):
        if own is one:
            return number
    raise ValueError(
        f"scheduler=: the {type(scheduler).__name__} was made for an optimizer that run.train has not been given"
    )
