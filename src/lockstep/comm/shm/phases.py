"""Phases of a collective, and detection of peers that are lost or late.

A collective is a few phases. In each, a worker does its part, signals that (`arrive`), and continues when all workers
have (`await_phase`). Signals are counted, so a worker that is ahead does not wait for slow readers, and one that is
behind misses nothing.

Note [Root cause]
When a worker dies, its peers raise PeerLostError and may exit because of it, so a peer that checks later finds several
dead. Therefore a worker that raises publishes in its segment which rank it names as the cause, and a dead worker that
named another rank is not the cause.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from lockstep.comm.shm.memory import PAGE, SEMAPHORE_BYTES, Segment, await_semaphore, create_semaphore, post_semaphore
from lockstep.comm.shm.rendezvous import Peer, close_peers
from lockstep.errors import DesyncError, LockstepError, PeerLostError
from lockstep.process_identity import read_stat

POLL_S: Final = 0.05
HEADERS: Final = 4  # no worker is more than MAX_AHEAD collectives ahead of another
MAX_AHEAD: Final = 2
DEVICE_INFO_BYTES: Final = 512
REGION_BYTES: Final = 88  # of the description of a tensor on a GPU (cuda_ipc.py)
MAX_COALESCED: Final = 256  # tensors that are broadcast at once
RING_ENTRIES: Final = 256
RING_ENTRY_BYTES: Final = 32
NOTHING_WANTED: Final = -1

# The position of a name is its code in the headers.
OPERATIONS: Final = (
    *("none", "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter", "all_to_all"),
    *("barrier", "monitored_barrier", "share"),
)
_OPERATION_CODES: Final = {name: number for number, name in enumerate(OPERATIONS)}
_HEADER = struct.Struct("<QHxxIqq")  # number, operation code, hash of `same`, length, offset
# State, rank named as the cause + 1; global rank + 1 and pid of the peer that this process lost.
_STATE = struct.Struct("<IIII")

# (global rank + 1, pid) of the peer that this process lost in any of its groups. It leaves its other groups because of
# that, and publishes it there.
_lost_peer = [0, 0]


class State(IntEnum):
    """State of a worker, published in its segment."""

    OPEN = 0
    LEFT = 1
    ABORTED = 2
    FAILED = 3

    @property
    def departure(self) -> str:
        how = {State.LEFT: "left the group", State.ABORTED: "aborted the group", State.FAILED: "failed"}[self]
        return f"{how} and does not join"


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets in a segment. Equal in every segment of a group."""

    size: int  # number of workers

    STATE: Final = 0  # see _STATE
    HEADER: Final = 256
    HEADER_BYTES: Final = 64

    def arrival_semaphore(self, src: int) -> int:
        """Offset of the semaphore that `src` posts to signal the segment's owner that it has arrived."""
        return PAGE + src * SEMAPHORE_BYTES

    def message_semaphore(self, src: int) -> int:
        """Offset of the semaphore that `src` posts to signal the segment's owner that it has sent a message."""
        return PAGE + (self.size + src) * SEMAPHORE_BYTES

    def message_ring(self, dst: int) -> int:
        """Offset of the ring of messages from the segment's owner to `dst`."""
        first = PAGE + 2 * self.size * SEMAPHORE_BYTES
        return first + dst * RING_ENTRIES * RING_ENTRY_BYTES

    def device_info(self) -> int:
        """Offset of the description of the owner's GPU and of its tensors there."""
        return self.message_ring(self.size) + HEADERS * 2 * self.size * 8

    def region_table(self, header: int) -> int:
        """Offset of the descriptions of the owner's tensors on a GPU, of a collective with this header."""
        regions = max(2 * self.size, MAX_COALESCED)
        return self.device_info() + DEVICE_INFO_BYTES + header * regions * REGION_BYTES

    def header(self, number: int) -> int:
        """Offset of the header of the owner's collective `number`."""
        return self.HEADER + number % HEADERS * self.HEADER_BYTES

    def lengths(self, number: int) -> int:
        """Offset of the number of bytes that the owner sends to each rank, then of those that it expects from each."""
        return self.message_ring(self.size) + number % HEADERS * 2 * self.size * 8

    @property
    def stream_flags(self) -> int:
        """Offset of the numbers of stream_flags.py, two for each pair of workers; used in the first segment only."""
        return _in_pages(self.region_table(HEADERS))

    @property
    def end(self) -> int:
        return self.stream_flags + _in_pages(8 * self.size * self.size)


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


