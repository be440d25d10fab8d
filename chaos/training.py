"""Kills workers of training runs at named places and at random moments, and checks that nothing of it can be seen.

A case is one `lockstep run --min 1` of a small program on 2 to 6 workers, over shm or Gloo, or with --backend nccl over
NCCL, all workers on one GPU. While it trains, workers
are killed, one after the other, two at once, or all: in the backward pass, in each collective, between reducing and
applying, in the optimiser, in a checkpoint's copy, write, fsync and rename, while a generation forms, while state is
handed over, while joining, in evaluate, log, at the end, and from outside wherever they are. The run must end with
status 0 and, bit by bit, with what a world of one computes undisturbed; must use every sample exactly once
(`lockstep ledger`); must compute at most one step again per loss; and must leave no process, shared memory, port or
half a checkpoint behind. Survivors must work again after 200 ms (half of all) and 1.5 s (99 %), counted from the kill
itself; over NCCL after 1 s and 3 s.

    python chaos/training.py                                2,000 kills over 50 seeds: an hour on two cores
    python chaos/training.py --quick                        100 kills: 4 minutes
    python chaos/training.py --seed 7 --only-case 3         one case again; with --times 20, twenty times
    python chaos/training.py --device cuda --backend nccl --kills 300 --seeds 6
    python chaos/training.py --sharded --kills 1000         the optimiser's state is distributed, with redundancy 1
    python chaos/training.py --compressed --kills 500       gradients are sent as integers or matrices

The seed decides what is done to whom and when; the moment at which a signal lands is the machine's.
Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import training_check
from training_check import Result
from training_job import References, carry_out, folder_for, strike_all
from training_plan import STRIKES, Case, compress, plan, shard


@dataclass(frozen=True)
class Kind:
    """What is done to workers, and how often."""

    program: str
    about: str
    what: str  # in words, as in "100 kills"
    plan: Callable[[int, int], Case]  # from a seed and a number
    strikes: int  # of a case
    wanted: int
    seeds: int
    quick_wanted: int
    quick_seeds: int


KILLS = Kind("training.py", __doc__, "kills", plan, STRIKES, wanted=2000, seeds=50, quick_wanted=100, quick_seeds=2)
QUICK_S = 240.0


class Progress:
    """One line, overwritten on a terminal; one line per case elsewhere."""

    def __init__(self, wanted: int, what: str) -> None:
        self._wanted, self._what, self._started_s = wanted, what, time.monotonic()

    def show(self, results: list[Result]) -> None:
        live = sys.stdout.isatty()
        hits = training_check.hits_of(results)
        failed = sum(bool(result.findings) for result in results)
        took = [one.took_s for result in results for one in result.recoveries]
        left_s = (time.monotonic() - self._started_s) / max(1, hits) * max(0, self._wanted - hits)
        line = f"{hits} {self._what} in {len(results)} runs, {failed} failed, {left_s:.0f} s to go"
        if took:
            line += f"; recovery {1e3 * statistics.median(took):.0f} ms, worst {1e3 * max(took):.0f} ms"
        print(f"\r{line:100}" if live else line, end="" if live else "\n", flush=True)


def until_enough(
    seeds: Iterable[int], wanted: int, results: list[Result], of: Callable[[int, int], Case]
) -> Iterator[Case]:
    """Cases of one seed after the other, until each has brought its share of what is wanted."""
    seeds = list(seeds)
    for n, seed in enumerate(seeds, 1):
        number = 0
        while training_check.hits_of(results) < wanted * n / len(seeds):
            yield of(seed, number)
            number += 1


def campaign(
    cases: Iterable[Case],
    results: list[Result],
    progress: Progress,
    *,
    again: str,
    end_s: float,
    device: str = "cpu",
    backend: str | None = None,
    sharded: bool = False,
    compressed: bool = False,
) -> bool:
    """Carry the cases out. `results` grows meanwhile: how many cases there are may depend on it. False: interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        on = {"device": device} | ({} if backend is None else {"backend": backend})
        chosen = (shard(replace(case, **on)) if sharded else replace(case, **on) for case in cases)
        chosen = map(compress, chosen) if compressed else chosen
        _campaign(chosen, results, progress, again=again, end_s=end_s, device=device)
    except KeyboardInterrupt:
        return False
    return True


