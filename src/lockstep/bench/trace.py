"""`lockstep bench trace`: cost of the trace that a run writes, and of `lockstep watch` on it.

Compares the step of `lockstep.Run` with its default trace and without, over shm: one model in one process, which is
traced in every second turn, because two processes are never equally fast. The threads that write the trace and the
view in a terminal cannot be switched on and off like that: their share of the machine's cores is measured, which is
what steps lose where all cores are busy.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lockstep.bench.models import WORKLOADS, LabeledBatch
from lockstep.bench.rounds import RoundPlan, RoundSync, estimate, paired_ratio, show, slowest, time_calls, time_rounds
from lockstep.bench.run_step import EXACT, RunArm
from lockstep.bench.step import StepSettings
from lockstep.bench.workers import BenchWorker, Workers, finish_of, largest, use_device
from lockstep.process_identity import read_stat
from lockstep.report.table import columns, render
from lockstep.trace.step_observer import NullObserver, StepObserver
from lockstep.trace.trace_writer import TraceWriter

LIMIT: Final = 1.01
LASTS_S, QUICK_S = 90.0, 20.0  # duration of the rounds of a model
FEWEST: Final = 21  # rounds
TURN_S: Final = 0.1
WITHOUT, WITH = "without", "with"
ARM: Final = f"{EXACT}@shm"
COLUMNS: Final = columns(
    *("model", ">rounds", ">without ms", ">with ms", "with over without", ">writers", ">view", ">together")
)


@dataclass(frozen=True)
class TraceJob:
    model: str
    settings: StepSettings
    traces: Path
    lasts_s: float  # duration of the rounds of a model
    rounds: int | None  # None: as many as fill `lasts_s`
    steps: int | None  # steps in a turn; None: as many as fill TURN_S


@dataclass(frozen=True)
class TraceTimes:
    """Measurements of one worker for one model."""

    model: str
    times_ms: dict[str, list[float]]
    writer_s: float  # CPU time of the thread that writes the trace
    began_s: float
    ended_s: float


# ---------------------------------------------------------------------------------------------------- inside a worker


def work(worker: BenchWorker, job: TraceJob) -> None:
    torch.set_num_threads(job.settings.threads)
    device = use_device(job.settings.device, worker.rank)
    worker.join()
    group = dist.new_group(timeout=worker.timeout, backend="shm")
    worker.send(f"{job.model}: warming up")
    worker.send(measure(worker, job, device, group))
    worker.leave()


def measure(worker: BenchWorker, job: TraceJob, device: torch.device, group: Any) -> TraceTimes:
    workload, plan = WORKLOADS[job.model], job.settings.plan
    batch = workload.batch(torch.Generator().manual_seed(worker.rank)).to(device)
    arm = RunArm(ARM, workload, device, group=group)
    trace_writer = TraceWriter(job.traces, f"rank{worker.rank}", device)
    observers = {WITHOUT: NullObserver(device), WITH: StepObserver(trace_writer, device)}
    for observer in observers.values():
        arm.set_observer(observer)
        for _ in range(plan.warmup):
            arm.step(batch)
    finish = finish_of(device)
    step_s = largest(1e-3 * time_calls(partial(arm.step, batch), 3, finish))  # equal on all workers
    steps = job.steps or max(1, round(TURN_S / step_s))
    rounds = job.rounds or max(FEWEST, round(job.lasts_s / (2 * steps * step_s)))
    turns = {name: partial(run_turn, arm, observer, batch, steps) for name, observer in observers.items()}
    sync = RoundSync(barrier=dist.barrier, finish=finish, report=lambda text: worker.send(f"{job.model}: {text}"))
    began_s, wrote_s = time.monotonic(), writer_s()
    times = time_rounds(list(turns), turns, RoundPlan(plan.warmup, rounds, 1), sync)
    step_ms = {name: [ms / steps for ms in values] for name, values in times.items()}
    measured = TraceTimes(job.model, step_ms, writer_s() - wrote_s, began_s, time.monotonic())
    observers[WITH].close(succeeded=True)
    return measured


def run_turn(arm: RunArm, observer: StepObserver, batch: LabeledBatch, steps: int) -> None:
    arm.set_observer(observer)
    for _ in range(steps):
        arm.step(batch)


def writer_s() -> float:
    writers = [thread for thread in threading.enumerate() if thread.name == "lockstep-trace"]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in writers if thread.ident is not None]
    return sum(time.clock_gettime(clock) for clock in clocks)


# -------------------------------------------------------------------------------------------------- outside of workers


class WatchProcess:
    """A `lockstep watch` process in a pseudo-terminal, and its CPU time."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self._process = process
        self._samples: list[tuple[float, float]] = []  # (monotonic clock, CPU seconds so far)
        threading.Thread(target=self._read, args=(terminal,), daemon=True).start()
        threading.Thread(target=self._sample_cpu, daemon=True).start()

    def _read(self, terminal: int) -> None:
        with suppress(OSError):  # it ends with the process
            while os.read(terminal, 1 << 16):
                pass

    def _sample_cpu(self) -> None:
        with suppress(OSError):
            while self._process.poll() is None:
                self._samples.append((time.monotonic(), read_stat(self._process.pid).cpu_s))
                time.sleep(0.5)

    def core_s(self, began_s: float, ended_s: float) -> float:
        """CPU seconds of the process between these two times."""
        inside = [core_s for at_s, core_s in self._samples if began_s - 0.5 <= at_s <= ended_s + 0.5]
        return inside[-1] - inside[0] if inside else 0.0


