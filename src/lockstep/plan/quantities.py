"""Reads numbers with units, lists of values and questions from the command line of `lockstep plan`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from lockstep.plan.links import parse_link

T = TypeVar("T")
_BYTES: Final = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_CURRENCY: Final = {"$": "$", "usd": "$", "€": "€", "eur": "€", "£": "£", "gbp": "£"}


def list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """The type of an argument with several values, such as 1,2,4."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return tuple(parse(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def amount(units: dict[str, float], what: str, example: str) -> Callable[[str], float]:
    """The type of an argument that is a number with a unit. Raises ValueError if the unit is missing or unknown."""

    def read(text: str) -> float:
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        known = {name.lower(): factor for name, factor in units.items()}
        if match is None or match[2].lower() not in known:
            which = "which unit? " if match is not None and not match[2] else ""
            raise ValueError(f"{text!r} is not {what}: {which}write one of {', '.join(units)}, such as {example}")
        value = float(match[1]) * known[match[2].lower()]
        if not 0 < value < math.inf:
            raise ValueError(f"{text!r}: {what} must be positive")
        return value

    return read


memory = amount(_BYTES, "an amount of memory", "80GiB")
duration = amount(_SECONDS, "a time", "1000h")


def price(text: str) -> tuple[float, str]:
    """Parse what a worker costs per hour: "3", "3 $/h", "2.5 EUR/h"."""
    match = re.fullmatch(r"\s*([$€£]?)\s*([0-9.]+)\s*([$€£]|[A-Za-z]{3})?\s*(/\s*h(our)?)?\s*", text)
    sign = (match[1] or match[3] or "$").lower() if match else ""
    if match is None or sign not in _CURRENCY or float(match[2]) < 0:
        raise ValueError(f"{text!r} is not a price per worker and hour: write 3 $/h")
    return float(match[2]), _CURRENCY[sign]


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def read_question_text(text: str) -> dict[str, Any]:
    """Parse --ask: parts with commas between them. Returns options by the names of the arguments. Raises ValueError."""
    found: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        number = re.fullmatch(r"(\d+)\s*(\S.*)", part)
        word = number[2].lower().strip() if number else ""
        if re.fullmatch(r"(gpus?|workers?|cores?|cpus?)", word):
            found.setdefault("workers", []).append(count(number[1]))  # type: ignore[index]
        elif re.fullmatch(r"(gpus? |workers? |cores? )?(per|each|a) ?host", word):
            found["per_host"] = [count(number[1])]  # type: ignore[index]
        elif re.fullmatch(r"hosts?|nodes?|machines?", word):
            found.setdefault("hosts", []).append(count(number[1]))  # type: ignore[index]
        elif part.lower() in ("int8", "int4", "bf16", "fp16", "fp32"):
            found.setdefault("grad_comm", []).append(part.lower())
        elif (batch := re.fullmatch(r"batch(?: size)? (\d+)", part.lower())) is not None:
            found.setdefault("batch", []).append(count(batch[1]))
        elif (steps := re.fullmatch(r"(\d+) steps?", part.lower())) is not None:
            found["steps"] = count(steps[1])
        elif re.search(r"[$€£]|/ ?h|usd|eur|gbp", part.lower()):
            found["price"] = price(part)
        elif any(part.lower().endswith(unit.lower()) for unit in _BYTES) and "/" not in part:
            found["memory"] = memory(part)
        else:
            link = parse_link(part)  # raises ValueError for what is nothing of all this
            if link.name.startswith(("nvlink", "pcie")):
                found["inside"] = link
            else:
                found.setdefault("link", []).append(link)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
