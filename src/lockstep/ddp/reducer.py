"""Ready counts -> collectives -> gradients.

Autograd tells the reducer which gradients have arrived. When the last one of a bucket has, the bucket is sent, always
in the order of the buckets, so that every worker makes the same calls. When the backward pass ends, the reducer waits
for what is still on its way and lets every parameter have the mean.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.ddp import autograd_graph, backward_errors, grad_hooks
from lockstep.ddp.bucket import Bucket, Caps, Filling, Ownership, Pack, pack
from lockstep.ddp.bucket_reduce import Exchange
from lockstep.ddp.grad_hooks import Ears, Listening
from lockstep.ddp.logging_data import FIRST_SAMPLED, Clock
from lockstep.ddp.unused_parameters import Usage

if TYPE_CHECKING:
    from lockstep.ddp.logging_data import Log

LOOK_EVERY = 16  # steps, in a world of one
STABLE_STEPS = 2  # equal steps before only the last parameter of each bucket is listened to


class Phase(Enum):
    IDLE = auto()  # gradients that arrive are the user's own: no_sync, or the bare module
    ARMED = auto()  # a forward was made whose backward will be reduced
    REDUCING = auto()  # its first gradient has arrived


@dataclass(frozen=True)
class Settings:
    caps: Caps
    find_unused: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    batched_copy: bool = False


@dataclass
class Pass:
    """One forward: whether the backward pass through it has been reduced."""

    reduced: bool = False


class Reducer:
    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        names: Sequence[str],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        settings: Settings,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.sparse = list(sparse)
        self.settings = settings
        self.static_graph = False
        self.iterations = 0
        self.sample_rate = 100
        self.clock = Clock()
        self.has_rebuilt = False
        self.last_order: list[int] = []
        self.buckets_reduced = 0
        self.is_sampled = False
        self.is_shared = False  # another reducer listens to the same parameters
        self._log: weakref.ref[Log] | None = None
        self._lock = threading.Lock()  # a model over several devices has a backward thread for each
        self._optimizer_in_backward = False
        self._bucket_dtype: torch.dtype | None = None
        self._futures: list[Future[Any]] = []
        self.device = self.parameters[0].device
        self.on_accelerator = self.device.type != "cpu"
        self.is_batched = settings.batched_copy or self.on_accelerator
        self.exchange = Exchange(group, self.device)
        self.usage = Usage(len(self.parameters), self.device)
        self._ears = Ears(self.parameters)

        count = len(self.parameters)
        self._uses: list[int] | None = None  # static graph: how often each parameter is reached, once learned
        self.phase = Phase.IDLE
        self._passes: list[Pass] = []  # forwards that the running backward goes through
        self._stale = False  # the running backward goes through a forward that was reduced before
        self._started = False  # the running backward has been seen from its start
        self._armed_again = False
        self._send_at_end = False
        self._existed = [False] * count  # gradients that were there before the running backward
        self._reached: list[bool] | None = None
        self._order: list[int] = []
        self._steady_steps = 0
        self.listening = Listening.TO_ALL
        may_have_unused = settings.find_unused and not settings.static_graph
        limits = settings.caps.before_order_is_known(may_have_unused=may_have_unused)
        self._lay_out(pack(self.parameters, limits, sparse=self.sparse))
        self._listen_to_all()
        others = grad_hooks.announce(self, self.parameters)
        for reducer in {self, *others} if others else ():
            reducer.is_shared = True
            reducer._decide()
        self._decide()

    def __del__(self) -> None:
        self._ears.stop()

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup:
        return self.exchange.group

    def _decide(self) -> None:
        """What follows from the settings, the group and the hook; again whenever one of them changes."""
        if self.settings.gradient_as_bucket_view:
            self.ownership = Ownership.BUCKET_VIEW
        else:
            copied = self.exchange.has_hook or self.is_shared
            self.ownership = Ownership.COPIED if copied else Ownership.HANDED_OVER
        # The mean over one worker is the gradient itself, if nobody wants to see it pass by.
        handed_over = self.ownership is Ownership.HANDED_OVER
        self.nothing_to_send = self.group.size() == 1 and not self.exchange.is_python and handed_over
        self.lets_go = self.on_accelerator and handed_over and not self.nothing_to_send
        self._stop_few()

    def _lay_out(self, plan: Sequence[Pack]) -> None:
        self.buckets = [
            Bucket(
                n,
                p,
                self.parameters,
                sparse=self.sparse[p.indices[0]] and len(p.indices) == 1,
                allocate=self.exchange.allocate,
            )
            for n, p in enumerate(plan)
        ]
        if self._bucket_dtype is not None:
            for bucket in self.buckets:
                bucket.cast(self._bucket_dtype)
        self._home = {
            index: (bucket, slot) for bucket in self.buckets for slot, index in enumerate(bucket.plan.indices)
        }
        self._next = 0
        self._is_ready = [False] * len(self.parameters)
        self._stop_few()

    @property
    def learns_static_graph(self) -> bool:
        return self.static_graph and self._uses is None

    @property
    def tracks_use(self) -> bool:
        return self.learns_static_graph or (self.settings.find_unused and not self.static_graph)

    # -- listening to autograd ---------------------------------------------------------------------------------------

    def _listen_to_all(self) -> None:
        self._ears.listen(range(len(self.parameters)), self._gradient_arrived)
        self.listening = Listening.TO_ALL

    def _listen_to_few(self) -> None:
        """See Note [Two ways to listen] in listen.py."""
        self._ears.renew()
        last = [b.plan.indices[-1] for b in self.buckets]
        if self.nothing_to_send:
            self._ears.listen(last[-1:], self._very_last_arrived)
            self.listening = Listening.TO_VERY_LAST
        else:
            self._ears.listen(last, self._last_of_bucket_arrived)
            self.listening = Listening.TO_LAST_OF_BUCKET

    def _stop_few(self) -> None:
        self._steady_steps = -STABLE_STEPS
        if self.listening is not Listening.TO_ALL:
            self._listen_to_all()

    def _gradient_arrived(self, index: int) -> None:
        self._guarded(self._on_gradient, index)

    def _last_of_bucket_arrived(self, index: int) -> None:
        self._guarded(self._on_last_of_bucket, index)

    def _very_last_arrived(self, index: int) -> None:
        self._guarded(self._on_very_last, index)

    def _guarded(self, call: Callable[[int], None], index: int) -> None:
        with self._lock:
            try:
                if torch.is_grad_enabled():  # backward(create_graph=True)
                    with torch.no_grad():
                        call(index)
                else:
                    call(index)
            except Exception as error:
                self._note(error)
                raise

    # -- one iteration -----------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        self.iterations = n = self.iterations + 1
        self.is_sampled = n <= FIRST_SAMPLED or n % self.sample_rate == 0
        if self.is_sampled:
            self.clock = Clock()
            self.clock.mark("forward_start")
        if self.lets_go:
            for bucket in self.buckets:
                bucket.let_go()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The next backward pass will be reduced."""
        if self.is_sampled:
            self.clock.mark("backward_start")
        if self.listening is Listening.TO_VERY_LAST:
            self.phase = Phase.ARMED
            return
        self._arm()
        seen = Pass()
        us = weakref.ref(self)

        def on_output_reached(_grads: Any) -> None:
            reducer = us()
            if reducer is not None:
                reducer._backward_starts(seen)

        watched = False
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(on_output_reached)
                watched = True
        if not watched:  # no sign when a backward pass starts, so look now
            self._existed = [p.grad is not None for p in self.parameters]

    def _arm(self) -> None:
        self.phase = Phase.ARMED
        self._next = 0
        self.buckets_reduced = 0
        self._order = []
        self._is_ready = [False] * len(self.parameters)
        self._uses_left = list(self._uses or ())
        self._reached = None
        self.exchange.begin()
        self._started = self._send_at_end = self._armed_again = False
        for bucket in self.buckets:
            bucket.reset()

    def _backward_starts(self, seen: Pass) -> None:
        """A backward pass has come to an output of our forward. No gradient of ours has been computed yet.

        It may also be autograd.grad(), which brings us no gradient: so only look, and decide at the first gradient.
        """
        with self._lock:
            if seen.reduced:
                self._stale = True
                autograd_graph.when_backward_ends(self._forget_stale)
                return
            if self.phase is Phase.IDLE:
                # Another forward came between, and its backward was reduced first. This one is due as well.
                self._arm()
                self._armed_again = True
            self._passes.append(seen)
            if self._started or self.phase is Phase.REDUCING:
                return
            self._started = True
            autograd_graph.when_backward_ends(self._backward_ended)
            self._existed = [p.grad is not None for p in self.parameters]
            if self.settings.find_unused and not self.static_graph:
                self._reached = self._search_unused()
            if self.listening is Listening.TO_LAST_OF_BUCKET and not self._few_will_do():
                self._stop_few()
            if self.lets_go:
                for bucket in self.buckets:
                    bucket.let_go()

    def _few_will_do(self) -> bool:
        return not any(self._existed) and all(autograd_graph.will_be_reached(list(self._ears.nodes.values())))

    def _search_unused(self) -> list[bool]:
        with autograd_graph.profiled("search_unused_parameters"):
            return autograd_graph.will_be_reached(list(self._ears.nodes.values()))

    def _forget_stale(self) -> None:
        self._stale = False

    def _backward_ended(self) -> None:
        self._started = False
        if self.phase is Phase.ARMED:  # it was autograd.grad(): no gradient came
            self._passes = []
            if self._armed_again:
                self.phase = Phase.IDLE
        elif self.phase is Phase.REDUCING and self.learns_static_graph:
            self._delay_all_reduce()
        elif self.phase is Phase.REDUCING and self._send_at_end:
            self._send_all_that_came()

    def _on_gradient(self, index: int) -> None:
        if self.tracks_use and self.parameters[index].grad is not None:
            self.usage.note(index)
        if not self._is_expected():
            return
        if self.learns_static_graph:
            self._static_counts[index] += 1
            return
        if self._uses is not None:
            self._uses_left[index] -= 1
            if self._uses_left[index] < 0:
                raise RuntimeError(backward_errors.graph_changed(self.names[index]))
            if self._uses_left[index] > 0:
                return
        if self._send_at_end:
            return
        self._order.append(index)
        self._mark_ready(index)
        if self._send_what_is_ready():
            autograd_graph.when_backward_ends(self._finish)

    def _on_last_of_bucket(self, index: int) -> None:
        if not self._is_expected():
            return
        bucket, _ = self._home[index]
        if not self._started or any(self.parameters[i].grad is None for i in bucket.plan.indices):
            self._surprised()
            return
        bucket.pending = 0
        for i in bucket.plan.indices:
            self._is_ready[i] = True
        if self._send_what_is_ready():
            autograd_graph.when_backward_ends(self._finish)

    def _on_very_last(self, _index: int) -> None:
        """A world of one: gradients are where they belong as they come."""
        if self.phase is not Phase.ARMED:
            return
        self.phase = Phase.IDLE
        if self.is_sampled:
            for event in ("comm_start", "backward_end", "comm_end"):
                self.clock.mark(event)
        if self.iterations % LOOK_EVERY == 0 and any(p.grad is None for p in self.parameters):
            self._stop_few()  # unused, or used up by an optimiser inside the backward pass: all will tell

    def _surprised(self) -> None:
        """Gradients come in another order than before: only the end will tell what has come and what has not."""
        self._stop_few()
        self._send_at_end = True
        self._reached = autograd_graph.will_be_reached([autograd_graph.accumulator(p) for p in self.parameters])
        if not self._started:
            self._started = True
            autograd_graph.when_backward_ends(self._backward_ended)

    def _send_all_that_came(self) -> None:
        assert self._reached is not None
        with torch.no_grad():
            for i, ready in enumerate(self._is_ready):
                if not ready and (self._reached[i] or self.parameters[i].grad is not None):
                    self._mark_ready(i)
            if self._send_what_is_ready():
                self._finish()

    def _is_expected(self) -> bool:
        """Whether this gradient belongs to a backward pass that is to be reduced; its first one starts that."""
        if self.phase is Phase.IDLE:
            if self._stale and not self.nothing_to_send:
                self._stale = False  # this ends the backward pass, so nobody else will forget it
                raise RuntimeError(backward_errors.BACKWARD_TWICE)
            return False
        if self.phase is Phase.ARMED:
            self.phase = Phase.REDUCING
            self.exchange.watch.enter()
            if self.learns_static_graph:
                self._static_counts = [0] * len(self.parameters)
                if not self._started:
                    self._started = True
                    autograd_graph.when_backward_ends(self._backward_ended)
                return True
            if not self.static_graph and self.settings.find_unused:
                reached = self._reached if self._reached is not None else self._search_unused()
                self.usage.set_unused([i for i, yes in enumerate(reached) if not yes])
            for i in self.usage.unused:
                self._mark_ready(i)
        return True

    def _mark_ready(self, index: int) -> None:
        if self._is_ready[index]:
            raise RuntimeError(backward_errors.ready_twice(index, self.names[index], self.settings.find_unused))
        self._is_ready[index] = True
        bucket, slot = self._home[index]
        if not (self.is_batched or bucket.sparse or self.nothing_to_send or self._is_skipped(bucket)):
            bucket.take(slot, self._filling(), existed=self._existed[index])
        bucket.pending -= 1

    # -- sending -----------------------------------------------------------------------------------------------------

    def _filling(self) -> Filling:
        return self.exchange.filling(self.ownership, divide_flat=self.settings.batched_copy)

    def _send_what_is_ready(self) -> bool:
        """Send complete buckets, strictly in order. True when the last one has gone."""
        if self._next == len(self.buckets):
            return False
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._send(self.buckets[self._next])
            self._next += 1
        if self._next < len(self.buckets):
            return False
        if self.settings.find_unused and not self.static_graph:
            self.usage.share(self.group)
        return True

    def _send(self, bucket: Bucket) -> None:
        if bucket.number == 0 and self.is_sampled:
            self.clock.mark("comm_start")
        bucket.sent = None
        if self.nothing_to_send or self._is_skipped(bucket):
            return
        self.buckets_reduced += 1
        if self.is_batched and not bucket.sparse:
            bucket.fill(self._filling(), [self._existed[i] for i in bucket.plan.indices])
        self.exchange.send(bucket, is_last=bucket.number == len(self.buckets) - 1)

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self.settings.skip_unused and set(bucket.plan.indices) <= set(self.usage.unused)

    def _delay_all_reduce(self) -> None:
        """End of the first backward pass of a static graph: now it is known how often each parameter is reached."""
        if not self.learns_static_graph or self.phase is not Phase.REDUCING:
            return
        with torch.no_grad():
            self.usage.share(self.group)
            self.usage.unused = [i for i, n in enumerate(self._static_counts) if n == 0]
            for i in range(len(self.parameters)):
                self._mark_ready(i)
            for bucket in self.buckets:
                self._send(bucket)
            self._next = len(self.buckets)
            self._finalize()
            self._uses = self._static_counts

    # -- the end of a backward pass ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self.is_sampled:
            self.clock.mark("backward_end")
        if self._uses is not None:
            self._order += self.usage.unused
        with torch.no_grad():
            self._finalize()
        self._watch_for_steady_order()

    def _finalize(self) -> None:
        self.phase = Phase.IDLE
        self._started = False
        for seen in self._passes:
            seen.reduced = True
        self._passes = []
        try:
            with self._noting_errors():
                for bucket in self.buckets:
                    self._conclude(bucket)
                for future in self._futures:
                    future.wait()
        finally:
            self.exchange.watch.leave()
            self._futures = []
            self.exchange.join_work = None
        self.usage.wait()  # also if we did not have to ask: the next one must not overtake it
        if self.learns_static_graph:
            self.usage.counts()  # asked again in every step, when the map may be gone
        elif not self.static_graph:
            self.usage.forget()
        if self._order:
            self.last_order = list(self._order)
        if self.is_sampled:
            self.clock.at.setdefault("backward_end", self.clock.at.get("comm_start", 0))
            self.clock.mark("comm_end")

    def _conclude(self, bucket: Bucket) -> None:
        if self.nothing_to_send:
            return
        if bucket.sent is None:
            if not bucket.sparse:
                bucket.restore()
            return
        result = self.exchange.result(bucket, self._whereabouts(bucket))
        bucket.sent = None
        if bucket.sparse:
            assert bucket.flat is not None
            bucket.flat.copy_(result)
            if bucket.parameters[0].grad is None and not self._nobody_used(bucket.plan.indices[0]):
                bucket.parameters[0].grad = bucket.flat
            bucket.flat = None
            return
        if self._optimizer_in_backward:
            return
        untouched = [self._nobody_used(i) for i in bucket.plan.indices]
        late = bucket.give_back(result, self.ownership, untouched)
        if late:
            index = bucket.plan.indices[late[0]]
            raise RuntimeError(backward_errors.ready_twice(index, self.names[index], self.settings.find_unused))

    def _nobody_used(self, index: int) -> bool:
        return (self.settings.find_unused or self.static_graph) and self.usage.by_nobody(index)

    def _whereabouts(self, bucket: Bucket) -> str:
        first, last = self.names[bucket.plan.indices[0]], self.names[bucket.plan.indices[-1]]
        span = first if first == last else f"{first} .. {last}"
        return f"backward pass {self.iterations}, bucket {bucket.number + 1} of {len(self.buckets)} ({span})"

    def _watch_for_steady_order(self) -> None:
        steady = (
            (self.is_batched or self.nothing_to_send)
            and self.has_rebuilt
            and self.listening is Listening.TO_ALL
            and self._bucket_dtype is None
            and all(type(p) is torch.nn.Parameter for p in self.parameters)
            and not self.settings.find_unused
            and (self.nothing_to_send or not any(self._existed))
            and (self._uses is None or all(n == 1 for n in self._uses))
            and len(self._order) == len(self.parameters)
            and len({p.device for p in self.parameters}) == 1
            and all(self._order_in(b) == list(b.plan.indices) for b in self.buckets)
        )
        self._steady_steps = self._steady_steps + 1 if steady else min(self._steady_steps, 0)
        if self._steady_steps >= STABLE_STEPS:
            self._steady_steps = 0
            self._listen_to_few()

    def _order_in(self, bucket: Bucket) -> list[int]:
        return [i for i in self._order if self._home[i][0] is bucket]

    # -- rebuilding --------------------------------------------------------------------------------------------------

    @property
    def should_rebuild(self) -> bool:
        return (self.static_graph or not self.settings.find_unused) and not self.has_rebuilt

    def rebuild(self) -> bool:
        """Before the second forward: pack the buckets anew, in the order in which gradients arrived on rank 0."""
        self.check_finished()
        if not self.should_rebuild or len(self.last_order) != len(self.parameters):
            return False
        order = torch.tensor(self.last_order, dtype=torch.int64, device=self.parameters[0].device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self.exchange.watch.explains("the exchange of the order of gradients"):
            wait_without_limit(self.group.broadcast([order], options))
        self.has_rebuilt = True
        limits = self.settings.caps.once_order_is_known()
        self._lay_out(pack(self.parameters, limits, sparse=self.sparse, order=order.tolist()))
        if self.settings.gradient_as_bucket_view:
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

    def check_finished(self) -> None:
        if self.phase is not Phase.REDUCING:
            return
        for bucket in self.buckets:
            if bucket.sent is None and not bucket.sparse:
                bucket.restore()  # what was accumulated before is the user's, whatever went wrong
        missing = [i for i, ready in enumerate(self._is_ready) if not ready]
        with self._noting_errors():
            raise RuntimeError(
                backward_errors.unfinished(
                    rank=self.group.rank(),
                    missing={i: self.names[i] for i in missing},
                    find_unused=self.settings.find_unused,
                    static_graph=self.static_graph,
                )
            )

    def reset(self) -> None:
        """Forget a backward pass that did not end, and the order of gradients."""
        self.phase = Phase.IDLE
        self._stop_few()
        self.has_rebuilt = False
        self.last_order = []
        self._passes, self._futures, self.exchange.join_work = [], [], None
        self.usage.forget()
        for bucket in self.buckets:
            bucket.reset()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """An error that leaves here can be read in the log as well."""
        try:
            yield
        except Exception as error:
            self._note(error)
            raise

    def _note(self, error: Exception) -> None:
        log = self._log() if self._log is not None else None
        if log is not None:
            log.error(error)
