"""JSON of a checkpoint, from a file that anybody may have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep import strict_json
from lockstep.errors import CheckpointError

JSON_BYTES = 64 << 20  # of one text; parsed, it may take thirty times as much memory


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
        return strict_json.parse(data)
    except ValueError as error:
        raise bad(where, str(error)) from error


def bad(where: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{where} is not what Lockstep writes: {reason}; use an older checkpoint")


def is_count(value: object, most: int = 2**63 - 1) -> bool:
    """A whole number, 0 or more. True and False are none."""
    return type(value) is int and 0 <= value <= most
