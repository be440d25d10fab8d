"""Changes the number of workers of a run while it trains, with `lockstep scale`, and checks that the result is equal.

From 1 to 4, 2, 3, 6 and back to 1 worker, over shm and over Gloo. The run must end with status 0 and the bits of an
undisturbed run of one worker, must use every sample exactly once, and must compute nothing again.

    python chaos/training_resize.py
    python chaos/training_resize.py --sizes 2,5,1 --backend gloo

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import training_check
from training_check import Fault, Finding, Seen
from training_job import LOOK_EVERY_S, Job, References, Stuck, carry_out, folder_for
from training_plan import Case

SIZES = (1, 4, 2, 3, 6, 1)
WITHIN_S = 60.0
STEPS_AT_EACH = 5


def scale(job: Job, workers: int) -> float:
    """How long it takes from the command until so many train together. Raises Stuck."""
    command = [sys.executable, "-m", "lockstep", "scale", str(job.logs), str(workers)]
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise Stuck(f"lockstep scale ended with status {done.returncode}: {done.stdout}{done.stderr}")
    await_size(job, workers)
    return job.members()[1] - began_s


def await_size(job: Job, workers: int) -> None:
    """And some steps of theirs."""
    end_s, from_step = time.monotonic() + WITHIN_S, None
    while from_step is None or job.step() < from_step + STEPS_AT_EACH:
        job.look()
        if len(job.members()[0]) != workers:
            from_step = None
        elif from_step is None:
            from_step = job.step()
        if job.is_over or time.monotonic() > end_s:
            raise Stuck(f"{workers} workers do not train together after {WITHIN_S:.0f} s\n{job.stacks()}")
        time.sleep(LOOK_EVERY_S)


def resize(backend: str, sizes: Sequence[int], references: References, *, sharded: bool) -> int:
    """How many things are wrong."""
    case = Case(0, 0, "mlp", 0, backend, sizes[0], save_every=10, num_workers=0, strikes=(), sharded=sharded)

    def drive(job: Job, seen: Seen) -> None:
        await_size(job, sizes[0])
        for before, after in pairwise(sizes):
            took_s = scale(job, after)
            print(f"{backend}: {before} -> {after} workers: they train after {1e3 * took_s:.0f} ms", flush=True)

    with folder_for(case) as folder:
        seen = carry_out(case, folder, drive)
        result = training_check.judge(seen, references.of(case.program))
        found = [finding for finding in result.findings if finding.fault is not Fault.DIED]
        found += [Finding(Fault.AGAIN, f"{steps} steps were computed again") for steps in result.again if steps]
        lost = [event for event in seen.events if event["event"] == "lost"]
        found += [Finding(Fault.DIED, f"{event['worker']} ended with {event['code']}") for event in lost]
        if found:
            (folder / "keep").touch()
            print("".join(f"    {finding.fault}: {finding.text}\n" for finding in found) + f"    its folder: {folder}")
    steps = next((end["steps"] for end in seen.ends.values()), 0)
    print(f"{backend}: {' -> '.join(map(str, sizes))} over {steps} steps: {'FAILED' if found else 'the same bits'}")
    return len(found)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="1 to 6 workers, one after the other")
    parser.add_argument("--backend", choices=["shm", "gloo"], help="only this one")
    parser.add_argument("--sharded", action="store_true", help="the optimiser's state is distributed")
    arguments = parser.parse_args(argv)
    try:
        sizes = [int(size) for size in arguments.sizes.split(",")]
    except ValueError:
        parser.error(f"--sizes {arguments.sizes!r} is not a list of numbers, such as 1,4,2")
    if len(sizes) < 2 or not all(1 <= size <= 6 for size in sizes):
        parser.error(f"--sizes {arguments.sizes!r}: at least two, each from 1 to 6")
    references = References()
    backends = [arguments.backend] if arguments.backend else ["shm", "gloo"]
    return 1 if sum(resize(backend, sizes, references, sharded=arguments.sharded) for backend in backends) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
