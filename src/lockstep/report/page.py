"""Renders the report of a run as one self-contained HTML page, and its trace as Chrome trace events. Pure.

Content of the trace is embedded as escaped text, or as JSON without any `<`, which the script inserts as text only. In
addition, the page's content security policy allows only that script, and no network access.

In the Chrome trace, for Perfetto and chrome://tracing, each worker is a process with the threads main and comm; process
0 holds values that are equal on all workers. Times are in microseconds.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from importlib.resources import files
from typing import Any, Final

from lockstep.report.generations import (
    TimelineExcerpt,
    TraceGeneration,
    choose_excerpt,
    find_excerpts,
    find_generations,
    merge_windows,
    waited_us,
)
from lockstep.report.summary import RunSummary, Status
from lockstep.report.trace_reader import TRACKS, DetailedStep, Trace, TraceSpan
from lockstep.version import __version__

MOST_SPANS: Final = 12_000  # in the page; trace.json has all
MOST_TRACE_BYTES: Final = 300_000  # compressed
MOST_EVENTS: Final = 200
MOST_WAITS: Final = 400
_UNIT: Final = re.compile(r"(?<=\d) (?=%|ms|s|µs)")  # a figure and its unit stay on one line
_CODE: Final = re.compile(r"`([^`]+)`")
_COLORS: Final = {
    "data": "thread_state_iowait",
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "wait": "terrible",
    "update": "good",
    "between": "grey",
    "bucket": "rail_load",
}
_CLASSES: Final = {Status.ENDED: "ended", Status.RUNNING: "going-on", Status.INTERRUPTED: "broken-off"}


def render_page(trace: Trace, summary: RunSummary, text: str, *, written_s: float) -> str:
    """Returns the page. `text` is for a browser that runs no script."""
    generations = find_generations(trace)
    excerpts = find_excerpts(generations)
    kept = thin_out_excerpts(excerpts)
    packed = gzip.compress(json.dumps(to_json_value(to_chrome(trace, generations, kept))).encode(), mtime=0)
    few = replace(summary, waits=summary.waits[:MOST_WAITS], happenings=_select_events(summary))
    data = {
        "story": to_json_value(few),
        "scenes": [compact(excerpt, generations) for excerpt in kept],
        "best": choose_excerpt(kept),
        "scenes_left_out": len(excerpts) - len(kept),
        "happenings_left_out": len(summary.happenings) - len(few.happenings),
        "begun": _format_time(summary.begin_s),
        "written": _format_time(written_s),
        "version": __version__,
    }
    script = read_part("report.js")
    worst = summary.causes[0]
    values = {
        "TITLE": html.escape(f"{summary.name}: Lockstep report"),
        "NAME": html.escape(summary.name),
        "STATUS": html.escape(summary.status.value),
        "STATUS_CLASS": _CLASSES[summary.status],
        "HEADLINE": mark_code(_UNIT.sub("\u00a0", worst.sentence)),
        "ADVICE": mark_code(worst.advice),
        "TEXT": html.escape(text),
        "CSS": read_part("report.css"),
        "JS": script,
        "HASH": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "DATA": embed(data),
        "TRACE": base64.b64encode(packed).decode() if len(packed) <= MOST_TRACE_BYTES else "",
    }
    return fill_template(read_part("report.html"), values)


def mark_code(text: str) -> str:
    """Escapes text, and marks what is between backticks as code. An unpaired backtick stays."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def embed(data: object) -> str:
    """Returns JSON that is safe inside a script element: it cannot end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def to_json_value(value: Any) -> Any:
    """Converts to JSON types. Floats, which are measured times, keep six digits; NaN and infinity become None."""
    if is_dataclass(value) and not isinstance(value, type):
        more = {"efficiency": value.efficiency} if hasattr(value, "efficiency") else {}
        return to_json_value({name: getattr(value, name) for name in value.__dataclass_fields__} | more)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): to_json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if value.is_integer() or abs(value) > 1e6 else float(f"{value:.6g}")
    return value


def thin_out_excerpts(excerpts: list[TimelineExcerpt]) -> list[TimelineExcerpt]:
    """Returns as many as fit into a page: the first, the last, and those in between thinned out evenly."""
    kept = list(excerpts)
    while len(kept) > 1 and sum(excerpt.spans for excerpt in kept) > MOST_SPANS:
        kept = [excerpt for i, excerpt in enumerate(kept[:-1]) if i % 2 == 0 and len(kept) > 2] + kept[-1:]
    if kept and kept[0].spans > MOST_SPANS:  # a single excerpt with very many workers: keep the first workers
        most = max(1, len(kept[0].generation.members) * MOST_SPANS // kept[0].spans)
        few = {step: dict(sorted(by_rank.items())[:most]) for step, by_rank in kept[0].steps.items()}
        kept = [TimelineExcerpt(kept[0].generation, few)]
    return kept


def compact(excerpt: TimelineExcerpt, generations: list[TraceGeneration]) -> dict[str, Any]:
    """Returns spans as [name index, start, duration, step], in microseconds since the excerpt began."""
    names: dict[str, int] = {}
    begin_s = excerpt.begin_s
    complete = {step: by_rank for step, by_rank in excerpt.steps.items() if len(by_rank) == excerpt.generation.size}
    least_us = {step: min(map(waited_us, by_rank.values())) for step, by_rank in complete.items()}
    rows: dict[int, dict[str, Any]] = {}
    for step, by_rank in excerpt.steps.items():
        for rank, detailed in by_rank.items():
            row = rows.setdefault(rank, {"worker": excerpt.generation.name_of(rank), **{track: [] for track in TRACKS}})
            shift_us = 1e6 * (detailed.begin_s - begin_s)
            for span in split_wait(detailed, least_us.get(step, 0.0)):
                name = names.setdefault(span.name, len(names))
                row[span.track].append([name, round(shift_us + span.start_us), round(span.took_us), step])
    starts = {step: min(one.begin_s for one in by_rank.values()) for step, by_rank in excerpt.steps.items()}
    ends = [
        one.begin_s + max(span.start_us + span.took_us for span in one.spans) / 1e6
        for by_rank in excerpt.steps.values()
        for one in by_rank.values()
    ]
    first, last = min(excerpt.steps), max(excerpt.steps)
    label = f"step {first}" if first == last else f"steps {first} to {last}"
    if len(generations) > 1:
        label += f" on {excerpt.generation.size} worker{'s' * (excerpt.generation.size != 1)}"
    return {
        "label": label,
        "names": list(names),
        "rows": [row for _, row in sorted(rows.items())],
        "steps": [[step, round(1e6 * (start_s - begin_s))] for step, start_s in starts.items()],
        "length": max(1, round(1e6 * (max(ends) - begin_s))),
    }


def split_wait(detailed: DetailedStep, least_us: float) -> list[TraceSpan]:
    """Splits a wait: the last worker to arrive waited least, for communication; longer waits were for that worker."""
    spans = []
    for span in detailed.spans:
        for_others_us = span.took_us - least_us
        if span.name != "wait" or least_us <= 0 or for_others_us < 0 or waited_us(detailed) != span.took_us:
            spans.append(span)
            continue
        if for_others_us > 0:
            spans.append(TraceSpan("wait for others", span.track, span.start_us, for_others_us))
        spans.append(TraceSpan("communication", span.track, span.start_us + for_others_us, least_us))
    return spans


def _select_events(summary: RunSummary) -> list[Any]:
    """Returns at most MOST_EVENTS events: the latest, and checkpoints and evaluations only if there is space left."""
    found = summary.happenings
    if len(found) <= MOST_EVENTS:
        return found
    order = sorted(found, key=lambda one: (one.what in ("checkpoint", "evaluate"), -one.at_s))
    return sorted(order[:MOST_EVENTS], key=lambda one: one.at_s)


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Replaces each @@NAME@@ in one pass, so placeholders inside a value are not replaced."""
    pieces = template.split("@@")
    return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def read_part(name: str, *, package: str = "lockstep.report") -> str:
    """Returns a file of the folder `page` of a package: a template, a style sheet or a script."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _format_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown time"


# ---- Chrome trace ----------------------------------------------------------------------------------------------------


def to_chrome(trace: Trace, generations: list[TraceGeneration], excerpts: Sequence[TimelineExcerpt]) -> dict[str, Any]:
    """Returns the trace in Chrome's JSON format, with the spans of these excerpts only."""
    workers = list(dict.fromkeys(process.head.worker for process in trace.processes))
    pids = {worker: pid for pid, worker in enumerate(workers, start=1)}
    events = [
        *_names(trace, pids),
        *_spans(trace, excerpts, pids),
        *_instants(trace, pids),
        *_counters(trace, generations),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": trace.name}}


def _names(trace: Trace, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    hosts = {process.head.worker: process.head.host for process in trace.processes}
    yield _meta("process_name", 0, {"name": f"run {trace.name}"})
    for worker, pid in pids.items():
        has_host = not hosts[worker] or worker.endswith(f" on {hosts[worker]}")
        yield _meta("process_name", pid, {"name": worker if has_host else f"{worker} on {hosts[worker]}"})
        yield _meta("process_sort_index", pid, {"sort_index": pid})
        for tid, track in enumerate(TRACKS, start=1):
            yield _meta("thread_name", pid, {"name": track}, tid)
            yield _meta("thread_sort_index", pid, {"sort_index": tid}, tid)


def _spans(trace: Trace, excerpts: Sequence[TimelineExcerpt], pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    for excerpt in excerpts:
        for step, by_rank in excerpt.steps.items():
            for rank, detailed in by_rank.items():
                begin_us = 1e6 * (detailed.begin_s - trace.begin_s)
                for span in detailed.spans:
                    event = {
                        "name": span.name,
                        "cat": span.track,
                        "ph": "X",
                        "ts": round(begin_us + span.start_us, 1),
                        "dur": round(span.took_us, 1),
                        "pid": pids[excerpt.generation.name_of(rank)],
                        "tid": TRACKS.index(span.track) + 1,
                        "args": {"step": step},
                    }
                    color = _COLORS.get(span.name.partition(" ")[0])
                    yield event | ({"cname": color} if color else {})


def _instants(trace: Trace, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    for process in trace.processes:
        for event in process.events:
            args = {"step": event.step, "text": event.text, "took_s": event.took_s, "bytes": event.bytes}
            yield {
                "name": event.what,
                "cat": "event",
                "ph": "i",
                "s": "p",
                "ts": round(1e6 * (event.at_s - trace.begin_s), 1),
                "pid": pids[process.head.worker],
                "tid": 1,
                "args": {name: value for name, value in args.items() if value not in (None, "")},
            }


def _counters(trace: Trace, generations: list[TraceGeneration]) -> Iterator[dict[str, Any]]:
    for window in merge_windows(generations):
        ts = round(1e6 * (window.end_s - trace.begin_s), 1)
        speed = window.samples / window.took_s if window.took_s > 0 else None
        for name, value in (("loss", window.loss), ("samples/s", speed)):
            if value is not None and math.isfinite(value):
                yield {"name": name, "ph": "C", "ts": ts, "pid": 0, "args": {name: value}}


def _meta(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
