"""The state of distributed optimisers in the format of torch, parts of it, and what workers agree on about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.ddp.optimizer_cells import OwnedPart
from lockstep.ddp.state_holders import State, is_elementwise
from lockstep.errors import LockstepError, LostStateError, ReplicaMismatchError


@dataclass(frozen=True)
class WholeState:
    """The state of all workers, in the CPU memory of one. It has what `named_state` and checkpoints use."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return it in the format of torch: as one optimiser with all groups would."""
        groups = self.param_groups
        numbers = {parameter: n for n, parameter in enumerate(p for group in groups for p in group["params"])}
        return {
            "state": {numbers[parameter]: values for parameter, values in self.state.items() if values},
            "param_groups": [
                {**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in groups
            ],
        }


class DistributedState(dict[Tensor, Any]):
    """What `optimizer.state` is outside of a step: empty. Raises LockstepError when the program wants to use it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise LockstepError(
            "the state of this optimiser is distributed over the workers (shard_optimizer=True): optimizer.state is "
            "empty, and cannot be written to"
        )

    __missing__ = __setitem__ = clear = update = setdefault = _refuse


def cut_state(part: OwnedPart, saved: Mapping[str, Any]) -> State:
    """Return a copy of the state of a parameter, as far as it belongs to this part."""
    found: State = {}
    for name, value in saved.items():
        is_cut = is_elementwise(value, part.parameter.shape)
        found[name] = part.cut(value) if is_cut else value.clone() if isinstance(value, Tensor) else value
    return found


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters, without the parameters and their names."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimiser, and keep the dtypes that it was saved with.

    The `load_state_dict` of torch casts the state of a parameter to the dtype of that parameter.
    """
    optimizer.load_state_dict(dict(state))
    for group, saved_group in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved_group["params"], strict=False):
            loaded, saved = optimizer.state.get(parameter), state["state"].get(number)
            if isinstance(loaded, MutableMapping) and isinstance(saved, Mapping):
                for key in loaded.keys() & saved.keys():
                    loaded[key] = _in_dtype_of(saved[key], loaded[key])


def _in_dtype_of(saved: Any, loaded: Any) -> Any:
    """Return what was loaded, or what was saved where loading has changed the dtype."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, Mapping) and isinstance(loaded, MutableMapping):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _in_dtype_of(saved[key], loaded[key])
    elif isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(_in_dtype_of(one, other) for one, other in zip(saved, loaded, strict=True))
    return loaded


class WorkerFacts(NamedTuple):
    """What a worker tells all others before the state is divided; JSON."""

    host: str
    parameters: int  # how many it has parts of; 0: it has no parts
    trained: list[int]  # the numbers of those that are trained
    is_complete: bool  # its weights: see Note [Incomplete weights] in sharded_state.py
    initial: int | None  # a digest of the state with which the program began; None: it has taken steps since
    is_forgotten: bool  # it got its weights from another worker, and no part yet

    @property
    def has_trained(self) -> bool:
        return self.parameters > 0 and self.initial is None


def choose_known(facts: Sequence[WorkerFacts]) -> tuple[int, list[int]]:
    """Return how many parameters have a state that is divided, and the numbers of those that are trained.

    0 if no step was taken yet: then every worker has the state with which the program began. Raises LostStateError or
    ReplicaMismatchError: see `ShardedState.assign`.
    """
    have_trained = [one for one in facts if one.has_trained]
    if have_trained:  # parameters that only some of them know were added since the last step
        first = min(have_trained, key=lambda one: one.parameters)
        return first.parameters, first.trained
    if all(one.is_forgotten for one in facts):
        raise LostStateError("no worker has the optimiser's state any more: those that kept it are lost")
    if len({one.initial for one in facts if one.initial is not None}) > 1:
        raise ReplicaMismatchError(
            "the state of the optimiser is not the same on all workers when training begins: load it on all of them, "
            "not on one"
        )
    return 0, facts[0].trained


def refuse_unmovable(states: Iterable[Mapping[str, Any]], optimizer: str) -> None:
    """Raise TypeError if the state of an optimiser has values that cannot be sent to another worker."""
    for state in states:
        for name, value in state.items():
            if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
                raise TypeError(
                    f"shard_optimizer=True: the state of {optimizer} has a {type(value).__name__} ({name}); only "
                    "tensors, numbers and strings can be distributed"
                )


def refuse_other_parameters(old: Sequence[Tensor], strides: Sequence[tuple[int, ...]], new: Sequence[Tensor]) -> None:
    """Raise ValueError if `new` does not begin with the old parameters, with their strides."""
    if len(old) > len(new) or any(one is not other for one, other in zip(old, new, strict=False)):
        raise ValueError(
            "shard_optimizer=True: the program has removed parameters from the groups of the optimizer, or changed "
            "their order; freeze them with requires_grad_(False), and add new ones with add_param_group"
        )
    for parameter, stride in zip(old, strides, strict=False):
        if parameter.stride() != stride:
            raise ValueError(
                f"shard_optimizer=True: the memory format of a parameter of shape {tuple(parameter.shape)} has "
                "changed, so that parts of the state would belong to other elements; change it before run.train "
                "(model.to(memory_format=...))"
            )
