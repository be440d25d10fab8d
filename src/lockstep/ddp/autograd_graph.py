"""What the reducer needs to know of autograd: leaves, outputs, and which leaves a backward pass will reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.graph import Node

_NOTHING = nullcontext()


def accumulator(parameter: Tensor) -> Node:
    """The node that adds a gradient to `parameter.grad`. It lives only as long as somebody holds it: hold it."""
    with torch.enable_grad():
        grad_fn = parameter.expand_as(parameter).grad_fn
    assert grad_fn is not None, "a parameter that requires no gradient has no accumulator"
    node = grad_fn.next_functions[0][0]
    assert node is not None
    return node


def renew_accumulators(parameters: Sequence[Tensor]) -> None:
    """Let each parameter have a new accumulator, without hooks, from the next forward on.

    Dropping the old one is not enough: the graph of the last step often lives until the next one is built. But autograd
    gives up an accumulator when the type of its parameter changes, if only for a moment.
    """
    for parameter in parameters:
        data = parameter.data
        other = torch.float16 if data.dtype != torch.float16 else torch.float32
        parameter.data = torch.empty(0, dtype=other, device=data.device)
        parameter.data = data


def will_be_reached(nodes: Sequence[Node]) -> list[bool]:
    """Which of these the running backward pass will execute. Only from inside a backward pass."""
    asked = torch._C._will_engine_execute_node
    try:
        return [bool(asked(node)) for node in nodes]
    except RuntimeError:
        # autograd.grad() with respect to a leaf: gradients are handed out, none is accumulated.
        return [False] * len(nodes)


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run `call` once the backward pass that is running now has come to its end."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def profiled(name: str) -> AbstractContextManager[Any]:
    """A span in torch's profiler, when one is running; it would cost more than a dozen microseconds when none is."""
    return torch.autograd.profiler.record_function(name) if _profiler_enabled() else _NOTHING


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
