"""`lockstep bench exact`: what it costs that a step has the same bits on any number of workers.

The exact step of `lockstep.Run`, the fast one and our DistributedDataParallel, with as many shards as workers, over
shm and over Gloo. Processes and rounds are those of `lockstep bench step`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.measure.bench_run import compare, in_words
from lockstep.measure.bench_step import Settings, WorkerTimes, times_of
from lockstep.measure.rounds import estimate, paired_ratio
from lockstep.measure.run_arm import EXACT, FAST
from lockstep.measure.table import Column

WANTED = {"shm": 1.05, "gloo": 1.15}
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


def row_of(found: list[WorkerTimes], backend: str) -> tuple[str, ...]:
    times = times_of(found)
    ddp, fast, exact = (times[f"{kind}@{backend}"] for kind in (DDP, FAST, EXACT))
    return (
        found[0].model,
        backend,
        *(f"{estimate(values).median:.2f}" for values in (ddp, fast, exact)),
        in_words(paired_ratio(exact, fast)),
        in_words(paired_ratio(fast, ddp)),
    )


def run(settings: Settings, backends: tuple[str, ...], json_path: Path | None) -> int:
    wanted = ", ".join(f"{limit} on {backend}" for backend, limit in WANTED.items())
    return compare(
        replace(settings, arms=arms_for(backends)),
        COLUMNS,
        lambda found: [row_of(found, backend) for backend in backends],
        wanted=f"Exact over fast may be {wanted}.",
        json_path=json_path,
    )
