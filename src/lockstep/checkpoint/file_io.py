"""Reads and writes files in pieces. Hashing and disk calls release the GIL, and no thread waits for more than one."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep import faults
from lockstep.errors import CheckpointError

PIECE_BYTES = 4 << 20


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
                _write_all(handle, part)
                sha.update(part)
                size += len(part)
        faults.at("fsync")
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileDigest(size, sha.hexdigest())


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


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_whole(path: Path, limit: int, *, fresh: bool = False) -> bytes:
    with opened(path, fresh=fresh) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, and {limit} are the most; use an older checkpoint")
        data = bytearray(size)
        if not fill(file, memoryview(data)) or file.read(1):
            raise CheckpointError(f"{path} changed while it was read; try again")
        return bytes(data)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}; use an older checkpoint")


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]
