"""Decides when the launcher waits, stops or kills workers, which worker failed first, and what of its output to show.

Pure functions; also defines the exit statuses. When one worker raises, its peers lose their connection and fail too,
within milliseconds, and their exits may be seen first. So after a failure that looks like a lost peer, the launcher
waits SETTLE_S for a failure with a cause of its own.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from lockstep.failures.traceback_parser import BY_CAUSE, MEANWHILE

PREEMPTED: Final = 75  # exit status of a worker or run that saved and ended after a signal: EX_TEMPFAIL, "try again"
INTERRUPTED: Final = 128 + signal.SIGINT  # the same after Ctrl-C: of the launcher, or of a run without a launcher

# Peers of a failed worker fail within 15 ms on an idle machine; a busy machine needs longer.
SETTLE_S = 1.0
EARLY = "it ended with status 0 in the middle of training, before the end of its Run"
SHOWN_LINES = 80
SHOWN_LINES_WITHOUT_TRACEBACK = 20

_LOST_PEER = re.compile(
    r"connection closed by (remote )?peer|connection reset|connection refused|broken pipe|socket closed"
    r"|peerlost|lost the store|ncclRemoteError|remote process exited|failed to recv|recvValue failed"
    r"|DistNetworkError|timed out waiting",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Exit:
    """How a worker ended. `code` is as in `subprocess`: negative for a signal."""

    rank: int
    code: int
    at_s: float
    lost_peer: bool = False  # the end of its output is about a lost peer
    stop_sent: bool = False  # the launcher had asked it to stop before it ended
    early: bool = False  # status 0 in the middle of its Run, which counts as a failure
    quit: bool = False  # status 0 after an exception left its Run: `early` unless the other workers did the same

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.early


class Action(Enum):
    WAIT = "wait"
    STOP = "stop"  # send SIGTERM to the workers that are running
    KILL = "kill"  # send SIGKILL to them
    DONE = "done"


@dataclass(frozen=True)
class LaunchState:
    """The input of `decide`."""

    now_s: float
    alive: int
    grace_s: float
    exits: Sequence[Exit] = ()  # in the order in which they were seen
    stop_sent_at_s: float | None = None  # when the running workers were first asked to stop
    interrupts: int = 0  # how often Ctrl-C was pressed
    killed: bool = False


@dataclass(frozen=True)
class Decision:
    act: Action
    until_s: float | None = None  # for WAIT: the latest time at which to decide again


def decide(state: LaunchState) -> Decision:
    if state.alive == 0:
        return Decision(Action.DONE)
    if state.killed:
        return Decision(Action.WAIT)
    if state.interrupts >= 2:
        return Decision(Action.KILL)
    if state.stop_sent_at_s is not None:
        return _after(state.stop_sent_at_s + state.grace_s, Action.KILL, state.now_s)
    failures = [one for one in state.exits if one.failed]
    if not failures:
        return Decision(Action.WAIT)
    if all(one.lost_peer for one in failures):
        return _after(failures[0].at_s + SETTLE_S, Action.STOP, state.now_s)
    return Decision(Action.STOP)


def _after(then_s: float, act: Action, now_s: float) -> Decision:
    return Decision(act) if now_s >= then_s else Decision(Action.WAIT, then_s)


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Returns the exit that explains the failure, or None if no worker failed.

    That is the first failure. If it only lost a peer, it is the first failure within SETTLE_S that has a cause of its
    own, or else the first worker that left its Run without the others.
    """
    failures = [one for one in exits if one.failed]
    if not failures:
        return None
    first = failures[0]
    for one in failures:
        ended_by_launcher = one.stop_sent and one.code < 0
        if one.at_s - first.at_s <= SETTLE_S and not one.lost_peer and not ended_by_launcher:
            return one
    left = [one for one in exits if one.quit and one.at_s - first.at_s <= SETTLE_S]
    return replace(left[0], early=True) if left and first.lost_peer else first


def finishing_file(logs: Path, pid: int) -> Path:
    """A worker creates this file while it finishes its step and saves after a signal: the launcher waits longer."""
    return logs / f"finishing-{pid}"


def exit_status(exits: Sequence[Exit], stop_signal: int | None) -> int:
    """Returns the exit status of the launcher. `stop_signal` is the signal that asked it to end the run, if any."""
    failed = first_failure(exits)
    if failed is None:
        return 0
    if failed.code >= 0:
        return failed.code or 1  # status 0, but too early
    # A worker that was asked to stop counts as ended by the launcher's signal, even if it took a SIGKILL in the end.
    return 128 + (stop_signal if stop_signal is not None and failed.stop_sent else -failed.code)


def describe(code: int, *, early: bool = False) -> str:
    """Describes how a process ended. `early`: with status 0 in the middle of its Run."""
    if early:
        return EARLY
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; unless that was on purpose, the system may have run out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def is_lost_peer(lines: Sequence[str]) -> bool:
    """Whether the last lines of a worker's output are about a lost peer."""
    return any(_LOST_PEER.search(line) for line in lines[-15:])


def last_output(errors: str, everything: str) -> list[str]:
    """Returns the last traceback on standard error with its causes and what followed; without one, the last lines.

    `errors` is the end of standard error, `everything` the end of both streams.
    """
    # torch puts "[rank1]: " before each line of an uncaught exception.
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in errors.rstrip().splitlines()]
    starts = [i for i, line in enumerate(lines) if line.lstrip(" +|").endswith("Traceback (most recent call last):")]
    if not starts:
        return everything.rstrip().splitlines()[-SHOWN_LINES_WITHOUT_TRACEBACK:]
    begin = starts.pop()
    while starts and any(line.lstrip(" |") in (BY_CAUSE, MEANWHILE) for line in lines[starts[-1] : begin]):
        begin = starts.pop()
    return lines[begin:][-SHOWN_LINES:]


def count_workers(env: Mapping[str, str], *, gpus: int, cores: int) -> int:
    """Returns the default number of workers: one per visible GPU, else one per core but at most four.

    Each worker on the CPU is a full replica and a full Python process, so more than a few must be asked for.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first name that is no device.
        gpus = min(gpus, next((i for i, name in enumerate(names) if name in ("", "-1")), len(names)))
    return gpus or max(1, min(cores, 4))
