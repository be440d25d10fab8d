"""What `lockstep bench exact` and `lockstep bench trace` share: arms of the step of `lockstep.Run`, compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.measure import bench_step
from lockstep.measure.bench_step import Settings, WorkerTimes, found_by, name_of, times_of
from lockstep.measure.rounds import Estimate
from lockstep.measure.table import Column, render
from lockstep.measure.workers import Workers

Row = tuple[str, ...]


def compare(
    settings: Settings,
    columns: tuple[Column, ...],
    rows_of: Callable[[list[WorkerTimes]], Iterable[Row]],
    *,
    wanted: str,
    json_path: Path | None,
) -> int:
    """Measure every model, print a table of what `rows_of` makes of it, and what is wanted of the ratios."""
    rows: list[Row] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    name = partial(name_of, settings=settings)
    with Workers(settings.processes, bench_step.work, settings, wait_s=settings.wait_s, name=name) as workers:
        for found in found_by(workers, settings):
            rows += rows_of(found)
            record["models"][found[0].model] = times_of(found)
    plan = settings.plan
    print(
        f"step time on {settings.device}, torch {torch.__version__}: {settings.workers} workers and as many shards, "
        f"{settings.threads} thread(s) each;\n{plan.rounds} interleaved rounds of {plan.steps} steps, "
        "each round as long as its slowest worker\n"
    )
    print(render(columns, rows))
    print(f"\nratios: median of the ratios within each round, and its 95 % interval. {wanted}")
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def in_words(ratio: Estimate) -> str:
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
