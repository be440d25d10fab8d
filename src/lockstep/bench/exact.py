"""`lockstep bench exact`: what steps with the same bits on any number of workers cost.

Compares the step of `lockstep.Run` with what a program has without it: the plain loop (without communication, so it is
what one worker would take), the same loop with as many micro-batches as there are shards, and torch's DDP, with one
pass in each step or with these micro-batches. Arms of `Run`: as many shards as workers, eight shards, and
`exact=False`; on a GPU also eight shards without CUDA graphs. With `--arms` others can be chosen, such as those with
`compile=True`, with audits or with a sharded optimiser. Processes and rounds are those of `lockstep bench step`. With
`--hosts` the workers are on virtual hosts of this machine.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.bench import step
from lockstep.bench.models import WORKLOADS
from lockstep.bench.network_namespaces import VirtualHosts
from lockstep.bench.rounds import estimate, paired_ratio, show
from lockstep.bench.run_step import (
    EXACT,
    EXACT_8,
    EXACT_8_AUDITED,
    EXACT_8_COMPILED,
    EXACT_8_EAGER,
    EXACT_8_INT8,
    EXACT_8_REGIONAL,
    EXACT_8_SHARDED,
    EXACT_AUDITED,
    EXACT_COMPILED,
    EXACT_INT4,
    EXACT_INT8,
    EXACT_POWERSGD,
    EXACT_REGIONAL,
    EXACT_SHARDED,
    EXACT_TOPK,
    FAST,
)
from lockstep.bench.step import (
    NONE,
    NONE_8,
    OURS,
    OURS_SHARDED,
    PLAIN,
    TORCH,
    TORCH_8,
    TORCH_SHARDED,
    StepSettings,
    WorkerTimes,
    results_by_model,
    round_times,
    worker_name,
)
from lockstep.bench.workers import Workers
from lockstep.report.table import columns, megabytes, render

NAMES = {
    NONE: "plain loop",
    NONE_8: "plain loop, 8 micro-batches",
    TORCH: "torch DDP",
    TORCH_8: "torch DDP, 8 micro-batches",
    OURS: "lockstep DDP",
    FAST: "Run, exact=False",
    EXACT: "Run, a shard per worker",
    EXACT_8: "Run, 8 shards",
    EXACT_8_EAGER: "Run, 8 shards, capture=False",
    EXACT_COMPILED: "Run, a shard per worker, compile=True",
    EXACT_8_COMPILED: "Run, 8 shards, compile=True",
    EXACT_REGIONAL: 'Run, a shard per worker, compile="regional"',
    EXACT_8_REGIONAL: 'Run, 8 shards, compile="regional"',
    EXACT_AUDITED: 'Run, a shard per worker, audit_every="auto"',
    EXACT_8_AUDITED: 'Run, 8 shards, audit_every="auto"',
    TORCH_SHARDED: "torch DDP, ZeroRedundancyOptimizer",
    OURS_SHARDED: "lockstep DDP, ShardedOptimizer",
    EXACT_SHARDED: "Run, a shard per worker, shard_optimizer=True",
    EXACT_8_SHARDED: "Run, 8 shards, shard_optimizer=True",
    EXACT_INT8: 'Run, a shard per worker, grad_comm="int8"',
    EXACT_INT4: 'Run, a shard per worker, grad_comm="int4"',
    EXACT_POWERSGD: 'Run, a shard per worker, grad_comm="powersgd"',
    EXACT_TOPK: 'Run, a shard per worker, grad_comm="topk"',
    EXACT_8_INT8: 'Run, 8 shards, grad_comm="int8"',
}
BY_DEFAULT = (NONE, NONE_8, TORCH, TORCH_8, OURS, FAST, EXACT, EXACT_8)
ONLY_ON_GPU = (EXACT_8_EAGER,)  # by default
COLUMNS = columns(
    *("model", "backend", "arm", ">step ms", "over the plain loop", "with 8 micro-batches"),
    *("over torch DDP", "torch DDP on Gloo", ">peak MiB"),
)
GPU_WARM_UP = 40  # steps: shards are captured in the fifth, and compared with eager ones up to the 37th


def arms_for(kinds: tuple[str, ...], backends: tuple[str, ...], device: str) -> tuple[str, ...]:
    """Return the arms of these kinds, or of the default ones if there are none; the plain loop is always measured."""
    kinds = kinds or (*BY_DEFAULT, *(ONLY_ON_GPU if device.startswith("cuda") else ()))
    plain = [kind for kind in PLAIN if kind == NONE or kind in kinds]
    return (*plain, *(f"{kind}@{backend}" for backend in backends for kind in kinds if kind not in PLAIN))


def rows_of(results: list[WorkerTimes], settings: StepSettings) -> list[tuple[str, ...]]:
    times: dict[str, list[float]] = round_times(results)
    rows: list[tuple[str, ...]] = []
    for arm in settings.arms:
        kind, _, backend = arm.partition("@")
        is_cut = kind == TORCH_8 or kind.startswith(EXACT_8)
        peer = TORCH_8 if is_cut and kind != TORCH_8 and f"{TORCH_8}@{backend}" in times else TORCH

        def over(other: str, times: dict[str, list[float]] = times, arm: str = arm) -> str:
            return str(paired_ratio(times[arm], times[other])) if other in times and other != arm else ""

        ratios = (
            over(NONE),
            over(NONE_8) if is_cut else "",
            over(f"{peer}@{backend}") if kind not in PLAIN else "",
            over(f"{peer}@gloo") if backend not in ("", "gloo") else "",
        )
        model = results[0].model if arm == NONE else ""
        step_ms = f"{estimate(times[arm]).median:.2f}"
        peak = megabytes(max(one.peak_bytes for one in results if one.arm == arm))
        rows.append((model, backend, NAMES[kind], step_ms, *ratios, peak))
    return rows


def run(settings: StepSettings, backends: tuple[str, ...], link: VirtualHosts | None, json_path: Path | None) -> int:
    """`link`: the hosts that the workers are on; None: this machine."""
    plan = settings.plan
    if settings.device.startswith("cuda"):
        plan = replace(plan, warmup=GPU_WARM_UP)
    settings = replace(settings, arms=arms_for(settings.arms, backends, settings.device), plan=plan)
    rows: list[tuple[str, ...]] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(worker_name, settings=settings)
    with ExitStack() as resources:
        if link is not None:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns that the hosts have no names
            settings = replace(settings, hosts=resources.enter_context(link).hosts)
        made = Workers(settings.processes, step.work, settings, wait_s=settings.wait_s, name=name)
        for results in results_by_model(resources.enter_context(made), settings):
            rows += rows_of(results, settings)
            record["models"][results[0].model] = round_times(results)
    where = f"{settings.device}, torch {torch.__version__}{f', {link}' if link else ''}"
    head = (
        f"step time on {where}: {settings.workers} workers, {settings.threads} thread(s) each;\n{plan.rounds} "
        f"interleaved rounds of {plan.steps} steps, each round as long as its slowest worker"
    )
    legend = ["ratios: median of the ratios within each round, and its 95 % interval"]
    legend += ["over torch DDP: with 8 micro-batches, of which the last communicates, for 8 shards, if measured"]
    legend += ["peak: of a worker; on a GPU of its tensors, else of its process, for this and the models before it"]
    legend += [f"{model}: {WORKLOADS[model].about}; {WORKLOADS[model].optimizer}" for model in settings.models]
    show(head, render(COLUMNS, rows), legend, record, json_path)
    return 0
