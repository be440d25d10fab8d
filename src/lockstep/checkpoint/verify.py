"""Checks that a checkpoint is exactly what was written: every byte is read and checked. Needs no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import faults
from lockstep.checkpoint import file_io, manifest, read_json, state_tree
from lockstep.checkpoint.manifest import STATE, Manifest
from lockstep.checkpoint.safetensors_file import Destination, TensorEntry, damaged, scan
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """The contents of a valid checkpoint, without the bytes of its tensors."""

    manifest: Manifest
    structure: Any  # the state without its tensors: see state_tree.py
    tensors: dict[str, TensorEntry]

    def outline(self, directory: Path) -> dict[Any, Any]:
        """Return the state with a TensorEntry in the place of every tensor."""
        return state_tree.restore(self.structure, self.tensors, directory / STATE)


def verify(
    directory: Path, *, step: int | None = None, fresh: bool = False, into: Destination | None = None
) -> Contents:
    """Read a checkpoint and check every byte. Raises CheckpointError, and nothing else, if a single bit has changed.

    step   the step that it must have; None: the step in the name of the directory
    fresh  read from the disk, not from the page cache, where the system supports that
    into   returns the memory for the bytes of each tensor; None: they are only checked
    """
    faults.at("verify")
    listed = manifest.read(directory, step=step, fresh=fresh)
    manifest.check_files(directory, listed)
    path = directory / STATE
    text = file_io.read_whole(path, read_json.JSON_BYTES, fresh=fresh)
    if hashlib.sha256(text).hexdigest() != listed.files[STATE].sha256:
        raise damaged(path)
    structure = read_json.parse(text, path)
    tensors: dict[str, TensorEntry] = {}
    for name in listed.tensor_files:
        found = scan(directory / name, listed.files[name], into=into, fresh=fresh)
        for duplicate in found.keys() & tensors.keys():
            raise read_json.malformed(directory / name, f"{duplicate!r} is in {tensors[duplicate].file} too")
        tensors |= found
    contents = Contents(listed, structure, tensors)
    contents.outline(directory)
    if state_tree.digest(structure, tensors) != listed.state_sha256:
        raise CheckpointError(f"{directory} is damaged: its state has another SHA-256 than its manifest says")
    return contents


def looks_valid(directory: Path) -> bool:
    """Quick check of the manifest and the sizes of all files."""
    try:
        manifest.check_files(directory, manifest.read(directory))
    except CheckpointError:
        return False
    return True
