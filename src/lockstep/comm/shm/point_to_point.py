"""Point-to-point messages: send and receive.

A message is copied into the sender's segment at once, and its address is put into a ring for the receiver; so a send
never waits for its receive, and messages in both directions cannot block each other. The receiver copies a message out
when it calls receive, in any order of tags. Only when more than `MAX_IN_FLIGHT_BYTES` are in flight to one receiver, or
its ring is full, does a send wait until the receiver has copied some.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.shm.memory import Heap, await_semaphore, memory_fence, post_semaphore
from lockstep.comm.shm.phases import RING_ENTRIES, RING_ENTRY_BYTES, GroupSync, PendingWait
from lockstep.errors import DesyncError

MAX_IN_FLIGHT_BYTES: Final = 1 << 30
HEADER_BYTES: Final = 64
POLL_S: Final = 0.05

_ENTRY = struct.Struct("<qqq")  # tag, length, offset of the block
_RECEIVED = struct.Struct("<Q")


class Message(NamedTuple):
    """A message that has arrived; its bytes are still in the sender's segment."""

    src: int
    tag: int
    length: int
    offset: int


@dataclass
class _SendQueue:
    """Messages to one receiver that it has not copied yet, and sends that wait for room."""

    sent: int = 0
    bytes: int = 0
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)  # (offset, size) of blocks, oldest first
    waiting: deque[SendWork] = field(default_factory=deque)


class PointToPoint:
    """Messages of one worker of a group, sent and received."""

    def __init__(self, sync: GroupSync, heap: Heap) -> None:
        self._sync, self._heap = sync, heap
        self._lock = threading.RLock()
        self._send_queues = {rank: _SendQueue() for rank in sync.members.peers}
        self._messages_read = dict.fromkeys(sync.members.peers, 0)
        self._unclaimed: list[Message] = []  # arrived, but no receive was called for them yet
        self._receives: list[ReceiveWork] = []  # not arrived yet, in the order of the calls
        sync.on_idle = self.send_all_ready
        self.calls = 0

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: Tensor, dst: int, tag: int) -> SendWork:
        """Start to send `message`, which is flat bytes in host memory, to rank `dst`."""
        work = SendWork(self, message, dst, tag)
        with self._lock:
            self._send_queues[dst].waiting.append(work)
        self.send_ready(dst)
        return work

    def send_all_ready(self) -> None:
        for dst, queue in self._send_queues.items():
            if queue.waiting:
                self.send_ready(dst)

    def send_ready(self, dst: int) -> None:
        """Send the waiting messages to `dst` for which there is room now. Raises the group's failure."""
        sync = self._sync
        with self._lock:
            if sync.failure is not None:
                raise sync.failure
            queue = self._send_queues[dst]
            self._free_received(queue)
            while queue.waiting and not self._is_full(queue, queue.waiting[0].tensor.numel()):
                work = queue.waiting.popleft()
                self._write(queue, work)
                work.done = True
                post_semaphore(sync.members.peers[dst].segment.address + sync.layout.message_semaphore(sync.rank))

    def _is_full(self, queue: _SendQueue, size: int) -> bool:
        if not queue.in_flight:
            return False  # one message of any size is always accepted
        return len(queue.in_flight) >= RING_ENTRIES or queue.bytes + size > MAX_IN_FLIGHT_BYTES

    def _write(self, queue: _SendQueue, work: SendWork) -> None:
        segment, length = self._sync.segment, work.tensor.numel()
        size = HEADER_BYTES + length
        offset = self._heap.allocate(size, f"a message of {length} bytes to rank {self._sync.global_ranks[work.dst]}")
        segment.bytes[offset + HEADER_BYTES : offset + size].copy_(work.tensor)
        _RECEIVED.pack_into(segment.map, offset, 0)
        at = self._sync.layout.message_ring(work.dst) + queue.sent % RING_ENTRIES * RING_ENTRY_BYTES
        _ENTRY.pack_into(segment.map, at, work.tag, length, offset)
        queue.sent += 1
        queue.bytes += size
        queue.in_flight.append((offset, size))

    def _free_received(self, queue: _SendQueue) -> None:
        """Free the blocks that the receiver has copied; in order, as the entries of the ring are reused."""
        while queue.in_flight:
            offset, size = queue.in_flight[0]
            if not _RECEIVED.unpack_from(self._sync.segment.map, offset)[0]:
                return
            memory_fence()
            queue.in_flight.popleft()
            queue.bytes -= size
            self._heap.free(offset, size)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def receive(self, into: Tensor, src: int | None, tag: int, *, wait_s: float) -> ReceiveWork:
        """Receive the next message with `tag` from `src`, or from any rank if None, into `into`."""
        with self._lock:
            self.calls += 1
            source_name = "any rank" if src is None else f"rank {self._sync.global_ranks[src]}"
            pending = PendingWait(f"recv from {source_name} (tag {tag})", wait_s, self.calls)
            work = ReceiveWork(self, into, src, tag, pending)
            for i, message in enumerate(self._unclaimed):
                if work.matches(message):
                    del self._unclaimed[i]
                    self._deliver(message, work)
                    return work
            self._receives.append(work)
        return work

    def poll(self, work: ReceiveWork, pause_s: float) -> None:
        """Process the messages that have arrived. If `work` is not done then, wait up to `pause_s` for another."""
        with self._lock:
            for src in self._sync.members.peers:
                while not work.done and self._receive_one(src, 0.0):
                    pass
            if work.done or not pause_s:
                return
            self.send_all_ready()
        # Sleep until a message arrives from an expected sender; with several senders, wait a little for each in turn.
        sources = [work.src] if work.src is not None else list(self._sync.members.peers)
        if not any([self._receive_one(src, pause_s / len(sources)) for src in sources]):
            self._sync.check_peers([] if work.src is None else [work.src], work.pending)

    def _receive_one(self, src: int, pause_s: float) -> bool:
        """Pass one message from `src` to the first matching receive. Returns False if none arrived in `pause_s`."""
        address = self._sync.segment.address + self._sync.layout.message_semaphore(src)
        if not await_semaphore(address, pause_s, spin=pause_s > 0):
            return False
        if self._sync.failure is not None:
            raise self._sync.failure
        with self._lock:
            entry = self._messages_read[src] % RING_ENTRIES
            at = self._sync.layout.message_ring(self._sync.rank) + entry * RING_ENTRY_BYTES
            message = Message(src, *_ENTRY.unpack_from(self._sync.members.peers[src].segment.map, at))
            self._messages_read[src] += 1
            for i, work in enumerate(self._receives):
                if work.matches(message):
                    del self._receives[i]
                    self._deliver(message, work)
                    return True
            self._unclaimed.append(message)
        return True

    def _deliver(self, message: Message, work: ReceiveWork) -> None:
        segment = self._sync.members.peers[message.src].segment
        if message.length == work.tensor.numel():
            start = message.offset + HEADER_BYTES
            with torch.inference_mode():
                work.tensor.copy_(segment.bytes[start : start + message.length])
        else:
            sender, receiver = (self._sync.members.describe(rank) for rank in (message.src, self._sync.rank))
            text = f"{sender} sent {message.length} bytes with tag {message.tag}, {receiver} receives into"
            work.error = DesyncError(f"{text} {work.tensor.numel()}; make the sizes agree")
        memory_fence()
        _RECEIVED.pack_into(segment.map, message.offset, 1)
        work.done, work.source = True, message.src


