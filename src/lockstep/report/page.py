"""The page of a run: one HTML file that needs nothing else. Pure.

What comes from the trace reaches the page as escaped text or as JSON in which no `<` is left, and its script puts it in
as text only. Besides, the page's own policy lets nothing run but that script, and nothing be fetched.
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
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from importlib.resources import files
from typing import Any, Final

from lockstep import __version__
from lockstep.report.bucket_overlap import waited_us
from lockstep.report.chrome_trace import to_chrome
from lockstep.report.generations import Era, Scene, choose_scene, find_eras, find_scenes
from lockstep.report.summary import Status, Story
from lockstep.report.trace_reader import TRACKS, Closeup, Span, Trace

MOST_SPANS: Final = 12_000  # in the page; trace.json has all
MOST_TRACE_BYTES: Final = 300_000  # packed
MOST_HAPPENINGS: Final = 200
MOST_WAITS: Final = 400
_UNIT: Final = re.compile(r"(?<=\d) (?=%|ms|s|µs)")  # a figure and its unit stay on one line
_CODE: Final = re.compile(r"`([^`]+)`")
_CLASSES: Final = {Status.ENDED: "ended", Status.GOING_ON: "going-on", Status.BROKEN_OFF: "broken-off"}


@dataclass(frozen=True)
class Shown:
    """What a page shows, ready to be drawn."""

    trace: Trace
    story: Story
    text: str  # for a browser that runs no script


def render(shown: Shown, *, written_s: float) -> str:
    trace, story = shown.trace, shown.story
    eras = find_eras(trace)
    scenes = find_scenes(eras)
    kept = choose_scenes(scenes)
    packed = gzip.compress(json.dumps(to_plain(to_chrome(trace, eras, kept))).encode(), mtime=0)
    few = replace(story, waits=story.waits[:MOST_WAITS], happenings=_few(story))
    data = {
        "story": to_plain(few),
        "scenes": [compact(scene, eras) for scene in kept],
        "best": choose_scene(kept),
        "scenes_left_out": len(scenes) - len(kept),
        "happenings_left_out": len(story.happenings) - len(few.happenings),
        "begun": _clock(story.begin_s),
        "written": _clock(written_s),
        "version": __version__,
    }
    script = _part("report.js")
    worst = story.causes[0]
    values = {
        "TITLE": html.escape(f"{story.name}: Lockstep report"),
        "NAME": html.escape(story.name),
        "STATUS": html.escape(story.status.value),
        "STATUS_CLASS": _CLASSES[story.status],
        "HEADLINE": mark_code(_UNIT.sub("\u00a0", worst.sentence)),
        "ADVICE": mark_code(worst.advice),
        "TEXT": html.escape(shown.text),
        "CSS": _part("report.css"),
        "JS": script,
        "HASH": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "DATA": embed(data),
        "TRACE": base64.b64encode(packed).decode() if len(packed) <= MOST_TRACE_BYTES else "",
    }
    return _fill(_part("report.html"), values)


def mark_code(text: str) -> str:
    """Escaped text in which what stood between backticks is marked as code. One that has no partner stays."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def embed(data: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end that, or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def to_plain(value: Any) -> Any:
    """What JSON can hold, with six digits: they are measured times, not more exact than that. No NaN: None instead."""
    if is_dataclass(value) and not isinstance(value, type):
        more = {"efficiency": value.efficiency} if hasattr(value, "efficiency") else {}
        return to_plain({name: getattr(value, name) for name in value.__dataclass_fields__} | more)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): to_plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if value.is_integer() or abs(value) > 1e6 else float(f"{value:.6g}")
    return value


def choose_scenes(scenes: list[Scene]) -> list[Scene]:
    """As many as fit into a page: the first, the last, and what lies between them thinned out evenly."""
    kept = list(scenes)
    while len(kept) > 1 and sum(scene.spans for scene in kept) > MOST_SPANS:
        kept = [scene for i, scene in enumerate(kept[:-1]) if i % 2 == 0 and len(kept) > 2] + kept[-1:]
    if kept and kept[0].spans > MOST_SPANS:  # a single one, with very many workers: the first of them
        most = max(1, len(kept[0].era.members) * MOST_SPANS // kept[0].spans)
        few = {step: dict(sorted(by_rank.items())[:most]) for step, by_rank in kept[0].steps.items()}
        kept = [Scene(kept[0].era, few)]
    return kept


def compact(scene: Scene, eras: list[Era]) -> dict[str, Any]:
    """Spans as [name, start, duration, step], in microseconds from the begin of the scene; names by number."""
    names: dict[str, int] = {}
    begin_s = scene.begin_s
    everybody = {step: by_rank for step, by_rank in scene.steps.items() if len(by_rank) == scene.era.size}
    least_us = {step: min(map(waited_us, by_rank.values())) for step, by_rank in everybody.items()}
    rows: dict[int, dict[str, Any]] = {}
    for step, by_rank in scene.steps.items():
        for rank, closeup in by_rank.items():
            row = rows.setdefault(rank, {"worker": scene.era.name_of(rank), **{track: [] for track in TRACKS}})
            shift_us = 1e6 * (closeup.begin_s - begin_s)
            for span in split_wait(closeup, least_us.get(step, 0.0)):
                name = names.setdefault(span.name, len(names))
                row[span.track].append([name, round(shift_us + span.start_us), round(span.took_us), step])
    starts = {step: min(one.begin_s for one in by_rank.values()) for step, by_rank in scene.steps.items()}
    ends = [_end_s(closeup) for by_rank in scene.steps.values() for closeup in by_rank.values()]
    first, last = min(scene.steps), max(scene.steps)
    label = f"step {first}" if first == last else f"steps {first} to {last}"
    if len(eras) > 1:
        label += f" on {scene.era.size} worker{'s' * (scene.era.size != 1)}"
    return {
        "label": label,
        "names": list(names),
        "rows": [row for _, row in sorted(rows.items())],
        "steps": [[step, round(1e6 * (start_s - begin_s))] for step, start_s in starts.items()],
        "length": max(1, round(1e6 * (max(ends) - begin_s))),
    }


def split_wait(closeup: Closeup, least_us: float) -> list[Span]:
    """Who came last waited least, and that much was communication: what others waited longer was for that worker."""
    spans = []
    for span in closeup.spans:
        for_others_us = span.took_us - least_us
        if span.name != "wait" or least_us <= 0 or for_others_us < 0 or waited_us(closeup) != span.took_us:
            spans.append(span)
            continue
        if for_others_us > 0:
            spans.append(Span("wait for others", span.track, span.start_us, for_others_us))
        spans.append(Span("communication", span.track, span.start_us + for_others_us, least_us))
    return spans


def _end_s(closeup: Closeup) -> float:
    return closeup.begin_s + max(span.start_us + span.took_us for span in closeup.spans) / 1e6


def _few(story: Story) -> list[Any]:
    """What is not a checkpoint or an evaluation comes first; of those the latest."""
    found = story.happenings
    if len(found) <= MOST_HAPPENINGS:
        return found
    order = sorted(found, key=lambda one: (one.what in ("checkpoint", "evaluate"), -one.at_s))
    return sorted(order[:MOST_HAPPENINGS], key=lambda one: one.at_s)


def _fill(template: str, values: Mapping[str, str]) -> str:
    """In one pass: what a value holds is never taken for a place to fill."""
    pieces = template.split("@@")
    return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _part(name: str) -> str:
    return (files("lockstep.report") / "page" / name).read_text(encoding="utf-8")


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at a time that no clock knows"
