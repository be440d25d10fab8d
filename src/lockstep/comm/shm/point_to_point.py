"""Point to point: send and receive.

A message is copied into the sender's segment at once, and its address put into a ring for the receiver; so a send
never waits for its receive, and messages in both directions cannot block each other. The receiver copies it out when
it asks for it, in any order of tags. Only what is more than `MOST_BYTES` on the way to one receiver waits until that
has taken some.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import Work

from lockstep.comm.shm import semaphores
from lockstep.comm.shm.memory import Heap
from lockstep.comm.shm.phases import MAIL_BYTES, MAIL_ENTRIES, Team, Watch
from lockstep.errors import DesyncError

MOST_BYTES: Final = 1 << 30
HEAD_BYTES: Final = 64
LOOK_S: Final = 0.05

_ENTRY = struct.Struct("<qqq")  # tag, length, offset of the block
_TAKEN = struct.Struct("<Q")


@dataclass(frozen=True)
class Letter:
    """A message that has come, still in the sender's memory."""

    src: int
    tag: int
    length: int
    offset: int


class _Outbox:
    """What is on the way to one receiver."""

    def __init__(self) -> None:
        self.sent = 0
        self.bytes = 0
        self.on_the_way: deque[tuple[int, int]] = deque()  # (offset, size) of blocks, oldest first
        self.waiting: deque[SendWork] = deque()


class Mail:
    """The messages of one worker of a group, in both directions."""

    def __init__(self, team: Team, heap: Heap) -> None:
        self._team, self._heap = team, heap
        self._lock = threading.RLock()
        self._outboxes = {rank: _Outbox() for rank in team.peers}
        self._read = dict.fromkeys(team.peers, 0)
        self._inbox: list[Letter] = []  # came before they were asked for
        self._expected: list[ReceiveWork] = []  # asked for, in order
        team.chores = self.push_all
        self.calls = 0

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: torch.Tensor, dst: int, tag: int) -> SendWork:
        """`message` is flat bytes, in host memory."""
        work = SendWork(self, message, dst, tag)
        with self._lock:
            self._outboxes[dst].waiting.append(work)
        self.push(dst)
        return work

    def push_all(self) -> None:
        for dst, box in self._outboxes.items():
            if box.waiting:
                self.push(dst)

    def push(self, dst: int) -> None:
        """Send what has to wait no longer."""
        team = self._team
        with self._lock:
            if team.failure is not None:
                raise team.failure
            box = self._outboxes[dst]
            self._forget_taken(box)
            while box.waiting and not self._is_full(box, box.waiting[0].message.numel()):
                work = box.waiting.popleft()
                self._put(box, work)
                work.done = True
                semaphores.post(team.peers[dst].segment.address + team.layout.mail(team.rank))

    def _is_full(self, box: _Outbox, size: int) -> bool:
        if not box.on_the_way:
            return False  # one message of any size always goes
        return len(box.on_the_way) >= MAIL_ENTRIES or box.bytes + size > MOST_BYTES

    def _put(self, box: _Outbox, work: SendWork) -> None:
        segment, length = self._team.segment, work.message.numel()
        size = HEAD_BYTES + length
        offset = self._heap.take(size, f"a message of {length} bytes to rank {self._team.names[work.dst]}")
        segment.bytes[offset + HEAD_BYTES : offset + size].copy_(work.message)
        _TAKEN.pack_into(segment.map, offset, 0)
        at = self._team.layout.ring(work.dst) + box.sent % MAIL_ENTRIES * MAIL_BYTES
        _ENTRY.pack_into(segment.map, at, work.tag, length, offset)
        box.sent += 1
        box.bytes += size
        box.on_the_way.append((offset, size))

    def _forget_taken(self, box: _Outbox) -> None:
        """Free the blocks that the receiver has copied; in order, as the entries of the ring are used again."""
        while box.on_the_way:
            offset, size = box.on_the_way[0]
            if not _TAKEN.unpack_from(self._team.segment.map, offset)[0]:
                return
            semaphores.fence()
            box.on_the_way.popleft()
            box.bytes -= size
            self._heap.give_back(offset, size)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def receive(self, into: torch.Tensor, src: int | None, tag: int, *, wait_s: float) -> ReceiveWork:
        """`into` becomes the next message with `tag` from `src`, or from anybody if None."""
        with self._lock:
            self.calls += 1
            who = "any rank" if src is None else f"rank {self._team.names[src]}"
            watch = Watch(f"recv from {who} (tag {tag})", wait_s, time.monotonic() + wait_s, self.calls)
            work = ReceiveWork(self, into, src, tag, watch)
            for i, letter in enumerate(self._inbox):
                if work.wants(letter):
                    del self._inbox[i]
                    self._open(letter, work)
                    return work
            self._expected.append(work)
        return work

    def fetch(self, work: ReceiveWork, pause_s: float) -> None:
        """Take in what has come. If `work` is not among it, wait `pause_s` for more."""
        with self._lock:
            for src in self._team.peers:
                while not work.done and self._take_in(src, 0.0):
                    pass
            if work.done or not pause_s:
                return
            self.push_all()
        # Sleep until something comes from where we expect it; with several senders, a little at each in turn.
        sources = [work.src] if work.src is not None else list(self._team.peers)
        if not any([self._take_in(src, pause_s / len(sources)) for src in sources]):
            self._team.look([] if work.src is None else [work.src], work.watch)

    def _take_in(self, src: int, pause_s: float) -> bool:
        """One message from `src`, for the receive that was called first of those that want it."""
        address = self._team.segment.address + self._team.layout.mail(src)
        if not semaphores.take(address, pause_s, spin=pause_s > 0):
            return False
        if self._team.failure is not None:
            raise self._team.failure
        with self._lock:
            at = self._team.layout.ring(self._team.rank) + self._read[src] % MAIL_ENTRIES * MAIL_BYTES
            letter = Letter(src, *_ENTRY.unpack_from(self._team.peers[src].segment.map, at))
            self._read[src] += 1
            for i, work in enumerate(self._expected):
                if work.wants(letter):
                    del self._expected[i]
                    self._open(letter, work)
                    return True
            self._inbox.append(letter)
        return True

    def _open(self, letter: Letter, work: ReceiveWork) -> None:
        segment = self._team.peers[letter.src].segment
        if letter.length == work.into.numel():
            start = letter.offset + HEAD_BYTES
            with torch.inference_mode():
                work.into.copy_(segment.bytes[start : start + letter.length])
        else:
            work.error = DesyncError(
                f"{self._team.who(letter.src)} sent {letter.length} bytes with tag {letter.tag}, "
                f"{self._team.who(self._team.rank)} receives into {work.into.numel()}; make the sizes agree"
            )
        semaphores.fence()
        _TAKEN.pack_into(segment.map, letter.offset, 1)
        work.done, work.came_from = True, letter.src


