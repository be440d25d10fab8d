"""The gradients of shards that are sent together, in one piece of memory.

Note [Alignment]
A kernel that sums a tensor handles its first elements one by one if they are not aligned, so the norm of a gradient
depends on its address. In a bucket every gradient begins at a multiple of 64 bytes, as memory of its own would.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import _torch
from lockstep.comm.compressed_sum import CompressedBuffers, RoundingErrors, Scale
from lockstep.comm.error_feedback import FeedbackBuffers
from lockstep.comm.integer_codec import BLOCK, IntegerCodec
from lockstep.comm.shard_sum import HALF_DTYPES, ShardSum
from lockstep.ddp.bucket import piece_of
from lockstep.ddp.replica import Leaf
from lockstep.step.residuals import Residuals
from lockstep.step.scattered_gradients import ScatteredGradients

ALIGN_BYTES = 64  # Note [Alignment]
USED = 32768.0  # the mark: nonzero after division by any weight times loss scale up to 5e11, also in float16


def comm_dtype_of(own: torch.dtype, comm_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which gradients of dtype `own` are rounded before they are added; None: they are not rounded.

    Complex gradients are sent as they are: torch has no complex dtype as narrow as bfloat16.
    """
    return comm_dtype if own.is_floating_point else None


def round_gradient(leaf: Leaf, gradient: Tensor | None, comm_dtype: torch.dtype | None) -> Tensor | None:
    """Round a gradient to the dtype in which it would be sent; and widen it, because sums are formed in float32."""
    if gradient is None:
        return None
    check_layout(leaf, gradient)
    if leaf.sparse:
        return gradient.coalesce()
    narrow = comm_dtype_of(gradient.dtype, comm_dtype)
    if narrow is not None:
        return gradient.to(narrow).to(torch.float32)
    return gradient.float() if gradient.dtype in HALF_DTYPES else gradient


def check_layout(leaf: Leaf, gradient: Tensor) -> None:
    if gradient.is_sparse != leaf.sparse:
        raise RuntimeError(
            f"the gradient of {leaf.name} is {'sparse' if gradient.is_sparse else 'dense'}, but its embedding has "
            f"sparse={leaf.sparse}; a parameter must be used in one way only"
        )


def copy_rounded(view: Tensor, gradient: Tensor | None, comm_dtype: torch.dtype | None) -> None:
    """Write a gradient into `view`, rounded to the dtype in which it is sent; zeros if there is none."""
    if gradient is None:
        view.zero_()
        return
    narrow = comm_dtype_of(gradient.dtype, comm_dtype)
    view.copy_(gradient if narrow is None or narrow == view.dtype else gradient.to(narrow))


@dataclass
class GradientMark:
    """A point in a captured backward pass: once `event` has happened, the gradients `indices` are complete."""

    indices: list[int] = field(default_factory=list)
    event: Any = None  # None: at the end of the backward pass
    size_bytes: int = 0


