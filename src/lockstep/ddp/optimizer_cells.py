"""Which worker keeps the optimiser's state of which weights, and the part of a parameter that one worker updates.

Note [Cells]
Parameters are cut at multiples of CELL_NUMEL elements, in the order of memory. A step of an optimiser such as AdamW
treats each element on its own; so a part that begins at such a boundary is updated by the same vector instructions as
it would be inside the whole tensor, with the same bits. An optimiser that looks at a whole tensor, at its norm (LAMB)
or as a matrix (Muon), gets whole tensors.

Note [Master weights]
A bfloat16 weight of 1 does not change when 0.001 is added to it. With master weights, the optimiser updates a float32
copy of each weight that has 16 bits, and the weight is this copy, rounded. Copies are divided over the workers with the
optimiser's state, and are part of it in checkpoints. Where the program has changed a weight, so that it is no longer
the copy rounded, the copy becomes the weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

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


MASTER_WEIGHT: Final = "master_weight"  # its name in the state of a parameter


def needs_master_weights(parameter: Tensor) -> bool:
    """Whether the dtype of a parameter is one that optimisers should not update. See Note [Master weights]."""
    return parameter.dtype == torch.bfloat16


def refuse_float16(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for parameters whose gradients have too few digits and exponents for master weights."""
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ValueError(
            "master_weights=True: small gradients of float16 parameters are 0 before they reach the float32 copies; "
            'convert the model to torch.bfloat16, or keep it in float32 and use precision="fp16"'
        )


class OwnedPart:
    """One piece of a parameter.

    weights  the elements of the parameter itself
    tensor   what the inner optimiser updates: `weights`, or their float32 copy

    A copy is part of the state from the first step with a gradient on; until then it is the weights.
    """

    def __init__(self, parameter: Tensor, piece: Piece, *, is_whole: bool) -> None:
        self.parameter, self.piece, self.is_whole = parameter, piece, is_whole
        self.weights = parameter if is_whole else self._view(parameter)
        self.tensor = self.weights
        self._is_master_used = False
        self._pointer = parameter.data_ptr()

    def _view(self, tensor: Tensor) -> Tensor:
        flat = flat_view(tensor)
        assert flat is not None
        return flat[self.piece.start : self.piece.stop]

    def make_master(self) -> None:
        """Keep a float32 copy from now on, if the weights need one. See Note [Master weights]."""
        if needs_master_weights(self.parameter) and not self.has_master:
            self.tensor = self.weights.detach().to(torch.float32)

    @property
    def has_master(self) -> bool:
        return self.tensor is not self.weights

    def make_undo(self) -> Callable[[], None]:
        """Return a function that makes the float32 copy what it is now; the weights are not changed."""
        was_used, copied = self._is_master_used, self.tensor.detach().to("cpu", copy=True) if self.has_master else None

        def restore() -> None:
            self._is_master_used = was_used
            if copied is not None:
                self.tensor.detach().copy_(copied)

        return restore

    def begin_step(self, gradients: PartGradients | None = None) -> None:
        """Let the inner optimiser see this piece of the gradient: that of the parameter, or one of `gradients`."""
        self._follow()
        if gradients is None and self.tensor is self.parameter:
            return
        gradient = self._gradient(gradients)
        if self.has_master and gradient is not None:
            self._is_master_used, gradient, weights = True, gradient.to(torch.float32), self.weights.detach()
            is_changed = weights != self.tensor.to(weights.dtype)
            torch.where(is_changed, weights, self.tensor, out=self.tensor)
        self.tensor.grad = gradient

    def end_step(self, gradients: PartGradients | None = None) -> None:
        """Give the parameter its new weights, and undo `begin_step`."""
        if self.has_master and self.tensor.grad is not None:
            self.weights.detach().copy_(self.tensor)
        if gradients is not None or self.tensor is not self.parameter:
            self.tensor.grad = None

    def _follow(self) -> None:
        """Use the current memory of the parameter: `model.to(device)` gives it another one."""
        if self.parameter.data_ptr() == self._pointer:
            return
        self._pointer = self.parameter.data_ptr()
        if not self.is_whole:
            self.weights.data = self._view(self.parameter)
        if self.has_master:
            self.tensor.data = self.tensor.to(self.parameter.device)

    def _gradient(self, gradients: PartGradients | None) -> Tensor | None:
        """Return this piece of the gradient; None if there is none."""
        if gradients is not None:
            flat = gradients.get((self.parameter, self.piece.start))
            if flat is None or not self.is_whole:
                return flat
            return flat.as_strided(self.weights.shape, self.weights.stride())
        gradient = self.parameter.grad
        if gradient is None or self.is_whole:
            return gradient
        if gradient.stride() != self.parameter.stride():
            gradient = torch.empty_like(self.parameter).copy_(gradient)
        # As `_view`, in less time: there may be hundreds of parts, and a GPU waits meanwhile.
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.shape == self.weights.shape:
            return gradient
        return gradient.as_strided(self.weights.shape, (1,), gradient.storage_offset() + self.piece.start)

    def add_master(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the inner optimiser together with the master weights, if there are any."""
        return state | {MASTER_WEIGHT: self.tensor} if self._is_master_used else state

    def take_master(self, state: Mapping[str, Any]) -> None:
        """Continue with the master weights in a state; if it has none in float32, with copies of the weights.

        The `load_state_dict` of torch rounds them to the dtype of the weights.
        """
        if self.has_master:
            master = state.get(MASTER_WEIGHT)
            self._is_master_used = master is not None and master.dtype == torch.float32
            self.tensor.copy_(self.weights.detach() if master is None else master)

    def without_master(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the inner optimiser needs of a state: for master weights, float32 instead of their dtype.

        Raises ValueError if it has master weights, and this part keeps none.
        """
        if MASTER_WEIGHT in state and not self.has_master:
            raise ValueError(
                f"the state of the optimiser has float32 copies of the weights ({MASTER_WEIGHT}), which would be lost: "
                "train with master_weights=True"
            )
        inner = {name: value for name, value in state.items() if name != MASTER_WEIGHT}
        return {name: self._widened(value) for name, value in inner.items()} if self.has_master else inner

    def _widened(self, value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == self.weights.dtype else value

    def cut(self, value: Tensor) -> Tensor:
        """Return this piece of a tensor that has the shape of the parameter."""
        if self.is_whole:
            return value.clone()
        if value.stride() == self.parameter.stride() and (flat := flat_view(value)) is not None:
            return flat[self.piece.start : self.piece.stop].clone()
        in_order = torch.empty_like(self.parameter, dtype=value.dtype, device=value.device).copy_(value)
        return self._view(in_order).clone()
