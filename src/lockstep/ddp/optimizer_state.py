"""The state of an optimiser that is distributed over workers: which worker has which part, and moving parts.

Only all-reduce and all-gather are used to move parts, which every process group has, and which can be aborted.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait, agreement
from lockstep.ddp.optimizer_cells import OwnedPart, Piece, flat_view
from lockstep.errors import LockstepError, LostStateError, ReplicaMismatchError

CHUNK_BYTES: Final = 32 * 1024 * 1024  # that all workers send at once
SMALL_NUMEL: Final = 8  # tensors up to this size, such as the number of steps, are sent with the layout

State = dict[str, Any]  # of one parameter, or of a part of it


class Interval(NamedTuple):
    """Elements `start` to `stop` of a parameter, in the order of memory; parameters are numbered."""

    parameter: int
    start: int
    stop: int


States = dict[Interval, State]


class _Slice(NamedTuple):
    """Bytes `start` to `stop` of a tensor in the state of an interval that a worker has."""

    source: int
    entry: int
    name: str
    start: int
    stop: int


@final
class StateHolders:
    """Which worker has the state of which parts. The same on all workers, except for the states themselves."""

    def __init__(
        self, group: dist.ProcessGroup | None, mine: States, *, device: torch.device, facts: Any = None
    ) -> None:
        """A collective call. `group`: None if there is one worker.

        mine    the states that this worker has
        device  through which they are sent
        facts   a JSON value of this worker; those of all are `self.facts`, by rank
        """
        self._group, self._device, self._mine = group, device, list(mine.values())
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        rows = [[*interval, _layout(state, interval)] for interval, state in mine.items()]
        gathered: list[Any] = [[facts, rows]]
        if group is not None and self._size > 1:
            gathered = agreement.gather_values(group, gathered[0], device=device)
        self.facts: list[Any] = [value for value, _ in gathered]
        self._layouts: list[list[dict[str, Any]]] = [[row[3] for row in theirs] for _, theirs in gathered]
        self._found: dict[int, list[tuple[int, int, int, int]]] = {}  # start, stop, rank and entry, by parameter
        for rank, (_, theirs) in enumerate(gathered):
            for entry, (parameter, start, stop, _) in enumerate(theirs):
                self._found.setdefault(parameter, []).append((start, stop, rank, entry))

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the parameters of which some worker has a part."""
        return list(self._found)

    def pieces(self, interval: Interval, *, near: int = 0) -> list[tuple[Piece, int]]:
        """Divide an interval into pieces that one worker has each, with the number of the entry there.

        near  the worker whose own entries are preferred, and from which the search for others begins

        Raises LostStateError if no worker has some of the elements.
        """
        entries = self._found.get(interval.parameter, [])
        cuts = {cut for start, stop, _, _ in entries for cut in (start, stop) if interval.start < cut < interval.stop}
        bounds = list(itertools.pairwise(sorted(cuts | {interval.start, interval.stop})))
        found = list[tuple[Piece, int]]()
        for start, stop in bounds or [(interval.start, interval.stop)]:  # an interval without elements is one piece
            having = [(rank, entry) for first, last, rank, entry in entries if first <= start and stop <= last]
            if not having:
                raise LostStateError(
                    f"no worker has the optimiser's state of parameter {interval.parameter} (elements {start} to "
                    f"{stop}) any more: those that kept it are lost",
                    parameter=interval.parameter,
                )
            rank, entry = min(having, key=lambda one: (one[0] - near) % self._size)
            found.append((Piece(rank, start, stop), entry))
        return found

    def move(
        self, wanted: Sequence[Sequence[Interval]], devices: Sequence[torch.device], *, on_cpu: bool = False
    ) -> States:
        """Return the states of the intervals that this worker wants; a collective call.

        wanted   by rank
        devices  where tensors are to be, by the number of the parameter; small ones that are on the CPU stay there
        on_cpu   put tensors that are not small into the memory of the CPU

        Raises LostStateError, on all workers, if no worker has a state that is wanted.
        """
        found, targets = States(), dict[_Slice, list[Tensor]]()
        sent: dict[_Slice, None] = {}  # in the same order on all workers
        for rank, intervals in enumerate(wanted):
            for interval in intervals:
                pieces = self.pieces(interval, near=rank)
                is_mine = rank == self._rank
                state = self._allocate(interval, pieces, devices, on_cpu=on_cpu) if is_mine else {}
                if is_mine:
                    found[interval] = state
                for piece, entry in pieces:
                    for one, first in self._slices(interval, piece, entry):
                        if piece.owner != rank:
                            sent[one] = None
                        if is_mine:
                            target = _bytes(state[one.name])[first : first + one.stop - one.start]
                            if piece.owner == rank:
                                target.copy_(_bytes(self._mine[entry][one.name])[one.start : one.stop])
                            else:
                                targets.setdefault(one, []).append(target)
        self._send(list(sent), targets)
        return found

    def collect(
        self, parameters: Sequence[Tensor], whole: Container[Tensor], *, to: int = 0
    ) -> dict[Tensor, State] | None:
        """Return the state of each parameter on rank `to`, on the CPU, and None on other ranks; a collective call.

        whole  parameters of which one worker has the whole state; that of others is in the order of memory
        """
        wanted: list[list[Interval]] = [[] for _ in range(self._size)]
        wanted[to] = [Interval(number, 0, parameter.numel()) for number, parameter in enumerate(parameters)]
        states = self.move(wanted, [torch.device("cpu")] * len(parameters), on_cpu=True)
        if self._rank != to:
            return None
        found = zip(parameters, states.values(), strict=True)
        return {one: state if one in whole else _shape_like(one, state) for one, state in found}

    def _entry(self, piece: Piece, entry: int, interval: Interval) -> tuple[int, int]:
        """The first and last element of an entry."""
        return next(
            (start, stop)
            for start, stop, rank, number in self._found[interval.parameter]
            if (rank, number) == (piece.owner, entry)
        )

    def _slices(self, interval: Interval, piece: Piece, entry: int) -> Iterator[tuple[_Slice, int]]:
        """Yield what has to be copied for a piece of an interval, and to which byte."""
        first, last = self._entry(piece, entry, interval)
        for name, about in self._layouts[piece.owner][entry].items():
            if not (isinstance(about, dict) and "stride" in about):
                continue
            size = getattr(torch, about["dtype"]).itemsize
            if about["shape"] == [last - first]:
                yield (
                    _Slice(piece.owner, entry, name, (piece.start - first) * size, (piece.stop - first) * size),
                    (piece.start - interval.start) * size,
                )
            else:  # a tensor of another shape, of a parameter that one worker has as a whole
                yield _Slice(piece.owner, entry, name, 0, _numel(about["shape"]) * size), 0

    def _allocate(
        self, interval: Interval, pieces: list[tuple[Piece, int]], devices: Sequence[torch.device], *, on_cpu: bool
    ) -> State:
        """Return a state with the values that are known from the layout, and tensors that are not filled yet."""
        first, entry = pieces[0]
        begin, end = self._entry(first, entry, interval)
        found: State = {}
        for name, about in self._layouts[first.owner][entry].items():
            if not isinstance(about, dict):
                found[name] = about
                continue
            dtype = getattr(torch, about["dtype"])
            is_small = "data" in about
            stays = about["on_cpu"] if is_small else on_cpu
            device = torch.device("cpu") if stays else devices[interval.parameter]
            if is_small:
                data = bytearray(base64.b64decode(about["data"]))
                value = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                found[name] = value.view(about["shape"]).to(device, copy=True)
            elif about["shape"] == [end - begin]:
                found[name] = torch.empty(interval.stop - interval.start, dtype=dtype, device=device)
            else:
                found[name] = torch.empty_strided(about["shape"], about["stride"], dtype=dtype, device=device)
        return found

    def _send(self, sent: list[_Slice], targets: Mapping[_Slice, list[Tensor]]) -> None:
        """Every worker sends its slices one after the other, as one stream, in chunks. All workers receive them."""
        group = self._group
        streams = [[one for one in sent if one.source == source] for source in range(self._size)]
        lengths = [sum(one.stop - one.start for one in stream) for stream in streams]
        most = max(CHUNK_BYTES // self._size, 1)
        for start in range(0, max(lengths), most):
            assert group is not None
            width = min(most, max(lengths) - start)
            row = torch.zeros(width, dtype=torch.uint8, device=self._device)
            rows = torch.empty(width * self._size, dtype=torch.uint8, device=self._device)
            for one, at, part in _overlaps(streams[self._rank], start, start + width):
                tensor = _bytes(self._mine[one.entry][one.name])
                row[at : at + part.stop - part.start].copy_(tensor[one.start + part.start : one.start + part.stop])
            abortable_wait.wait(group, group._allgather_base(rows, row), self._device, "moving state between workers")
            for stream, received in zip(streams, torch.split(rows, width), strict=True):
                for one, at, part in _overlaps(stream, start, start + width):
                    for target in targets.get(one, ()):
                        target[part].copy_(received[at : at + part.stop - part.start])


def _overlaps(stream: list[_Slice], start: int, stop: int) -> Iterator[tuple[_Slice, int, slice]]:
    """Yield the slices in bytes `start` to `stop` of a stream: where each begins, and which part of it is meant."""
    first = 0
    for one in stream:
        last = first + one.stop - one.start
        if first < stop and last > start:
            begin, end = max(first, start), min(last, stop)
            yield one, begin - start, slice(begin - first, end - first)
        first = last


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    flat = flat_view(tensor)
    assert flat is not None
    return flat.view(torch.uint8)


def _numel(shape: list[int]) -> int:
    return torch.Size(shape).numel()


def _layout(state: State, interval: Interval) -> dict[str, Any]:
    """Describe a state as JSON: numbers and small tensors with their values, other tensors with shape and dtype."""
    shape = [interval.stop - interval.start]
    return {name: _describe(value, shape) if isinstance(value, Tensor) else value for name, value in state.items()}


def _describe(value: Tensor, shape: list[int]) -> dict[str, Any]:
    """Describe a tensor. One of the shape of the interval is divided with it, and is not sent with the layout."""
    about: dict[str, Any] = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "on_cpu": value.device.type == "cpu",
    }
    if flat_view(value) is not None and (value.numel() > SMALL_NUMEL or _is_elementwise(value, shape)):
        return about | {"stride": list(value.stride())}
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0)
    return about | {"data": base64.b64encode(bytes(data.tolist())).decode()}


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


# -- whole parameters and parts of them --------------------------------------------------------------------------------


def _is_elementwise(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and list(value.shape) == list(shape)


def _shape_like(parameter: Tensor, state: State) -> State:
    """Return the state of a parameter whose tensors are in the order of memory, with tensors of its shape."""
    return {
        name: value.as_strided(parameter.shape, parameter.stride())
        if _is_elementwise(value, [parameter.numel()]) and parameter.dim() != 1
        else value
        for name, value in state.items()
    }


def cut_state(part: OwnedPart, saved: Mapping[str, Any]) -> State:
    """Return a copy of the state of a parameter, as far as it belongs to this part."""
    found: State = {}
    for name, value in saved.items():
        is_cut = _is_elementwise(value, part.parameter.shape)
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
