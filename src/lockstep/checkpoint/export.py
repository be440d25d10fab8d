"""Exports a part of a checkpoint as one file for other programs: .safetensors, or .pt for torch.load."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint import file_io
from lockstep.checkpoint.manifest import Contents
from lockstep.checkpoint.state_files import TensorEntry, make_header, walk
from lockstep.errors import CheckpointError

REGISTERED: Final = "kept"  # the part of a state with the objects given to `run.register_state`, by name


def export_safetensors(checkpoint: Path, contents: Contents, part: str, out: Path) -> int:
    """Write a .safetensors file, and return the number of tensors. Needs no torch.

    Raises CheckpointError if the part has anything but named tensors, or the checkpoint is damaged.
    """
    entries: dict[str, TensorEntry] = {}
    for name, value in _part(contents.outline(checkpoint), part, checkpoint).items():
        if not isinstance(name, str) or not isinstance(value, TensorEntry):
            raise CheckpointError(
                f"{part}/{name} of {checkpoint} is not a tensor with a name, and .safetensors holds nothing else; "
                "export it as .pt"
            )
        entries[name] = value

    def pieces() -> Iterator[memoryview | bytes]:
        yield make_header({name: entry.spec for name, entry in entries.items()})
        for entry in entries.values():
            yield from _bytes_of(checkpoint, entry)

    with _replacing(out) as partial:
        file_io.write_new(partial, pieces())
    return len(entries)


def export_torch(checkpoint: Path, contents: Contents, part: str, out: Path) -> int:
    """Write a file with torch.save, for torch.load(..., weights_only=True), and return the number of tensors."""
    import torch

    from lockstep.checkpoint import format as layout

    value = _part(layout.read(checkpoint, step=contents.manifest.step), part, checkpoint)
    with _replacing(out) as partial, partial.open("xb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # from torch's zip writer, when the disk is full
            raise OSError(errno.EIO, str(error).splitlines()[0], str(out)) from error
        file.flush()
        os.fsync(file.fileno())
    return sum(isinstance(entry, torch.Tensor) for _, entry in walk(value))


def _part(state: Mapping[Any, Any], part: str, checkpoint: Path) -> dict[Any, Any]:
    """Return a part of the state itself, or the state of what `run.register_state` was given under this name."""
    registered = state.get(REGISTERED)
    parts = {name: inside for name, inside in state.items() if name != REGISTERED}
    for name, inside in registered.items() if isinstance(registered, dict) else ():
        parts.setdefault(name, inside)
    value = parts.get(part)
    if not isinstance(value, dict):
        known = [str(name) for name, inside in parts.items() if isinstance(inside, dict)]
        raise CheckpointError(f"{checkpoint} has no part {part!r}; it has {', '.join(known) or 'none'}")
    return value


def _bytes_of(checkpoint: Path, entry: TensorEntry) -> Iterator[memoryview]:
    sha, left = hashlib.sha256(), entry.spec.bytes
    path = checkpoint / entry.file
    with file_io.opened(path) as file:
        file.seek(entry.start)
        while left:
            part = memoryview(bytearray(min(left, file_io.PIECE_BYTES)))
            if not file_io.fill(file, part):
                break
            sha.update(part)
            left -= len(part)
            yield part
    if left or sha.hexdigest() != entry.sha256:
        raise file_io.damaged(path)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield the path of a new file beside `out`. It takes the place of `out` at the end, and is removed on an error."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, out)
        file_io.sync_directory(out.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)
