"""Checks that a checkpoint is exactly what was written: its name, its manifest, and every byte. Needs no torch.

The manifest lists the files with size and SHA-256. Its last line is the SHA-256 of the lines before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep import faults
from lockstep.checkpoint import file_io, state_files
from lockstep.checkpoint.state_files import Destination, TensorEntry
from lockstep.errors import CheckpointError

VERSION = 2
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
CHECKSUM_LINE_BYTES = 66

_STEP = re.compile(r"step-(\d{9,18})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LATEST = 2e11  # seconds since 1970: about the year 8000, which can still be printed
_SHA256 = re.compile(r"[0-9a-f]{64}")


# ---- names -----------------------------------------------------------------------------------------------------------


def directory_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps in ascending order; none if the folder does not exist."""
    return sorted(step for step in map(step_of, names_in(folder)) if step is not None)


def names_in(folder: Path) -> list[str]:
    """Return the names of all files and folders; none if the folder does not exist."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


# ---- the manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    step: int
    saved_at: float  # seconds since 1970
    versions: Mapping[str, str]  # of lockstep, torch and python
    state_sha256: str  # see state_files.digest
    files: Mapping[str, file_io.FileDigest]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    text = json.dumps({"version": VERSION, **asdict(manifest)}, allow_nan=False, indent=1).encode()
    return text + _checksum_line(text)


def read(directory: Path, *, step: int | None = None, fresh: bool = False) -> Manifest:
    """Read the manifest. Raises CheckpointError if it is damaged or of another step than `step`.

    step   None: the step in the name of the directory
    fresh  read from the disk, not from the page cache
    """
    path = directory / MANIFEST
    try:
        is_directory = stat.S_ISDIR(os.lstat(directory).st_mode)
    except OSError as error:
        raise file_io.unreadable(directory, error) from error
    if not is_directory:
        raise CheckpointError(f"{directory} is not a directory, or a link to one; it cannot be a checkpoint")
    data = file_io.read_whole(path, fresh=fresh)
    text, checksum_line = data[:-CHECKSUM_LINE_BYTES], data[-CHECKSUM_LINE_BYTES:]
    if checksum_line != _checksum_line(text):
        raise file_io.damaged(path)
    manifest = _decode(file_io.parse_json(text, path), path)
    expected = step_of(directory.name) if step is None else step
    if manifest.step != expected:
        raise CheckpointError(
            f"{directory} holds the checkpoint of step {manifest.step}, so it was renamed or swapped; "
            f"its name was {directory_name(manifest.step)}"
        )
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the directory has exactly the listed files, each a regular file of its size."""
    try:
        with os.scandir(directory) as entries:
            there = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    except OSError as error:
        raise file_io.unreadable(directory, error) from error
    for name in sorted({*manifest.files, MANIFEST} - set(there)):
        raise CheckpointError(f"{directory / name} is missing; use an older checkpoint")
    for name in sorted(set(there) - {*manifest.files, MANIFEST}):
        raise CheckpointError(f"{str(directory / name)!r} does not belong to the checkpoint; remove it if it is yours")
    for name, expected in manifest.files.items():
        if not stat.S_ISREG(there[name].st_mode):
            raise CheckpointError(f"{directory / name} is not a plain file; use an older checkpoint")
        size = there[name].st_size
        if size != expected.bytes:
            raise CheckpointError(
                f"{directory / name} is damaged: it has {size} bytes and not {expected.bytes}; use an older one"
            )


def _decode(fields: Any, path: Path) -> Manifest:
    version: Any = fields.get("version") if isinstance(fields, dict) else None
    if not file_io.is_count(version):
        raise file_io.malformed(path, "it has no version")
    if version != VERSION:
        advice = "update it" if version > VERSION else "that format was never released: begin that run anew"
        raise CheckpointError(f"{path} has format {version}, and this Lockstep reads {VERSION}; {advice}")
    match fields:
        case {
            "step": step,
            "saved_at": float(saved_at),
            "versions": dict(versions),
            "state_sha256": str(sha256),
            "files": dict(files),
        } if file_io.is_count(step) and _SHA256.fullmatch(sha256) and 0 <= saved_at < _LATEST and len(fields) == 6:
            pass
        case _:
            raise file_io.malformed(path, "it does not have the fields that it must have")
    if not all(isinstance(text, str) for text in versions.values()):
        raise file_io.malformed(path, "a version is not a text")
    listed = {name: _decode_file(name, file, path) for name, file in files.items()}
    if STATE not in listed:
        raise file_io.malformed(path, f"{STATE} is not listed")
    return Manifest(step, saved_at, versions, sha256, listed)


def _decode_file(name: str, fields: Any, path: Path) -> file_io.FileDigest:
    if not _FILE_NAME.fullmatch(name) or not (name == STATE or name.endswith(".safetensors")):
        raise file_io.malformed(path, f"{name!r} is not the name of a file in a checkpoint")
    match fields:
        case {"bytes": size, "sha256": str(sha256), **rest} if file_io.is_count(size) and not rest:
            if _SHA256.fullmatch(sha256):
                return file_io.FileDigest(size, sha256)
    raise file_io.malformed(path, f"{name} has no size or no SHA-256")


def _checksum_line(text: bytes) -> bytes:
    return f"\n{hashlib.sha256(text).hexdigest()}\n".encode()


# ---- every byte ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """The contents of a valid checkpoint, without the bytes of its tensors."""

    manifest: Manifest
    structure: Any  # the state without its tensors: see state_files.py
    tensors: dict[str, TensorEntry]

    def outline(self, directory: Path) -> dict[Any, Any]:
        """Return the state with a TensorEntry in the place of every tensor."""
        return state_files.restore(self.structure, self.tensors, directory / STATE)


def verify(
    directory: Path, *, step: int | None = None, fresh: bool = False, into: Destination | None = None
) -> Contents:
    """Read a checkpoint and check every byte. Raises CheckpointError, and nothing else, if a single bit has changed.

    step   the step that it must have; None: the step in the name of the directory
    fresh  read from the disk, not from the page cache, where the system supports that
    into   returns the memory for the bytes of each tensor; None: they are only checked
    """
    faults.at("verify")
    listed = read(directory, step=step, fresh=fresh)
    check_files(directory, listed)
    path = directory / STATE
    text = file_io.read_whole(path, fresh=fresh)
    if hashlib.sha256(text).hexdigest() != listed.files[STATE].sha256:
        raise file_io.damaged(path)
    structure = file_io.parse_json(text, path)
    tensors: dict[str, TensorEntry] = {}
    for name in (name for name in listed.files if name != STATE):  # all others hold tensors
        found = state_files.scan(directory / name, listed.files[name], into=into, fresh=fresh)
        for duplicate in found.keys() & tensors.keys():
            raise file_io.malformed(directory / name, f"{duplicate!r} is in {tensors[duplicate].file} too")
        tensors |= found
    contents = Contents(listed, structure, tensors)
    contents.outline(directory)
    if state_files.digest(structure, tensors) != listed.state_sha256:
        raise CheckpointError(f"{directory} is damaged: its state has another SHA-256 than its manifest says")
    return contents


def looks_valid(directory: Path) -> bool:
    """Quick check of the manifest and the sizes of all files."""
    try:
        check_files(directory, read(directory))
    except CheckpointError:
        return False
    return True
