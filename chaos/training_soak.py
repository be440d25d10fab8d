"""Kills one of three workers again and again in one run, and checks that those who stay do not grow.

One worker is never hit. It goes through every recovery, so whatever a recovery leaves behind piles up in it, and in the
launcher. Resident memory, threads, descriptors and mappings of both are written down after each recovery, and /dev/shm;
the last quarter must be what the first was, after a few recoveries for everything to be there. The run ends with
status 0 and the bits of an undisturbed one of the same length.

    python chaos/training_soak.py                     300 recoveries
    python chaos/training_soak.py --quick             20
    python chaos/training_soak.py --backend gloo

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import leftovers
import training_check
from training_check import Hit, Seen
from training_job import LOOK_EVERY_S, Job, References, carry_out, folder_for
from training_plan import Case

RECOVERIES, QUICK = 300, 20
WORKERS = 3
SKIPPED = 5  # recoveries until everything is there that will stay: code that is loaded when it is needed first
PACE_S = 0.02  # the program sleeps so long between steps
EPOCHS = 1_000_000  # the run is told when to end
GROWS_MB = 8.0  # an allocator that has found its size still moves
GROWS_MB_EACH = 0.05  # per recovery


@dataclass(frozen=True)
class Sample:
    """What a process holds."""

    resident_mb: float
    threads: int
    descriptors: int
    mappings: int  # shared ones


@dataclass(frozen=True)
class Moment:
    """After a recovery."""

    launcher: Sample
    survivor: Sample
    shm_files: int


def sample(pid: int) -> Sample:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    shared = sum(line.split(maxsplit=2)[1].endswith("s") for line in (folder / "maps").read_text().splitlines())
    resident_mb = int(status["VmRSS"].split()[0]) / 1024
    return Sample(resident_mb, int(status["Threads"]), len(os.listdir(folder / "fd")), shared)


def growth(moments: Sequence[Moment]) -> list[str]:
    """What has grown from the first quarter to the last, in words. Pure."""
    moments = moments[SKIPPED:]
    quarter = max(1, len(moments) // 4)
    first, last = moments[:quarter], moments[-quarter:]
    allowed_mb = GROWS_MB + GROWS_MB_EACH * len(moments)
    found = []
    for who in ("launcher", "survivor"):
        for what, allowed in (("resident_mb", allowed_mb), ("threads", 0.0), ("descriptors", 0.0), ("mappings", 0.0)):
            before, after = (
                statistics.median(getattr(getattr(one, who), what) for one in part) for part in (first, last)
            )
            if after > before + allowed:
                found.append(f"{what} of the {who}: {before:g} in the first quarter, {after:g} in the last")
    before, after = (statistics.median(one.shm_files for one in part) for part in (first, last))
    if after > before:
        found.append(f"files in /dev/shm: {before:g} in the first quarter, {after:g} in the last")
    return found


def soak(job: Job, seen: Seen, recoveries: int, moments: list[Moment]) -> None:
    """Kill, wait for the replacement, write down, again."""
    dice = Random(job.case.seed)
    survivor: int | None = None
    live = sys.stdout.isatty()
    job.pace(PACE_S)
    while len(moments) < recoveries and await_all(job):
        time.sleep(dice.uniform(0.0, 0.1))
        pids = job.pids()
        members = [pids[one] for one in job.members()[0] if one in pids]
        survivor = survivor or members[dice.randrange(len(members))]
        if len(members) < WORKERS or survivor not in members:
            continue
        victim = dice.choice([pid for pid in members if pid != survivor])
        seen.hits.append(Hit(0, "outside", victim, time.monotonic()))
        assert victim > 1
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
        if not await_all(job):
            break
        time.sleep(5 * PACE_S)
        moments.append(Moment(sample(job.process.pid), sample(survivor), len(leftovers.shm_files())))
        if live or len(moments) % 20 == 0:
            now = moments[-1]
            line = f"{len(moments)} recoveries; survivor {now.survivor}; launcher {now.launcher.resident_mb:.0f} MB"
            print(f"\r{line:150}" if live else line, end="" if live else "\n", flush=True)


def await_all(job: Job) -> bool:
    """Until all train together. False: the run has ended."""
    while not job.is_over:
        job.look()
        if len(job.members()[0]) == WORKERS:
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recoveries", type=int, metavar="N", help=f"default {RECOVERIES}; with --quick {QUICK}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--backend", choices=["shm", "gloo"], default="shm")
    parser.add_argument("--num-workers", type=int, default=0, metavar="N", help="loader processes of each worker")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to this file")
    arguments = parser.parse_args(argv)
    arguments.recoveries = arguments.recoveries or (QUICK if arguments.quick else RECOVERIES)
    if arguments.recoveries <= SKIPPED + 4:
        parser.error(f"--recoveries {arguments.recoveries}: more than {SKIPPED + 4}, or there is nothing to compare")
    return arguments


def main(argv: list[str]) -> int:
    arguments, started_s = read_arguments(argv), time.monotonic()
    case = Case(
        seed=arguments.seed,
        number=0,
        variant="mlp",
        run_seed=arguments.seed,
        backend=arguments.backend,
        workers=WORKERS,
        save_every=10,
        num_workers=arguments.num_workers,
        strikes=(),
        epochs=EPOCHS,
    )
    moments: list[Moment] = []

    def drive(job: Job, seen: Seen) -> None:
        soak(job, seen, arguments.recoveries, moments)
        job.stop()

    with folder_for(case) as folder:
        seen = carry_out(case, folder, drive)
        steps = next((found["steps"] for found in seen.ends.values()), 1)
        more = ("--epochs", str(EPOCHS), "--steps", str(steps))
        references = References()
        references.need({case.program}, more=more)
        result = training_check.judge(seen, references.of(case.program))
        grown = growth(moments)
        if result.findings or grown:
            (folder / "keep").touch()
            print(
                f"\r{training_check.failures(result, again='python chaos/training_soak.py')}\n    its folder: {folder}"
            )
    for text in grown:
        print(f"GROWS: {text}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(moment) for moment in moments], indent=1) + "\n")
    print(f"\n{training_check.table([result])}\n\n{training_check.summary([result])}")
    if moments:
        print(f"at first: {moments[0]}\nat last:  {moments[-1]}")
    slow = training_check.too_slow([result])
    print("\n".join([*slow, f"{len(moments)} recoveries over {steps} steps, {time.monotonic() - started_s:.0f} s"]))
    return 1 if result.findings or grown or slow or len(moments) < arguments.recoveries else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
