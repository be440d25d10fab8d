"""A trial with two real workers: `lockstep run` starts them, and they sum a tensor.

python -m lockstep.doctor.trial FILE      the program of the workers; rank 0 writes its result to FILE
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
class TrialResult:
    backend: str
    device: str
    seconds: float  # per all_reduce


def try_workers() -> Finding:
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        result_file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(WORKERS), "--log-dir", f"{folder}/logs"]
        command += ["-m", "lockstep.doctor.trial", str(result_file)]
        began_s = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        except subprocess.TimeoutExpired:
            found = f"{WORKERS} workers did not find each other within {WITHIN_S:.0f} s"
            return Finding(Level.BAD, "trial", found, "look for a firewall, or a name that stands for another machine")
        took_s = time.monotonic() - began_s
        if done.returncode != 0 or not result_file.exists():
            lines = (done.stdout + done.stderr).strip().splitlines()
            last = lines[-1] if lines else "they printed nothing"
            return Finding(Level.BAD, "trial", f"{WORKERS} workers failed: {last}", "the lines above may tell why")
        result = TrialResult(**json.loads(result_file.read_text()))
    what = f"{WORKERS} workers on {result.device} over {result.backend}: started in {took_s:.1f} s"
    return Finding(Level.GOOD, "trial", f"{what}, 1 MiB added up in {1e3 * result.seconds:.2f} ms")


def work(result_file: Path) -> None:
    """Runs in each worker."""
    import torch
    import torch.distributed as dist

    import lockstep

    world = lockstep.init()
    tensor = torch.full((WORDS,), float(world.rank + 1), device=world.device)
    dist.all_reduce(tensor)
    began_s, rounds = time.monotonic(), 10
    for _ in range(rounds):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    expected = world.size * (world.size + 1) / 2
    if not bool((tensor == expected).all()):
        sys.exit(f"the sum is {float(tensor[0])}, and should be {expected}")
    if world.rank == 0:
        result = TrialResult(world.backend, world.device.type, (time.monotonic() - began_s) / rounds)
        result_file.write_text(json.dumps(vars(result)))
    dist.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
