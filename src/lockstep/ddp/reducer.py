"""The reducer: averages gradients over the workers while the backward pass runs.

Autograd hooks report which gradients have arrived. When the last one of a bucket has, the bucket is sent, always in the
order of the buckets, so that every worker makes the same calls. When the backward pass ends, the reducer waits for the
collectives that are still running and assigns the mean to every parameter's `.grad`.

`bucket_queue.py` fills and sends the buckets; `backward_pass.py` holds the state of the running backward pass.
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

from lockstep.ddp import autograd_graph, backward_errors, grad_hooks
from lockstep.ddp.backward_pass import BackwardPass, ForwardPass, PassPhase
from lockstep.ddp.bucket import Bucket, pack
from lockstep.ddp.bucket_queue import BucketQueue, ReducerOptions
from lockstep.ddp.bucket_reduce import Exchange
from lockstep.ddp.grad_hooks import GradHooks, HookMode
from lockstep.ddp.logging_data import FIRST_SAMPLED, DDPLogger, IterationClock
from lockstep.ddp.unused_parameters import ParameterUsage

CHECK_EVERY = 16  # steps between two checks for missing gradients, with one worker
STABLE_STEPS = 2  # steps with the same order before only the last parameter of each bucket keeps its hook


class Reducer:
    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        names: Sequence[str],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        options: ReducerOptions,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.sparse = list(sparse)
        self.options = options
        self.static_graph = False
        self.iterations = 0
        self.sample_rate = 100
        self.clock = IterationClock()
        self.has_rebuilt = False
        self.last_order: list[int] = []
        self.is_sampled = False
        self.is_shared = False  # another reducer has hooks on the same parameters
        self.device = self.parameters[0].device
        self.exchange = Exchange(group, self.device)
        self.usage = ParameterUsage(len(self.parameters), self.device)
        self.queue = BucketQueue(
            self.parameters, names=self.names, sparse=sparse, exchange=self.exchange, usage=self.usage, options=options
        )
        self.hook_mode = HookMode.ALL_PARAMETERS
        self._grad_hooks = GradHooks(self.parameters)
        self._logger: weakref.ref[DDPLogger] | None = None
        self._lock = threading.Lock()  # autograd runs one backward thread per device of a model over several devices
        self._futures: list[Future[Any]] = []
        self._uses: list[int] | None = None  # static graph: gradients per parameter and pass, once learned
        self._pass = BackwardPass()
        self._steady_steps = 0

        may_have_unused = options.find_unused and not options.static_graph
        limits = options.caps.before_order_is_known(may_have_unused=may_have_unused)
        self.queue.lay_out(pack(self.parameters, limits, sparse=self.sparse))
        self._register_all_hooks()
        others = grad_hooks.register_listener(self, self.parameters)
        for reducer in {self, *others} if others else ():
            reducer.is_shared = True
            reducer._configure()
        self._configure()

    def __del__(self) -> None:
        self._grad_hooks.remove()

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup:
        return self.exchange.group

    @property
    def buckets(self) -> list[Bucket]:
        return self.queue.buckets

    @property
    def buckets_reduced(self) -> int:
        return self.queue.buckets_reduced

    def _configure(self) -> None:
        """Called again when the group, the communication hook or `is_shared` has changed."""
        self.queue.configure(is_shared=self.is_shared)
        self._return_to_all_hooks()

    @property
    def learns_static_graph(self) -> bool:
        return self.static_graph and self._uses is None

    @property
    def tracks_use(self) -> bool:
        return self.learns_static_graph or (self.options.find_unused and not self.static_graph)

    # -- autograd hooks ----------------------------------------------------------------------------------------------

    def _register_all_hooks(self) -> None:
        self._grad_hooks.register(range(len(self.parameters)), self._gradient_arrived)
        self.hook_mode = HookMode.ALL_PARAMETERS

    def _register_few_hooks(self) -> None:
        """See Note [Few hooks] in grad_hooks.py."""
        self._grad_hooks.remove_and_renew_nodes()
        last = [b.plan.indices[-1] for b in self.queue.buckets]
        if self.queue.nothing_to_send:
            self._grad_hooks.register(last[-1:], self._last_parameter_arrived)
            self.hook_mode = HookMode.LAST_PARAMETER
        else:
            self._grad_hooks.register(last, self._last_of_bucket_arrived)
            self.hook_mode = HookMode.LAST_OF_BUCKET

    def _return_to_all_hooks(self) -> None:
        self._steady_steps = -STABLE_STEPS
        if self.hook_mode is not HookMode.ALL_PARAMETERS:
            self._register_all_hooks()

    def _gradient_arrived(self, index: int) -> None:
        self._guarded(self._on_gradient, index)

    def _last_of_bucket_arrived(self, index: int) -> None:
        self._guarded(self._on_last_of_bucket, index)

    def _last_parameter_arrived(self, index: int) -> None:
        self._guarded(self._on_last_parameter, index)

    def _guarded(self, call: Callable[[int], None], index: int) -> None:
        with self._lock:
            try:
                if torch.is_grad_enabled():  # backward(create_graph=True)
                    with torch.no_grad():
                        call(index)
                else:
                    call(index)
            except Exception as error:
                self._log_error(error)
                raise

    # -- one iteration -----------------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        self.iterations = n = self.iterations + 1
        self.is_sampled = n <= FIRST_SAMPLED or n % self.sample_rate == 0
        self.queue.clock = None
        if self.is_sampled:
            self.clock = self.queue.clock = IterationClock()
            self.clock.mark("forward_start")
        self.queue.free_unused_buffers()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The next backward pass will be reduced. `outputs` are the tensors that the forward returned."""
        if self.is_sampled:
            self.clock.mark("backward_start")
        if self.hook_mode is HookMode.LAST_PARAMETER:
            self._pass.phase = PassPhase.ARMED
            return
        self._arm()
        if not autograd_graph.call_when_reached(outputs, self._backward_started, ForwardPass()):
            self.queue.record_existing_gradients()  # nothing will report the start of the backward pass, so look now

    def _arm(self) -> None:
        self._pass.arm(self._uses or ())
        self.queue.begin()

    def _backward_started(self, forward: ForwardPass) -> None:
        """A backward pass has reached an output of `forward`; no gradient of our parameters has been computed yet.

        It may be autograd.grad(), which accumulates no gradient: so only look here, and decide at the first gradient.
        """
        with self._lock:
            current = self._pass
            if forward.reduced:
                current.is_stale = True
                autograd_graph.when_backward_ends(current.clear_stale)
                return
            if current.phase is PassPhase.IDLE:
                # The backward pass of a later forward was reduced first. This one is to be reduced as well.
                self._arm()
                current.armed_late = True
            current.forwards.append(forward)
            if current.start_seen or current.phase is PassPhase.REDUCING:
                return
            current.start_seen = True
            autograd_graph.when_backward_ends(self._backward_ended)
            self.queue.record_existing_gradients()
            if self.options.find_unused and not self.static_graph:
                current.reached = self._search_unused()
            if self.hook_mode is HookMode.LAST_OF_BUCKET and not self._few_hooks_suffice():
                self._return_to_all_hooks()
            self.queue.free_unused_buffers()

    def _few_hooks_suffice(self) -> bool:
        nodes = list(self._grad_hooks.nodes.values())
        return not any(self.queue.existed) and all(autograd_graph.will_be_reached(nodes))

    def _search_unused(self) -> list[bool]:
        with autograd_graph.profiled("search_unused_parameters"):
            return autograd_graph.will_be_reached(list(self._grad_hooks.nodes.values()))

    def _backward_ended(self) -> None:
        current = self._pass
        current.start_seen = False
        if current.phase is PassPhase.ARMED:  # it was autograd.grad(): no gradient arrived
            current.forwards = []
            if current.armed_late:
                current.phase = PassPhase.IDLE
        elif current.phase is PassPhase.REDUCING and self.learns_static_graph:
            self._delay_all_reduce()
        elif current.phase is PassPhase.REDUCING and current.send_at_end:
            self._send_all_at_end()

    # -- gradients that arrive ---------------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        if self.tracks_use and self.parameters[index].grad is not None:
            self.usage.mark_used(index)
        current = self._pass
        if current.phase is not PassPhase.REDUCING and not self._start_reducing():
            return
        if self.learns_static_graph:
            current.static_counts[index] += 1
            return
        if self._uses is not None:
            uses_left = current.uses_left
            uses_left[index] -= 1
            if uses_left[index] < 0:
                raise RuntimeError(backward_errors.graph_changed(self.names[index]))
            if uses_left[index] > 0:
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
        queue = self.queue
        bucket = queue.bucket_of(index)
        if not current.start_seen or any(p.grad is None for p in bucket.parameters):
            self._fall_back_to_sending_at_end()
            return
        queue.mark_bucket_ready(bucket)
        if queue.send_ready():
            self._after_last_bucket()

    def _on_last_parameter(self, _index: int) -> None:
        """With one worker: the gradients are final as they arrive."""
        current = self._pass
        if current.phase is not PassPhase.ARMED:
            return
        current.phase = PassPhase.IDLE
        if self.is_sampled:
            for event in ("comm_start", "backward_end", "comm_end"):
                self.clock.mark(event)
        if self.iterations % CHECK_EVERY == 0 and any(p.grad is None for p in self.parameters):
            self._return_to_all_hooks()  # some are unused, or an optimiser inside the backward pass has dropped them

    def _start_reducing(self) -> bool:
        """At a gradient outside REDUCING. Returns whether it belongs to a backward pass that is to be reduced."""
        current = self._pass
        if current.phase is PassPhase.IDLE:
            if current.is_stale and not self.queue.nothing_to_send:
                current.is_stale = False  # the error ends the backward pass, so its end callback will not run
                raise RuntimeError(backward_errors.BACKWARD_TWICE)
            return False
        current.phase = PassPhase.REDUCING
        self.exchange.watch.enter()
        if self.learns_static_graph:
            current.static_counts = [0] * len(self.parameters)
            if not current.start_seen:
                current.start_seen = True
                autograd_graph.when_backward_ends(self._backward_ended)
            return True
        if not self.static_graph and self.options.find_unused:
            reached = current.reached if current.reached is not None else self._search_unused()
            self.usage.set_unused([i for i, yes in enumerate(reached) if not yes])
        for i in self.usage.unused:
            self.queue.mark_ready(i)
        return True

    def _fall_back_to_sending_at_end(self) -> None:
        """Gradients arrive in another order than before: only at the end is it known which ones have arrived."""
        self._return_to_all_hooks()
        current = self._pass
        current.send_at_end = True
        current.reached = autograd_graph.will_be_reached([autograd_graph.accumulator(p) for p in self.parameters])
        if not current.start_seen:
            current.start_seen = True
            autograd_graph.when_backward_ends(self._backward_ended)

    def _after_last_bucket(self) -> None:
        self._share_usage()
        autograd_graph.when_backward_ends(self._finish)

    def _share_usage(self) -> None:
        if self.options.find_unused and not self.static_graph:
            self.usage.start_all_reduce(self.group)

    # -- the end of a backward pass ----------------------------------------------------------------------------------

    def _send_all_at_end(self) -> None:
        queue, reached = self.queue, self._pass.reached
        assert reached is not None
        with torch.no_grad():
            for i, ready in enumerate(queue.is_ready):
                if not ready and (reached[i] or self.parameters[i].grad is not None):
                    queue.mark_ready(i)
            if queue.send_ready():
                self._share_usage()
                self._finish()

    def _delay_all_reduce(self) -> None:
        """At the end of the first backward pass of a static graph the gradients per parameter are known."""
        current = self._pass
        if not self.learns_static_graph or current.phase is not PassPhase.REDUCING:
            return
        with torch.no_grad():
            self.usage.start_all_reduce(self.group)
            self.usage.unused = [i for i, n in enumerate(current.static_counts) if n == 0]
            for i in range(len(self.parameters)):
                self.queue.mark_ready(i)
            self.queue.send_ready()
            self._finalize()
            self._uses = current.static_counts

    def _finish(self) -> None:
        if self.is_sampled:
            self.clock.mark("backward_end")
        if self._uses is not None:
            self._pass.order += self.usage.unused
        with torch.no_grad():
            self._finalize()
        self._count_steady_steps()

    def _finalize(self) -> None:
        current = self._pass
        current.end()
        try:
            with self._logging_errors():
                self.queue.finish(self.iterations, may_have_unused=self.options.find_unused or self.static_graph)
                for future in self._futures:
                    future.wait()
        finally:
            self.exchange.watch.leave()
            self._futures = []
            self.exchange.join_work = None
        self.usage.wait()  # also if its result was not needed: the next all-reduce must not overtake it
        if self.learns_static_graph:
            self.usage.counts()  # read in every later step, when the tensor may have been freed
        elif not self.static_graph:
            self.usage.clear()
        if current.order:
            self.last_order = list(current.order)
        if self.is_sampled:
            self.clock.at.setdefault("backward_end", self.clock.at.get("comm_start", 0))
            self.clock.mark("comm_end")

    def _count_steady_steps(self) -> None:
        """Register few hooks after `STABLE_STEPS` backward passes in which gradients arrived in the same order."""
        steady = (
            self.has_rebuilt
            and self.hook_mode is HookMode.ALL_PARAMETERS
            and (self._uses is None or all(n == 1 for n in self._uses))
            and self.queue.arrives_in_order(self._pass.order)
        )
        self._steady_steps = self._steady_steps + 1 if steady else min(self._steady_steps, 0)
        if self._steady_steps >= STABLE_STEPS:
            self._steady_steps = 0
            self._register_few_hooks()

    # -- rebuilding --------------------------------------------------------------------------------------------------

    @property
    def should_rebuild(self) -> bool:
        return (self.static_graph or not self.options.find_unused) and not self.has_rebuilt

    def rebuild(self) -> bool:
        """Before the second forward: pack the buckets again, in the order in which gradients arrived on rank 0."""
        self.check_finished()
        if not self.should_rebuild or len(self.last_order) != len(self.parameters):
            return False
        order = self.exchange.broadcast_order(self.last_order)
        self.has_rebuilt = True
        limits = self.options.caps.once_order_is_known()
        self.queue.lay_out(pack(self.parameters, limits, sparse=self.sparse, order=order))
        self._return_to_all_hooks()
        if self.options.gradient_as_bucket_view:
            self.queue.move_gradients_into_views()
        return True

    def check_finished(self) -> None:
        """Raise if the last backward pass began and did not give every parameter a gradient."""
        if self._pass.phase is not PassPhase.REDUCING:
            return
        self.queue.restore_unsent()
        missing = {i: self.names[i] for i, ready in enumerate(self.queue.is_ready) if not ready}
        message = backward_errors.unfinished(
            rank=self.group.rank(),
            missing=missing,
            find_unused=self.options.find_unused,
            static_graph=self.static_graph,
        )
        with self._logging_errors():
            raise RuntimeError(message)

    def reset(self) -> None:
        """Drop a backward pass that did not end, and the order of gradients."""
        self._pass.phase = PassPhase.IDLE
        self._return_to_all_hooks()
        self.has_rebuilt = False
        self.last_order = []
        self._pass.forwards, self._futures, self.exchange.join_work = [], [], None
        self.usage.clear()
        self.queue.reset_buckets()

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Errors that leave this context are also recorded in the logging data."""
        try:
            yield
        except Exception as error:
            self._log_error(error)
            raise

    def _log_error(self, error: Exception) -> None:
        if self._logger is not None and (logger := self._logger()) is not None:
            logger.error(error)
