"""`lockstep report`: shows where the time of a run went, in the terminal and as an HTML page."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.report.generations import find_excerpts, find_generations
from lockstep.report.page import render_page, to_chrome, to_json_value
from lockstep.report.summary import Curve, RunEvent, RunSummary, summarize
from lockstep.report.table import columns, render
from lockstep.report.time_shares import OTHER, TimeUsage, ms, percent
from lockstep.report.trace_reader import PHASES, Trace, read_trace

MOST_ROWS: Final = 16  # workers in the table
MOST_METRICS: Final = 8
MOST_EVENTS: Final = 10
ROUTINE: Final = ("checkpoint", "evaluate")
_ABOUT: Final = """\
Show where the time of a run went, which worker was waited for and why, and what to change; from the trace that every
lockstep.Run writes. Writes an HTML page, which needs no network, and a timeline for Perfetto. The run may still be
running.
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
    summary = summarize(trace)
    page: Path | None = chosen.out
    timeline: Path | None = chosen.trace
    if not chosen.json:
        page = page or chosen.run / "report.html"
        timeline = timeline or page.parent / "trace.json"
    # First, since writing the files may fail.
    planned = read_planned(chosen.run, summary)
    if chosen.json:
        print(json.dumps(to_json_value(summary) | {"planned": planned}, allow_nan=False))
    else:
        print(as_text(summary) + (f"{_planned_text(planned)}\n" if planned is not None else ""))
    written = [_write_page(page, trace, summary, now_s)] if page is not None else []
    written += [_write_timeline(timeline, trace)] if timeline is not None else []
    if not chosen.json:
        print("\n".join(written))
    return 0


def write_report(run: Path) -> Path:
    """Writes the page and the timeline into the directory of the run. Returns the path of the page."""
    now_s, page = time.time(), run / "report.html"
    trace = read_trace(run, now_s=now_s)
    _write_page(page, trace, summarize(trace), now_s)
    _write_timeline(run / "trace.json", trace)
    return page


def _write_page(path: Path, trace: Trace, summary: RunSummary, now_s: float) -> str:
    return _write(path, render_page(trace, summary, as_text(summary), written_s=now_s))


def _write_timeline(path: Path, trace: Trace) -> str:
    generations = find_generations(trace)
    return _write(path, json.dumps(to_json_value(to_chrome(trace, generations, find_excerpts(generations)))))


def as_text(summary: RunSummary) -> str:
    steps = (
        f"{summary.steps_done}" if summary.steps_in_all is None else f"{summary.steps_done} of {summary.steps_in_all}"
    )
    workers = f"{summary.workers} worker{'s' * (summary.workers != 1)}"
    lines = [f"{summary.name}: {steps} steps on {workers} in {ms(summary.elapsed_s)}; {summary.status.value}", ""]
    worst, *others = summary.causes
    lines += [worst.sentence, f"-> {worst.advice}", *(f"Also: {cause.sentence}" for cause in others[:3]), ""]
    if summary.total.steps:
        lines += [*_table(summary), ""]
    if summary.compute_share is not None:
        lines.append(f"efficiency  {percent(summary.compute_share)} of a worker's time is forward, backward and update")
    if summary.scaling is not None:
        scaling = summary.scaling
        lines.append(
            f"scaling     {percent(scaling.efficiency)}: {scaling.samples_per_s:,.1f} samples/s on {scaling.workers} "
            f"workers, {scaling.alone_per_s:,.1f} on one, both in this run"
        )
    if summary.samples_per_s is not None:
        lines.append(f"throughput  {summary.samples_per_s:,.1f} samples/s")
    if summary.noise is not None:
        lines.append(f"noise       {summary.noise.advice}")
    if summary.metrics:
        lines.append(f"metrics     {_metrics(summary.metrics)}")
    lines += [f"{'events' * (not n):12}{line}" for n, line in enumerate(_events(summary.happenings))]
    if summary.left_out:
        lines.append(f"{summary.left_out} lines of the trace could not be read and are left out")
    # Names come from the trace: an unprintable character could be part of a terminal control sequence.
    text = "\n".join(lines).replace("`", "")
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text) + "\n"


