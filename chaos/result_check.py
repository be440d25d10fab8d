"""Pure: what the workers said about a case -> what is wrong with it; all results -> the table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from plan import COLLECTIVES, Case, Event
from worker import Told

NOTICE_S = 1.0  # a survivor knows so soon after the death, or so soon after the deadline
CLOCK_S = 0.05  # a deadline may be measured so differently by two who start their clocks apart


class Fault(StrEnum):
    NOT_TOLD = "not told"  # another error, or none
    WRONG_RANK = "wrong rank"
    LATE = "late"
    EARLY = "early"  # given up before the deadline
    LEFTOVERS = "leftovers"
    NO_RECOVERY = "no recovery"  # the group could not be left, or no new one formed
    BROKEN = "broken"  # a worker hangs or crashed, or the group did not come about


@dataclass(frozen=True)
class Finding:
    fault: Fault
    text: str


@dataclass
class Result:
    case: Case
    place: str = ""  # where the first victim was
    inside: bool = False  # in the middle of the call
    signed: bool = False  # the first victim had told that it was there, so its death can be seen
    strikes: dict[int, float] = field(default_factory=dict)  # rank -> when its signal was sent
    pids: dict[int, int] = field(default_factory=dict)
    told: dict[int, Told] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def notice_s(self) -> dict[int, float]:
        """How long after the first death (after the deadline, for one that was stopped) each survivor knew."""
        start_s = min(self.strikes.values(), default=0.0)
        if self.case.event is Event.STOP:
            return {r: t.raised_s - max(start_s, t.entered_s) - self.case.timeout_s for r, t in self.told.items()}
        return {r: t.raised_s - start_s for r, t in self.told.items()}

    def missed_at_deadline(self, rank: int) -> bool:
        """It was told no sooner than a worker can be that waits for one who never came."""
        told = self.told[rank]
        forming = self.case.deadline_counts and told.where in ("forming", "new_group")
        return forming and told.raised_s >= told.entered_s + self.case.timeout_s - CLOCK_S


def judge(result: Result) -> list[Finding]:
    """Was every survivor told the right thing at the right time?"""
    return [finding for rank in result.case.survivors if rank in result.told for finding in _judge_one(result, rank)]


def _judge_one(result: Result, rank: int) -> Iterable[Finding]:
    case, told = result.case, result.told[rank]
    who = f"rank {rank} in {told.where}"
    if _missed_a_stranger(result, rank):
        return
    if not told.peer_lost:
        yield Finding(Fault.NOT_TOLD, f"{who} got {told.error}: {told.text}")
        return
    if told.rank not in case.victims:
        yield Finding(Fault.WRONG_RANK, f"{who} was told of rank {told.rank} (pid {told.pid}): {told.text}")
    elif not _names(told, result.pids[told.rank]):
        dead = f"rank {told.rank}, pid {result.pids[told.rank]}"
        yield Finding(Fault.WRONG_RANK, f"{who}: {dead} died; .pid is {told.pid}, the text: {told.text}")
    notice_s = result.notice_s[rank]
    if notice_s > NOTICE_S:
        yield Finding(Fault.LATE, f"{who} knew after {notice_s:.3f} s: {told.text}")
    earliest_s = min(result.strikes.values())
    if case.event is Event.STOP:
        earliest_s = min(t.entered_s for t in result.told.values()) + case.timeout_s - CLOCK_S
    if told.raised_s < earliest_s:
        yield Finding(Fault.EARLY, f"{who} gave up {earliest_s - told.raised_s:.3f} s too early: {told.text}")


def _names(told: Told, pid: int) -> bool:
    return told.pid == pid and f"rank {told.rank}" in told.text and str(pid) in told.text


def _missed_a_stranger(result: Result, rank: int) -> bool:
    """A worker that died before it signed cannot be known to be dead. At the deadline any error of ours may name it."""
    if result.signed:
        return False
    told, timeout_s = result.told[rank], result.case.timeout_s
    in_time = told.raised_s <= told.entered_s + timeout_s + NOTICE_S
    names_it = "has not come" in told.text and any(f"rank {victim}" in told.text for victim in result.case.victims)
    return result.missed_at_deadline(rank) and in_time and told.ours and names_it


# ---------------------------------------------------------------------------------------------------- all together


def worst_notice_s(results: Sequence[Result]) -> float:
    return max(_notices(results), default=0.0)


def _notices(results: Iterable[Result]) -> list[float]:
    """Of those that knew, how soon; without those that could only notice it at the deadline."""
    return [s for r in results for rank, s in r.notice_s.items() if not r.missed_at_deadline(rank)]


def table(results: Sequence[Result]) -> str:
    """Kills by where the first victim was, then stops."""
    lines = [
        f"{'':24}{'kills':>6}{'inside':>7}{'survivors':>10}{'told':>6}{'missed':>7}{'wrong':>6}{'late':>5}{'other':>6}"
        f"{'median ms':>11}{'worst ms':>10}"
    ]
    killed = [r for r in results if r.case.event is not Event.STOP]
    for place in ("forming", "new_group", *COLLECTIVES):
        if here := [r for r in killed if r.place == place]:
            lines.append(_row(place, here))
    if killed:
        lines.append(_row("all kills", killed))
    if stopped := [r for r in results if r.case.event is Event.STOP]:
        lines.append(_row("stopped, after deadline", stopped))
    return "\n".join(lines)


def _row(title: str, results: Sequence[Result]) -> str:
    survivors = sum(len(r.case.survivors) for r in results)
    told = sum(t.peer_lost for r in results for t in r.told.values())
    missed = sum(r.missed_at_deadline(rank) for r in results for rank in r.told)
    faults = [finding.fault for r in results for finding in r.findings]
    wrong, late = faults.count(Fault.WRONG_RANK), faults.count(Fault.LATE)
    notices = _notices(results)
    median, worst = (statistics.median(notices), max(notices)) if notices else (0.0, 0.0)
    return (
        f"{title:24}{len(results):6}{sum(r.inside for r in results):7}{survivors:10}{told:6}{missed:7}{wrong:6}{late:5}"
        f"{len(faults) - wrong - late:6}{1e3 * median:11.1f}{1e3 * worst:10.1f}"
    )


def summary(results: Sequence[Result]) -> str:
    """What was done, and what the columns of the table do not say."""
    events = Counter(str(result.case.event) for result in results)
    missed = sum(result.missed_at_deadline(rank) for result in results for rank in result.told)
    lines = ["events: " + ", ".join(f"{event} {count}" for event, count in events.most_common())]
    if missed:
        lines += [
            f"missed: {missed} survivors waited for one that died before it was known to any other; "
            "they named it at the deadline"
        ]
    return "\n".join(lines)


def failures(result: Result) -> str:
    """Every finding, and the command that repeats the case."""
    lines = [str(result.case)]
    for finding in result.findings:
        lines += [f"    {finding.fault}: {finding.text.strip()}".replace("\n", "\n        ")]
    return "\n".join([*lines, f"    again: --seed {result.case.seed} --only-case {result.case.number}"])
