"""Memory that several processes map, and the heap in it.

Every worker has one segment. It has no name anywhere: a memfd, or an O_TMPFILE in a tmpfs where there are no memfds. So
nobody can guess or open it, and when the last process that maps it is gone, however it went, the memory is gone too.

Note [Sparse segments]
A segment is as large as the machine's memory, but pages exist only where something was written, and when many are free
they are given back. So peers map it once and for all, and an address in it never changes.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Final

import torch

from lockstep.errors import SharedMemoryFullError

PAGE: Final = mmap.PAGESIZE
LEAST_BYTES: Final = 64 << 20
KEEP_BYTES: Final = 256 << 20
MORE: Final = (
    "give it more (docker run --shm-size=8g, or mount -o remount,size=8g), or unset LOCKSTEP_SHM_DIR to use none of it"
)


class Segment:
    """A mapped stretch of memory, as bytes of a tensor."""

    def __init__(self, fd: int, size: int, *, limited: bool) -> None:
        self.fd, self.size, self.limited = fd, size, limited
        self.map = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def reserve(self, offset: int, size: int, purpose: str) -> None:
        """Make sure that the pages are there. In a tmpfs that is full, touching one would kill the process."""
        if not self.limited:
            return
        try:
            os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            what = f"{purpose} needs {size / 2**20:.1f} MiB of shared memory, and {_folder()} is full"
            raise SharedMemoryFullError(f"{what}; {MORE}") from None

    def room(self) -> int | None:
        """Bytes left where the segment lies, for all who use that; None if only the machine's memory counts."""
        if not self.limited:
            return None
        left = os.fstatvfs(self.fd)
        return left.f_bavail * left.f_frsize

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies in this segment, if it does."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


def create_segment() -> Segment:
    """A new segment of our own; as large as can be, since only what is used counts."""
    fd, limited = _open()
    size = _most_bytes(fd, limited)
    while True:
        try:
            os.ftruncate(fd, size)
            return Segment(fd, size, limited=limited)
        except OSError as error:  # a limit on address space (ulimit -v) or on the size of files
            if size // 2 < LEAST_BYTES:
                os.close(fd)
                raise SharedMemoryFullError(
                    f"could not map {size / 2**20:.0f} MiB of shared memory: {error.strerror}; "
                    "raise the limits that `ulimit -v` and `ulimit -f` show"
                ) from error
            size //= 2


def _folder() -> str:
    return os.environ.get("LOCKSTEP_SHM_DIR") or "/dev/shm"


def _open() -> tuple[int, bool]:
    """(file descriptor, whether a file system limits its size)."""
    if not os.environ.get("LOCKSTEP_SHM_DIR"):
        # Some sandboxes have no memfds.
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create("lockstep", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)  # it is made with 0777
            return fd, False
    try:
        return os.open(_folder(), os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        raise SharedMemoryFullError(
            f"no shared memory: {_folder()}: {error.strerror}; LOCKSTEP_SHM_DIR must name a folder in a tmpfs"
        ) from error


def _most_bytes(fd: int, limited: bool) -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limited:
        room = os.fstatvfs(fd)
        total = min(total, room.f_frsize * room.f_blocks)
    return max(total // PAGE * PAGE, LEAST_BYTES)


class Heap:
    """First fit in one segment, from `start` on. Blocks are pages, so that a free one costs no memory."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._segment, self._pid = segment, os.getpid()
        self._lock = threading.Lock()
        self._free = [(start, segment.size)]  # (begin, end), in order, never touching
        self._kept = 0  # bytes of free blocks that still have pages, about
        # Tensors end at any time, also in the middle of `take`, when the garbage collector runs there. So they are only
        # noted down here, and freed by the next `take`.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, size: int, purpose: str) -> int:
        """The offset of a block of `size` bytes."""
        size = _pages(size)
        with self._lock:
            while self._returned:
                self._put_back(*self._returned.popleft())
            for i, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._segment.reserve(begin, size, purpose)
                    self._kept = max(0, self._kept - size)
                    self._free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return begin
            largest = max((end - begin for begin, end in self._free), default=0)
        advice = MORE if self._segment.limited else "free tensors that you no longer need"
        raise SharedMemoryFullError(
            f"{purpose} needs {size / 2**20:.1f} MiB of shared memory in one piece, "
            f"{largest / 2**20:.1f} MiB are left; {advice}"
        )

    def give_back(self, offset: int, size: int) -> None:
        """The block that `take` gave is free again. Some pages are kept, because new ones cost as much as a copy."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of the tensor, but the memory is its parent's
        self._kept += _pages(size)
        if self._kept > KEEP_BYTES:
            self._kept -= _pages(size)
            # Best effort: a file system that cannot punch holes keeps the pages for the next block.
            with contextlib.suppress(OSError):
                self._segment.map.madvise(mmap.MADV_REMOVE, offset, _pages(size))
        self._returned.append((offset, _pages(size)))

    def _put_back(self, begin: int, size: int) -> None:
        end = begin + size
        i = bisect.bisect(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == begin:
            begin = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (begin, end))

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in this heap. Its block is free again when nobody holds its storage any more."""
        size = numel * dtype.itemsize
        if size == 0:
            return torch.empty(0, dtype=dtype)
        offset = self.take(size, f"a tensor of {numel} x {str(dtype).removeprefix('torch.')}")
        # The storage holds this array, and the array the mapping; so the mapping outlives the group if it must.
        block = (ctypes.c_char * size).from_buffer(self._segment.map, offset)
        weakref.finalize(block, self.give_back, offset, size).atexit = False
        return torch.frombuffer(block, dtype=dtype)


def _pages(size: int) -> int:
    return max(1, -(-size // PAGE)) * PAGE
