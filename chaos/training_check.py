"""Pure: what was seen of a case -> what is wrong with it; of all cases -> the table."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

from training_plan import FORMING, PAIR, TURNS, Case, surely_noticed

MEDIAN_S, MOST_S = 0.2, 1.5  # what half and 99 % of all recoveries may take
NCCL_MEDIAN_S, NCCL_MOST_S = 1.0, 3.0  # the same, of workers that form a communicator of NCCL


class Fault(StrEnum):
    WENT_BACK = "went back"  # to a checkpoint, although one worker only was lost
    STATUS = "status"  # not 0
    STUCK = "stuck"
    DIGEST = "digest"  # other bits than undisturbed
    SAMPLES = "samples"  # not each exactly once
    DIED = "died"  # a worker that was not hit
    SLOW = "slow"  # for long nothing went on
    TWICE = "twice"  # a worker applied a step that it had
    AGAIN = "again"  # more computed again than one step per loss
    LEFTOVERS = "leftovers"
    CHECKPOINT = "checkpoint"  # the last one is missing
    NOT_NAMED = "not named"  # a worker that was stopped, in the output


@dataclass(frozen=True)
class Finding:
    fault: Fault
    text: str


class Mark(NamedTuple):
    """A worker came by a place."""

    at_s: float
    generation: int  # that it was in, or in last; 0: none yet
    rank: int
    step: int
    place: str  # of `lockstep.faults`, or "batch": it got one, or "loss": it computes the step


@dataclass(frozen=True)
class Hit:
    """A worker was killed or stopped."""

    strike: int  # its number in the case
    place: str
    pid: int
    at_s: float
    stopped: bool = False
    drained: bool = False  # it was asked to leave


@dataclass
class Seen:
    case: Case
    status: int | None = None  # of the launcher; None: it had to be killed
    stuck: str = ""
    hits: list[Hit] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)  # of the host agent
    pids: dict[str, int] = field(default_factory=dict)  # by name of the worker
    traces: dict[int, list[Mark]] = field(default_factory=dict)  # by pid
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)  # by pid: what was computed
    ledger: str = ""  # what is wrong with it
    slow: list[str] = field(default_factory=list)  # where all were when nothing went on
    output: str = ""
    left: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)  # names in the folder at the end
    metrics: list[dict[str, Any]] = field(default_factory=list)


class Recovery(NamedTuple):
    place: str
    took_s: float  # from the kill until all survivors work again
    noticed_s: float  # of which passed until the host agent had collected the dead
    survivors: int
    path: str = ""  # what happened meanwhile, and when


@dataclass
class Result:
    seen: Seen
    findings: list[Finding]
    recoveries: list[Recovery]
    again: list[int]  # steps computed again, per generation that has survivors of the one before
    after_all: list[int]  # the same after all were lost: since the last checkpoint


def judge(seen: Seen, reference: Mapping[str, Any]) -> Result:
    changes = list(_changes(seen))
    again = [len(change.again) for change in changes if change.survivors]
    result = Result(seen, [], recoveries(seen), again, [len(c.again) for c in changes if not c.survivors])
    if seen.status is None:
        result.findings.append(Finding(Fault.STUCK, seen.stuck))
    else:
        result.findings += _judge_end(seen, reference)
    result.findings += _judge_steps(seen, changes)
    result.findings += _judge_names(seen)
    result.findings += _judge_deaths(seen)
    result.findings += _judge_restarts(seen)
    result.findings += [Finding(Fault.SLOW, text) for text in seen.slow]
    return result


# ----------------------------------------------------------------------------------------------------------- at the end


def _judge_end(seen: Seen, reference: Mapping[str, Any]) -> Iterable[Finding]:
    if seen.status != 0:
        yield Finding(Fault.STATUS, f"exit status {seen.status}; the output ends so:\n{tail(seen.output)}")
    elif not seen.ends:
        yield Finding(Fault.STATUS, "exit status 0, but no worker came to the end of the program")
    for pid, found in seen.ends.items():
        if differs := _differences(found, reference):
            yield Finding(Fault.DIGEST, f"pid {pid}: {'; '.join(differs)}")
    if seen.status == 0 and seen.ledger:
        yield Finding(Fault.SAMPLES, f"lockstep ledger: {seen.ledger}")
    if seen.left:
        yield Finding(Fault.LEFTOVERS, "; ".join(seen.left))
    if seen.status == 0:
        last = f"step-{reference['steps']:09d}"
        if last not in seen.checkpoints:
            yield Finding(Fault.CHECKPOINT, f"{last} is not among {seen.checkpoints}")
        elif passing := [name for name in seen.checkpoints if name.startswith(".")]:
            yield Finding(Fault.LEFTOVERS, f"beside the last checkpoint: {', '.join(passing)}")


def _differences(found: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Of a worker that may have come late: it knows only the steps since."""
    named = [name for name in ("digest", "body", "steps") if found[name] != reference[name]]
    differs = [f"{name} is {found[name]}, and undisturbed {reference[name]}" for name in named]
    for name in ("losses", "figures"):
        wrong = [step for step, value in found[name].items() if reference[name].get(step) != value]
        if wrong:
            differs.append(f"{name} of steps {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''} differ")
    return differs


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])


