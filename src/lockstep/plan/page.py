"""Renders a plan as one self-contained HTML page. Pure.

The page has the style sheet of the report, and a similar policy for its content: strings of the plan are embedded as
escaped text, or as JSON without any `<`, which the script inserts as text only; the content security policy allows
only that script, and no network access.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from typing import Any, Final

from lockstep.report.page import embed, fill_template, mark_code, read_part, to_json_value

MOST_FORECASTS: Final = 500  # in the page; the plan's JSON has all
_UNIT: Final = re.compile(r"(?<=\d) (?=%|ms\b|s\b|h\b|µs|[KMGT]iB|Gbit)")  # a number and its unit stay on one line
_SENTENCE_END: Final = re.compile(r"(?<=[a-z0-9)%`][.!?])\s+(?=[A-Z])")
_PACKAGE: Final = "lockstep.plan"
_SCRIPTS: Final = ("drawing.js", "tables.js", "plan.js")  # each uses the ones before it


def render_plan(plan: Mapping[str, Any], text: str) -> str:
    """Returns the page of a plan. `text` is for a browser that runs no script."""
    forecasts = list(plan.get("forecasts") or [])
    kept = select_forecasts(forecasts)
    data = to_json_value({**plan, "forecasts": kept, "forecasts_left_out": len(forecasts) - len(kept)})
    script = "".join(read_part(name, package=_PACKAGE) for name in _SCRIPTS)
    program = str(plan.get("program") or "program")
    headline, *rest = _SENTENCE_END.split(str(plan.get("headline") or "Forecasts"), maxsplit=1)
    values = {
        "TITLE": html.escape(f"{program}: Lockstep plan"),
        "PROGRAM": html.escape(program),
        "HEADLINE": mark_code(_UNIT.sub("\u00a0", headline)),
        "MORE": mark_code(_UNIT.sub("\u00a0", " ".join(rest))),
        "TEXT": html.escape(text),
        "CSS": read_part("report.css") + read_part("plan.css", package=_PACKAGE),
        "JS": script,
        "HASH": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "DATA": embed(data),
    }
    page = fill_template(read_part("plan.html", package=_PACKAGE), values)
    return page.encode("utf-8", "replace").decode()  # a file name that is not UTF-8 has surrogates


def select_forecasts(forecasts: list[Any]) -> list[Any]:
    """Returns at most MOST_FORECASTS in their order: the best, those of the Pareto front, then the first ones."""
    order = sorted(range(len(forecasts)), key=lambda i: (not forecasts[i].get("is_best"), not _is_pareto(forecasts[i])))
    return [forecasts[i] for i in sorted(order[:MOST_FORECASTS])]


def _is_pareto(forecast: Mapping[str, Any]) -> bool:
    return bool(forecast.get("is_pareto"))
