"""What the Python code of a model and a loss function reads, so that a change of it is noticed.

A replayed CUDA graph repeats the kernels of a captured pass; the Python code that launched them is not run again, and
what it read is as it was (captured_shard.py). So the values that it may read are collected by following references from
the loss function and the model: attributes of modules and other objects, closures, default arguments, and the globals
that functions name; also lists and dicts. Code of torch, Lockstep and the standard library is not followed.

The content of tensors on a GPU is not collected: a replay reads it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn

MAX_OBJECTS: Final = 20_000
MAX_ENTRIES: Final = 1_000  # of a list or dict; of a longer one only the length is compared
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_NAMESPACES: Final = (nn.Module, types.SimpleNamespace, argparse.Namespace)  # of a library, with values of the program
_LIBRARIES: Final = frozenset({"torch", "lockstep", "numpy", "triton", *sys.stdlib_module_names} - {"__main__"})


def code_of(loss: Any) -> Hashable:
    """Return what identifies a loss function: two lambdas that one line of a program makes are the same function."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    loss = getattr(loss, "__func__", loss)
    return getattr(loss, "__code__", None) or id(loss)


@final
class PythonInputs:
    """The values that a loss function and a model could read when this object was made."""

    def __init__(self, loss: Any, model: nn.Module) -> None:
        self._loss = loss
        self._found: dict[int, Any] = {}  # holds the objects, so that no other object gets the same id
        self._attributes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # name, object, its entries
        self._entries: list[tuple[str, Any, tuple[Any, ...]]] = []  # name, list or set, its entries
        self._reads: list[tuple[str, Callable[[], Any], Any]] = []  # name, function that reads a value, the value
        self._writes: list[tuple[Callable[[Any], None], Any]] = []  # function that writes a variable, its value
        self._tensors: list[tuple[str, Tensor, tuple[Any, ...]]] = []
        self._pending = deque([("the loss function", loss), ("the model", model)])
        while self._pending and len(self._found) < MAX_OBJECTS:
            self._follow(*self._pending.popleft())

    def changed(self, loss: Any) -> str | None:
        """Return the name of a value that has changed since, None if none has. `loss`: the function as it is now."""
        if loss is not self._loss:
            pairs = zip(_parts(self._loss), _parts(loss), strict=False)
            for (name, before), (_, now) in pairs:
                if not _is_same(before, now):
                    return f"{name} of the loss function"
        for name, mapping, entries in self._changed_mappings():
            keys = [k for k in {**entries, **mapping} if not _is_same(entries.get(k), mapping.get(k))]
            return f"{name}.{keys[0]}" if keys else name
        for name, values, kept in self._entries:
            if len(values) != len(kept) or not all(map(_is_same, values, kept)):
                return name
        for name, read, value in self._reads:
            if not _is_same(read(), value):
                return name
        return next((name for name, tensor, facts in self._tensors if _facts_of(tensor) != facts), None)

    def _changed_mappings(self) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        try:  # a model has thousands: the interpreter compares most of them by identity
            return [one for one in self._attributes if one[1] != one[2]]
        except Exception:  # a tensor or an array was replaced
            return [one for one in self._attributes if not _is_equal(one[1], one[2])]

    def restore(self) -> None:
        """Give attributes, variables, lists and dicts the entries that they had."""
        for _, mapping, entries in self._changed_mappings():
            mapping.clear()
            mapping.update(entries)
        for _, values, kept in self._entries:
            if isinstance(values, (list, deque)) and (len(values) != len(kept) or not all(map(_is_same, values, kept))):
                values.clear()
                values.extend(kept)
        for write, value in self._writes:
            write(value)

    # -- collecting --------------------------------------------------------------------------------------------------

    def _follow(self, name: str, value: Any) -> None:
        if id(value) in self._found or isinstance(value, _PLAIN):
            return
        self._found[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((name, value, _facts_of(value)))
        elif isinstance(value, (functools.partial, types.MethodType)):
            self._pending.extend((f"{part} of {name}", one) for part, one in _parts(value))
        elif isinstance(value, types.FunctionType):
            self._follow_function(name, value)
        elif isinstance(value, dict):
            self._add_mapping(name, value)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self._entries.append((name, value, tuple(value)))
            self._pending.extend((f"{name}[{n}]", one) for n, one in enumerate(value) if len(value) <= MAX_ENTRIES)
        elif isinstance(value, _NAMESPACES) or not (_is_library(type(value)) or isinstance(value, types.ModuleType)):
            self._follow_object(name, value)

    def _add_mapping(self, name: str, mapping: dict[str, Any]) -> None:
        if len(mapping) > MAX_ENTRIES:
            self._reads.append((name, functools.partial(len, mapping), len(mapping)))
            return
        self._attributes.append((name, mapping, dict(mapping)))
        self._pending.extend((f"{name}.{key}", one) for key, one in mapping.items())

    def _follow_object(self, name: str, value: Any) -> None:
        if hasattr(value, "__dict__"):
            self._add_mapping(name, vars(value))
        for kind in type(value).__mro__:
            if not _is_library(kind) and id(kind) not in self._found:
                self._found[id(kind)] = kind
                for key, one in vars(kind).items():
                    one = getattr(one, "__func__", None) or getattr(one, "fget", None) or one
                    if isinstance(one, types.FunctionType):
                        self._pending.append((f"{kind.__name__}.{key}", one))
                    elif isinstance(one, _PLAIN) and not key.startswith("__"):
                        self._reads.append((f"{kind.__name__}.{key}", functools.partial(getattr, kind, key), one))

    def _follow_function(self, name: str, function: types.FunctionType) -> None:
        if _is_library(function):
            return
        for part, one in _parts(function):
            self._pending.append((f"{part} of {name}", one))
        for number, cell in enumerate(function.__closure__ or ()):
            variable = function.__code__.co_freevars[number]
            self._reads.append((variable, functools.partial(_content, cell), _content(cell)))
            self._writes.append((functools.partial(setattr, cell, "cell_contents"), _content(cell)))
        names, scope = set(_names_of(function.__code__)), function.__globals__
        for key in sorted(names & scope.keys()):
            one = scope[key]
            self._reads.append((key, functools.partial(scope.get, key), one))
            self._writes.append((functools.partial(scope.__setitem__, key), one))
            self._pending.append((key, one))
            if isinstance(one, types.ModuleType) and one.__name__.split(".")[0] not in _LIBRARIES:
                for inner in sorted(names & vars(one).keys()):
                    self._reads.append(
                        (f"{key}.{inner}", functools.partial(getattr, one, inner, None), vars(one)[inner])
                    )
                    self._pending.append((f"{key}.{inner}", vars(one)[inner]))


def _parts(function: Any) -> list[tuple[str, Any]]:
    """The values that a callable holds."""
    if isinstance(function, functools.partial):
        named = [(f"argument {key}", one) for key, one in sorted(function.keywords.items())]
        return [("function", function.func), *(("argument", one) for one in function.args), *named]
    if isinstance(function, types.MethodType):
        return [("object", function.__self__), ("function", function.__func__)]
    if isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [*((name, _content(cell)) for name, cell in cells), *(("default argument", one) for one in defaults)]
    return [("object", function)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _is_library(what: Any) -> bool:
    return (getattr(what, "__module__", None) or "builtins").split(".")[0] in _LIBRARIES


def _facts_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a captured kernel depends on; a tensor on the host is read by Python, so its version counts, too."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return (tensor.requires_grad,)
    return tensor.data_ptr(), tensor.requires_grad, 0 if tensor.is_cuda else tensor._version


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(now, (types.MethodType, functools.partial, types.FunctionType)):  # made anew in every step
        parts = list(zip(_parts(before), _parts(now), strict=False))
        return code_of(before) == code_of(now) and all(_is_same(a, b) for (_, a), (_, b) in parts)
    return isinstance(now, (*_PLAIN, tuple)) and _is_equal(before, now)


def _is_equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # tensors and arrays, which are other ones now
        return False
