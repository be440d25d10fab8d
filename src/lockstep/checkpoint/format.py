"""A checkpoint on disk: tensors in safetensors files, everything else in JSON, a manifest with a digest for every byte.

    step-000000123/tensors.safetensors   see tensorfile.py
                   state.json            see tree.py
                   manifest.json         see manifest.py

Nothing is pickled, so reading runs no code. Every byte that is read is compared with its SHA-256, so a changed bit is
an error that names the file and never a wrong weight.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import __version__
from lockstep.checkpoint import file_io, manifest, read_json, state_tree
from lockstep.checkpoint.manifest import MANIFEST, STATE, TENSORS, Manifest
from lockstep.checkpoint.safetensors_file import Entry, Kind, make_header
from lockstep.checkpoint.verify import verify
from lockstep.errors import CheckpointError

# The names that the safetensors format has for them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Flat:
    """A state that can be saved. The tensors are those of the state, and not copies."""

    structure: Any  # JSON values; shares nothing with the state
    tensors: dict[str, Tensor]

    def kinds(self) -> dict[str, Kind]:
        return {name: Kind(DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}


def flatten(state: Mapping[str, Any]) -> Flat:
    """Raises CheckpointError, with the name, for what cannot be saved."""
    structure, found = state_tree.flatten(state, Tensor)
    tensors = {name: tensor.detach() for name, tensor in found.items()}
    for name, tensor in tensors.items():
        odd = type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta
        if odd or tensor.dtype not in DTYPES:
            kind = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, on {tensor.device})"
            raise CheckpointError(f"{name} is a {kind}, which a checkpoint cannot hold; make it a plain tensor")
    return Flat(structure, tensors)


def write(directory: Path, step: int, flat: Flat) -> Manifest:
    """Into a new directory, which nobody else looks at yet. All of it is on the disk when this returns."""
    directory.mkdir()
    kinds, text = flat.kinds(), read_json.dump(flat.structure, "the state without its tensors")
    entries: dict[str, Entry] = {}

    def pieces() -> Iterator[memoryview | bytes]:
        yield make_header(kinds)
        for name, tensor in flat.tensors.items():
            sha = hashlib.sha256()
            for part in file_io.cut(bytes_of(tensor)):
                sha.update(part)
                yield part
            entries[name] = Entry(kinds[name], sha.hexdigest())

    files = {
        TENSORS: file_io.write_new(directory / TENSORS, pieces()),
        STATE: file_io.write_new(directory / STATE, [text]),
    }
    versions = {"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    made = Manifest(step, time.time(), versions, state_tree.digest(flat.structure, entries), files)
    file_io.write_new(directory / MANIFEST, [manifest.encode(made)])
    file_io.sync_directory(directory)
    return made


def read(directory: Path, *, step: int | None = None) -> dict[Any, Any]:
    """What was written, on the CPU. Raises CheckpointError if a single bit is not as it was."""
    tensors: dict[str, Tensor] = {}
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # asking for more would end in a kill

    def into(name: str, kind: Kind) -> memoryview:
        nonlocal room
        room -= kind.bytes
        if room < 0:
            raise CheckpointError(f"{directory} does not fit into the memory of this machine, from {name!r} on")
        try:
            tensors[name] = torch.empty(kind.shape, dtype=_BY_NAME[kind.dtype])
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{directory}: no memory for {name!r}, {kind.bytes} bytes") from error
        return bytes_of(tensors[name])

    contents = verify(directory, step=step, into=into)
    return state_tree.restore(contents.structure, tensors, directory / STATE)


def digest_of(flat: Flat) -> str:
    """What the manifest would say."""
    entries = {}
    for name, kind in flat.kinds().items():
        sha = hashlib.sha256()
        for part in file_io.cut(bytes_of(flat.tensors[name])):
            sha.update(part)
        entries[name] = Entry(kind, sha.hexdigest())
    return state_tree.digest(flat.structure, entries)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory itself, of a tensor on the CPU that is contiguous; of others a copy."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    # Not view(-1): a single element may have any stride, and then has no view as bytes.
    return memoryview(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)
