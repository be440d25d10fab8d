"""Autograd graphs: accumulators, hooks on them and on outputs, and which accumulators a backward pass will reach.

Note [Few hooks]
A Python call for each parameter costs about a microsecond, which is noticeable if kernels are small. So on an
accelerator, once gradients have arrived in the same order for a few steps, only the parameter that comes last in each
bucket keeps its hook. The reducer checks that this is still valid: before the backward pass, that no gradient exists
yet and that each of these parameters will be reached; when one is reached, that the others of its bucket have their
gradients. If not, the buckets of this backward pass are sent when it ends, and all parameters get hooks again.

With one worker nothing is sent, so a missed gradient cannot do harm: a hook on the very last parameter is enough, and
every few steps the reducer checks that all others have their gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from lockstep import _torch

T = TypeVar("T")

_NOTHING = nullcontext()
STABLE_STEPS = 2  # steps with the same order before only the last parameter of each bucket keeps its hook


def accumulator(parameter: Tensor) -> Node:
    """The node that adds gradients to `parameter.grad`. Keep a reference to it: otherwise autograd frees it."""
    with torch.enable_grad():
        grad_fn = parameter.expand_as(parameter).grad_fn
    assert grad_fn is not None, "a parameter that requires no gradient has no accumulator"
    node = grad_fn.next_functions[0][0]
    assert node is not None
    return node


def renew_accumulators(parameters: Sequence[Tensor]) -> None:
    """Give each parameter a new accumulator, without hooks, from the next forward on.

    Dropping the old one is not enough: the graph of the last step often exists until the next one is built. But
    autograd drops an accumulator when the dtype of its parameter changes, even if only for a moment.
    """
    for parameter in parameters:
        data = parameter.data
        other = torch.float16 if data.dtype != torch.float16 else torch.float32
        parameter.data = torch.empty(0, dtype=other, device=data.device)
        parameter.data = data


def will_be_reached(nodes: Sequence[Node]) -> list[bool]:
    """For each node, whether the running backward pass will execute it. Call it from inside a backward pass."""
    will_execute = _torch.will_execute_node
    try:
        return [bool(will_execute(node)) for node in nodes]
    except RuntimeError:
        # autograd.grad() with respect to a leaf: gradients are returned, none is accumulated.
        return [False] * len(nodes)


def call_when_reached(outputs: Iterable[Tensor], method: Callable[[T], None], argument: T) -> bool:
    """Call `method(argument)` each time a backward pass reaches one of `outputs`. The method's object is held weakly.

    Returns False if no output is part of a graph, so that nothing will be called.
    """
    weak_method = weakref.WeakMethod(method)

    def on_output_reached(_grads: Any) -> None:
        call = weak_method()
        if call is not None:
            call(argument)

    registered = False
    for output in outputs:
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(on_output_reached)
            registered = True
    return registered


def profiled(name: str) -> AbstractContextManager[Any]:
    """A span in torch's profiler if it is running; without it a span would cost more than a dozen microseconds."""
    return torch.autograd.profiler.record_function(name) if _torch.profiler_enabled() else _NOTHING


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside lists, tuples, dicts and dataclasses, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for spec in fields(value):
            yield from find_tensors(getattr(value, spec.name, None))
    elif type(value).__name__ == "PyRRef" and value.is_owner():  # torch.distributed.rpc, when the program uses it
        yield from find_tensors(value.local_value())


class HookMode(Enum):
    """Which parameters have a hook; see Note [Few hooks]."""

    ALL_PARAMETERS = auto()
    LAST_OF_BUCKET = auto()
    LAST_PARAMETER = auto()


class GradHooks:
    """Hooks on the gradient accumulators of some parameters. They do not keep the object that is called alive."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self.nodes: dict[int, Node] = {}  # accumulators with a hook; autograd frees a node that nothing refers to

    def register(self, indices: Iterable[int], call: Callable[[int], None]) -> None:
        """Call `call(index)` when the gradient of that parameter has been accumulated. `call` is a bound method."""
        self.remove()
        # The node holds the hook; the hook holds the listener only weakly, so that the listener can be freed.
        method = weakref.WeakMethod(call)

        def hook_for(index: int) -> Callable[[Any, Any], None]:
            def on_accumulated(_inputs: Any, _outputs: Any) -> None:
                call = method()
                if call is not None:
                    call(index)

            return on_accumulated

        self.nodes = {i: accumulator(self._parameters[i]) for i in indices}
        self._handles = [node.register_hook(hook_for(i)) for i, node in self.nodes.items()]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def remove_and_renew_nodes(self) -> None:
        """Remove the hooks and let autograd make new nodes: after a removed hook a node still calls into Python.

        A node that other code refers to may have hooks of that code, so it is kept.
        """
        self.remove()
        # The reference count of a node that only we hold differs between versions of torch, but not between nodes.
        references = {index: sys.getrefcount(self.nodes[index]) for index in self.nodes}
        fewest = min(references.values(), default=0)
        ours = [self._parameters[index] for index, count in references.items() if count == fewest]
        self.nodes = {}
        renew_accumulators(ours)


class ReducerHooks(GradHooks):
    """Hooks that a reducer has on all parameters, or on few; see Note [Few hooks]."""

    def __init__(self, parameters: Sequence[Tensor], call: Callable[[int], None]) -> None:
        super().__init__(parameters)
        self._call = weakref.WeakMethod(call)
        self._switch(HookMode.ALL_PARAMETERS, range(len(parameters)))
        self._steady_steps = -STABLE_STEPS

    def _switch(self, mode: HookMode, indices: Iterable[int]) -> None:
        call = self._call()
        assert call is not None
        self.register(indices, call)
        self.mode = mode

    def return_to_all(self) -> None:
        self._steady_steps = -STABLE_STEPS
        if self.mode is not HookMode.ALL_PARAMETERS:
            self._switch(HookMode.ALL_PARAMETERS, range(len(self._parameters)))

    def keep_hooks_on(self, mode: HookMode, indices: Sequence[int]) -> None:
        self.remove_and_renew_nodes()
        self._switch(mode, indices)

    def count_step(self, *, steady: bool) -> bool:
        """Returns whether enough backward passes have been steady in turn. `steady`: the last one was."""
        self._steady_steps = self._steady_steps + 1 if steady else min(self._steady_steps, 0)
        if self._steady_steps < STABLE_STEPS:
            return False
        self._steady_steps = 0
        return True

    def will_be_reached(self) -> list[bool]:
        return will_be_reached(list(self.nodes.values()))


_listeners = WeakIdKeyDictionary()  # parameter -> WeakSet of the objects that have a hook on it


def register_listener(listener: object, parameters: Iterable[Tensor]) -> set[Any]:
    """Returns the other listeners that share one of these parameters: usually a wrapper inside a wrapper."""
    others: set[Any] = set()
    for parameter in parameters:
        listeners = _listeners.setdefault(parameter, weakref.WeakSet())  # type: ignore[no-untyped-call]
        others |= set(listeners)
        listeners.add(listener)
    return others - {listener}


def unregister_listener(listener: object, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _listeners[parameter].discard(listener)
