"""The files of a state, a tree of dicts, lists, tuples, numbers, strings, None and tensors. Needs no torch.

    state.json            the tree; a tensor in it is represented by its name: {"$": "tensor", "name": "model/weight"}
    tensors.safetensors   8 bytes with the length of a JSON header, the header, and the bytes of all tensors

The type of tensors is a parameter, so that a checkpoint can be inspected without torch. Every length, shape and offset
that is read is checked.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoint import file_io
from lockstep.errors import CheckpointError
from lockstep.strict_json import MAX_DIGITS

LEVELS = 50  # of nested dicts; each is three levels of JSON, and parsing must not overflow the stack
METADATA = "__metadata__"
DIMENSIONS = 64  # torch has no tensors of more
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
_TOO_LARGE = 10**MAX_DIGITS

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor."""

    dtype: str  # a name in DTYPE_BYTES
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint."""

    spec: TensorSpec
    sha256: str  # of its bytes
    file: str = ""  # the file that contains its bytes
    start: int = 0  # offset of its bytes in the file


# ---- state.json ------------------------------------------------------------------------------------------------------


def flatten(state: Mapping[Any, Any], leaf: type[T] | tuple[type[T], ...]) -> tuple[Any, dict[str, T]]:
    """Return JSON values, which share no objects with `state`, and the leaves by name, in order.

    leaf  the type of leaves, or several

    Raises CheckpointError, with the name, for what cannot be saved.
    """
    leaves: dict[str, T] = {}
    return _flatten(state, "", leaf, leaves, 0), leaves


def restore(structure: Any, leaves: Mapping[str, T], where: Path) -> dict[Any, Any]:
    """Return the state. Raises CheckpointError unless every leaf has exactly one place in it."""
    left = dict(leaves)
    state = _restore(structure, left, where, 0)
    if left:
        raise file_io.malformed(where, f"it has no place for {len(left)} tensors, {next(iter(left))!r} for one")
    if not isinstance(state, dict):
        raise file_io.malformed(where, "the state is not a dict")
    return state


def digest(structure: Any, tensors: Mapping[str, TensorEntry]) -> str:
    """Return the SHA-256 of the state: of names, dtypes, shapes, bytes and JSON, however they are divided into files.

    Of the bytes of each tensor its SHA-256 is hashed, so that workers with a part of the tensors each can compute the
    digest together.
    """
    known = {name: [entry.spec.dtype, entry.spec.shape, entry.sha256] for name, entry in tensors.items()}
    return hashlib.sha256(file_io.dump_json({"state": structure, "tensors": known}, "the state")).hexdigest()


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a dict, list or tuple, with its path."""
    if isinstance(value, (Mapping, list, tuple)):
        for key, inside in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from walk(inside, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


def _flatten(value: Any, name: str, leaf: type[T] | tuple[type[T], ...], leaves: dict[str, T], level: int) -> Any:
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
        raise file_io.malformed(where, f"more than {LEVELS} levels")
    match value:
        case list():
            return [_restore(v, left, where, level + 1) for v in value]
        case {"$": "tensor", "name": str(name), **rest} if not rest:
            if name not in left:
                raise file_io.malformed(where, f"the tensor {name!r} is not there, or it has two places")
            return left.pop(name)
        case {"$": "tuple", "items": list(items), **rest} if not rest:
            return tuple(_restore(v, left, where, level + 1) for v in items)
        case {"$": "dict", "items": list(items), **rest} if not rest:
            return _restore_dict(items, left, where, level)
        case {"$": "float", "value": "nan" | "inf" | "-inf" as text, **rest} if not rest:
            return float(text)
        case dict():
            raise file_io.malformed(where, "an object of an unknown kind")
    return value


def _restore_dict(items: list[Any], left: dict[str, T], where: Path, level: int) -> dict[Any, Any]:
    found = {}
    for pair in items:
        if not isinstance(pair, list) or len(pair) != 2:
            raise file_io.malformed(where, "a dict that does not consist of pairs")
        key = _restore(pair[0], {}, where, level + 1)
        try:
            hash(key)
        except TypeError as error:  # a list or a dict
            raise file_io.malformed(where, "a key that no dict has") from error
        found[key] = _restore(pair[1], left, where, level + 1)
    if len(found) != len(items):
        raise file_io.malformed(where, "a dict with a key that occurs twice")
    return found


# ---- tensors.safetensors ---------------------------------------------------------------------------------------------

# (name, spec) -> memory into which the bytes are read; None: they are only checked
Destination = Callable[[str, TensorSpec], memoryview | None]


def make_header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Return the header of a file; the bytes of the tensors follow, in this order and without gaps."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, spec in specs.items():
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.bytes]}
        at += spec.bytes
    text = file_io.dump_json(header, "the list of tensors")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def scan(path: Path, expected: file_io.FileDigest, *, into: Destination | None, fresh: bool) -> dict[str, TensorEntry]:
    """Read the whole file once, and return its tensors with the SHA-256 of each. Raises CheckpointError if damaged.

    `into` returns the memory for the bytes of a tensor. The bytes must not be used before this returns: only then is
    the SHA-256 of the file known to be correct.
    """
    with file_io.opened(path, fresh=fresh) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes and not {expected.bytes}; use an older one")
        sha = hashlib.sha256()
        header = _read_header(file, size, sha, path)
        spare = memoryview(bytearray(min(file_io.PIECE_BYTES, size)))
        read: dict[str, TensorEntry] = {}
        for name, entry in header.items():
            tensor_sha = hashlib.sha256()
            target = into(name, entry.spec) if into is not None else None
            for start in range(0, entry.spec.bytes, file_io.PIECE_BYTES):
                count = min(file_io.PIECE_BYTES, entry.spec.bytes - start)
                part = spare[:count] if target is None else target[start : start + count]
                if not file_io.fill(file, part):
                    raise CheckpointError(f"{path} ended while it was read; use an older checkpoint")
                file_io.count_piece()
                sha.update(part)
                tensor_sha.update(part)
            read[name] = replace(entry, sha256=tensor_sha.hexdigest())
        if file.read(1) or sha.hexdigest() != expected.sha256:
            raise file_io.damaged(path)
        return read


