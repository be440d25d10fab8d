"""Do the examples learn what they say, on every seed, and is a batch eight times as large as good?

    python campaigns/convergence.py             about ten minutes on two cores
    python campaigns/convergence.py --quick     about three: fewer seeds, one optimiser

Every program runs whole, under `lockstep run`, and one row of the table is one run: its figure beside what is wanted.
Exit status: 0 when all of it holds; 1 when not, or when a program fails; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BASE_BATCH, TIMES = 32, 8
SLACK = 1.0  # percent of accuracy that the large batch may differ
LEAST_DIGITS, LEAST_WAVES, MOST_NATS = 97.0, 95.0, 1.5
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Case:
    """One program with its arguments, and what its figure must be: `low <= figure <= high`."""

    program: str
    arguments: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 100.0

    def __str__(self) -> str:
        return " ".join((self.program, *self.arguments))

    @property
    def wanted(self) -> str:
        if self.high >= 100:
            return f"{self.low:.2f} or more"
        return f"{self.low:.2f} to {self.high:.2f}" if self.low else f"{self.high:.2f} or less"


@dataclass(frozen=True)
class Row:
    case: Case
    seed: int
    figure: float | None  # None: the program failed
    took_s: float = 0.0

    @property
    def holds(self) -> bool:
        return self.figure is not None and self.case.low <= round(self.figure, 6) <= self.case.high


def plan(*, quick: bool) -> list[tuple[Case, int]]:
    """What to run, with which seed. The large batch comes apart: what is wanted of it is known after the base run."""
    digits = Case("digits.py", low=LEAST_DIGITS)
    waves = [Case("cifar_like.py", ("--optimizer", name), low=LEAST_WAVES) for name in ("sgd", "lars", "lamb")]
    gpt = Case("chargpt.py", high=MOST_NATS)
    runs = [(digits, seed) for seed in range(2 if quick else 5)]
    runs += [(case, seed) for case in (waves[1:2] if quick else waves) for seed in range(1 if quick else 2)]
    return runs + [(gpt, seed) for seed in range(1 if quick else 3)]


def large_batch(base: Row) -> Case | None:
    """Eight times the batch must end as high as the base run did, give or take."""
    if base.case.program != "digits.py" or base.figure is None:
        return None
    arguments = ("--batch", str(TIMES * BASE_BATCH), "--base-batch", str(BASE_BATCH))
    return Case("digits.py", arguments, low=round(base.figure - SLACK, 6), high=round(base.figure + SLACK, 6))


def read_figure(output: str) -> float | None:
    """From the one line with a digest: "accuracy 99.17%  digest ..." or "1.342 nats per character  digest ..."."""
    lines = re.findall(r"(?:accuracy ([\d.]+)%|([\d.]+) nats per character)  digest [0-9a-f]{64}\b", output)
    return float(lines[0][0] or lines[0][1]) if len(lines) == 1 else None


def run(case: Case, seed: int, workers: int) -> Row:
    with tempfile.TemporaryDirectory() as logs:
        launch = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--log-dir", logs]
        command = [*launch, str(EXAMPLES / case.program), *case.arguments, "--seed", str(seed)]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            print(f"{case} --seed {seed}: not done after {DEADLINE_S:.0f} s", file=sys.stderr)
            return Row(case, seed, None, DEADLINE_S)
    figure = read_figure(done.stdout) if done.returncode == 0 else None
    if figure is None:
        print(f"{case} --seed {seed}: exit status {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
    return Row(case, seed, figure, time.monotonic() - began)


def carry_out(todo: list[tuple[Case, int]], workers: int) -> Iterator[Row]:
    for case, seed in todo:
        row = run(case, seed, workers)
        yield row
        larger = large_batch(row)
        if larger is not None:
            yield run(larger, seed, workers)


def show(row: Row) -> str:
    figure = "failed" if row.figure is None else f"{row.figure:.3f}"
    holds = "yes" if row.holds else "NO"
    return line(str(row.case), str(row.seed), figure, row.case.wanted, holds, f"{row.took_s:.0f} s")


def line(program: str, seed: str, figure: str, wanted: str, holds: str, took: str) -> str:
    return f"{program:<44}{seed:>4}{figure:>10}   {wanted:<16} {holds:<6}{took:>6}"


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, one optimiser")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="of every run (default: 2)")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.workers <= 8:
        parser.error(f"--workers {arguments.workers}: the examples have 8 shards, so 1 to 8")
    return arguments


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    print(line("program", "seed", "figure", "wanted", "holds", "took"), flush=True)
    rows = []
    for row in carry_out(plan(quick=arguments.quick), arguments.workers):
        rows.append(row)
        print(show(row), flush=True)
    failed = sum(not row.holds for row in rows)
    print(f"{len(rows)} runs, {failed} do not hold, {sum(row.took_s for row in rows):.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
