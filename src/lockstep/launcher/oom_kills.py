"""Counts the processes that the kernel has killed because memory ran out, in this container and on the machine."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OomKills:
    """The kernel's counters, which only grow. None: not readable here."""

    group: int | None = None
    machine: int | None = None
    limit: str = ""  # memory limit of the group in bytes, as the kernel prints it

    @staticmethod
    def count() -> OomKills:
        group = _our_group()
        return OomKills(
            group=_find(group / "memory.events", "oom_kill"),
            machine=_find(Path("/proc/vmstat"), "oom_kill"),
            limit=_text(group / "memory.max"),
        )


def compare(before: OomKills, after: OomKills) -> str:
    """Describes the kills between two counts; "" if there were none."""
    if before.group is not None and after.group is not None and after.group > before.group:
        limit = f", whose limit is {int(after.limit) / 2**30:.2f} GiB" if after.limit.isdigit() else ""
        return f"it has killed {after.group - before.group} in this container{limit}"
    if before.machine is not None and after.machine is not None and after.machine > before.machine:
        return f"it has killed {after.machine - before.machine} on this machine since the run began"
    return ""


def _our_group() -> Path:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::") and (_GROUPS / line[4:] / "memory.events").exists():
                return _GROUPS / line[4:]
    return _GROUPS


def _find(path: Path, name: str) -> int | None:
    match = re.search(rf"^{name} (\d+)$", _text(path), re.MULTILINE)
    return int(match[1]) if match is not None else None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
