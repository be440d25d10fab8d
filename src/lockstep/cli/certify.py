"""`lockstep certify train.py`: checks that the user's program gives the same bits on any number of workers.

The first steps of the program are run several times: on one worker twice, on more, on two up to a checkpoint and from
there on one, and on three of which one is killed in the middle of a step. After every step a 64-bit digest of each
tensor of weights, buffers and optimiser state is recorded. So are the metrics of every `run.evaluate` and
`run.predict` in the loop, with the state after them; and after the loop the loss of some training samples in eval mode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN = 4


@dataclass(frozen=True)
class Variant:
    """One way to run the program."""

    name: str
    workers: int
    shards: int  # of a batch, if the program does not set the number: the most workers of all variants
    killed_in: int | None = None
    resumed_after: int | None = None  # steps on `workers`; the rest in a second start, on one worker


@dataclass(frozen=True)
class Difference:
    step: int
    tensors: list[str]  # in the order of the model; empty if only the loss differs
    error: str = ""  # why the run failed, if it did
    what: str = "step"  # or the evaluation after that step

    def __str__(self) -> str:
        if self.error:
            return f"FAILED: {self.error.splitlines()[-1]}"
        more = len(self.tensors) - SHOWN
        names = ", ".join(self.tensors[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        if self.what != "step":
            return f"differs in {self.what}, after step {self.step}: {names or 'the figures'}"
        return f"differs after step {self.step}: {names or 'the loss'}"


StateRecords = dict[tuple[int, int], dict[str, Any]]  # by (step, number of the evaluation after it; 0: the step itself)


def list_variants(workers: Sequence[int], steps: int) -> list[Variant]:
    shards = max(3, *workers)
    plain = [Variant(f"{n} worker{'s' if n > 1 else ''}", n, shards) for n in workers]
    again = Variant(f"{plain[0].name}, again", workers[0], shards)
    resumed = Variant(f"2 workers, resumed on 1 at step {steps // 2}", 2, shards, resumed_after=steps // 2)
    killed = Variant(f"3 workers, one killed in step {steps // 2}", 3, shards, killed_in=steps // 2)
    return [plain[0], again, *plain[1:], resumed, killed]


def first_difference(one: StateRecords, other: StateRecords) -> Difference | None:
    for at in sorted(one.keys() | other.keys()):
        if at not in one or at not in other:
            return Difference(at[0], ["(one of them did not come so far)"])
        a, b = one[at]["tensors"], other[at]["tensors"]
        tensors = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        if tensors or one[at]["figures"] != other[at]["figures"]:
            return Difference(at[0], tensors, what=one[at]["what"])
    return None


def likely_cause(found: dict[Variant, Difference | None]) -> str:
    """Returns a likely cause; pure. `found` has the difference of every variant to the first one."""
    variants = list(found)
    failed = [difference for difference in found.values() if difference is not None and difference.error]
    if failed:
        return f"what the first run that failed says:\n{failed[0].error}"
    if found[variants[0]] is not None:
        return (
            "the program does not repeat itself even on one worker: random numbers from outside of torch and the "
            "dataset's own (random, numpy, the time), or an operation that is not deterministic. "
            "Run(audit_every=1) names the module"
        )
    # The resumed one ends on one worker.
    if all(found[variant] is not None for variant in variants[1:] if variant.resumed_after is None):
        return (
            "the program depends on the workers: on the rank, on the size of the world, on what a worker did before "
            "(a counter, a cache), or exact=False was given to the Run"
        )
    disturbed = [variant for variant in variants if variant.killed_in is not None or variant.resumed_after is not None]
    if all(found[variant] is None for variant in variants if variant not in disturbed):
        which = " and ".join(
            "the killed" if variant.killed_in is not None else "the resumed" for variant in disturbed if found[variant]
        )
        return (
            f"only {which} run differs: something that belongs to the state is not in it (a counter, a list, a "
            "generator of random numbers). Give it to run.register_state(...), or compute it from the step"
        )
    return "some numbers of workers differ and some do not: look for control flow that depends on the rank"


def run_variant(variant: Variant, program: Sequence[str], steps: int, folder: Path, timeout_s: float) -> StateRecords:
    """Runs the program and returns what it recorded. Raises RuntimeError with the end of its output if it fails."""
    folder.mkdir()
    env = {"LOCKSTEP_STATE_LOG_STEPS": str(steps), "LOCKSTEP_SHARDS": str(variant.shards)}
    more: list[str] = []
    workers, end_s = variant.workers, time.monotonic() + timeout_s
    if variant.killed_in is not None:
        env["LOCKSTEP_FAULTS"] = json.dumps([{"at": "reduced", "step": variant.killed_in, "worker": "h0.1"}])
        more = ["--min", "1"]
    if variant.resumed_after is not None:
        env["LOCKSTEP_STATE_LOG_DIRECTORY"] = str(folder / "run")
        part = env | {"LOCKSTEP_STATE_LOG_STEPS": str(variant.resumed_after), "LOCKSTEP_STATE_LOG_PART": "1"}
        _start(variant, [*more, *program], workers, folder, part, timeout_s)
        workers, timeout_s = 1, end_s - time.monotonic()
    _start(variant, [*more, *program], workers, folder, env, timeout_s)
    if variant.killed_in is not None and '"lost"' not in (folder / "logs" / "events.jsonl").read_text():
        raise RuntimeError(f"{variant.name}: no worker was killed, because the program made fewer steps")
    records = [json.loads(line) for line in (folder / "state_log.jsonl").read_text().splitlines()]
    return {(record["step"], record["call"]): record for record in records}


def _start(
    variant: Variant, program: Sequence[str], workers: int, folder: Path, more: Mapping[str, str], timeout_s: float
) -> None:
    """Runs the program once, to its end. Raises RuntimeError with the end of its output if it fails."""
    env = {**os.environ, "LOCKSTEP_STATE_LOG": str(folder / "state_log.jsonl"), **more}
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--log-dir", str(folder / "logs"), *program]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{variant.name}: not done after {timeout_s:g} s; see --timeout-s and --steps") from None
    if done.returncode != 0:
        last_lines = "\n".join(done.stderr.rstrip().splitlines()[-25:])
        raise RuntimeError(f"{variant.name}: exit status {done.returncode}\n{last_lines}")
    if not (folder / "state_log.jsonl").exists():
        raise RuntimeError(f"{variant.name}: no step was made; the program must train with a lockstep.Run")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep certify",
        usage="lockstep certify [--steps N] [--workers 1,2,4] [--json FILE] (script.py | -m module) [args ...]",
        description="Run the first steps of a program on several numbers of workers, resumed in the middle on another "
        "number, and with a worker killed, and compare every bit. A program that does not set shards= is run with as "
        "many shards as the largest number of workers. Checkpoints of the program are neither read nor written.",
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="how many (default: 8)")
    parser.add_argument("--workers", default="1,2,4", metavar="LIST", help="numbers of workers (default: 1,2,4)")
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="for each run (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the certificate there too")
    parser.add_argument("-m", dest="module", action="store_true", help="certify a module, like `python -m`")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(list(arguments))
    try:
        workers = [int(text) for text in chosen.workers.split(",")]
    except ValueError:
        parser.error(f"--workers {chosen.workers!r} is not a list of numbers such as 1,2,4")
    if not chosen.program:
        parser.error("which program? Give a script, or a module with -m")
    if min(workers) < 1 or chosen.steps < 2:
        parser.error("it takes 1 worker or more, and 2 steps or more")
    program = [*(["-m"] if chosen.module else []), *chosen.program]
    if not chosen.module and not Path(program[0]).exists():
        parser.error(f"there is no script {program[0]!r}, seen from {os.getcwd()}")
    with tempfile.TemporaryDirectory(prefix="lockstep-certify-") as folder:
        return _certify(program, workers, chosen, Path(folder))


def _certify(program: list[str], workers: list[int], chosen: argparse.Namespace, folder: Path) -> int:
    reference: StateRecords = {}
    found: dict[Variant, Difference | None] = {}
    for number, variant in enumerate(list_variants(workers, chosen.steps)):
        print(f"{variant.name + ' ':.<40} ", end="", flush=True)
        began = time.monotonic()
        try:
            records = run_variant(variant, program, chosen.steps, folder / str(number), chosen.timeout_s)
        except RuntimeError as error:
            if number == 0:
                print(f"FAILED\nlockstep: {error}", flush=True)
                return 2
            found[variant] = Difference(-1, [], str(error))
            print(found[variant], flush=True)
            continue
        took_s = time.monotonic() - began
        if number == 0:
            reference = records
            steps, calls = sum(not call for _, call in records), sum(bool(call) for _, call in records)
            tensors = len(next(record for (_, call), record in records.items() if not call)["tensors"])
            counts = f"{steps} steps, {calls} evaluation{'s' * (calls != 1)}, {tensors} tensors"
            print(f"{counts} ({took_s:.0f} s)", flush=True)
            continue
        found[variant] = first_difference(reference, records)
        print(f"{found[variant] or 'the same bits'} ({took_s:.0f} s)", flush=True)
    holds = not any(found.values())
    if chosen.json is not None:
        lines = {variant.name: str(difference or "") for variant, difference in found.items()}
        chosen.json.write_text(json.dumps({"program": program, "holds": holds, "differences": lines}, indent=1) + "\n")
    if holds:
        numbers = ", ".join(map(str, workers[:-1])) + f" and {workers[-1]}" if len(workers) > 1 else str(workers[0])
        claim = f"has the same bits on {numbers} workers, resumed, and with one of 3 killed"
        claim += f" ({next(iter(reference.values()))['shards']} shards)"
        print(f"certified: {' '.join(program)} {claim}")
        return 0
    print(f"NOT certified. Likely cause: {likely_cause(found)}")
    return 1