class _MessageWork(Work):
    """A send or a receive of `tensor`, which is flat bytes in host memory."""

    def __init__(self, channel: PointToPoint, tensor: Tensor, tag: int) -> None:
        super().__init__()
        self._channel, self.tensor, self.tag, self.done = channel, tensor, tag, False

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self.tensor])
        return future


class SendWork(_MessageWork):
    """A send. It is complete when the message was copied into the segment, not when it was received."""

    def __init__(self, channel: PointToPoint, message: Tensor, dst: int, tag: int) -> None:
        super().__init__(channel, message, tag)
        self.dst = dst

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        sync = self._channel._sync
        wait_s = timeout.total_seconds() or sync.timeout_s
        pending = PendingWait(f"send to rank {sync.global_ranks[self.dst]} (tag {self.tag})", wait_s)
        while not self.done:
            self._channel.send_ready(self.dst)
            if not self.done:
                time.sleep(0.001)
                sync.check_peers([self.dst], pending)
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self._channel.send_ready(self.dst)
        return self.done

    is_success = is_completed


class ReceiveWork(_MessageWork):
    """A receive. The message is copied when the caller waits for it, or asks whether it is complete."""

    def __init__(self, channel: PointToPoint, into: Tensor, src: int | None, tag: int, pending: PendingWait) -> None:
        super().__init__(channel, into, tag)
        self.src, self.pending, self.source = src, pending, -1
        self.error: DesyncError | None = None
        self.on_received: Callable[[], object] = lambda: None  # called once, by the first wait that succeeds

    def matches(self, message: Message) -> bool:
        return message.tag == self.tag and self.src in (None, message.src)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        wait_s = timeout.total_seconds() if timeout.total_seconds() > 0 else self.pending.wait_s
        self.pending = PendingWait(self.pending.name, wait_s, self.pending.number)
        while not self.done:
            self._channel.poll(self, POLL_S)
        if self.error is not None:
            raise self.error
        on_received, self.on_received = self.on_received, lambda: None
        on_received()
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self._channel.poll(self, 0.0)
        if self.done and self.error is None:
            self.wait()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def source_rank(self) -> int:
        self.wait()
        return self.source

    _source_rank = source_rank
