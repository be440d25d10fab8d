"""Shared memory: segments, the heap in a segment, and semaphores by which one process wakes another.

Every worker has one segment. It has no name: it is a memfd, or an O_TMPFILE in a tmpfs where there are no memfds. So no
other process can open it by name, and its memory is freed when the last process that maps it has ended in any way.

Note [Sparse segments]
A segment is as large as the machine's memory, but pages exist only where something was written, and when many are free
they are returned to the system. So peers map it once, and an address in it never changes.

Note [Why semaphores]
A semaphore is a futex with a count. A post makes no system call while no process sleeps, a sleep uses no core, and both
order memory accesses as the data around them needs on every kind of processor, which plain stores from Python would
not. A semaphore has no owner: a process that is killed at any instant leaves nothing locked.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from lockstep.errors import SharedMemoryFullError
from lockstep.settings import Settings

PAGE: Final = mmap.PAGESIZE
MIN_BYTES: Final = 64 << 20
KEEP_BYTES: Final = 256 << 20
SEMAPHORE_BYTES: Final = 64  # sem_t has 32 at most; a cache line each, against false sharing
SPIN_S: Final = 200e-6  # waking up from sleep takes 50 us and more on a virtual machine
MORE_MEMORY_ADVICE: Final = (
    "give it more (docker run --shm-size=8g, or mount -o remount,size=8g), or unset LOCKSTEP_SHM_DIR to use none of it"
)


class Segment:
    """A mapped shared-memory file; `bytes` is a tensor on all of it."""

    def __init__(self, fd: int, size: int, *, limited: bool) -> None:
        self.fd, self.size, self.limited = fd, size, limited
        self.map = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def reserve(self, offset: int, size: int, purpose: str) -> None:
        """Allocate the pages. Raises SharedMemoryFullError; in a full tmpfs, touching a page would kill the process."""
        if not self.limited:
            return
        try:
            os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            what = f"{purpose} needs {size / 2**20:.1f} MiB of shared memory, and {_directory()} is full"
            raise SharedMemoryFullError(f"{what}; {MORE_MEMORY_ADVICE}") from None

    def available_bytes(self) -> int | None:
        """Free bytes of the file system of the segment; None if only the machine's memory limits it."""
        if not self.limited:
            return None
        left = os.fstatvfs(self.fd)
        return left.f_bavail * left.f_frsize

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Offset of a contiguous tensor in this segment, or None if it is elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


def create_segment() -> Segment:
    """Create a segment as large as possible, since only used pages count. Raises SharedMemoryFullError."""
    fd, limited = _open()
    size = _max_bytes(fd, limited)
    while True:
        try:
            os.ftruncate(fd, size)
            return Segment(fd, size, limited=limited)
        except OSError as error:  # a limit on address space (ulimit -v) or on the size of files
            if size // 2 < MIN_BYTES:
                os.close(fd)
                raise SharedMemoryFullError(
                    f"could not map {size / 2**20:.0f} MiB of shared memory: {error.strerror}; "
                    "raise the limits that `ulimit -v` and `ulimit -f` show"
                ) from error
            size //= 2


def _directory() -> str:
    return Settings.from_env(os.environ).shm_dir or "/dev/shm"


