"""Writes down what a run does: the times of its steps, its figures, what happened (docs/trace.md).

The training thread adds numbers up and hands a line over twice a second; the thread of the trace file writes it.
What `step` does, every step costs: all else waits until it is time to catch up.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.checkpoint.writer import Written
from lockstep.train.step_timer import APART_S, PHASES, Span, StepTimes
from lockstep.train.trace_file import VERSION, TraceFile

WINDOW_S: Final = 0.5
WINDOWS: Final = 1000  # a line covers at least this part of the run so far
PATIENCE: Final = 16  # steps, until what the others have not told counts as told

Told = tuple[float, float, float]  # a step, how long a worker waited in it, and how long it took
NOTHING_TOLD: Final[Told] = (-1.0, 0.0, 0.0)
Known = tuple[float, float] | None  # see `Stopwatch.know`


class Window:
    """Some steps, added up."""

    def __init__(self, began_s: float, known: Known) -> None:
        self.began_s, self._known = began_s, known
        self.first: int | None = None
        self.count = self.timed = self.samples = 0
        self.loss = self._after_s = 0.0
        self.phases = dict.fromkeys(PHASES, 0.0)  # of steps that were timed
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
        """Not every step is timed, and without one that is, a window says little."""
        return now_s - self.began_s >= (WINDOW_S if self.timed else 10 * WINDOW_S)

    def close(self, ended_s: float, known: Known, like: Mapping[str, float] | None = None) -> dict[str, Any]:
        """`like`: the phases of the window before, which stand for this one if none of its steps was timed."""
        whole_s = ended_s - self.began_s
        if not self.timed and like and sum(like.values()) > like["between"]:
            self.phases |= {**like, "between": 0.0}
        phases, times = self._of_all_steps(whole_s, known)
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

    def _of_all_steps(self, whole_s: float, known: Known) -> tuple[dict[str, float], float]:
        """The steps that were timed stand for the others. Also returns for how many each of them stands."""
        phases = dict(self.phases)
        if known is None or self._known is None:
            timed_s = sum(phases.values())
            times = whole_s / timed_s if timed_s else 0.0
            times = min(times, self.count / self.timed) if self.timed else times
            return {name: seconds * times for name, seconds in phases.items()}, times
        (data_s, outside_s), (data_before_s, outside_before_s) = known, self._known
        data_s, outside_s = data_s - data_before_s, outside_s - outside_before_s
        phases["data"] = 0.0
        phases["between"] -= self._after_s
        timed_s = sum(phases.values())
        times = max(0.0, whole_s - data_s - outside_s) / timed_s if timed_s else 0.0
        return {name: seconds * times for name, seconds in phases.items()} | {"data": data_s}, times


def merge(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """Two windows, the second of which followed the first, as one."""
    if one is None:
        return dict(other)
    count = one["count"] + other["count"]
    losses = [part["loss"] * part["count"] for part in (one, other) if part["count"]]
    return {
        **other,
        **{name: one[name] for name in ("t0", "first")},
        "count": count,
        "samples": one["samples"] + other["samples"],
        "phases": _added(one["phases"], other["phases"]),
        "waited_for": _added(one["waited_for"], other["waited_for"]),
        "loss": sum(losses) / count if count else None,
    }


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: round(one.get(name, 0.0) + other.get(name, 0.0), 6) for name in {**one, **other}}


class Chronicle:
    """Of one worker. Without a folder nothing is written."""

    def __init__(self, folder: Path | None, worker: str, device: torch.device) -> None:
        self._worker, self._device = worker, device
        self._file: TraceFile | None = None
        self._began_s = time.monotonic()
        self._window = Window(self._began_s, None)
        self._line: dict[str, Any] | None = None  # of windows that are over
        self._last: dict[str, Any] = {}  # the last one of them, for those who watch
        self._due_s = 0.0  # to catch up
        self._done = 0  # steps
        self._stepped_s = self._began_s  # the end of the last one
        self._noise: dict[str, Any] | None = None
        self._untold: dict[int, StepTimes] = {}  # steps of which we do not know yet how long the others waited
        self._heard: dict[int, dict[int, float]] = {}  # step -> rank -> seconds
        self._tells: Told = NOTHING_TOLD
        self._world: dict[str, Any] = {}
        self._said_world = True
        self._held: list[tuple[str, dict[str, Any]]] = []  # lines that follow what is said of the world
        self._facts: dict[str, Any] = {}
        self._metrics: Mapping[str, float] = {}  # what `run.log` noted last
        self._unwritten: dict[str, tuple[int, float]] = {}  # of them: step and value
        self._metrics_due_s = 0.0  # to write them
        self.state = "starting"
        self.on_window: Callable[[int, Mapping[str, float | None]], None] = lambda _step, _figures: None
        if folder is not None:
            self._file = TraceFile(folder, f"{time.time_ns() // 1_000_000}-{worker}-{os.getpid()}", worker)
            self._file.add("head", **self._introduce())
            self._file.begin(self._now)

    def _introduce(self) -> dict[str, Any]:
        environment = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "threads": torch.get_num_threads(),
        }
        if self._device.type == "cuda":
            environment["GPU"] = torch.cuda.get_device_name(self._device)
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

    # -- what happens ------------------------------------------------------------------------------------------------

    def share_out(self, known: Known, **world: Any) -> None:
        """Other workers, or the first ones. What is said of them is said when their first step is done.

        The window of the workers before them ends here. What comes meanwhile is held back, so that every line of the
        file belongs to the world above it.
        """
        if self._window.count:
            self._close_window(known)
            self._write_line()
        if self._held:  # of workers of which nothing was said
            self._say_world({})
        self._untold.clear()
        self._heard.clear()
        self._tells = NOTHING_TOLD
        self._world, self._said_world = {"t": time.monotonic(), **world}, False

    def begin(self, known: Known) -> None:
        """The first step. What was done before it belongs to no window."""
        self._began_s = time.monotonic()
        self._window = Window(self._began_s, known)
        self.state = "training"

    def note(self, times: StepTimes, *, describe: Any) -> None:
        """A step of ours is over. `describe()`: buckets and memory, which are known by now."""
        self._tells = (float(times.number), times.waited_s, times.took_s)
        if self._world["size"] == 1:
            times.hear([times.waited_s])
            self._add(times)
        else:
            self._untold[times.number] = times
            self._settle(times.number)
        if not self._said_world and times.number > self._world["first"]:
            self._say_world(describe())

    def _say_world(self, facts: Mapping[str, Any]) -> None:
        self._said_world = True
        self._write("world", **self._world, **facts)
        held, self._held = self._held, []
        for kind, line in held:
            self._write(kind, **line)

    def _write(self, kind: str, **line: Any) -> None:
        """Of steps: not before it was said whose they are."""
        if self._file is not None and self._said_world:
            self._file.add(kind, **line)
        elif self._file is not None:
            self._held.append((kind, line))

    def tell(self) -> Told:
        """To the others, with the next step."""
        told, self._tells = self._tells, NOTHING_TOLD
        return told

    def hear(self, told: Sequence[Told]) -> None:
        """From all, us among them, by rank."""
        for rank, (step, waited_s, _) in enumerate(told):
            if step >= 0:
                self._heard.setdefault(int(step), {})[rank] = waited_s
        for step in [step for step, waits in self._heard.items() if len(waits) == len(told)]:
            waits = self._heard.pop(step)
            if (times := self._untold.pop(step, None)) is not None:
                times.hear([waits[rank] for rank in range(len(told))])
                self._add(times)

    def _settle(self, newest: int) -> None:
        if len(self._untold) > PATIENCE:
            for step in [step for step in self._untold if step < newest - PATIENCE]:
                self._add(self._untold.pop(step))
        if len(self._heard) > PATIENCE:
            for step in [step for step in self._heard if step < newest - PATIENCE]:
                del self._heard[step]

    def _add(self, times: StepTimes) -> None:
        self._window.add(times)
        if times.spans and self._file is not None:
            rows = [_row(span) for span in times.spans]
            self._write("spans", step=times.number, t=round(times.began_s, 6), spans=rows)

    def step(self, number: int, loss: float, samples: int, at_s: float) -> bool:
        """It was taken. Returns whether it is time to catch up."""
        window = self._window
        if window.first is None:
            window.first = number
        window.count += 1
        window.samples += samples
        window.loss += loss
        self._done, self._stepped_s = number + 1, at_s
        return at_s >= self._due_s

    def catch_up(self, known: Known, *, epoch: int, facts: Mapping[str, Any]) -> None:
        """`facts`: lr and grad_norm of the last step."""
        at_s = self._stepped_s
        self._due_s = at_s + APART_S
        self._facts = {"epoch": epoch, **facts}
        if self._window.is_done(at_s):
            self._close_window(known)
            assert self._line is not None
            if at_s - self._line["t0"] >= (at_s - self._began_s) / WINDOWS:
                self._write_line()

    def _close_window(self, known: Known) -> None:
        at_s = self._stepped_s
        if self._window.count:
            self._last = self._window.close(at_s, known, self._last.get("phases")) | self._memory()
            self._line = merge(self._line, self._last)
        self._window = Window(at_s, known)

    def _write_line(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        self._write("steps", **line, **self._facts)
        if self._noise is not None:
            self._write("noise", **self._noise)
        self.on_window(self._done, self._figures_of(line))
        self._noise = None

    def _figures_of(self, window: Mapping[str, Any]) -> dict[str, float | None]:
        """For people who look at curves."""
        facts, took_s = self._facts, window["t1"] - window["t0"]
        figures = {"loss": window["loss"], "learning rate": facts.get("lr"), "gradient norm": facts.get("grad_norm")}
        noise = self._noise["scale"] if self._noise is not None else None
        return {**figures, "samples per second": window["samples"] / took_s if took_s else None, "noise scale": noise}

    def _memory(self) -> dict[str, int | None]:
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        return {"rss": _resident_bytes(), "peak": peak}

    def event(self, what: str, **facts: Any) -> None:
        file = self._file  # another thread may close it
        if file is not None:
            line = {"t": time.monotonic(), "step": self._done, "what": what, **facts}
            file.add("event", **line)

    def checkpoint_written(self, one: Written) -> None:
        self.event("checkpoint", step=one.step, took_s=one.took_s, bytes=one.size_bytes)

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before

    def noise(self, **facts: Any) -> None:
        """The last one of a window is written."""
        self._noise = {"t": time.monotonic(), **facts}

    def log(self, step: int, metrics: Mapping[str, float], *, writes: bool) -> None:
        """What `run.log` noted after so many steps. One worker writes; of what comes fast, the last value of each."""
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

    def close(self, known: Known, *, in_peace: bool) -> None:
        """An evaluation after the last step is no part of the steps."""
        if self._file is None:
            return
        self.state = "ended" if in_peace else "failed"
        for step in sorted(self._untold):
            self._add(self._untold.pop(step))
        self._close_window(known)
        self._write_line()
        if self._held:
            self._say_world({})
        self._write_metrics()
        if in_peace:
            self._file.add("end", t=time.monotonic(), step=self._done)
        self._file.close()
        self._file = None

    # -- how things are ----------------------------------------------------------------------------------------------

    def _now(self) -> dict[str, Any] | None:
        """By the thread of the file."""
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
                for name in ("rank", "size", "generation", "steps", "global_batch_size", "backend")
            },
            **self._facts,
            "step": self._done,
            "loss": last.get("loss"),
            "samples_per_s": last["samples"] / took_s if took_s else None,
            **{name: last.get(name) for name in ("phases", "waited_for", "rss", "peak")},
            "state": self.state,
            "metrics": dict(self._metrics),
        }


def _row(span: Span) -> list[Any]:
    return [span.name, span.track, round(span.start_s * 1e6, 1), round(span.took_s * 1e6, 1)]


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
