"""Whether a process lives, and whether it hears a signal. One that was killed stays a Z until its parent looks."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int | str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listens(pid: int, number: int) -> bool:
    """It has a handler for this signal; a process without one would die of it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
