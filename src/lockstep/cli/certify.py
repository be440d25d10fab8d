"""`lockstep certify train.py`: does the user's own program give the same bits on any number of workers?

The first steps of the program are run several times: on one worker twice, on more, on two up to a checkpoint and from
there on one, and on three of which one is killed in the middle of a step. After every step each tensor of weights,
buffers and optimiser state is noted, in 64 bits. So are the figures of every `run.evaluate` and `run.predict` in the
loop, and the state after it; and behind the loop the loss of some training samples in eval mode.
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
class Arm:
    """One way to run the program."""

    name: str
    workers: int
    killed_in: int | None = None
    resumed_after: int | None = None  # steps on `workers`; the others in a second start, on one worker


@dataclass(frozen=True)
class Difference:
    step: int
    tensors: list[str]  # in the order of the model; none: only the loss differs
    error: str = ""  # it failed
    what: str = "step"  # or which evaluation after that step

    def __str__(self) -> str:
        if self.error:
            return f"FAILED: {self.error.splitlines()[-1]}"
        more = len(self.tensors) - SHOWN
        names = ", ".join(self.tensors[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        if self.what != "step":
            return f"differs in {self.what}, after step {self.step}: {names or 'the figures'}"
        return f"differs after step {self.step}: {names or 'the loss'}"


Seen = dict[tuple[int, int], dict[str, Any]]  # by step, and by evaluation after it; 0: the step itself


def arms_for(workers: Sequence[int], steps: int) -> list[Arm]:
    plain = [Arm(f"{n} worker{'s' if n > 1 else ''}", n) for n in workers]
    again = Arm(f"{plain[0].name}, again", workers[0])
    resumed = Arm(f"2 workers, resumed on 1 at step {steps // 2}", 2, resumed_after=steps // 2)
    killed = Arm(f"3 workers, one killed in step {steps // 2}", 3, killed_in=steps // 2)
    return [plain[0], again, *plain[1:], resumed, killed]


def first_difference(one: Seen, other: Seen) -> Difference | None:
    for at in sorted(one.keys() | other.keys()):
        if at not in one or at not in other:
            return Difference(at[0], ["(one of them did not come so far)"])
        a, b = one[at]["tensors"], other[at]["tensors"]
        tensors = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        if tensors or one[at]["figures"] != other[at]["figures"]:
            return Difference(at[0], tensors, what=one[at]["what"])
    return None


def likely_cause(found: dict[Arm, Difference | None]) -> str:
    """Pure. `found` has the difference of every arm to the first one."""
    arms = list(found)
    failed = [difference for difference in found.values() if difference is not None and difference.error]
    if failed:
        return f"what the first run that failed says:\n{failed[0].error}"
    if found[arms[0]] is not None:
        return (
            "the program does not repeat itself even on one worker: random numbers from outside of torch and the "
            "dataset's own (random, numpy, the time), or an operation that is not deterministic. "
            "Run(audit_every=1) names the module"
        )
    if all(found[arm] is not None for arm in arms[1:] if arm.resumed_after is None):  # which ends on one worker
        return (
            "the program depends on the workers: on the rank, on the size of the world, on what a worker did before "
            "(a counter, a cache), or exact=False was given to the Run"
        )
    disturbed = [arm for arm in arms if arm.killed_in is not None or arm.resumed_after is not None]
    if all(found[arm] is None for arm in arms if arm not in disturbed):
        which = " and ".join(
            "the killed" if arm.killed_in is not None else "the resumed" for arm in disturbed if found[arm]
        )
        return (
            f"only {which} run differs: something that belongs to the state is not in it (a counter, a list, a "
            "generator of random numbers). Give it to run.register_state(...), or compute it from the step"
        )
    return "some numbers of workers differ and some do not: look for control flow that depends on the rank"


def run_arm(arm: Arm, program: Sequence[str], steps: int, folder: Path, timeout_s: float) -> Seen:
    """Raises RuntimeError with the last words if it fails."""
    folder.mkdir()
    env = {"LOCKSTEP_WITNESS_STEPS": str(steps)}
    more: list[str] = []
    workers, end_s = arm.workers, time.monotonic() + timeout_s
    if arm.killed_in is not None:
        env["LOCKSTEP_FAULTS"] = json.dumps([{"at": "reduced", "step": arm.killed_in, "worker": "h0.1"}])
        more = ["--min", "1"]
    if arm.resumed_after is not None:
        env["LOCKSTEP_WITNESS_DIRECTORY"] = str(folder / "run")
        part = env | {"LOCKSTEP_WITNESS_STEPS": str(arm.resumed_after), "LOCKSTEP_WITNESS_PART": "1"}
        _start(arm, [*more, *program], workers, folder, part, timeout_s)
        workers, timeout_s = 1, end_s - time.monotonic()
    _start(arm, [*more, *program], workers, folder, env, timeout_s)
    if arm.killed_in is not None and '"lost"' not in (folder / "logs" / "events.jsonl").read_text():
        raise RuntimeError(f"{arm.name}: nobody was killed, because the program made fewer steps")
    records = [json.loads(line) for line in (folder / "witness.jsonl").read_text().splitlines()]
    return {(record["step"], record["call"]): record for record in records}


def _start(
    arm: Arm, program: Sequence[str], workers: int, folder: Path, more: Mapping[str, str], timeout_s: float
) -> None:
    """One start of the program, up to its end. Raises RuntimeError with the last words if it fails."""
    env = {**os.environ, "LOCKSTEP_WITNESS": str(folder / "witness.jsonl"), **more}
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--log-dir", str(folder / "logs")]
    try:
        done = subprocess.run(
            [*command, *program], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{arm.name}: not done after {timeout_s:g} s; see --timeout-s and --steps") from None
    if done.returncode != 0:
        words = "\n".join(done.stderr.rstrip().splitlines()[-25:])
        raise RuntimeError(f"{arm.name}: exit status {done.returncode}\n{words}")
    if not (folder / "witness.jsonl").exists():
        raise RuntimeError(f"{arm.name}: no step was made; the program must train with a lockstep.Run")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep certify",
        usage="lockstep certify [--steps N] [--workers 1,2,4] [--json FILE] (script.py | -m module) [args ...]",
        description="Run the first steps of a program on several numbers of workers, resumed in the middle on another "
        "number, and with a worker killed, and compare every bit. Checkpoints of the program are neither read nor "
        "written.",
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
    reference: Seen = {}
    found: dict[Arm, Difference | None] = {}
    for number, arm in enumerate(arms_for(workers, chosen.steps)):
        print(f"{arm.name + ' ':.<40} ", end="", flush=True)
        began = time.monotonic()
        try:
            seen = run_arm(arm, program, chosen.steps, folder / str(number), chosen.timeout_s)
        except RuntimeError as error:
            if number == 0:
                print(f"FAILED\nlockstep: {error}", flush=True)
                return 2
            found[arm] = Difference(-1, [], str(error))
            print(found[arm], flush=True)
            continue
        took_s = time.monotonic() - began
        if number == 0:
            reference = seen
            steps, calls = sum(not call for _, call in seen), sum(bool(call) for _, call in seen)
            tensors = len(next(one for (_, call), one in seen.items() if not call)["tensors"])
            print(
                f"{steps} steps, {calls} evaluation{'s' * (calls != 1)}, {tensors} tensors ({took_s:.0f} s)", flush=True
            )
            continue
        found[arm] = first_difference(reference, seen)
        print(f"{found[arm] or 'the same bits'} ({took_s:.0f} s)", flush=True)
    holds = not any(found.values())
    if chosen.json is not None:
        lines = {arm.name: str(difference or "") for arm, difference in found.items()}
        chosen.json.write_text(json.dumps({"program": program, "holds": holds, "differences": lines}, indent=1) + "\n")
    if holds:
        numbers = ", ".join(map(str, workers[:-1])) + f" and {workers[-1]}" if len(workers) > 1 else str(workers[0])
        print(
            f"certified: {' '.join(program)} has the same bits on {numbers} workers, resumed, and with one of 3 killed"
        )
        return 0
    print(f"NOT certified. Likely cause: {likely_cause(found)}")
    return 1
