"""The safetensors format: 8 bytes with the length of a JSON header, the header, and the bytes of all tensors.

This module needs no torch, and checks every length, shape and offset that it reads.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint import file_io, read_json
from lockstep.errors import CheckpointError

METADATA = "__metadata__"
DIMENSIONS = 64  # torch has no tensors of more
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip


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


Destination = Callable[[str, TensorSpec], memoryview]  # (name, spec) -> memory into which the bytes are read


def make_header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Return the header of a file; the bytes of the tensors follow, in this order and without gaps."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, spec in specs.items():
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.bytes]}
        at += spec.bytes
    text = read_json.dump(header, "the list of tensors")
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
                sha.update(part)
                tensor_sha.update(part)
            read[name] = replace(entry, sha256=tensor_sha.hexdigest())
        if file.read(1) or sha.hexdigest() != expected.sha256:
            raise damaged(path)
        return read


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its SHA-256 is not the one it was written with; use an older one")


def _read_header(file: io.FileIO, size: int, sha: Any, path: Path) -> dict[str, TensorEntry]:
    """Return the tensors in the order of their bytes. Raises CheckpointError if these do not fill the file exactly."""
    start = bytearray(8)
    length = int.from_bytes(start, "little") if file_io.fill(file, memoryview(start)) else -1
    if not 2 <= length <= min(size - 8, read_json.JSON_BYTES):
        raise read_json.malformed(path, f"a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    if not file_io.fill(file, memoryview(text)):
        raise CheckpointError(f"{path} ended while it was read; use an older checkpoint")
    sha.update(start)
    sha.update(text)
    header = read_json.parse(bytes(text), path)
    if not isinstance(header, dict) or not isinstance(header.pop(METADATA, {}), dict):
        raise read_json.malformed(path, "its header is not an object")
    spans = sorted((*_span(name, entry, path), name) for name, entry in header.items())
    found, at = {}, 0
    for first, last, name in spans:
        spec = TensorSpec(header[name]["dtype"], tuple(header[name]["shape"]))
        if first != at or last - first != spec.bytes:
            raise read_json.malformed(path, f"{name!r}, {spec}, is said to be at {first} to {last}, after {at}")
        found[name] = TensorEntry(spec, "", path.name, 8 + length + first)
        at = last
    if at != size - 8 - length:
        raise read_json.malformed(path, f"its tensors have {at} bytes, and there are {size - 8 - length}")
    return found


def _span(name: str, entry: Any, path: Path) -> tuple[int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise read_json.malformed(path, f"{name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise read_json.malformed(path, f"{name!r} has an unknown dtype")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS or not all(map(read_json.is_count, shape)):
        raise read_json.malformed(path, f"{name!r} has a shape that no tensor has")
    if not read_json.is_count(
        8 * math.prod(size for size in shape if size)
    ):  # [0, 2**62, 2**62]: no bytes, but strides
        raise read_json.malformed(path, f"{name!r} has a shape that no tensor has")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(read_json.is_count, offsets)):
        raise read_json.malformed(path, f"{name!r} has no place")
    return offsets[0], offsets[1]
