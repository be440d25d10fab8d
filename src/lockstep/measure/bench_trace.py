"""`lockstep bench trace`: what it costs that a run keeps a trace, while somebody watches it.

The step of `lockstep.Run` with the trace it writes by default, and with none, over shm. A view of the run reads the
trace all the while, as the one below a launcher does. Processes and rounds are those of `lockstep bench step`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.measure import bench_step
from lockstep.measure.bench_step import Settings, WorkerTimes, found_by, name_of, times_of
from lockstep.measure.rounds import estimate, paired_ratio
from lockstep.measure.run_arm import TRACED, TRACES, UNTRACED
from lockstep.measure.table import Column, render
from lockstep.measure.workers import Workers

WANTED = 1.01
ARMS = (f"{UNTRACED}@shm", f"{TRACED}@shm")
COLUMNS = (
    Column("model"),
    Column("without ms", right=True),
    Column("with ms", right=True),
    Column("with over without"),
)


def row_of(found: list[WorkerTimes]) -> tuple[str, ...]:
    times = times_of(found)
    without, traced = (times[arm] for arm in ARMS)
    ratio = paired_ratio(traced, without)
    medians = [f"{estimate(values).median:.3f}" for values in (without, traced)]
    return found[0].model, *medians, f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


@contextmanager
def watched() -> Iterator[None]:
    """Traces go to a folder, which somebody looks at."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trace").mkdir()
        os.environ[TRACES] = folder
        command = [sys.executable, "-m", "lockstep", "watch", "--plain", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as view:
            try:
                yield
            finally:
                del os.environ[TRACES]
                view.kill()


def run(settings: Settings, json_path: Path | None) -> int:
    rows: list[tuple[str, ...]] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    wait = {"wait_s": settings.wait_s, "name": partial(name_of, settings=settings)}
    with watched(), Workers(settings.processes, bench_step.work, settings, **wait) as workers:  # type: ignore[arg-type]
        for found in found_by(workers, settings):
            rows.append(row_of(found))
            record["models"][found[0].model] = times_of(found)
    plan = settings.plan
    print(
        f"step time on {settings.device}, torch {torch.__version__}: {settings.workers} workers and as many shards, "
        f"{settings.threads} thread(s) each;\n{plan.rounds} interleaved rounds of {plan.steps} steps, "
        "each round as long as its slowest worker\n"
    )
    print(render(COLUMNS, rows))
    print(f"\nratios: median of the ratios within each round, and its 95 % interval. It may be {WANTED}.")
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0
