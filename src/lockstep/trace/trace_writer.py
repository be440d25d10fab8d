"""Writes the trace of a run: the times of its steps, its metrics, and events (docs/trace.md).

The training thread sums up steps and passes a line to the trace file twice a second; the thread of that file writes it.
Only `count_step` runs in every step; everything else is done in `end_window_if_due`, when a window may have ended.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.checkpoint.writer import SavedCheckpoint
from lockstep.trace.step_timer import APART_S, PHASES, StepTimes, TimedSpan
from lockstep.trace.trace_file import VERSION, TraceFile

WINDOW_S: Final = 0.5
WINDOWS: Final = 1000  # a line covers at least this fraction of the run so far: 1 / WINDOWS
MAX_STEPS_LATE: Final = 16  # a step counts after this many more, even if other workers have not reported it

WaitReport = tuple[float, float, float]  # a step, how many seconds a worker waited in it, and how many it took
NO_REPORT: Final[WaitReport] = (-1.0, 0.0, 0.0)
TimerTotals = tuple[float, float] | None  # see `StepTimer.totals`


class StepWindow:
    """The sums over the steps of a short time."""

    def __init__(self, began_s: float, totals: TimerTotals) -> None:
        self.began_s, self._totals = began_s, totals
        self.first: int | None = None
        self.count = self.timed = self.samples = 0
        self.loss = self._after_s = 0.0
        self.phases = dict.fromkeys(PHASES, 0.0)  # seconds in the steps that were timed
        self.waited_for: dict[int, float] = {}

    def add(self, times: StepTimes) -> None:
        phases = times.phases()
        self.timed += 1
        self._after_s += times.after_s
        for name, seconds in phases.items():
            self.phases[name] += seconds
        if times.waited_for is not None:
            self.waited_for[times.waited_for] = self.waited_for.get(times.waited_for, 0.0) + phases["waiting"]

    def is_done(self, now_s: float) -> bool:
        """Whether the window is long enough. One without a timed step says little, so it lasts longer."""
        return now_s - self.began_s >= (WINDOW_S if self.timed else 10 * WINDOW_S)

    def close(self, ended_s: float, totals: TimerTotals, like: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return the line of the trace.

        `like`: the phases of the previous window, which are used for this one if none of its steps was timed.
        """
        whole_s = ended_s - self.began_s
        if not self.timed and like and sum(like.values()) > like["between"]:
            self.phases |= {**like, "between": 0.0}
        phases, times = self._extrapolate(whole_s, totals)
        phases["between"] += whole_s - sum(phases.values())
        return {
            "t0": round(self.began_s, 6),
            "t1": round(ended_s, 6),
            "first": self.first,
            "count": self.count,
            "samples": self.samples,
            "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
            "waited_for": {str(rank): round(seconds * times, 6) for rank, seconds in self.waited_for.items()},
            "loss": self.loss / self.count if self.count else None,
        }

    def _extrapolate(self, whole_s: float, totals: TimerTotals) -> tuple[dict[str, float], float]:
        """Extrapolate from the timed steps to all steps. Returns the phases, and the factor that was applied."""
        phases = dict(self.phases)
        if totals is None or self._totals is None:
            timed_s = sum(phases.values())
            times = whole_s / timed_s if timed_s else 0.0
            times = min(times, self.count / self.timed) if self.timed else times
            return {name: seconds * times for name, seconds in phases.items()}, times
        (data_s, outside_s), (data_before_s, outside_before_s) = totals, self._totals
        data_s, outside_s = data_s - data_before_s, outside_s - outside_before_s
        phases["data"] = 0.0
        phases["between"] -= self._after_s
        timed_s = sum(phases.values())
        times = max(0.0, whole_s - data_s - outside_s) / timed_s if timed_s else 0.0
        return {name: seconds * times for name, seconds in phases.items()} | {"data": data_s}, times


