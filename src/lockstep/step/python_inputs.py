"""What the Python code of a model and a loss function reads, so that a change of it is noticed.

A replayed CUDA graph repeats the kernels of a captured pass; the Python code that launched them is not run again, and
what it read is as it was (captured_shard.py). So the values that it may read are collected by following references from
the loss function and the model: attributes of modules, classes and other objects, closures, default arguments, the
globals that functions load, lists and dicts. Of an object that is not a module, only the attributes count whose names
occur in that code. Code of torch, numpy, Lockstep and the standard library is not followed.

The content of tensors on a GPU is not collected: a replay reads it.
"""

from __future__ import annotations

import argparse
import dis
import functools
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn

MAX_OBJECTS: Final = 20_000
MAX_ENTRIES: Final = 1_000  # of a list or dict; of a longer one only the length is compared
MAX_ARRAY_BYTES: Final = 65536  # of a numpy array; a larger one is compared by identity
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace, UserDict)  # of a library, with values of the program
_LIBRARIES: Final = frozenset({"torch", "lockstep", "numpy", "triton", *sys.stdlib_module_names} - {"__main__"})
_HOOKS: Final = tuple(name for name in vars(nn.Module()) if name.endswith(("hooks", "hooks_with_kwargs")))


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
        self._mappings: list[tuple[str, Any, dict[str, Any]]] = []  # name, mapping, its entries
        self._lists: list[tuple[str, Any, tuple[Any, ...]]] = []  # name, list or set, its entries
        self._reads: list[tuple[str, Callable[[], Any], Any]] = []  # name, function that reads a value, the value
        self._tensors: list[tuple[str, Tensor, tuple[Any, ...]]] = []
        self._objects: list[tuple[str, dict[str, Any], set[str]]] = []  # name, attributes, names that were followed
        self._names: set[str] = set()  # of attributes, in the code that was followed
        self._pending: deque[tuple[str, Any]] = deque(model.named_parameters())
        self._pending.extend([*model.named_buffers(), ("the loss function", loss), ("the model", model)])
        while self._pending and len(self._found) < MAX_OBJECTS:
            self._follow(*self._pending.popleft())
            if not self._pending:
                self._follow_attributes()
        self.is_complete = not self._pending  # if not, there are too many objects

    def changed(self, loss: Any) -> str | None:
        """Return the name of a value that has changed since, None if none has. `loss`: the function as it is now."""
        if loss is not self._loss:
            for (name, before), (_, now) in zip(_parts(self._loss), _parts(loss), strict=False):
                if not _is_same(before, now):
                    return f"{name} of the loss function"
        for name, mapping, entries in self._changed_mappings():
            now = dict(mapping)
            keys = [k for k in {**entries, **now} if not _is_same(entries.get(k), now.get(k))]
            return f"{name}.{keys[0]}" if keys else name
        for name, values, kept in self._lists:
            if len(values) != len(kept) or not all(map(_is_same, values, kept)):
                return name
        for name, read, value in self._reads:
            if not _is_same(read(), value):
                return name
        return next((name for name, tensor, facts in self._tensors if _facts_of(tensor) != facts), None)

    def versions(self) -> list[tuple[str, Tensor, int]]:
        """Return (name, tensor, version counter) of all tensors that were found."""
        return [(name, t, t._version) for name, t, _ in self._tensors if not t.is_inference()]

    def _changed_mappings(self) -> list[tuple[str, Any, dict[str, Any]]]:
        try:  # a model has hundreds: the interpreter compares most entries by identity
            return [one for one in self._mappings if one[1] != one[2]]
        except Exception:  # a tensor or an array was replaced
            return [one for one in self._mappings if not _is_equal(one[1], one[2])]

    # -- collecting --------------------------------------------------------------------------------------------------

    def _follow(self, name: str, value: Any) -> None:
        if id(value) in self._found or isinstance(value, _PLAIN):
            return
        self._found[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((name, value, _facts_of(value)))
            self._pending.extend((f"a hook of {name}", hook) for hook in _hooks_of(value))
        elif isinstance(value, (functools.partial, types.MethodType)):
            self._pending.extend((f"{part} of {name}", one) for part, one in _parts(value))
        elif isinstance(value, types.FunctionType):
            self._follow_function(name, value)
        elif isinstance(value, dict):
            self._add_mapping(name, value)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            if len(value) > MAX_ENTRIES:
                self._reads.append((name, functools.partial(len, value), len(value)))
            else:
                self._lists.append((name, value, tuple(value)))
                self._pending.extend((f"{name}[{n}]", one) for n, one in enumerate(value))
        elif isinstance(value, nn.Module):
            self._follow_module(name, value)
        elif isinstance(value, type):
            if not _is_library(value):
                self._add_mapping(value.__name__, vars(value))
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.nbytes <= MAX_ARRAY_BYTES:
                self._reads.append((name, value.tobytes, value.tobytes()))
        elif isinstance(value, _NAMESPACES) or not (_is_library(type(value)) or isinstance(value, types.ModuleType)):
            self._follow_object(name, value)

    def _add_mapping(self, name: str, mapping: Any) -> None:
        if len(mapping) > MAX_ENTRIES:
            self._reads.append((name, functools.partial(len, mapping), len(mapping)))
            return
        self._mappings.append((name, mapping, dict(mapping)))
        self._pending.extend((f"{name}.{key}", _unwrapped(one)) for key, one in mapping.items())

    def _follow_module(self, name: str, module: nn.Module) -> None:
        own = {key: value for key, value in vars(module).items() if key not in _HOOKS}
        self._mappings.append((name, vars(module), dict(vars(module))))
        for key in ("_parameters", "_buffers", "_modules"):
            self._mappings.append((name, own[key], dict(own.pop(key))))
        self._pending.extend((f"{name}.{key}", one) for key, one in own.items())
        self._pending.extend((f"{name}.{key}", one) for key, one in module._modules.items())
        hooks = [getattr(module, key) for key in _HOOKS]
        self._reads.append((f"the hooks of {name}", functools.partial(_keys_of, hooks), _keys_of(hooks)))
        self._pending.extend(
            (f"a hook of {name}", hook) for one in hooks if isinstance(one, dict) for hook in one.values()
        )
        self._pending.extend((kind.__name__, kind) for kind in type(module).__mro__)

    def _follow_object(self, name: str, value: Any) -> None:
        self._pending.extend((kind.__name__, kind) for kind in type(value).__mro__)
        if hasattr(value, "__dict__"):
            self._objects.append((name, vars(value), set()))
        for kind in type(value).__mro__:
            for slot in vars(kind).get("__slots__", ()):
                read = functools.partial(getattr, value, slot, None)
                self._reads.append((f"{name}.{slot}", read, read()))
                self._pending.append((f"{name}.{slot}", read()))

    def _follow_attributes(self) -> None:
        """Follow the attributes of objects whose names occur in the code that is known by now."""
        for name, attributes, followed in list(self._objects):
            for key in sorted((attributes.keys() & self._names) - followed):
                followed.add(key)
                self._reads.append((f"{name}.{key}", functools.partial(attributes.get, key), attributes[key]))
                self._pending.append((f"{name}.{key}", attributes[key]))

    def _follow_function(self, name: str, function: types.FunctionType) -> None:
        if _is_library(function):
            return
        for part, one in _parts(function):
            self._pending.append((f"{part} of {name}", one))
        for number, cell in enumerate(function.__closure__ or ()):
            variable = function.__code__.co_freevars[number]
            self._reads.append((variable, functools.partial(_content, cell), _content(cell)))
        loaded, attributes = _names_in(function.__code__)
        self._names |= attributes
        scope = function.__globals__
        for key in sorted(loaded & scope.keys()):
            self._reads.append((key, functools.partial(scope.get, key), scope[key]))
            self._follow_global(key, scope[key], attributes)

    def _follow_global(self, name: str, value: Any, attributes: set[str]) -> None:
        """Follow a global variable; of a module of the program the variables that the function may read in it."""
        if not isinstance(value, types.ModuleType):
            self._pending.append((name, value))
        elif value.__name__.split(".")[0] not in _LIBRARIES:
            for inner in sorted(attributes & vars(value).keys()):
                one = vars(value)[inner]
                self._reads.append((f"{name}.{inner}", functools.partial(getattr, value, inner, None), one))
                if isinstance(one, types.ModuleType) and id(one) not in self._found:
                    self._found[id(one)] = one
                    self._follow_global(f"{name}.{inner}", one, attributes)
                else:
                    self._pending.append((f"{name}.{inner}", one))


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


def _unwrapped(value: Any) -> Any:
    """The function inside of a static method, class method or property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The globals that a function loads, and the attributes that it reads; also those of functions inside of it."""
    loaded = {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = set(code.co_names) | {one for one in code.co_consts if isinstance(one, str) and one.isidentifier()}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            loaded, attributes = loaded | inner[0], attributes | inner[1]
    return loaded, attributes


def _is_library(what: Any) -> bool:
    return (getattr(what, "__module__", None) or "builtins").split(".")[0] in _LIBRARIES


def _keys_of(mappings: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, dict) else one for one in mappings)


def _hooks_of(tensor: Tensor) -> Iterator[Any]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from (getattr(tensor, name, None) or {}).values()


def _facts_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a captured kernel depends on; a tensor on the host is read by Python, so its version counts, too."""
    hooks = tuple(map(id, _hooks_of(tensor)))
    if tensor.layout != torch.strided or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return tensor.requires_grad, hooks
    version = 0 if tensor.is_cuda or tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.requires_grad, hooks, version


def _is_same(before: Any, now: Any, depth: int = 0) -> bool:
    if before is now:
        return True
    if type(before) is not type(now) or depth > 8:
        return False
    if isinstance(now, (types.MethodType, functools.partial, types.FunctionType)):  # made anew in every step
        parts = list(zip(_parts(before), _parts(now), strict=False))
        return code_of(before) == code_of(now) and all(_is_same(a, b, depth + 1) for (_, a), (_, b) in parts)
    return isinstance(now, (*_PLAIN, tuple)) and _is_equal(before, now)


def _is_equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # tensors and arrays, which are other ones now
        return False
