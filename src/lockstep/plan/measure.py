"""Makes the short runs of a program, and measures sums between workers of this machine, for `lockstep plan`."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, variance
from typing import Final

from lockstep.doctor.links import measure_sums
from lockstep.errors import LockstepError
from lockstep.plan.profile import MeasuredSums, ProbeResult, ProgramProfile, merge_runs, parse_links, read_probe
from lockstep.plan.program_runs import ProgramRun, run_program
from lockstep.report.trace_reader import read_trace

Say = Callable[[str], None]
PLAIN: Final = {"grad_comm": "fp32", "shard_optimizer": False}  # whatever the program has chosen
SHARDED: Final = {"grad_comm": "fp32", "shard_optimizer": True, "redundancy": 0}
BATCH_DIVISOR: Final = 4  # the batch of the second run is so many times smaller
MANY_SHARDS: Final = 16  # of the third run on a CPU, which says how long small shards take
CPU_ROUNDS: Final = 2  # in which every run is made once, on a CPU
GPU_STEPS: Final = 40  # at least, on a GPU: shards are captured in the fifth


@dataclass(frozen=True)
class Wanted:
    """What is measured: runs of so many steps; sums between workers; a run with a sharded optimiser."""

    steps: int
    timeout_s: float
    sums: bool = True
    sharded: bool = False


def probe(how: ProgramRun, program: Sequence[str], folder: Path, timeout_s: float) -> ProbeResult:
    """Run the program as `how` says, and read its steps."""
    options = how.options
    run_program(how, program, folder, timeout_s)
    found = read_probe(
        folder, grad_comm=options.get("grad_comm", "fp32"), shard_optimizer=options.get("shard_optimizer", False)
    )
    shutil.rmtree(folder, ignore_errors=True)
    return replace(found, hosts=how.hosts)


def measure_program(
    program: Sequence[str], wanted: Wanted, folder: Path, links: Sequence[MeasuredSums], say: Say
) -> ProgramProfile:
    """Run the program on one worker with two batch sizes and with several shards, and on two workers.

    The speed of a machine changes: on a CPU all these runs are made in CPU_ROUNDS rounds, one after the other, and the
    mean of equal ones is used.
    """
    name = Path(program[-1] if program[0] == "-m" else program[0]).name
    base = ProgramRun(wanted.steps, shards=1, options=PLAIN)
    say(f"{name} on 1 worker")
    first = probe(base, program, folder / "first", wanted.timeout_s)
    if first.device == "cuda" and wanted.steps < GPU_STEPS:
        base = replace(base, steps=GPU_STEPS)
        first = probe(base, program, folder / "longer", wanted.timeout_s)
    batch, runs = first.global_batch_size, [base]
    if batch >= BATCH_DIVISOR:
        shards = MANY_SHARDS if first.device == "cpu" and batch >= MANY_SHARDS else BATCH_DIVISOR
        runs += [replace(base, global_batch_size=batch // BATCH_DIVISOR), replace(base, shards=shards)]
    if batch >= 2 and (first.slots >= 2 or first.device == "cuda"):
        pair = replace(base, workers=2, shards=2)
        runs += [pair, replace(pair, options=SHARDED)] if wanted.sharded else [pair]
    found = [[first], *([] for _ in runs[1:])]
    rounds = CPU_ROUNDS if first.device == "cpu" else 1
    for number in range(rounds):
        for position, (results, how) in enumerate(zip(found, runs, strict=True)):
            if len(results) <= number:
                say(f"{name} on {how}" + (f", round {number + 1} of {rounds}" if rounds > 1 else ""))
                results.append(probe(how, program, folder / f"run{number}-{position}", wanted.timeout_s))
    sums = list(links)
    if wanted.sums and any(how.workers > 1 for how in runs):
        say("sums between the workers of this machine")
        try:
            sums += parse_links(measure_sums([2, 4], timeout_s=wanted.timeout_s))
        except LockstepError as error:
            say(f"goes on without measured sums: {error}")
    return ProgramProfile(name, tuple(map(merge_runs, found)), tuple(sums), run_noise=run_noise(found))


def run_noise(found: Sequence[Sequence[ProbeResult]]) -> float:
    """The relative standard deviation of the steps of equal runs; 0 if no run was repeated."""
    spreads = [variance([math.log(one.step_s) for one in results]) for results in found if len(results) > 1]
    return math.sqrt(mean(spreads)) if spreads else 0.0


def with_checkpoints(profile: ProgramProfile, run: Path) -> ProgramProfile:
    """Add how long checkpoints took in a run, and how large they are."""
    events = [event for process in read_trace(run, now_s=time.time()).processes for event in process.events]
    saved = [event for event in events if event.what == "checkpoint" and event.took_s is not None]
    if not saved:
        return profile
    last = saved[-1]
    return replace(profile, checkpoint_s=last.took_s, checkpoint_bytes=last.bytes)
