"""Buckets: which gradients are reduced together, and the flat buffer that holds them. `Run` packs with `pack`, too, and
fills buffers of its own (step/bucket_set.py).

`Caps` and `pack` are pure functions of sizes, so every worker gets the same buckets. `Bucket` owns one flat buffer and
copies gradients into it and out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from lockstep import _torch

MIB = 1024 * 1024
DEFAULT_CAP_BYTES = 25 * MIB
# Limit of the bucket that is packed first. While the order of definition is used, it is sent last, when no computation
# is left to overlap with it; once the order of gradients is known, it is sent first, and communication starts early.
FIRST_CAP_BYTES = 1 * MIB


@dataclass(frozen=True)
class Caps:
    """Size limits of buckets. A bucket is closed by the parameter that reaches its limit."""

    cap_bytes: int
    first_bytes: int
    each_bytes: tuple[int, ...] = ()  # limit of each bucket in turn; the last one repeats

    @staticmethod
    def from_mib(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> Caps:
        if cap_mb_list:
            each = tuple(int(mb * MIB) for mb in cap_mb_list)
            return Caps(cap_bytes=max(each), first_bytes=max(each), each_bytes=each)
        if cap_mb is None:
            return Caps(cap_bytes=DEFAULT_CAP_BYTES, first_bytes=FIRST_CAP_BYTES)
        return Caps(cap_bytes=int(cap_mb * MIB), first_bytes=int(cap_mb * MIB))

    def before_order_is_known(self, *, may_have_unused: bool) -> tuple[int, ...]:
        """Limits until the order of gradients is known: one bucket per dtype and device.

        Until then, that parameters are used in the order of their definition is only an assumption. A bucket that waits
        for a late gradient would be sent after the user's own collectives, or on another worker before them.
        The order of a model that may have unused parameters is never learned, so it gets its final buckets at once.
        """
        return self.once_order_is_known() if may_have_unused or self.each_bytes else (sys.maxsize,)

    def once_order_is_known(self) -> tuple[int, ...]:
        return self.each_bytes or (self.first_bytes, self.cap_bytes)


@dataclass(frozen=True)
class BucketPlan:
    """The indices of the parameters of one bucket, and the size limit under which it was packed."""

    indices: tuple[int, ...]
    limit_bytes: int


@dataclass
class _Open:
    indices: list[int] = field(default_factory=list)
    size_bytes: int = 0
    limit: int = 0  # index of the limit that applies


def pack(
    parameters: Sequence[Tensor], limits: Sequence[int], *, sparse: Sequence[bool], order: Sequence[int] | None = None
) -> list[BucketPlan]:
    """Group parameters into buckets of one dtype and device. A pure function.

    `order` is the order in which gradients arrive (default: the order of definition). A parameter with a sparse
    gradient gets a bucket of its own. Returns the buckets in the order in which they will be complete.
    """
    packs: list[BucketPlan] = []
    opened: dict[tuple[torch.dtype, torch.device], _Open] = {}
    arrival = list(range(len(parameters))) if order is None else list(order)
    for index in arrival:
        parameter = parameters[index]
        if sparse[index]:
            packs.append(BucketPlan((index,), 0))
            continue
        bucket = opened.setdefault((parameter.dtype, parameter.device), _Open())
        bucket.indices.append(index)
        bucket.size_bytes += parameter.numel() * parameter.element_size()
        limit = limits[min(bucket.limit, len(limits) - 1)]
        if bucket.size_bytes >= limit:
            packs.append(BucketPlan(tuple(bucket.indices), limit))
            opened[parameter.dtype, parameter.device] = _Open(limit=bucket.limit + 1)
    packs += [BucketPlan(tuple(b.indices), limits[min(b.limit, len(limits) - 1)]) for b in opened.values() if b.indices]
    if order is None:
        # Parameters that are used first get their gradients last.
        return sorted(packs, key=lambda p: min(p.indices), reverse=True)
    position = {index: place for place, index in enumerate(arrival)}
    return sorted(packs, key=lambda p: max(position[i] for i in p.indices))


class Ownership(Enum):
    """Who owns the memory of a gradient between the backward pass and the optimiser's step."""

    HANDED_OVER = auto()  # copied into the bucket once; `.grad` is then a piece of the bucket, without a second buffer
    BUCKET_VIEW = auto()  # `.grad` is always a view of the bucket (gradient_as_bucket_view=True)
    COPIED = auto()  # `.grad` keeps its own memory; a communication hook gets a copy