def _campaign(
    cases: Iterable[Case], results: list[Result], progress: Progress, *, again: str, end_s: float, device: str
) -> None:
    references = References(device)
    for case in cases:
        if time.monotonic() > end_s:
            print("\nthe time is over: what is left is not run")
            break
        reference = references.of(case.program)
        with folder_for(case) as folder:
            result = training_check.judge(carry_out(case, folder, strike_all), reference)
            if result.findings:
                (folder / "keep").touch()
                print(f"\r{training_check.failures(result, again=again)}\n    its folder: {folder}")
        result.seen.traces = {}  # they are large
        results.append(result)
        progress.show(results)


def report(results: list[Result], *, whole: bool, seconds: float) -> int:
    failed, slow = sum(bool(result.findings) for result in results), training_check.too_slow(results)
    print(f"\n{training_check.table(results)}\n\n{training_check.summary(results)}")
    for text in slow:
        print(f"TOO SLOW: {text}")
    rest = "" if whole else ", INTERRUPTED"
    print(f"{len(results)} runs, {training_check.hits_of(results)} hits, {failed} runs failed, {seconds:.0f} s{rest}")
    return 1 if failed or slow or not whole else 0


def write_json(path: Path, results: list[Result]) -> None:
    found = [
        {
            "case": asdict(result.seen.case),
            "status": result.seen.status,
            "hits": [asdict(hit) for hit in result.seen.hits],
            "findings": [asdict(finding) for finding in result.findings],
            "recoveries": [one._asdict() for one in result.recoveries],
            "computed_again": result.again,
            "computed_again_after_all_were_lost": result.after_all,
        }
        for result in results
    ]
    path.write_text(json.dumps(found, indent=1) + "\n")


def read_arguments(kind: Kind, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=kind.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    many, few = f"{kind.wanted} over {kind.seeds}", f"{kind.quick_wanted} over {kind.quick_seeds}"
    parser.add_argument(f"--{kind.what}", dest="wanted", type=int, metavar="N", help=f"so many (default {many} seeds)")
    parser.add_argument("--seeds", type=int, metavar="N", help="cases of so many")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (default 0)")
    parser.add_argument("--quick", action="store_true", help=f"{few} seeds, with --within-s {QUICK_S:.0f}")
    parser.add_argument("--within-s", type=float, metavar="S", help="begin no case after so long")
    parser.add_argument("--only-case", type=int, metavar="N", help="this one of the seed")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="with --only-case: so often")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all workers on one GPU, as CUDA graphs"
    )
    backends = ("shm", "gloo", "nccl")
    parser.add_argument("--backend", choices=backends, help="of all cases (default: shm and gloo); nccl: on one GPU")
    parser.add_argument(
        "--sharded", action="store_true", help="the optimiser's state is distributed, with redundancy 1"
    )
    parser.add_argument("--compressed", action="store_true", help="gradients are sent as int8, int4, powersgd or topk")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to this file")
    given = parser.parse_args(argv)
    given.wanted = given.wanted or (kind.quick_wanted if given.quick else kind.wanted)
    given.seeds = given.seeds or (kind.quick_seeds if given.quick else kind.seeds)
    if given.wanted < 1 or given.seeds < 1 or given.times < 1:
        parser.error(f"--{kind.what}, --seeds and --times must be positive")
    if given.backend == "nccl" and given.device != "cuda":
        parser.error("--backend nccl needs --device cuda")
    if given.only_case is not None and given.only_case < 0:
        parser.error(f"--only-case {given.only_case}: cases are numbered from 0")
    return given


def main(kind: Kind, argv: list[str]) -> int:
    given, results = read_arguments(kind, argv), list[Result]()
    started_s = time.monotonic()
    if given.only_case is not None:
        cases: Iterable[Case] = [kind.plan(given.seed, given.only_case)] * given.times
        wanted = kind.strikes * given.times
    else:
        seeds = range(given.seed, given.seed + given.seeds)
        cases, wanted = until_enough(seeds, given.wanted, results, kind.plan), given.wanted
    end_s = started_s + (given.within_s or (QUICK_S if given.quick else float("inf")))
    progress, again = Progress(wanted, kind.what), f"python chaos/{kind.program}"
    if given.device != "cpu":
        again += f" --device {given.device}"
    if given.backend is not None:
        again += f" --backend {given.backend}"
    again += " --sharded" * given.sharded + " --compressed" * given.compressed
    on = {"device": given.device, "backend": given.backend, "sharded": given.sharded, "compressed": given.compressed}
    whole = campaign(cases, results, progress, again=again, end_s=end_s, **on)
    if given.json:
        write_json(given.json, results)
    return report(results, whole=whole, seconds=time.monotonic() - started_s)


if __name__ == "__main__":
    sys.exit(main(KILLS, sys.argv[1:]))
