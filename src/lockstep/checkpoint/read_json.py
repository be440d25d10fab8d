"""JSON of a checkpoint: `strict_json` with a size limit, and errors that name the file. Files are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep import strict_json
from lockstep.errors import CheckpointError

JSON_BYTES = 64 << 20  # limit of one text; parsed, it may take thirty times as much memory


def dump(value: Any, where: str) -> bytes:
    """Encode deterministically: equal values give equal bytes. Raises CheckpointError if the text is too large."""
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
    """Decode JSON. Raises CheckpointError if it is not valid or too large."""
    if len(data) > JSON_BYTES:
        raise CheckpointError(f"{where} has {len(data)} bytes of JSON, and {JSON_BYTES} are the most")
    try:
        return strict_json.parse(data)
    except ValueError as error:
        raise malformed(where, str(error)) from error


def malformed(where: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{where} is not what Lockstep writes: {reason}; use an older checkpoint")


def is_count(value: object, most: int = 2**63 - 1) -> bool:
    """Whether this is an integer from 0 to `most`. True and False are not."""
    return type(value) is int and 0 <= value <= most
