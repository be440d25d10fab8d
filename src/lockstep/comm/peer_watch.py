"""Waiting for collectives, and naming the worker that is lost or missing.

Every worker publishes a short report in the group's store about once a second while it makes progress, and a last one
when its process exits. Reports are read only when something is wrong: when a collective fails, or takes so long that
a worker must be missing. `diagnose` decides from the reports; everything else publishes and reads them.
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

from lockstep import _torch
from lockstep._torch import Store
from lockstep.comm import peer_stacks
from lockstep.comm.abortable_wait import POLL_INTERVAL_S, check_aborted, done_within, wait_without_limit
from lockstep.comm.peer_stacks import request_stack
from lockstep.errors import DesyncError, LockstepError, PeerLostError
from lockstep.process_identity import is_dead
from lockstep.settings import Settings
from lockstep.world.rendezvous import publish_first_loss

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
EXIT_LIMIT_S = 5.0
LOST_PHRASES = (
    "Connection closed by peer", "Connection reset", "Broken pipe", "Read error", "Socket", "timed out",
    "closed by the other side", "ncclRemoteError", "ncclSystemError",
)  # fmt: skip


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error of a collective means that a worker was lost: a PeerLostError, or a message of Gloo or NCCL."""
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in LOST_PHRASES)
    )


@dataclass(frozen=True)
class WorkerReport:
    """What a worker publishes about itself."""

    rank: int
    pid: int = 0
    host: str = ""
    passes: int = 0  # backward passes that were reduced
    inside: bool = False  # whether it is in a backward pass now
    calls: int = 0  # collectives started on this group
    exit_reason: str | None = None  # None while it runs
    stack_address: str = ""  # address of its stack service (peer_stacks.py)
    position: tuple[int, int] = (0, 0)  # of its call of the Run (recovery/collective_calls.py)
    doing: str = ""  # that call, "" for none


def diagnose(
    own: WorkerReport, peers: Sequence[WorkerReport], *, dead: Sequence[int], where: str
) -> LockstepError | None:
    """Return why this worker waits, if the reports tell; None also if a worker is merely slow.

    A DesyncError about collectives is a strong suspicion only: the user's own sends and receives count as calls too.
    One about calls of the Run is certain: those at one position are the same on all workers.
    """
    for peer in peers:
        who = f"rank {peer.rank} (pid {peer.pid} on {peer.host})"
        text = ""
        if peer.exit_reason is not None:
            text = (
                f"{who} left after {peer.passes} backward passes: {peer.exit_reason}. Rank {own.rank} was waiting for "
                f"it in {where}. If it merely had fewer batches, wrap the training loop in `with model.join():`, or "
                "give every worker the same number."
            )
        elif peer.rank in dead:
            text = (
                f"{who} died without an error message (last report after {peer.passes} backward passes): killed, or "
                f"out of memory. Rank {own.rank} was waiting for it in {where}. Look at the end of its log."
            )
        if text:
            return PeerLostError(text, rank=peer.rank, pid=peer.pid)
    if (elsewhere := find_other_call(own, peers)) is not None:
        return elsewhere
    for peer in peers:
        if peer.pid and not peer.inside and peer.calls == own.calls:
            return DesyncError(
                f"rank {own.rank} waits in {where}, but rank {peer.rank}, after {peer.passes} backward passes, has "
                f"called another collective instead (number {own.calls} on this group). It had fewer batches, or its "
                "control flow depends on the rank: use `with model.join():` for uneven inputs, and look for a barrier, "
                "a reduction or a checkpoint that only some workers reach."
            )
    return None


def desync_error(rank: int, what: str, peer: int, theirs: str) -> DesyncError:
    """Return the error for two workers that are in different calls of the Run."""
    return DesyncError(
        f"rank {rank} called {what}, but rank {peer} called {theirs}; look for control flow that depends on the rank "
        "just before it: all workers make the same calls in the same order"
    )


def find_other_call(own: WorkerReport, peers: Sequence[WorkerReport]) -> DesyncError | None:
    """Return an error if a peer at the same position is in another call of the Run; None otherwise."""
    for peer in peers:
        if own.doing and peer.doing not in ("", own.doing) and peer.position == own.position:
            return desync_error(own.rank, own.doing, peer.rank, peer.doing)
    return None


