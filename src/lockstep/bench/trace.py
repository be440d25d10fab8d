"""`lockstep bench trace`: what it costs that a run keeps a trace, while somebody watches it.

The step of `lockstep.Run` with the trace that it writes by default, and with none, over shm: one model in one process,
which is observed in every other turn, for two processes never are equally fast. What works beside the steps, the
threads that write and the view in a terminal, cannot be switched on and off like that: there we look at how much of the
machine's cores it takes, which is what steps lose where all cores are busy.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lockstep.bench.models import WORKLOADS, Batch
from lockstep.bench.rounds import Conduct, Plan, estimate, paired_ratio, slowest, time_rounds
from lockstep.bench.run_step import EXACT, RunArm
from lockstep.bench.step import Settings
from lockstep.bench.workers import Seat, Workers
from lockstep.report.table import Column, render
from lockstep.train.step_observer import Blind, Observer
from lockstep.train.trace_writer import Chronicle

WANTED: Final = 1.01
LASTS_S, QUICK_S = 90.0, 20.0  # the rounds of a model
FEWEST: Final = 21  # rounds
TURN_S: Final = 0.1
WITHOUT, WITH = "without", "with"
ARM: Final = f"{EXACT}@shm"
COLUMNS: Final = (
    Column("model"),
    Column("rounds", right=True),
    Column("without ms", right=True),
    Column("with ms", right=True),
    Column("with over without"),
    Column("writers", right=True),
    Column("view", right=True),
    Column("together", right=True),
)


@dataclass(frozen=True)
class Job:
    model: str
    settings: Settings
    traces: Path
    lasts_s: float  # the rounds of a model
    rounds: int | None  # None: as many as fill that time
    steps: int | None  # in a turn; None: as many as fill TURN_S


@dataclass(frozen=True)
class Found:
    """What one worker found out about one model."""

    model: str
    times_ms: dict[str, list[float]]
    writer_s: float  # of a core, by the thread that writes
    began_s: float
    ended_s: float


# ---------------------------------------------------------------------------------------------------- inside a worker


def work(seat: Seat, job: Job) -> None:
    settings = job.settings
    torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", seat.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    seat.join()
    group = dist.new_group(timeout=seat.patience, backend="shm")
    seat.tell(f"{job.model}: warming up")
    seat.tell(measure(seat, job, device, group))
    seat.leave()


def measure(seat: Seat, job: Job, device: torch.device, group: Any) -> Found:
    workload, plan = WORKLOADS[job.model], job.settings.plan
    batch = workload.batch(torch.Generator().manual_seed(seat.rank)).to(device)
    arm = RunArm(ARM, workload, device, group=group)
    chronicle = Chronicle(job.traces, f"rank{seat.rank}", device)
    observers = {WITHOUT: Blind(device), WITH: Observer(chronicle, device)}
    for observer in observers.values():
        arm.let_see(observer)
        for _ in range(plan.warmup):
            arm.step(batch)
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    step_s = time_step(arm, batch, finish)
    steps = job.steps or max(1, round(TURN_S / step_s))
    rounds = job.rounds or max(FEWEST, round(job.lasts_s / (2 * steps * step_s)))
    turns = {name: partial(turn, arm, observer, batch, steps) for name, observer in observers.items()}
    conduct = Conduct(line_up=dist.barrier, finish=finish, report=lambda text: seat.tell(f"{job.model}: {text}"))
    began_s, wrote_s = time.monotonic(), writer_s()
    times = time_rounds(list(turns), turns, Plan(plan.warmup, rounds, 1), conduct)
    found = Found(
        job.model,
        {name: [ms / steps for ms in values] for name, values in times.items()},
        writer_s() - wrote_s,
        began_s,
        time.monotonic(),
    )
    observers[WITH].close(in_peace=True)
    return found


def turn(arm: RunArm, observer: Observer, batch: Batch, steps: int) -> None:
    arm.let_see(observer)
    for _ in range(steps):
        arm.step(batch)


def time_step(arm: RunArm, batch: Batch, finish: Callable[[], None]) -> float:
    """Seconds; the same on all workers."""
    finish()
    began_s = time.perf_counter()
    for _ in range(3):
        arm.step(batch)
    finish()
    took_s = torch.tensor([(time.perf_counter() - began_s) / 3])
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return float(took_s)


def writer_s() -> float:
    writers = [thread for thread in threading.enumerate() if thread.name == "lockstep-trace"]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in writers if thread.ident is not None]
    return sum(time.clock_gettime(clock) for clock in clocks)


# -------------------------------------------------------------------------------------------------- outside of workers


class View:
    """A process that draws the run in a terminal, and how much of a core it takes."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self._process = process
        self._seen: list[tuple[float, float]] = []  # the monotonic clock, and seconds of a core so far
        threading.Thread(target=self._read, args=(terminal,), daemon=True).start()
        threading.Thread(target=self._look, daemon=True).start()

    def _read(self, terminal: int) -> None:
        with suppress(OSError):  # it ends with the process
            while os.read(terminal, 1 << 16):
                pass

    def _look(self) -> None:
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        with suppress(OSError):
            while self._process.poll() is None:
                fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
                self._seen.append((time.monotonic(), (int(fields[11]) + int(fields[12])) * tick_s))
                time.sleep(0.5)

    def core_s(self, began_s: float, ended_s: float) -> float:
        """Between these two moments."""
        inside = [core_s for at_s, core_s in self._seen if began_s - 0.5 <= at_s <= ended_s + 0.5]
        return inside[-1] - inside[0] if inside else 0.0


