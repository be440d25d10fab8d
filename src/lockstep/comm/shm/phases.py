"""Walking in step: phases, and noticing who does not come.

A collective is a few phases. In each, everybody does its part, says so (`arrive`), and goes on when all have
(`await_phase`). Tokens are counted, so a worker that is ahead is not held up, and one that is behind misses nothing.

Note [Who is to blame]
When a worker dies, its peers get PeerLostError, and may end because of it; those who look later find several dead. So
whoever raises writes down whom it blames, where the others can read it, and a dead worker that blamed somebody is not
the cause.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from lockstep.comm.shm import semaphores
from lockstep.comm.shm.memory import PAGE, Segment
from lockstep.comm.shm.rendezvous import Peer
from lockstep.errors import DesyncError, LockstepError, PeerLostError
from lockstep.world.process_identity import read_stat

LOOK_S: Final = 0.05
HEADERS: Final = 4  # nobody is more than one collective ahead of anybody
CARD_BYTES: Final = 512
CARD_BYTES_PER_WORKER: Final = 1024
MAIL_ENTRIES: Final = 256
MAIL_BYTES: Final = 32


class State(IntEnum):
    """What a worker tells the others about itself."""

    OPEN = 0
    LEFT = 1
    ABORTED = 2
    FAILED = 3


@dataclass(frozen=True)
class Layout:
    """Where things are in a segment. The same in every segment of a group."""

    size: int  # workers

    STATE: Final = 0  # state, rank blamed + 1
    HEADER: Final = 256
    HEADER_BYTES: Final = 64

    def token(self, src: int) -> int:
        """The semaphore by which `src` tells the owner of the segment that it has arrived."""
        return PAGE + src * semaphores.SEMAPHORE_BYTES

    def mail(self, src: int) -> int:
        """The semaphore by which `src` tells the owner that there is a message."""
        return PAGE + (self.size + src) * semaphores.SEMAPHORE_BYTES

    def ring(self, dst: int) -> int:
        """The messages from the owner to `dst`."""
        first = PAGE + 2 * self.size * semaphores.SEMAPHORE_BYTES
        return first + dst * MAIL_ENTRIES * MAIL_BYTES

    def cards(self) -> int:
        """What the owner tells about its GPU and the tensors there."""
        return self.lengths(HEADERS)

    def lengths(self, slot: int) -> int:
        """How many bytes the owner sends to each rank, and how many it takes from each."""
        return self.ring(self.size) + slot * 2 * self.size * 8

    @property
    def end(self) -> int:
        return -(-(self.cards() + CARD_BYTES + self.size * CARD_BYTES_PER_WORKER) // PAGE) * PAGE


@dataclass(slots=True)
class Call:
    """What a worker says about the collective it is in. `same` must be equal on all; the rest may differ."""

    name: str
    same: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # bytes that it sends to each rank
    expects: tuple[int, ...] = ()  # bytes that it takes from each rank; NOTHING_WANTED if it does not look
    offset: int = -1  # of the worker's tensor in its segment, if it lies there


@dataclass(slots=True)
class Watch:
    """What is waited for, and until when (on the monotonic clock)."""

    name: str
    wait_s: float
    deadline: float
    number: int | None = None

    @property
    def doing(self) -> str:
        return self.name if self.number is None else f"{self.name} #{self.number}"


NOTHING_WANTED: Final = -1


class Heard(NamedTuple):
    """What another says: the most bytes that it sends to anybody, and where they lie, if not in the staging slots."""

    length: int
    offset: int


_GONE: Final = {
    State.LEFT: "left the group",
    State.ABORTED: "aborted the group",
    State.FAILED: "failed",
}
_HEADER = struct.Struct("<QHxxIqq")  # number, name, check, length, offset
_STATE = struct.Struct("<IIII")  # state, rank blamed + 1; global rank + 1 and pid of whom this process lost

NAMES: Final = (
    "none",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "joining",
)


# Whom this process has lost in any of its groups: it leaves the others because of that, and says so there.
_lost = [0, 0]
_NUMBER: Final = {name: number for number, name in enumerate(NAMES)}


class Team:
    """The workers of one group, seen from one of them."""

    def __init__(self, rank: int, size: int, segment: Segment, timeout_s: float, names: Sequence[int] = ()) -> None:
        """`names`: what the ranks of this group are called in messages: their global ranks."""
        self.rank, self.size, self.segment, self.timeout_s = rank, size, segment, timeout_s
        self.names = tuple(names) or tuple(range(size))
        self.layout = Layout(size)
        self.peers: dict[int, Peer] = {}
        self.calls = 0  # collectives so far
        self.failure: LockstepError | None = None
        self.chores: Callable[[], None] = _nothing  # done now and then by whoever waits
        self._wait_s = timeout_s
        self._watch = Watch("the formation of the group", timeout_s, time.monotonic() + timeout_s)
        self._spin = False
        self._arrived = 0
        self._seen = [0] * size
        self._theirs: list[int] = []  # semaphores by which we tell the others
        self._ours: list[tuple[int, int]] = []  # (rank, semaphore) by which they tell us
        self._maps: list[mmap.mmap] = []
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        _lost[:] = [0, 0]  # a new beginning
        segment.reserve(0, self.layout.end, "the control block of a group")
        for src in range(size):
            semaphores.create(segment.address + self.layout.token(src))
            semaphores.create(segment.address + self.layout.mail(src))

    def join(self, peers: dict[int, Peer]) -> None:
        """Get to know the others, and wait until all know all."""
        self.peers = peers
        self._maps = [self.segment.map if r == self.rank else peers[r].segment.map for r in range(self.size)]
        for rank, peer in sorted(peers.items()):
            self._poll.register(peer.alive_fd, select.POLLIN)
            self._by_fd[peer.alive_fd] = rank
            self._theirs.append(peer.segment.address + self.layout.token(self.rank))
            self._ours.append((rank, self.segment.address + self.layout.token(rank)))
        self.await_phase(self.arrive())

    # ---- phases -----------------------------------------------------------------------------------------------------

    def begin(self, *, wait_s: float | None, spin: bool) -> Team:
        """`with team.begin(...)`: a new collective, which may wait `wait_s` in all.

        `spin`: nobody else in this process wants the core. If it does not end well, the group is of no more use: the
        others would take what comes next for what did not come.
        """
        if self.failure is not None:
            raise self.failure
        self._wait_s = self.timeout_s if wait_s is None else wait_s
        self._spin = spin
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.failure is None:
            what = f"{type(error).__name__}: {error}"
            self.fail(LockstepError(f"{self.who(self.rank)} failed in {self._watch.doing}: {what}"[:500]))

    def say(self, call: Call) -> None:
        """Tell the others what we are about to do. They read it after the first phase."""
        self.calls += 1
        self._watch = Watch(call.name, self._wait_s, time.monotonic() + self._wait_s, self.calls)
        self._said = (self.calls, _NUMBER[call.name], hash(call.same) & 0xFFFFFFFF)
        longest = max(call.lengths) if call.lengths else 0
        _HEADER.pack_into(self.segment.map, self._header_at(self.calls), *self._said, longest, call.offset)
        if call.lengths:
            both = (*call.lengths, *call.expects)
            struct.pack_into(f"<{2 * self.size}q", self.segment.map, self._lengths_at(self.calls), *both)

    def arrive(self) -> int:
        """My part of this phase is done. Returns its number, the same on all workers."""
        self._arrived += 1
        for semaphore in self._theirs:
            semaphores.post(semaphore)
        return self._arrived

    def await_phase(self, phase: int) -> None:
        """Wait until everybody has arrived at `phase`."""
        ours = self._ours
        for rank, semaphore in ours:
            while self._seen[rank] < phase:
                if semaphores.take(semaphore, LOOK_S, spin=self._spin):
                    self._seen[rank] += 1
                    if self.failure is not None:
                        raise self.failure
                else:
                    self.look([r for r, _ in ours if self._seen[r] < phase], self._watch)
        if self.failure is not None:  # another thread has ended the group, and there is nobody left to wait for
            raise self.failure

    def hear(self) -> list[Heard]:
        """What every rank said of its call, after the first phase. Raises if they are not in the same one."""
        at, said, maps = self._header_at(self.calls), [], self._maps
        if self.failure is not None:
            raise self.failure
        for rank, memory in enumerate(maps):
            number, name, check, length, offset = _HEADER.unpack_from(memory, at)
            if (number, name, check) != self._said:
                other = f"{NAMES[name] if name < len(NAMES) else name} #{number}"
                how = "with another shape, dtype, root or operation" if other == self._watch.doing else f"is in {other}"
                raise self.fail(
                    DesyncError(
                        f"{self.who(self.rank)} called {self._watch.doing}, but {self.who(rank)} {how}; "
                        "look for control flow that depends on the rank just before it"
                    )
                )
            said.append(Heard(length, offset))
        return said

    def check_lengths(self, call: Call) -> None:
        """Each rank sends as much as we take from it, and takes as much as we send."""
        for rank in self.peers:
            table = struct.unpack_from(f"<{2 * self.size}q", self.peers[rank].segment.map, self._lengths_at(self.calls))
            self._check_pair(rank, self.rank, table[self.rank], call.expects[rank])
            self._check_pair(self.rank, rank, call.lengths[rank], table[self.size + self.rank])

    def _check_pair(self, src: int, dst: int, sent: int, taken: int) -> None:
        if taken not in (sent, NOTHING_WANTED):
            raise self.fail(
                DesyncError(
                    f"{self._watch.doing}: {self.who(src)} sends {sent} bytes to {self.who(dst)}, "
                    f"which expects {taken}; make the sizes agree"
                )
            )

    def _header_at(self, number: int) -> int:
        return self.layout.HEADER + number % HEADERS * self.layout.HEADER_BYTES

    def _lengths_at(self, number: int) -> int:
        return self.layout.lengths(number % HEADERS)

    # ---- who does not come ------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """Who has not come where we are."""
        return [rank for rank, _ in self._ours if self._seen[rank] < self._arrived]

    def look(self, missing: Sequence[int], watch: Watch) -> None:
        """Raise if nobody need be waited for any more: a peer is gone, the group was aborted, or it is too late."""
        if self.failure is not None:
            raise self.failure
        self.chores()
        dead = [self._by_fd[fd] for fd, _ in self._poll.poll(0)]
        states = {rank: _STATE.unpack_from(self.peers[rank].segment.map, self.layout.STATE) for rank in self.peers}
        for rank in dead:
            if states[rank][:2] == (State.OPEN, 0):
                raise self.fail(self._lost(rank, "died in", watch))
        for rank, (_, blamed, _, _) in states.items():
            if blamed not in (0, self.rank + 1):
                how = "was lost in" if states[blamed - 1][0] == State.OPEN else self._went(states[blamed - 1][0])
                raise self.fail(self._lost(blamed - 1, how, watch, f"{self.who(rank)} gave it up first"))
        for rank in missing:
            if states[rank][0] != State.OPEN and not self._signalled(rank):
                _, _, lost, pid = states[rank]
                if lost:
                    text = f"rank {lost - 1} (pid {pid}) was lost: because of it {self.who(rank)} does not come to"
                    raise self.fail(PeerLostError(f"{text} {watch.doing}", rank=lost - 1, pid=pid))
                stopped = self._stopped()
                how = self._went(states[rank][0]) if stopped is None else "is stopped and does not come to"
                raise self.fail(self._lost(rank if stopped is None else stopped, how, watch))
        if time.monotonic() > watch.deadline:
            raise self.fail(self._late(missing, watch))

    def _stopped(self) -> int | None:
        """A peer that was stopped is the cause, whoever else does not come because of it."""
        return next((rank for rank in self.peers if _condition(self.pid(rank)).startswith("is stopped")), None)

    def _late(self, missing: Sequence[int], watch: Watch) -> PeerLostError:
        stopped = self._stopped()
        if stopped is None and not missing:
            return PeerLostError(
                f"{self.who(self.rank)} in {watch.doing}: Timed out waiting {1000 * watch.wait_s:.0f}ms for anybody"
            )
        rank = missing[0] if stopped is None else stopped
        how = f"{_condition(self.pid(rank))} and did not come to"
        waited = f"Timed out waiting {1000 * watch.wait_s:.0f}ms"  # in the words of Gloo
        return self._lost(rank, how, watch, f"{waited}; {self._last_call(rank)}")

    def _went(self, state: int) -> str:
        return f"{_GONE[State(state)]} and does not come to"

    def _signalled(self, rank: int) -> bool:
        """Whether there is something from `rank` that we have not taken yet."""
        places = (self.layout.token(rank), self.layout.mail(rank))
        # A semaphore's first word is its count.
        return any(ctypes.c_uint.from_address(self.segment.address + place).value for place in places)

    def _last_call(self, rank: int) -> str:
        said = (_HEADER.unpack_from(self.peers[rank].segment.map, self._header_at(i)) for i in range(HEADERS))
        number, name = max(header[:2] for header in said)
        return f"its last call was {NAMES[name]} #{number}" if number else "it has made no call yet"

    def _lost(self, rank: int, how: str, watch: Watch, more: str = "its own output says why") -> PeerLostError:
        message = f"{self.who(rank)} {how} {watch.doing}: {more}"
        return PeerLostError(message, rank=self.names[rank], pid=self.pid(rank))

    def who(self, rank: int) -> str:
        return f"rank {self.names[rank]} (pid {self.pid(rank)})"

    def pid(self, rank: int) -> int:
        return os.getpid() if rank == self.rank else self.peers[rank].pid

    def fail(self, error: LockstepError) -> LockstepError:
        """Nothing can be done in this group any more. Says so to the others, and returns the error to raise."""
        if self.failure is None:
            self.failure = error
            blamed = -1
            if isinstance(error, PeerLostError) and error.rank is not None:
                _lost[:] = [error.rank + 1, error.pid or 0]
                blamed = self.names.index(error.rank) if error.rank in self.names else -1
            self._tell(State.FAILED, blamed)
        return self.failure

    def lost_by(self, rank: int) -> PeerLostError | None:
        """Whom a dead peer had lost before it died, if it was not us."""
        _, _, lost, pid = _STATE.unpack_from(self.peers[rank].segment.map, self.layout.STATE)
        if lost in (0, self.names[self.rank] + 1):
            return None
        text = f"rank {lost - 1} (pid {pid}) was lost: because of it {self.who(rank)} has ended"
        return PeerLostError(text, rank=lost - 1, pid=pid)

    def leave(self, state: State) -> None:
        """Tell the others that we shall not come any more."""
        if self.failure is None:
            word = "aborted" if state is State.ABORTED else "destroyed"
            self.failure = LockstepError(f"this shm group was {word} by {self.who(self.rank)}; form a new one")
            self._tell(state, -1)
        # Our own waiters, in other threads, wake up and find the failure.
        for rank, semaphore in self._ours:
            semaphores.post(semaphore)
            semaphores.post(self.segment.address + self.layout.mail(rank))

    def forget(self) -> None:
        """Let go of the others, and of their memory."""
        for peer in self.peers.values():
            peer.close()
        os.close(self.segment.fd)
        self.peers, self._theirs, self._ours, self._maps = {}, [], [], []

    def _tell(self, state: State, blamed: int) -> None:
        _STATE.pack_into(self.segment.map, self.layout.STATE, state, blamed + 1, *_lost)


def _nothing() -> None:
    pass


def _condition(pid: int) -> str:
    try:
        state = read_stat(pid).state
    except OSError:
        return "is not to be seen"
    return {"T": "is stopped (SIGSTOP?)", "t": "is stopped by a debugger", "Z": "is dead"}.get(state, "is alive")
