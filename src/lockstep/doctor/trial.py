"""A trial: two real workers are started as `lockstep run` starts them, and add up a tensor.

python -m lockstep.doctor.trial FILE      what a worker of it runs; rank 0 writes what it saw
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.doctor.judge import Finding, Level

WORKERS: Final = 2
WITHIN_S: Final = 90.0
WORDS: Final = 1 << 18  # 1 MiB


@dataclass(frozen=True)
class Seen:
    backend: str
    device: str
    seconds: float  # of one sum


def try_workers() -> Finding:
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        told = Path(folder) / "seen.json"
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(WORKERS), "--log-dir", f"{folder}/logs"]
        command += ["-m", "lockstep.doctor.trial", str(told)]
        began_s = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        except subprocess.TimeoutExpired:
            found = f"{WORKERS} workers did not find each other within {WITHIN_S:.0f} s"
            return Finding(Level.BAD, "trial", found, "look for a firewall, or a name that stands for another machine")
        took_s = time.monotonic() - began_s
        if done.returncode != 0 or not told.exists():
            words = (done.stdout + done.stderr).strip().splitlines()
            last = words[-1] if words else "they said nothing"
            return Finding(Level.BAD, "trial", f"{WORKERS} workers failed: {last}", "the lines above may tell why")
        seen = Seen(**json.loads(told.read_text()))
    what = f"{WORKERS} workers on {seen.device} over {seen.backend}: started in {took_s:.1f} s"
    return Finding(Level.GOOD, "trial", f"{what}, 1 MiB added up in {1e3 * seen.seconds:.2f} ms")


def work(told: Path) -> None:
    """In each worker."""
    import torch
    import torch.distributed as dist

    import lockstep

    world = lockstep.init()
    ours = torch.full((WORDS,), float(world.rank + 1), device=world.device)
    dist.all_reduce(ours)
    began_s, rounds = time.monotonic(), 10
    for _ in range(rounds):
        dist.all_reduce(ours, op=dist.ReduceOp.MAX)
    expected = world.size * (world.size + 1) / 2
    if not bool((ours == expected).all()):
        sys.exit(f"the sum is {float(ours[0])}, and should be {expected}")
    if world.rank == 0:
        seen = Seen(world.backend, world.device.type, (time.monotonic() - began_s) / rounds)
        told.write_text(json.dumps(vars(seen)))
    dist.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