def read_planned(run: Path, summary: RunSummary) -> dict[str, Any] | None:
    """What `lockstep plan --for RUN` has predicted for this number of workers and batch size, beside what was measured.

    None if there is no plan, or none for them.
    """
    try:
        forecasts = json.loads((run / "plan.json").read_text())["forecasts"]
        same = [
            one
            for one in forecasts
            if (one["workers"], one["global_batch_size"]) == (summary.workers, summary.global_batch_size)
        ]
        same.sort(key=lambda one: not one["is_best"])
        if not same or summary.samples_per_s is None or not summary.global_batch_size:
            return None
        step_ms = {name: float(same[0]["step_ms"][name]) for name in ("low", "mid", "high")}
        measured_ms = 1e3 * summary.global_batch_size / summary.samples_per_s
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"name": str(same[0]["name"]), "predicted_ms": step_ms, "measured_ms": measured_ms}


def _planned_text(planned: dict[str, Any]) -> str:
    predicted, measured = planned["predicted_ms"], planned["measured_ms"]
    between = f"{predicted['low']:.4g} to {predicted['high']:.4g}"
    inside = "inside" if predicted["low"] <= measured <= predicted["high"] else "outside of"
    text = f"planned     {predicted['mid']:.4g} ms a step ({between}) were predicted for {planned['name']!r}; "
    return text + f"{measured:.4g} ms were measured, {inside} the interval"


def _metrics(curves: Sequence[Curve]) -> str:
    """Returns the last value of each metric and the step at which it was logged."""
    shown = [f"{one.name} {_value(one.last)} at step {one.points[-1][0]}" for one in curves[:MOST_METRICS]]
    left_out = len(curves) - len(shown)
    return ", ".join(shown) + (f" ({left_out} more; --json has all)" if left_out else "")


def _value(last: float | None) -> str:
    return "never finite" if last is None else f"{last:.4g}"


def _events(events: Sequence[RunEvent]) -> list[str]:
    """Returns lines for events that are not routine, with the time since the run began."""
    some = [one for one in events if one.what not in ROUTINE]
    lines = [f"after {ms(max(0.0, one.at_s))}: {_event(one)}" for one in some[:MOST_EVENTS]]
    left_out = len(some) - len(lines)
    return [*lines, f"({left_out} more; --json has all)"] if left_out else lines


def _event(one: RunEvent) -> str:
    what = f"{one.what} {one.text}" if one.what in ("training", "resumed") else one.text or one.what
    return what + (f" ({ms(one.took_s)})" if one.took_s is not None else "")


def _table(summary: RunSummary) -> list[str]:
    phases = [name for name in (*PHASES, OTHER) if name != OTHER or summary.total.phases[OTHER] > 0]
    late = {one.worker: one.seconds for one in summary.late}
    some = sorted(summary.usages, key=lambda usage: -late.get(usage.worker, 0.0))[:MOST_ROWS]
    shown = [usage for usage in summary.usages if usage in some]
    usages = [*shown, summary.total] if len(summary.usages) > 1 else shown
    titles = columns("worker", ">steps", ">per step", *(f">{phase}" for phase in phases))
    lines = render(titles, [_row(usage, phases) for usage in usages]).split("\n")
    left_out = len(summary.usages) - len(shown)
    return [*lines, f"({left_out} more workers, which were waited for less; --json has all)"] if left_out else lines


def _row(usage: TimeUsage, phases: list[str]) -> list[str]:
    steps = "" if usage.rank is None else str(usage.steps)  # the sum over all workers would be misleading
    return [usage.worker, steps, ms(usage.per_step_s()), *(percent(usage.share(name)) for name in phases)]


def _write(path: Path, text: str) -> str:
    """Writes the file atomically: readers see the old or the new one. Returns a line with its path and size."""
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
