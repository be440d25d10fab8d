"""`lockstep doctor`: checks this machine, starts two workers as a trial, and prints findings.

python -m lockstep.doctor.command FILE      the program of the trial's workers; rank 0 writes its result to FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lockstep.doctor import links
from lockstep.doctor.facts import inspect_machine
from lockstep.doctor.judge import Finding, Level, judge
from lockstep.errors import LockstepError

WORKERS: Final = 2
WITHIN_S: Final = 90.0
WORDS: Final = 1 << 18  # 1 MiB

_ABOUT = """\
Look at this machine, and at the variables that launchers set, as a worker would find them; start two workers as a
trial; and say what to change. Run it where the training runs: inside the container, or under srun.

examples:
  lockstep doctor
  lockstep doctor --dir /data/runs        where checkpoints will be written
  srun -n 4 lockstep doctor --no-trial    what each task finds
  lockstep doctor --links links.json      how long sums of gradients take between workers, for `lockstep plan`
"""
_ENDS = "Exit status: 0 when training should work; 1 when something will make it fail; 2 for wrong arguments."
_MARKS = {Level.GOOD: "+", Level.NOTE: "i", Level.WARN: "!", Level.BAD: "X"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep doctor",
        description=_ABOUT,
        epilog=_ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), metavar="DIR", help="of the run (default: this one)")
    parser.add_argument("--no-trial", action="store_true", help="start no workers")
    parser.add_argument("--json", action="store_true", help="one object per finding, a line each")
    about = "measure only sums of gradients between workers, into FILE, for `lockstep plan --links FILE`"
    parser.add_argument("--links", type=Path, metavar="FILE", help=about)
    about = "with --links: numbers of workers, on each host (default: 2,4)"
    parser.add_argument("-n", dest="workers", default="2,4", metavar="N,..", help=about)
    about = "with --links: on several hosts; start it on each of them"
    parser.add_argument("--hosts", type=int, metavar="N", help=about)
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="with --hosts: an address of one of them")
    chosen = parser.parse_args(argv)
    if chosen.links is not None:
        return _measure_links(parser, chosen)
    if chosen.hosts or chosen.rendezvous or chosen.workers != "2,4":
        parser.error("-n, --hosts and --rendezvous belong to --links")
    _show_progress("looking at the machine, and at torch ...")
    findings = judge(inspect_machine(dict(os.environ), chosen.dir))
    if not chosen.no_trial and not any(finding.level is Level.BAD and finding.topic == "torch" for finding in findings):
        _show_progress("starting two workers ...")
        findings.append(try_workers())
    _show_progress("")
    for finding in findings:
        print(_as_json(finding) if chosen.json else _as_text(finding), flush=True)
    bad = sum(finding.level is Level.BAD for finding in findings)
    warnings = sum(finding.level is Level.WARN for finding in findings)
    if not chosen.json:
        print(f"\n{_count(bad, 'problem')}, {_count(warnings, 'warning')}")
    return 1 if bad else 0


def _measure_links(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    try:
        counts = [int(text) for text in chosen.workers.split(",")]
        if min(counts) < (1 if chosen.hosts else 2):
            raise ValueError
    except ValueError:
        parser.error(f"-n {chosen.workers!r} is not a list of numbers of workers such as 2,4")
    if not chosen.links.absolute().parent.is_dir():
        parser.error(f"--links {chosen.links}: there is no folder {chosen.links.absolute().parent}")
    if (chosen.hosts is None) != (chosen.rendezvous is None):
        parser.error("--hosts and --rendezvous belong together")
    if chosen.hosts is not None and chosen.hosts < 2:
        parser.error(f"--hosts {chosen.hosts}: several hosts are 2 or more")
    hosts = links.SeveralHosts(chosen.hosts, chosen.rendezvous) if chosen.hosts else None
    try:
        return links.write_links(chosen.links, counts, hosts=hosts, say=_show_progress)
    except LockstepError as error:
        _show_progress("")
        print(f"lockstep: {error}", file=sys.stderr)
        return 1


def _show_progress(text: str) -> None:
    """Shows what is being done on a terminal; the next call overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _as_text(finding: Finding) -> str:
    line = f"{_MARKS[finding.level]} {finding.topic:14} {finding.found}"
    return f"{line}\n{'':17}-> {finding.advice}" if finding.advice else line


def _as_json(finding: Finding) -> str:
    return json.dumps({**vars(finding), "level": finding.level.value})


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


# ---- the trial: `lockstep run` starts two real workers, and they sum a tensor ----------------------------------------


def try_workers() -> Finding:
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        result_file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(WORKERS), "--log-dir", f"{folder}/logs"]
        command += ["-m", "lockstep.doctor.command", str(result_file)]
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
        result = json.loads(result_file.read_text())
    what = f"{WORKERS} workers on {result['device']} over {result['backend']}: started in {took_s:.1f} s"
    return Finding(Level.GOOD, "trial", f"{what}, 1 MiB added up in {1e3 * result['seconds']:.2f} ms")


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
        seconds = (time.monotonic() - began_s) / rounds
        result = {"backend": world.backend, "device": world.device.type, "seconds": seconds}  # per all_reduce
        result_file.write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
