"""Is a checkpoint what was written? Every byte is read, and nothing is believed. Needs no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import faults
from lockstep.checkpoint import file_io, manifest, read_json, state_tree
from lockstep.checkpoint.manifest import STATE, Manifest
from lockstep.checkpoint.safetensors_file import Destination, Entry, damaged, scan
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """A checkpoint that is whole."""

    manifest: Manifest
    structure: Any  # the state without its tensors, see `tree`
    tensors: dict[str, Entry]

    def outline(self, directory: Path) -> dict[Any, Any]:
        """The state, with an Entry in the place of every tensor."""
        return state_tree.restore(self.structure, self.tensors, directory / STATE)


def verify(
    directory: Path, *, step: int | None = None, fresh: bool = False, into: Destination | None = None
) -> Contents:
    """Raises CheckpointError, and nothing else, if a single bit is not as it was.

    step   what it must be of; None: what the name of the directory says
    fresh  from the disk itself, where the system can be asked for that
    into   where the bytes of each tensor go; None: they are looked at only
    """
    faults.at("verify")
    listed = manifest.read(directory, step=step, fresh=fresh)
    manifest.check_files(directory, listed)
    path = directory / STATE
    text = file_io.read_whole(path, read_json.JSON_BYTES, fresh=fresh)
    if hashlib.sha256(text).hexdigest() != listed.files[STATE].sha256:
        raise damaged(path)
    structure = read_json.parse(text, path)
    tensors: dict[str, Entry] = {}
    for name in listed.tensor_files:
        found = scan(directory / name, listed.files[name], into=into, fresh=fresh)
        for twice in found.keys() & tensors.keys():
            raise read_json.bad(directory / name, f"{twice!r} is in {tensors[twice].file} too")
        tensors |= found
    contents = Contents(listed, structure, tensors)
    contents.outline(directory)
    if state_tree.digest(structure, tensors) != listed.state_sha256:
        raise CheckpointError(f"{directory} is damaged: its state has another SHA-256 than its manifest says")
    return contents


def looks_whole(directory: Path) -> bool:
    """A quick look: the manifest, and the sizes of all files."""
    try:
        manifest.check_files(directory, manifest.read(directory))
    except CheckpointError:
        return False
    return True
