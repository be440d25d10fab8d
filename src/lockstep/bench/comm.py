"""`lockstep bench comm`: time of a collective on `shm`, beside Gloo, NCCL and a plain copy of as many bytes.

The times are measured in collectives.py. This file turns them into statistics, a table, a JSON file and a plot: time
over size, both on logarithmic axes, as svg or png. The plot needs matplotlib, which is an extra.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench import rounds
from lockstep.bench.collectives import (
    ARMS,
    COPY,
    ELEMENT_BYTES,
    GLOO,
    NCCL,
    SHM_GROUP,
    SHM_OWN,
    Case,
    CaseTimes,
    CommJob,
    Op,
    size_text,
    work,
)
from lockstep.bench.rounds import Estimate, estimate, paired_ratio, slowest
from lockstep.bench.workers import Workers, device_name
from lockstep.report.table import Column, columns, percent, render

SIZES = tuple(sorted({*(4 * 4**power for power in range(14)), 25 * 2**20}))  # 4 B, 16 B, ... 4 KiB, ... 256 MiB
QUICK_SIZES = (4, 4 * 2**10, 2**20, 25 * 2**20)
SHORT = {COPY: "copy", GLOO: "gloo", NCCL: "nccl", SHM_GROUP: "shm", SHM_OWN: "shm own"}
PLOT_KINDS = (".svg", ".png")
COLOURS = {GLOO: "#b5473c", NCCL: "#7a5ea8", SHM_GROUP: "#1f6f8b", SHM_OWN: "#6fb1c7"}


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


def columns_of(arms: Sequence[str]) -> tuple[Column, ...]:
    gloo, copy = ([f"{over} / {SHORT[arm]}" for arm in compared(arms)] for over in ("gloo", ">copy"))
    return columns("op", ">workers", ">size", *(f">{SHORT[arm]} ms" for arm in arms), *gloo, *copy)


def rows_of(results: Mapping[Case, ArmResults]) -> Iterator[tuple[str, ...]]:
    arms = arms_in(results)
    for case, by_arm in results.items():
        result = {arm: by_arm.get(arm) for arm in arms}
        yield (
            case.op,
            str(case.workers),
            size_text(case.size_bytes),
            *(milliseconds(f.call_ms.median) if (f := result[arm]) else "" for arm in arms),
            *(f.gloo_over.text(digits=2) if (f := result[arm]) and f.gloo_over else "" for arm in compared(arms)),
            *(percent(f.copy_share.median) if (f := result[arm]) and f.copy_share else "" for arm in compared(arms)),
        )


def disturbance(load: float, cores: int) -> Iterator[str]:
    """A note if the machine is busy: a taken core delays a collective more than a copy, which needs only one core."""
    if load > cores / 4:
        yield f"load average at the start {load:.1f}: other programs took part; measure again when the machine is quiet"


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def milliseconds(value: float) -> str:
    """Format from a microsecond to a minute, with three digits at least."""
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


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


def show(settings: CommSettings, results: Mapping[Case, ArmResults], notes: Sequence[str], path: Path | None) -> None:
    arms = arms_in(results)
    legend = ["size     of the whole vector: before a reduce-scatter, after an all-gather"]
    legend += ["ms       median of one call in a row of calls"]
    if SHM_OWN in arms:
        legend += ["shm      on tensors that the group made, as a reducer's buckets are; shm own: on any other"]
    if compared(arms):
        legend += [
            "gloo /   median of the ratios within each round, and its 95 % interval: how many times faster than Gloo",
            "copy /   the same for a plain copy of the vector by one worker alone: the share of its speed",
        ]
    head = (
        f"collectives on {device_name(settings.device)}, torch {torch.__version__}: fp32, one thread for each worker, "
        f"{cores()} cores;\n{settings.rounds} interleaved rounds of rows of calls, "
        "each row as long as its slowest worker"
    )
    table = render(columns_of(arms), list(rows_of(results)))
    rounds.show(head, table, [*legend, *(["", *notes] if notes else [])], record_of(settings, results, notes), path)


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
        for count, choice in choices.items():
            job = CommJob(settings.cases(count), choice.backends, settings.rounds, settings.device)
            with Workers(count, work, job, wait_s=settings.wait_s) as workers:
                for case_times in workers.results_by(lambda times: times.case):
                    case = case_times[0].case
                    results[case] = summarize(case_times)
                    left_out += [SkippedArm(arm, case, why) for arm, why in case_times[0].left_out.items()]
    finally:
        if results:  # also partial results, when a worker fails or the user interrupts
            show(settings, results, [*notes, *skipped_lines(left_out)], json_path)
            if plot_path:
                draw_plot(panels_of(results), plot_path, columns=len(settings.ops))
    return 0


# ---------------------------------------------------------------------------------------------------------------- plot


@dataclass(frozen=True)
class Point:
    size_bytes: int
    call_ms: Estimate


@dataclass(frozen=True)
class Panel:
    title: str
    lines: dict[str, list[Point]]


def panels_of(results: Mapping[Case, ArmResults]) -> list[Panel]:
    """One panel for each operation and number of workers, in the order of the measurements."""
    panels: dict[tuple[int, Op], Panel] = {}
    for case, arms in results.items():
        panel = panels.setdefault((case.workers, case.op), Panel(f"{case.op}, {case.workers} workers", {}))
        for arm, result in arms.items():
            panel.lines.setdefault(arm, []).append(Point(case.size_bytes, result.call_ms))
    return list(panels.values())


def problem_with_plot(path: Path) -> str:
    """Why no plot can be written to this file; "" if it can. Called before the measurement."""
    if path.suffix not in PLOT_KINDS:
        return f"the name must end in {' or '.join(PLOT_KINDS)}"
    if not path.absolute().parent.is_dir():
        return f"the folder {path.absolute().parent} does not exist"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed; `pip install 'lockstep-ddp[plot]'` brings it"
    return ""


def draw_plot(panels: Sequence[Panel], path: Path, *, columns: int) -> None:
    # Imported by name, so that types can be checked without the extra; not pyplot, which needs a display.
    figure_class: Any = import_module("matplotlib.figure").Figure
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_class(figsize=(4.2 * columns, 3.4 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.supylabel("ms for one call")
    figure.savefig(path, dpi=150)


def draw_panel(axes: Any, panel: Panel) -> None:
    for name, points in panel.lines.items():
        points = sorted(points, key=lambda point: point.size_bytes)
        sizes = [point.size_bytes for point in points]
        # The copy is a lower bound.
        style = {"color": "black", "linestyle": "--"} if name == COPY else {"color": COLOURS.get(name), "marker": "o"}
        axes.plot(sizes, [p.call_ms.median for p in points], label=name, markersize=3, linewidth=1.3, **style)
        low, high = [p.call_ms.low for p in points], [p.call_ms.high for p in points]
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_title(panel.title, fontsize=10)
    axes.xaxis.set_major_formatter(lambda size_bytes, _: size_text(round(size_bytes)))
    axes.tick_params(axis="x", labelrotation=45, labelbottom=True, labelsize=8)
    axes.grid(which="major", alpha=0.3)
