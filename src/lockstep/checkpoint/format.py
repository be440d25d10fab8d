"""A checkpoint on disk: tensors in one safetensors file, everything else in a JSON manifest, a digest for every byte.

Nothing is pickled, so reading runs no code. Every byte that is read is compared with its SHA-256 first, so a changed
bit is an error that names the file and never a wrong weight.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError

VERSION = 1
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
SEAL_BYTES = 66  # at the end of the manifest: a line with the SHA-256 of what comes before

# The names that the safetensors format has for them.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def write(directory: Path, state: Mapping[str, Any]) -> None:
    """All of it or nothing: `directory` appears with everything in it, or not at all."""
    tensors: dict[str, Tensor] = {}
    structure = _flatten(state, "", tensors)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    old = partial.with_suffix(".old.partial")
    for leftover in (partial, old):  # of another process that had our number
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        digest = _write_tensors(partial / TENSORS, tensors)
        manifest = {"version": VERSION, "state": structure, "sha256": {TENSORS: digest}}
        text = json.dumps(manifest, sort_keys=True, indent=1).encode()
        _write_file(partial / MANIFEST, text + _seal(text))
        _sync(partial)
        if directory.exists():  # the same step again: there is none for a moment only, however large it is
            directory.rename(old)
        partial.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(directory: Path) -> dict[str, Any]:
    """What was written, on the CPU. Raises CheckpointError if a single bit is not as it was."""
    manifest = _read_manifest(directory / MANIFEST)
    data = _read_file(directory / TENSORS)
    if hashlib.sha256(data).hexdigest() != manifest["sha256"][TENSORS]:
        raise _damaged(directory / TENSORS)
    state: dict[str, Any] = _restore(manifest["state"], _read_tensors(data))
    return state


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read_file(path)
    text, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if seal != _seal(text):
        raise _damaged(path)
    manifest: dict[str, Any] = json.loads(text)
    if manifest["version"] != VERSION:
        raise CheckpointError(f"{path} has format {manifest['version']}, and this Lockstep reads {VERSION}; update it")
    return manifest


def _seal(text: bytes) -> bytes:
    return f"\n{hashlib.sha256(text).hexdigest()}\n".encode()


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its SHA-256 is not the one it was written with; use an older one")


# ---- state -> JSON + tensors, and back -------------------------------------------------------------------------------


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Plain JSON, with {"$": kind, ...} for what JSON does not have."""
    if isinstance(value, Tensor):
        while name in tensors:  # the keys 1 and "1", or "a/b" and "b" inside "a", would have one name
            name += "'"
        tensors[name] = value.detach()
        return {"$": "tensor", "name": name}
    if isinstance(value, Mapping):
        prefix = f"{name}/" if name else ""
        pairs = [[_flatten(k, name, tensors), _flatten(v, f"{prefix}{k}", tensors)] for k, v in value.items()]
        return {"$": "dict", "items": pairs}
    if isinstance(value, (list, tuple)):
        items = [_flatten(v, f"{name}/{n}", tensors) for n, v in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": "float", "value": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold; tensors, numbers, strings, None, lists, "
        "tuples and dicts can be saved"
    )


def _restore(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match value["$"]:
        case "tensor":
            return tensors[value["name"]]
        case "dict":
            return {_restore(k, tensors): _restore(v, tensors) for k, v in value["items"]}
        case "tuple":
            return tuple(_restore(v, tensors) for v in value["items"])
        case _:
            return float(value["value"])


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The safetensors format: the length of a JSON header, the header, the bytes. Returns the SHA-256 of it all."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise CheckpointError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be saved")
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            sha.update(piece)
            file.write(piece)
        for tensor in tensors.values():
            if tensor.numel():
                data = tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
                sha.update(data)
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return sha.hexdigest()


def _read_tensors(data: bytes) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    body = torch.empty(0, dtype=torch.uint8)
    if len(data) > 8 + length:
        body = torch.frombuffer(bytearray(data[8 + length :]), dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        # A copy: each tensor has memory of its own, at an address that suits its dtype.
        tensors[name] = body[start:stop].clone().view(_BY_NAME[entry["dtype"]]).view(entry["shape"])
    return tensors


# ---- files -----------------------------------------------------------------------------------------------------------


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use an older checkpoint") from error


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
