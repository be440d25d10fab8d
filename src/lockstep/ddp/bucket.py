"""Which gradients travel together, and the memory they travel in.

`Caps` and `pack` are pure: they decide from sizes alone, so every worker decides the same. `Bucket` owns one flat
buffer and moves gradients into it and out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

MIB = 1024 * 1024
DEFAULT_CAP_BYTES = 25 * MIB
FIRST_CAP_BYTES = 1 * MIB  # the last gradients of a backward have nothing to hide behind: keep what they wait for small


@dataclass(frozen=True)
class Caps:
    """Size limits of buckets. A bucket is closed by the parameter that reaches its limit."""

    cap_bytes: int
    first_bytes: int
    each_bytes: tuple[int, ...] = ()  # limits given one by one; the last one repeats

    @staticmethod
    def from_mib(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> Caps:
        if cap_mb_list:
            each = tuple(int(mb * MIB) for mb in cap_mb_list)
            return Caps(cap_bytes=max(each), first_bytes=max(each), each_bytes=each)
        if cap_mb is None:
            return Caps(cap_bytes=DEFAULT_CAP_BYTES, first_bytes=FIRST_CAP_BYTES)
        return Caps(cap_bytes=int(cap_mb * MIB), first_bytes=int(cap_mb * MIB))

    def before_order_is_known(self, *, may_have_unused: bool) -> tuple[int, ...]:
        """Until the order of gradients is known, one bucket per kind of tensor.

        Parameters are then only assumed to be used in the order of their definition. A bucket that waits for a
        late gradient would hold back, or on another worker run ahead of, collectives of the user's own.
        A model with unused parameters never learns its order, so it gets its final buckets at once.
        """
        if self.each_bytes:
            return self.each_bytes
        if not may_have_unused:
            return (sys.maxsize,)
        return self.once_order_is_known()

    def once_order_is_known(self) -> tuple[int, ...]:
        return self.each_bytes or (self.first_bytes, self.cap_bytes)


@dataclass(frozen=True)
class Pack:
    """One bucket to be: the numbers of its parameters, and the limit it was packed under."""

    indices: tuple[int, ...]
    limit_bytes: int


@dataclass
class _Open:
    indices: list[int] = field(default_factory=list)
    size_bytes: int = 0
    limit: int = 0  # which of the limits applies


def pack(
    parameters: Sequence[Tensor], limits: Sequence[int], *, sparse: Sequence[bool], order: Sequence[int] | None = None
) -> list[Pack]:
    """Group parameters into buckets of one dtype and device. A function of its arguments alone.

    `order` is the order in which gradients arrive (default: that of definition). A parameter whose gradient is
    sparse is a bucket of its own. The buckets come in the order in which they will be complete.
    """
    packs: list[Pack] = []
    opened: dict[tuple[torch.dtype, torch.device], _Open] = {}
    arrival = list(range(len(parameters))) if order is None else list(order)
    for index in arrival:
        parameter = parameters[index]
        if sparse[index]:
            packs.append(Pack((index,), 0))
            continue
        bucket = opened.setdefault((parameter.dtype, parameter.device), _Open())
        bucket.indices.append(index)
        bucket.size_bytes += parameter.numel() * parameter.element_size()
        limit = limits[min(bucket.limit, len(limits) - 1)]
        if bucket.size_bytes >= limit:
            packs.append(Pack(tuple(bucket.indices), limit))
            opened[parameter.dtype, parameter.device] = _Open(limit=bucket.limit + 1)
    packs += [Pack(tuple(b.indices), limits[min(b.limit, len(limits) - 1)]) for b in opened.values() if b.indices]
    if order is None:
        # Parameters used first get their gradients last.
        return sorted(packs, key=lambda p: min(p.indices), reverse=True)
    position = {index: place for place, index in enumerate(arrival)}
    return sorted(packs, key=lambda p: max(position[i] for i in p.indices))


class Ownership(Enum):
    """Who holds a gradient between the backward pass and the optimiser."""

    HANDED_OVER = auto()  # moved into the bucket, and handed back as a piece of it: one copy, no second set
    BUCKET_VIEW = auto()  # gradients are pieces of one buffer for good (gradient_as_bucket_view=True)
    COPIED = auto()  # gradients stay where they are while a communication hook works on a copy


@dataclass(frozen=True)
class Filling:
    """How gradients go into a bucket: who owns them, and what they are divided by on the way.

    Which of two equal-looking operations scales them decides the last bit; these are the ones torch uses.
    """

    ownership: Ownership
    divisor: int = 1
    divide_flat: bool = False

    def scale_into(self, target: Tensor, source: Tensor) -> None:
        if self.divisor == 1:
            target.copy_(source)
        else:
            torch.mul(source, 1.0 / self.divisor, out=target)

    def scale_in_place(self, gradient: Tensor) -> None:
        if self.divisor == 1:
            return
        if self.ownership is Ownership.BUCKET_VIEW:
            gradient.div_(self.divisor)
        else:
            gradient.mul_(1.0 / self.divisor)

    def scale_flat(self, flat: Tensor) -> None:
        if self.divisor == 1:
            return
        if self.divide_flat:
            flat.div_(self.divisor)
        else:
            flat.mul_(1.0 / self.divisor)


class Bucket:
    """One flat buffer and the parameters whose gradients it carries.

    Note [Who owns the flat buffer]
    In HANDED_OVER, a parameter's gradient becomes a piece of the flat buffer once it has been reduced, and belongs to
    the user from then on. The buffer is used again only when nobody else refers to it, which its storage's reference
    count tells; otherwise a new one is made, so a gradient that a user has kept never changes under his hands.
    On an accelerator the buffer is let go as soon as the gradients are, because the allocator there gives memory back
    at no cost and the forward pass needs it; on a CPU new pages cost as much as copying them, so it is kept.
    A gradient is copied even if it has a bucket to itself: two gradients may share memory (a + b, each reshaped), and
    no reference count tells that reliably.
    The tensor that autograd made is free as soon as it has been copied, so on a CPU the next gradient is mostly made in
    pages that are there: 11,800 page faults in a step of a small GPT, against 23,300 if gradients are kept longer.
    """

    def __init__(
        self,
        number: int,
        plan: Pack,
        parameters: Sequence[Tensor],
        *,
        sparse: bool,
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
    ) -> None:
        self._allocate = allocate
        self.number = number
        self.plan = plan
        self.sparse = sparse
        self.parameters = [parameters[i] for i in plan.indices]
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self.offsets: list[int] = []
        self.numel = 0
        for p in self.parameters:
            self.offsets.append(self.numel)
            self.numel += p.numel()
        self.size_bytes = self.numel * first.element_size()
        self._plain = all(p.is_contiguous() and p.numel() for p in self.parameters)
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Before a backward pass: everything is still to come."""
        self.pending = len(self.parameters)
        self.opened = False
        self.sent: Any = None  # the work or future that will bring the sum
        self.kept: list[Tensor | None] = [None] * len(self.parameters)

    def cast(self, dtype: torch.dtype) -> None:
        """From now on carry gradients of another precision."""
        self.dtype, self.flat, self.views = dtype, None, []

    def zeros(self) -> Tensor:
        """What a worker sends that has nothing to contribute."""
        first = self.parameters[0]
        if self.sparse:
            none = torch.empty((1, 0), dtype=torch.int64, device=self.device)
            values = torch.empty((0, *first.shape[1:]), dtype=self.dtype, device=self.device)
            return torch.sparse_coo_tensor(none, values, first.shape)
        numel = self.numel * (2 if self.dtype.is_complex else 1)
        return torch.zeros(numel, dtype=self.dtype.to_real(), device=self.device)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Pieces of `flat`, one for each parameter, laid out as autograd lays out that parameter's gradient."""
        with torch.no_grad():
            if self._plain:
                pieces = torch._C._nn.unflatten_dense_tensors(flat, self.parameters)
            else:
                pieces = [piece_of(flat, p, at) for p, at in zip(self.parameters, self.offsets, strict=True)]
        # .data: aliases of the memory, but no views to autograd, so that a user may detach_() his gradient.
        return [piece.data for piece in pieces]

    def aliases(self, slot: int, gradient: Tensor) -> bool:
        """Whether this gradient already lies where it would be copied to."""
        flat = self.flat
        return (
            flat is not None
            and gradient.dtype == flat.dtype
            and gradient.numel() > 0
            and gradient.data_ptr() == flat.data_ptr() + self.offsets[slot] * flat.element_size()
            and gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        )

    def open(self, ownership: Ownership) -> None:
        """Have memory for this backward pass (see Note [Who owns the flat buffer])."""
        if self.opened:
            return
        self.opened = True
        if ownership is Ownership.HANDED_OVER:
            if self.flat is None or not self._is_ours_alone():
                self.flat = self._allocate(self.numel, self.dtype, self.device)
            self.views = self.cut(self.flat)
        elif self.flat is None or not self.views:
            if self.flat is None:
                self.flat = self._allocate(self.numel, self.dtype, self.device)
            self.views = self.cut(self.flat)

    def _is_ours_alone(self) -> bool:
        assert self.flat is not None
        lent = sum(p.grad is not None and self.aliases(i, p.grad) for i, p in enumerate(self.parameters))
        storage = self.flat.untyped_storage()
        # Two are ours: the flat tensor, and the handle in the line above.
        return int(torch._C._storage_Use_Count(storage._cdata)) <= 2 + lent

    def let_go(self) -> None:
        """Free the buffer if only we hold it. Called where memory is dear: before a forward and before a backward."""
        if self.flat is not None and not self.sparse:
            self.views = []
            storage = self.flat.untyped_storage()
            if int(torch._C._storage_Use_Count(storage._cdata)) <= 2:
                self.flat = None

    # -- gradients in ------------------------------------------------------------------------------------------------

    def take(self, slot: int, mode: Filling, *, existed: bool) -> None:
        """Move one gradient in, scaled, while it is still in the cache.

        `existed`: the tensor was there before this backward pass, so the result must appear in that same tensor.
        """
        parameter = self.parameters[slot]
        gradient = parameter.grad
        self.open(mode.ownership)
        view = self.views[slot]
        if gradient is None:
            view.zero_()
            return
        self._check(slot, gradient)
        in_place = self.aliases(slot, gradient)
        if in_place:
            mode.scale_in_place(gradient)
        else:
            mode.scale_into(view, gradient)
        self._keep(slot, gradient, mode.ownership, keep=existed or in_place)

    def fill(self, mode: Filling, existed: Sequence[bool]) -> None:
        """Move all gradients in at once: few large kernels instead of many small ones, for devices that prefer that."""
        self.open(mode.ownership)
        assert self.flat is not None
        sources, targets = [], []
        for slot, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                continue
            self._check(slot, gradient)
            in_place = self.aliases(slot, gradient)
            if not in_place:
                sources.append(gradient)
                targets.append(view)
            self._keep(slot, gradient, mode.ownership, keep=existed[slot] or in_place)
        if sources:
            torch._foreach_copy_(targets, sources)
        mode.scale_flat(self.flat)

    def _keep(self, slot: int, gradient: Tensor, ownership: Ownership, *, keep: bool) -> None:
        parameter = self.parameters[slot]
        if ownership is Ownership.HANDED_OVER:
            # None while it travels: its memory is free at once, and a gradient that arrives late cannot be added to
            # a sum on its way; `give_back` finds it instead.
            self.kept[slot] = gradient if keep else None
            parameter.grad = None
        elif ownership is Ownership.BUCKET_VIEW:
            # An alias of our view, not the view itself: torch's mixed precision hook swaps the data of what is here.
            parameter.grad = self.views[slot].data

    def _check(self, slot: int, gradient: Tensor) -> None:
        assert self.flat is not None
        if gradient.dtype != self.flat.dtype or gradient.layout != torch.strided:
            raise RuntimeError(
                f"Expected a dense {self.flat.dtype} gradient for parameter {self.plan.indices[slot]} of shape "
                f"{tuple(self.parameters[slot].shape)}, got {gradient.layout} {gradient.dtype}; parameters must keep "
                "the dtype they had when they were wrapped."
            )

    # -- gradients out -----------------------------------------------------------------------------------------------

    def give_back(self, result: Tensor, ownership: Ownership, untouched: Sequence[bool]) -> list[int]:
        """Let every parameter have its reduced gradient. Returns the slots where a gradient came too late.

        `untouched`: nobody used the parameter, so its gradient stays as it was.
        """
        pieces = self.pieces_of(result)
        match ownership:
            case Ownership.HANDED_OVER:
                late = self._hand_over(pieces, untouched)
                self.views = []
                return late
            case Ownership.BUCKET_VIEW:
                self._show(pieces, untouched)
            case Ownership.COPIED:
                for parameter, piece, unused in zip(self.parameters, pieces, untouched, strict=True):
                    if unused:
                        continue
                    if parameter.grad is None:
                        parameter.grad = piece.clone(memory_format=torch.preserve_format)
                    else:
                        parameter.grad.copy_(piece)
        return []

    def _hand_over(self, pieces: Sequence[Tensor], untouched: Sequence[bool]) -> list[int]:
        late = []
        for slot, (parameter, piece, unused) in enumerate(zip(self.parameters, pieces, untouched, strict=True)):
            kept = self.kept[slot]
            if parameter.grad is not None:
                late.append(slot)
            elif unused:
                parameter.grad = kept
            elif kept is None:
                parameter.grad = piece
            else:
                if not self.aliases(slot, kept):
                    kept.copy_(piece)
                parameter.grad = kept
        return late

    def _show(self, pieces: Sequence[Tensor], untouched: Sequence[bool]) -> None:
        for slot, (parameter, piece, unused) in enumerate(zip(self.parameters, pieces, untouched, strict=True)):
            view, gradient = self.views[slot], parameter.grad
            if piece is not view:
                view.copy_(piece)
            if unused:
                continue
            if gradient is None:
                parameter.grad = view.data
            elif gradient.dtype != view.dtype:  # mixed precision: the optimiser's copy, in full precision
                gradient.copy_(piece)
            elif not self.aliases(slot, gradient) and gradient.numel():
                raise RuntimeError(
                    "Detected at least one parameter gradient is not the expected DDP bucket view with "
                    f"gradient_as_bucket_view=True: parameter {self.plan.indices[slot]} of shape "
                    f"{tuple(parameter.shape)}. Something replaced its .grad while the backward pass ran."
                )

    def restore(self) -> None:
        """Nothing was sent for this bucket: give back what was taken, as it was."""
        for parameter, kept in zip(self.parameters, self.kept, strict=True):
            if kept is not None:
                parameter.grad = kept
        self.views = []

    def whole(self) -> Tensor:
        """The buffer as it is sent: complex numbers as pairs of reals, which every backend can add."""
        assert self.flat is not None
        return torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat

    def pieces_of(self, result: Tensor) -> list[Tensor]:
        """What came back, cut like the gradients."""
        assert self.flat is not None
        if result.data_ptr() == self.flat.data_ptr() and result.dtype == self.flat.dtype:
            return self.views
        if self.dtype.is_complex and not result.is_complex():
            if result.data_ptr() == self.flat.data_ptr():
                return self.views
            result = torch.view_as_complex(result.view(-1, 2))
        return self.cut(result)


def piece_of(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """Where `parameter`'s gradient lies in a flat buffer, laid out as autograd would."""
    # Autograd makes gradients with the strides of a dense parameter, and row by row for any other.
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset)
    return flat.narrow(0, offset, parameter.numel()).view(parameter.size())
