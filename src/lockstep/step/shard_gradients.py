"""Sums the gradients of all shards of a global batch, in an order that does not depend on the number of workers.

A worker runs its shards one after the other. The gradients of each shard are kept and added along the tree as far as
this worker has the summands (comm/tree_order.py). The gradients of its last shard are added to their partial sums as
they arrive, and sent in buckets while the rest of the backward pass runs.

Note [Zeros]
A parameter that a shard does not use has no gradient there, which counts as zeros: x + 0. That is not always x (-0 +
0 is 0), so 0 is added wherever a zero gradient would have been, on any number of workers. A parameter that no shard
used keeps no gradient, as with one process; a mark behind the gradients of each row says which were used.

Note [First step]
In the first step nothing is sent before the backward pass ends. That step shows in which order gradients arrive, and
the buckets are packed again in the order that rank 0 saw. A gradient that arrives more than once (reentrant
checkpoints) is complete only at the end, so it is always read there. None of this changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lockstep import _torch, faults
from lockstep.comm.compressed_sum import Scale
from lockstep.comm.shard_sum import ShardSum
from lockstep.comm.tree_order import Subtree, TreeAccumulator
from lockstep.ddp.autograd_graph import GradHooks
from lockstep.ddp.replica import Leaf
from lockstep.errors import DivergenceError
from lockstep.step.bucket_set import BucketSet, RunBucket
from lockstep.step.captured_shard import CapturedShard
from lockstep.step.feedback_bucket import CompressedGradients
from lockstep.step.residuals import Residuals
from lockstep.step.scattered_gradients import ScatteredGradients
from lockstep.step.shard_bucket import (
    CompressedBucket,
    Compression,
    Rounding,
    ShardBucket,
    agree_on_order,
    comm_dtype_of,
    copy_rounded,
    round_gradient,
)
from lockstep.step.subtree_gradients import GradientAdder, SubtreeGradients, add_sparse, no_rows

KEPT_KINDS: Final = {(dtype, torch.strided) for dtype in (torch.float32, torch.float64)}  # of gradients: never widened


class ShardGradients:
    """The gradients of one model during a step.

    In each step: `begin`; `add_shard` after the backward pass of every shard but the last; `begin_last_shard` before
    the last backward pass; `send_rest` after it; `finish`.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        sum_: ShardSum,
        *,
        comm_dtype: torch.dtype | None = None,
        compression: Compression | None = None,
        scattered: ScatteredGradients | None = None,
    ) -> None:
        """
        comm_dtype   the dtype in which gradients are sent, if not their own
        compression  how real, dense gradients are compressed; None: not
        scattered    where the sums are kept, if each worker gets those that it needs; None: all get all of them
        """
        self.scattered = scattered
        self._leaves, self._sum, self._comm_dtype, self._compression = list(leaves), sum_, comm_dtype, compression
        self._parameters = [leaf.parameter for leaf in leaves]
        self._device = self._parameters[0].device
        self._on_cpu = self._device.type == "cpu"
        self._sparse = [i for i, leaf in enumerate(leaves) if leaf.sparse]
        self._adder = GradientAdder(self._parameters, self._sparse)
        self._grad_hooks = GradHooks(self._parameters)
        self.on_gradients: Callable[[Sequence[Tensor | None]], None] | None = None  # gets those of each shard
        self._armed = False
        self._has_order = False  # Note [First step]
        self._arrivals: list[int] = []
        self._late: set[int] = set()
        self._new_order: list[int] | None = None  # of parameters, if the buckets are to be packed again
        self._send_stream: Any = None  # for buckets that are sent while a captured backward pass runs
        self.buckets = BucketSet(leaves, sum_, comm_dtype=comm_dtype, compression=compression, scattered=scattered)
        # One worker needs no buckets, unless gradients are compressed there as they would be with more workers.
        self._is_single = sum_.size == 1 and compression is None
        self._step = 0
        if not self._is_single:
            self.buckets.pack()
            self._grad_hooks.register(self._adder.dense, self._on_gradient)
        self._reset()

    # -- the shards before the last ----------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a step: drop the gradients of the previous one."""
        self._step = step
        if isinstance(self._compression, Rounding):
            self._compression.begin(step)
        self.clear()
        if self.scattered is not None:
            self.scattered.clear()
        self._pack_again()

    def clear(self) -> None:
        """Drop the gradients of all parameters. Scattered ones are kept until the next step begins."""
        for parameter in self._parameters:
            parameter.grad = None
        self._reset()

    def stop(self) -> None:
        """Ignore gradients that arrive from now on, and drop those of the unfinished step."""
        if self._send_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._send_stream)
        self._reset()

    def _reset(self) -> None:
        self._armed = self._is_replayed = False
        self._sums: TreeAccumulator[SubtreeGradients] = TreeAccumulator(self._sum.shards, self._adder.add_all)
        self._chain: list[SubtreeGradients] = []
        self._rows: list[SubtreeGradients] = []
        self._total = SubtreeGradients([])  # with one worker: the sum over all shards
        self._shards: list[int] = []  # the numbers of those that were run in this step
        for bucket in self.buckets:
            if isinstance(bucket, CompressedBucket):
                bucket.used = [False] * len(bucket.used)

    def add_shard(self, shard: int, graph: CapturedShard | None = None) -> None:
        """Keep the gradients of this shard, added to those before it as far as the tree allows.

        `graph`: the captured pass that has them, and whose next replay overwrites them; None: the parameters have them.
        """
        node = Subtree(shard, 1)
        is_copied = graph is not None and self._sums.count_merges(node) == 0
        gradients = self._take_gradients() if graph is None else graph.read_gradients(copied=is_copied)
        if self.on_gradients is not None:
            self.on_gradients(gradients)
        kept = self._round(self._write_compressed(gradients))
        self._shards.append(shard)
        kept.is_owned = is_copied
        self._sums.push(node, kept)

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def _write_compressed(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Write the gradients that will be compressed into their buckets. Returns the others, None for these."""
        if self._compression is None:
            return gradients
        others = list(gradients)
        for bucket in self.buckets:
            if isinstance(bucket, CompressedBucket):
                with torch.no_grad():
                    bucket.write(len(self._shards), [gradients[i] for i in bucket.indices])
                for i in bucket.indices:
                    others[i] = None
        return others

    def _round(self, gradients: Sequence[Tensor | None]) -> SubtreeGradients:
        kinds = {(gradient.dtype, gradient.layout) for gradient in gradients if gradient is not None}
        if self._comm_dtype is None and not self._sparse and kinds <= KEPT_KINDS:
            return SubtreeGradients(list(gradients))  # which is what the general case would return
        pairs = zip(self._leaves, gradients, strict=True)
        return SubtreeGradients([round_gradient(leaf, gradient, self._comm_dtype) for leaf, gradient in pairs])

    # -- the last shard ----------------------------------------------------------------------------------------------

    def begin_last_shard(self, shard: int, scale: Scale) -> None:
        """Prepare for the backward pass of this worker's last shard.

        `scale` returns the factor by which the sum of all shards is multiplied.
        """
        self._scale, self._last = scale, Subtree(shard, 1)
        sums = [kept for _, kept in self._sums.pending]
        waiting = self._sums.count_merges(self._last)
        self._rows = sums[: len(sums) - waiting]
        self._chain = sums[len(sums) - waiting :][::-1]  # what the last shard is added to, the nearest first
        if self._is_single:
            return  # gradients are read when the backward pass is over
        self._armed = True
        self._next = 0
        self._arrivals = []
        self._is_used = [any(kept.values[i] is not None for kept in self._chain) for i in range(len(self._leaves))]
        self._is_ready = [False] * len(self._leaves)
        for bucket in self.buckets:
            bucket.pending = len(bucket.indices)

    def _on_gradient(self, index: int) -> None:
        """Called by autograd when a gradient of a parameter has arrived."""
        if not self._armed:
            return
        self._arrivals.append(index)
        if not self._has_order or index in self._late:
            return
        if self._is_ready[index]:
            raise RuntimeError(
                f"the gradient of {self._leaves[index].name} arrived twice in one backward pass, and not in the first "
                "step. Reentrant checkpoints must be the same in every step; or use checkpoint(use_reentrant=False)"
            )
        if torch.is_grad_enabled():  # not in a backward pass; a context for every gradient takes longer than its copy
            with torch.no_grad():
                self._mark_ready(index)
        else:
            self._mark_ready(index)

    @torch.no_grad()
    def take_replayed(self, graph: CapturedShard, ready: Any) -> None:
        """Take the gradients of the last shard from a replay that is still running, and send buckets behind it.

        ready  event: the sums of the earlier shards are complete. The current stream waits for the replay
        """
        self._is_replayed = True
        if not self.buckets:
            for parameter, gradient in zip(self._parameters, graph.read_gradients(), strict=True):
                parameter.grad = gradient
            return
        if self._send_stream is None:
            self._send_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream, current = self._send_stream, torch.cuda.current_stream(self._device)
        stream.wait_event(ready)
        for mark in graph.marks:
            stream.wait_stream(current) if mark.event is None else stream.wait_event(mark.event)
            with torch.cuda.stream(stream):
                for index, gradient in zip(mark.indices, graph.read_gradients(mark.indices), strict=True):
                    self._parameters[index].grad = gradient
                for index in mark.indices:
                    self._on_gradient(index)
        current.wait_stream(stream)  # in which gradients are widened that are read here

    def _mark_ready(self, index: int) -> None:
        bucket, slot = self.buckets.place_of(index)
        self._is_ready[index] = True
        if self._on_cpu:  # while it is in the cache; on a GPU, few large kernels are faster (`_write_bucket`)
            self._write_gradient(bucket, slot)
        bucket.pending -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._send(self.buckets[self._next])
            self._next += 1

    def _write_gradient(self, bucket: RunBucket, slot: int) -> None:
        """Write one gradient, added to its partial sums, into the last row of its bucket."""
        index, view = bucket.indices[slot], bucket.views[-1][slot]
        gradient = self._parameters[index].grad
        self._parameters[index].grad = None
        if self.on_gradients is not None:
            self.on_gradients([gradient])
        if isinstance(bucket, CompressedBucket):
            bucket.write_one(-1, slot, gradient)
            return
        if gradient is not None:
            self._is_used[index] = True
        if not self._chain:
            copy_rounded(view, gradient, self._comm_dtype)
            return
        last, first = round_gradient(self._leaves[index], gradient, self._comm_dtype), self._chain[0].values[index]
        if last is None and first is None:
            view.zero_()
        else:
            zero = view.new_zeros(())  # Note [Zeros]
            torch.add(zero if first is None else first, zero if last is None else last, out=view)
        for kept in self._chain[1:]:
            more = kept.values[index]
            view.add_(0.0 if more is None else more)

    def _write_bucket(self, bucket: RunBucket) -> None:
        """Write all gradients of a bucket: with few large kernels instead of many small ones, if none is missing."""
        gradients = [parameter.grad for parameter in bucket.parameters]
        if isinstance(bucket, CompressedBucket):
            if self.on_gradients is not None:
                self.on_gradients(gradients)
            bucket.write(-1, gradients)
            for parameter in bucket.parameters:
                parameter.grad = None
            return
        chain = [[kept.values[i] for i in bucket.indices] for kept in self._chain]
        if self._comm_dtype is not None or any(value is None for values in (gradients, *chain) for value in values):
            for slot in range(len(bucket.indices)):
                self._write_gradient(bucket, slot)
            return
        if self.on_gradients is not None:
            self.on_gradients(gradients)
        pairs = zip(bucket.indices, gradients, strict=True)
        total = [round_gradient(self._leaves[i], gradient, self._comm_dtype) for i, gradient in pairs]
        for values in chain:
            total = list(_torch.foreach_add(values, total))  # type: ignore[arg-type]
        _torch.foreach_copy_(bucket.views[-1], total)  # type: ignore[arg-type]
        for index, parameter in zip(bucket.indices, bucket.parameters, strict=True):
            self._is_used[index], parameter.grad = True, None

    def _send(self, bucket: RunBucket) -> None:
        if not self._on_cpu:
            self._write_bucket(bucket)
        if isinstance(bucket, CompressedBucket):
            faults.at("backward")
            bucket.start(self._step, [*self._shards, self._last.start], self._scale)
            return
        for kept, views, marks in zip(self._rows, bucket.views, bucket.marks, strict=False):
            values = [kept.values[i] for i in bucket.indices]
            for view, value in zip(views, values, strict=True):
                view.zero_() if value is None else view.copy_(value)
            marks.copy_(bucket.marks_for([value is not None for value in values]))
        bucket.marks[-1].copy_(bucket.marks_for([self._is_used[i] for i in bucket.indices]))
        faults.at("backward")
        self._sum.start(bucket.buffers, self._scale)

    # -- the end -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send_rest(self) -> None:
        """Send all remaining buckets: the backward pass is over, and no more gradients will arrive."""
        self._armed = False
        for index in [i for bucket in self.buckets for i in bucket.indices if not self._is_ready[i]]:
            self._mark_ready(index)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every parameter has the sum over all shards, scaled, as its gradient."""
        if self._is_single:
            self._finish_single()
        for n, bucket in enumerate(self.buckets):
            self._assign(bucket, f"bucket {n + 1} of {len(self.buckets)}")
        if self.scattered is not None:
            self.scattered.step = self._step
        for index in self._sparse:
            self._parameters[index].grad = self._sum_sparse(index)
        if self.buckets and not self._has_order and self._sum.size > 1:  # else nothing is sent
            self._repack()
        self._reset()

    def _assign(self, bucket: RunBucket, where: str) -> None:
        """Wait for the sum of a bucket, and make it the gradients of its parameters."""
        pieces, marks = bucket.result(where)
        if isinstance(bucket, CompressedBucket):
            is_known = all(bucket.used)
        else:
            rows = self._rows
            is_known = all(self._is_used[i] or any(k.values[i] is not None for k in rows) for i in bucket.indices)
        used = [True] * len(bucket.indices) if is_known else (marks != 0).tolist()
        if self.scattered is not None and isinstance(bucket, ShardBucket):
            self.scattered.keep(bucket.parameters, used, pieces, bucket.align)
            return
        for parameter, piece, is_used in zip(bucket.parameters, pieces, used, strict=True):
            parameter.grad = piece.to(parameter.dtype) if is_used else None

    def _finish_single(self) -> None:
        """Finish with one worker, which has run all shards: the tree has one sum."""
        gradients = self._take_gradients()
        if self.on_gradients is not None:
            self.on_gradients(gradients)
        last = self._round(gradients)
        last.is_lent = self._is_replayed
        self._total = self._adder.add_and_scale(self._chain, last, self._scale())
        for i in self._adder.dense:
            value, parameter = self._total.values[i], self._parameters[i]
            if value is not None:
                narrow = comm_dtype_of(parameter.dtype, self._comm_dtype)
                value = value if narrow is None else value.to(narrow)
                parameter.grad = value if value.dtype is parameter.dtype else value.to(parameter.dtype)

    def _sum_sparse(self, index: int) -> Tensor | None:
        parameter = self._parameters[index]
        if self._is_single:
            parts = [self._total.values[index]]
        else:
            last, parameter.grad = round_gradient(self._leaves[index], parameter.grad, self._comm_dtype), None
            for kept in self._chain:
                last = add_sparse(kept.values[index], last)
            parts = [*(kept.values[index] for kept in self._rows), last]
        total = self._sum.add_sparse([no_rows(parameter) if p is None else p for p in parts], self._scale)
        return total if total._nnz() else None

    def _repack(self) -> None:
        """Pack the buckets again in the order of arrival. See Note [First step]."""
        self._late, self._new_order = agree_on_order(self._sum, self._arrivals, len(self._leaves))
        self._has_order = True
        if not isinstance(self._compression, Residuals):  # whose rows are read once more
            self._pack_again()

    def _pack_again(self) -> None:
        """Pack the buckets in the new order, if there is one."""
        if self._new_order is not None:
            # The gradients are views of the old buckets, whose memory is freed with the last of them.
            self.buckets.pack(self._new_order)
            self._new_order = None

    # -- what compression has lost -----------------------------------------------------------------------------------

    def rounding_error(self) -> float | None:
        """Return the errors by rounding in this step, relative to the norm of the gradient; None: not measured."""
        errors = self._compression.errors if isinstance(self._compression, Rounding) else None
        return errors.close() if errors is not None and errors.is_open else None

    @torch.no_grad()
    def keep_residuals(self, step: int, compressed_gradients: CompressedGradients) -> None:
        """Keep what was not sent of these gradients, in the shards of this worker (step/residuals.py).

        Called when the step is applied. Raises DivergenceError if this worker has not sent its gradients in this step.
        """
        if compressed_gradients and step != self._step:
            raise DivergenceError(f"this worker was in step {self._step}, and applies step {step}; report this")
        self.buckets.keep_residuals(compressed_gradients)
