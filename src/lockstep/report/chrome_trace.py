"""Converts a trace to Chrome trace events, for Perfetto and chrome://tracing. Pure.

Each worker is a process with the threads main and comm; process 0 holds values that are equal on all workers. Times are
in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from lockstep.report.generations import TimelineExcerpt, TraceGeneration, merge_windows
from lockstep.report.trace_reader import TRACKS, Trace

_COLORS: Final = {
    "data": "thread_state_iowait",
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "wait": "terrible",
    "update": "good",
    "between": "grey",
    "bucket": "rail_load",
}


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
