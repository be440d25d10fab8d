"""Reads and writes the files of checkpoints, which are not trusted. Errors name the file.

Files are read and written in pieces: hashing and disk calls release the GIL, and no thread waits for more than one.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import faults, strict_json
from lockstep.errors import CheckpointError

PIECE_BYTES = 4 << 20
pieces_done = 0  # that this process has read or written since it began: whether a disk makes progress
JSON_BYTES = 64 << 20  # limit of one JSON text; parsed, it may take thirty times as much memory


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


def write_new(path: Path, pieces: Iterable[memoryview | bytes]) -> FileDigest:
    """Write a file that must not exist yet, and return its digest. It is synced when this returns."""
    sha, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            for part in split_pieces(piece):
                faults.at("write")
                left = part
                while left:
                    left = left[os.write(handle, left) :]
                count_piece()
                sha.update(part)
                size += len(part)
        faults.at("fsync")
        os.fsync(handle)
        count_piece()
    finally:
        os.close(handle)
    return FileDigest(size, sha.hexdigest())


def count_piece() -> None:
    """Count a piece that was read or written."""
    global pieces_done
    pieces_done += 1


def split_pieces(piece: memoryview | bytes) -> Iterator[memoryview]:
    view = memoryview(piece)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def sync_directory(path: Path) -> None:
    """Sync the directory, so that names created, changed or removed in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        faults.at("fsync")
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Create the directory and its missing parents, and sync each."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def opened(path: Path, *, fresh: bool = False) -> Iterator[io.FileIO]:
    """Open a regular file. Raises CheckpointError for anything else: a link, or a pipe on which reading would hang.

    fresh  drop the file from the page cache first, where the system supports that, so that the disk is read
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a plain file; use an older checkpoint")
    with io.FileIO(handle) as file:
        if fresh and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error) from error


def fill(file: io.FileIO, view: memoryview) -> bool:
    """Read until `view` is full. Returns False if the file ends before."""
    while view:
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def read_whole(path: Path, *, fresh: bool = False) -> bytes:
    """Return the bytes of a JSON file. Raises CheckpointError if it is larger than JSON_BYTES."""
    with opened(path, fresh=fresh) as file:
        size = os.fstat(file.fileno()).st_size
        if size > JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, and {JSON_BYTES} are the most; use an older checkpoint")
        data = bytearray(size)
        if not fill(file, memoryview(data)) or file.read(1):
            raise CheckpointError(f"{path} changed while it was read; try again")
        return bytes(data)


def dump_json(value: Any, where: str) -> bytes:
    """Encode deterministically: equal values give equal bytes. Raises CheckpointError if the text is too large."""
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()
    except ValueError as error:  # a whole number of very many digits
        raise CheckpointError(f"{where} cannot be written as JSON: {error}") from error
    if len(text) > JSON_BYTES:
        raise CheckpointError(
            f"{where} takes {len(text)} bytes of JSON, and {JSON_BYTES} are the most; put large data into tensors"
        )
    return text


def parse_json(data: bytes, where: Path) -> Any:
    """Decode JSON of at most JSON_BYTES. Raises CheckpointError if it is not valid."""
    try:
        return strict_json.parse(data)
    except ValueError as error:
        raise malformed(where, str(error)) from error


def is_count(value: object) -> bool:
    """Whether this is an integer from 0 to 2**63 - 1. True and False are not."""
    return type(value) is int and 0 <= value < 2**63


# ---- errors ----------------------------------------------------------------------------------------------------------


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}; use an older checkpoint")


def malformed(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not what Lockstep writes: {reason}; use an older checkpoint")


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its SHA-256 is not the one it was written with; use an older one")