class Reporter:
    """Publishes this worker's reports for one group, and reads those of the others."""

    _of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Reporter | None] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(group: dist.ProcessGroup) -> Reporter | None:
        """Return the reporter of a group; None for a group of one, or one without a store."""
        if group not in Reporter._of_group:
            store = _store_of(group) if group.size() > 1 else None
            Reporter._of_group[group] = Reporter(group, store) if store is not None else None
        return Reporter._of_group[group]

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group = weakref.ref(group)
        self._store = store
        self.size, self.rank = group.size(), group.rank()
        self.passes = 0
        self.depth = 0  # backward passes that are being reduced now: there may be several wrappers
        self.current_call: Callable[[], tuple[tuple[int, int], str]] = lambda: ((0, 0), "")  # position, doing
        self._stack_address = peer_stacks.serve()
        self._published: WorkerReport | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._known = {r: WorkerReport(r) for r in range(self.size) if r != self.rank}
        self._publish(self.make_report())
        atexit.register(self._publish_exit)
        self._thread = threading.Thread(target=self._publish_changes, name="lockstep-report", daemon=True)
        self._thread.start()

    def make_report(self, exit_reason: str | None = None) -> WorkerReport:
        group, (position, doing) = self._group(), self.current_call()
        return WorkerReport(
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            passes=self.passes,
            inside=self.depth > 0,
            calls=_calls(group) if group is not None else 0,
            exit_reason=exit_reason,
            stack_address=self._stack_address,
            position=position,
            doing=doing,
        )

    def _publish(self, report: WorkerReport) -> None:
        with self._lock:
            self._published = report
            self._store.set(f"lockstep/{self.rank}", json.dumps(asdict(report)))

    def _publish_changes(self) -> None:
        # Only changes are published, so that nothing is sent to a store whose host has ended normally.
        while not self._ended.wait(REPORT_EVERY_S) and self._group() is not None:
            try:
                if self.make_report() != self._published:
                    self._publish(self.make_report())
            except Exception:
                return  # the store is lost, so the report could not be read anyway

    def _publish_exit(self) -> None:
        self._ended.set()
        self._thread.join(REPORT_EVERY_S)  # it must not be in the middle of a call when the interpreter ends
        error = getattr(sys, "last_value", None)
        why = "its program ended" if error is None else f"{type(error).__name__}: {error}"[:500]
        with suppress(Exception):
            self._publish(self.make_report(exit_reason=why))

    def read_reports(self) -> list[WorkerReport]:
        """Return the newest report of every other worker, or the last one read if the store no longer answers."""
        for rank in self._known:
            key = f"lockstep/{rank}"
            with suppress(Exception), self._lock:
                if self._store.check([key]):
                    report = json.loads(self._store.get(key))
                    self._known[rank] = WorkerReport(**(report | {"position": tuple(report["position"])}))
        return list(self._known.values())

    def diagnose(self, where: str) -> LockstepError | None:
        """Return why this worker waits in `where`, if this or another worker knows; None otherwise."""
        peers = self.read_reports()
        error = diagnose(self.make_report(), peers, dead=self.find_dead(peers), where=where)
        if not isinstance(error, PeerLostError) or error.rank is None:
            return error
        # A worker that has lost another one ends too, and is then missed by others: the first record counts.
        first = publish_first_loss(self._store, error)
        return error if first.rank == error.rank else first

    def find_dead(self, reports: Sequence[WorkerReport]) -> list[int]:
        """Return the workers of this host whose process is dead."""
        here = socket.gethostname()
        return [one.rank for one in reports if one.pid and one.host == here and is_dead(one.pid)]

    def describe_stall(self, where: str, waited_s: float) -> str:
        """Describe which workers are in the collective, which are missing, and what those are doing."""
        here, arrived, missing = socket.gethostname(), [f"rank {self.rank}"], []
        for peer in self.read_reports():
            reply = request_stack(peer.stack_address, peer.pid) if peer.stack_address and peer.host == here else None
            if reply.waits if reply is not None else peer.inside:
                arrived.append(f"rank {peer.rank}")
            else:
                missing.append((peer, reply))
        who = ", ".join(f"rank {p.rank} (pid {p.pid} on {p.host}, {p.passes} backward passes)" for p, _ in missing)
        lines = [
            f"rank {self.rank} has waited {waited_s:.0f} s in {where}; arrived: {', '.join(arrived)}; "
            f"missing: {who or '?'}"
        ]
        for peer, reply in missing:
            if reply is not None and reply.stack:
                lines += [f"  rank {peer.rank} is here:", *(f"  {line}" for line in reply.stack.rstrip().splitlines())]
            elif reply is not None:
                lines.append(f"  rank {peer.rank}: {reply.failure}")
        return "\n".join(lines)


