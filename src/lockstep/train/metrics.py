"""Figures over all workers: (sum, weight) pairs, added up without rounding, so that all workers have the same."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait, agreement
from lockstep.errors import DesyncError
from lockstep.run_files import Appender

TAIL = 8  # lines that another worker may have written since we last knew

Pairs = dict[str, tuple[float, float]]


class Mean(float):
    """A mean, as a float; `.sum` and `.weight` are what it was made of."""

    sum: float
    weight: float

    def __new__(cls, total: float, weight: float) -> Mean:
        mean = super().__new__(cls, total / weight if weight else math.nan)
        mean.sum, mean.weight = total, weight
        return mean


class MetricsFile:
    """metrics.jsonl: a line for each call of `run.log`. All workers know them, and one writes.

    Whoever writes may be lost before it has, or right after. So the next one looks whether the last line is there.
    """

    def __init__(self, directory: Path) -> None:
        self._file = Appender(directory / "metrics.jsonl", "the file of figures")
        self._waiting: list[Line] = []  # not written, or perhaps not: of others only the last
        self._writes = False

    def note(self, step: int, figures: Mapping[str, float], *, writes: bool) -> None:
        line = Line(json.dumps({"step": step, **figures}), time.time())
        if writes:
            self._waiting.append(line)
            self.write()
        else:
            self._waiting, self._writes = [line], False

    def write(self) -> None:
        """What waits. From now on that is for us to do."""
        if not self._writes:
            there = self._tail()
            self._waiting = [line for line in self._waiting if line.text not in there]
        self._writes = True
        if self._waiting and self._file.add(map(str, self._waiting)) is not None:
            self._waiting.clear()

    def _tail(self) -> list[str]:
        """The last lines, without their times."""
        try:
            rows = [json.loads(line) for line in self._file.path.read_text().splitlines()[-TAIL:]]
            return [json.dumps({name: value for name, value in row.items() if name != "time"}) for row in rows]
        except (OSError, ValueError, AttributeError):
            return []


@dataclass(frozen=True)
class Line:
    text: str
    time: float

    def __str__(self) -> str:
        found = json.loads(self.text)
        return json.dumps({"step": found.pop("step"), "time": self.time, **found})


def as_pairs(returned: Any, what: str) -> Pairs:
    """(sum, weight), or several of them by name."""
    named = returned if isinstance(returned, Mapping) else {"": returned}
    pairs: Pairs = {}
    for name, pair in named.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            found = f"{len(pair)} values" if isinstance(pair, tuple) else f"a {type(pair).__name__}"
            raise TypeError(
                f"{what} returned {found}{f' for {name!r}' if name else ''}; it must return "
                "(sum, weight), such as (correct answers, all answers), or a dict of such pairs"
            )
        try:
            total, weight = (float(x.detach()) if isinstance(x, Tensor) else float(x) for x in pair)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{what}: {name or 'the figure'} is {pair!r}, which are not two numbers") from error
        pairs[str(name)] = (total, weight)
    return pairs


def gather_pieces(
    group: dist.ProcessGroup, device: torch.device, mine: Mapping[int, Pairs], *, what: str
) -> dict[str, list[tuple[float, float]]]:
    """All workers together: every figure of every piece, by name. `mine`: our pieces by number; each has one owner."""
    keys = next((list(pairs) for pairs in mine.values()), None)
    mixed = next((list(pairs) for pairs in mine.values() if list(pairs) != keys), None)
    told = agreement.tell_all(group, {"keys": keys, "mixed": mixed, "stop": max(mine, default=-1) + 1}, device=device)
    names = _agreed_keys(told, what)
    pieces = max(one["stop"] for one in told)
    table = torch.zeros(pieces, len(names), 2, dtype=torch.float64, device=device)
    for number, pairs in mine.items():
        table[number] = torch.tensor([pairs[name] for name in names], dtype=torch.float64)
    abortable_wait.wait(group, group.allreduce([table], dist.AllreduceOptions()), device, what)
    rows = table.cpu()
    return {name: [(total, weight) for total, weight in rows[:, n].tolist()] for n, name in enumerate(names)}


def mean_of(pairs: Sequence[tuple[float, float]]) -> Mean:
    """The sums are exact, so neither the order of pieces matters nor who had which."""
    return Mean(_sum([total for total, _ in pairs]), _sum([weight for _, weight in pairs]))


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs
        return math.nan


def _agreed_keys(told: list[dict[str, Any]], what: str) -> list[str]:
    first = next(((rank, one["keys"]) for rank, one in enumerate(told) if one["keys"] is not None), None)
    if first is None:
        return []
    owner, keys = first
    for rank, one in enumerate(told):
        for theirs in (one["keys"], one["mixed"]):
            if theirs is not None and sorted(theirs) != sorted(keys):
                odd = sorted(set(theirs) ^ set(keys))
                raise DesyncError(
                    f"{what}: rank {owner} has the figures {', '.join(keys)}, and rank {rank} has {', '.join(theirs)}; "
                    f"{', '.join(odd)} must be there always or never"
                )
    return sorted(keys)
