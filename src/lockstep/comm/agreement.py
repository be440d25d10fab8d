"""Do all workers say the same? And if not, what does each of them say?

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
    """62 bits of a JSON value, the same in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def is_same(group: dist.ProcessGroup, number: int, *, device: torch.device) -> bool:
    """Whether every worker passed the same number."""
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    abortable_wait.wait(group, group.allreduce([both], options), device, "a comparison")
    highest, negated_lowest = both.tolist()
    return bool(highest == -negated_lowest)


def gather_rows(group: dist.ProcessGroup, row: list[int], *, device: torch.device) -> list[list[int]]:
    """Every worker's row of whole numbers, in the order of ranks. All rows are equally long."""
    table = torch.zeros(group.size(), len(row), dtype=torch.int64, device=device)
    table[group.rank()] = torch.tensor(row, dtype=torch.int64)
    _add_up(group, table)
    rows: list[list[int]] = table.tolist()
    return rows


def tell_all(group: dist.ProcessGroup, value: Any, *, device: torch.device) -> list[Any]:
    """Every worker's value, in the order of ranks. For the moments when something is wrong: it is not fast."""
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
