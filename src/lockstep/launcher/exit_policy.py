"""What the launcher thinks: when to wait, stop or kill, which worker to blame, and which of its words to repeat. Pure.

When one worker raises, its peers lose their connection and fail too, within milliseconds, and may be seen to end
first. So a failure that looks like a lost peer gets a moment in which the real culprit may show up.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

# Peers of a failed worker follow it within 15 ms on a quiet machine; a busy one deserves some more.
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
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@dataclass(frozen=True)
class Exit:
    """How a worker ended. `code` as subprocess has it: below zero for a signal."""

    rank: int
    code: int
    at_s: float
    lost_peer: bool = False  # its last words are about somebody else
    told: bool = False  # we had asked it to stop by then
    early: bool = False  # with status 0, in the middle of its Run: a failure all the same
    quit: bool = False  # with status 0, after an exception had left its Run: early, if the others did not do that too

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.early


class Act(Enum):
    WAIT = "wait"
    STOP = "stop"  # ask the living to end, SIGTERM
    KILL = "kill"  # do not ask, SIGKILL
    DONE = "done"


@dataclass(frozen=True)
class Scene:
    """All that `decide` looks at."""

    now_s: float
    alive: int
    grace_s: float
    exits: Sequence[Exit] = ()  # in the order in which they were seen
    told_at_s: float | None = None  # when the living were first asked to stop
    interrupts: int = 0  # how often Ctrl-C was pressed
    killed: bool = False


@dataclass(frozen=True)
class Decision:
    act: Act
    until_s: float | None = None  # for WAIT: decide again then, at the latest


def decide(scene: Scene) -> Decision:
    if scene.alive == 0:
        return Decision(Act.DONE)
    if scene.killed:
        return Decision(Act.WAIT)
    if scene.interrupts >= 2:
        return Decision(Act.KILL)
    if scene.told_at_s is not None:
        return _after(scene.told_at_s + scene.grace_s, Act.KILL, scene.now_s)
    failures = [one for one in scene.exits if one.failed]
    if not failures:
        return Decision(Act.WAIT)
    if all(one.lost_peer for one in failures):
        return _after(failures[0].at_s + SETTLE_S, Act.STOP, scene.now_s)
    return Decision(Act.STOP)


def _after(then_s: float, act: Act, now_s: float) -> Decision:
    return Decision(act) if now_s >= then_s else Decision(Act.WAIT, then_s)


def blame(exits: Sequence[Exit]) -> Exit | None:
    """The first that failed; but if that one only lost a peer, the first soon after that has reasons of its own, or the
    first that left its Run without the others."""
    failures = [one for one in exits if one.failed]
    if not failures:
        return None
    first = failures[0]
    for one in failures:
        obeyed = one.told and one.code < 0
        if one.at_s - first.at_s <= SETTLE_S and not one.lost_peer and not obeyed:
            return one
    left = [one for one in exits if one.quit and one.at_s - first.at_s <= SETTLE_S]
    return replace(left[0], early=True) if left and first.lost_peer else first


def finishing_file(logs: Path, pid: int) -> Path:
    """The file by which a worker tells its launcher that it finishes its step and saves after a signal."""
    return logs / f"finishing-{pid}"


def exit_status(exits: Sequence[Exit], asked: int | None) -> int:
    """The launcher's own. `asked`: the signal that somebody sent us to end the run, if so."""
    culprit = blame(exits)
    if culprit is None:
        return 0
    if culprit.code >= 0:
        return culprit.code or 1  # ended with status 0, and too early
    # Whoever was told to end and died of it, of our SIGKILL at last, counts as ended by the signal we were sent.
    return 128 + (asked if asked is not None and culprit.told else -culprit.code)


def describe(code: int, *, early: bool = False) -> str:
    """How a process ended. `early`: with status 0, in the middle of its Run."""
    if early:
        return EARLY
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; if nobody did that on purpose, the system may have run out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def is_lost_peer(words: Sequence[str]) -> bool:
    """Whether somebody's last words are about a peer that went away."""
    return any(_LOST_PEER.search(line) for line in words[-15:])


def last_words(errors: str, everything: str) -> list[str]:
    """The last traceback on standard error with all its causes and what followed; without one, the last lines."""
    # torch puts "[rank1]: " before each line of an uncaught exception.
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in errors.rstrip().splitlines()]
    starts = [i for i, line in enumerate(lines) if line.lstrip(" +|").endswith("Traceback (most recent call last):")]
    if not starts:
        return everything.rstrip().splitlines()[-SHOWN_LINES_WITHOUT_TRACEBACK:]
    begin = starts.pop()
    while starts and any(line.lstrip(" |") in _CHAINED for line in lines[starts[-1] : begin]):
        begin = starts.pop()
    return lines[begin:][-SHOWN_LINES:]


def count_workers(env: Mapping[str, str], *, gpus: int, cores: int) -> int:
    """How many workers when the user does not say: one per visible GPU, else one per core but at most four.

    Each worker on the CPU is a whole replica and a whole Python; more than a few is a choice to be made, not a default.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops reading at the first name that is no device.
        gpus = min(gpus, next((i for i, name in enumerate(names) if name in ("", "-1")), len(names)))
    return gpus or max(1, min(cores, 4))
