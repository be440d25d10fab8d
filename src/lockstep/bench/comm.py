"""`lockstep bench comm`: what a collective costs on `shm`, beside Gloo, NCCL and a plain copy of as many bytes.

How the times are taken: comm_worker.py. Here they become figures, a table, a file and a plot.
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
from lockstep.bench.comm_worker import ARMS, COPY, GLOO, NCCL, SHM_GROUP, SHM_OWN, CaseTimes, Job, work
from lockstep.bench.rounds import Estimate, estimate, paired_ratio, slowest
from lockstep.bench.workers import Workers
from lockstep.report.table import Column, percent, render

SIZES = tuple(sorted({*(4 * 4**power for power in range(14)), 25 * 2**20}))  # 4 B, 16 B, ... 4 KiB, ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 2**20, 25 * 2**20)
WORKERS = (2, 4)
SHORT = {COPY: "copy", GLOO: "gloo", NCCL: "nccl", SHM_GROUP: "shm", SHM_OWN: "shm own"}


@dataclass(frozen=True)
class Settings:
    ops: tuple[Op, ...]
    workers: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int
    device: str
    wait_s: float  # the longest wait for a sign of life

    def cases(self, workers: int) -> tuple[Case, ...]:
        return tuple(Case(op, workers, size_bytes) for op in self.ops for size_bytes in self.sizes_bytes)


@dataclass(frozen=True)
class Choice:
    """The backends that can be measured, and why others cannot."""

    backends: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class LeftOut:
    """An arm that one case had to do without."""

    arm: str
    case: Case
    why: str


def choose(available: Collection[str], *, device: str, workers: int, gpus: int) -> Choice:
    backends, left_out = [], []
    for name in ARMS:
        if name == "nccl" and device == "cpu":
            continue  # nobody expects it there
        if name not in available:
            left_out.append(f"{name} is left out: torch.distributed does not have it here")
        elif name == "nccl" and gpus < workers:
            left_out.append(f"nccl is left out with {workers} workers: it wants a GPU for each, and sees {gpus}")
        else:
            backends.append(name)
    return Choice(tuple(backends), tuple(left_out))


# ------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class ArmFigures:
    call_ms: Estimate
    gloo_over: Estimate | None  # Gloo's time over this arm's: how many times faster it is
    copy_share: Estimate | None  # the copy's time over this arm's: which part of the copy's speed it has
    calls: int  # in a row
    rounds_ms: list[float]


Figures = dict[str, ArmFigures]  # by arm


def figures(workers: Sequence[CaseTimes]) -> Figures:
    times = slowest([worker.times_ms for worker in workers])
    return {
        arm: ArmFigures(
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


def arms_in(found: Mapping[Case, Figures]) -> list[str]:
    return [arm for arm in SHORT if any(arm in arms for arms in found.values())]


def compared(arms: Iterable[str]) -> list[str]:
    """Those that are set against Gloo and the copy."""
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


def rows_of(found: Mapping[Case, Figures]) -> Iterator[tuple[str, ...]]:
    arms = arms_in(found)
    for case, of_arm in found.items():
        figure = {arm: of_arm.get(arm) for arm in arms}
        yield (
            case.op,
            str(case.workers),
            size_text(case.size_bytes),
            *(milliseconds(f.call_ms.median) if (f := figure[arm]) else "" for arm in arms),
            *(times_faster(f.gloo_over) if (f := figure[arm]) and f.gloo_over else "" for arm in compared(arms)),
            *(percent(f.copy_share.median) if (f := figure[arm]) and f.copy_share else "" for arm in compared(arms)),
        )


def disturbance(load: float, cores: int) -> Iterator[str]:
    """Rounds share the noise out, but whoever takes a core takes it from a collective first: a copy needs only one."""
    if load > cores / 4:
        yield f"load average at the start {load:.1f}: other programs took part; measure again when the machine is quiet"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def cores() -> int:
    """That we may run on."""
    return len(os.sched_getaffinity(0))


def milliseconds(value: float) -> str:
    """From a microsecond to a minute, three digits at least."""
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def times_faster(ratio: Estimate) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def lines_of(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """One for all cases that had to do without an arm for the same reason."""
    cases: dict[tuple[str, str], list[Case]] = {}
    for item in left_out:
        cases.setdefault((item.arm, item.why), []).append(item.case)
    for (arm, why), [first, *others] in cases.items():
        yield f"{arm} is left out of [{first}]{f' and {len(others)} more' if others else ''}: {why}"


def record_of(settings: Settings, found: Mapping[Case, Figures], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": device_name(settings.device),
        "cores": cores(),
        "settings": asdict(settings),
        "notes": list(notes),
        "complete": set(found) == {case for workers in settings.workers for case in settings.cases(workers)},
        "cases": [
            {
                "op": case.op,
                "workers": case.workers,
                "size_bytes": case.size_bytes,
                "vector_bytes": case.whole * ELEMENT_BYTES,
                "arms": {arm: asdict(figure) for arm, figure in arms.items()},
            }
            for case, arms in found.items()
        ],
    }


def panels_of(found: Mapping[Case, Figures]) -> list[plot.Panel]:
    """One for each operation and number of workers, in the order of measuring."""
    panels: dict[tuple[int, Op], plot.Panel] = {}
    for case, arms in found.items():
        title = f"{case.op}, {case.workers} workers"
        panel = panels.setdefault((case.workers, case.op), plot.Panel(title, {}))
        for arm, figure in arms.items():
            panel.lines.setdefault(arm, []).append(plot.Point(case.size_bytes, figure.call_ms))
    return list(panels.values())


# ---------------------------------------------------------------------------------------------------------------- doing


def measure(settings: Settings, workers: int, choice: Choice) -> Iterator[list[CaseTimes]]:
    """What all workers say about a case, case after case."""
    job = Job(settings.cases(workers), choice.backends, settings.rounds, settings.device)
    said: dict[Case, list[CaseTimes]] = {case: [] for case in job.cases}
    with Workers(workers, work, job, wait_s=settings.wait_s) as crew:
        for _, times in crew.results():
            said[times.case].append(times)
            if len(said[times.case]) == workers:
                yield said[times.case]


def run(settings: Settings, json_path: Path | None, plot_path: Path | None) -> int:
    available = [backend for backend in ARMS if dist.is_backend_available(backend)]
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    choices = {n: choose(available, device=settings.device, workers=n, gpus=gpus) for n in settings.workers}
    notes = [*disturbance(os.getloadavg()[0], cores())]
    notes += dict.fromkeys(line for choice in choices.values() for line in choice.left_out)
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    found: dict[Case, Figures] = {}
    left_out: list[LeftOut] = []
    try:
        for workers, choice in choices.items():
            for of_case in measure(settings, workers, choice):
                case = of_case[0].case
                found[case] = figures(of_case)
                left_out += [LeftOut(arm, case, why) for arm, why in of_case[0].left_out.items()]
    finally:
        if found:  # also what there is when a worker fails or the user has seen enough
            notes += lines_of(left_out)
            show(settings, found, notes)
            if json_path:
                record = record_of(settings, found, notes)
                json_path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            if plot_path:
                plot.draw(panels_of(found), plot_path, columns=len(settings.ops))
    return 0


def show(settings: Settings, found: Mapping[Case, Figures], notes: Sequence[str]) -> None:
    arms = arms_in(found)
    print(
        f"collectives on {device_name(settings.device)}, torch {torch.__version__}: fp32, one thread for each worker, "
        f"{cores()} cores;\n{settings.rounds} interleaved rounds of rows of calls, "
        "each row as long as its slowest worker\n"
    )
    print(render(columns_of(arms), list(rows_of(found))))
    print("\nsize     of the whole vector: before a reduce-scatter, after an all-gather")
    print("ms       median of one call in a row of calls")
    if SHM_OWN in arms:
        print("shm      on tensors that the group made, as a reducer's buckets are; shm own: on any other")
    if compared(arms):
        print("gloo /   median of the ratios within each round, and its 95 % interval: how many times faster than Gloo")
        print("copy /   the same for a plain copy of the vector by one worker alone: the share of its speed")
    if notes:
        print("\n" + "\n".join(notes))