@dataclass(slots=True)
class Call:
    """A worker's description of its current collective. `same` must be equal on all workers; the rest may differ."""

    name: str
    same: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # bytes sent to each rank
    expects: tuple[int, ...] = ()  # bytes expected from each rank; NOTHING_WANTED: any
    offset: int = -1  # offset of the worker's tensor in its segment; -1 if it is not there


@dataclass(slots=True)
class PendingWait:
    """An operation that is waited for, since when on the monotonic clock, and for how long."""

    name: str
    wait_s: float
    number: int | None = None
    began_s: float = field(default_factory=time.monotonic)

    @property
    def doing(self) -> str:
        return self.name if self.number is None else f"{self.name} #{self.number}"


class PeerCall(NamedTuple):
    """A rank's published call: the most bytes that it sends to one rank, and their offset (-1: staging slots)."""

    length: int
    offset: int


class GroupMembers:
    """The workers of a group as one of them sees them: their processes, and the states that they have published."""

    def __init__(self, rank: int, segment: Segment, global_ranks: tuple[int, ...], peers: dict[int, Peer]) -> None:
        self.rank, self.segment, self.global_ranks, self.peers = rank, segment, global_ranks, peers
        self.layout, self._poll = SegmentLayout(len(global_ranks)), select.poll()
        self._by_fd = {peer.alive_fd: rank for rank, peer in sorted(peers.items())}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def describe(self, rank: int) -> str:
        return f"rank {self.global_ranks[rank]} (pid {self.pid(rank)})"

    def pid(self, rank: int) -> int:
        return os.getpid() if rank == self.rank else self.peers[rank].pid

    def find_error(
        self, missing: Sequence[int], pending: PendingWait, *, are_signals_read: bool = False
    ) -> PeerLostError | None:
        """The error if waiting for `missing` is of no use, else None: a peer is lost or has left, or it is too late.

        `are_signals_read`: signals of a peer that has left, and that this worker has not read, are of no use.
        """
        dead = [self._by_fd[fd] for fd, _ in self._poll.poll(0)]
        states = {rank: _STATE.unpack_from(peer.segment.map, self.layout.STATE) for rank, peer in self.peers.items()}
        for rank in dead:
            if states[rank][:2] == (State.OPEN, 0):
                return self._error(rank, "died in", pending)
        for rank, (_, cause, _, _) in states.items():
            if cause not in (0, self.rank + 1):
                state = State(states[cause - 1][0])
                how = "was lost in" if state is State.OPEN else state.departure
                more = f"{self.describe(rank)} reported that first"
                return self._error(cause - 1, how, pending, more)
        for rank in missing:
            if states[rank][0] != State.OPEN and (are_signals_read or not self._has_unread_signal(rank)):
                _, _, lost, pid = states[rank]
                if lost:
                    text = f"rank {lost - 1} (pid {pid}) was lost: because of it {self.describe(rank)} does not join"
                    return PeerLostError(f"{text} {pending.doing}", rank=lost - 1, pid=pid)
                stopped = self._stopped_peer()
                how = State(states[rank][0]).departure if stopped is None else "is stopped and does not join"
                return self._error(rank if stopped is None else stopped, how, pending)
        is_late = time.monotonic() > pending.began_s + pending.wait_s
        return self._timeout_error(missing, pending) if is_late else None

    def have_all_ended(self) -> bool:
        """Whether every peer has died, or has left or failed as far as it has published."""
        dead = {self._by_fd[fd] for fd, _ in self._poll.poll(0)}
        states = {rank: _STATE.unpack_from(peer.segment.map, self.layout.STATE) for rank, peer in self.peers.items()}
        return all(rank in dead or state[0] != State.OPEN for rank, state in states.items())

    def _stopped_peer(self) -> int | None:
        """The rank of a stopped peer, or None. It is the cause even if other peers are missing because of it."""
        return next((rank for rank in self.peers if _condition(self.pid(rank)).startswith("is stopped")), None)

    def _timeout_error(self, missing: Sequence[int], pending: PendingWait) -> PeerLostError:
        stopped = self._stopped_peer()
        if stopped is None and not missing:
            waited = f"Timed out waiting {1000 * pending.wait_s:.0f}ms for any rank"
            return PeerLostError(f"{self.describe(self.rank)} in {pending.doing}: {waited}")
        rank = missing[0] if stopped is None else stopped
        how = f"{_condition(self.pid(rank))} and did not join"
        waited = f"Timed out waiting {1000 * pending.wait_s:.0f}ms"  # in the words of Gloo
        return self._error(rank, how, pending, f"{waited}; {self._last_call(rank)}")

    def _has_unread_signal(self, rank: int) -> bool:
        """Whether `rank` has posted a signal that this worker has not consumed yet."""
        places = (self.layout.arrival_semaphore(rank), self.layout.message_semaphore(rank))
        # A semaphore's first word is its count.
        return any(ctypes.c_uint.from_address(self.segment.address + place).value for place in places)

    def _last_call(self, rank: int) -> str:
        headers = (_HEADER.unpack_from(self.peers[rank].segment.map, self.layout.header(i)) for i in range(HEADERS))
        number, name = max(header[:2] for header in headers)
        return f"its last call was {OPERATIONS[name]} #{number}" if number else "it has made no call yet"

    def _error(self, rank: int, how: str, pending: PendingWait, more: str = "its own output says why") -> PeerLostError:
        message = f"{self.describe(rank)} {how} {pending.doing}: {more}"
        return PeerLostError(message, rank=self.global_ranks[rank], pid=self.pid(rank))

    def peer_lost_by(self, rank: int) -> PeerLostError | None:
        """The loss that a dead peer published before it died; None if there was none, or it named this worker."""
        _, _, lost, pid = _STATE.unpack_from(self.peers[rank].segment.map, self.layout.STATE)
        if lost in (0, self.global_ranks[self.rank] + 1):
            return None
        text = f"rank {lost - 1} (pid {pid}) was lost: because of it {self.describe(rank)} has ended"
        return PeerLostError(text, rank=lost - 1, pid=pid)


