"""Reads JSON that may be damaged: a value of the wrong type counts as missing, and is never an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MOST: Final = 1e15  # seconds, bytes or samples; a larger number is damage


def read_bytes(path: Path, most: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def as_mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def as_list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def number(found: Any) -> float | None:
    """Returns a count or a time; None for anything else, NaN, or a value beyond `MOST`."""
    value = any_number(found)
    return value if value is not None and abs(value) <= MOST else None  # the comparison is false for NaN


def any_number(found: Any) -> float | None:
    """Returns any number, also NaN, infinity or a huge one, as a loss may be; None if a float cannot hold it."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return None


def integer(found: Any) -> int | None:
    """Returns an integer, also from text: the ranks in `waited_for` are JSON keys."""
    if isinstance(found, str):
        return int(found) if found.isascii() and found.isdigit() and len(found) < 10 else None
    value = number(found)
    return None if value is None else int(value)
