"""JSON from a file that anybody may have changed. What json.loads lets pass, and JSON does not, is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError

JSON_BYTES = 64 << 20  # of one text; parsed, it may take thirty times as much memory
DIGITS = 1000  # of a whole number


def dump(value: Any, where: str) -> bytes:
    """Always the same bytes for the same value."""
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()
    except ValueError as error:  # a whole number of very many digits
        raise CheckpointError(f"{where} cannot be written as JSON: {error}") from error
    if len(text) > JSON_BYTES:
        raise CheckpointError(
            f"{where} takes {len(text)} bytes of JSON, and {JSON_BYTES} are the most; put large data into tensors"
        )
    return text


def parse(data: bytes, where: Path) -> Any:
    if len(data) > JSON_BYTES:
        raise CheckpointError(f"{where} has {len(data)} bytes of JSON, and {JSON_BYTES} are the most")
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_int=_int, parse_float=_float
        )
    except (ValueError, RecursionError, MemoryError) as error:
        raise bad(where, str(error) or type(error).__name__) from error


def bad(where: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{where} is not what Lockstep writes: {reason}; use an older checkpoint")


def is_count(value: object, most: int = 2**63 - 1) -> bool:
    """A whole number, 0 or more. True and False are none."""
    return type(value) is int and 0 <= value <= most


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _int(text: str) -> int:
    if len(text) > DIGITS + 1:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
