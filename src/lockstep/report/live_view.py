"""Shows the progress of a run in a terminal, or as plain lines without one. It only reads files that workers write.

    lockstep watch runs/digits            from another terminal, while the run is in progress
    lockstep run -n 4 train.py            shows the same below the output of the workers

The launcher does not draw: it pipes its output to a process of its own, `show_below_output` (launcher/output.py).
"""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import LockstepError
from lockstep.report.live_status import COMPUTE, Snapshot, WorkerStatus, read_status
from lockstep.report.run_folder import RunPaths, find_run, require_run

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

REFRESH_S: Final = 0.5  # longer where a refresh would cost more than CPU_SHARE
MAX_REFRESH_S: Final = 5.0
CPU_SHARE: Final = 0.002  # of all cores, which the view may use
PLAIN_EVERY_S: Final = 5.0
EVENTS_SHOWN: Final = 4
FIRST_WORKERS: Final = 16  # more rows do not fit on a screen
FINISHED: Final = ("ended", "failed")
VARIABLE: Final = "LOCKSTEP_VIEW"  # set for workers whose progress is shown


# ---- as text ---------------------------------------------------------------------------------------------------------


def describe(now: Snapshot) -> str:
    """Returns the state of a run as one line of text."""
    of = f"/{now.steps}" if now.steps is not None else ""
    parts = [f"step {now.step}{of}", f"epoch {now.epoch}"]
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4g}")
    if now.samples_per_s:
        parts.append(f"{now.samples_per_s:,.0f} samples/s")
    if now.left_s is not None and now.state == "training":
        parts.append(f"{in_time(now.left_s)} left")
    if now.efficiency is not None:
        parts.append(f"{now.efficiency:.0%} computing")
    parts += [f"{name} {value:.4g}" for name, value in now.metrics.items()]
    count = f"{len(now.workers)} worker{'s' * (len(now.workers) != 1)}"
    return "  ".join([*parts, count, now.state])


