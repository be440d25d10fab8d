"""The reducer: averages gradients over the workers while the backward pass runs.

Autograd hooks report which gradients have arrived. When the last one of a bucket has, the bucket is sent, always in the
order of the buckets, so that every worker makes the same calls. When the backward pass ends, the reducer waits for the
collectives that are still running and assigns the mean to every parameter's `.grad`.

`autograd_graph.py` registers the hooks; `bucket_queue.py` fills and sends the buckets; `backward_pass.py` holds the
state of the running backward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep._torch import call_when_backward_ends
from lockstep.ddp import autograd_graph
from lockstep.ddp.autograd_graph import HookMode, ReducerHooks
from lockstep.ddp.backward_pass import (
    BackwardPass,
    ForwardPass,
    GraphUse,
    IterationClock,
    ParameterUsage,
    PassPhase,
    unfinished,
)
from lockstep.ddp.bucket_queue import BucketQueue, ReducerOptions
from lockstep.ddp.bucket_reduce import Exchange
from lockstep.ddp.replica import Leaf

CHECK_EVERY = 16  # steps between two checks for missing gradients, with one worker


class Reducer:
    def __init__(self, leaves: Sequence[Leaf], *, group: dist.ProcessGroup, options: ReducerOptions) -> None:
        self.parameters = [leaf.parameter for leaf in leaves]
        self.names = [leaf.name for leaf in leaves]
        self.options = options
        self.clock = IterationClock()
        self.is_shared = False  # another reducer has hooks on the same parameters
        self.exchange = Exchange(group, self.parameters[0].device)
        self.usage = ParameterUsage(len(leaves), self.parameters[0].device, find_unused=options.find_unused)
        self.queue = BucketQueue(leaves, exchange=self.exchange, usage=self.usage, clock=self.clock, options=options)
        self.futures: list[Future[Any]] = []  # of buffer hooks, which the end of the backward pass waits for
        self.error_log: weakref.WeakMethod[Callable[[Exception], None]] | None = None  # called with each error
        self._lock = threading.Lock()  # autograd runs one backward thread per device of a model over several devices
        self._pass = BackwardPass()
        self.hooks = ReducerHooks(self.parameters, self.gradient_arrived)
        others = autograd_graph.register_listener(self, self.parameters)
        for reducer in {self, *others} if others else ():
            reducer.is_shared = True
            reducer.configure()
        self.configure()

    def __del__(self) -> None:
        self.hooks.remove()

    def configure(self) -> None:
        """Called again when the group, the communication hook or `is_shared` has changed."""
        self.queue.configure(is_shared=self.is_shared)
        self.hooks.return_to_all()

    # -- one iteration -----------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        self.clock.begin()
        self.queue.free_unused_buffers()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The next backward pass will be reduced. `outputs` are the tensors that the forward returned."""
        self.clock.mark("backward_start")
        if self.hooks.mode is HookMode.LAST_PARAMETER:
            self._pass.phase = PassPhase.ARMED
            return
        self._arm()
        if not autograd_graph.call_when_reached(outputs, self._backward_started, ForwardPass()):
            self.queue.record_existing_gradients()  # nothing will report the start of the backward pass, so look now

    def _arm(self) -> None:
        self._pass.arm(self.usage.uses)
        self.queue.begin()

    def _backward_started(self, forward: ForwardPass) -> None:
        """A backward pass has reached an output of `forward`; no gradient of our parameters has been computed yet.

        It may be autograd.grad(), which accumulates no gradient: so only look here, and decide at the first gradient.
        """
        with self._lock:
            current = self._pass
            if forward.reduced:
                current.see_stale_start()
                return
            if current.phase is PassPhase.IDLE:
                # The backward pass of a later forward was reduced first. This one is to be reduced as well.
                self._arm()
                current.armed_late = True
            current.forwards.append(forward)
            if current.phase is PassPhase.REDUCING or not current.see_start(self._backward_ended):
                return
            self.queue.record_existing_gradients()
            if self.usage.graph is GraphUse.SEARCHED:
                current.reached = self._search_unused()
            if self.hooks.mode is HookMode.LAST_OF_BUCKET:
                few_suffice = not any(self.queue.existed) and all(self.hooks.will_be_reached())
                if not few_suffice:
                    self.hooks.return_to_all()
            self.queue.free_unused_buffers()

    def _search_unused(self) -> list[bool]:
        with autograd_graph.profiled("search_unused_parameters"):
            return self.hooks.will_be_reached()

    def _backward_ended(self) -> None:
        current = self._pass
        current.start_seen = False
        if current.phase is PassPhase.ARMED:
            current.end_without_gradients()
        elif current.phase is PassPhase.REDUCING and self.usage.graph is GraphUse.LEARNING:
            self._send_all_of_learned_graph()
        elif current.phase is PassPhase.REDUCING and current.send_at_end:
            self._send_all_at_end()

    # -- gradients that arrive ---------------------------------------------------------------------------------------

    def gradient_arrived(self, index: int) -> None:
        """Called by the autograd hooks. Errors are also recorded in the logging data."""
        with self._lock:
            try:
                if torch.is_grad_enabled():  # backward(create_graph=True)
                    with torch.no_grad():
                        self._on_gradient(index)
                else:
                    self._on_gradient(index)
            except Exception as error:
                self._log_error(error)
                raise

    def _on_gradient(self, index: int) -> None:
        if self.hooks.mode is not HookMode.ALL_PARAMETERS:
            if self.hooks.mode is HookMode.LAST_OF_BUCKET:
                self._on_last_of_bucket(index)
            else:
                self._on_last_parameter()
            return
        current, usage = self._pass, self.usage
        if usage.is_tracked and self.parameters[index].grad is not None:
            usage.mark_used(index)
        if current.phase is not PassPhase.REDUCING and not self._start_reducing():
            return
        if usage.graph is GraphUse.LEARNING:
            current.static_counts[index] += 1
            return
        if usage.graph is GraphUse.LEARNED and not current.is_last_use(index, self.names):
            return
        if current.send_at_end:
            return
        current.order.append(index)
        queue = self.queue
        queue.mark_ready(index)
        if queue.send_ready():
            self._after_last_bucket()

    def _on_last_of_bucket(self, index: int) -> None:
        current = self._pass
        if current.phase is not PassPhase.REDUCING and not self._start_reducing():
            return
        if current.start_seen and self.queue.mark_bucket_ready(index):
            if self.queue.send_ready():
                self._after_last_bucket()
            return
        # Gradients arrive in another order than before: only at the end is it known which ones have arrived.
        self.hooks.return_to_all()
        current.send_at_end = True
        nodes = [autograd_graph.accumulator(p) for p in self.parameters]
        current.reached = autograd_graph.will_be_reached(nodes)
        current.see_start(self._backward_ended)

    def _on_last_parameter(self) -> None:
        """With one worker: the gradients are final as they arrive."""
        if self._pass.phase is not PassPhase.ARMED:
            return
        self._pass.phase = PassPhase.IDLE
        for event in ("comm_start", "backward_end", "comm_end"):
            self.clock.mark(event)
        if self.clock.iterations % CHECK_EVERY == 0 and any(p.grad is None for p in self.parameters):
            self.hooks.return_to_all()  # some are unused, or an optimiser inside the backward pass has dropped them

    def _start_reducing(self) -> bool:
        """At a gradient outside REDUCING. Returns whether it belongs to a backward pass that is to be reduced."""
        current, usage = self._pass, self.usage
        if not current.begin_reducing(stale_is_error=not self.queue.nothing_to_send):
            return False
        self.exchange.watch.enter()
        if not current.start_seen and self.hooks.mode is HookMode.ALL_PARAMETERS:
            self.queue.record_existing_gradients()  # the loss is not computed from an output: look now
        if usage.graph is GraphUse.LEARNING:
            current.static_counts = [0] * len(self.parameters)
            current.see_start(self._backward_ended)
            return True
        if usage.graph is GraphUse.SEARCHED:
            usage.set_unused(current.reached if current.reached is not None else self._search_unused())
        for i in usage.unused:
            self.queue.mark_ready(i)
        return True

    def _after_last_bucket(self) -> None:
        self.usage.share(self.exchange.group)
        call_when_backward_ends(self._finish)

    # -- the end of a backward pass ----------------------------------------------------------------------------------

    def _send_all_at_end(self) -> None:
        assert self._pass.reached is not None
        with torch.no_grad():
            self.queue.mark_rest_ready(self._pass.reached)
            if self.queue.send_ready():
                self.usage.share(self.exchange.group)
                self._finish()

    def _send_all_of_learned_graph(self) -> None:
        """At the end of the first backward pass of a static graph the gradients per parameter are known."""
        counts = self._pass.static_counts
        with torch.no_grad():
            self.usage.share(self.exchange.group)
            self.usage.unused = [i for i, n in enumerate(counts) if n == 0]
            for i in range(len(self.parameters)):
                self.queue.mark_ready(i)
            self.queue.send_ready()
            self._finalize()
            self.usage.uses = counts
            self.usage.set_graph(GraphUse.LEARNED)

    def _finish(self) -> None:
        self.clock.mark("backward_end")
        order, queue, usage = self._pass.order, self.queue, self.usage
        if usage.graph is GraphUse.LEARNED:
            order += usage.unused
        with torch.no_grad():
            self._finalize()
        steady = (
            queue.has_rebuilt
            and self.hooks.mode is HookMode.ALL_PARAMETERS
            and all(n == 1 for n in usage.uses)
            and queue.arrives_in_order(order)
        )
        if self.hooks.count_step(steady=steady):
            last = [b.plan.indices[-1] for b in queue.buckets]
            if queue.nothing_to_send:
                self.hooks.keep_hooks_on(HookMode.LAST_PARAMETER, last[-1:])
            else:
                self.hooks.keep_hooks_on(HookMode.LAST_OF_BUCKET, last)

    def _finalize(self) -> None:
        self._pass.end()
        try:
            with self.logging_errors():
                self.queue.finish()
                for future in self.futures:
                    future.wait()
        finally:
            self.exchange.watch.leave()
            self.futures = []
            self.exchange.join_work = None
        self.usage.finish()
        if self._pass.order:
            self.queue.last_order = list(self._pass.order)
        self.clock.mark_end()

    # -- between two iterations --------------------------------------------------------------------------------------

    def rebuild(self) -> bool:
        """Before the second forward: pack the buckets again, in the order in which gradients arrived on rank 0."""
        self.check_finished()
        if not self.queue.rebuild():
            return False
        self.hooks.return_to_all()
        return True

    def check_finished(self) -> None:
        """Raise if the last backward pass began and did not give every parameter a gradient."""
        if self._pass.phase is not PassPhase.REDUCING:
            return
        self.queue.restore_unsent()
        message = unfinished(
            rank=self.exchange.group.rank(),
            missing={i: self.names[i] for i, ready in enumerate(self.queue.is_ready) if not ready},
            find_unused=self.options.find_unused,
            static_graph=self.usage.is_static,
        )
        with self.logging_errors():
            raise RuntimeError(message)

    def reset(self) -> None:
        """Drop a backward pass that did not end, and the order of gradients."""
        self._pass.phase = PassPhase.IDLE
        self.hooks.return_to_all()
        self._pass.forwards, self.futures, self.exchange.join_work = [], [], None
        self.usage.clear()
        self.queue.reset()

    @contextmanager
    def logging_errors(self) -> Iterator[None]:
        """Errors that leave this context are also recorded in the logging data."""
        try:
            yield
        except Exception as error:
            self._log_error(error)
            raise

    def _log_error(self, error: Exception) -> None:
        if self.error_log is not None and (log := self.error_log()) is not None:
            log(error)
