"""Lets a CUDA stream of one process wait for a stream of another one, without any host that waits for a GPU.

Every worker has two numbers in host memory that all their GPUs can reach: streams write them when they come to them,
and wait until they have a value, in the order in which this was queued.

Note [A worker that dies]
The number of a worker that dies is never written, and what waits for it would never end: neither would a thread that
waits for such a stream in CUDA, where no exception can reach it. So a thread watches the workers until all numbers are
there. If one is lost, it first raises PeerLostError in the thread that has queued the wait (as soon as that executes
Python code again), and then writes the numbers for which this worker waits: its streams continue with tensors that are
not complete, which the program cannot read before it has the exception. Each worker has numbers of its own for this,
and waits until all workers are ready even if it needs the end of another one's work only, which may have been released.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from lockstep.comm.shm.cuda_ipc import call_driver
from lockstep.comm.shm.phases import POLL_S, GroupMembers, GroupSync, PendingWait
from lockstep.errors import LockstepError

_PORTABLE, _MAPPED = 1, 2  # flags of cuMemHostRegister
_AT_LEAST: Final = 0  # a flag of cuStreamWaitValue32: waits until (int32)(number - value) >= 0
INTERVAL_S: Final = 0.001
EXIT_WAIT_S: Final = 5.0
CHECKED_EVERY: Final = round(POLL_S / INTERVAL_S)


class Caller(NamedTuple):
    """A stream (its address), and the thread whose current one it is."""

    stream: int
    thread: int


class _Watched(NamedTuple):
    """What the watching thread waits for, and in which thread it raises an error."""

    number: int
    leaders: Sequence[int]
    thread: int
    pending: PendingWait
    kept: object


class StreamFlags:
    """The numbers of one group, in the segment of its first worker.

    For each worker there are two of every worker that it waits for, `ready` and `done`, so that each worker can end its
    own waits only.
    """

    def __init__(self, sync: GroupSync, stream: int) -> None:
        """Raises LockstepError or AttributeError if the GPU or its driver cannot do this, tried on a stream."""
        self._sync, self._size = sync, sync.size
        self._segment, self._offset = sync.segments[0], sync.layout.stream_flags
        self._members: GroupMembers | None = None  # an own one, for the watching thread
        self._changed = threading.Condition()
        self._watched: _Watched | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        host, address = self._segment.address + self._offset, ctypes.c_uint64(0)
        call_driver("cuMemHostRegister_v2", host, sync.layout.end - self._offset, _PORTABLE | _MAPPED)
        self._host = host
        try:
            call_driver("cuMemHostGetDevicePointer_v2", ctypes.byref(address), host, 0)
            self._address = address.value
            self.write_ready(0, stream)  # what is there already
            call_driver("cuStreamWaitValue32_v2", stream, self._address, 0, _AT_LEAST)
            call_driver("cuStreamSynchronize", stream)
        except (LockstepError, AttributeError):
            self._unregister()
            raise

    def write_ready(self, number: int, stream: int) -> None:
        """Make a stream (its address) write for all workers that it has come here: this worker's tensors are ready."""
        self._write(0, number, stream)

    def write_done(self, number: int, stream: int) -> None:
        """Make a stream write for all workers that this one has done its part with their tensors."""
        self._write(self._size, number, stream)

    def wait(self, number: int, stream: int, leaders: Sequence[int] = ()) -> None:
        """Make a stream wait until all workers are ready, and the leaders done."""
        for place in self._places(leaders):
            call_driver("cuStreamWaitValue32_v2", stream, self._address + place, _wrap(number), _AT_LEAST)

    def _write(self, first: int, number: int, stream: int) -> None:
        for reader in range(self._size):
            place = 4 * (2 * self._size * reader + first + self._sync.rank)
            call_driver("cuStreamWriteValue32_v2", stream, self._address + place, _wrap(number), 0)

    def _places(self, leaders: Sequence[int]) -> list[int]:
        """Where the numbers are that this worker waits for."""
        first = 2 * self._size * self._sync.rank
        return [4 * (first + which) for which in (*range(self._size), *(self._size + leader for leader in leaders))]

    # ---- watching ----------------------------------------------------------------------------------------------------

    def watch(self, number: int, leaders: Sequence[int], thread: int, kept: object) -> None:
        """Watch the workers until all have written `ready` and the leaders `done`, or the time limit of the group has
        passed.

        thread  in which an error is raised: see Note [A worker that dies]
        kept    what is kept until then
        """
        with self._changed:
            pending = PendingWait("broadcast", self._sync.timeout_s, number)
            self._watched = _Watched(number, leaders, thread, pending, kept)
            if self._thread is None:
                self._members = GroupMembers(
                    self._sync.rank, self._sync.segment, self._sync.global_ranks, self._sync.members.peers
                )
                atexit.register(self.wait_until_done, EXIT_WAIT_S)  # else the others take this worker for a lost one
                self._thread = threading.Thread(target=self._run, name="lockstep-stream-flags", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_until_done(self, wait_s: float) -> None:
        """Wait until nothing is watched any more, for some time at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched is None, wait_s)

    def close(self) -> None:
        """End the thread, and release all that waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.wait_until_done)
        self._unregister()

    def _unregister(self) -> None:
        with suppress(LockstepError):
            call_driver("cuMemHostUnregister", self._host)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched is not None or self._is_closed)
                if self._watched is None:
                    return
                watched = self._watched
            error = self._wait_for_streams(watched.number, watched.leaders, watched.pending)
            if error is not None:
                if self._sync.failed_in != watched.thread:  # else it has the exception already
                    _raise_in(watched.thread, error)
                self.release(watched.number, watched.leaders)
            with self._changed:
                if self._watched is watched:
                    self._watched = None
                del watched
                self._changed.notify_all()

    def _wait_for_streams(self, number: int, leaders: Sequence[int], pending: PendingWait) -> LockstepError | None:
        """Wait until all numbers are written; return the error if they will not be."""
        assert self._members is not None
        for i in itertools.count(1):
            if all(value == _wrap(number) for value in self._numbers(leaders)):
                return None
            if self._is_closed or self._sync.failure is not None:
                return self._sync.failure or LockstepError("this shm group was closed in the exchange of weights")
            if i % CHECKED_EVERY == 0 and (error := self._members.find_error((), pending)) is not None:
                return self._sync.fail(error)
            time.sleep(INTERVAL_S)
        return None

    def _numbers(self, leaders: Sequence[int]) -> list[int]:
        return [struct.unpack_from("<I", self._segment.map, self._offset + place)[0] for place in self._places(leaders)]

    def release(self, number: int, leaders: Sequence[int]) -> None:
        """Write the numbers that streams have not written, with which the waits of this worker end."""
        for place, value in zip(self._places(leaders), self._numbers(leaders), strict=True):
            if value != _wrap(number):
                struct.pack_into("<I", self._segment.map, self._offset + place, _wrap(number))


def _wrap(number: int) -> int:
    return number & 0xFFFFFFFF


def _raise_in(thread: int, error: LockstepError) -> None:
    """Raise an error in another thread as soon as that executes Python code."""

    class Raised(type(error)):  # type: ignore[misc]
        """What can be raised there is a class; making an exception of this one returns the error itself."""

        def __new__(cls, *_args: object) -> LockstepError:  # type: ignore[misc]
            return error

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Raised))
