"""What the host agent knows about its workers: whether each is alive, when a lost one is replaced, when to give up."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lockstep.elastic.agent_client import JsonPipe
from lockstep.elastic.membership import OrderAction, Standing, Worker
from lockstep.process_identity import read_stat

RUN_WITHIN_S: Final = 20.0  # how long a program may take to create its Run after a worker was killed before that
LEAVE_WITHIN_S: Final = 30.0
BUSY_STALLS: Final = 30  # a worker that uses the CPU may be silent this many times as long

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 15.0
SAME_ERRORS: Final = 2
FEWEST: Final = 6
PER_WORKER: Final = 4
WITHIN_S: Final = 120.0
ROUNDS: Final = 4  # give up after this many times the usual losses if steps are made, but the run gets no further


@dataclass(frozen=True)
class RestartRequest:
    """Sent by every worker when the state cannot be used any more: all go back to the last checkpoint."""

    why: str
    is_wrong: bool | None  # this worker is one of those that are wrong; None: none is, but others were lost


@dataclass
class LocalWorker:
    record: Worker
    pipe: JsonPipe
    slot: int
    pid: int = 0
    last_heard_s: float = field(default_factory=time.monotonic)
    has_run: bool = False  # it has created its Run, and can receive messages
    orders_sent: set[tuple[OrderAction, int]] = field(default_factory=set)
    leave_sent_s: float | None = None
    last_busy: tuple[float, float | None] = (0.0, None)  # when it last used the CPU, and its CPU seconds then
    known_calls: int = 0  # how many entries of the call log it has
    known_in_loop: bool = False  # whether it knows that the others are in their loop
    known_anew: int = 0  # the `anew` of the generation whose entries it has
    position: Any = None  # the last position that it sent
    is_calling: bool = False  # whether it was in a call of the Run then
    left_run: bool = False  # it left its Run by an exception, which its program may catch
    ended_s: float = 0.0  # when its process ended with status 0 after that
    slowness: float = 0.0  # how many times as long as the others it takes, if that is too long; 0.0: it is not
    is_slow_told: bool = False  # a message has said that it is too slow, and stays
    restart: RestartRequest | None = None  # it ends, and another is to be started in its place
    signalled_s: float | None = None  # when it was sent SIGTERM or SIGUSR1, until it is decided what that means
    released: bool = False  # a surplus worker: it ends with status 0, which is not the end of the program

    @property
    def id(self) -> str:
        return self.record.id


def why_dead(local: LocalWorker, now_s: float, stall_s: float) -> str | None:
    """Why a worker must be killed: it is stopped or stuck, or does not leave when ordered to. None if it is alive."""
    if not local.has_run or local.record.standing in (Standing.DONE, Standing.QUIT):
        return None
    silent_s = now_s - local.last_heard_s
    if silent_s > stall_s / 2:  # early enough to know at `stall_s` whether it uses the CPU
        idle_s = _idle_s(local, now_s, since_s=local.last_heard_s)
        is_idle = idle_s >= min(1.0, 0.4 * stall_s) or silent_s > BUSY_STALLS * stall_s
        if silent_s > stall_s and is_idle:
            return f"it gave no sign of life for {silent_s:.1f} s (stopped, or stuck)"
    elif local.leave_sent_s is not None and now_s - local.leave_sent_s > LEAVE_WITHIN_S / 2:
        late_s = now_s - local.leave_sent_s
        is_idle = _idle_s(local, now_s, since_s=local.leave_sent_s) >= LEAVE_WITHIN_S / 4
        if late_s > LEAVE_WITHIN_S and (is_idle or late_s > BUSY_STALLS * LEAVE_WITHIN_S):
            return f"it did not leave its generation within {late_s:.0f} s"
    return None


def _idle_s(local: LocalWorker, now_s: float, *, since_s: float) -> float:
    """How long the worker has neither used the CPU nor waited for it, as far as it was observed after `since_s`.

    A worker that computes may keep its own threads from running, and so send no heartbeat.
    """
    try:
        stat = read_stat(local.pid)
    except OSError:  # it does not exist, or cannot be read
        return math.inf
    used = stat.cpu_s
    before_s, before = local.last_busy
    computes = before is not None and used - before > max(0.05, 0.05 * (now_s - before_s))  # heartbeats use a little
    computes = computes or stat.state == "R"  # its main thread runs, or would if the machine were not overloaded
    if before is None or computes or before_s < since_s:
        local.last_busy = now_s, used
    return now_s - local.last_busy[0]


# -------------------------------------------------------------------------------------------------------- lost workers


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that was lost."""

    worker: int
    at_s: float
    newest: int  # the furthest step that the run had reached by then
    current: int  # the step that it was at: an earlier one if it had returned to a checkpoint
    error: str = ""  # the last line of its traceback; "" if it was killed


