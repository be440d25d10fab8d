"""The complete state of modules, which `state_dict` and `load_state_dict` alone do not restore.

The state dict of a module lacks non-persistent buffers, and can be loaded only by a module that has buffers of the same
names and shapes. In a new process that is not so for a module whose buffers are made or grow in a forward pass. So the
state of the model, and of each registered module, has a part `raw` besides the state dict:

    tensors  buffers that are not in the state dict, by name
    grown    buffers that have changed since training began: their kind at that time, [dtype, shape] or None
    gone     names of buffers that existed when training began, and do not any more
    numbers  attributes beside such buffers: see Note [Numbers beside a buffer] in step/buffer_snapshot.py

Empty parts are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.step.buffer_exchange import put_buffer
from lockstep.step.buffer_snapshot import Gone, numbers_of


@final
class InitialModuleState:
    """The buffers of a module and the numbers beside them, when training began."""

    def __init__(self, module: nn.Module) -> None:
        self._kinds = {name: _kind(owner._buffers[key]) for name, owner, key in _places(module)}
        self._numbers = {prefix: numbers_of(child) for prefix, child in module.named_modules()}

    def raw(self, module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the state dict `state` of the module lacks; empty if it lacks nothing."""
        places = list(_places(module))
        kinds = {name: _kind(owner._buffers[key]) for name, owner, key in places}
        values = {name: owner._buffers[key] for name, owner, key in places}
        grown = {name: self._kinds.get(name) for name in kinds if kinds[name] != self._kinds.get(name)}
        grown |= {name: kind for name, kind in self._kinds.items() if name not in kinds and kind is not None}
        parts = {
            "tensors": {name: b.detach() for name, b in values.items() if b is not None and name not in state},
            "grown": grown,
            "gone": [name for name in self._kinds if name not in kinds],
            "numbers": self._changed_numbers(module, {name.rpartition(".")[0] for name in grown}),
        }
        return {name: part for name, part in parts.items() if part}

    def _changed_numbers(self, module: nn.Module, prefixes: set[str]) -> dict[str, Any]:
        found = {}
        for prefix, child in module.named_modules():
            before = self._numbers.get(prefix, {})
            for key, value in numbers_of(child).items() if prefix in prefixes else ():
                if key not in before or before[key] != value:
                    found[f"{prefix}.{key}" if prefix else key] = value
        return found


def load_module(module: nn.Module, state: Mapping[str, Any], raw: Mapping[str, Any] | None) -> None:
    """Load a state dict and its `raw` part into a module."""
    raw = raw or {}
    tensors, owners = raw.get("tensors") or {}, dict(module.named_modules())
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    for name in raw.get("grown") or {}:  # before the state dict, which can be loaded only if they exist
        prefix, _, key = name.rpartition(".")
        saved = state.get(name, tensors.get(name))
        like = None if saved is None else torch.empty(saved.shape, dtype=saved.dtype, device=device)
        if prefix in owners and name not in (raw.get("gone") or ()):
            put_buffer(owners[prefix], key, like, is_persistent=name in state or name not in tensors)
    for name in raw.get("gone") or ():
        prefix, _, key = name.rpartition(".")
        if prefix in owners:
            put_buffer(owners[prefix], key, Gone.GONE, is_persistent=True)
    module.load_state_dict(state)
    with torch.no_grad():
        for name, owner, key in list(_places(module)):
            buffer, saved = owner._buffers[key], tensors.get(name)
            if buffer is not None and saved is not None and _kind(buffer) == _kind(saved):
                buffer.copy_(saved)
    for name, value in (raw.get("numbers") or {}).items():
        prefix, _, key = name.rpartition(".")
        if prefix in owners:
            setattr(owners[prefix], key, value)


@final
class GeneratorState:
    """Gives a random number generator of the program a `state_dict` and a `load_state_dict`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    @staticmethod
    def fits(thing: Any) -> bool:
        """Whether `thing` is a generator of torch, of Python's `random` or of numpy."""
        is_numpy = type(thing).__module__.startswith("numpy.random") and hasattr(thing, "bit_generator")
        return isinstance(thing, (torch.Generator, random.Random)) or is_numpy

    def state_dict(self) -> dict[str, Any]:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state()}
        if isinstance(generator, random.Random):
            return {"state": generator.getstate()}
        return {"state": _without_arrays(generator.bit_generator.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state["state"].cpu())
        elif isinstance(generator, random.Random):
            generator.setstate(state["state"])
        else:
            generator.bit_generator.state = state["state"]


def _without_arrays(value: Any) -> Any:
    """Convert the arrays in the state of a numpy bit generator to lists: a checkpoint cannot contain arrays."""
    if isinstance(value, Mapping):
        return {key: _without_arrays(inside) for key, inside in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, key) of every buffer, including those without a tensor."""
    for prefix, child in module.named_modules():
        for key in child._buffers.keys():  # noqa: SIM118  (those of a scripted module cannot be iterated)
            yield (f"{prefix}.{key}" if prefix else key), child, key


def _kind(buffer: Tensor | None) -> list[Any] | None:
    return None if buffer is None else [str(buffer.dtype).removeprefix("torch."), list(buffer.shape)]