@contextmanager
def watched(folder: Path) -> Iterator[View]:
    (folder / "trace").mkdir()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lockstep", "watch", str(folder)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            yield View(process, ours)
        finally:
            process.kill()
    os.close(ours)


def row_of(found: list[Found], view: View) -> tuple[str, ...]:
    times = slowest([one.times_ms for one in found])
    ratio = paired_ratio(times[WITH], times[WITHOUT])
    began_s, ended_s = found[0].began_s, found[0].ended_s
    cores_s = (ended_s - began_s) * (os.cpu_count() or 1)
    beside = [sum(one.writer_s for one in found) / cores_s, view.core_s(began_s, ended_s) / cores_s]
    medians = [f"{estimate(times[name]).median:.3f}" for name in (WITHOUT, WITH)]
    shares = [f"{100 * share:.2f} %" for share in beside]
    return found[0].model, str(len(times[WITH])), *medians, str(ratio), *shares, f"{ratio.median + sum(beside):.3f}"


def run(settings: Settings, *, rounds: int | None, steps: int | None, quick: bool, json_path: Path | None) -> int:
    rows: list[tuple[str, ...]] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    for model in settings.models:
        with tempfile.TemporaryDirectory() as folder, watched(Path(folder)) as view:
            job = Job(model, settings, Path(folder) / "trace", QUICK_S if quick else LASTS_S, rounds, steps)
            with Workers(settings.workers, work, job, wait_s=settings.wait_s) as workers:
                found = [one for _, one in workers.results()]
        rows.append(row_of(found, view))
        record["models"][model] = [asdict(one) for one in found]
    print(
        f"step time on {settings.device}, torch {torch.__version__}: {settings.workers} workers and as many shards, "
        f"{settings.threads} thread(s) each;\ninterleaved rounds, each turn as long as its slowest worker\n"
    )
    print(render(COLUMNS, rows))
    print(
        "\nwith over without  a step that is observed, over one that is not: median of the ratios within each round,"
        "\n                   and its 95 % interval"
        f"\nwriters, view      the threads that write; the view in a terminal: of the time of {os.cpu_count()} cores"
        f"\ntogether           may be {WANTED}"
    )
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0