@contextmanager
def run_watch(folder: Path) -> Iterator[WatchProcess]:
    (folder / "trace").mkdir()
    master, terminal_fd = pty.openpty()
    command = [sys.executable, "-m", "lockstep", "watch", str(folder)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        command, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, env=environment
    ) as process:
        os.close(terminal_fd)
        try:
            yield WatchProcess(process, master)
        finally:
            process.kill()
    os.close(master)


def row_of(workers: list[TraceTimes], view: WatchProcess) -> tuple[str, ...]:
    times = slowest([worker.times_ms for worker in workers])
    ratio = paired_ratio(times[WITH], times[WITHOUT])
    began_s, ended_s = workers[0].began_s, workers[0].ended_s
    cores_s = (ended_s - began_s) * (os.cpu_count() or 1)
    beside = [sum(worker.writer_s for worker in workers) / cores_s, view.core_s(began_s, ended_s) / cores_s]
    medians = [f"{estimate(times[name]).median:.3f}" for name in (WITHOUT, WITH)]
    shares = [f"{100 * share:.2f} %" for share in beside]
    return workers[0].model, str(len(times[WITH])), *medians, str(ratio), *shares, f"{ratio.median + sum(beside):.3f}"


def run(settings: StepSettings, *, rounds: int | None, steps: int | None, quick: bool, json_path: Path | None) -> int:
    rows: list[tuple[str, ...]] = []
    record: dict[str, Any] = {"torch": torch.__version__, "settings": asdict(settings), "models": {}}
    for model in settings.models:
        with tempfile.TemporaryDirectory() as folder, run_watch(Path(folder)) as view:
            job = TraceJob(model, settings, Path(folder) / "trace", QUICK_S if quick else LASTS_S, rounds, steps)
            with Workers(settings.workers, work, job, wait_s=settings.wait_s) as workers:
                [times] = workers.results_by(lambda times: times.model)
        rows.append(row_of(times, view))
        record["models"][model] = [asdict(worker_times) for worker_times in times]
    head = (
        f"step time on {settings.device}, torch {torch.__version__}: {settings.workers} workers and as many shards, "
        f"{settings.threads} thread(s) each;\ninterleaved rounds, each turn as long as its slowest worker"
    )
    legend = [
        "with over without  a step that is observed, over one that is not: median of the ratios within each round,",
        "                   and its 95 % interval",
        f"writers, view      the threads that write; the view in a terminal: of the time of {os.cpu_count()} cores",
        f"together           may be {LIMIT}",
    ]
    show(head, render(COLUMNS, rows), legend, record, json_path)
    return 0
