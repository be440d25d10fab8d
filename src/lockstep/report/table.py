"""Plain aligned tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = False  # aligned


def columns(*titles: str) -> tuple[Column, ...]:
    """One column per title; that of a title with a `>` in front is aligned to the right."""
    return tuple(Column(title.removeprefix(">"), right=title.startswith(">")) for title in titles)


def render(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    lines = [[column.title for column in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def cells(line: Sequence[str]) -> str:
        aligned = zip(columns, line, widths, strict=True)
        return "  ".join(text.rjust(width) if column.right else text.ljust(width) for column, text, width in aligned)

    return "\n".join(cells(line).rstrip() for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f}"
