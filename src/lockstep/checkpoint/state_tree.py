"""Converts a state, a tree of dicts, lists, tuples, numbers, strings, None and tensors, to JSON and back.

In the JSON a tensor is represented by its name: {"$": "tensor", "name": "model/weight"}. The type of tensors is a
parameter here, so that a checkpoint can be inspected without torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoint import read_json
from lockstep.checkpoint.safetensors_file import METADATA, TensorEntry
from lockstep.errors import CheckpointError
from lockstep.strict_json import MAX_DIGITS

LEVELS = 50  # of nested dicts; each is three levels of JSON, and parsing must not overflow the stack

_TOO_LARGE = 10**MAX_DIGITS

T = TypeVar("T")


def flatten(state: Mapping[Any, Any], leaf: type[T]) -> tuple[Any, dict[str, T]]:
    """Return JSON values, which share no objects with `state`, and the leaves by name.

    Raises CheckpointError, with the name, for what cannot be saved.
    """
    leaves: dict[str, T] = {}
    return _flatten(state, "", leaf, leaves, 0), leaves


def restore(structure: Any, leaves: Mapping[str, T], where: Path) -> dict[Any, Any]:
    """Return the state. Raises CheckpointError unless every leaf has exactly one place in it."""
    left = dict(leaves)
    state = _restore(structure, left, where, 0)
    if left:
        raise read_json.malformed(where, f"it has no place for {len(left)} tensors, {next(iter(left))!r} for one")
    if not isinstance(state, dict):
        raise read_json.malformed(where, "the state is not a dict")
    return state


def digest(structure: Any, tensors: Mapping[str, TensorEntry]) -> str:
    """Return the SHA-256 of the state: of names, dtypes, shapes, bytes and JSON, however they are divided into files.

    Of the bytes of each tensor its SHA-256 is hashed, so that workers with a part of the tensors each can compute the
    digest together.
    """
    known = {name: [entry.spec.dtype, entry.spec.shape, entry.sha256] for name, entry in tensors.items()}
    return hashlib.sha256(read_json.dump({"state": structure, "tensors": known}, "the state")).hexdigest()


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a dict, list or tuple, with its path."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = list(enumerate(value))
    else:
        yield path, value
        return
    for key, inside in pairs:
        yield from walk(inside, f"{path}/{key}" if path else str(key))


def _flatten(value: Any, name: str, leaf: type[T], leaves: dict[str, T], level: int) -> Any:
    if level > LEVELS:
        raise CheckpointError(f"{name} is inside of more than {LEVELS} dicts and lists; a checkpoint holds no more")
    if isinstance(value, leaf):
        while name in leaves or name == METADATA:  # the keys 1 and "1", or "a/b" and "b" inside "a", have one name
            name += "'"
        leaves[name] = value
        return {"$": "tensor", "name": name}
    if isinstance(value, Mapping):
        prefix = f"{name}/" if name else ""
        pairs = [
            [_key(k, name, level), _flatten(v, f"{prefix}{k}", leaf, leaves, level + 1)] for k, v in list(value.items())
        ]
        return {"$": "dict", "items": pairs}
    if isinstance(value, (list, tuple)):
        items = [_flatten(v, f"{name}/{n}", leaf, leaves, level + 1) for n, v in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    return _plain(value, name)


def _key(key: Any, name: str, level: int) -> Any:
    if isinstance(key, tuple) and level < LEVELS:
        return {"$": "tuple", "items": [_key(k, name, level + 1) for k in key]}
    return _plain(key, f"a key of {name or 'the state'}")


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": "float", "value": str(value)}
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise CheckpointError(f"{name} is a whole number of more than {MAX_DIGITS} digits, which cannot be saved")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold; tensors, numbers, strings, None, lists, "
        "tuples and dicts can be saved"
    )


def _restore(value: Any, left: dict[str, T], where: Path, level: int) -> Any:
    if level > LEVELS:
        raise read_json.malformed(where, f"more than {LEVELS} levels")
    match value:
        case list():
            return [_restore(v, left, where, level + 1) for v in value]
        case {"$": "tensor", "name": str(name), **rest} if not rest:
            if name not in left:
                raise read_json.malformed(where, f"the tensor {name!r} is not there, or it has two places")
            return left.pop(name)
        case {"$": "tuple", "items": list(items), **rest} if not rest:
            return tuple(_restore(v, left, where, level + 1) for v in items)
        case {"$": "dict", "items": list(items), **rest} if not rest:
            return _restore_dict(items, left, where, level)
        case {"$": "float", "value": "nan" | "inf" | "-inf" as text, **rest} if not rest:
            return float(text)
        case dict():
            raise read_json.malformed(where, "an object of an unknown kind")
    return value


def _restore_dict(items: list[Any], left: dict[str, T], where: Path, level: int) -> dict[Any, Any]:
    found = {}
    for pair in items:
        if not isinstance(pair, list) or len(pair) != 2:
            raise read_json.malformed(where, "a dict that does not consist of pairs")
        key = _restore(pair[0], {}, where, level + 1)
        try:
            hash(key)
        except TypeError as error:  # a list or a dict
            raise read_json.malformed(where, "a key that no dict has") from error
        found[key] = _restore(pair[1], left, where, level + 1)
    if len(found) != len(items):
        raise read_json.malformed(where, "a dict with a key that occurs twice")
    return found