class GroupSync:
    """One worker's part in the collectives of its group: phases, published calls, and failure."""

    def __init__(self, rank: int, segment: Segment, timeout_s: float, global_ranks: tuple[int, ...]) -> None:
        """`global_ranks`: the global rank of each rank of this group, used in messages."""
        self.rank, self.segment, self.timeout_s, self.global_ranks = rank, segment, timeout_s, global_ranks
        self.size = size = len(global_ranks)
        self.layout = SegmentLayout(size)
        self.members = GroupMembers(rank, segment, global_ranks, {})
        self.calls = 0  # number of collectives so far
        self.awaited_calls = 0  # the last one of which all workers are known to have come to it
        self.failure: LockstepError | None = None
        self.told: set[int] = set()  # the threads to which the failure was raised
        self.on_idle: Callable[[], None] = lambda: None  # called now and then while a worker waits
        self._wait_s = timeout_s
        self._pending = PendingWait("the formation of the group", timeout_s)
        self._spin = False
        self._arrived = 0
        self._seen = [0] * size
        self._outgoing: list[int] = []  # semaphores in the peers' segments that this worker posts
        self._incoming: list[tuple[int, int]] = []  # (rank, semaphore in the own segment that it posts)
        self.segments: list[Segment] = []  # of all ranks
        _lost_peer[:] = [0, 0]  # a new group starts without a lost peer
        segment.reserve(0, self.layout.end, "the control block of a group")
        for src in range(size):
            create_semaphore(segment.address + self.layout.arrival_semaphore(src))
            create_semaphore(segment.address + self.layout.message_semaphore(src))

    def join(self, peers: dict[int, Peer]) -> None:
        """Connect to `peers`, which this object closes, and wait until all workers have done so."""
        self.members = GroupMembers(self.rank, self.segment, self.global_ranks, peers)
        self.segments = [self.segment if rank == self.rank else peers[rank].segment for rank in range(self.size)]
        for rank, peer in sorted(peers.items()):
            self._outgoing.append(peer.segment.address + self.layout.arrival_semaphore(self.rank))
            self._incoming.append((rank, self.segment.address + self.layout.arrival_semaphore(rank)))
        self.await_phase(self.arrive())

    # ---- phases -----------------------------------------------------------------------------------------------------

    def begin(self, *, wait_s: float | None, spin: bool) -> GroupSync:
        """`with sync.begin(...)`: start a new collective, which may wait `wait_s` in total.

        `spin`: no other thread of this process needs the core. If the block raises, the group fails, because its
        peers would take the next collective for the one that did not finish. Raises the failure of a failed group.
        """
        self.check_failed()
        self._wait_s = self.timeout_s if wait_s is None else wait_s
        self._spin = spin
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.failure is None:
            who, what = self.members.describe(self.rank), f"{type(error).__name__}: {error}"
            self.fail(LockstepError(f"{who} failed in {self._pending.doing}: {what}"[:500]))

    def publish_call(self, call: Call) -> None:
        """Publish this worker's next call. The peers read it after the first phase."""
        self.calls += 1
        self._pending = PendingWait(call.name, self._wait_s, self.calls)
        self._published = (self.calls, _OPERATION_CODES[call.name], hash(call.same) & 0xFFFFFFFF)
        longest = max(call.lengths) if call.lengths else 0
        _HEADER.pack_into(self.segment.map, self.layout.header(self.calls), *self._published, longest, call.offset)
        if call.lengths:
            both = (*call.lengths, *call.expects)
            struct.pack_into(f"<{2 * self.size}q", self.segment.map, self.layout.lengths(self.calls), *both)

    def arrive(self) -> int:
        """Signal that this worker's part of the phase is done. Returns the phase number; equal on all workers."""
        self._arrived += 1
        for semaphore in self._outgoing:
            post_semaphore(semaphore)
        return self._arrived

    def await_phase(self, phase: int) -> None:
        """Wait until all workers have arrived at `phase`. Raises if the group fails meanwhile."""
        incoming = self._incoming
        for rank, semaphore in incoming:
            while self._seen[rank] < phase:
                if await_semaphore(semaphore, POLL_S, spin=self._spin):
                    self._seen[rank] += 1
                    self.check_failed()
                else:
                    self.check_peers([r for r, _ in incoming if self._seen[r] < phase], self._pending)
        self.check_failed()  # another thread may have closed the group, and no peers are left to wait for
        self.awaited_calls = self.calls

    def exchange_calls(self, call: Call) -> list[PeerCall]:
        """Publish this worker's next call, and return those of all ranks. Raises DesyncError if they differ."""
        self.publish_call(call)
        self.await_phase(self.arrive())
        return self.read_calls()

    def read_calls(self) -> list[PeerCall]:
        """The published call of each rank, after the first phase. Raises DesyncError if the calls differ."""
        at, calls, segments = self.layout.header(self.calls), [], self.segments
        self.check_failed()  # after `segments` was read: another thread may close the group
        for rank, segment in enumerate(segments):
            number, name, check, length, offset = _HEADER.unpack_from(segment.map, at)
            if (number, name, check) != self._published:
                ours, theirs = self._pending.doing, f"{OPERATIONS[name]} #{number}"
                how = "with another shape, dtype, root or operation" if theirs == ours else f"is in {theirs}"
                text = f"{self.members.describe(self.rank)} called {ours}, but {self.members.describe(rank)} {how}"
                advice = "look for control flow that depends on the rank just before it"
                raise self.fail(DesyncError(f"{text}; {advice}"))
            calls.append(PeerCall(length, offset))
        return calls

    def check_lengths(self, call: Call) -> None:
        """Raise DesyncError unless each rank sends the bytes expected from it, and expects the bytes sent to it."""
        for rank, peer in self.members.peers.items():
            table = struct.unpack_from(f"<{2 * self.size}q", peer.segment.map, self.layout.lengths(self.calls))
            self._check_pair(rank, self.rank, table[self.rank], call.expects[rank])
            self._check_pair(self.rank, rank, call.lengths[rank], table[self.size + self.rank])

    def _check_pair(self, src: int, dst: int, sent: int, taken: int) -> None:
        if taken not in (sent, NOTHING_WANTED):
            sender, receiver = self.members.describe(src), self.members.describe(dst)
            text = f"{self._pending.doing}: {sender} sends {sent} bytes to {receiver}"
            raise self.fail(DesyncError(f"{text}, which expects {taken}; make the sizes agree"))

    # ---- lost and late peers ----------------------------------------------------------------------------------------

    def monitored_barrier_error(self, error: PeerLostError, wait_s: float, *, all_missing: bool) -> PeerLostError:
        """Return an error of a barrier in the words of Gloo.

        all_missing  whether rank 0 names all ranks that have not arrived
        """
        if self.rank != 0:
            text = f"Rank {self.rank} successfully reached monitoredBarrier, but received errors while waiting "
            text += "for send/recv from rank 0"
        elif all_missing:
            missing = [str(self.global_ranks[rank]) for rank, _ in self._incoming if self._seen[rank] < self._arrived]
            text = f"Ranks {', '.join(missing)} failed to pass monitoredBarrier"
        else:
            text = f"Rank {error.rank} failed to pass monitoredBarrier in {1000 * wait_s:.0f} ms"
        return PeerLostError(f"{text}: {error}", rank=error.rank, pid=error.pid)

    def check_peers(self, missing: Sequence[int], pending: PendingWait) -> None:
        """Raise if waiting for `missing` is of no use: a peer is lost, the group was aborted, or it is too late."""
        self.check_failed()
        self.on_idle()
        error = self.members.find_error(missing, pending)
        if error is not None:
            raise self.fail(error)

    def check_failed(self) -> None:
        """Raise the error of the group if it has failed."""
        if self.failure is not None:
            self.told.add(threading.get_ident())
            raise self.failure

    def fail(self, error: LockstepError) -> LockstepError:
        """Mark the group as failed for good, and publish that to the peers. Returns the error to raise."""
        self.told.add(threading.get_ident())
        if self.failure is None:
            self.failure = error
            cause = -1
            if isinstance(error, PeerLostError) and error.rank is not None:
                _lost_peer[:] = [error.rank + 1, error.pid or 0]
                cause = self.global_ranks.index(error.rank) if error.rank in self.global_ranks else -1
            self._publish_state(State.FAILED, cause)
        return self.failure

    def leave(self, state: State) -> None:
        """Publish that this worker takes no further part in the group."""
        if self.failure is None:
            word, who = "aborted" if state is State.ABORTED else "destroyed", self.members.describe(self.rank)
            self.failure = LockstepError(f"this shm group was {word} by {who}; form a new one")
            self.told.add(threading.get_ident())
            self._publish_state(state, -1)
        # Other threads of this process that wait here wake up and raise the failure.
        for rank, semaphore in self._incoming:
            post_semaphore(semaphore)
            post_semaphore(self.segment.address + self.layout.message_semaphore(rank))

    def close(self) -> None:
        """Close the descriptors of the peers and of the own segment, and drop the peers' memory."""
        close_peers(self.members.peers)
        os.close(self.segment.fd)
        self.members.peers, self._outgoing, self._incoming, self.segments = {}, [], [], []

    def _publish_state(self, state: State, cause: int) -> None:
        _STATE.pack_into(self.segment.map, self.layout.STATE, state, cause + 1, *_lost_peer)


def _condition(pid: int) -> str:
    try:
        state = read_stat(pid).state
    except OSError:
        return "cannot be seen in /proc"
    return {"T": "is stopped (SIGSTOP?)", "t": "is stopped by a debugger", "Z": "is dead"}.get(state, "is alive")