@dataclass(frozen=True)
class FillMode:
    """How gradients are copied into a bucket: who owns them, and by what they are divided.

    Whether they are multiplied by the inverse or divided changes the last bit; each method does what torch does.
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
        self._scale(gradient, divide=self.ownership is Ownership.BUCKET_VIEW)

    def scale_flat(self, flat: Tensor) -> None:
        self._scale(flat, divide=self.divide_flat)

    def _scale(self, tensor: Tensor, *, divide: bool) -> None:
        if self.divisor != 1 and divide:
            tensor.div_(self.divisor)
        elif self.divisor != 1:
            tensor.mul_(1.0 / self.divisor)


class Bucket:
    """One flat buffer, and the parameters whose gradients it holds.

    Note [Who owns the flat buffer]
    With HANDED_OVER, a parameter's gradient becomes a piece of the flat buffer once it has been reduced, and the user
    owns it from then on. The buffer is used again only if its storage's reference count shows that no other tensor
    refers to it; otherwise a new one is allocated, so a gradient that the user has kept never changes.
    On an accelerator the buffer is freed together with the gradients, because the caching allocator makes that cheap
    and the forward pass needs the memory; on a CPU a page fault costs as much as copying the page, so it is kept.
    A gradient is copied even if it is alone in its bucket: two gradients may share memory (a + b, each reshaped), and
    no reference count shows that reliably.
    The tensor that autograd made is freed as soon as it has been copied, so on a CPU the next gradient mostly reuses
    its pages: 11,800 page faults in a step of a small GPT, against 23,300 if gradients are kept longer.
    """

    def __init__(
        self,
        number: int,
        plan: BucketPlan,
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
        """Called before a backward pass: no gradient has arrived."""
        self.pending = len(self.parameters)
        self.opened = False
        self.sent: Any = None  # the Work or Future of the reduction; None: not sent
        # The user's own gradient tensors, which must receive the result. None: a piece of the buffer becomes `.grad`.
        self.kept: list[Tensor | None] = [None] * len(self.parameters)

    def cast(self, dtype: torch.dtype) -> None:
        """Change the dtype of the buffer."""
        self.dtype, self.flat, self.views = dtype, None, []

    def zeros(self) -> Tensor:
        """The contribution of a worker that has no gradients."""
        first = self.parameters[0]
        if self.sparse:
            none = torch.empty((1, 0), dtype=torch.int64, device=self.device)
            values = torch.empty((0, *first.shape[1:]), dtype=self.dtype, device=self.device)
            return torch.sparse_coo_tensor(none, values, first.shape)
        numel = self.numel * (2 if self.dtype.is_complex else 1)
        return torch.zeros(numel, dtype=self.dtype.to_real(), device=self.device)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Pieces of `flat`, one for each parameter, with the strides that autograd gives that parameter's gradient."""
        with torch.no_grad():
            if self._plain:
                pieces = _torch.unflatten(flat, self.parameters)
            else:
                pieces = [piece_of(flat, p, at) for p, at in zip(self.parameters, self.offsets, strict=True)]
        # .data: aliases of the memory, but not views for autograd, so that the user may call detach_() on a gradient.
        return [piece.data for piece in pieces]

    def aliases(self, slot: int, gradient: Tensor) -> bool:
        """Whether this gradient is already its piece of the buffer."""
        flat = self.flat
        return (
            flat is not None
            and gradient.dtype == flat.dtype
            and gradient.numel() > 0
            and gradient.data_ptr() == flat.data_ptr() + self.offsets[slot] * flat.element_size()
            and gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        )

    def open(self, ownership: Ownership) -> None:
        """Provide the buffer for this backward pass (see Note [Who owns the flat buffer])."""
        if self.opened:
            return
        self.opened = True
        handed_over = ownership is Ownership.HANDED_OVER
        if self.flat is None or (handed_over and self._users() > self._lent()):
            self.flat, self.views = self._allocate(self.numel, self.dtype, self.device), []
        if handed_over or not self.views:
            self.views = self.split(self.flat)

    def _users(self) -> int:
        """The number of other tensors that share the memory of the buffer."""
        assert self.flat is not None
        storage = self.flat.untyped_storage()
        return int(_torch.storage_use_count(storage._cdata)) - 2  # two are ours: the flat tensor, and `storage`

    def _lent(self) -> int:
        return sum(p.grad is not None and self.aliases(i, p.grad) for i, p in enumerate(self.parameters))

    def free_if_unused(self) -> None:
        """Free the buffer if nothing else refers to it. Called before forward and backward, which need the memory."""
        if self.flat is not None and not self.sparse:
            self.views = []
            if self._users() <= 0:
                self.flat = None

    # -- gradients in ------------------------------------------------------------------------------------------------

    def copy_in(self, slot: int, mode: FillMode, *, existed: bool) -> None:
        """Copy one gradient in, scaled, while it is still in the cache.

        `existed`: the tensor existed before this backward pass, so the result must be written to that same tensor.
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

    def copy_in_all(self, mode: FillMode, existed: Sequence[bool]) -> None:
        """Copy all gradients in at once, with few large kernels instead of many small ones: faster on accelerators."""
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
            _torch.foreach_copy_(targets, sources)
        mode.scale_flat(self.flat)

    def _keep(self, slot: int, gradient: Tensor, ownership: Ownership, *, keep: bool) -> None:
        parameter = self.parameters[slot]
        if ownership is Ownership.HANDED_OVER:
            # None during the reduction: its memory is freed at once, and a gradient that arrives late is not added to
            # a buffer that is being reduced; `assign_gradients` detects it instead.
            self.kept[slot] = gradient if keep else None
            parameter.grad = None
        elif ownership is Ownership.BUCKET_VIEW:
            # An alias of our view, not the view itself: torch's mixed precision hook replaces the `.data` of `.grad`.
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

    def assign_gradients(self, result: Tensor, ownership: Ownership, untouched: Sequence[bool]) -> list[int]:
        """Set every parameter's `.grad` to its part of `result`. Returns the slots where a gradient arrived too late.

        `untouched`: no worker used the parameter, so its gradient stays as it was.
        """
        pieces = self.split_result(result)
        match ownership:
            case Ownership.HANDED_OVER:
                late = self._assign_pieces(pieces, untouched)
                self.views = []
                return late
            case Ownership.BUCKET_VIEW:
                self._update_views(pieces, untouched)
            case Ownership.COPIED:
                for parameter, piece, unused in zip(self.parameters, pieces, untouched, strict=True):
                    if unused:
                        continue
                    if parameter.grad is None:
                        parameter.grad = piece.clone(memory_format=torch.preserve_format)
                    else:
                        parameter.grad.copy_(piece)
        return []

    def _assign_pieces(self, pieces: Sequence[Tensor], untouched: Sequence[bool]) -> list[int]:
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

    def _update_views(self, pieces: Sequence[Tensor], untouched: Sequence[bool]) -> None:
        for slot, (parameter, piece, unused) in enumerate(zip(self.parameters, pieces, untouched, strict=True)):
            view, gradient = self.views[slot], parameter.grad
            if piece is not view:
                view.copy_(piece)
            if unused:
                continue
            if gradient is None:
                parameter.grad = view.data
            elif gradient.dtype != view.dtype:  # mixed precision: the optimiser's gradient, in full precision
                gradient.copy_(piece)
            elif not self.aliases(slot, gradient) and gradient.numel():
                raise RuntimeError(
                    "Detected at least one parameter gradient is not the expected DDP bucket view with "
                    f"gradient_as_bucket_view=True: parameter {self.plan.indices[slot]} of shape "
                    f"{tuple(parameter.shape)}. Something replaced its .grad while the backward pass ran."
                )

    def restore(self) -> None:
        """This bucket was not sent: restore the gradients that `copy_in` has set to None."""
        for parameter, kept in zip(self.parameters, self.kept, strict=True):
            if kept is not None:
                parameter.grad = kept
        self.views = []

    def comm_buffer(self) -> Tensor:
        """The buffer that is sent: complex numbers as pairs of reals, which every backend can add."""
        assert self.flat is not None
        return torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat

    def split_result(self, result: Tensor) -> list[Tensor]:
        """Pieces of the reduced buffer, one for each parameter."""
        assert self.flat is not None
        pairs = self.dtype.is_complex and not result.is_complex()
        if result.data_ptr() == self.flat.data_ptr() and (pairs or result.dtype == self.flat.dtype):
            return self.views
        return self.split(torch.view_as_complex(result.view(-1, 2)) if pairs else result)


def piece_of(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """The part of a flat buffer that holds `parameter`'s gradient, with the strides that autograd would use."""
    # Autograd gives a gradient the strides of its parameter if that is dense, and makes it contiguous otherwise.
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset)
    return flat.narrow(0, offset, parameter.numel()).view(parameter.size())
