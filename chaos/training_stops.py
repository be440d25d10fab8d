"""Stops workers of training runs for a while (SIGSTOP, and a late SIGCONT), and checks that nothing of it can be seen.

As `training.py`, with `--stall-s 1`: a worker that gives no sign of life for a second is taken for dead, and is killed
then. So most of those that are stopped here never go on; some wake up just before, or in the middle of it. Some are
stopped in a collective, some in the optimiser, some after they have applied a step, and many of them are rank 0. The
run must end with status 0 and the bits of an undisturbed one; must have named everybody who was stopped for too long;
and nobody may apply a step that it has applied.

    python chaos/training_stops.py                          200 stops
    python chaos/training_stops.py --quick                  10
    python chaos/training_stops.py --seed 7 --only-case 3   one case again; with --times 20, twenty times

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from training import Progress, campaign, report, until_enough, write_json
from training_plan import STOPS, Case, plan_stops
from training_verdict import Result

STOPPED, SEEDS = 200, 10
QUICK_STOPPED = 10


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, metavar="N", help=f"default {STOPPED}; with --quick {QUICK_STOPPED}")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only-case", type=int, metavar="N", help="this one of the seed")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="with --only-case: so often")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to this file")
    arguments = parser.parse_args(argv)
    arguments.stops = arguments.stops or (QUICK_STOPPED if arguments.quick else STOPPED)
    if arguments.stops < 1 or arguments.times < 1:
        parser.error("--stops and --times must be positive")
    return arguments


def main(argv: list[str]) -> int:
    arguments, results = read_arguments(argv), list[Result]()
    started_s = time.monotonic()
    if arguments.only_case is not None:
        cases: Iterable[Case] = [plan_stops(arguments.seed, arguments.only_case)] * arguments.times
        wanted = STOPS * arguments.times
    else:
        seeds = range(arguments.seed, arguments.seed + (1 if arguments.quick else SEEDS))
        cases, wanted = until_enough(seeds, arguments.stops, results, plan_stops), arguments.stops
    again = "python chaos/training_stops.py"
    whole = campaign(cases, results, Progress(wanted, "stops"), again=again, end_s=float("inf"))
    if arguments.json:
        write_json(arguments.json, results)
    return report(results, whole=whole, seconds=time.monotonic() - started_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