# ------------------------------------------------------------------------------------------------------- step by step


class Generation(NamedTuple):
    number: int
    at_s: float
    pids: tuple[int, ...]


class Change(NamedTuple):
    """From one generation to the next."""

    number: int
    survivors: tuple[int, ...]  # pids that have computed in an earlier generation: they have a state
    lost: int  # workers, since the last generation that computed anything
    again: tuple[int, ...]  # steps that are computed in it, and were before; without survivors: since the checkpoint


def generations(seen: Seen) -> list[Generation]:
    return [
        Generation(event["number"], event["monotonic"], tuple(seen.pids.get(one, 0) for one in event["members"]))
        for event in seen.events
        if event["event"] == "generation"
    ]


def _changes(seen: Seen) -> Iterable[Change]:
    """A step was computed before if one of those who compute it now had begun it, or a worker had its gradient.

    That a worker which is gone had begun it, and it alone, costs nothing.
    """
    began: dict[tuple[int, int], set[int]] = {}  # by generation and pid: steps
    reduced: dict[int, set[int]] = {}  # by generation
    for pid, trace in seen.traces.items():
        for mark in trace:
            if mark.place == "loss":
                began.setdefault((mark.generation, pid), set()).add(mark.step)
            elif mark.place == "reduced":
                reduced.setdefault(mark.generation, set()).add(mark.step)
    lost_s = [event["monotonic"] for event in seen.events if event["event"] == "lost"]
    known: dict[int, set[int]] = {}  # by pid: steps that it has begun, since all were lost
    done: set[int] = set()  # steps of which a worker had the gradient, since then
    from_s = -math.inf
    for one in generations(seen):
        mine = {pid: began[one.number, pid] for pid in one.pids if (one.number, pid) in began}
        if not mine:
            continue
        computed = set().union(*mine.values())
        survivors = tuple(pid for pid in one.pids if pid in known)
        before = done.union(*(known[pid] for pid in survivors))
        lost = sum(from_s < at_s <= one.at_s for at_s in lost_s)
        if survivors:
            yield Change(one.number, survivors, lost, tuple(sorted(computed & before)))
        elif known:
            last = max(max(steps) for steps in known.values())
            yield Change(one.number, survivors, lost, tuple(range(min(computed), last + 1)))
            known, done = {}, set()  # what is computed again now is not to be blamed on who is lost after this
        for pid, steps in mine.items():
            known[pid] = known.get(pid, set()) | steps
        done, from_s = done | reduced.get(one.number, set()), one.at_s


def _judge_steps(seen: Seen, changes: Sequence[Change]) -> Iterable[Finding]:
    most = 2 if seen.case.variant == PAIR else 1  # steps with one batch
    for pid, trace in seen.traces.items():
        applied = [mark.step for mark in trace if mark.place == "applied"]
        twice = [step for earlier, step in pairwise(applied) if step < earlier or applied.count(step) > most]
        if twice:
            yield Finding(Fault.TWICE, f"pid {pid} applied step {twice[0]} after a later one, or again")
    for change in changes:
        if change.survivors and len(change.again) > change.lost:
            text = f"generation {change.number} computed steps {list(change.again)} again after {change.lost} were lost"
            yield Finding(Fault.AGAIN, text)


def recoveries(seen: Seen) -> list[Recovery]:
    """Of every worker that was killed as a member of a generation, if a member of that one lived on."""
    formed = generations(seen)
    workers = {pid: worker for worker, pid in seen.pids.items()}
    lost_s = {event["worker"]: event["monotonic"] for event in seen.events if event["event"] == "lost"}
    works = {pid: _first_work(trace) for pid, trace in seen.traces.items()}
    for event in seen.events:
        if event["event"] == "recovered" and event["worker"] in seen.pids:
            # Before the loop a worker that is back may build its model for seconds before it comes by any place.
            mine = works.setdefault(seen.pids[event["worker"]], {})
            mine[event["generation"]] = min(mine.get(event["generation"], math.inf), event["monotonic"])
    found = []
    for hit in seen.hits:
        before = [one for one in formed if one.at_s <= hit.at_s]
        if not before or hit.pid not in before[-1].pids or hit.stopped or hit.drained:
            continue
        for after in formed[len(before) :]:
            survivors = [pid for pid in after.pids if pid in before[-1].pids]
            at_s = [works.get(pid, {}).get(after.number) for pid in survivors]
            if survivors and all(one is not None for one in at_s):
                noticed_s = lost_s.get(workers[hit.pid], hit.at_s) - hit.at_s
                last_s = max(one for one in at_s if one is not None)
                path = _path(seen, survivors, hit.at_s, last_s)
                found.append(Recovery(hit.place, last_s - hit.at_s, noticed_s, len(survivors), path))
                break
    return found


