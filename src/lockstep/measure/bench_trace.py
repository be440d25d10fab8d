"""`lockstep bench trace`: what it costs that a run keeps a trace, while somebody watches it.

The step of `lockstep.Run` with the trace it writes by default, and with none, over shm. A view of the run reads the
trace all the while, as the one below a launcher does. Processes and rounds are those of `lockstep bench step`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.measure.bench_run import compare, in_words
from lockstep.measure.bench_step import Settings, WorkerTimes, times_of
from lockstep.measure.rounds import estimate, paired_ratio
from lockstep.measure.run_arm import TRACED, TRACES, UNTRACED
from lockstep.measure.table import Column

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
    medians = [f"{estimate(values).median:.3f}" for values in (without, traced)]
    return found[0].model, *medians, in_words(paired_ratio(traced, without))


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
    with watched():
        return compare(
            settings, COLUMNS, lambda found: [row_of(found)], wanted=f"It may be {WANTED}.", json_path=json_path
        )
