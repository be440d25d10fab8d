"""POSIX semaphores in shared memory, by which one process wakes another.

Note [Why semaphores]
A semaphore is a futex with a count. A post makes no system call while no process sleeps, a sleep uses no core, and both
order memory accesses as the data around them needs on every kind of processor, which plain stores from Python would
not. A semaphore has no owner: a process that is killed at any instant leaves nothing locked.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from typing import Final

SEMAPHORE_BYTES: Final = 64  # sem_t has 32 at most; a cache line each, against false sharing
SPIN_S: Final = 200e-6  # waking up from sleep takes 50 us and more on a virtual machine


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)
_sem_init = _libc.sem_init
_sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_sem_timedwait = _libc.sem_timedwait
_sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
_sem_trywait = _libc.sem_trywait
_sem_trywait.argtypes = [ctypes.c_void_p]
_sched_yield = _libc.sched_yield
_sem_post = _libc.sem_post
_sem_post.argtypes = [ctypes.c_void_p]

# `post(address)` increments. The C function itself, because it is called for every peer in every phase.
post: Callable[[int], int] = _sem_post


def create(address: int) -> None:
    """Initialise a semaphore in the SEMAPHORE_BYTES at `address`, for all processes that map them. Raises OSError."""
    if _sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def wait(address: int, wait_s: float, *, spin: bool) -> bool:
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
    if _sem_timedwait(address, ctypes.byref(until)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ETIMEDOUT, errno.EINTR):
        return False
    raise OSError(code, os.strerror(code))


_fence = ctypes.create_string_buffer(SEMAPHORE_BYTES)
create(ctypes.addressof(_fence))


def fence() -> None:
    """Full memory fence: other processes see earlier reads and writes before later ones."""
    _sem_post(ctypes.addressof(_fence))
    _sem_trywait(ctypes.addressof(_fence))
