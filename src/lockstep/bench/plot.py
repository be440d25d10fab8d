"""Plots of time over size, both on logarithmic axes, as svg or png. Needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.bench.collectives import size_text
from lockstep.bench.rounds import Estimate

KINDS = (".svg", ".png")
LIMIT = "copy"  # drawn as a lower bound
COLOURS = {"gloo": "#b5473c", "nccl": "#7a5ea8", "shm, group memory": "#1f6f8b", "shm, own memory": "#6fb1c7"}


@dataclass(frozen=True)
class Point:
    size_bytes: int
    call_ms: Estimate


@dataclass(frozen=True)
class Panel:
    title: str
    lines: dict[str, list[Point]]


def problem_with(path: Path) -> str:
    """Why no plot can be written to this file; "" if it can. Called before the measurement."""
    if path.suffix not in KINDS:
        return f"the name must end in {' or '.join(KINDS)}"
    if not path.absolute().parent.is_dir():
        return f"the folder {path.absolute().parent} does not exist"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed; `pip install 'lockstep-ddp[plot]'` brings it"
    return ""


def draw(panels: Sequence[Panel], path: Path, *, columns: int) -> None:
    # Imported by name, so that types can be checked without the extra; not pyplot, which needs a display.
    figure_class: Any = import_module("matplotlib.figure").Figure
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_class(figsize=(4.2 * columns, 3.4 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.supylabel("ms for one call")
    figure.savefig(path, dpi=150)


def draw_panel(axes: Any, panel: Panel) -> None:
    for name, points in panel.lines.items():
        points = sorted(points, key=lambda point: point.size_bytes)
        sizes = [point.size_bytes for point in points]
        style = {"color": "black", "linestyle": "--"} if name == LIMIT else {"color": COLOURS.get(name), "marker": "o"}
        axes.plot(sizes, [p.call_ms.median for p in points], label=name, markersize=3, linewidth=1.3, **style)
        low, high = [p.call_ms.low for p in points], [p.call_ms.high for p in points]
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_title(panel.title, fontsize=10)
    axes.xaxis.set_major_formatter(lambda size_bytes, _: size_text(round(size_bytes)))
    axes.tick_params(axis="x", labelrotation=45, labelbottom=True, labelsize=8)
    axes.grid(which="major", alpha=0.3)
