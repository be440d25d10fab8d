"""`lockstep doctor --links FILE`: measures sums of gradients between workers, and hosts, for `lockstep plan`.

The measurement itself runs in workers that `lockstep run` starts (bench/links.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError

LINES_SHOWN: Final = 8


def measure_sums(
    counts: Sequence[int], *, launch: Sequence[str] = (), backend: str = "", timeout_s: float = 600.0
) -> dict[str, Any]:
    """Measure sums between so many workers, one number after the other.

    launch  more options of `lockstep run`, such as those of several hosts

    Returns facts about the machine and the list `sums`; without `sums` on hosts that do not have rank 0. Raises
    LockstepError with the last lines of the workers if they fail.
    """
    found: dict[str, Any] = {"sums": []}
    env = {**os.environ} | ({"LOCKSTEP_BACKEND": backend} if backend else {})
    with tempfile.TemporaryDirectory(prefix="lockstep-links-") as folder:
        for count in counts:
            path = Path(folder) / f"{count}.json"
            command = [
                sys.executable,
                "-m",
                "lockstep",
                "run",
                "-n",
                str(count),
                "--plain",
                "--log-dir",
                f"{folder}/logs",
            ]
            command += [*launch, "-m", "lockstep.bench.links", str(path)]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
            except subprocess.TimeoutExpired:
                raise LockstepError(f"sums between {count} workers were not measured within {timeout_s:g} s") from None
            if done.returncode != 0:
                last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LINES_SHOWN:])
                raise LockstepError(f"sums between {count} workers could not be measured:\n{last}")
            if path.exists():
                one = json.loads(path.read_text())
                found = {**one, "sums": [*found["sums"], *one["sums"]]}
    return found


def write_links(path: Path, counts: Sequence[int], *, launch: Sequence[str], say: Callable[[str], None]) -> int:
    """Measure sums, write them to `path`, and print a table. Returns the exit status."""
    say(f"measuring sums between {', '.join(map(str, counts))} workers ...")
    found = measure_sums(counts, launch=launch)
    say("")
    if not found["sums"]:
        print("measured; the host of rank 0 has the file")
        return 0
    try:
        path.write_text(json.dumps(found) + "\n")
    except OSError as error:
        raise LockstepError(f"{path} cannot be written: {error.strerror}; choose another file") from None
    for one in found["sums"]:
        last = one["points"][-1]
        rate = last["bytes"] / last["seconds"] / 1e6
        where = (
            f"{one['workers_per_host']} workers" if one["hosts"] == 1 else f"{one['hosts']} x {one['workers_per_host']}"
        )
        size = f"{last['bytes'] / 2**20:.0f} MiB in {1e3 * last['seconds']:.2f} ms"
        print(f"{where:10} {one['backend']:10} {one['grad_comm']:5} {size:24} {rate:,.0f} MB/s")
    print(f"{path}: for `lockstep plan --links {path}`")
    return 0