class LossBeforeRun:
    """The loss of a worker before any worker has created a Run: the program may create one, or not."""

    def __init__(self) -> None:
        self.failure: WorkerFailure | None = None

    def note(self, failure: WorkerFailure) -> bool:
        """Note a loss. Returns whether the run continues, at least until `resolve`: it was killed, and is the first."""
        if failure.error or self.failure is not None:
            return False
        self.failure = failure
        return True

    def resolve(self, now_s: float, *, has_run: bool, is_running: bool) -> WorkerFailure | None:
        """Return the loss if no worker creates a Run in time: without one, a lost worker cannot be replaced.

        has_run     a worker has created a Run
        is_running  a worker is left
        """
        failure = self.failure
        if failure is None or (not has_run and is_running and now_s <= failure.at_s + RUN_WITHIN_S):
            return None
        self.failure = None
        return None if has_run else failure


def why_give_up(failures: Sequence[WorkerFailure], workers: int) -> str | None:
    """Why the run is given up; None if it continues.

    A run that makes progress may lose any number of workers, unless one after the other fails with the same error.
    """
    same_error = _with_same_error(failures)
    if len(same_error) >= FEWEST:
        return f"{len(same_error)} workers failed with the same error within {WITHIN_S:.0f} s"
    stuck = _without_progress(failures)
    errors = [one.error for one in stuck if one.error]
    for error in errors:
        if errors.count(error) >= SAME_ERRORS:
            return f"{errors.count(error)} workers failed with the same error, and no step was made in between"
    most = max(FEWEST, PER_WORKER * workers)
    if len(stuck) >= most:
        return f"{len(stuck)} workers were lost, and no step was made in between"
    no_new_step = [one for one in failures if one.newest == failures[-1].newest]
    if len(no_new_step) >= ROUNDS * most:
        return f"{len(no_new_step)} workers were lost, and the run came no further than step {failures[-1].newest}"
    return None


def start_at_s(failures: Sequence[WorkerFailure]) -> float:
    """When the next worker may be started.

    At once after the first failure; with growing pauses while no step is made, or workers fail with the same error.
    """
    stuck, same_error = _without_progress(failures), _with_same_error(failures)
    if max(len(stuck), len(same_error)) < 2:
        return 0.0
    own_errors = max(sum(1 for one in stuck if one.error), len(same_error))  # being killed is no reason to wait
    return failures[-1].at_s + (min(FIRST_PAUSE_S * 2 ** (own_errors - 1), LONGEST_PAUSE_S) if own_errors else 0.0)


def _with_same_error(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The failures with the error of the last one, within WITHIN_S before it."""
    last = failures[-1] if failures else None
    if last is None or not last.error:
        return []
    return [one for one in failures if one.error == last.error and one.at_s >= last.at_s - WITHIN_S]


def _without_progress(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The failures at the step of the last one. A run that always fails there returns to it from its checkpoint."""
    return [one for one in failures if (one.newest, one.current) == (failures[-1].newest, failures[-1].current)]
