"""Lets a CUDA stream of one process wait for a stream of another one, without any host that waits for a GPU.

Every worker has numbers in host memory that all their GPUs can reach: streams write them when they come to them, and
wait until they have a value at least, in the order in which this was queued.

Note [A worker that dies]
The number of a worker that dies is never written, and what waits for it would never end: neither would a thread that
waits for such a stream in CUDA, where no exception can reach it. So a thread watches the workers until all numbers are
there. If one is lost, it first raises PeerLostError in the thread that has queued the wait, unless that has the error
from a collective already, and then writes the numbers for which this worker waits: its streams continue with tensors
that are not complete. The exception comes before the next instruction of Python, so a program can read these only if it
goes on after PeerLostError, or in another thread. Each worker has numbers of its own for this, and waits until all
workers are ready even if it needs the end of another one's work only, which may have been released. A leader whose
streams continue copies tensors that are not ready, and then writes to the others that it is done: so it waits until
these have noticed the failure.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Final, NamedTuple

from lockstep.comm.shm.cuda_ipc import call_driver
from lockstep.comm.shm.phases import POLL_S, GroupMembers, GroupSync, PendingWait
from lockstep.errors import LockstepError

_PORTABLE, _MAPPED = 1, 2  # flags of cuMemHostRegister
_AT_LEAST: Final = 0  # a flag of cuStreamWaitValue32: waits until (int32)(number - value) >= 0
INTERVAL_S: Final = 0.001
TOLD_WITHIN_S: Final = 0.1  # in which a thread that waits in a collective has the error from that
NOTICED_WITHIN_S: Final = 2.0  # in which the other workers notice that this one has failed


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
        self._watched = deque[_Watched]()
        self._last: tuple[int, Sequence[int], int] | None = None  # the last exchange: number, leaders, caller's stream
        self._streams: set[int] = set()  # of all callers
        self._has_failed = self._is_released = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._at_exit: Finalize | None = None
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

    def begin(self, number: int, stream: int) -> None:
        """Make a stream (its address) write for all workers that this worker's tensors are ready for an exchange.

        If an earlier exchange was queued in another stream, this one waits for its end: numbers must not decrease.
        """
        if self._last is not None and self._last[2] != stream:
            self.wait(self._last[0], stream, self._last[1])
        self.write_ready(number, stream)

    def write_ready(self, number: int, stream: int) -> None:
        self._write(0, number, stream)

    def write_done(self, number: int, stream: int) -> None:
        """Make a stream write for all workers that this one has done its part with their tensors."""
        self._write(self._size, number, stream)

    def wait(self, number: int, stream: int, leaders: Sequence[int] = ()) -> None:
        """Make a stream wait until all workers are ready, and the leaders done."""
        for place in self._places(leaders):
            call_driver("cuStreamWaitValue32_v2", stream, self._address + place, _wrap(number), _AT_LEAST)

    def wait_for_last(self, stream: int) -> None:
        """Make a stream wait for the end of the last exchange."""
        if self._last is not None:
            self.wait(self._last[0], stream, self._last[1])

    def _write(self, first: int, number: int, stream: int) -> None:
        others = (reader for reader in range(self._size) if reader != self._sync.rank)
        for reader in (*others, self._sync.rank):  # a worker that sees its own numbers may end
            place = 4 * (2 * self._size * reader + first + self._sync.rank)
            call_driver("cuStreamWriteValue32_v2", stream, self._address + place, _wrap(number), 0)

    def _places(self, leaders: Sequence[int]) -> list[int]:
        """Where the numbers are that this worker waits for."""
        first = 2 * self._size * self._sync.rank
        return [4 * (first + which) for which in (*range(self._size), *(self._size + leader for leader in leaders))]

    # ---- watching ----------------------------------------------------------------------------------------------------

    def watch(self, number: int, leaders: Sequence[int], caller: Caller, kept: object) -> None:
        """Watch the workers until all have written `ready` and the leaders `done`, or the time limit of the group has
        passed. Called before anything waits for these numbers.

        caller  in its thread an error is raised: see Note [A worker that dies]
        kept    what is kept until then
        """
        with self._changed:
            self._last = number, leaders, caller.stream
            self._streams.add(caller.stream)
            pending = PendingWait("broadcast", self._sync.timeout_s, number)
            self._watched.append(_Watched(number, leaders, caller.thread, pending, kept))
            if self._thread is None:
                self._members = GroupMembers(
                    self._sync.rank, self._sync.segment, self._sync.global_ranks, self._sync.members.peers
                )
                # A process that ends before its streams have come there would be taken for a lost one.
                self._at_exit = Finalize(None, self._wait_at_exit, exitpriority=0)
                self._thread = threading.Thread(target=self._run, name="lockstep-stream-flags", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _wait_at_exit(self) -> None:
        with suppress(LockstepError):
            self.finish()
        with self._changed:
            if self._has_failed:
                self._changed.wait_for(lambda: self._is_released, TOLD_WITHIN_S + 2 * NOTICED_WITHIN_S)

    def finish(self) -> None:
        """Wait until nothing is watched any more. Raises the error of the group if it fails meanwhile, unless it was
        raised in this thread already."""
        with self._changed:
            self._changed.wait_for(lambda: not self._watched or self._has_failed)
        if self._has_failed and threading.get_ident() not in self._sync.told:
            self._sync.check_failed()

    def close(self) -> None:
        """Release all that waits, wait until no stream uses the numbers, and end the thread.

        The group has ended before: the thread has an error, if there is anything that is still watched.
        """
        for stream in self._streams:
            with suppress(LockstepError):
                call_driver("cuStreamSynchronize", stream)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._unregister()

    def _unregister(self) -> None:
        with suppress(LockstepError):
            call_driver("cuMemHostUnregister", self._host)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._is_closed)
                if not self._watched:
                    return
                watched = self._watched[0]
            if not self._wait_for_streams(watched):
                self._release_all()
                return
            with self._changed:
                self._watched.popleft()
                self._changed.notify_all()
            del watched

    def _wait_for_streams(self, watched: _Watched) -> bool:
        """Wait until all numbers are written. Returns False if they will not be."""
        assert self._members is not None
        checked_s = time.monotonic()
        while self._missing(watched):
            if self._sync.failure is not None:
                return False
            if time.monotonic() > checked_s + POLL_S:  # each turn may wait for the interpreter
                checked_s = time.monotonic()
                peers = [rank for rank in self._missing(watched) if rank != self._sync.rank]
                error = self._members.find_error(peers, watched.pending, are_signals_read=True)
                if error is not None and self._missing(watched):  # not if it has ended after it had written them
                    self._sync.fail(error)
                    return False
            time.sleep(INTERVAL_S)
        return True

    def _release_all(self) -> None:
        """Raise the error in the threads that wait, and write their numbers until the group is closed: a stream of
        another worker may still write an older one. See Note [A worker that dies]."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()
        time.sleep(TOLD_WITHIN_S)
        assert self._members is not None
        until_s = time.monotonic() + NOTICED_WITHIN_S
        while not self._is_closed:
            with self._changed:
                waiting = list(self._watched)
            for watched in waiting:
                self._tell(watched.thread)
            is_leader = any(self._sync.rank in watched.leaders for watched in waiting)
            if not is_leader or self._members.have_all_ended() or time.monotonic() > until_s:
                self._release(waiting)
            time.sleep(INTERVAL_S)

    def _tell(self, thread: int) -> None:
        """Raise the error of the group in a thread that does not have it."""
        failure = self._sync.failure
        assert failure is not None
        if thread not in self._sync.told:
            self._sync.told.add(thread)
            _raise_in(thread, failure)

    def _release(self, waiting: Sequence[_Watched]) -> None:
        for watched in waiting:
            for place, value in self._numbers(watched.leaders):
                if not _is_reached(value, watched.number):
                    struct.pack_into("<I", self._segment.map, self._offset + place, _wrap(watched.number))
        with self._changed:
            self._is_released = True
            self._changed.notify_all()

    def _missing(self, watched: _Watched) -> list[int]:
        """The ranks whose numbers are not there."""
        ranks = (*range(self._size), *watched.leaders)
        numbers = self._numbers(watched.leaders)
        return [r for r, (_, value) in zip(ranks, numbers, strict=True) if not _is_reached(value, watched.number)]

    def _numbers(self, leaders: Sequence[int]) -> list[tuple[int, int]]:
        """(place, value) of the numbers that this worker waits for."""
        places = self._places(leaders)
        return [(place, struct.unpack_from("<I", self._segment.map, self._offset + place)[0]) for place in places]


def _is_reached(value: int, number: int) -> bool:
    return (value - number) & 0xFFFFFFFF < 1 << 31


def _wrap(number: int) -> int:
    return number & 0xFFFFFFFF


def _raise_in(thread: int, error: LockstepError) -> None:
    """Raise an error in another thread as soon as that executes Python code."""

    class Raised(type(error)):  # type: ignore[misc]
        """What can be raised there is a class; making an exception of this one returns the error itself."""

        def __new__(cls, *_args: object) -> LockstepError:  # type: ignore[misc]
            return error

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Raised))
