"""A checkpoint on disk: tensors in safetensors files, everything else in JSON, a manifest with a digest for every byte.

    step-000000123/tensors.safetensors   see state_files.py
                   state.json            see state_files.py
                   manifest.json         see manifest.py

Nothing is pickled, so reading a checkpoint runs no code. Every byte that is read is checked against a SHA-256, so a
changed bit is an error that names the file and never a wrong weight.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import file_io, manifest, state_files
from lockstep.checkpoint.manifest import MANIFEST, STATE, TENSORS, Manifest, verify
from lockstep.checkpoint.state_files import TensorEntry, TensorSpec, make_header
from lockstep.checkpoint.tensor_stream import StreamedTensor
from lockstep.errors import CheckpointError
from lockstep.version import __version__

# torch dtype -> its name in the safetensors format
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
MAP_NORESERVE = 0x4000  # of Linux; `mmap` of Python has it from 3.13 on
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FlatState:
    """A state that can be saved. The tensors are those of the state, not copies; some may arrive later."""

    structure: Any  # JSON values; shares no objects with the state
    tensors: dict[str, Tensor | StreamedTensor]

    @property
    def is_complete(self) -> bool:
        """Whether all tensors are here."""
        return not any(isinstance(tensor, StreamedTensor) for tensor in self.tensors.values())

    def abandon(self) -> None:
        """Note that tensors that are still to arrive will not be used."""
        for stream in {tensor.stream for tensor in self.tensors.values() if isinstance(tensor, StreamedTensor)}:
            stream.abandon()

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Split a state into JSON and tensors. Raises CheckpointError, with the name, for what cannot be saved."""
    leaves: tuple[type[Tensor | StreamedTensor], ...] = (Tensor, StreamedTensor)
    structure, found = state_files.flatten(state, leaves)
    tensors = {name: one.detach() if isinstance(one, Tensor) else one for name, one in found.items()}
    for name, tensor in tensors.items():
        if isinstance(tensor, StreamedTensor):
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold")
            continue
        odd = type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta
        if odd or tensor.dtype not in DTYPES:
            kind = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, on {tensor.device})"
            raise CheckpointError(f"{name} is a {kind}, which a checkpoint cannot hold; make it a plain tensor")
    return FlatState(structure, tensors)


def write(directory: Path, step: int, flat: FlatState) -> Manifest:
    """Write a checkpoint into a new directory, and return its manifest. All files are synced when this returns."""
    directory.mkdir()
    text = file_io.dump_json(flat.structure, "the state without its tensors")
    entries: dict[str, TensorEntry] = {}
    pieces: Iterator[memoryview | bytes] = chain([make_header(flat.specs())], _read_tensors(flat, entries))
    files = {
        TENSORS: file_io.write_new(directory / TENSORS, pieces),
        STATE: file_io.write_new(directory / STATE, [text]),
    }
    versions = {"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    made = Manifest(step, time.time(), versions, state_files.digest(flat.structure, entries), files)
    file_io.write_new(directory / MANIFEST, [manifest.encode(made)])
    file_io.sync_directory(directory)
    return made


def read(
    directory: Path, *, step: int | None = None, is_mapped: Callable[[str], bool] = lambda _: False
) -> dict[Any, Any]:
    """Return the state that was written, on the CPU. Raises CheckpointError if a single bit has changed.

    is_mapped  whether the tensor of this name is mapped from its file, after it was checked, so that it takes no memory
               before it is used; then it is read once more

    Raises MemoryError if a file cannot be mapped.
    """
    tensors: dict[str, Tensor] = {}
    memory_left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # beyond it the process would be killed

    def into(name: str, spec: TensorSpec) -> memoryview | None:
        nonlocal memory_left
        if is_mapped(name):
            return None
        memory_left -= spec.bytes
        if memory_left < 0:
            raise CheckpointError(f"{directory} does not fit into the memory of this machine, from {name!r} on")
        try:
            tensors[name] = torch.empty(spec.shape, dtype=_BY_NAME[spec.dtype])
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{directory}: no memory for {name!r}, {spec.bytes} bytes") from error
        return bytes_of(tensors[name])

    contents = verify(directory, step=step, into=into)
    tensors |= _map_tensors(directory, {name: e for name, e in contents.tensors.items() if name not in tensors})
    return state_files.restore(contents.structure, tensors, directory / STATE)


def _map_tensors(directory: Path, entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """Return tensors whose memory is mapped from their files; writing to them does not change the files."""
    found: dict[str, Tensor] = {}
    memories: dict[str, mmap.mmap] = {}
    for name, entry in entries.items():
        dtype, count = _BY_NAME[entry.spec.dtype], math.prod(entry.spec.shape)
        if not count:
            found[name] = torch.empty(entry.spec.shape, dtype=dtype)
            continue
        if entry.file not in memories:
            with file_io.opened(directory / entry.file) as file:
                memories[entry.file] = _map(file.fileno(), directory / entry.file)
        # Its address may be no multiple of the element size; nothing but copies is made of it.
        mapped = torch.frombuffer(memories[entry.file], dtype=dtype, count=count, offset=entry.start)
        found[name] = mapped.view(entry.spec.shape)
    return found


def _map(handle: int, path: Path) -> mmap.mmap:
    """Map a file so that writing to the memory does not change it, and without reserving memory for that."""
    try:
        flags = mmap.MAP_PRIVATE | (MAP_NORESERVE if sys.platform == "linux" else 0)
        return mmap.mmap(handle, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise MemoryError(f"{path} could not be mapped: {error.strerror}") from error


def digest_of(flat: FlatState) -> str:
    """Return the digest of the state, as in its manifest."""
    entries: dict[str, TensorEntry] = {}
    for _ in _read_tensors(flat, entries):
        pass
    return state_files.digest(flat.structure, entries)


def _read_tensors(flat: FlatState, entries: dict[str, TensorEntry]) -> Iterator[memoryview]:
    """Yield the bytes of all tensors in pieces, and add the SHA-256 of each tensor to `entries`."""
    for name, spec in flat.specs().items():
        sha, tensor = hashlib.sha256(), flat.tensors[name]
        for part in file_io.split_pieces(bytes_of(tensor.take() if isinstance(tensor, StreamedTensor) else tensor)):
            sha.update(part)
            yield part
        entries[name] = TensorEntry(spec, sha.hexdigest())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor: its own memory if it is contiguous and on the CPU, otherwise a copy."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    # Not view(-1): a tensor of one element may have any stride, and then cannot be viewed as bytes.
    return memoryview(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)
