"""Parses JSON from untrusted sources. What json.loads accepts beyond the JSON standard is refused."""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

MAX_DIGITS: Final = 1000  # of an integer


def parse(data: bytes) -> Any:
    """Parse JSON. Raises ValueError, also for duplicate names in an object, NaN, infinity, and very long integers."""
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_int=_int, parse_float=_float
        )
    except (RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS + 1:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
