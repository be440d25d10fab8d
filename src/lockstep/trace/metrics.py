"""Metrics over all workers, added without rounding, so that all workers get equal results; and their files."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait, agreement
from lockstep.errors import DesyncError, LockstepError
from lockstep.run_files import Appender

TAIL = 8  # lines that another worker may have written since this one last wrote

Pairs = dict[str, tuple[float, float]]


class Mean(float):
    """A mean, as a float; `.sum` divided by `.weight`."""

    sum: float
    weight: float

    def __new__(cls, total: float, weight: float) -> Mean:
        mean = super().__new__(cls, total / weight if weight else math.nan)
        mean.sum, mean.weight = total, weight
        return mean


class MetricsFile:
    """The file metrics.jsonl, with a line for each call of `run.log`. All workers have the lines, and one writes them.

    The writer may be lost before or right after it has written a line. So the next writer checks whether the last line
    is in the file.
    """

    def __init__(self, directory: Path) -> None:
        self._file = Appender(directory / "metrics.jsonl", "the file of metrics")
        self._pending: list[
            MetricsLine
        ] = []  # possibly not in the file; on a worker that does not write, only the last
        self._writes = False

    def add(self, step: int, metrics: Mapping[str, float], *, writes: bool) -> None:
        line = MetricsLine(json.dumps({"step": step, **metrics}), time.time())
        if writes:
            self._pending.append(line)
            self.write()
        else:
            self._pending, self._writes = [line], False

    def write(self) -> None:
        """Write the pending lines. From now on this worker is the writer."""
        if not self._writes:
            there = self._tail()
            self._pending = [line for line in self._pending if line.text not in there]
        self._writes = True
        if self._pending and self._file.add(map(str, self._pending)) is not None:
            self._pending.clear()

    def _tail(self) -> list[str]:
        """The last lines, without their times."""
        try:
            rows = [json.loads(line) for line in self._file.path.read_text().splitlines()[-TAIL:]]
            return [json.dumps({name: value for name, value in row.items() if name != "time"}) for row in rows]
        except (OSError, ValueError, AttributeError):
            return []


@dataclass(frozen=True)
class MetricsLine:
    """A line of the file; `text` is without the time, in which two workers differ."""

    text: str
    time: float

    def __str__(self) -> str:
        found = json.loads(self.text)
        return json.dumps({"step": found.pop("step"), "time": self.time, **found})


def as_pairs(returned: Any, what: str) -> Pairs:
    """Convert what the function `what` returned, (sum, weight) or a dict of such pairs, to pairs of floats.

    Raises TypeError if it is neither.
    """
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
    """Gather the metrics of all pieces from all workers, by name. `mine`: the pieces of this worker, by number.

    Raises DesyncError if the workers have different metrics.
    """
    keys = next((list(pairs) for pairs in mine.values()), None)
    mixed = next((list(pairs) for pairs in mine.values() if list(pairs) != keys), None)
    gathered = agreement.gather_values(
        group, {"keys": keys, "mixed": mixed, "stop": max(mine, default=-1) + 1}, device=device
    )
    names = _agreed_keys(gathered, what)
    pieces = max(one["stop"] for one in gathered)
    table = torch.zeros(pieces, len(names), 2, dtype=torch.float64, device=device)
    for number, pairs in mine.items():
        table[number] = torch.tensor([pairs[name] for name in names], dtype=torch.float64)
    abortable_wait.wait(group, group.allreduce([table], dist.AllreduceOptions()), device, what)
    rows = table.cpu()
    return {name: [(total, weight) for total, weight in rows[:, n].tolist()] for n, name in enumerate(names)}


def mean_of(pairs: Sequence[tuple[float, float]]) -> Mean:
    """The mean of all pieces. Sums are exact, so the order of the pieces, and which worker has them, is irrelevant."""
    return Mean(_sum([total for total, _ in pairs]), _sum([weight for _, weight in pairs]))


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs
        return math.nan


def _agreed_keys(gathered: list[dict[str, Any]], what: str) -> list[str]:
    first = next(((rank, one["keys"]) for rank, one in enumerate(gathered) if one["keys"] is not None), None)
    if first is None:
        return []
    owner, keys = first
    for rank, one in enumerate(gathered):
        for theirs in (one["keys"], one["mixed"]):
            if theirs is not None and sorted(theirs) != sorted(keys):
                odd = sorted(set(theirs) ^ set(keys))
                raise DesyncError(
                    f"{what}: rank {owner} has the metrics {', '.join(keys)}, and rank {rank} has {', '.join(theirs)}; "
                    f"{', '.join(odd)} must be there always or never"
                )
    return sorted(keys)


class TensorBoardWriter:
    """Writes to the folder `tensorboard` of a run directory; does nothing without a directory or if not `enabled`.

    Raises LockstepError if it is enabled and has no directory, or if the package is not installed.
    """

    def __init__(self, directory: Path | None, *, enabled: bool) -> None:
        if enabled and directory is None:
            raise LockstepError("tensorboard=True: where shall its files go? Give the Run a directory")
        if enabled and importlib.util.find_spec("tensorboard") is None:
            raise LockstepError("tensorboard=True needs a package that is not here: pip install tensorboard")
        self._folder = directory / "tensorboard" if directory is not None and enabled else None
        self._writer: Any = None

    def write(self, step: int, metrics: Mapping[str, float | None], *, writes: bool) -> None:
        """Write the metrics of a step. The writing worker may change; TensorBoard merges their files."""
        if self._folder is None or not writes:
            return
        try:
            if self._writer is None:
                self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
            for name, value in metrics.items():
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._disable(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._disable(error)
        self._writer = None

    def _disable(self, error: Exception) -> None:
        """Warn and write nothing more: a full disk, or any other problem here, does not end the training."""
        text = f"lockstep: TensorBoard gets no more metrics, into {self._folder}: {error!r}"
        print(text, file=sys.stderr, flush=True)
        self._folder = self._writer = None
