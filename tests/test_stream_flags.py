"""Streams that wait for streams of other processes, with threads in the place of CUDA's streams: what the host does.

With real streams: tests/test_shm_cuda.py.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm import stream_flags
from lockstep.comm.shm.cuda_collectives import CoalescedTensors, CudaCollectives
from lockstep.comm.shm.device_info import EVENTS, DeviceInfoBlock
from lockstep.comm.shm.phases import REGION_BYTES
from lockstep.comm.shm.stream_flags import Caller, StreamFlags
from lockstep.comm.shm.tensor_collectives import broadcast_coalesced
from lockstep.errors import LockstepError, PeerLostError
from on_workers import on_workers, try_on_workers

DEADLINE_S = 20.0
LIMIT_S = 3.0


class Stream:
    """Runs functions in order, in a thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def add(self, function: Callable[[], None]) -> None:
        self._queue.put(function)

    def synchronize(self) -> None:
        """Wait as in CUDA: an exception that is raised in this thread meanwhile comes after it."""
        done = threading.Lock()
        done.acquire()
        self.add(done.release)
        done.acquire()


STREAMS: dict[int, Stream] = {}


def driver(name: str, *args: Any) -> None:
    """The functions of CUDA's driver that stream_flags.py calls."""
    if name == "cuMemHostGetDevicePointer_v2":
        ctypes.cast(args[0], ctypes.POINTER(ctypes.c_uint64))[0] = args[1]
    elif name == "cuStreamSynchronize":
        STREAMS[args[0]].synchronize()
    elif name.startswith("cuStream"):
        stream, address, value, _ = args
        word = ctypes.c_uint32.from_address(address)

        def write() -> None:
            word.value = value

        def wait() -> None:
            while (word.value - value) & 0xFFFFFFFF >= 1 << 31:
                time.sleep(0.0002)

        STREAMS[stream].add(write if "Write" in name else wait)


class Exchanges:
    """Exchanges of one worker of a group: each adds up what all workers have in a list, when its stream comes there."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        stream_flags.call_driver = driver  # type: ignore[assignment]
        STREAMS.update({n: Stream() for n in (1, 2, 3)})
        self.group: Any = dist.new_group(backend="shm")
        self.sync = self.group._sync
        self.sync.timeout_s = timeout_s
        self.flags, self.number = StreamFlags(self.sync, 3), 0

    def queue(self, stream: int = 1, *, before: float = 0.0, copies: bool = True) -> None:
        """Queue one; this worker's stream comes to it after `before` seconds. Rank 0 is the leader."""
        self.number += 1
        STREAMS[stream].add(lambda: time.sleep(before))
        self.flags.begin(self.number, stream)
        self.flags.watch(self.number, [0], Caller(stream, threading.get_ident()), None)
        if self.sync.rank == 0 and copies:
            self.flags.wait(self.number, 3)
            self.flags.write_done(self.number, 3)
        self.flags.wait(self.number, stream, [0])

    def close(self) -> None:
        STREAMS[3].synchronize()
        self.flags.close()


