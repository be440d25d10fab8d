"""Being told by autograd when gradients have arrived.

Note [Two ways to listen]
A Python call for each parameter costs about a microsecond, which shows where kernels are small. So on an accelerator,
once gradients have arrived in the same order for a few steps, only the parameter that comes last in each bucket is
listened to. That is checked by the reducer, not believed: before the backward pass, that no gradient is there yet and
that every one of these parameters will be reached; when it is reached, that the others of its bucket have come. If not,
this backward pass is sent as a whole when it ends, and all are listened to again.

In a world of one nothing is sent, so nothing can go wrong by listening too little: the very last parameter is enough,
and whether all others have got their gradient is looked at once in a while.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.ddp import autograd_graph


class Listening(Enum):
    TO_ALL = auto()
    TO_LAST_OF_BUCKET = auto()
    TO_VERY_LAST = auto()


class Ears:
    """Hooks on the accumulators of some parameters. They end with the object that listens."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self.nodes: dict[int, Node] = {}  # those we listen to, held so that they live

    def listen(self, indices: Iterable[int], call: Callable[[int], None]) -> None:
        """`call(index)` when the gradient of that parameter has been added. `call` is a method of the listener."""
        self.stop()
        # The node keeps the hook alive; a weak reference keeps the hook from keeping the listener alive.
        method = weakref.WeakMethod(call)

        def hook_for(index: int) -> Callable[[Any, Any], None]:
            def on_accumulated(_inputs: Any, _outputs: Any) -> None:
                call = method()
                if call is not None:
                    call(index)

            return on_accumulated

        self.nodes = {i: autograd_graph.accumulator(self._parameters[i]) for i in indices}
        self._handles = [node.register_hook(hook_for(i)) for i, node in self.nodes.items()]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def renew(self) -> None:
        """A hook that was removed still costs a call into Python. Only a new node is free of it.

        A node that somebody else holds keeps his hooks: it stays.
        """
        self.stop()
        # How many references a node has that nobody else holds differs between versions of torch, not between nodes.
        references = {index: sys.getrefcount(self.nodes[index]) for index in self.nodes}
        fewest = min(references.values(), default=0)
        ours = [self._parameters[index] for index, count in references.items() if count == fewest]
        self.nodes = {}
        autograd_graph.renew_accumulators(ours)


_listeners = WeakIdKeyDictionary()  # parameter -> WeakSet of those who listen to it


def announce(listener: object, parameters: Iterable[Tensor]) -> set[Any]:
    """Who listens to one of these parameters as well. A wrapper inside a wrapper is the usual case."""
    others: set[Any] = set()
    for parameter in parameters:
        listeners = _listeners.setdefault(parameter, weakref.WeakSet())  # type: ignore[no-untyped-call]
        others |= set(listeners)
        listeners.add(listener)
    return others - {listener}


def retire(listener: object, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _listeners[parameter].discard(listener)
