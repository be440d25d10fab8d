"""Ready counts -> collectives -> gradients.

Autograd tells the reducer which gradients have arrived. When the last one of a bucket has, the bucket is sent, always
in the order of the buckets, so that every worker makes the same calls. When the backward pass ends, the reducer waits
for what is still on its way and lets every parameter have the mean.

Note [Two ways to listen]
A Python call for each parameter costs about a microsecond, which shows where kernels are small. So on an accelerator,
once gradients have arrived in the same order for a few steps, only the parameter that comes last in each bucket is
listened to (`_listen_to_few`). That is checked, not believed: before the backward pass, that no gradient is there yet
and that every one of these parameters will be reached; when it is reached, that the others of its bucket have come.
If not, this backward pass is sent as a whole when it ends (`_surprised`), and all are listened to again.

In a world of one nothing is sent, so nothing can go wrong by listening too little: the very last parameter is enough,
and whether all others have got their gradient is looked at once in `LOOK_EVERY` steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.peers import Watch
from lockstep.replicate import graph, hooks, unfinished
from lockstep.replicate.bucket import Bucket, Caps, Filling, Ownership, pack
from lockstep.replicate.hooks import CommHook, GradBucket
from lockstep.replicate.log import FIRST_SAMPLED, Clock

if TYPE_CHECKING:
    from lockstep.replicate.log import Log

# Who listens to a parameter. A wrapper inside a wrapper makes it two; then neither may take the gradient away.
_listeners = WeakIdKeyDictionary()  # parameter -> WeakSet of reducers

LOOK_EVERY = 16
STABLE_STEPS = 2  # equal steps before only the last parameter of each bucket is listened to


class Phase(Enum):
    IDLE = auto()  # gradients that arrive are the user's own: no_sync, or the bare module
    ARMED = auto()  # a forward was made whose backward will be reduced
    REDUCING = auto()  # its first gradient has arrived


class Listening(Enum):
    """See Note [Two ways to listen]."""

    TO_ALL = auto()
    TO_LAST_OF_BUCKET = auto()
    TO_VERY_LAST = auto()


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
        self.unused: list[int] = []  # parameters the last backward pass did not reach
        self.last_order: list[int] = []
        self.buckets_reduced = 0
        self._log: weakref.ref[Log] | None = None
        self._lock = threading.Lock()  # a model over several devices has a backward thread for each
        self._hook: tuple[CommHook, object] | None = None
        self._optimizer_in_backward = False
        self._bucket_dtype: torch.dtype | None = None
        self._join_work: Any = None
        self._futures: list[Future[Any]] = []
        self._nodes: dict[int, Node] = {}  # the accumulators we listen to
        self.is_shared = False
        self.is_sampled = False
        self._handles: list[Any] = []
        self.group = group
        self.set_group(group)

        count = len(self.parameters)
        self._uses: list[int] | None = None  # static graph: how often each parameter is reached, once learned
        self._used = [False] * count  # reached since the last reduction, also under no_sync
        self._used_map: Tensor | None = None  # by how many workers, after the reduction
        self._used_work: Any = None
        self._used_count: list[int] | None = None
        self._graph_is_static = True
        self._unused_before: list[int] | None = None

        self.phase = Phase.IDLE
        self._passes: list[Pass] = []  # forwards that the running backward goes through
        self._stale = False  # the running backward goes through a forward that was reduced before
        self._started = False  # the running backward has been seen from its start
        self._armed_again = False
        self._send_at_end = False
        self._divisor = 0
        self._existed = [False] * count  # gradients that were there before the running backward
        self._reached: list[bool] | None = None
        self._order: list[int] = []
        self._steady_steps = 0
        self.listening = Listening.TO_ALL
        may_have_unused = settings.find_unused and not settings.static_graph
        limits = settings.caps.before_order_is_known(may_have_unused=may_have_unused)
        self._lay_out(pack(self.parameters, limits, sparse=self.sparse))
        self._listen_to_all()
        self._meet_other_listeners()

    def __del__(self) -> None:
        self.stop_listening()

    # -- set-up ------------------------------------------------------------------------------------------------------

    def set_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._written_in_python = type(group) is not dist.ProcessGroup
        self.watch = Watch(group, polls=not self._written_in_python and not self.on_accelerator)
        self._averages = not self._written_in_python and _is_nccl(group, self.parameters[0].device)
        self._decide()

    def _decide(self) -> None:
        """What follows from the settings, the group and the hook; again whenever one of them changes."""
        if self.settings.gradient_as_bucket_view:
            self.ownership = Ownership.BUCKET_VIEW
        else:
            self.ownership = Ownership.COPIED if self._hook or self.is_shared else Ownership.HANDED_OVER
        # The mean over one worker is the gradient itself, if nobody wants to see it pass by.
        handed_over = self.ownership is Ownership.HANDED_OVER
        self.nothing_to_send = self.group.size() == 1 and not self._written_in_python and handed_over
        self.lets_go = self.on_accelerator and handed_over and not self.nothing_to_send

    def _lay_out(self, plan: Sequence[Any]) -> None:
        self.buckets = [
            Bucket(n, p, self.parameters, sparse=self.sparse[p.indices[0]] and len(p.indices) == 1)
            for n, p in enumerate(plan)
        ]
        if self._bucket_dtype is not None:
            self._cast_buckets(self._bucket_dtype)
        self._home = {
            index: (bucket, slot) for bucket in self.buckets for slot, index in enumerate(bucket.plan.indices)
        }
        self._next = 0
        self._is_ready = [False] * len(self.parameters)
        self._stop_few()

    def _cast_buckets(self, dtype: torch.dtype) -> None:
        for bucket in self.buckets:
            bucket.dtype, bucket.flat, bucket.views = dtype, None, []

    @property
    def on_accelerator(self) -> bool:
        return self.parameters[0].device.type != "cpu"

    @property
    def is_batched(self) -> bool:
        return self.settings.batched_copy or self.on_accelerator

    @property
    def learns_static_graph(self) -> bool:
        return self.static_graph and self._uses is None

    @property
    def tracks_use(self) -> bool:
        return self.learns_static_graph or (self.settings.find_unused and not self.static_graph)

    # -- listening to autograd ---------------------------------------------------------------------------------------

    def _listen_to_all(self) -> None:
        self._listen(range(len(self.parameters)), Reducer._on_gradient)
        self.listening = Listening.TO_ALL

    def _listen_to_few(self) -> None:
        self.stop_listening()
        self._nodes = {}
        # A hook that was removed still costs a call into Python. Only a new node is free of it.
        graph.renew_accumulators(self.parameters)
        last = [b.plan.indices[-1] for b in self.buckets]
        if self.nothing_to_send:
            self._listen(last[-1:], Reducer._on_very_last)
            self.listening = Listening.TO_VERY_LAST
        else:
            self._listen(last, Reducer._on_last_of_bucket)
            self.listening = Listening.TO_LAST_OF_BUCKET

    def _listen(self, indices: Iterable[int], call: Callable[[Reducer, int], None]) -> None:
        self.stop_listening()
        # The node keeps the hook alive; a weak reference keeps the hook from keeping us alive.
        us = weakref.ref(self)

        def hook_for(index: int) -> Callable[[Any, Any], None]:
            def on_accumulated(_inputs: Any, _outputs: Any) -> None:
                reducer = us()
                if reducer is not None:
                    reducer._guarded(call, index)

            return on_accumulated

        self._nodes = {i: graph.accumulator(self.parameters[i]) for i in indices}
        self._handles = [node.register_hook(hook_for(i)) for i, node in self._nodes.items()]

    def _meet_other_listeners(self) -> None:
        for parameter in self.parameters:
            listeners = _listeners.setdefault(parameter, weakref.WeakSet())  # type: ignore[no-untyped-call]
            listeners.add(self)
            if len(listeners) > 1:
                for reducer in listeners:
                    reducer.is_shared = True
                    reducer._decide()
                    reducer._stop_few()

    def stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stop_few(self) -> None:
        self._steady_steps = -STABLE_STEPS
        if self.listening is not Listening.TO_ALL:
            self._listen_to_all()

    def _guarded(self, call: Callable[[Reducer, int], None], index: int) -> None:
        with self._lock:
            try:
                if torch.is_grad_enabled():  # backward(create_graph=True)
                    with torch.no_grad():
                        call(self, index)
                else:
                    call(self, index)
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
        self._divisor = 0
        self._reached = None
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
                graph.when_backward_ends(self._forget_stale)
                return
            if self.phase is Phase.IDLE:
                # Another forward came between, and its backward was reduced first. This one is due as well.
                self._arm()
                self._armed_again = True
            self._passes.append(seen)
            if self._started or self.phase is Phase.REDUCING:
                return
            self._started = True
            graph.when_backward_ends(self._backward_ended)
            self._existed = [p.grad is not None for p in self.parameters]
            if self.settings.find_unused and not self.static_graph:
                self._reached = self._search_unused()
            if self.listening is Listening.TO_LAST_OF_BUCKET and not self._few_will_do():
                self._stop_few()
            if self.lets_go:
                for bucket in self.buckets:
                    bucket.let_go()

    def _few_will_do(self) -> bool:
        return not any(self._existed) and all(
            graph.will_be_reached(list(self._nodes.values()))
        )

    def _search_unused(self) -> list[bool]:
        with graph.profiled("search_unused_parameters"):
            return graph.will_be_reached(list(self._nodes.values()))

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
            self._used[index] = True
        if not self._is_expected():
            return
        if self.learns_static_graph:
            self._static_counts[index] += 1
            return
        if self._uses is not None:
            self._uses_left[index] -= 1
            if self._uses_left[index] < 0:
                raise RuntimeError(unfinished.graph_changed(self.names[index]))
            if self._uses_left[index] > 0:
                return
        if self._send_at_end:
            return
        self._order.append(index)
        self._mark_ready(index)
        if self._send_what_is_ready():
            graph.when_backward_ends(self._finish)

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
            graph.when_backward_ends(self._finish)

    def _on_very_last(self, _index: int) -> None:
        """A world of one: gradients are where they belong as they come."""
        if self.phase is not Phase.ARMED:
            return
        self.phase = Phase.IDLE
        if self.is_sampled:
            for event in ("comm_start", "backward_end", "comm_end"):
                self.clock.mark(event)
        if self.iterations % LOOK_EVERY == 0:
            self._is_ready = [p.grad is not None for p in self.parameters]
            if not all(self._is_ready):
                self.phase = Phase.REDUCING  # for the next forward to complain about
                self._stop_few()

    def _surprised(self) -> None:
        """Gradients come in another order than before: only the end will tell what has come and what has not."""
        self._stop_few()
        self._send_at_end = True
        self._reached = graph.will_be_reached([graph.accumulator(p) for p in self.parameters])
        if not self._started:
            self._started = True
            graph.when_backward_ends(self._backward_ended)

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
            if self._stale:
                self._stale = False  # this ends the backward pass, so nobody else will forget it
                raise RuntimeError(unfinished.BACKWARD_TWICE)
            return False
        if self.phase is Phase.ARMED:
            self.phase = Phase.REDUCING
            if self.learns_static_graph:
                self._static_counts = [0] * len(self.parameters)
                if not self._started:
                    self._started = True
                    graph.when_backward_ends(self._backward_ended)
                return True
            if not self.static_graph and self.settings.find_unused:
                reached = self._reached if self._reached is not None else self._search_unused()
                self._set_unused([i for i, yes in enumerate(reached) if not yes])
            for i in self.unused:
                self._mark_ready(i)
        return True

    def _set_unused(self, unused: list[int]) -> None:
        self.unused = unused
        if self._unused_before is not None and self._unused_before != unused:
            self._graph_is_static = False
        self._unused_before = unused

    def _mark_ready(self, index: int) -> None:
        if self._is_ready[index]:
            raise RuntimeError(unfinished.ready_twice(index, self.names[index], self.settings.find_unused))
        self._is_ready[index] = True
        bucket, slot = self._home[index]
        if not (self.is_batched or bucket.sparse or self.nothing_to_send):
            bucket.take(slot, self._filling(), existed=self._existed[index])
        bucket.pending -= 1

    # -- sending -----------------------------------------------------------------------------------------------------

    def _filling(self) -> Filling:
        if self._hook is not None:
            return Filling(self.ownership)
        divisor = 1 if self._backend_divides else self.divisor
        return Filling(self.ownership, divisor=divisor, divide_flat=self.settings.batched_copy)

    @property
    def divisor(self) -> int:
        """How many workers share this step: all; with `join(divide_by_initial_world_size=False)`, those still there."""
        if not self._divisor:
            self._divisor = self.group.size()
            if self._join_work is not None:
                self._join_work.wait()
                self._divisor = int(self._join_work.result()[0].item())
        return self._divisor

    @property
    def _backend_divides(self) -> bool:
        return self._averages and self.divisor == self.group.size()

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
            self._share_use()
        return True

    def _send(self, bucket: Bucket) -> None:
        if bucket.number == 0 and self.is_sampled:
            self.clock.mark("comm_start")
        bucket.sent = None
        if self.nothing_to_send or self._is_skipped(bucket):
            return
        self.buckets_reduced += 1
        if bucket.sparse:
            buffer = self._sparse_gradient(bucket)
        else:
            if self.is_batched:
                bucket.fill(self._filling(), [self._existed[i] for i in bucket.plan.indices])
            buffer = bucket.whole()
        if self._hook is not None:
            is_last = bucket.number == len(self.buckets) - 1
            bucket.sent = self._run_comm_hook(
                GradBucket(bucket.number, buffer, bucket.parameters, is_last=is_last)
            )
            return
        options = dist.AllreduceOptions()
        if self._backend_divides:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        if bucket.number == 0:
            self.watch.enter()
        work = self.group.allreduce([buffer], options)
        # A process group written in Python may complete its futures only.
        bucket.sent = work.get_future() if self._written_in_python or bucket.sparse else work

    def _is_skipped(self, bucket: Bucket) -> bool:
        return self.settings.skip_unused and set(bucket.plan.indices) <= set(self.unused)

    def _sparse_gradient(self, bucket: Bucket) -> Tensor:
        parameter = bucket.parameters[0]
        index = bucket.plan.indices[0]
        if parameter.grad is None:
            empty = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
            )
            bucket.flat = empty
            return empty
        if not parameter.grad.is_sparse:
            raise RuntimeError(
                f"Expected variable to have sparse gradient: parameter {index} ({self.names[index]}) belongs to an "
                "embedding with sparse=True, but its gradient is dense."
            )
        bucket.flat = parameter.grad
        if self._hook is None:
            bucket.flat.div_(self.divisor)
        return bucket.flat

    def _share_use(self) -> None:
        """Tell the others which parameters we used; looked at only if one of ours was not (see `_nobody_used`)."""
        device = self.parameters[0].device
        self._used_map = torch.tensor(self._used, dtype=torch.int32).to(device, non_blocking=True)
        self._used_count = None
        self._used_work = self.group.allreduce([self._used_map], dist.AllreduceOptions())

    def _nobody_used(self, index: int) -> bool:
        if not (self.settings.find_unused or self.static_graph) or self._used[index]:
            return False
        if self._used_count is None:
            self._wait_for_use()
            assert self._used_map is not None
            self._used_count = self._used_map.tolist()
        return self._used_count[index] == 0

    def _wait_for_use(self) -> None:
        if self._used_work is not None:
            self._used_work.wait()
            self._used_work = None

    def _delay_all_reduce(self) -> None:
        """End of the first backward pass of a static graph: now it is known how often each parameter is reached."""
        if not self.learns_static_graph or self.phase is not Phase.REDUCING:
            return
        with torch.no_grad():
            self._share_use()
            uses, self._uses = self._static_counts, None
            self.unused = [i for i, n in enumerate(uses) if n == 0]
            for i in range(len(self.parameters)):
                self._mark_ready(i)
            for bucket in self.buckets:
                self._send(bucket)
            self._next = len(self.buckets)
            self._finalize()
            self._uses = uses

    # -- the end of a backward pass ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self.is_sampled:
            self.clock.mark("backward_end")
        if self._uses is not None:
            self._order += self.unused
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
            for bucket in self.buckets:
                self._conclude(bucket)
            for future in self._futures:
                future.wait()
            self.watch.leave()
        except Exception as error:
            self._note(error)
            raise
        finally:
            self._futures = []
            self._join_work = None
        self._wait_for_use()
        if self.tracks_use:
            if self.learns_static_graph and self._used_count is None:
                assert self._used_map is not None
                self._used_count = self._used_map.tolist()
            if not self.static_graph:
                self._used = [False] * len(self.parameters)
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
        result = self._result(bucket)
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
            raise RuntimeError(unfinished.ready_twice(index, self.names[index], self.settings.find_unused))

    def _result(self, bucket: Bucket) -> Tensor:
        if isinstance(bucket.sent, torch._C.Future):  # what torch.futures.Future wraps
            bucket.sent.wait()
            return hooks.result_of(cast(Future[Any], bucket.sent))
        self.watch.wait(bucket.sent, self._whereabouts(bucket))
        assert bucket.flat is not None
        return bucket.flat

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
        with self.watch.explains("the exchange of the order of gradients"):
            self.group.broadcast([order], options).wait()
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
        missing = [i for i, ready in enumerate(self._is_ready) if not ready]
        error = RuntimeError(
            unfinished.unfinished(
                rank=self.group.rank(),
                missing={i: self.names[i] for i in missing},
                find_unused=self.settings.find_unused,
                static_graph=self.static_graph,
            )
        )
        self._note(error)
        raise error

    def reset(self) -> None:
        """Forget a backward pass that did not end, and the order of gradients."""
        self.phase = Phase.IDLE
        self._stop_few()
        self.has_rebuilt = False
        self.last_order = []
        self._passes, self._futures, self._join_work = [], [], None
        self._used = [False] * len(self.parameters)
        for bucket in self.buckets:
            bucket.reset()

    def _note(self, error: BaseException) -> None:
        log = self._log() if self._log is not None else None
        if log is not None:
            log.error(error)

    # -- names under which torch's own code and other libraries know these things ----------------------------------

    def set_logger(self, log: Log) -> None:
        self._log = weakref.ref(log)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        if self._hook is not None:
            error = RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
            self._note(error)
            raise error
        self._hook = (hook, state)
        self._decide()
        self._stop_few()

    def _run_comm_hook(self, bucket: GradBucket) -> Future[Any]:
        if self._hook is None:
            return self._run_allreduce_hook(bucket)
        hook, state = self._hook
        return hooks.run(hook, state, bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return self.group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()

    def _autograd_hook(self, index: int) -> None:
        self._guarded(Reducer._on_gradient, index)

    def _rebuild_buckets(self) -> bool:
        return self.rebuild()

    def _push_all_rebuilt_params(self) -> None:
        if self.should_rebuild and not self.last_order:
            self.last_order = list(range(len(self.parameters)))

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = len(self.buckets) - 1
        return [
            GradBucket(b.number, self._zeros_like(b), b.parameters, is_last=b.number == last) for b in self.buckets
        ]

    def _zeros_like(self, bucket: Bucket) -> Tensor:
        if bucket.sparse:
            return torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64),
                torch.empty((0, *bucket.parameters[0].shape[1:]), dtype=bucket.dtype),
                bucket.parameters[0].shape,
                device=bucket.device,
            )
        numel = bucket.numel * (2 if bucket.dtype.is_complex else 1)
        return torch.zeros(numel, dtype=bucket.dtype.to_real(), device=bucket.device)

    def _get_local_used_map(self) -> Tensor:
        if self._used_map is None:
            self._used_map = torch.tensor(self._used, dtype=torch.int32, device=self.parameters[0].device)
        return self._used_map

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._join_work = None if use_static_world_size else work

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        self._futures += list(futures)

    def _set_static_graph(self) -> None:
        if self.iterations:
            error = RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel "
                "is constructed."
            )
            self._note(error)
            raise error
        self.static_graph = True

    def _set_optimizer_in_backward(self) -> None:
        self._optimizer_in_backward = True

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._bucket_dtype = dtype
        self._cast_buckets(dtype)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate

    def _set_sparse_metadata(self, metadata: object) -> None:
        """A hint for backends that turn sparse gradients into dense ones; the result is the same without it."""

    def _ddp_graph_static(self) -> bool:
        return self._graph_is_static

    def _remove_autograd_hooks(self) -> None:
        self.stop_listening()
        for parameter in self.parameters:
            _listeners[parameter].discard(self)

    def _check_reducer_finalized(self) -> None:
        self.check_finished()

    def _reset_state(self) -> None:
        self.reset()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.set_group(group)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return "nccl" in str(group._get_backend(device).name()).lower()
