"""`lockstep bench exact`: what steps with the same bits on any number of workers cost.

Compares the step of `lockstep.Run` with what a program has without it: the plain loop (without communication, so it is
what one worker would take), the same loop with as many micro-batches as there are shards, and torch's DDP. Arms of
`Run`: as many shards as workers, eight shards, and `exact=False`; on a GPU also eight shards without CUDA graphs.
Processes and rounds are those of `lockstep bench step`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.bench import step
from lockstep.bench.models import WORKLOADS
from lockstep.bench.rounds import estimate, paired_ratio, show
from lockstep.bench.run_step import EXACT, EXACT_8, EXACT_8_EAGER, FAST
from lockstep.bench.step import (
    NONE,
    NONE_8,
    OURS,
    TORCH,
    StepSettings,
    WorkerTimes,
    results_by_model,
    round_times,
    worker_name,
)
from lockstep.bench.workers import Workers
from lockstep.report.table import columns, render

NAMES = {
    NONE: "plain loop",
    NONE_8: "plain loop, 8 micro-batches",
    TORCH: "torch DDP",
    OURS: "lockstep DDP",
    FAST: "Run, exact=False",
    EXACT: "Run, a shard per worker",
    EXACT_8: "Run, 8 shards",
    EXACT_8_EAGER: "Run, 8 shards, capture=False",
}
COLUMNS = columns(
    "model", "backend", "arm", ">step ms", "over the plain loop", "with 8 micro-batches", "over torch DDP"
)
GPU_WARM_UP = 40  # steps: shards are captured in the fifth, and compared with eager ones up to the 37th


def arms_for(backends: tuple[str, ...], device: str) -> tuple[str, ...]:
    plain = (NONE, NONE_8)
    kinds = [kind for kind in NAMES if kind not in plain and (kind != EXACT_8_EAGER or device.startswith("cuda"))]
    return (*plain, *(f"{kind}@{backend}" for backend in backends for kind in kinds))


def rows_of(results: list[WorkerTimes], settings: StepSettings) -> list[tuple[str, ...]]:
    times: dict[str, list[float]] = round_times(results)
    rows: list[tuple[str, ...]] = []
    for arm in settings.arms:
        kind, _, backend = arm.partition("@")
        torchs = times.get(f"{TORCH}@{backend}")
        over_torch = str(paired_ratio(times[arm], torchs)) if torchs and kind != TORCH else ""
        over_plain = str(paired_ratio(times[arm], times[NONE])) if kind != NONE else ""
        over_micro = str(paired_ratio(times[arm], times[NONE_8])) if kind in (EXACT_8, EXACT_8_EAGER) else ""
        model = results[0].model if arm == NONE else ""
        step_ms = f"{estimate(times[arm]).median:.2f}"
        rows.append((model, backend, NAMES[kind], step_ms, over_plain, over_micro, over_torch))
    return rows


def run(settings: StepSettings, backends: tuple[str, ...], json_path: Path | None) -> int:
    plan = settings.plan
    if settings.device.startswith("cuda"):
        plan = replace(plan, warmup=GPU_WARM_UP)
    settings = replace(settings, arms=arms_for(backends, settings.device), plan=plan)
    rows: list[tuple[str, ...]] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(worker_name, settings=settings)
    with Workers(settings.processes, step.work, settings, wait_s=settings.wait_s, name=name) as workers:
        for results in results_by_model(workers, settings):
            rows += rows_of(results, settings)
            record["models"][results[0].model] = round_times(results)
    head = (
        f"step time on {settings.device}, torch {torch.__version__}: {settings.workers} workers, {settings.threads} "
        f"thread(s) each;\n{plan.rounds} interleaved rounds of {plan.steps} steps, each round as long as its slowest "
        "worker"
    )
    legend = ["ratios: median of the ratios within each round, and its 95 % interval"]
    legend += [f"{model}: {WORKLOADS[model].about}; {WORKLOADS[model].optimizer}" for model in settings.models]
    show(head, render(COLUMNS, rows), legend, record, json_path)
    return 0