def _path(seen: Seen, survivors: Sequence[int], from_s: float, to_s: float) -> str:
    """Return the events of the host agent and the places of the survivors in this time, in seconds since `from_s`."""
    told = [(e["monotonic"], f"{e['event']} {e.get('worker') or e.get('number', '')}") for e in seen.events]
    names = {pid: name for name, pid in seen.pids.items()}
    came = [
        (mark.at_s, f"{names.get(pid, pid)} {mark.place}") for pid in survivors for mark in seen.traces.get(pid, [])
    ]
    return ", ".join(f"{at_s - from_s:.2f} {what}" for at_s, what in sorted(told + came) if from_s <= at_s <= to_s)


def _first_work(trace: Sequence[Mark]) -> dict[int, float]:
    """By generation: when this worker first did something in it that is not forming it."""
    found: dict[int, float] = {}
    for mark in trace:
        if mark.place not in FORMING and mark.generation:
            found.setdefault(mark.generation, mark.at_s)
    return found


def _judge_names(seen: Seen) -> Iterable[Finding]:
    for hit in seen.hits:
        if hit.stopped and surely_noticed(seen.case.strikes[hit.strike], seen.case.stall_s):
            named = f"(pid {hit.pid}) is killed: it gave no sign of life"
            if named not in seen.output:
                text = f"pid {hit.pid} was stopped at {hit.place}, and that is not reported:\n{tail(seen.output)}"
                yield Finding(Fault.NOT_NAMED, text)


def _judge_deaths(seen: Seen) -> Iterable[Finding]:
    hit = {one.pid for one in seen.hits if not one.drained}
    for one in seen.hits:
        if one.drained and f"(pid {one.pid}) leaves after its step" not in seen.output and seen.status == 0:
            yield Finding(Fault.NOT_NAMED, f"pid {one.pid} was asked to leave at {one.place}, and did not")
    ever = {member for event in seen.events if event["event"] == "generation" for member in event["members"]}
    last_s = max((event["monotonic"] for event in seen.events if event["event"] == "generation"), default=0.0)
    for event in seen.events:
        if event["event"] != "lost" or seen.pids.get(event["worker"]) in hit:
            continue
        # When the program has ended, a worker that is still on its way to it is ended by a SIGKILL. A newcomer that has
        # lost the race with the others to the loop is killed as well, and another one started; and one that has just
        # started, when all go back to a checkpoint.
        number = event["worker"].rpartition(".")[2]
        is_over = event["monotonic"] > last_s and seen.status == 0
        too_late = re.search(
            rf"worker {number} \(pid \d+\) is killed: (it waits before|what it replayed|all workers go)", seen.output
        )
        if event["code"] != -9 or event["worker"] in ever or not (is_over or too_late):
            its = re.compile(rf"worker {number} \(pid|\[worker {number}\]")
            said = [line[:300] for line in seen.output.splitlines() if its.search(line)]
            text = f"{event['worker']} ended with {event['code']}, and it was not hit:\n" + "\n".join(said[-12:])
            yield Finding(Fault.DIED, text)


def _judge_restarts(seen: Seen) -> Iterable[Finding]:
    """All workers may go back to a checkpoint only if two that had a state were lost since they last computed, or one
    with residuals of gradients."""
    computed = {mark.generation for trace in seen.traces.values() for mark in trace if mark.place == "loss"}
    ever = {member for event in seen.events if event["event"] == "generation" for member in event["members"]}
    for event in seen.events:
        if event["event"] != "goes back":
            continue
        before = [one for one in generations(seen) if one.at_s < event["monotonic"] and one.number in computed]
        from_s = before[-1].at_s if before else 0.0
        lost = [
            one["worker"]
            for one in seen.events
            if one["event"] == "lost" and from_s < one["monotonic"] <= event["monotonic"] and one["worker"] in ever
        ]
        if len(lost) < (1 if seen.case.grad_comm in ("powersgd", "topk") else 2):
            yield Finding(Fault.WENT_BACK, f"{event['why']}, although only {lost or 'none'} were lost")


# -------------------------------------------------------------------------------------------------------- all together


