"""Kills workers at random moments, in every collective, and checks that the others are told, and that nothing is left.

Two to four real workers form a group and run collectives. One is killed (or two, or all; while the group is formed;
with a child that lives on) or stopped. Every survivor must get `PeerLostError` with the rank and the pid of the dead
within one second, or at the deadline if the worker was merely stopped; must leave the group, hold no descriptor, thread
or
shared memory more than before, and form a new group with the other survivors. One that dies in init_process_group
before it has told the others that it is there (its first act) cannot be known to be dead: it must be named at the
deadline. Those are counted apart, as "missed".

    python chaos/run.py                                500 kills, and a stop after every 25
    python chaos/run.py --quick                        at most 5 minutes
    python chaos/run.py --seed 7 --only-case 118       one case again; with --kills 20, twenty times

The seed decides what is done to whom and when; the moment at which a signal lands is the machine's.
Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

import campaign
import result_check
from fleet import Fleet, adopt_orphans
from plan import Case, Event, cases, plan
from result_check import Result

KILLS = 500
QUICK_KILLS = 150
QUICK_S = 270.0


class Progress:
    """One line, overwritten on a terminal; one line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._started_s, self._said_s = total, time.monotonic(), 0.0

    def show(self, results: list[Result]) -> None:
        now_s = time.monotonic()
        live = sys.stdout.isatty()
        if not live and now_s - self._said_s < 10 and len(results) < self._total:
            return
        self._said_s = now_s
        kills = sum(r.case.event is not Event.STOP for r in results)
        failed = sum(bool(r.findings) for r in results)
        worst_ms = 1e3 * result_check.worst_notice_s(results)
        left_s = (now_s - self._started_s) / len(results) * (self._total - len(results))
        line = f"{kills} kills, {failed} failed, worst notice {worst_ms:.0f} ms, {left_s:.0f} s to go"
        print(f"\r{line:70}" if live else line, end="" if live else "\n", flush=True)


def carry_out(todo: list[Case], arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    progress = Progress(len(todo))
    end_s = time.monotonic() + QUICK_S if arguments.quick else float("inf")
    with Fleet() as fleet:
        for case in todo:
            if time.monotonic() > end_s:
                print(f"\n{QUICK_S:.0f} s are over: {len(todo) - len(results)} cases were not run")
                break
            results.append(campaign.run(case, fleet, backend=arguments.backend))
            if results[-1].findings:
                print("\r" + result_check.failures(results[-1]))
            progress.show(results)
    return results


def write_json(path: Path, results: list[Result], arguments: argparse.Namespace) -> None:
    found = [asdict(result) | {"notice_s": result.notice_s} for result in results]
    facts = {"torch": torch.__version__, "backend": arguments.backend, "seed": arguments.seed, "results": found}
    path.write_text(json.dumps(facts, indent=1) + "\n")


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, metavar="N", help=f"default {KILLS}; with --quick {QUICK_KILLS}")
    parser.add_argument("--quick", action="store_true", help=f"no case is begun after {QUICK_S:.0f} s")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only-case", type=int, metavar="N", help="this one; --kills says how often (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to this file")
    parser.add_argument(
        "--backend", choices=["shm", "gloo"], default="shm", help="gloo: to debug this tool; it names no rank"
    )
    arguments = parser.parse_args(argv)
    if arguments.kills is None:
        arguments.kills = 1 if arguments.only_case is not None else QUICK_KILLS if arguments.quick else KILLS
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: must be positive")
    if arguments.only_case is not None and arguments.only_case < 0:
        parser.error(f"--only-case {arguments.only_case}: cases are numbered from 0")
    return arguments


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    started_s = time.monotonic()
    adopt_orphans()
    if arguments.only_case is not None:
        todo = [plan(arguments.seed, arguments.only_case)] * arguments.kills
    else:
        todo = cases(arguments.seed, arguments.kills)
    results = carry_out(todo, arguments)
    if arguments.json:
        write_json(arguments.json, results, arguments)
    failed = sum(bool(result.findings) for result in results)
    print(f"\n{result_check.table(results)}\n\n{result_check.summary(results)}")
    print(f"{len(results)} cases, {failed} failed, seed {arguments.seed}, {time.monotonic() - started_s:.0f} s")
    return 1 if failed else 0


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that every worker is killed on the way out."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's barrier would take one, and keep what it has opened
    with ending_cleanly():
        sys.exit(main(sys.argv[1:]))