def in_time(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ---- as a rich panel -------------------------------------------------------------------------------------------------


def draw(now: Snapshot | None) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if now is None:
        return Panel(Text("waiting for the first step", style="dim"), title="lockstep", title_align="left")
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    of = f" of {now.steps:,}" if now.steps is not None else ""
    left = f"{in_time(now.left_s)} left" if now.left_s is not None and now.state == "training" else now.state
    step = Text.assemble("step ", (f"{now.step:,}", "bold"), of)
    bar = ProgressBar(total=now.steps or 1, completed=now.step, complete_style="cyan", finished_style="green")
    head.add_row(step, bar, left)
    figures = [
        ("epoch", str(now.epoch)),
        ("loss", "" if now.loss is None else f"{now.loss:.4g}"),
        *((name, f"{value:.4g}") for name, value in now.metrics.items()),
        ("lr", "" if now.lr is None else f"{now.lr:.3g}"),
        ("batch", str(now.global_batch_size or "")),
        ("samples/s", f"{now.samples_per_s:,.0f}" if now.samples_per_s else ""),
        ("computing", f"{now.efficiency:.0%}" if now.efficiency is not None else ""),
        ("lost workers", str(now.lost) if now.lost else ""),
    ]
    shown = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures if value]
    parts: list[Any] = [head, WrappedRow(shown), _table(now.workers), *_memory(now.workers)]
    for event in now.events[-EVENTS_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
        parts.append(Text.assemble((f"{at}  ", "dim"), event.text))
    return Panel(Group(*parts), title="lockstep", title_align="left", border_style="cyan")


class WrappedRow:
    """Texts side by side; a text that does not fit starts the next line and is not broken."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = self._texts[0].copy()
        for text in self._texts[1:]:
            if line.cell_len + 2 + text.cell_len > options.max_width:
                yield line
                line = text.copy()
            else:
                line.append("  ").append_text(text)
        yield line


def _table(workers: Sequence[WorkerStatus]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("computes", "data", "exposed", "waits", "for", "memory", "restarts", "pid"):
        table.add_column(name, justify="left" if name == "for" else "right")
    for worker in workers[:FIRST_WORKERS]:
        shares = worker.shares
        compute = sum(shares.get(name, 0.0) for name in COMPUTE)
        shown = [compute, shares.get("data", 0.0), shares.get("exposed", 0.0), shares.get("waiting", 0.0)]
        cells = [Text(f"{share:.0%}", style="" if n == 0 or share < 0.2 else "yellow") for n, share in enumerate(shown)]
        whom = worker.waited_for if shown[3] > 0.02 else ""
        about = [Text(worker.name), *(cells if shares else [Text()] * 4)]
        table.add_row(
            *about,
            Text(whom),
            Text(_size(worker.memory_bytes)),
            Text(str(worker.restarts or "")),
            Text(str(worker.pid)),
        )
    if len(workers) > FIRST_WORKERS:
        table.add_row(f"and {len(workers) - FIRST_WORKERS} more")
    return table


def _memory(workers: Sequence[WorkerStatus]) -> Iterator[RenderableType]:
    """Yield a line that tells what the worker with the most memory uses it for; none before that is known."""
    from rich.text import Text

    largest = max(workers, key=lambda worker: worker.memory_bytes, default=None)
    if largest is not None and largest.memory:
        parts = {name: size for name, size in largest.memory.items() if size and name != "saved"}
        parts["rest"] = max(0.0, largest.memory_bytes - sum(parts.values()))
        cells = [Text.assemble((f"{name} ", "dim"), _size(size)) for name, size in parts.items()]
        yield WrappedRow([Text(f"memory of {largest.name}:", style="dim"), *cells])


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# ---- watching --------------------------------------------------------------------------------------------------------


def can_draw() -> bool:
    """Returns whether the output is a terminal that can redraw lines, and rich is installed."""
    if not (os.isatty(1) and os.isatty(2)) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        import rich.live  # noqa: F401
    except ImportError:
        return False
    return True


class RefreshTimer:
    """Decides when to refresh next. Where all cores are busy, the view takes its time from the run."""

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._due_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures what a refresh costs, and sets when the next one is due."""
        began_s = time.process_time()
        try:
            yield
        finally:
            cost_s = time.process_time() - began_s
            self._due_s = time.monotonic() + min(MAX_REFRESH_S, max(REFRESH_S, cost_s / (CPU_SHARE * self._cores)))

    @property
    def left_s(self) -> float:
        return max(0.0, self._due_s - time.monotonic())


def watch(paths: RunPaths, *, plain: bool) -> None:
    """Shows the run until it has ended."""
    if plain:
        _watch_plain(paths)
        return
    from rich.live import Live

    timer = RefreshTimer()
    with Live(draw(read_status(paths)), auto_refresh=False) as live:
        while True:
            with timer.measure():
                now = read_status(paths)
                live.update(draw(now), refresh=True)
            if now is not None and now.state in FINISHED:
                return
            time.sleep(timer.left_s)


def _watch_plain(paths: RunPaths) -> None:
    printed_s, last, timer = 0.0, "", RefreshTimer()
    while True:
        with timer.measure():
            now = read_status(paths)
        if now is not None and (now.state in FINISHED or time.monotonic() - printed_s >= PLAIN_EVERY_S):
            if (line := describe(now)) != last:
                print(line, flush=True)
            printed_s, last = time.monotonic(), line
            if now.state in FINISHED:
                return
        time.sleep(timer.left_s)


def _try_draw(paths: RunPaths, since_s: float) -> RenderableType | None:
    """Returns None if there is nothing to show yet, or if it cannot be drawn."""
    with suppress(Exception):  # a failed drawing must not end the view
        now = read_status(paths, since_s=since_s)
        return None if now is None else draw(now)
    return None


def show_below_output(logs: Path) -> None:
    """Main function of the view process of a launcher: copies standard input, and shows the run's progress below it."""
    from rich.console import Console
    from rich.live import Live

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C; this process ends with its input
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not support every character
    console = Console(highlight=False, emoji=False)
    rest, timer, since_s = b"", RefreshTimer(), time.time()
    paths = find_run(logs)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            ready = select.select([0], [], [], timer.left_s)[0]
            if ready:
                chunk = os.read(0, 1 << 16)
                *lines, rest = (rest + chunk).split(b"\n")
                if lines:
                    # A progress bar overwrites itself with carriage returns; its last state is shown.
                    last_states = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
                    text = b"\n".join(last_states).decode(errors="replace")
                    console.print(text, markup=False, soft_wrap=True)
                if not chunk:
                    break
            if timer.left_s == 0:
                with timer.measure():
                    paths = paths if paths.trace.is_dir() else find_run(logs)
                    live.update(_try_draw(paths, since_s) or "", refresh=True)
    now = read_status(paths, since_s=since_s)
    if now is not None and now.state == "ended":  # after a failure the output ends with its error
        console.print(draw(now))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep watch",
        description="Show the progress of a run, its metrics, and what each worker spends its time on.",
        epilog="Ctrl-C ends the view, not the run.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a lockstep.Run, or its launcher's logs")
    parser.add_argument(
        "--plain", action="store_true", help="print lines instead of a live view (the default without a terminal)"
    )
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    chosen = parser.parse_args(arguments)
    try:
        paths = require_run(chosen.run)
        if chosen.once:
            now = read_status(paths)
            print(describe(now) if now is not None else "waiting for the first step")
            return 0
        watch(paths, plain=chosen.plain or not can_draw())
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    show_below_output(Path(sys.argv[1]))