def merge(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the lines of two windows, the second of which followed the first."""
    if one is None:
        return dict(other)
    count = one["count"] + other["count"]
    losses = [part["loss"] * part["count"] for part in (one, other) if part["count"]]
    return {
        **other,
        **{name: one[name] for name in ("t0", "first")},
        "count": count,
        "samples": one["samples"] + other["samples"],
        "phases": _add_by_name(one["phases"], other["phases"]),
        "waited_for": _add_by_name(one["waited_for"], other["waited_for"]),
        "loss": sum(losses) / count if count else None,
    }


def _add_by_name(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: round(one.get(name, 0.0) + other.get(name, 0.0), 6) for name in {**one, **other}}


class TraceWriter:
    """Writes the trace of one worker. Without a folder nothing is written."""

    def __init__(self, folder: Path | None, worker: str, device: torch.device) -> None:
        self._worker, self._device = worker, device
        self._file: TraceFile | None = None
        self._began_s = time.monotonic()
        self._window = StepWindow(self._began_s, None)
        self._line: dict[str, Any] | None = None  # the merged windows that are not written yet
        self._last: dict[str, Any] = {}  # the last window, for the live view
        self._due_s = 0.0  # when to look at the window again
        self._done = 0  # steps
        self._last_step_s = self._began_s  # the end of the last one
        self._noise: dict[str, Any] | None = None
        self._unreported: dict[int, StepTimes] = {}  # own steps; the waits of other workers are missing
        self._reported_waits: dict[int, dict[int, float]] = {}  # step -> rank -> seconds
        self._report: WaitReport = NO_REPORT
        self._world: dict[str, Any] = {}
        self._wrote_world = True
        self._deferred: list[tuple[str, dict[str, Any]]] = []  # lines that must follow the line of the world
        self._facts: dict[str, Any] = {}
        self._metrics: Mapping[str, float] = {}  # the last values of `run.log`
        self._unwritten: dict[str, tuple[int, float]] = {}  # name -> step and value
        self._metrics_due_s = 0.0  # to write them
        self.state = "starting"
        self.on_window: Callable[[int, Mapping[str, float | None]], None] = lambda _step, _metrics: None
        if folder is not None:
            self._file = TraceFile(folder, f"{time.time_ns() // 1_000_000}-{worker}-{os.getpid()}", worker)
            self._file.add("head", **self._head())
            self._file.begin(self._now)

    def _head(self) -> dict[str, Any]:
        environment = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        }
        if self._device.type == "cuda":
            environment |= {"GPU": torch.cuda.get_device_name(self._device), "GPUs": torch.cuda.device_count()}
        return {
            "version": VERSION,
            "worker": self._worker,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "t": time.monotonic(),
            "unix_s": time.time(),
            "device": str(self._device),
            "environment": environment,
        }

    # -- steps and events --------------------------------------------------------------------------------------------

    def set_world(self, totals: TimerTotals, **world: Any) -> None:
        """Note that the workers have changed, or are the first ones. Their line is written after their first step.

        The window of the previous workers ends here. Lines that follow are deferred until the line of the new workers
        is written, so that every line of the file belongs to the world above it.
        """
        if self._window.count:
            self._close_window(totals)
            self._write_line()
        if self._deferred:  # of workers whose line was not written
            self._write_world({})
        self._unreported.clear()
        self._reported_waits.clear()
        self._report = NO_REPORT
        self._world, self._wrote_world = {"t": time.monotonic(), **world}, False

    def begin(self, totals: TimerTotals) -> None:
        """Begin the first step. The time before it belongs to no window."""
        self._began_s = time.monotonic()
        self._window = StepWindow(self._began_s, totals)
        self.state = "training"

    def add_timed_step(self, times: StepTimes, *, describe: Any) -> None:
        """Add the times of a step of this worker. `describe` returns buckets and memory, which are totals by now."""
        self._report = (float(times.number), times.waited_s, times.took_s)
        if self._world["size"] == 1:
            times.set_waits([times.waited_s])
            self._add(times)
        else:
            self._unreported[times.number] = times
            self._add_late_steps(times.number)
        if not self._wrote_world and times.number > self._world["first"]:
            self._write_world(describe())

    def _write_world(self, facts: Mapping[str, Any]) -> None:
        self._wrote_world = True
        self._world["memory"] = facts.get("memory", {})
        self._write("world", **{**self._world, **facts})
        deferred, self._deferred = self._deferred, []
        for kind, line in deferred:
            self._write(kind, **line)

    def _write(self, kind: str, **line: Any) -> None:
        """Write a line about steps, or defer it until the line of their workers is written."""
        if self._file is not None and self._wrote_world:
            self._file.add(kind, **line)
        elif self._file is not None:
            self._deferred.append((kind, line))

    def pop_report(self) -> WaitReport:
        """Return the report for the other workers, once; it is sent with the next step."""
        report, self._report = self._report, NO_REPORT
        return report

    def add_reports(self, reports: Sequence[WaitReport]) -> None:
        """Add the reports of all workers, by rank, this one included."""
        for rank, (step, waited_s, _) in enumerate(reports):
            if step >= 0:
                self._reported_waits.setdefault(int(step), {})[rank] = waited_s
        for step in [step for step, waits in self._reported_waits.items() if len(waits) == len(reports)]:
            waits = self._reported_waits.pop(step)
            if (times := self._unreported.pop(step, None)) is not None:
                times.set_waits([waits[rank] for rank in range(len(reports))])
                self._add(times)

    def _add_late_steps(self, newest: int) -> None:
        if len(self._unreported) > MAX_STEPS_LATE:
            for step in [step for step in self._unreported if step < newest - MAX_STEPS_LATE]:
                self._add(self._unreported.pop(step))
        if len(self._reported_waits) > MAX_STEPS_LATE:
            for step in [step for step in self._reported_waits if step < newest - MAX_STEPS_LATE]:
                del self._reported_waits[step]

    def _add(self, times: StepTimes) -> None:
        self._window.add(times)
        if times.spans and self._file is not None:
            rows = [_row(span) for span in times.spans]
            self._write("spans", step=times.number, t=round(times.began_s, 6), spans=rows)

    def add_loss(self, number: int, loss: float) -> None:
        """Write the loss of one step; only where every step is of interest."""
        self._write("loss", step=number, loss=loss if math.isfinite(loss) else None)

    def count_step(self, number: int, loss: float, samples: int, at_s: float) -> bool:
        """Count a step that was taken. Returns whether `end_window_if_due` is to be called."""
        window = self._window
        if window.first is None:
            window.first = number
        window.count += 1
        window.samples += samples
        window.loss += loss
        self._done, self._last_step_s = number + 1, at_s
        return at_s >= self._due_s

    def end_window_if_due(self, totals: TimerTotals, *, epoch: int, facts: Mapping[str, Any]) -> None:
        """End the window, and write the line, if they are long enough. `facts`: lr and grad_norm of the last step."""
        at_s = self._last_step_s
        self._due_s = at_s + APART_S
        self._facts = {"epoch": epoch, **facts}
        if self._window.is_done(at_s):
            self._close_window(totals)
            assert self._line is not None
            if at_s - self._line["t0"] >= (at_s - self._began_s) / WINDOWS:
                self._write_line()

    def _close_window(self, totals: TimerTotals) -> None:
        at_s = self._last_step_s
        if self._window.count:
            self._last = self._window.close(at_s, totals, self._last.get("phases")) | memory_of(self._device)
            self._line = merge(self._line, self._last)
        self._window = StepWindow(at_s, totals)

    def _write_line(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        self._write("steps", **line, **self._facts)
        if self._noise is not None:
            self._write("noise", **self._noise)
        self.on_window(self._done, self._metrics_of(line))
        self._noise = None

    def _metrics_of(self, window: Mapping[str, Any]) -> dict[str, float | None]:
        """The metrics of a window for `on_window`, which shows them as curves."""
        facts, took_s = self._facts, window["t1"] - window["t0"]
        metrics = {"loss": window["loss"], "learning rate": facts.get("lr"), "gradient norm": facts.get("grad_norm")}
        noise = self._noise["scale"] if self._noise is not None else None
        return {**metrics, "samples per second": window["samples"] / took_s if took_s else None, "noise scale": noise}

    def event(self, what: str, **facts: Any) -> None:
        file = self._file  # another thread may close it
        if file is not None:
            line = {"t": time.monotonic(), "step": self._done, "what": what, **facts}
            file.add("event", **line)

    def checkpoint_written(self, one: SavedCheckpoint) -> None:
        self.event("checkpoint", step=one.step, took_s=one.took_s, bytes=one.size_bytes)

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before

    def set_noise(self, **facts: Any) -> None:
        """Set the gradient noise scale; the last one of a window is written."""
        self._noise = {"t": time.monotonic(), **facts}

    def log(self, step: int, metrics: Mapping[str, float], *, writes: bool) -> None:
        """Add what `run.log` was given after `step` steps. One worker writes; if called often, only the last values."""
        self._metrics = {**self._metrics, **metrics}
        if writes and self._file is not None:
            self._unwritten |= {name: (step, value) for name, value in metrics.items()}
            if time.monotonic() >= self._metrics_due_s:
                self._write_metrics()

    def _write_metrics(self) -> None:
        now_s = time.monotonic()
        self._metrics_due_s = now_s + max(WINDOW_S, (now_s - self._began_s) / WINDOWS)
        unwritten, self._unwritten = self._unwritten, {}
        for step in sorted({step for step, _ in unwritten.values()}):
            metrics = {name: value for name, (at, value) in unwritten.items() if at == step}
            if self._file is not None:
                self._file.add("metrics", t=now_s, step=step, metrics=metrics)

    def close(self, totals: TimerTotals, *, succeeded: bool) -> None:
        """Write the rest and close the file. The last window ends with the last step, not with a later evaluation."""
        if self._file is None:
            return
        self.state = "ended" if succeeded else "failed"
        for step in sorted(self._unreported):
            self._add(self._unreported.pop(step))
        self._close_window(totals)
        self._write_line()
        if self._deferred:
            self._write_world({})
        self._write_metrics()
        if succeeded:
            self._file.add("end", t=time.monotonic(), step=self._done)
        self._file.close()
        self._file = None

    # -- live status -------------------------------------------------------------------------------------------------

    def _now(self) -> dict[str, Any] | None:
        """The current status, for the `.now` file. Called by the thread of the trace file."""
        last, world = self._last, self._world
        took_s = last["t1"] - last["t0"] if last else 0.0
        return {
            "t": time.monotonic(),
            "unix_s": time.time(),
            "worker": self._worker,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            **{
                name: world.get(name)
                for name in ("rank", "size", "generation", "steps", "global_batch_size", "backend", "memory")
            },
            **self._facts,
            "step": self._done,
            "loss": last.get("loss"),
            "samples_per_s": last["samples"] / took_s if took_s else None,
            **{name: last.get(name) for name in ("phases", "waited_for", "rss", "peak")},
            "state": self.state,
            "metrics": dict(self._metrics),
        }


def _row(span: TimedSpan) -> list[Any]:
    return [span.name, span.track, round(span.start_s * 1e6, 1), round(span.took_s * 1e6, 1)]


def memory_of(device: torch.device) -> dict[str, int | None]:
    """Return the memory of this process, and on a GPU the peak of its tensors, in bytes."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"rss": _resident_bytes(), "peak": peak}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