def hits_of(results: Iterable[Result]) -> int:
    return sum(len(result.seen.hits) for result in results)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so many of them do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def table(results: Sequence[Result]) -> str:
    """By the place of the strike."""
    lines = [f"{'':18}{'hits':>6}{'recoveries':>12}{'median ms':>11}{'99 % ms':>9}{'worst ms':>10}{'noticed ms':>12}"]
    hits = Counter(hit.place for result in results for hit in result.seen.hits)
    recovered = [one for result in results for one in result.recoveries]
    for place in dict.fromkeys((*TURNS, *hits)):
        if hits[place]:
            lines.append(_row(place, hits[place], [one for one in recovered if one.place == place]))
    lines.append(_row("all", sum(hits.values()), recovered))
    return "\n".join(lines)


def _row(title: str, hits: int, found: Sequence[Recovery]) -> str:
    took = [one.took_s for one in found]
    if not took:
        return f"{title:18}{hits:6}{0:12}"
    figures = [statistics.median(took), quantile(took, 0.99), max(took)]
    noticed_s = statistics.median(one.noticed_s for one in found)
    return (
        f"{title:18}{hits:6}{len(found):12}{1e3 * figures[0]:11.0f}{1e3 * figures[1]:9.0f}{1e3 * figures[2]:10.0f}"
        f"{1e3 * noticed_s:12.0f}"
    )


def summary(results: Sequence[Result]) -> str:
    again = Counter(steps for result in results for steps in result.again)
    after_all = [steps for result in results for steps in result.after_all]
    planned = sum(len(result.seen.case.strikes) for result in results)
    passed = Counter(place for result in results for place in _passed_over(result.seen))
    by = Counter(f"{result.seen.case.workers} on {result.seen.case.backend}" for result in results)
    lines = [
        f"{planned - passed.total()} of {planned} strikes found a worker; {hits_of(results)} workers were hit",
        "no worker came by in time: " + ", ".join(f"{place} {count}" for place, count in passed.most_common()),
        "worlds: " + ", ".join(f"{count} x {world}" for world, count in sorted(by.items())),
        "computed again by a generation with survivors: "
        + ", ".join(f"{steps} steps {count} times" for steps, count in sorted(again.items())),
    ]
    pairs = [(one, result.seen.case) for result in results for one in result.recoveries]
    if pairs:
        slowest, case = max(pairs, key=lambda pair: pair[0].took_s)
        lines.append(f"the slowest recovery: {slowest.took_s:.2f} s, at {slowest.place}, in {case}: {slowest.path}")
    if after_all:
        lines.append(
            f"all were lost or went back {len(after_all)} times; up to {max(after_all)} steps again from the checkpoint"
        )
    back = sum(event["event"] == "goes back" for result in results for event in result.seen.events)
    if back:
        lines.append(f"all went back to a checkpoint {back} times, since some of the state was lost")
    gpu_bytes = [end["gpu_bytes"] for result in results for end in result.seen.ends.values() if "gpu_bytes" in end]
    if gpu_bytes:
        mib = [size / 2**20 for size in gpu_bytes]
        lines.append(f"memory of the GPU that a worker holds at the end: {min(mib):.0f} to {max(mib):.0f} MiB")
    held = [(end["generations"], end["gpu_process_mib"]) for r in results for end in r.seen.ends.values()
            if "gpu_process_mib" in end]  # fmt: skip
    for least, most in ((1, 4), (5, math.inf)) if held else ():
        if mib := [size for count, size in held if least <= count <= most]:
            count = f"{least} to {most}" if most < math.inf else f"{least} or more"
            lines.append(f"a worker that was in {count} generations: {min(mib)} to {max(mib)} MiB in all")
    return "\n".join(lines)


def _passed_over(seen: Seen) -> list[str]:
    struck = {hit.strike for hit in seen.hits}
    return [strike.place for number, strike in enumerate(seen.case.strikes) if number not in struck]


def too_slow(results: Sequence[Result]) -> list[str]:
    """What the recoveries of all cases together must keep to."""
    found = []
    for is_nccl, median_s, most_s in ((False, MEDIAN_S, MOST_S), (True, NCCL_MEDIAN_S, NCCL_MOST_S)):
        chosen = [result for result in results if (result.seen.case.backend == "nccl") is is_nccl]
        took, over = [one.took_s for result in chosen for one in result.recoveries], " over NCCL" if is_nccl else ""
        if took and statistics.median(took) > median_s:
            found.append(f"half of the recoveries{over} took longer than {1e3 * statistics.median(took):.0f} ms")
        if quantile(took, 0.99) > most_s:
            found.append(f"99 % of the recoveries{over} took up to {quantile(took, 0.99):.2f} s")
    return found


def failures(result: Result, *, again: str) -> str:
    """Every finding, and the command that repeats the case."""
    case = result.seen.case
    lines = [str(case), *(f"    {n}: {strike}" for n, strike in enumerate(case.strikes))]
    for finding in result.findings:
        lines += [f"    {finding.fault}: {finding.text.strip()}".replace("\n", "\n        ")]
    return "\n".join([*lines, f"    again: {again} --seed {case.seed} --only-case {case.number}"])
