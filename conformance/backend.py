"""Runs PyTorch's own tests of collectives, and its DDP tests, on Gloo and on our backend, and shows every difference.

The tests are those inside the installed torch package; none is copied. They run on the CPU, each in fresh processes
with a deadline. A test counts when it passes on Gloo in the same setting; one that passes without forming a group of
the backend under test is not a pass. Tests written for MPI, or for NCCL and GPUs, count as well where Gloo passes them
when it is taken for those, with `cuda` meaning the CPU. Three lists:

    collectives   collectives, point to point, objects, subgroups, barriers: with 2, 3 and 4 ranks
    DDP           torch's own DistributedDataParallel on the backend
    our own       values of reductions, which torch's tests of all_reduce do not look at; FSDP2, DTensor, tensor
                  parallelism, DCP, whose tests are not in the package

    python conformance/backend.py                      gloo and shm, side by side
    python conformance/backend.py --quick              shm, one number of ranks per test, against the remembered list
    python conformance/backend.py --only all_to_all -v     some tests, with tracebacks
    python conformance/backend.py --backend gloo --save    measure Gloo again and remember what passes

Exit status: 0 when ours passes all that Gloo passes, or the test is listed in backend_exceptions.json; 1 when not;
2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import disguise
import measure
from measure import Limits, Runner
from subjects import Backend
from suite import Kind, Outcome, Setting, Topic, next_setting

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "backend_baseline.json"
EXCEPTIONS = HERE / "backend_exceptions.json"
QUICK_S = 540  # --quick ends within ten minutes, whatever hangs
WORLD_SIZES = (3, 2, 4)  # in the order of preference when only one is run: 3 is odd and has room for a subgroup
REFERENCE = "gloo"


class Case(NamedTuple):
    """A test in the setting in which Gloo ran it."""

    topic: Topic
    test: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.test} ({self.setting})"


Outcomes = dict[Case, Outcome]


def searches(topic: Topic) -> Iterator[Callable[[list[Outcome]], Setting | None]]:
    """How to find the settings of a test. Each search ends at the first setting that does not skip it."""
    if topic is Topic.DDP:
        yield next_setting  # as run.py does
    else:
        for size in WORLD_SIZES:
            yield lambda tried, size=size: next_look(tried, size)  # type: ignore[misc]


def next_look(tried: list[Outcome], world_size: int) -> Setting | None:
    """As it is first; then taken for MPI, which nearly everything is allowed to; then with GPUs, and taken for NCCL."""
    looks = [(False, "gloo"), (False, "mpi"), (True, "gloo"), (True, "nccl")]
    if len(tried) == len(looks) or (tried and tried[-1].kind is not Kind.SKIP):
        return None
    stand_in, known_as = looks[len(tried)]
    return Setting(stand_in, world_size, known_as)


# -------------------------------------------------------------------------------------------------- the two backends


def measure_reference(only: str, runner: Runner) -> Outcomes:
    topics = runner.host(Setting(stand_in=False, world_size=2)).topics()
    chosen = {test: topic for test, topic in topics.items() if re.search(only, test)}
    print(f"torch {torch.__version__}: {len(topics)} tests, {len(chosen)} chosen")
    runner.expected = sum(len(list(searches(topic))) for topic in chosen.values())
    found: Outcomes = {}
    for test, topic in chosen.items():
        for search in searches(topic):
            outcome = runner.search(test, search)
            found[Case(topic, test, outcome.setting)] = outcome
    return found


def measure_other(cases: list[Case], runner: Runner) -> Outcomes:
    """Sorted by setting: a host is started once."""
    runner.expected = len(cases)
    return {case: runner.run(case.test, case.setting) for case in sorted(cases, key=lambda case: case.setting)}


def that_passed(outcomes: Outcomes) -> list[Case]:
    return [case for case, outcome in outcomes.items() if outcome.kind is Kind.PASS]


def one_per_test(cases: list[Case]) -> list[Case]:
    chosen: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: WORLD_SIZES.index(case.setting.world_size)):
        chosen.setdefault(case.test, case)
    return list(chosen.values())


def read_baseline(only: str) -> list[Case]:
    remembered = json.loads(BASELINE.read_text())
    measure.warn_of_other_version(remembered["torch"], path=BASELINE, renew="--backend gloo --save")
    return [
        Case(topic, test, Setting.parse(setting))
        for topic in Topic
        for test, settings in remembered["passes"][topic].items()
        for setting in settings
        if re.search(only, test)
    ]


def write_baseline(outcomes: Outcomes) -> None:
    passes: dict[Topic, dict[str, list[str]]] = {topic: defaultdict(list) for topic in Topic}
    for case in sorted(that_passed(outcomes), key=lambda case: (case.test, case.setting)):
        passes[case.topic][case.test].append(str(case.setting))
    lists = ",\n".join(
        f'    "{topic}": {{\n'
        + ",\n".join(f"      {json.dumps(test)}: {json.dumps(settings)}" for test, settings in tests.items())
        + "\n    }"
        for topic, tests in passes.items()
    )
    version = json.dumps(torch.__version__.partition("+")[0])
    BASELINE.write_text(f'{{\n  "torch": {version},\n  "passes": {{\n{lists}\n  }}\n}}\n')
    print(f"{sum(map(len, passes.values()))} tests remembered in {BASELINE.name}")


# -------------------------------------------------------------------------------------------------- the comparison


def compare(name: str, cases: list[Case], ours: Outcomes) -> bool:
    """Prints a table and every difference; True when all differences are explained."""
    print(f"\n{'':14}{'tests':>7}{'with settings':>15}{REFERENCE:>8}{name:>8}")
    for topic in Topic:
        listed = [case for case in cases if case.topic is topic]
        passed = [case for case in that_passed(ours) if case in listed]
        tests = len({case.test for case in listed})
        print(f"{topic:14}{tests:7}{len(listed):15}{len(listed):8}{len(passed):8}")
    failed = {case: outcome for case, outcome in ours.items() if outcome.kind is not Kind.PASS}
    differ = {str(case): outcome for case, outcome in failed.items() if case in cases}
    agreed = measure.explain(differ, EXCEPTIONS, reference=REFERENCE, subject=name)
    measure.name_needless({case.test for case in ours} - {case.test for case in failed}, EXCEPTIONS)
    more = sorted(str(case) for case in that_passed(ours) if case not in cases)
    if more:
        print(f"{len(more)} pass on {name} and not on {REFERENCE}:", *more, sep="\n  ")
    return agreed


# ------------------------------------------------------------------------------------------------- the command line


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", default="both", help="gloo, shm, both, or module.name: the backend that importing the module adds"
    )
    parser.add_argument("--quick", action="store_true", help=f"shm, one setting per test, within {QUICK_S} s")
    parser.add_argument("--only", default="", type=measure.a_pattern, metavar="REGEX", help="only tests that match")
    parser.add_argument("--save", action="store_true", help="with --backend gloo: remember what passes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to this file")
    parser.add_argument(
        "--timeout-s", type=measure.seconds, default=90, metavar="S", help="deadline of one test (default 90)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print full tracebacks")
    arguments = parser.parse_args(argv)
    if arguments.quick and arguments.backend == "gloo":
        parser.error("--quick compares with what is remembered of gloo")
    if arguments.quick and arguments.backend == "both":
        arguments.backend = "shm"
    if arguments.save and (arguments.backend != "gloo" or arguments.only):
        parser.error("--save needs --backend gloo, and all tests: no --only")
    try:
        disguise.load("shm" if arguments.backend == "both" else arguments.backend)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    limits = Limits(arguments.timeout_s, time.monotonic() + QUICK_S if arguments.quick else float("inf"))
    measured: dict[str, Outcomes] = {}
    started = time.monotonic()
    if arguments.backend in ("gloo", "both"):
        with Runner(Backend("gloo"), limits, verbose=arguments.verbose) as runner:
            measured["gloo"] = measure_reference(arguments.only, runner)
        cases = that_passed(measured["gloo"])
        ran = [case for case, outcome in measured["gloo"].items() if outcome.kind is not Kind.SKIP]
        print(f"gloo passes {len(cases)} of {len(ran)} cases that it is let into; the others do not count\n")
    else:
        ran = cases = read_baseline(arguments.only)
        if arguments.quick:
            ran = cases = one_per_test(cases)
    if not cases:
        print(f"--only {arguments.only}: no test of this name that gloo passes", file=sys.stderr)
        return 2
    if arguments.save:
        write_baseline(measured["gloo"])
    agreed = True
    if arguments.backend != "gloo":
        backend = Backend("shm" if arguments.backend == "both" else arguments.backend)
        print(f"{backend.name}: {len(ran)} cases")
        with Runner(backend, limits, verbose=arguments.verbose) as runner:
            measured[backend.name] = measure_other(ran, runner)
        agreed = compare(backend.name, cases, measured[backend.name])
    if arguments.json:
        named = {name: {str(case): outcome for case, outcome in found.items()} for name, found in measured.items()}
        measure.write_json(arguments.json, named, what="backends")
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if agreed else 1


if __name__ == "__main__":
    with measure.ending_cleanly():
        sys.exit(main(sys.argv[1:]))