class GradientBucket:
    """Parameters whose gradients are sent together, one after the other in each row of a piece of memory."""

    rows: list[Tensor]
    views: list[list[Tensor]]  # the gradients of the parameters, by row

    def __init__(self, indices: Sequence[int], leaves: Sequence[Leaf], align: int) -> None:
        """`align`: every gradient begins at a multiple of so many elements."""
        self.indices = list(indices)
        self.leaves = [leaves[i] for i in indices]
        self.parameters = [leaf.parameter for leaf in self.leaves]
        self.offsets, self.numel = [], 0
        for parameter in self.parameters:
            self.offsets.append(self.numel)
            self.numel += -(-parameter.numel() // align) * align
        self.pending = len(self.indices)

    def cut(self, flat: Tensor) -> list[Tensor]:
        pieces = (piece_of(flat, p, at) for p, at in zip(self.parameters, self.offsets, strict=True))
        return [piece.data for piece in pieces]


class ShardBucket(GradientBucket):
    """Gradients that are sent as they are, followed by the marks of those that were used."""

    def __init__(
        self,
        indices: Sequence[int],
        leaves: Sequence[Leaf],
        sum_: ShardSum,
        comm_dtype: torch.dtype | None,
        scattered: ScatteredGradients | None = None,
    ) -> None:
        own = leaves[indices[0]].parameter.dtype
        self.align = ALIGN_BYTES // own.itemsize
        super().__init__(indices, leaves, self.align)
        numel, dtype, sections = self.numel + len(self.indices), comm_dtype_of(own, comm_dtype) or own, None
        if scattered is not None:
            found = scattered.sections(self.parameters, self.offsets, self.align)
            sections = [[*ranges, range(self.numel, numel)] for ranges in found]  # every worker gets the marks
        self.buffers = sum_.allocate(numel, dtype, sections, None if scattered is None else scattered.buddies)
        self._sum = sum_
        self.rows = list(self.buffers.rows)
        self.views = [self.cut(row) for row in self.rows]
        self.marks = [row[self.numel : self.numel + len(self.indices)] for row in self.rows]
        self.all_used = torch.full_like(self.marks[0], USED)

    def marks_for(self, used: Sequence[bool]) -> Tensor:
        """Return the marks of a row: nonzero for each parameter that was used."""
        return self.all_used if all(used) else self.all_used * torch.tensor(used, device=self.all_used.device)

    @property
    def sent_bytes(self) -> int:
        return self.buffers.rows.nbytes

    @property
    def buffer_bytes(self) -> int:
        """Memory on this device, without the part in which the gradients of parameters are."""
        same = self.buffers.dtype == self.parameters[0].dtype
        return self._sum.buffer_bytes(self.buffers, without_result=same)

    @property
    def times(self) -> tuple[float, float]:
        """When the bucket was sent, and when its sum arrived."""
        return self.buffers.started_s, self._sum.finished_s(self.buffers)

    def result(self, where: str) -> tuple[list[Tensor], Tensor]:
        """Wait for the sum. Returns the gradients, and for each whether a shard used it (nonzero).

        If gradients are scattered, they are one tensor for the elements that belong to this worker's parts, and with
        copies another one for those of another worker's.
        """
        flat = self._sum.result(self.buffers, where)
        if self.buffers.scatter is not None:
            sections, marks = self.buffers.scatter.split(flat), len(self.indices)
            return [section[: len(section) - marks] for section in sections], sections[0][-marks:]
        in_place = flat.data_ptr() == self.rows[0].data_ptr() and flat.dtype == self.rows[0].dtype
        pieces = self.views[0] if in_place else self.cut(flat)
        return pieces, flat[self.numel : self.numel + len(self.indices)]


@dataclass(frozen=True)
class Rounding:
    """Gradients are sent as small integers.

    key       returns the key of random numbers for words such as a step
    measures  whether the errors by rounding in a step are measured
    errors    those of all sums of this step
    """

    codec: IntegerCodec
    key: Callable[..., int]
    measures: Callable[[int], bool] = lambda _step: False
    errors: RoundingErrors = field(default_factory=RoundingErrors)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.errors.begin(is_open=self.measures(step))


Compression = Rounding | Residuals  # with residuals: by their method


class CompressedBucket(GradientBucket, ABC):
    """Gradients that are compressed only after the last shard, so every shard has a row."""

    buffers: CompressedBuffers | FeedbackBuffers
    _sum: ShardSum

    def __init__(self, indices: Sequence[int], leaves: Sequence[Leaf], align: int) -> None:
        super().__init__(indices, leaves, align)
        self.used = [False] * len(self.indices)

    def write(self, row: int, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of all parameters of this bucket into a row."""
        if any(gradient is None for gradient in gradients) or self.rows[0].device.type == "cpu":
            for slot, gradient in enumerate(gradients):
                self.write_one(row, slot, gradient)
            return
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            check_layout(leaf, gradient)  # type: ignore[arg-type]
        _torch.foreach_copy_(self.views[row], gradients)  # type: ignore[arg-type]
        self.used = [True] * len(self.used)

    def write_one(self, row: int, slot: int, gradient: Tensor | None) -> None:
        view = self.views[row][slot]
        if gradient is None:
            view.zero_()
            return
        check_layout(self.leaves[slot], gradient)
        view.copy_(gradient)
        self.used[slot] = True

    @abstractmethod
    def start(self, step: int, shards: Sequence[int], scale: Scale) -> None:
        """Send the bucket. `shards`: their numbers, one for each row."""

    @abstractmethod
    def result(self, where: str) -> tuple[list[Tensor], Tensor]:
        """Wait for the sum. Returns the gradients, and for each whether a shard used it (nonzero)."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int: ...

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Memory on this device, without the part in which the gradients of parameters are."""

    @property
    def times(self) -> tuple[float, float]:
        """When the bucket was sent, and when its sum arrived."""
        return self.buffers.started_s, getattr(self.buffers.sent, "ended_s", None) or time.monotonic()


class RoundedBucket(CompressedBucket):
    """Gradients that are sent as small integers (comm/compressed_sum.py).

    Their scales are known only after the last shard. The sum replaces the last row, which is overwritten only after all
    workers have applied the step before.
    """

    buffers: CompressedBuffers

    def __init__(
        self, indices: Sequence[int], leaves: Sequence[Leaf], sum_: ShardSum, rounding: Rounding, first: list[int]
    ) -> None:
        """`first`: the number of the first block of each parameter of the model."""
        super().__init__(indices, leaves, BLOCK)
        self._sum, self._rounding = sum_, rounding
        self._compressed = sum_.compressed(rounding.codec)
        counts = [-(-p.numel() // BLOCK) for p in self.parameters]
        numbers = [torch.arange(first[i], first[i] + n) for i, n in zip(self.indices, counts, strict=True)]
        self.buffers = self._compressed.allocate(torch.cat(numbers), len(self.indices))
        self.rows = list(self.buffers.rows)
        self.views = [self.cut(row) for row in self.rows]
        ends = [
            (at + p.numel(), at + n * BLOCK) for at, p, n in zip(self.offsets, self.parameters, counts, strict=True)
        ]
        self._padding = torch.cat([torch.arange(*span) for span in ends]).to(self.rows[0].device)

    def start(self, step: int, shards: Sequence[int], scale: Scale) -> None:
        buffers, key = self.buffers, self._rounding.key
        self.rows[-1].index_fill_(0, self._padding, 0.0)  # a sum that is not finite was written there, too
        if all(self.used):
            buffers.flags.fill_(1)  # without a copy from the host, which would wait for the GPU
        else:
            buffers.flags.copy_(torch.tensor(self.used, dtype=torch.uint8))
        buffers.shard_keys, buffers.sum_key = [key(step, shard) for shard in shards], key(step, "sum")
        buffers.scale, buffers.started_s = scale, time.monotonic()
        buffers.errors = self._rounding.errors if self._rounding.errors.is_open else None
        buffers.sent = self._sum.submit(lambda: self._compressed.run(buffers))

    @property
    def sent_bytes(self) -> int:
        return self._compressed.wire_bytes(self.buffers)

    @property
    def buffer_bytes(self) -> int:
        is_result = self.parameters[0].dtype == torch.float32
        return self.buffers.rows.nbytes - (self.rows[-1].nbytes if is_result else 0)

    def result(self, where: str) -> tuple[list[Tensor], Tensor]:
        self._sum.wait(self.buffers.sent, where)
        return self.views[-1], self.buffers.flags


def agree_on_order(sum_: ShardSum, arrivals: Sequence[int], count: int) -> tuple[set[int], list[int]]:
    """Return which of `count` gradients arrive more than once on some worker, and the order of all of them on rank 0,
    those last that have not arrived, or more than once; a collective call.

    arrivals  the gradients that have arrived on this worker in a backward pass, by number
    """
    times = torch.zeros(count, dtype=torch.int64, device=sum_.device)
    for index in arrivals:
        times[index] += 1
    options, first, where = dist.AllreduceOptions(), dist.BroadcastOptions(), "the exchange of the order of gradients"
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    first.rootRank, first.rootTensor = 0, 0
    sum_.wait_for_values(sum_.group.allreduce([times], options), where)
    late = {i for i, n in enumerate(times.tolist()) if n > 1}
    seen = [i for i in dict.fromkeys(arrivals) if i not in late]
    order = torch.tensor(seen + [i for i in range(count) if i not in seen], device=sum_.device)
    sum_.wait_for_values(sum_.group.broadcast([order], first), where)
    return late, order.tolist()