def _nothing() -> None:
    pass


class SendWork(Work):
    """A message on its way. It has been sent when it was copied, not when it was received."""

    def __init__(self, mail: Mail, message: torch.Tensor, dst: int, tag: int) -> None:
        super().__init__()
        self._mail, self.message, self.dst, self.tag, self.done = mail, message, dst, tag, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        team = self._mail._team
        wait_s = timeout.total_seconds() or team.timeout_s
        watch = Watch(f"send to rank {team.names[self.dst]} (tag {self.tag})", wait_s, time.monotonic() + wait_s)
        while not self.done:
            self._mail.push(self.dst)
            if not self.done:
                time.sleep(0.001)
                team.look([self.dst], watch)
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self._mail.push(self.dst)
        return self.done

    def is_success(self) -> bool:
        return self.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self.message])
        return future


class ReceiveWork(Work):
    """A message that is expected. It is copied when somebody waits for it, or asks whether it has come."""

    def __init__(self, mail: Mail, into: torch.Tensor, src: int | None, tag: int, watch: Watch) -> None:
        super().__init__()
        self._mail, self.into, self.src, self.tag, self.watch = mail, into, src, tag, watch
        self.done, self.came_from = False, -1
        self.error: DesyncError | None = None
        self.then: Callable[[], object] = _nothing  # done once by whoever waits

    def wants(self, letter: Letter) -> bool:
        return letter.tag == self.tag and self.src in (None, letter.src)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        wait_s = timeout.total_seconds() if timeout.total_seconds() > 0 else self.watch.wait_s
        self.watch = Watch(self.watch.name, wait_s, time.monotonic() + wait_s, self.watch.number)
        while not self.done:
            self._mail.fetch(self, LOOK_S)
        if self.error is not None:
            raise self.error
        then, self.then = self.then, _nothing
        then()
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self._mail.fetch(self, 0.0)
        if self.done and self.error is None:
            self.wait()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def source_rank(self) -> int:
        self.wait()
        return self.came_from

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self.into])
        return future
