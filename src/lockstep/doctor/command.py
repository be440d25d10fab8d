"""`lockstep doctor`: checks this machine, starts two workers as a trial, and prints findings."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.doctor.facts import inspect_machine
from lockstep.doctor.judge import Finding, Level, judge
from lockstep.doctor.trial import try_workers

_ABOUT = """\
Look at this machine, and at the variables that launchers set, as a worker would find them; start two workers as a
trial; and say what to change. Run it where the training runs: inside the container, or under srun.

examples:
  lockstep doctor
  lockstep doctor --dir /data/runs        where checkpoints will be written
  srun -n 4 lockstep doctor --no-trial    what each task finds
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
    chosen = parser.parse_args(argv)
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
