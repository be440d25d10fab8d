"""The manifest of a checkpoint: which files there are, and what they must be. Its last line is its own SHA-256."""

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
_LATEST = 2e11  # seconds since 1970: the year 8000, and printable
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    step: int
    saved_at: float  # seconds since 1970
    versions: Mapping[str, str]  # of lockstep, torch and python
    state_sha256: str  # see tree.digest
    files: Mapping[str, file_io.Facts]

    @property
    def bytes(self) -> int:
        return sum(facts.bytes for facts in self.files.values())

    @property
    def tensor_files(self) -> list[str]:
        """As many as there are: their tensors together are those of the state."""
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
    """The manifest, if it is whole and belongs to a directory of this name, or to this `step`."""
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
            f"{directory} holds the checkpoint of step {manifest.step}, so somebody renamed or swapped it; "
            f"its name was {folder_names.directory_name(manifest.step)}"
        )
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Those listed are there, are files, have their size, and nothing else is there."""
    try:
        with os.scandir(directory) as entries:
            there = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    except OSError as error:
        raise file_io.unreadable(directory, error) from error
    for name in sorted({*manifest.files, MANIFEST} - set(there)):
        raise CheckpointError(f"{directory / name} is missing; use an older checkpoint")
    for name in sorted(set(there) - {*manifest.files, MANIFEST}):
        raise CheckpointError(f"{str(directory / name)!r} does not belong to the checkpoint; remove it if it is yours")
    for name, facts in manifest.files.items():
        if not stat.S_ISREG(there[name].st_mode):
            raise CheckpointError(f"{directory / name} is not a plain file; use an older checkpoint")
        size = there[name].st_size
        if size != facts.bytes:
            raise CheckpointError(
                f"{directory / name} is damaged: it has {size} bytes and not {facts.bytes}; use an older one"
            )


def _decode(fields: Any, path: Path) -> Manifest:
    version: Any = fields.get("version") if isinstance(fields, dict) else None
    if not read_json.is_count(version):
        raise read_json.bad(path, "it has no version")
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
            raise read_json.bad(path, "it does not have the fields that it must have")
    if not all(isinstance(text, str) for text in versions.values()):
        raise read_json.bad(path, "a version is not a text")
    listed = {name: _facts(name, facts, path) for name, facts in files.items()}
    if STATE not in listed:
        raise read_json.bad(path, f"{STATE} is not listed")
    return Manifest(step, saved_at, versions, state_sha256, listed)


def _facts(name: str, facts: Any, path: Path) -> file_io.Facts:
    if not _FILE_NAME.fullmatch(name) or not (name == STATE or name.endswith(".safetensors")):
        raise read_json.bad(path, f"{name!r} is not the name of a file in a checkpoint")
    match facts:
        case {"bytes": size, "sha256": str(sha256), **rest} if read_json.is_count(size) and not rest:
            if _SHA256.fullmatch(sha256):
                return file_io.Facts(size, sha256)
    raise read_json.bad(path, f"{name} has no size or no SHA-256")


def _seal(text: bytes) -> bytes:
    return f"\n{hashlib.sha256(text).hexdigest()}\n".encode()