def _read_header(file: io.FileIO, size: int, sha: Any, path: Path) -> dict[str, TensorEntry]:
    """Return the tensors in the order of their bytes. Raises CheckpointError if these do not fill the file exactly."""
    start = bytearray(8)
    length = int.from_bytes(start, "little") if file_io.fill(file, memoryview(start)) else -1
    if not 2 <= length <= min(size - 8, file_io.JSON_BYTES):
        raise file_io.malformed(path, f"a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    if not file_io.fill(file, memoryview(text)):
        raise CheckpointError(f"{path} ended while it was read; use an older checkpoint")
    sha.update(start)
    sha.update(text)
    header = file_io.parse_json(bytes(text), path)
    if not isinstance(header, dict) or not isinstance(header.pop(METADATA, {}), dict):
        raise file_io.malformed(path, "its header is not an object")
    spans = sorted((*_span(name, entry, path), name) for name, entry in header.items())
    found, at = {}, 0
    for first, last, name in spans:
        spec = TensorSpec(header[name]["dtype"], tuple(header[name]["shape"]))
        if first != at or last - first != spec.bytes:
            raise file_io.malformed(path, f"{name!r}, {spec}, is said to be at {first} to {last}, after {at}")
        found[name] = TensorEntry(spec, "", path.name, 8 + length + first)
        at = last
    if at != size - 8 - length:
        raise file_io.malformed(path, f"its tensors have {at} bytes, and there are {size - 8 - length}")
    return found


def _span(name: str, entry: Any, path: Path) -> tuple[int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise file_io.malformed(path, f"{name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise file_io.malformed(path, f"{name!r} has an unknown dtype")
    is_shape = isinstance(shape, list) and len(shape) <= DIMENSIONS and all(map(file_io.is_count, shape))
    # [0, 2**62, 2**62] has no bytes, but strides.
    if not is_shape or not file_io.is_count(8 * math.prod(size for size in shape if size)):
        raise file_io.malformed(path, f"{name!r} has a shape that no tensor has")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(file_io.is_count, offsets)):
        raise file_io.malformed(path, f"{name!r} has no place")
    return offsets[0], offsets[1]
