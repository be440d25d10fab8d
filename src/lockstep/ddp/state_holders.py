"""Which worker has which part of a state that is distributed, and sending parts from one worker to another.

Only all-reduce, all-gather and broadcast are used to move parts, which every process group has, and which can be
aborted.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait, agreement
from lockstep.ddp.optimizer_cells import Piece, flat_view
from lockstep.errors import LostStateError

CPU: Final = torch.device("cpu")
CHUNK_BYTES: Final = 32 * 1024 * 1024  # that all workers send at once
SMALL_NUMEL: Final = 8  # tensors up to this size, such as the number of steps, are sent with the layout

State = dict[str, Any]  # of one parameter, or of a part of it


class Interval(NamedTuple):
    """Elements `start` to `stop` of a parameter, in the order of memory; parameters are numbered."""

    parameter: int
    start: int
    stop: int


States = dict[Interval, State]


class _Entry(NamedTuple):
    """A part whose state some worker has: elements `start` to `stop`. `number` is that of the state on that worker."""

    start: int
    stop: int
    rank: int
    number: int


class _Slice(NamedTuple):
    """Bytes `start` to `stop` of a tensor in the state of a part that a worker has."""

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
        self.rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        rows = [[*interval, _layout(state, interval)] for interval, state in mine.items()]
        gathered: list[Any] = [[facts, rows]]
        if group is not None and self._size > 1:
            gathered = agreement.gather_values(group, gathered[0], device=device)
        self.facts: list[Any] = [value for value, _ in gathered]
        self._layouts: list[list[dict[str, Any]]] = [[row[3] for row in theirs] for _, theirs in gathered]
        self._entries: dict[int, list[_Entry]] = {}  # by parameter, sorted
        for rank, (_, theirs) in enumerate(gathered):
            for number, (parameter, start, stop, _) in enumerate(theirs):
                self._entries.setdefault(parameter, []).append(_Entry(start, stop, rank, number))
        for entries in self._entries.values():
            entries.sort()

    @property
    def parameter_numbers(self) -> Sequence[int]:
        """The numbers of the parameters of which some worker has a part."""
        return list(self._entries)

    def pieces(self, interval: Interval, *, near: int = 0) -> list[tuple[Piece, _Entry]]:
        """Divide an interval into pieces, each of which is in one entry of the worker that is its owner.

        near  the worker whose own entries are preferred, and from which the search for others begins

        Raises LostStateError if no worker has some of the elements.
        """
        entries = self._entries.get(interval.parameter, [])
        cuts = {cut for one in entries for cut in (one.start, one.stop) if interval.start < cut < interval.stop}
        bounds = list(itertools.pairwise(sorted(cuts | {interval.start, interval.stop})))
        found, having, begun = list[tuple[Piece, _Entry]](), list[_Entry](), 0
        for start, stop in bounds or [(interval.start, interval.stop)]:  # an interval without elements is one piece
            while begun < len(entries) and entries[begun].start <= start:
                having.append(entries[begun])
                begun += 1
            having = [one for one in having if one.stop >= stop]
            if not having:
                raise LostStateError(
                    f"no worker has the optimiser's state of parameter {interval.parameter} (elements {start} to "
                    f"{stop}) any more: those that kept it are lost",
                    parameter=interval.parameter,
                )
            entry = min(having, key=lambda one: (one.rank - near) % self._size)
            found.append((Piece(entry.rank, start, stop), entry))
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
                pieces, state = self.pieces(interval, near=rank), None
                if rank == self.rank:
                    device = devices[interval.parameter]
                    large_on = CPU if on_cpu else device
                    state = found[interval] = self._allocate(interval, pieces, small_on=device, large_on=large_on)
                self._plan(interval, pieces, rank, state, sent, targets)
        self._send(list(sent), targets)
        return found

    def _plan(
        self,
        interval: Interval,
        pieces: list[tuple[Piece, _Entry]],
        rank: int,
        state: State | None,
        sent: dict[_Slice, None],
        targets: dict[_Slice, list[Tensor]],
        *,
        name: str | None = None,
    ) -> None:
        """Add to `sent` what others send to a rank for the state of an interval, and to `targets` where it goes.

        state  on that rank, tensors that are not filled yet; what it has itself is copied into them
        name   of one tensor of the state; None: all
        """
        for piece, entry in pieces:
            for one, first in self._slices(interval, piece, entry, name):
                if piece.owner != rank:
                    sent[one] = None
                if state is not None:
                    target = _bytes(state[one.name])[first : first + one.stop - one.start]
                    if piece.owner == rank:
                        target.copy_(_bytes(self._mine[entry.number][one.name])[one.start : one.stop])
                    else:
                        targets.setdefault(one, []).append(target)

    def outline(self, intervals: Sequence[Interval]) -> States:
        """Return the states of intervals, with tensors on the device "meta" in place of those that have to be sent.

        Raises LostStateError, on all workers, if no worker has some of them.
        """
        meta = torch.device("meta")
        return {one: self._allocate(one, self.pieces(one), small_on=CPU, large_on=meta) for one in intervals}

    def send(self, wanted: Sequence[tuple[Interval, str, int]], to: int = 0) -> Iterator[Tensor | None]:
        """Yield tensors of the states of intervals on rank `to`, in the memory of the CPU, and None on other ranks.

        wanted  the interval, the name of the tensor in its state, and the size of the tensor in bytes

        A collective call: all workers exhaust the iterator. At most CHUNK_BYTES, or one tensor, are sent at once.
        """
        batch, left_bytes = list[tuple[Interval, str]](), CHUNK_BYTES
        for interval, name, size in wanted:
            if batch and size > left_bytes:
                yield from self._send_batch(batch, to)
                batch, left_bytes = [], CHUNK_BYTES
            batch.append((interval, name))
            left_bytes -= size
        yield from self._send_batch(batch, to)

    def _send_batch(self, batch: Sequence[tuple[Interval, str]], to: int) -> list[Tensor | None]:
        sent, targets, found = dict[_Slice, None](), dict[_Slice, list[Tensor]](), list[Tensor | None]()
        for interval, name in batch:
            pieces, state = self.pieces(interval, near=to), None
            if self.rank == to:
                state = self._allocate(interval, pieces, small_on=CPU, large_on=CPU, name=name)
            self._plan(interval, pieces, to, state, sent, targets, name=name)
            found.append(None if state is None else state[name])
        self._send(list(sent), targets)
        return found

    def _slices(
        self, interval: Interval, piece: Piece, entry: _Entry, name: str | None
    ) -> Iterator[tuple[_Slice, int]]:
        """Yield what has to be copied for a piece of an interval, and to which byte. `name`: see `_plan`."""
        layout = self._layouts[piece.owner][entry.number]
        for key, about in layout.items() if name is None else [(name, layout[name])]:
            if not (isinstance(about, dict) and "stride" in about):
                continue
            size = getattr(torch, about["dtype"]).itemsize
            if about["shape"] == [entry.stop - entry.start]:
                start, stop = (piece.start - entry.start) * size, (piece.stop - entry.start) * size
                yield _Slice(piece.owner, entry.number, key, start, stop), (piece.start - interval.start) * size
            else:  # a tensor of another shape, of a parameter that one worker has as a whole
                yield _Slice(piece.owner, entry.number, key, 0, _numel(about["shape"]) * size), 0

    def _allocate(
        self,
        interval: Interval,
        pieces: list[tuple[Piece, _Entry]],
        *,
        small_on: torch.device,
        large_on: torch.device,
        name: str | None = None,
    ) -> State:
        """Return a state with the values that are known from the layout, and tensors that are not filled yet.

        small_on, large_on  where these tensors are to be; small ones that are on the CPU stay there
        name                of the only value that is needed; None: all are
        """
        first, entry = pieces[0]
        layout, found = self._layouts[first.owner][entry.number], State()
        for key, about in layout.items() if name is None else [(name, layout[name])]:
            if not isinstance(about, dict):
                found[key] = about
                continue
            dtype = getattr(torch, about["dtype"])
            if "data" in about:
                data = bytearray(base64.b64decode(about["data"]))
                value = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                found[key] = value.view(about["shape"]).to(CPU if about["on_cpu"] else small_on, copy=True)
            elif about["shape"] == [entry.stop - entry.start]:
                found[key] = torch.empty(interval.stop - interval.start, dtype=dtype, device=large_on)
            else:
                found[key] = torch.empty_strided(about["shape"], about["stride"], dtype=dtype, device=large_on)
        return found

    def _send(self, sent: list[_Slice], targets: Mapping[_Slice, list[Tensor]]) -> None:
        """Every worker sends its slices one after the other, as one stream, in chunks. All workers receive them."""
        streams = [[one for one in sent if one.source == source] for source in range(self._size)]
        lengths = [sum(one.stop - one.start for one in stream) for stream in streams]
        if not agreement.is_even(lengths):
            for source, stream in enumerate(streams):
                for start in range(0, lengths[source], CHUNK_BYTES):
                    row = self._next_bytes(stream, start, min(CHUNK_BYTES, lengths[source] - start), source)
                    assert self._group is not None
                    agreement.Broadcast(keep=False)(self._group, [row], source=source)
                    _deliver(stream, start, row, targets)
            return
        most = max(CHUNK_BYTES // self._size, 1)
        for start in range(0, max(lengths), most):
            width = min(most, max(lengths) - start)
            row = self._next_bytes(streams[self.rank], start, width, self.rank)
            rows = torch.empty(width * self._size, dtype=torch.uint8, device=self._device)
            assert self._group is not None
            work = self._group._allgather_base(rows, row)
            abortable_wait.wait(self._group, work, self._device, "moving state between workers")
            for stream, received in zip(streams, torch.split(rows, width), strict=True):
                _deliver(stream, start, received, targets)

    def _next_bytes(self, stream: list[_Slice], start: int, width: int, source: int) -> Tensor:
        """Return bytes from `start` on of what `source` sends; on other workers memory of that size."""
        row = torch.zeros(width, dtype=torch.uint8, device=self._device)
        for one, at, part in _overlaps(stream, start, start + width) if source == self.rank else ():
            tensor = _bytes(self._mine[one.entry][one.name])
            row[at : at + part.stop - part.start].copy_(tensor[one.start + part.start : one.start + part.stop])
        return row


def _deliver(stream: list[_Slice], start: int, row: Tensor, targets: Mapping[_Slice, list[Tensor]]) -> None:
    """Copy the bytes of a stream from `start` on to where they are wanted."""
    for one, at, part in _overlaps(stream, start, start + len(row)):
        for target in targets.get(one, ()):
            target[part].copy_(row[at : at + part.stop - part.start])


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
    if flat_view(value) is not None and (value.numel() > SMALL_NUMEL or is_elementwise(value, shape)):
        return about | {"stride": list(value.stride())}
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0)
    return about | {"data": base64.b64encode(bytes(data.tolist())).decode()}


def is_elementwise(value: Any, shape: Sequence[int]) -> bool:
    """Whether a value is a tensor with an element for each element of a parameter of this shape."""
    return isinstance(value, Tensor) and value.dim() > 0 and list(value.shape) == list(shape)


def _shape_like(parameter: Tensor, state: State) -> State:
    """Return the state of a parameter whose tensors are in the order of memory, with tensors of its shape."""
    return {
        name: value.as_strided(parameter.shape, parameter.stride())
        if is_elementwise(value, [parameter.numel()]) and parameter.dim() != 1
        else value
        for name, value in state.items()
    }


@final
class StateOutline:
    """What is distributed over the workers: everything but large tensors, in whose place there are empty ones.

    state         nested dicts, the same on all workers
    placeholders  the tensors in it that stand for others, in order; they are on the device "meta"
    """

    def __init__(
        self, holders: StateHolders, state: dict[Any, Any], sources: Mapping[Tensor, tuple[Interval, str]]
    ) -> None:
        """`sources`: what each of the placeholders stands for."""
        self._holders, self.state, self._sources = holders, state, sources

    @staticmethod
    def of_parameters(holders: StateHolders, parameters: Sequence[Tensor], whole: Container[Tensor]) -> StateOutline:
        """Return the states of parameters, with tensors of their shapes.

        whole  parameters of which one worker has the whole state; that of others is in the order of memory
        """
        intervals = [Interval(number, 0, parameter.numel()) for number, parameter in enumerate(parameters)]
        found, sources = dict[Any, Any](), dict[Tensor, tuple[Interval, str]]()
        for parameter, (interval, state) in zip(parameters, holders.outline(intervals).items(), strict=True):
            found[parameter] = state if parameter in whole else _shape_like(parameter, state)
            sources |= {
                value: (interval, name)
                for name, value in found[parameter].items()
                if isinstance(value, Tensor) and value.is_meta
            }
        return StateOutline(holders, found, sources)

    @property
    def placeholders(self) -> list[Tensor]:
        return [value for value in _leaves(self.state) if isinstance(value, Tensor) and value in self._sources]

    def send(self, wanted: Sequence[Tensor], to: int = 0) -> Iterator[Tensor | None]:
        """Yield what placeholders stand for, on rank `to`, and None on the others: see `StateHolders.send`."""
        arriving = self._holders.send([(*self._sources[one], one.nbytes) for one in wanted], to)
        for one, tensor in zip(wanted, arriving, strict=True):
            yield None if tensor is None else tensor.as_strided(one.shape, one.stride())

    def fill(self, found: Iterable[Any]) -> dict[Any, Any]:
        """Return the state with other values in the places of the placeholders, in their order."""
        values = dict(zip(self.placeholders, found, strict=True))
        return {key: _fill(value, values) for key, value in self.state.items()}

    def collect(self, to: int = 0) -> dict[Any, Any] | None:
        """Return the whole state on rank `to`, and None on other ranks; a collective call."""
        found = list(self.send(self.placeholders, to))
        return self.fill(found) if self._holders.rank == to else None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inside in value.values():
            yield from _leaves(inside)
    else:
        yield value


def _fill(value: Any, values: Mapping[Tensor, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(inside, values) for key, inside in value.items()}
    return values.get(value, value) if isinstance(value, Tensor) else value
