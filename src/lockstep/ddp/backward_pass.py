"""What the reducer knows about the backward pass that is running or expected: its phase, its timing, the parameters
that it uses, and the messages of its errors.

The messages contain torch's key phrases, because programs match on them, and add the names of parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._torch import call_when_backward_ends
from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.comm.register_backends import backend_name

FIRST_SAMPLED = 10  # every iteration up to this one is timed, then one in `sample_rate`

BACKWARD_TWICE = (
    "backward() ran a second time through a forward whose gradients have already been averaged over the workers: what "
    "it adds now would stay on this worker alone, and the replicas would diverge. Add the losses and call backward "
    "once; or put the forward and the first backward together inside `with model.no_sync():`, and forward again."
)


class PassPhase(Enum):
    IDLE = auto()  # gradients that arrive are not reduced: no_sync, or a backward pass of the bare module
    ARMED = auto()  # a forward has run whose backward pass will be reduced
    REDUCING = auto()  # the first gradient of that backward pass has arrived


@dataclass
class ForwardPass:
    """One forward, and whether a backward pass through it has been reduced."""

    reduced: bool = False


class BackwardPass:
    """State of one backward pass. Each reducer has one object, which `arm` resets for the next pass."""

    def __init__(self) -> None:
        self.forwards: list[ForwardPass] = []  # forwards that the running backward pass goes through
        self.is_stale = False  # the running backward pass goes through a forward that was reduced before
        self.static_counts: list[int] = []  # while a static graph is learned: gradients per parameter
        self.arm(())
        self.phase = PassPhase.IDLE

    def arm(self, uses: Sequence[int]) -> None:
        """Expect a backward pass. `uses` holds the gradients per parameter of a static graph, or is empty."""
        self.phase = PassPhase.ARMED
        self.start_seen = False  # the pass has been seen from its start, and a call at its end is arranged
        self.armed_late = False  # armed by a backward pass, not by the forward before it
        self.send_at_end = False  # buckets are sent when the pass ends, not as they become complete
        self.reached: list[bool] | None = None  # by parameter: whether the pass will compute its gradient
        self.order: list[int] = []  # parameters in the order in which their gradients arrived
        self.uses_left = list(uses)

    def see_start(self, at_end: Callable[[], None]) -> bool:
        """Have `at_end` called when the pass ends. Returns False if that has been arranged before."""
        if self.start_seen:
            return False
        self.start_seen = True
        call_when_backward_ends(at_end)
        return True

    def see_stale_start(self) -> None:
        """The pass goes through a forward that was reduced before; an error if a gradient arrives."""
        self.is_stale = True
        call_when_backward_ends(self._clear_stale)

    def _clear_stale(self) -> None:
        self.is_stale = False

    def begin_reducing(self, *, stale_is_error: bool) -> bool:
        """At a gradient outside REDUCING. Returns whether it belongs to a backward pass that is to be reduced."""
        if self.phase is PassPhase.IDLE:
            if self.is_stale and stale_is_error:
                self.is_stale = False  # the error ends the backward pass, so its end callback will not run
                raise RuntimeError(BACKWARD_TWICE)
            return False
        self.phase = PassPhase.REDUCING
        return True

    def is_last_use(self, index: int, names: Sequence[str]) -> bool:
        """Static graph: whether this was the last gradient of the parameter. Raises if there was one too many."""
        self.uses_left[index] -= 1
        if self.uses_left[index] < 0:
            raise RuntimeError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                "but then got used in the second iteration. this is not compatible with static_graph set to True. "
                f"The parameter is {names[index]}; leave static_graph at False, with find_unused_parameters=True if "
                "needed."
            )
        return self.uses_left[index] == 0

    def end_without_gradients(self) -> None:
        """It was autograd.grad(): the pass that was expected has yet to come."""
        self.forwards = []
        if self.armed_late:
            self.phase = PassPhase.IDLE

    def end(self) -> None:
        """The gradients of this pass are complete: a second pass through the same forwards is an error."""
        self.phase = PassPhase.IDLE
        self.start_seen = False
        for forward in self.forwards:
            forward.reduced = True
        self.forwards = []


class GraphUse(Enum):
    """How it is known which parameters a backward pass uses."""

    ALL = auto()  # every one gets a gradient
    SEARCHED = auto()  # find_unused_parameters=True: autograd is asked in each pass
    LEARNING = auto()  # static_graph=True: gradients are counted in the first pass
    LEARNED = auto()  # and known in all later ones


class ParameterUsage:
    """Which parameters a backward pass has used, on this worker and on any worker."""

    def __init__(self, count: int, device: torch.device, *, find_unused: bool) -> None:
        self._device = device
        self._here = [False] * count  # by parameter: used since the last reduction, also under no_sync
        self._map: Tensor | None = None  # by parameter: the number of workers that used it
        self._work: Any = None
        self._is_on_stream = False  # whether the backend runs collectives in order, on a stream of its own
        self._counts: list[int] | None = None  # the same on the host
        self.unused: list[int] = []  # parameters that the running backward pass does not reach
        self._unused_before: list[int] | None = None
        self.never_changed = True
        self.uses: Sequence[int] = ()  # LEARNED: gradients per parameter and pass
        self.set_graph(GraphUse.SEARCHED if find_unused else GraphUse.ALL)

    def set_graph(self, graph: GraphUse) -> None:
        self.graph = graph
        self.is_static = graph in (GraphUse.LEARNING, GraphUse.LEARNED)
        self.is_tracked = graph in (GraphUse.SEARCHED, GraphUse.LEARNING)  # `mark_used` is to be called

    def mark_used(self, index: int) -> None:
        self._here[index] = True

    def set_unused(self, reached: Sequence[bool]) -> None:
        self.unused = [i for i, yes in enumerate(reached) if not yes]
        if self._unused_before is not None and self._unused_before != self.unused:
            self.never_changed = False
        self._unused_before = self.unused

    def share(self, group: dist.ProcessGroup) -> None:
        """Count over all workers, if uses are tracked. Read only for parameters that this worker has not used."""
        if not self.is_tracked:
            return
        self._map = torch.tensor(self._here, dtype=torch.int32).to(self._device, non_blocking=True)
        self._counts = None
        self._work = group.allreduce([self._map], dist.AllreduceOptions())
        self._is_on_stream = type(group) is dist.ProcessGroup and backend_name(group, self._device) == "nccl"

    def is_unused_everywhere(self, index: int) -> bool:
        return not self._here[index] and self._count_on_host()[index] == 0

    def _count_on_host(self) -> list[int]:
        """For each parameter the number of workers that have used it. Waits for the all-reduce."""
        if self._counts is None:
            self._wait()
            assert self._map is not None
            self._counts = self._map.tolist()
        return self._counts

    def _wait(self) -> None:
        if self._work is not None:
            wait_without_limit(self._work)
            self._work = None

    def finish(self) -> None:
        """At the end of a pass that was reduced."""
        if not self._is_on_stream:
            self._wait()  # also if its result was not needed: the next all-reduce must not overtake it
        if self.graph is GraphUse.LEARNING:
            self._count_on_host()  # read in every later step, when the tensor may have been freed
        elif not self.is_static:
            self.clear()

    def clear(self) -> None:
        self._here = [False] * len(self._here)

    def on_device(self) -> Tensor:
        if self._map is None:
            self._map = torch.tensor(self._here, dtype=torch.int32, device=self._device)
        self._wait()
        return self._map


class IterationClock:
    """Counts iterations and, in some of them, takes the times of events, in nanoseconds, on the host."""

    def __init__(self) -> None:
        self.iterations = 0
        self.sample_rate = 100
        self.is_sampled = False
        self.at: dict[str, int] = {}  # of the last iteration that was sampled

    def begin(self) -> None:
        self.iterations = n = self.iterations + 1
        self.is_sampled = n <= FIRST_SAMPLED or n % self.sample_rate == 0
        if self.is_sampled:
            self.at = {}
            self.mark("forward_start")

    def mark(self, event: str) -> None:
        if self.is_sampled:
            self.at[event] = time.time_ns()

    def mark_end(self) -> None:
        if self.is_sampled:
            self.at.setdefault("backward_end", self.at.get("comm_start", 0))
            self.mark("comm_end")

    def span_ns(self, begin: str, end: str) -> int | None:
        if begin not in self.at or end not in self.at or self.at[end] < self.at[begin]:
            return None
        return self.at[end] - self.at[begin]


def ready_twice(index: int, name: str, find_unused: bool) -> str:
    third = (
        " 3) Incorrect unused parameter detection: the parameter was not part of the graph when the backward pass "
        "began, but got a gradient later, for example from a reentrant `checkpoint`. If every parameter takes part, "
        "pass `find_unused_parameters=False`."
        if find_unused
        else ""
    )
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not shared "
        "across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround if this "
        "module graph does not change during training loop. "
        "2) Reused parameters in multiple reentrant backward passes. For example, if you use multiple `checkpoint` "
        "functions to wrap the same part of your model, its parameters get a gradient from each of them: use "
        f"checkpoint(..., use_reentrant=False), or static_graph=True.{third}\n"
        f"Parameter at index {index} with name {name} has been marked as ready twice. This means that multiple "
        "autograd engine  hooks have fired for this particular parameter during this iteration."
    )


def unfinished(*, rank: int, missing: Mapping[int, str], find_unused: bool, static_graph: bool) -> str:
    """The message for a pass in which parameters got no gradient; `missing` maps their indices to their names."""
    begin = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if static_graph:
        return (
            f"{begin}This error indicates that your training graph has changed in this iteration, e.g., one parameter "
            "is used in first iteration, but then got unused in the second iteration. this is not compatible with "
            f"static_graph set to True.\n{_name_missing(rank, missing)}"
        )
    cause = "This error indicates that your module has parameters that were not used in producing loss. "
    if find_unused:
        cure = (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            "participate in computing loss. You can fix this by making sure all `forward` function outputs participate "
            "in calculating loss. "
        )
    else:
        cure = (
            "You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` "
            "to `torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
            "participate in calculating loss. "
        )
    return (
        f"{begin}{cause}{cure}\n{_name_missing(rank, missing)}\n"
        "(Elsewhere you would now have to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
        "DETAIL to see these names.)"
    )


def _name_missing(rank: int, missing: Mapping[int, str]) -> str:
    modules: dict[str, list[str]] = {}
    for name in missing.values():
        modules.setdefault(name.rpartition(".")[0] or "(the module itself)", []).append(name.rpartition(".")[2])
    by_module = "; ".join(f"{module}: {', '.join(names)}" for module, names in modules.items())
    return (
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(missing.values())}\n"
        f"By module: {by_module}"
    )
