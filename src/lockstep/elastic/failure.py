"""What a worker that fails writes down for its launcher: facts that a traceback does not tell.

The file is in the folder of logs, and is named after the process. Nothing here needs torch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LONGEST_TRACE = 200_000


@dataclass(frozen=True)
class Facts:
    pid: int
    host: str
    kind: str  # of exception
    text: str
    trace: str  # as Python prints it, causes and all
    where: dict[str, Any] = field(default_factory=dict)  # rank, size, step, epoch, call, shard


def path_of(folder: Path, pid: int) -> Path:
    return folder / f"failure-{pid}.json"


def write(folder: Path, facts: Facts) -> None:
    """Whole, or not at all. A disk that is full must not hide the error itself."""
    path = path_of(folder, facts.pid)
    with suppress(OSError):
        path.with_suffix(".new").write_text(json.dumps(asdict(facts)))
        path.with_suffix(".new").replace(path)


def read(folder: Path, pid: int, name: str) -> Facts | None:
    """None: it wrote nothing, or nothing that we understand. The file then bears the worker's name."""
    path = path_of(folder, pid)
    try:
        facts = Facts(**json.loads(path.read_bytes()))
        path.replace(folder / f"failure-{name}.json")
    except (OSError, ValueError, TypeError):
        return None
    return facts if isinstance(facts.where, dict) and facts.pid == pid else None
