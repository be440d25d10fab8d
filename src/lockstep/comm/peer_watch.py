"""Waiting for the others, and naming the one that does not come.

Every worker leaves a short report in the group's store about once a second while it makes progress, and a last one
when its process ends. They are read only when something is wrong: when a collective fails, or takes so long that
somebody must be missing. `judge` decides from the reports; everything else fetches and delivers them.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.comm import stack_service
from lockstep.comm.abortable_wait import LOOK_EVERY_S, check_given_up, done_within, wait_without_limit
from lockstep.comm.loss_board import Board, Note
from lockstep.comm.stack_service import ask
from lockstep.errors import DesyncError, LockstepError, PeerLostError
from lockstep.world.process_identity import read_stat

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
END_WITHIN_S = 5.0
LOST_PHRASES = (
    "Connection closed by peer", "Connection reset", "Broken pipe", "Read error", "Socket", "timed out",
    "closed by the other side", "ncclRemoteError", "ncclSystemError",
)  # fmt: skip


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """An error of a collective, in our words or in those of Gloo and NCCL."""
    if isinstance(error, PeerLostError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in LOST_PHRASES)


@dataclass(frozen=True)
class Report:
    """What a worker says of itself."""

    rank: int
    pid: int = 0
    host: str = ""
    passes: int = 0  # backward passes that were reduced
    inside: bool = False  # in one right now
    calls: int = 0  # collectives started on this group
    left: str | None = None  # why it ended, if it has
    answers_at: str = ""  # see stack.py
    position: tuple[int, int] = (0, 0)  # of a call of the Run (train/collective_calls.py)
    doing: str = ""  # that call; "": none


def judge(us: Report, peers: Sequence[Report], *, dead: Sequence[int], where: str) -> LockstepError | None:
    """Who is to blame for our waiting, if the reports say so. A worker that is merely slow is not to blame.

    A DesyncError about collectives is a strong suspicion only: sends and receives of the user's own count as calls too.
    One about calls of the Run is certain: those at one position are the same on all workers.
    """
    for peer in peers:
        if peer.left is not None:
            return PeerLostError(
                f"rank {peer.rank} (pid {peer.pid} on {peer.host}) left after {peer.passes} backward passes: "
                f"{peer.left}. Rank {us.rank} was waiting for it in {where}. If it merely had fewer batches, wrap the "
                "training loop in `with model.join():`, or give every worker the same number.",
                rank=peer.rank,
                pid=peer.pid,
            )
        if peer.rank in dead:
            return PeerLostError(
                f"rank {peer.rank} (pid {peer.pid} on {peer.host}) died without a word (last heard of after "
                f"{peer.passes} backward passes): killed, or out of memory. Rank {us.rank} was waiting for "
                f"it in {where}. Look at the end of its log.",
                rank=peer.rank,
                pid=peer.pid,
            )
    if (elsewhere := in_other_call(us, peers)) is not None:
        return elsewhere
    for peer in peers:
        if peer.pid and not peer.inside and peer.calls == us.calls:
            return DesyncError(
                f"rank {us.rank} waits in {where}, but rank {peer.rank}, after {peer.passes} backward passes, has "
                f"called another collective instead (number {us.calls} on this group). It had fewer batches, or its "
                "control flow depends on the rank: use `with model.join():` for uneven inputs, and look for a barrier, "
                "a reduction or a checkpoint that only some workers reach."
            )
    return None


def other_call(rank: int, what: str, peer: int, theirs: str) -> DesyncError:
    """For two workers that are in different calls of the Run."""
    return DesyncError(
        f"rank {rank} called {what}, but rank {peer} called {theirs}; look for control flow that depends on the rank "
        "just before it: all workers make the same calls in the same order"
    )


def in_other_call(us: Report, peers: Sequence[Report]) -> DesyncError | None:
    """If one of them is, at our position, in another call of the Run than we are."""
    for peer in peers:
        if us.doing and peer.doing not in ("", us.doing) and peer.position == us.position:
            return other_call(us.rank, us.doing, peer.rank, peer.doing)
    return None


class Reporter:
    """Our reports about one group, and a look at those of the others."""

    _of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Reporter | None] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(group: dist.ProcessGroup) -> Reporter | None:
        """One for each group; none for a group of one, or one that has no store."""
        if group not in Reporter._of_group:
            store = _store_of(group) if group.size() > 1 else None
            Reporter._of_group[group] = Reporter(group, store) if store is not None else None
        return Reporter._of_group[group]

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group = weakref.ref(group)
        self._store = store
        self.size, self.rank = group.size(), group.rank()
        self.passes = 0
        self.depth = 0  # backward passes that are being reduced: there may be several wrappers
        self.tell_call: Callable[[], tuple[tuple[int, int], str]] = lambda: ((0, 0), "")  # position, doing
        self._answers_at = stack_service.serve()
        self._said: Report | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._known = {r: Report(r) for r in range(self.size) if r != self.rank}
        self._say(self.now())
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._keep_reporting, name="lockstep-report", daemon=True)
        self._thread.start()

    def now(self, left: str | None = None) -> Report:
        group, (position, doing) = self._group(), self.tell_call()
        return Report(
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            passes=self.passes,
            inside=self.depth > 0,
            calls=_calls(group) if group is not None else 0,
            left=left,
            answers_at=self._answers_at,
            position=position,
            doing=doing,
        )

    def _say(self, report: Report) -> None:
        with self._lock:
            self._said = report
            self._store.set(f"lockstep/{self.rank}", json.dumps(asdict(report)))

    def _keep_reporting(self) -> None:
        # Only what is new is said, so that nothing is sent to a store whose host has ended in peace.
        while not self._ended.wait(REPORT_EVERY_S) and self._group() is not None:
            try:
                if self.now() != self._said:
                    self._say(self.now())
            except Exception:
                return  # the store is gone, and with it anybody who would read this

    def _leave(self) -> None:
        self._ended.set()
        self._thread.join(REPORT_EVERY_S)  # it must not be in the middle of a call when the interpreter ends
        error = getattr(sys, "last_value", None)
        why = "its program ended" if error is None else f"{type(error).__name__}: {error}"[:500]
        with suppress(Exception):
            self._say(self.now(left=why))

    def hear(self) -> list[Report]:
        """The newest report of every other worker; an older one where the store no longer answers."""
        for rank in self._known:
            key = f"lockstep/{rank}"
            with suppress(Exception), self._lock:
                if self._store.check([key]):
                    told = json.loads(self._store.get(key))
                    self._known[rank] = Report(**(told | {"position": tuple(told["position"])}))
        return list(self._known.values())

    def blame(self, where: str) -> LockstepError | None:
        """Who is to blame for our waiting, as far as we or those know who saw it before us."""
        peers = self.hear()
        error = judge(self.now(), peers, dead=self.dead(peers), where=where)
        if not isinstance(error, PeerLostError) or error.rank is None:
            return error
        # Who lost a worker ends too, and is then missed by others: the first note counts.
        first = Board(self._store).leave(Note(error.rank, error.pid or 0, str(error)))
        return error if first.rank == error.rank else first.error()

    def describe_stall(self, where: str, waited_s: float) -> str:
        """Who has come, who is missing, and what those do who are missing."""
        here, there, late = socket.gethostname(), [], []
        for peer in self.hear():
            asked = ask(peer.answers_at, peer.pid) if peer.answers_at and peer.host == here else None
            if asked.waits if asked is not None else peer.inside:
                there.append(f"rank {peer.rank}")
            else:
                late.append((peer, asked))
        who = ", ".join(f"rank {p.rank} (pid {p.pid} on {p.host}, {p.passes} backward passes)" for p, _ in late)
        lines = [
            f"rank {self.rank} has waited {waited_s:.0f} s in {where}; there: {', '.join(['we', *there])}; "
            f"not there yet: {who or '?'}"
        ]
        for peer, asked in late:
            if asked is not None and asked.stack:
                lines += [f"  rank {peer.rank} is here:", *(f"  {line}" for line in asked.stack.rstrip().splitlines())]
            elif asked is not None:
                lines.append(f"  rank {peer.rank}: {asked.silence}")
        return "\n".join(lines)

    def dead(self, reports: Sequence[Report]) -> list[int]:
        """Workers of this host whose process is gone."""
        here = socket.gethostname()
        return [r.rank for r in reports if r.pid and r.host == here and not _is_running(r.pid)]


class Watch:
    """Waits for collectives of one group."""

    def __init__(self, group: dist.ProcessGroup, *, polls: bool) -> None:
        """`polls`: waiting with a time limit does not disturb the collective (so it is with Gloo on a CPU)."""
        self._reporter, self._group = Reporter.of(group), weakref.ref(group)
        self._polls = polls
        self._suspicion = ""
        self._stall_s = float(os.environ.get("LOCKSTEP_STALL_S", "10"))

    def enter(self) -> None:
        if self._reporter is not None:
            self._reporter.depth += 1

    def leave(self) -> None:
        if self._reporter is not None:
            self._reporter.depth = max(0, self._reporter.depth - 1)
            self._reporter.passes += 1

    def wait(self, work: Any, where: str) -> None:
        with self.explains(where):
            if not self._polls:
                wait_without_limit(work)
                return
            self.wait_for(partial(done_within, work), where)

    def wait_for(self, done_within: Callable[[float], bool], where: str) -> None:
        """Until `done_within(seconds)` says so; meanwhile look around, and raise if somebody is gone."""
        look_every_s = min(LOOK_EVERY_S, self._stall_s)
        if done_within(look_every_s):
            return
        waited_s, looked_s = look_every_s, 0.0
        stack_service.note_wait(where)  # for those who ask why we do not come
        try:
            while True:
                check_given_up(self._group(), where)
                if self._reporter is not None and waited_s - looked_s >= self._stall_s:
                    looked_s = waited_s
                    self._look_around(where, waited_s)
                if done_within(look_every_s):
                    return
                waited_s += look_every_s
        finally:
            stack_service.note_wait("")

    def _look_around(self, where: str, waited_s: float) -> None:
        assert self._reporter is not None
        error = self._reporter.blame(where)
        if isinstance(error, PeerLostError) or (error is not None and str(error) == self._suspicion):
            _do_not_linger()
            raise error
        self._suspicion = "" if error is None else str(error)  # raised if nothing has changed at the next look
        logger.warning("%s", self._reporter.describe_stall(where, waited_s))

    @contextmanager
    def explains(self, where: str) -> Iterator[None]:
        """Turns a broken connection into the name of the worker that broke it."""
        try:
            yield
        except PeerLostError as error:
            # The group knows who; the reports may know why.
            verdict = self._reporter.blame(where) if self._reporter is not None else None
            if not isinstance(verdict, PeerLostError) or error.rank not in (None, verdict.rank):
                raise
            raise verdict from error
        except LockstepError:
            raise
        except RuntimeError as error:
            if self._reporter is None or not tells_of_a_lost_peer(error):
                raise
            raise self._who_was_it(where, error) from error

    def _who_was_it(self, where: str, error: RuntimeError) -> LockstepError:
        assert self._reporter is not None
        # Its connections are closed a moment before its process has ended.
        for _ in range(20):
            verdict = self._reporter.blame(where)
            if isinstance(verdict, PeerLostError):
                return verdict
            time.sleep(0.05)
        return PeerLostError(
            f"a worker went away while rank {self._reporter.rank} waited in {where}; none of those that can be seen "
            f"from here has ended, so look at the other hosts and the network. The connection said: {error}"
        )


def _do_not_linger() -> None:
    """A collective that will never complete keeps its thread, and a process that ends waits for that thread.

    So once our end has begun, it may take a few seconds and no more. (A program that catches the error goes on.)
    """
    null = open(os.devnull, "w")  # noqa: SIM115  (it must live as long as the process)
    atexit.register(faulthandler.dump_traceback_later, END_WITHIN_S, exit=True, file=null)


def _calls(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0  # not every backend counts


def _store_of(group: dist.ProcessGroup) -> Store | None:
    try:
        store: Any = dist.distributed_c10d._world.pg_map[group][1]
        # A connection of our own: a call that blocks on the shared one would block ours too.
        return cast(Store, store.clone())
    except (KeyError, RuntimeError, AttributeError, NotImplementedError):
        return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return read_stat(pid).state not in "ZX"  # dead, though nobody has collected it yet
    except OSError:
        return True