def many(rank: int, size: int) -> None:
    """Hosts run ahead, two exchanges follow each other at once, streams change: nothing is missed."""
    one = Exchanges(timeout_s=LIMIT_S)
    for step in range(60):
        one.queue(1 + step // 15 % 2, before=0.002 if step % size == rank else 0.0)
        one.queue(1 + step // 15 % 2)
        if step % 10 == 9:
            STREAMS[1 + step // 15 % 2].synchronize()
    one.flags.finish()
    time.sleep(1.2 * LIMIT_S)  # all were complete before the limit, and so the group has not failed
    one.queue()
    one.flags.finish()
    assert one.sync.failure is None
    one.close()
    dist.barrier()
    one.group.shutdown()


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_many_exchanges(size: int) -> None:
    on_workers(many, size)


def lose(rank: int, size: int, lost: int, how: str, folder: str) -> None:
    one = Exchanges()
    one.queue()
    one.flags.finish()
    if rank == lost:
        if how == "killed":
            one.queue(before=30.0)
            os.kill(os.getpid(), signal.SIGKILL)
        one.sync.arrive()  # a signal that the others have not read
        one.sync.fail(LockstepError("it has failed")) if how == "failed" else one.group.shutdown()
        time.sleep(2.0)
        os._exit(0)
    began_s, found, read = time.monotonic(), list[str](), False
    try:
        one.queue()
        one.queue()
        STREAMS[1].synchronize()
        for _ in range(3):
            read = True
        time.sleep(DEADLINE_S)
    except PeerLostError as error:
        found.append(f"rank {error.rank}, read: {read}")
    late = time.monotonic() > began_s + 3.0
    try:
        time.sleep(0.5)
    except PeerLostError:
        found.append("raised twice")
    one.group._devices[torch.device("cpu")] = make_collectives(one)
    one.group.shutdown()  # which does not raise the error again
    (Path(folder) / str(rank)).write_text(f"{found}, late: {late}")


@pytest.mark.parametrize("how", ["killed", "failed", "left"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_that_is_lost(lost: int, how: str, tmp_path: Path) -> None:
    """The others have the error before they go on, once, and their streams continue."""
    try_on_workers(lose, 3, lost, how, str(tmp_path), timeout_s=2 * DEADLINE_S)
    outcomes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    want = f"['rank {lost}, read: False'], late: False"
    assert outcomes == {str(rank): want for rank in range(3) if rank != lost}


# ---- the collective that uses them -----------------------------------------------------------------------------------


class Regions:
    """Describes tensors in group memory, in the place of cuda_ipc.py."""

    closed = 0

    def __init__(self, segment: Any) -> None:
        self._segment = segment

    def region(self, tensor: Tensor) -> bytes:
        return struct.pack("<QQ", self._segment.offset_of(tensor), tensor.nbytes).ljust(REGION_BYTES, b"\0")

    def tensor(self, packed: bytes, dtype: torch.dtype) -> Tensor:
        offset, size = struct.unpack_from("<QQ", packed)
        found: Tensor = self._segment.bytes[offset : offset + size].view(dtype)
        return found

    def close(self) -> None: ...


class Event:
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return False


def make_collectives(one: Exchanges) -> CudaCollectives:
    """Collectives on "GPU" tensors, which are in group memory; rank 0 is the leader, and its stream has number 3."""
    made, sync = CudaCollectives.__new__(CudaCollectives), one.sync
    values = {
        "sync": sync,
        "stream": SimpleNamespace(cuda_stream=3, synchronize=STREAMS[3].synchronize),
        "_device_info": DeviceInfoBlock(sync),
        "_flags": one.flags,
        "_can_queue": True,
        "_leaders": [0],
        "_served": list(range(sync.size)) if sync.rank == 0 else [],
        "_events": [Event()] * EVENTS,
        "_leader_events": {0: [Event()] * EVENTS},
        "_exporter": Regions(sync.segment),
        "_importers": {rank: Regions(sync.segments[rank]) for rank in sync.members.peers},
        "_in_use": deque([(1, [torch.empty(1)])]),
        "_staging_buffers": [],
        "_issued": 0,
        "_is_awaited": False,
    }
    for name, value in values.items():
        setattr(made, name, value)
    return made


def fail_as_leader(rank: int, size: int) -> str:
    """The leader fails while the last worker is late. Returns what this worker has then."""
    one, seen, found = Exchanges(), list[float](), "nothing"
    collectives, copy = make_collectives(one), CoalescedTensors.copy
    CoalescedTensors.copy = lambda self: STREAMS[3].add(lambda: copy(self))  # type: ignore[method-assign]
    one.group._devices[torch.device("cpu")] = collectives
    if rank == 1:
        stream_flags.POLL_S = 1.0  # type: ignore[misc]  # it notices the failure only after the last worker is ready
    weights = [one.group.allocate_tensor(100, dtype=torch.float32, device="cpu") for _ in range(size)]
    lists = CoalescedTensors.lists(weights, list(range(size)))
    for step in range(2):

        def update(step: int = step) -> None:
            time.sleep(0.6 * step * (rank == size - 1))
            weights[rank].fill_(step)

        STREAMS[1].add(update)
        with one.sync.begin(wait_s=None, spin=False):
            broadcast_coalesced(collectives, lists, Caller(1, threading.get_ident()))
    STREAMS[1].add(lambda: seen.append(min(float(weight.min()) for weight in weights)))
    try:
        if rank == 0:
            raise one.sync.fail(LockstepError("it has failed"))
        end_s = time.monotonic() + LIMIT_S
        while not seen and time.monotonic() < end_s:  # so that the watching thread often waits for the interpreter
            pass
        found = "right weights" if seen == [1.0] else "wrong weights"
        time.sleep(0.1)
    except LockstepError:
        found = "the error" if found == "nothing" else found
    one.group.shutdown()
    return found


def test_no_worker_continues_with_what_a_leader_that_has_failed_copies() -> None:
    found = on_workers(fail_as_leader, 3)
    assert found in ([["the error", one, "the error"] for one in ("right weights", "the error")])


def broadcast(rank: int, size: int) -> list[str]:
    one, wrong = Exchanges(), list[str]()
    collectives, group = make_collectives(one), one.group
    copy = CoalescedTensors.copy
    CoalescedTensors.copy = lambda self: STREAMS[3].add(lambda: copy(self))  # type: ignore[method-assign]
    weights = [group.allocate_tensor(100 + i, dtype=torch.float32, device="cpu") for i in range(300)]
    lists = CoalescedTensors.lists(weights, [i % size for i in range(300)])
    for step in range(20):
        stream = 1 + step // 5 % 2

        def update(step: int = step) -> None:
            time.sleep(0.01 * (step % size == rank))
            for i, weight in enumerate(weights):
                weight.fill_(1000 * step + i if i % size == rank else -1.0)

        def check(step: int = step) -> None:
            wrong.extend(f"{step}: {i}" for i, one in enumerate(weights) if not bool((one == 1000 * step + i).all()))

        if step and step % 5 == 0:  # as a program does that changes its stream
            STREAMS[3 - stream].add((is_done := threading.Event()).set)
            STREAMS[stream].add(lambda done=is_done: done.wait(DEADLINE_S))  # type: ignore[misc]
        STREAMS[stream].add(update)
        with group._sync.begin(wait_s=None, spin=False):
            broadcast_coalesced(collectives, lists, Caller(stream, threading.get_ident()))
        STREAMS[stream].add(check)
    collectives.finish_queued()
    STREAMS[stream].synchronize()
    collectives.close()
    dist.barrier()
    group.shutdown()
    return wrong


@pytest.mark.parametrize("size", [1, 3])
def test_weights_are_broadcast_behind_what_is_queued(size: int) -> None:
    assert on_workers(broadcast, size) == [[]] * size
