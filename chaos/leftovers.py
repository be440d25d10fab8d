"""What a process holds (descriptors, threads, shared memory), what it holds too much, and who is still there."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.parent_watch import NCCL_SETUP_S

SETTLE_S = 1.0  # a thread that has ended, or a socket that was closed, may be seen for a moment longer


@dataclass(frozen=True)
class Holdings:
    descriptors: dict[int, str]  # number -> what it points to
    threads: Counter[str]  # by name
    shared: Counter[str]  # mappings that others may see, by path: a group's memory is one of these


def holdings() -> Holdings:
    return Holdings(_descriptors(), _threads(), _shared_mappings())


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one through which we list them
    return found


def _threads() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        try:
            names[Path(f"/proc/self/task/{task}/comm").read_text().strip()] += 1
        except OSError:
            continue  # ended meanwhile
    return names


def _shared_mappings() -> Counter[str]:
    names: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)  # range, rights, offset, device, inode, path
        if fields[1].endswith("s"):
            names[fields[5] if len(fields) > 5 else "(no name)"] += 1
    return names


def differences(before: Holdings, now: Holdings) -> list[str]:
    """In words; empty when a process holds what it held before."""
    more = {number: to for number, to in now.descriptors.items() if before.descriptors.get(number) != to}
    gone = {number: to for number, to in before.descriptors.items() if number not in now.descriptors}
    found = [f"descriptor {number} -> {to} is new" for number, to in more.items()]
    found += [f"descriptor {number} -> {to} was closed" for number, to in gone.items()]
    for what, then, after in (("thread", before.threads, now.threads), ("shared memory", before.shared, now.shared)):
        found += [f"{what} {name} ({count} more)" for name, count in (after - then).items()]
        found += [f"{what} {name} ({count} fewer)" for name, count in (then - after).items()]
    return found


def settle(before: Holdings) -> list[str]:
    """The differences that stay."""
    end_s = time.monotonic() + SETTLE_S
    while (found := differences(before, holdings())) and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def shm_files() -> set[str]:
    """Without those of a GPU's driver, and those that NCCL has made in the last minute, which the launcher does not yet
    take for left behind."""
    found = set()
    for name in os.listdir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            is_new = time.time() - os.stat(f"/dev/shm/{name}").st_mtime < NCCL_SETUP_S
            if not name.startswith("cuda.shm.") and not (name.startswith("nccl-") and is_new):
                found.add(name)
    return found


def shm_left(before: set[str]) -> list[str]:
    """Files that are in /dev/shm since then and will stay: what another program maps right now is that program's."""
    end_s = time.monotonic() + SETTLE_S
    while (found := sorted(name for name in shm_files() - before if not _is_mapped(name))) and time.monotonic() < end_s:
        time.sleep(0.02)
    return [f"/dev/shm/{name}" for name in found]


def _is_mapped(name: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in path.read_text():
                return True
    return False


def marked_processes(mark: str) -> dict[int, str]:
    """Processes whose environment holds the mark, with the state and the name of each. Zombies have no environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "stat").read_text().partition(" ")[2][:40]
        except OSError:
            continue
    return found
