"""The buckets of one model, sent strictly in order, so that every worker makes the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.ddp.backward_pass import GraphUse, IterationClock, ParameterUsage, ready_twice
from lockstep.ddp.bucket import Bucket, Caps, FillMode, Ownership, pack
from lockstep.ddp.bucket_reduce import Exchange
from lockstep.ddp.replica import Leaf


@dataclass(frozen=True)
class ReducerOptions:
    caps: Caps
    find_unused: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    batched_copy: bool = False


class BucketQueue:
    """Counts which gradients are ready, sends complete buckets, and assigns the results to the parameters."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        *,
        exchange: Exchange,
        usage: ParameterUsage,
        clock: IterationClock,
        options: ReducerOptions,
    ) -> None:
        self._parameters = [leaf.parameter for leaf in leaves]
        self._names = [leaf.name for leaf in leaves]
        self._sparse = [leaf.sparse for leaf in leaves]
        self._exchange = exchange
        self._usage = usage
        self._clock = clock
        self._options = options
        self._on_accelerator = self._parameters[0].device.type != "cpu"
        self.is_batched = options.batched_copy or self._on_accelerator
        self.bucket_dtype: torch.dtype | None = None  # None: that of the parameters
        self.optimizer_in_backward = False  # the communication hook has applied and dropped the gradients
        self.existed = [False] * len(leaves)  # gradients that were there before the running backward pass
        self.buckets_reduced = 0
        self.last_order: list[int] = []  # parameters in the order in which their gradients arrived
        self.has_rebuilt = False  # the buckets are packed in that order
        self.lay_out()

    def configure(self, *, is_shared: bool) -> None:
        """Derive the mode of operation; called again when the group, the hook or `is_shared` changes.

        `is_shared`: another reducer has hooks on the same parameters.
        """
        if self._options.gradient_as_bucket_view:
            self.ownership = Ownership.BUCKET_VIEW
        else:
            copied = self._exchange.hook is not None or is_shared
            self.ownership = Ownership.COPIED if copied else Ownership.HANDED_OVER
        # The mean over one worker is the gradient itself, unless a hook, a Python group or another reducer uses it.
        handed_over = self.ownership is Ownership.HANDED_OVER
        self.nothing_to_send = self._exchange.group.size() == 1 and not self._exchange.is_python and handed_over
        self._frees_buffers = self._on_accelerator and handed_over and not self.nothing_to_send

    # -- layout ------------------------------------------------------------------------------------------------------

    def lay_out(self, order: Sequence[int] | None = None) -> None:
        """Replace the buckets. `order`: that in which gradients arrive, once it is known."""
        caps, options = self._options.caps, self._options
        if order is None:
            limits = caps.before_order_is_known(may_have_unused=options.find_unused and not options.static_graph)
        else:
            limits = caps.once_order_is_known()
        plans = pack(self._parameters, limits, sparse=self._sparse, order=order)
        allocate = self._exchange.allocate
        self.buckets = [
            Bucket(n, p, self._parameters, sparse=self._sparse[p.indices[0]], allocate=allocate)
            for n, p in enumerate(plans)
        ]
        if self.bucket_dtype is not None:
            self.set_dtype(self.bucket_dtype)
        self._home = {
            index: (bucket, slot) for bucket in self.buckets for slot, index in enumerate(bucket.plan.indices)
        }
        self._next = 0
        self.is_ready = [False] * len(self._parameters)

    @property
    def should_rebuild(self) -> bool:
        return self._usage.graph is not GraphUse.SEARCHED and not self.has_rebuilt

    def rebuild(self) -> bool:
        """Pack the buckets again, in the order in which gradients arrived on rank 0. Returns whether that was due."""
        if not self.should_rebuild or len(self.last_order) != len(self._parameters):
            return False
        order = self._exchange.broadcast_order(self.last_order)
        self.has_rebuilt = True
        self.lay_out(order)
        if self._options.gradient_as_bucket_view:
            self._move_gradients_into_views()
        return True

    def _move_gradients_into_views(self) -> None:
        with torch.no_grad():
            for bucket in (b for b in self.buckets if not b.sparse):
                bucket.open(Ownership.BUCKET_VIEW)
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if parameter.grad is not None and parameter.grad.dtype == view.dtype:
                        view.copy_(parameter.grad)
                        parameter.grad = view

    def set_dtype(self, dtype: torch.dtype) -> None:
        self.bucket_dtype = dtype
        for bucket in self.buckets:
            bucket.cast(dtype)

    def arrives_in_order(self, order: Sequence[int]) -> bool:
        """Whether gradients arrived in the order of the buckets, and a hook on the last one of each would be enough."""
        return (
            (self.is_batched or self.nothing_to_send)
            and self.bucket_dtype is None
            and all(type(p) is torch.nn.Parameter for p in self._parameters)
            and not self._options.find_unused
            and (self.nothing_to_send or not any(self.existed))
            and len(order) == len(self._parameters)
            and len({p.device for p in self._parameters}) == 1
            and all([i for i in order if self._home[i][0] is b] == list(b.plan.indices) for b in self.buckets)
        )

    # -- one backward pass -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a backward pass: no gradient is ready, no bucket sent."""
        self._next = 0
        self.buckets_reduced = 0
        self.is_ready = [False] * len(self._parameters)
        self._exchange.begin()
        for bucket in self.buckets:
            bucket.reset()

    def reset(self) -> None:
        """Drop a backward pass that did not end, and the order of gradients."""
        self.has_rebuilt = False
        self.last_order = []
        for bucket in self.buckets:
            bucket.reset()

    def free_unused_buffers(self) -> None:
        if self._frees_buffers:
            for bucket in self.buckets:
                bucket.free_if_unused()

    def record_existing_gradients(self) -> None:
        self.existed = [p.grad is not None for p in self._parameters]

    def mark_ready(self, index: int) -> None:
        """The gradient of this parameter is complete: copy it into its bucket. Raises if it was complete before."""
        if self.is_ready[index]:
            raise RuntimeError(ready_twice(index, self._names[index], self._options.find_unused))
        self.is_ready[index] = True
        bucket, slot = self._home[index]
        if not (self.is_batched or bucket.sparse or self.nothing_to_send or self._is_skipped(bucket)):
            bucket.copy_in(slot, self._fill_mode(), existed=self.existed[index])
        bucket.pending -= 1

    def mark_bucket_ready(self, last: int) -> bool:
        """With the gradient of `last`, all of its bucket are complete. Only if `is_batched`, or with nothing to send.

        Returns False, and marks none, if one of them is missing.
        """
        bucket = self._home[last][0]
        if any(p.grad is None for p in bucket.parameters):
            return False
        bucket.pending = 0
        for i in bucket.plan.indices:
            self.is_ready[i] = True
        return True

    def mark_rest_ready(self, reached: Sequence[bool]) -> None:
        """At the end of a backward pass. `reached`: by parameter, whether the pass has computed its gradient."""
        for i, ready in enumerate(self.is_ready):
            if not ready and (reached[i] or self._parameters[i].grad is not None):
                self.mark_ready(i)

    def send_ready(self) -> bool:
        """Send complete buckets, strictly in order. Returns True if the last one has just been sent."""
        if self._next == len(self.buckets):
            return False
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._send(self.buckets[self._next])
            self._next += 1
        return self._next == len(self.buckets)

    def _send(self, bucket: Bucket) -> None:
        if bucket.number == 0:
            self._clock.mark("comm_start")
        bucket.sent = None
        if self.nothing_to_send or self._is_skipped(bucket):
            return
        self.buckets_reduced += 1
        if self.is_batched and not bucket.sparse:
            bucket.copy_in_all(self._fill_mode(), [self.existed[i] for i in bucket.plan.indices])
        self._exchange.send(bucket, is_last=bucket.number == len(self.buckets) - 1)

    def _fill_mode(self) -> FillMode:
        return self._exchange.fill_mode(self.ownership, divide_flat=self._options.batched_copy)

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self._options.skip_unused and set(bucket.plan.indices) <= set(self._usage.unused)

    # -- results -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all buckets, and assign the reduced gradients.

        A parameter that no worker has used keeps its gradient as it was.
        """
        if not self.nothing_to_send:
            for bucket in self.buckets:
                self._finish(bucket)

    def _finish(self, bucket: Bucket) -> None:
        if bucket.sent is None:
            if not bucket.sparse:
                bucket.restore()
            return
        result = self._exchange.result(bucket, self._location(bucket))
        bucket.sent = None
        if bucket.sparse:
            assert bucket.flat is not None
            bucket.flat.copy_(result)
            if bucket.parameters[0].grad is None and not self._is_untouched(bucket.plan.indices[0]):
                bucket.parameters[0].grad = bucket.flat
            bucket.flat = None
            return
        if self.optimizer_in_backward:
            return
        untouched = [self._is_untouched(i) for i in bucket.plan.indices]
        late = bucket.assign_gradients(result, self.ownership, untouched)
        if late:
            index = bucket.plan.indices[late[0]]
            raise RuntimeError(ready_twice(index, self._names[index], self._options.find_unused))

    def _is_untouched(self, index: int) -> bool:
        return self._usage.graph is not GraphUse.ALL and self._usage.is_unused_everywhere(index)

    def _location(self, bucket: Bucket) -> str:
        first, last = self._names[bucket.plan.indices[0]], self._names[bucket.plan.indices[-1]]
        span = first if first == last else f"{first} .. {last}"
        return f"backward pass {self._clock.iterations}, bucket {bucket.number + 1} of {len(self.buckets)} ({span})"

    def restore_unsent(self) -> None:
        """After an error: gradients that were accumulated before this backward pass get their tensors back."""
        for bucket in self.buckets:
            if bucket.sent is None and not bucket.sparse:
                bucket.restore()
