"""The manifest of a checkpoint: its files with size and SHA-256. Its last line is the SHA-256 of the lines before."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import file_io, folder_names, read_json
from lockstep.checkpoint.safetensors_file import damaged
from lockstep.errors import CheckpointError

VERSION = 2
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
SEAL_BYTES = 66

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LATEST = 2e11  # seconds since 1970: about the year 8000, which can still be printed
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    step: int
    saved_at: float  # seconds since 1970
    versions: Mapping[str, str]  # of lockstep, torch and python
    state_sha256: str  # see state_tree.digest
    files: Mapping[str, file_io.FileDigest]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def tensor_files(self) -> list[str]:
        """Names of all tensor files; their tensors together are those of the state."""
        return [name for name in self.files if name != STATE]


def encode(manifest: Manifest) -> bytes:
    fields = {
        "version": VERSION,
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "versions": dict(manifest.versions),
        "state_sha256": manifest.state_sha256,
        "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in manifest.files.items()},
    }
    text = json.dumps(fields, allow_nan=False, indent=1).encode()
    return text + _seal(text)


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
    data = file_io.read_whole(path, read_json.JSON_BYTES, fresh=fresh)
    text, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if seal != _seal(text):
        raise damaged(path)
    manifest = _decode(read_json.parse(text, path), path)
    expected = folder_names.step_of(directory.name) if step is None else step
    if manifest.step != expected:
        raise CheckpointError(
            f"{directory} holds the checkpoint of step {manifest.step}, so it was renamed or swapped; "
            f"its name was {folder_names.directory_name(manifest.step)}"
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
    if not read_json.is_count(version):
        raise read_json.malformed(path, "it has no version")
    if version != VERSION:
        advice = "update it" if version > VERSION else "that format was never released: begin that run anew"
        raise CheckpointError(f"{path} has format {version}, and this Lockstep reads {VERSION}; {advice}")
    match fields:
        case {
            "step": step,
            "saved_at": float(saved_at),
            "versions": dict(versions),
            "state_sha256": str(state_sha256),
            "files": dict(files),
        } if (
            len(fields) == 6
            and read_json.is_count(step)
            and _SHA256.fullmatch(state_sha256)
            and 0 <= saved_at < _LATEST
        ):
            pass
        case _:
            raise read_json.malformed(path, "it does not have the fields that it must have")
    if not all(isinstance(text, str) for text in versions.values()):
        raise read_json.malformed(path, "a version is not a text")
    listed = {name: _decode_file(name, file, path) for name, file in files.items()}
    if STATE not in listed:
        raise read_json.malformed(path, f"{STATE} is not listed")
    return Manifest(step, saved_at, versions, state_sha256, listed)


def _decode_file(name: str, fields: Any, path: Path) -> file_io.FileDigest:
    if not _FILE_NAME.fullmatch(name) or not (name == STATE or name.endswith(".safetensors")):
        raise read_json.malformed(path, f"{name!r} is not the name of a file in a checkpoint")
    match fields:
        case {"bytes": size, "sha256": str(sha256), **rest} if read_json.is_count(size) and not rest:
            if _SHA256.fullmatch(sha256):
                return file_io.FileDigest(size, sha256)
    raise read_json.malformed(path, f"{name} has no size or no SHA-256")


def _seal(text: bytes) -> bytes:
    return f"\n{hashlib.sha256(text).hexdigest()}\n".encode()
