"""`lockstep report`: where the time of a run went, in the terminal and as a page."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import LockstepError
from lockstep.report.chrome_trace import to_chrome
from lockstep.report.curves import Curve
from lockstep.report.generations import find_eras, find_scenes
from lockstep.report.page import Shown, render, to_plain
from lockstep.report.slowdown_causes import ms, percent
from lockstep.report.summary import Happening, Story, tell
from lockstep.report.time_shares import OTHER, Usage
from lockstep.report.trace_reader import PHASES, Trace, read_trace

MOST_ROWS: Final = 16  # of workers
MOST_METRICS: Final = 8
MOST_EVENTS: Final = 10
ROUTINE: Final = ("checkpoint", "evaluate")
_ABOUT: Final = """\
Say where the time of a run went, who was waited for and why, and what to change; from the trace that every lockstep.Run
leaves. Writes a page to look at, which needs no network, and the timeline for Perfetto. A run that goes on is fine.
"""
_MORE: Final = """\
examples:
  lockstep report runs/digits                    the directory of a lockstep.Run
  lockstep report lockstep-logs/20260901-1200    the folder of logs that `lockstep run` prints
  lockstep report runs/digits --out page.html --trace timeline.json
  lockstep report runs/digits --json | jq .causes[0]

Efficiency is the share of a worker's time in which it computes: forward, backward and update, over all of the step.
Exit status: 0 when the report was made; 1 when there is no trace, or a file cannot be written; 2 for wrong arguments.
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep report",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, or its folder of logs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the page (default: RUN/report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for the timeline (default: trace.json beside it)")
    parser.add_argument("--json", action="store_true", help="print all figures for programs; files only if asked for")
    chosen = parser.parse_args(argv)
    try:
        return _report(chosen)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1


def _report(chosen: argparse.Namespace) -> int:
    now_s = time.time()
    trace = read_trace(chosen.run, now_s=now_s)
    story = tell(trace)
    page: Path | None = chosen.out
    timeline: Path | None = chosen.trace
    if not chosen.json:
        page = page or chosen.run / "report.html"
        timeline = timeline or page.parent / "trace.json"
    print(json.dumps(to_plain(story), allow_nan=False) if chosen.json else as_text(story))  # first: a disk may be full
    written = []
    if page is not None:
        written.append(_write(page, _page(trace, story, now_s)))
    if timeline is not None:
        written.append(_write(timeline, _timeline(trace)))
    if not chosen.json:
        print("\n".join(written))
    return 0


def write_report(run: Path) -> Path:
    """The page and the timeline, in the directory of the run. Returns where the page is."""
    now_s, page = time.time(), run / "report.html"
    trace = read_trace(run, now_s=now_s)
    _write(page, _page(trace, tell(trace), now_s))
    _write(run / "trace.json", _timeline(trace))
    return page


def _page(trace: Trace, story: Story, now_s: float) -> str:
    return render(Shown(trace, story, as_text(story)), written_s=now_s)


def _timeline(trace: Trace) -> str:
    eras = find_eras(trace)
    return json.dumps(to_plain(to_chrome(trace, eras, find_scenes(eras))))


def as_text(story: Story) -> str:
    steps = f"{story.steps_done}" if story.steps_in_all is None else f"{story.steps_done} of {story.steps_in_all}"
    workers = f"{story.workers} worker{'s' * (story.workers != 1)}"
    lines = [f"{story.name}: {steps} steps on {workers} in {ms(story.elapsed_s)}; {story.status.value}", ""]
    worst, *others = story.causes
    lines += [worst.sentence, f"-> {worst.advice}", *(f"Also: {cause.sentence}" for cause in others[:3]), ""]
    if story.total.steps:
        lines += [*_table(story), ""]
    if story.compute_share is not None:
        lines.append(f"efficiency  {percent(story.compute_share)} of a worker's time is forward, backward and update")
    if story.scaling is not None:
        scaling = story.scaling
        lines.append(
            f"scaling     {percent(scaling.efficiency)}: {scaling.samples_per_s:,.1f} samples/s on {scaling.workers} "
            f"workers, {scaling.alone_per_s:,.1f} on one, both in this run"
        )
    if story.samples_per_s is not None:
        lines.append(f"throughput  {story.samples_per_s:,.1f} samples/s")
    if story.noise is not None:
        lines.append(f"noise       {story.noise.advice}")
    if story.metrics:
        lines.append(f"metrics     {_metrics(story.metrics)}")
    lines += [f"{'events' * (not n):12}{line}" for n, line in enumerate(_events(story.happenings))]
    if story.left_out:
        lines.append(f"{story.left_out} lines of the trace could not be read and are left out")
    # Names come from the trace: what is no sign to be read could command the terminal.
    text = "\n".join(lines).replace("`", "")
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text) + "\n"


def _metrics(curves: Sequence[Curve]) -> str:
    """The last value of each, and the step at which it was noted."""
    told = [f"{one.name} {_value(one.last)} at step {one.points[-1][0]}" for one in curves[:MOST_METRICS]]
    left_out = len(curves) - len(told)
    return ", ".join(told) + (f" ({left_out} more; --json has all)" if left_out else "")


def _value(last: float | None) -> str:
    return "never finite" if last is None else f"{last:.4g}"


def _events(happenings: Sequence[Happening]) -> list[str]:
    """Those that are not routine, with the time since the begin of the run."""
    some = [one for one in happenings if one.what not in ROUTINE]
    lines = [f"after {ms(max(0.0, one.at_s))}: {_event(one)}" for one in some[:MOST_EVENTS]]
    left_out = len(some) - len(lines)
    return [*lines, f"({left_out} more; --json has all)"] if left_out else lines


def _event(one: Happening) -> str:
    what = f"{one.what} {one.text}" if one.what in ("training", "resumed") else one.text or one.what
    return what + (f" ({ms(one.took_s)})" if one.took_s is not None else "")


def _table(story: Story) -> list[str]:
    phases = [name for name in (*PHASES, OTHER) if name != OTHER or story.total.phases[OTHER] > 0]
    late = {one.worker: one.seconds for one in story.late}
    some = sorted(story.usages, key=lambda usage: -late.get(usage.worker, 0.0))[:MOST_ROWS]
    shown = [usage for usage in story.usages if usage in some]
    usages = [*shown, story.total] if len(story.usages) > 1 else shown
    rows = [["worker", "steps", "per step", *phases], *(_row(usage, phases) for usage in usages)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    left_out = len(story.usages) - len(shown)
    return [*lines, f"({left_out} more workers, which were waited for less; --json has all)"] if left_out else lines


def _row(usage: Usage, phases: list[str]) -> list[str]:
    steps = "" if usage.rank is None else str(usage.steps)  # those of all workers together would only confuse
    return [usage.worker, steps, ms(usage.per_step_s()), *(percent(usage.share(name)) for name in phases)]


def _write(path: Path, text: str) -> str:
    """Whole or not at all: who looks meanwhile sees the old one. Returns a line that says what was written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise LockstepError(
            f"{path} cannot be written: {error.strerror}; choose other files with --out and --trace"
        ) from None
    return f"{path}  ({len(text.encode()) / 1e3:,.0f} kB)"
