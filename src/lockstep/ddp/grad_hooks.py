"""Autograd hooks that report when gradients have been accumulated.

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
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.ddp import autograd_graph


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

        self.nodes = {i: autograd_graph.accumulator(self._parameters[i]) for i in indices}
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
        autograd_graph.renew_accumulators(ours)


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
