"""Which worker keeps the optimiser's state of which weights, and the part of a parameter that one worker updates.

Note [Cells]
Parameters are cut at multiples of CELL_NUMEL elements, in the order of memory. A step of an optimiser such as AdamW
treats each element on its own; so a part that begins at such a boundary is updated by the same vector instructions as
it would be inside the whole tensor, with the same bits. An optimiser that looks at a whole tensor, at its norm (LAMB)
or as a matrix (Muon), gets whole tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

CELL_NUMEL: Final = 64
STRIPE_NUMEL: Final = 512 * 1024  # see `assign_cells`


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter, in the order of memory, whose state one worker keeps."""

    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


# The gradients of pieces, by the parameter and the piece's first element; each is flat.
PartGradients = dict[tuple[Tensor, int], Tensor]


def assign_cells(sizes: Sequence[int], loads: list[int], *, stripe: int | None = None) -> list[list[Piece]]:
    """Divide parameters of these sizes evenly between workers, at cells. See Note [Cells].

    loads   The number of elements that each worker has already; it is updated. Workers with few elements come first, so
            that many small groups of parameters are divided evenly, too.
    stripe  Divide every run of so many consecutive elements evenly, so that all workers have a part of every bucket:
            then each of them sends as much as the others at any time. None: each worker has consecutive parameters.

    Returns the pieces of each parameter, in order.
    """
    workers = sorted(range(len(loads)), key=lambda worker: loads[worker])
    total, first = sum(sizes), 0
    stripe = max(total if stripe is None else stripe, 1)
    found: list[list[Piece]] = []
    for size in sizes:
        pieces, start = list[Piece](), 0
        while start < size:
            base = (first + start) // stripe * stripe
            length = min(stripe, total - base)
            place = min((first + start - base) * len(workers) // length, len(workers) - 1)
            end = base + -(-length * (place + 1) // len(workers)) - first  # of this worker's share, in this parameter
            stop = size if end >= size else min(size, max(-(-end // CELL_NUMEL), start // CELL_NUMEL + 1) * CELL_NUMEL)
            pieces.append(Piece(workers[place], start, stop))
            loads[workers[place]] += stop - start
            start = stop
        found.append(_merged(pieces))
        first += size
    return found


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Join neighbouring pieces of one worker."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].owner == piece.owner:
            piece = Piece(piece.owner, found.pop().start, piece.stop)
        found.append(piece)
    return found


def assign_tensors(sizes: Sequence[int], loads: list[int]) -> list[list[Piece]]:
    """Give each parameter to one worker, the largest first, to the worker that has the fewest elements."""
    found: list[list[Piece]] = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(len(loads)), key=lambda worker: loads[worker])
        loads[owner] += sizes[index]
        found[index] = [Piece(owner, 0, sizes[index])]
    return found


def is_whole(parameter: Tensor, *, whole_tensors: bool) -> bool:
    """Whether one worker has the whole parameter. One without dimensions has no order of elements to cut."""
    return whole_tensors or parameter.numel() == 0 or parameter.dim() == 0


def assign_group(
    parameters: Sequence[Tensor],
    loads: list[int],
    *,
    trained: Container[Tensor],
    whole_tensors: bool,
    stripe: int | None = None,
) -> dict[Tensor, list[Piece]]:
    """Assign the parameters of a group to workers: see `assign_cells` and `assign_tensors`."""
    found: dict[Tensor, list[Piece]] = {}
    # Frozen ones apart from the others: they have no state, so they do not count for even parts.
    for is_one, is_trained in itertools.product((True, False), (True, False)):
        chosen = [
            one
            for one in parameters
            if (is_whole(one, whole_tensors=whole_tensors), one in trained) == (is_one, is_trained)
        ]
        assign = assign_tensors if is_one else partial(assign_cells, stripe=stripe)
        pieces = assign([parameter.numel() for parameter in chosen], loads if is_trained else list(loads))
        found |= dict(zip(chosen, pieces, strict=True))
    return found


def choose_buddies(hosts: Sequence[str]) -> list[int]:
    """Return, by rank, the worker that has a copy of that worker's state: on another host, where that is possible.

    hosts  the host of each worker

    Every worker has one other worker's copy. Needs two workers at least.
    """
    in_order = sorted(range(len(hosts)), key=lambda rank: hosts[rank])
    largest = max(hosts.count(host) for host in hosts)
    shift = largest if largest < len(hosts) else 1  # beyond the workers of any host that has half of them at most
    found = [0] * len(hosts)
    for place, rank in enumerate(in_order):
        found[rank] = in_order[(place + shift) % len(hosts)]
    return found


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return the elements in the order of memory, without a copy; None if they are not dense."""
    if tensor.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class OwnedPart:
    """One piece of a parameter, as the inner optimiser sees it."""

    def __init__(self, parameter: Tensor, piece: Piece, *, is_whole: bool) -> None:
        self.parameter, self.piece, self.is_whole = parameter, piece, is_whole
        self.tensor = parameter if is_whole else self._view(parameter)
        self._pointer = parameter.data_ptr()

    def _view(self, tensor: Tensor) -> Tensor:
        flat = flat_view(tensor)
        assert flat is not None
        return flat[self.piece.start : self.piece.stop]

    def follow(self) -> None:
        """Point the view to the current memory of the parameter: `model.to(device)` gives it another one."""
        if not self.is_whole and self.parameter.data_ptr() != self._pointer:
            self.tensor.data = self._view(self.parameter)
            self._pointer = self.parameter.data_ptr()

    def set_gradient(self, parts: PartGradients | None = None) -> None:
        """Let the inner optimiser see this piece of the gradient: that of the parameter, or one of `parts`."""
        if parts is not None:
            flat = parts.get((self.parameter, self.piece.start))
            if flat is not None and self.is_whole:
                flat = flat.as_strided(self.tensor.shape, self.tensor.stride())
            self.tensor.grad = flat
            return
        if self.is_whole:
            return
        gradient = self.parameter.grad
        if gradient is not None and gradient.stride() != self.parameter.stride():
            gradient = torch.empty_like(self.parameter).copy_(gradient)
        self.tensor.grad = None if gradient is None else self._view(gradient)

    def drop_gradient(self, parts: PartGradients | None = None) -> None:
        """Undo `set_gradient`."""
        if parts is not None or not self.is_whole:
            self.tensor.grad = None

    def cut(self, value: Tensor) -> Tensor:
        """Return this piece of a tensor that has the shape of the parameter."""
        if self.is_whole:
            return value.clone()
        in_order = torch.empty_like(self.parameter, dtype=value.dtype, device=value.device).copy_(value)
        return self._view(in_order).clone()