class PeerWatch:
    """Waits for collectives of one group, and diagnoses those that fail or stall."""

    def __init__(self, group: dist.ProcessGroup, *, polls: bool) -> None:
        """`polls`: whether a wait with a time limit leaves the collective undisturbed, as with Gloo on a CPU."""
        self._reporter, self._group = Reporter.of(group), weakref.ref(group)
        self._polls = polls
        self._suspicion = ""
        self._stall_s = Settings.from_env(os.environ).stall_s

    def enter(self) -> None:
        if self._reporter is not None:
            self._reporter.depth += 1

    def leave(self) -> None:
        if self._reporter is not None:
            self._reporter.depth = max(0, self._reporter.depth - 1)
            self._reporter.passes += 1

    def wait(self, work: Any, where: str) -> None:
        with self.explain_errors(where):
            if not self._polls:
                wait_without_limit(work)
                return
            self.wait_for(partial(done_within, work), where)

    def wait_for(self, done_within: Callable[[float], bool], where: str) -> None:
        """Wait until `done_within(seconds)` returns True. Raises if the group is aborted or a worker is lost."""
        poll_s = min(POLL_INTERVAL_S, self._stall_s)
        if done_within(poll_s):
            return
        waited_s, checked_s = poll_s, 0.0
        peer_stacks.record_wait(where)  # for workers that request this worker's stack
        try:
            while True:
                check_aborted(self._group(), where)
                if self._reporter is not None and waited_s - checked_s >= self._stall_s:
                    checked_s = waited_s
                    self._check_peers(where, waited_s)
                if done_within(poll_s):
                    return
                waited_s += poll_s
        finally:
            peer_stacks.record_wait("")

    def _check_peers(self, where: str, waited_s: float) -> None:
        assert self._reporter is not None
        error = self._reporter.diagnose(where)
        if isinstance(error, PeerLostError) or (error is not None and str(error) == self._suspicion):
            _limit_exit_time()
            raise error
        self._suspicion = "" if error is None else str(error)  # raised if the next check gives the same
        logger.warning("%s", self._reporter.describe_stall(where, waited_s))

    @contextmanager
    def explain_errors(self, where: str) -> Iterator[None]:
        """Turn errors of broken connections into a PeerLostError that names the lost worker, where it is known."""
        try:
            yield
        except PeerLostError as error:
            # The group knows which worker; the reports may know why.
            cause = self._reporter.diagnose(where) if self._reporter is not None else None
            if not isinstance(cause, PeerLostError) or error.rank not in (None, cause.rank):
                raise
            raise cause from error
        except LockstepError:
            raise
        except RuntimeError as error:
            if self._reporter is None or not is_peer_loss(error):
                raise
            raise self._find_lost_peer(where, error) from error

    def _find_lost_peer(self, where: str, error: RuntimeError) -> LockstepError:
        assert self._reporter is not None
        # The connections of a process are closed a moment before it has ended.
        for _ in range(20):
            cause = self._reporter.diagnose(where)
            if isinstance(cause, PeerLostError):
                return cause
            time.sleep(0.05)
        return PeerLostError(
            f"a worker was lost while rank {self._reporter.rank} waited in {where}; none of those that can be seen "
            f"from here has ended, so look at the other hosts and the network. The connection said: {error}"
        )


def _limit_exit_time() -> None:
    """Make the exit of this process take EXIT_LIMIT_S at most, once it has begun.

    A collective that never completes keeps its thread, and a process that exits waits for that thread. (A program that
    catches the error continues.)
    """
    null = open(os.devnull, "w")  # noqa: SIM115  (must stay open until the process ends)
    atexit.register(faulthandler.dump_traceback_later, EXIT_LIMIT_S, exit=True, file=null)


def _calls(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0  # not every backend counts


def _store_of(group: dist.ProcessGroup) -> Store | None:
    try:
        store: Any = _torch.distributed_state().pg_map[group][1]
        # A separate connection: a call that blocks on the shared one would block this one too.
        return cast(Store, store.clone())
    except (KeyError, RuntimeError, AttributeError, NotImplementedError):
        return None
