"""The parts of distributed optimisers that one worker has, with their state; copies of other parts included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from lockstep.ddp.optimizer_cells import MASTER_WEIGHT, OwnedPart, PartGradients, Piece, is_whole
from lockstep.ddp.optimizer_state import (
    DistributedState,
    cut_state,
    load_optimizer,
    options_of,
    refuse_unmovable,
)
from lockstep.ddp.state_holders import Interval, State, States
from lockstep.errors import LockstepError


@final
class OwnedParts:
    """The parts of some optimisers that this worker has. Iterating yields each with its state.

    It makes no collective calls. The optimisers keep no state of their own from now on; a step of one of them sees the
    parts as its parameters.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], whole_tensors: Sequence[bool], *, master_weights: bool = False
    ) -> None:
        """
        whole_tensors   of each optimiser, whether it looks at whole tensors (optimizer_cells.py)
        master_weights  see Note [Master weights] in optimizer_cells.py
        """
        self._optimizers, self._whole_tensors = tuple(optimizers), tuple(whole_tensors)
        self._master_weights = master_weights
        self._parts: list[list[list[OwnedPart]]] = []  # by optimiser and group
        self._states: list[dict[Tensor, State]] = []
        self._numbers: dict[Tensor, int] = {}  # of all parameters
        self._is_stepping = False
        self._checked: set[int] = set()  # optimisers of which it is known that their state can be moved
        self.clear()
        for optimizer in optimizers:
            optimizer.state = DistributedState()  # type: ignore[assignment]
            optimizer.register_state_dict_pre_hook(self._refuse_state_dict)
            optimizer.register_load_state_dict_pre_hook(self._refuse_state_dict)

    def _refuse_state_dict(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise LockstepError if the program reads or loads a state dict, which would lack the state."""
        if not self._is_stepping:
            raise LockstepError(
                f"the state of this {type(optimizer).__name__} is distributed over the workers (shard_optimizer=True): "
                "state_dict() and load_state_dict() cannot be used: the Run saves and restores it, and `lockstep "
                "checkpoint export RUN optimizer.pt --what optimizer` writes it. Load a state before run.train"
            )

    def __iter__(self) -> Iterator[tuple[OwnedPart, State]]:
        for groups, states in zip(self._parts, self._states, strict=True):
            for group in groups:
                yield from ((part, part.add_master(states.get(part.tensor, {}))) for part in group)

    def clear(self) -> None:
        """Drop all parts."""
        self._parts = [[] for _ in self._optimizers]
        self._states = [defaultdict(dict) for _ in self._optimizers]

    def assign(self, pieces: Mapping[Tensor, Sequence[Piece]], states: States) -> None:
        """Replace the parts by these pieces of parameters, of which some have a state already.

        `pieces` has all parameters, in order, also those of which this worker has no piece.
        """
        self._numbers = {parameter: number for number, parameter in enumerate(pieces)}
        for number, (optimizer, whole_tensors) in enumerate(zip(self._optimizers, self._whole_tensors, strict=True)):
            self._parts[number], self._states[number] = [], defaultdict(dict)
            for group in optimizer.param_groups:
                self._parts[number].append([])
                for parameter in group["params"]:
                    for piece in pieces[parameter]:
                        whole = is_whole(parameter, whole_tensors=whole_tensors)
                        part = OwnedPart(parameter, piece, is_whole=whole)
                        self._parts[number][-1].append(part)
                        if inner := self._take_master(part, states.get(self._interval_of(part), {})):
                            self._states[number][part.tensor] = inner

    def _take_master(self, part: OwnedPart, state: State) -> State:
        """Give a part the master weights in its state, and return the rest of it. Frozen parameters need none."""
        if self._master_weights and (part.parameter.requires_grad or MASTER_WEIGHT in state):
            part.make_master()
            part.take_master(state)
        return part.without_master(state)

    def _interval_of(self, part: OwnedPart) -> Interval:
        return Interval(self._numbers[part.parameter], part.piece.start, part.piece.stop)

    def states(self) -> States:
        """Return the state of each part."""
        return {self._interval_of(part): state for part, state in self}

    def mappings(self) -> list[dict[Any, Any]]:
        """Return the states of all optimisers, and those of their parts: what steps write to beside weights."""
        return [*self._states, *(state for states in self._states for state in states.values())]

    def make_undo(self) -> Callable[[], None]:
        """Return a function that makes all float32 copies of weights what they are now, and undoes replaced states."""
        states = list(self._states)
        undo = [part.make_undo() for groups in self._parts for group in groups for part in group]

        def restore() -> None:
            self._states = states
            for one in undo:
                one()

        return restore

    @property
    def nbytes(self) -> int:
        """How many bytes of state this worker has."""
        return sum(value.nbytes for _, state in self for value in state.values() if isinstance(value, Tensor))

    @property
    def numel(self) -> int:
        """How many elements of parameters the parts have."""
        return sum(part.piece.numel for part, _ in self)

    def has_stepped(self, number: int) -> bool:
        """Whether an optimiser has a state already, as far as this worker knows."""
        return bool(self._states[number])

    def step(self, number: int, gradients: PartGradients | None = None) -> None:
        """Take the step of an optimiser with its parts. `gradients`: None: those of the parameters."""
        parts = [part for group in self._parts[number] for part in group]
        for part in parts:
            part.begin_step(gradients)
        with self._as_parameters(number) as optimizer:
            optimizer.step()
        for part in parts:
            part.end_step(gradients)
        if number not in self._checked:
            self._checked.add(number)
            refuse_unmovable(self._states[number].values(), type(self._optimizers[number]).__name__)

    @contextmanager
    def _as_parameters(self, number: int) -> Iterator[Optimizer]:
        """Let an optimiser see its parts as its parameters, with their state."""
        optimizer, parts = self._optimizers[number], self._parts[number]
        groups, state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [
            options_of(group) | {"params": [part.tensor for part in own]}
            for group, own in zip(groups, parts, strict=True)
        ]
        optimizer.state = self._states[number]  # type: ignore[assignment]
        self._is_stepping = True
        try:
            yield optimizer
        finally:
            self._is_stepping = False
            self._states[number] = optimizer.state
            for group, inner in zip(groups, optimizer.param_groups, strict=True):
                group.update(options_of(inner))  # an optimiser may write to its options
            optimizer.param_groups, optimizer.state = groups, state

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of the parts from that of all parameters of all optimisers, in the format of torch."""
        groups, saved = list(state_dict["param_groups"]), state_dict["state"]
        keys = dict(zip(self._numbers, (key for group in groups for key in group["params"]), strict=True))
        for number, optimizer in enumerate(self._optimizers):
            its_groups, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            states, inner, count = dict[int, Any](), list[dict[str, Any]](), 0
            for group, own in zip(its_groups, self._parts[number], strict=True):
                inner.append(options_of(group) | {"params": list(range(count, count + len(own)))})
                for n, part in enumerate(own, count):
                    if keys[part.parameter] in saved:
                        states[n] = self._take_master(part, cut_state(part, saved[keys[part.parameter]]))
                count += len(own)
            with self._as_parameters(number) as on_parts:
                load_optimizer(on_parts, {"state": states, "param_groups": inner})
