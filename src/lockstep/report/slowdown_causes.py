"""Finds what cost the most time, describes it in one sentence, and says what to do about it. Pure.

The cost of a cause is the share of a step's time that would be saved without it. The costliest is the headline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lockstep.report.time_shares import COMPUTE, LateWorker, TimeUsage
from lockstep.report.trace_reader import TraceEvent

MIN_COST: Final = 0.05  # causes that cost less are not reported
_SLOWER: Final = {
    "compute": "which computes slower than the others",
    "data": "which gets its data later than the others",
    "between": "whose program does more between two steps than that of the others",
    "": "which came last more often than the others, though it is not slower on average",
}
_LATE_ADVICE: Final = {
    "compute": "Look on {host} for other programs on its cores or its GPU, for fewer threads or a lower clock than the "
    "others have, and for samples that cost more than others.",
    "data": "Look on {host} for a slower disk or busy cores; give its loader more processes (`num_workers=`) or more "
    "batches ahead (`prefetch_factor=`).",
    "between": "Look for what only this worker does between two steps: logging, writing files, evaluating. "
    "Do it less often, or in a thread of its own.",
    "": "Look at its steps in the timeline: single long ones, rather than all of them, make it late.",
}


@dataclass(frozen=True)
class SlowdownCause:
    kind: str  # worker, turns, data, communication, between, recovery, or none
    cost: float
    sentence: str
    advice: str


@dataclass(frozen=True)
class RunMeasurements:
    usages: list[TimeUsage]
    total: TimeUsage
    late: list[LateWorker]
    events: Mapping[str, list[TraceEvent]]  # by worker
    elapsed_s: float
    size: int  # largest number of workers at a time
    hosts: int = 1


def find_causes(measured: RunMeasurements) -> list[SlowdownCause]:
    """Returns the causes, costliest first; a single one of kind `none` if none is worth reporting."""
    if not measured.total.steps:
        sentence = "No step was measured yet."
        return [
            SlowdownCause("none", 0.0, sentence, "Workers write what they measured after half a second of training.")
        ]
    found = [
        *_waiting(measured),
        *_data(measured),
        *_communication(measured),
        *_between(measured),
        *_recovery(measured),
    ]
    worth = sorted((one for one in found if one.cost >= MIN_COST), key=lambda cause: -cause.cost)
    return worth or [_no_cause(measured)]


def _waiting(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    if not measured.late:
        return
    worst = measured.late[0]
    # By chance alone each worker is last in 1 / size of all waiting time.
    if worst.part >= min(0.75, max(0.3, 1.5 / measured.size)):
        own, typical = worst.own_s, worst.typical_s
        detail = ""
        if worst.reason:
            detail = f": {ms(own[worst.reason])} per step against {ms(typical[worst.reason])}"
        others = "The other worker" if measured.size == 2 else "The other workers"
        sentence = (
            f"{others} waited {percent(worst.share)} of the time for {worst.worker}, {_SLOWER[worst.reason]}{detail}."
        )
        advice = _LATE_ADVICE[worst.reason].format(host=worst.host or "its host")
        own_s = sum(one.seconds for one in measured.usages if one.worker == worst.worker)
        # The worker may have been present for a part of the run only; the others also trained without it.
        yield SlowdownCause(
            "worker", worst.seconds / max(measured.total.seconds - own_s, worst.seconds), sentence, advice
        )
        return
    share = measured.total.share("waiting")
    sentence = (
        f"Workers waited {percent(share)} of the time for each other, in turns: no single one is slower, but the time "
        "of a step varies on all of them."
    )
    advice = "Samples of similar cost in every shard help, and so do cores that are not shared with other programs."
    yield SlowdownCause("turns", share, sentence, advice)


def _data(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    # If only one worker waits for its data, it is reported as late instead: hence the median.
    share, step_s = median(one.share("data") for one in measured.usages), _step_s(measured)
    sentence = (
        f"Workers waited {percent(share)} of the time for the loader: {ms(share * step_s)} of a step of {ms(step_s)}."
    )
    advice = (
        "Give it more processes (`num_workers=`) or more batches ahead (`prefetch_factor=`), or make a sample cheaper "
        "to load."
    )
    yield SlowdownCause("data", share, sentence, advice)


def _communication(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    share, step_s = measured.total.share("exposed"), _step_s(measured)
    sentence = (
        f"Communication that is not hidden behind the backward pass took {percent(share)} of the time: "
        f"{ms(share * step_s)} of a step of {ms(step_s)}."
    )
    advice = "A larger batch per worker hides more of it, and fewer workers have less of it."
    if measured.hosts > 1:
        advice += " So does a faster network between the hosts, or more of the workers on one host."
    yield SlowdownCause("communication", share, sentence, advice)


def _between(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    share = median(one.share("between") for one in measured.usages)
    busy = [one for one in measured.usages if one.phases["between"]]
    of_it = max((_took_s(measured, one.worker, "evaluate") / one.phases["between"] for one in busy), default=0.0)
    detail = f", {percent(min(1.0, of_it))} of that in evaluation" if of_it > 0.1 else ""
    sentence = f"The program itself took {percent(share)} of the time between two steps{detail}."
    advice = "Do less there, or less often: logging, evaluating, saving, moving figures from the device (`.item()`)."
    yield SlowdownCause("between", share, sentence, advice)


def _recovery(measured: RunMeasurements) -> Iterator[SlowdownCause]:
    took_s = max(_took_s(measured, one.worker, "recovery") for one in measured.usages)
    if not took_s or not measured.elapsed_s:
        return
    share = min(1.0, took_s / measured.elapsed_s)
    sentence = f"Recoveries took {percent(share)} of the time: {took_s:.1f} s in all."
    advice = "The events of the report say when; the logs of the workers that were lost say why."
    yield SlowdownCause("recovery", share, sentence, advice)


def _took_s(measured: RunMeasurements, worker: str, what: str) -> float:
    return sum(event.took_s or 0.0 for event in measured.events.get(worker, ()) if event.what == what)


def _no_cause(measured: RunMeasurements) -> SlowdownCause:
    computing = measured.total.share(*COMPUTE)
    sentence = f"Nothing holds this run up: its workers compute {percent(computing)} of the time."
    return SlowdownCause(
        "none",
        0.0,
        sentence,
        "To be faster, the computation itself has to be: precision, kernels, more or faster devices.",
    )


def _step_s(measured: RunMeasurements) -> float:
    return measured.total.per_step_s()


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    """Formats a time with three significant digits in a suitable unit."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"
