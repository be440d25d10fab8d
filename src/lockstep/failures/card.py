"""The card at the end of the output of a failed run: who failed, what, where, why, and what to do. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 100
NARROWEST: Final = 50
MOST_LINES: Final = 9  # per entry


@dataclass(frozen=True)
class Card:
    """The entries of a card. Empty ones are not shown."""

    title: str
    who: str = ""
    what: str = ""
    place: tuple[str, ...] = ()  # file, line and source of the user's own code; not wrapped
    where: str = ""
    why: str = ""
    do: str = ""
    logs: str = ""


@dataclass(frozen=True)
class Box:
    corner: str
    side: str
    bar: str
    end: str


ASCII: Final = Box("+-- ", "| ", "-", "+")
LINES: Final = Box("╭── ", "│ ", "─", "╰")


def draw(card: Card, *, width: int = WIDTH, box: Box = ASCII) -> str:
    """Returns the card as text. It has no right border, which a long path would break."""
    width = max(NARROWEST, min(width, WIDTH))
    head = f"{box.corner}{card.title} "
    lines = [head + box.bar * (width - len(head))]
    for name, text in (("who", card.who), ("what", card.what)):
        lines += _entry(name, text, width, box)
    lines += [f"{box.side}       {line}" for line in card.place]
    for name, text in (("where", card.where), ("why", card.why), ("do", card.do), ("logs", card.logs)):
        lines += _entry(name, text, width, box)
    lines.append(box.end + box.bar * (width - 1))
    return "\n".join(line if box is not ASCII else line.encode("ascii", "replace").decode() for line in lines) + "\n"


def _entry(name: str, text: str, width: int, box: Box) -> list[str]:
    if not text:
        return []
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, width - 9, break_long_words=False, break_on_hyphens=False)
    ]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "[...]"]
    return [f"{box.side}{name if n == 0 else '':7}{line}" for n, line in enumerate(lines)]
