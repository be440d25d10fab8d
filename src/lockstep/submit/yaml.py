"""Writes the subset of YAML that a manifest needs. Strings that YAML could read as other types are written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_STRINGS: Final = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def write_yaml(value: Any) -> str:
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, one in value.items() for line in _beside(f"{key}:", one, indent="  ")]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for one in value for line in _item(one)]
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS:
        return [value]
    return [json.dumps(value)]


def _beside(key: str, value: Any, *, indent: str) -> list[str]:
    """Writes scalars and empty values on the line of the key, others below it."""
    lines = _lines(value)
    is_short = isinstance(value, str | int) or not value
    return [f"{key} {lines[0]}"] if is_short else [key, *(f"{indent}{line}" for line in lines)]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]
