"""`lockstep bench comm`: time of a collective on `shm`, beside Gloo, NCCL and a plain copy of as many bytes.

The times are measured in comm_worker.py. This file turns them into statistics, a table, a JSON file and a plot.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench import plot
from lockstep.bench.collectives import ELEMENT_BYTES, Case, Op, size_text
from lockstep.bench.comm_worker import ARMS, COPY, GLOO, NCCL, SHM_GROUP, SHM_OWN, CaseTimes, CommJob, work
from lockstep.bench.rounds import Estimate, estimate, paired_ratio, slowest
from lockstep.bench.workers import Workers
from lockstep.report.table import Column, percent, render

SIZES = tuple(sorted({*(4 * 4**power for power in range(14)), 25 * 2**20}))  # 4 B, 16 B, ... 4 KiB, ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 2**20, 25 * 2**20)
WORKERS = (2, 4)
SHORT = {COPY: "copy", GLOO: "gloo", NCCL: "nccl", SHM_GROUP: "shm", SHM_OWN: "shm own"}


@dataclass(frozen=True)
class CommSettings:
    ops: tuple[Op, ...]
    workers: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    device: str
    wait_s: float  # the longest wait for a message of a worker

    def cases(self, workers: int) -> tuple[Case, ...]:
        return tuple(Case(op, workers, size_bytes) for op in self.ops for size_bytes in self.sizes_bytes)


@dataclass(frozen=True)
class MeasurableBackends:
    """The backends that can be measured, and a line for each that cannot."""

    backends: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class SkippedArm:
    """An arm that could not be measured in one case."""

    arm: str
    case: Case
    why: str


def choose(available: Collection[str], *, device: str, workers: int, gpus: int) -> MeasurableBackends:
    backends, left_out = [], []
    for name in ARMS:
        if name == "nccl" and device == "cpu":
            continue  # not expected there, so no note either
        if name not in available:
            left_out.append(f"{name} is left out: torch.distributed does not have it here")
        elif name == "nccl" and gpus < workers:
            left_out.append(f"nccl is left out with {workers} workers: it wants a GPU for each, and sees {gpus}")
        else:
            backends.append(name)
    return MeasurableBackends(tuple(backends), tuple(left_out))


# ------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class CommResult:
    call_ms: Estimate
    gloo_over: Estimate | None  # Gloo's time over this arm's: how many times faster this arm is
    copy_share: Estimate | None  # the copy's time over this arm's: share of the copy's speed
    calls: int  # calls in a row
    rounds_ms: list[float]


ArmResults = dict[str, CommResult]  # by arm


def summarize(workers: Sequence[CaseTimes]) -> ArmResults:
    times = slowest([worker.times_ms for worker in workers])
    return {
        arm: CommResult(
            call_ms=estimate(times[arm]),
            gloo_over=paired_ratio(times[GLOO], times[arm]) if arm in compared(times) and GLOO in times else None,
            copy_share=paired_ratio(times[COPY], times[arm]) if arm != COPY else None,
            calls=workers[0].calls[arm],
            rounds_ms=times[arm],
        )
        for arm in SHORT
        if arm in times
    }


# -------------------------------------------------------------------------------------------------------------- output


def arms_in(results: Mapping[Case, ArmResults]) -> list[str]:
    return [arm for arm in SHORT if any(arm in arms for arms in results.values())]


def compared(arms: Iterable[str]) -> list[str]:
    """The arms that are compared with Gloo and the copy."""
    return [arm for arm in arms if arm not in (COPY, GLOO)]


def columns_of(arms: Sequence[str]) -> list[Column]:
    return [
        Column("op"),
        Column("workers", right=True),
        Column("size", right=True),
        *(Column(f"{SHORT[arm]} ms", right=True) for arm in arms),
        *(Column(f"gloo / {SHORT[arm]}") for arm in compared(arms)),
        *(Column(f"copy / {SHORT[arm]}", right=True) for arm in compared(arms)),
    ]


def rows_of(results: Mapping[Case, ArmResults]) -> Iterator[tuple[str, ...]]:
    arms = arms_in(results)
    for case, by_arm in results.items():
        result = {arm: by_arm.get(arm) for arm in arms}
        yield (
            case.op,
            str(case.workers),
            size_text(case.size_bytes),
            *(milliseconds(f.call_ms.median) if (f := result[arm]) else "" for arm in arms),
            *(times_faster(f.gloo_over) if (f := result[arm]) and f.gloo_over else "" for arm in compared(arms)),
            *(percent(f.copy_share.median) if (f := result[arm]) and f.copy_share else "" for arm in compared(arms)),
        )


def disturbance(load: float, cores: int) -> Iterator[str]:
    """A note if the machine is busy: a taken core delays a collective more than a copy, which needs only one core."""
    if load > cores / 4:
        yield f"load average at the start {load:.1f}: other programs took part; measure again when the machine is quiet"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def milliseconds(value: float) -> str:
    """Format from a microsecond to a minute, with three digits at least."""
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def times_faster(ratio: Estimate) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def skipped_lines(left_out: Iterable[SkippedArm]) -> Iterator[str]:
    """One line for all cases in which an arm was skipped for the same reason."""
    cases: dict[tuple[str, str], list[Case]] = {}
    for item in left_out:
        cases.setdefault((item.arm, item.why), []).append(item.case)
    for (arm, why), [first, *others] in cases.items():
        yield f"{arm} is left out of [{first}]{f' and {len(others)} more' if others else ''}: {why}"


def record_of(settings: CommSettings, results: Mapping[Case, ArmResults], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": device_name(settings.device),
        "cores": cores(),
        "settings": asdict(settings),
        "notes": list(notes),
        "complete": set(results) == {case for workers in settings.workers for case in settings.cases(workers)},
        "cases": [
            {
                "op": case.op,
                "workers": case.workers,
                "size_bytes": case.size_bytes,
                "vector_bytes": case.whole * ELEMENT_BYTES,
                "arms": {arm: asdict(result) for arm, result in arms.items()},
            }
            for case, arms in results.items()
        ],
    }


def panels_of(results: Mapping[Case, ArmResults]) -> list[plot.Panel]:
    """One panel for each operation and number of workers, in the order of the measurements."""
    panels: dict[tuple[int, Op], plot.Panel] = {}
    for case, arms in results.items():
        title = f"{case.op}, {case.workers} workers"
        panel = panels.setdefault((case.workers, case.op), plot.Panel(title, {}))
        for arm, result in arms.items():
            panel.lines.setdefault(arm, []).append(plot.Point(case.size_bytes, result.call_ms))
    return list(panels.values())


# --------------------------------------------------------------------------------------------------------- measurement


def measure(settings: CommSettings, workers: int, choice: MeasurableBackends) -> Iterator[list[CaseTimes]]:
    """Yield the times of all workers for each case, case by case."""
    job = CommJob(settings.cases(workers), choice.backends, settings.rounds, settings.device)
    times_by_case: dict[Case, list[CaseTimes]] = {case: [] for case in job.cases}
    with Workers(workers, work, job, wait_s=settings.wait_s) as processes:
        for _, times in processes.results():
            times_by_case[times.case].append(times)
            if len(times_by_case[times.case]) == workers:
                yield times_by_case[times.case]


def run(settings: CommSettings, json_path: Path | None, plot_path: Path | None) -> int:
    available = [backend for backend in ARMS if dist.is_backend_available(backend)]
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    choices = {n: choose(available, device=settings.device, workers=n, gpus=gpus) for n in settings.workers}
    notes = [*disturbance(os.getloadavg()[0], cores())]
    notes += dict.fromkeys(line for choice in choices.values() for line in choice.left_out)
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    results: dict[Case, ArmResults] = {}
    left_out: list[SkippedArm] = []
    try:
        for workers, choice in choices.items():
            for case_times in measure(settings, workers, choice):
                case = case_times[0].case
                results[case] = summarize(case_times)
                left_out += [SkippedArm(arm, case, why) for arm, why in case_times[0].left_out.items()]
    finally:
        if results:  # also partial results, when a worker fails or the user interrupts
            notes += skipped_lines(left_out)
            show(settings, results, notes)
            if json_path:
                record = record_of(settings, results, notes)
                json_path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            if plot_path:
                plot.draw(panels_of(results), plot_path, columns=len(settings.ops))
    return 0


def show(settings: CommSettings, results: Mapping[Case, ArmResults], notes: Sequence[str]) -> None:
    arms = arms_in(results)
    print(
        f"collectives on {device_name(settings.device)}, torch {torch.__version__}: fp32, one thread for each worker, "
        f"{cores()} cores;\n{settings.rounds} interleaved rounds of rows of calls, "
        "each row as long as its slowest worker\n"
    )
    print(render(columns_of(arms), list(rows_of(results))))
    print("\nsize     of the whole vector: before a reduce-scatter, after an all-gather")
    print("ms       median of one call in a row of calls")
    if SHM_OWN in arms:
        print("shm      on tensors that the group made, as a reducer's buckets are; shm own: on any other")
    if compared(arms):
        print("gloo /   median of the ratios within each round, and its 95 % interval: how many times faster than Gloo")
        print("copy /   the same for a plain copy of the vector by one worker alone: the share of its speed")
    if notes:
        print("\n" + "\n".join(notes))
