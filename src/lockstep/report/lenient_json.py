"""JSON that may be damaged: what is not of the kind that is asked for is taken for nothing, and never an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MOST: Final = 1e15  # of seconds, bytes or samples: beyond it, it is damage


def bytes_of(path: Path, most: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def load(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def mapping_of(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def list_of(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def number(found: Any) -> float | None:
    """Of what can be counted or timed. None for what is no number, or more than there can be."""
    value = any_number(found)
    return value if value is not None and abs(value) <= MOST else None  # not for NaN either


def any_number(found: Any) -> float | None:
    """A loss may be NaN, infinite or huge: that is worth showing. None also for what no float can hold."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return None


def whole(found: Any) -> int | None:
    """Ranks are names in `waited_for`, and so are text there."""
    if isinstance(found, str):
        return int(found) if found.isascii() and found.isdigit() and len(found) < 10 else None
    value = number(found)
    return None if value is None else int(value)
