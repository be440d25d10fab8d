"""Autograd graphs: accumulators, outputs, and which accumulators a backward pass will reach."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lockstep import _torch
from lockstep._torch import profiler_enabled

T = TypeVar("T")

_NOTHING = nullcontext()


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


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run `call` when the running backward pass has ended."""
    _torch.call_when_backward_ends(call)


def profiled(name: str) -> AbstractContextManager[Any]:
    """A span in torch's profiler if it is running; without it a span would cost more than a dozen microseconds."""
    return torch.autograd.profiler.record_function(name) if profiler_enabled() else _NOTHING


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