def _open() -> tuple[int, bool]:
    """(file descriptor, whether a file system limits its size)."""
    if Settings.from_env(os.environ).shm_dir is None:
        # Some sandboxes have no memfds.
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create("lockstep", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)  # created with 0777
            return fd, False
    try:
        return os.open(_directory(), os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        raise SharedMemoryFullError(
            f"no shared memory: {_directory()}: {error.strerror}; LOCKSTEP_SHM_DIR must name a folder in a tmpfs"
        ) from error


def _max_bytes(fd: int, limited: bool) -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limited:
        file_system = os.fstatvfs(fd)
        total = min(total, file_system.f_frsize * file_system.f_blocks)
    return max(total // PAGE * PAGE, MIN_BYTES)


class Heap:
    """First-fit allocator in a segment, from `start` on. Blocks are whole pages, so that a free one costs nothing."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._segment, self._pid = segment, os.getpid()
        self._lock = threading.Lock()
        self._free = [(start, segment.size)]  # (begin, end), sorted, never adjacent
        self._resident = 0  # bytes of free blocks that still have pages, approximately
        # Tensors are freed at any time, also inside `allocate`, when the garbage collector runs there. So their blocks
        # are only recorded here, and the next `allocate` makes them available.
        self._freed: deque[tuple[int, int]] = deque()

    def allocate(self, size: int, purpose: str) -> int:
        """Returns the offset of a new block of `size` bytes. Raises SharedMemoryFullError."""
        size = _page_bytes(size)
        with self._lock:
            while self._freed:
                self._insert_free(*self._freed.popleft())
            for i, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._segment.reserve(begin, size, purpose)
                    self._resident = max(0, self._resident - size)
                    self._free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return begin
            largest = max((end - begin for begin, end in self._free), default=0)
        advice = MORE_MEMORY_ADVICE if self._segment.limited else "free tensors that you no longer need"
        raise SharedMemoryFullError(
            f"{purpose} needs {size / 2**20:.1f} MiB of shared memory in one piece, "
            f"{largest / 2**20:.1f} MiB are left; {advice}"
        )

    def free(self, offset: int, size: int) -> None:
        """Free a block that `allocate` returned. Some pages are kept, because a page fault costs as much as a copy."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of the tensor, but its parent owns the memory
        self._resident += _page_bytes(size)
        if self._resident > KEEP_BYTES:
            self._resident -= _page_bytes(size)
            # Best effort: a file system that cannot punch holes keeps the pages for the next block.
            with contextlib.suppress(OSError):
                self._segment.map.madvise(mmap.MADV_REMOVE, offset, _page_bytes(size))
        self._freed.append((offset, _page_bytes(size)))

    def _insert_free(self, begin: int, size: int) -> None:
        end = begin + size
        i = bisect.bisect(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == begin:
            begin = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (begin, end))

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in this heap. Its block is freed together with its storage."""
        size = numel * dtype.itemsize
        if size == 0:
            return torch.empty(0, dtype=dtype)
        offset = self.allocate(size, f"a tensor of {numel} x {str(dtype).removeprefix('torch.')}")
        # The storage references this array, and the array the mapping; so the mapping outlives the group if needed.
        block = (ctypes.c_char * size).from_buffer(self._segment.map, offset)
        weakref.finalize(block, self.free, offset, size).atexit = False
        return torch.frombuffer(block, dtype=dtype)


def _page_bytes(size: int) -> int:
    return max(1, -(-size // PAGE)) * PAGE


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)
_sem_trywait, _sched_yield = _libc.sem_trywait, _libc.sched_yield
# `post_semaphore(address)` increments. The C function itself, because it is called for every peer in every phase.
post_semaphore: Callable[[int], int] = _libc.sem_post
_libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_libc.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
_libc.sem_trywait.argtypes = _libc.sem_post.argtypes = [ctypes.c_void_p]


def create_semaphore(address: int) -> None:
    """Initialise a semaphore in the SEMAPHORE_BYTES at `address`, for all processes that map them. Raises OSError."""
    if _libc.sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def await_semaphore(address: int, wait_s: float, *, spin: bool) -> bool:
    """Decrement, waiting up to `wait_s`; returns False after that time. `spin`: poll and yield before sleeping."""
    if _sem_trywait(address) == 0:
        return True
    if spin:
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            _sched_yield()
            if _sem_trywait(address) == 0:
                return True
    # sem_timedwait uses the wall clock. If that jumps, one wait is shorter or longer; callers keep the real deadlines.
    end_ns = time.time_ns() + int(wait_s * 1e9)
    until = _Timespec(end_ns // 1_000_000_000, end_ns % 1_000_000_000)
    if _libc.sem_timedwait(address, ctypes.byref(until)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ETIMEDOUT, errno.EINTR):
        return False
    raise OSError(code, os.strerror(code))


_fence = ctypes.create_string_buffer(SEMAPHORE_BYTES)
create_semaphore(ctypes.addressof(_fence))


def memory_fence() -> None:
    """Full memory fence: other processes see earlier reads and writes before later ones."""
    post_semaphore(ctypes.addressof(_fence))
    _sem_trywait(ctypes.addressof(_fence))
