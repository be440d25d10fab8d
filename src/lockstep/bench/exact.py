"""`lockstep bench exact`: cost of steps that have the same bits on any number of workers.

Compares the exact step of `lockstep.Run`, the fast one and our DistributedDataParallel, with as many shards as workers,
over shm and over Gloo. Processes and rounds are those of `lockstep bench step`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.bench import step
from lockstep.bench.rounds import estimate, paired_ratio
from lockstep.bench.run_step import EXACT, FAST
from lockstep.bench.step import StepSettings, WorkerTimes, results_by_model, round_times, worker_name
from lockstep.bench.workers import Workers
from lockstep.report.table import Column, render

LIMITS = {"shm": 1.05, "gloo": 1.15}
DDP = "lockstep"
COLUMNS = (
    Column("model"),
    Column("backend"),
    Column("DDP ms", right=True),
    Column("fast ms", right=True),
    Column("exact ms", right=True),
    Column("exact over fast"),
    Column("fast over DDP"),
)


def arms_for(backends: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{kind}@{backend}" for backend in backends for kind in (DDP, FAST, EXACT))


def row_of(results: list[WorkerTimes], backend: str) -> tuple[str, ...]:
    times = round_times(results)
    ddp, fast, exact = (times[f"{kind}@{backend}"] for kind in (DDP, FAST, EXACT))
    return (
        results[0].model,
        backend,
        *(f"{estimate(values).median:.2f}" for values in (ddp, fast, exact)),
        str(paired_ratio(exact, fast)),
        str(paired_ratio(fast, ddp)),
    )


def run(settings: StepSettings, backends: tuple[str, ...], json_path: Path | None) -> int:
    settings = replace(settings, arms=arms_for(backends))
    rows: list[tuple[str, ...]] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(worker_name, settings=settings)
    with Workers(settings.processes, step.work, settings, wait_s=settings.wait_s, name=name) as workers:
        for results in results_by_model(workers, settings):
            rows += [row_of(results, backend) for backend in backends]
            record["models"][results[0].model] = round_times(results)
    plan = settings.plan
    print(
        f"step time on {settings.device}, torch {torch.__version__}: {settings.workers} workers and as many shards, "
        f"{settings.threads} thread(s) each;\n{plan.rounds} interleaved rounds of {plan.steps} steps, "
        "each round as long as its slowest worker\n"
    )
    print(render(COLUMNS, rows))
    wanted = ", ".join(f"{limit} on {backend}" for backend, limit in LIMITS.items())
    print(f"\nratios: median of the ratios within each round, and its 95 % interval. Exact over fast may be {wanted}.")
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0
