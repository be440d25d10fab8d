"""Compares small values across workers, and gathers them where they differ.

Only all-reduce is used, which every process group has.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import abortable_wait


def fingerprint(value: Any) -> int:
    """Return a 62-bit hash of a JSON value; equal in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def all_equal(group: dist.ProcessGroup, number: int, *, device: torch.device) -> bool:
    """Whether every worker passed the same number."""
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    abortable_wait.wait(group, group.allreduce([both], options), device, "a comparison")
    highest, negated_lowest = both.tolist()
    return bool(highest == -negated_lowest)


def gather_rows(group: dist.ProcessGroup, row: list[int], *, device: torch.device) -> list[list[int]]:
    """Return the row of integers of every worker, by rank. All rows must have the same length."""
    table = torch.zeros(group.size(), len(row), dtype=torch.int64, device=device)
    table[group.rank()] = torch.tensor(row, dtype=torch.int64)
    _add_up(group, table)
    rows: list[list[int]] = table.tolist()
    return rows


def gather_values(group: dist.ProcessGroup, value: Any, *, device: torch.device) -> list[Any]:
    """Return the JSON value of every worker, by rank. Slow: meant for error messages and set-up."""
    text = json.dumps(value).encode()
    rank, size = group.rank(), group.size()
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    lengths[rank] = len(text)
    _add_up(group, lengths)
    longest = int(lengths.max().item())
    table = torch.zeros(size, longest, dtype=torch.int32, device=device)
    table[rank, : len(text)] = torch.tensor(list(text), dtype=torch.int32, device=device)
    _add_up(group, table)
    return [json.loads(bytes(table[r, : int(lengths[r])].tolist())) for r in range(size)]


def _add_up(group: dist.ProcessGroup, table: Tensor) -> None:
    abortable_wait.wait(group, group.allreduce([table], dist.AllreduceOptions()), table.device, "an exchange of words")
