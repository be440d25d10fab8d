"""Runs PyTorch's own DistributedDataParallel tests against torch's class and against ours, and shows every difference.

The tests are those inside the installed torch package; none is copied. They run on the CPU with Gloo, each in a fresh
process group of ranks with a deadline. Tests written for GPUs run on a stand-in that lets `cuda` mean the CPU. A test
counts when torch's own class passes it in the same setting; one that passes without building an object of the class
under test is not a pass.

    python conformance/run.py                          both classes, side by side
    python conformance/run.py --quick                  ours, against the remembered list of what torch's class passes
    python conformance/run.py --quick --backend shm    ours on shm, against the same list
    python conformance/run.py --only no_sync -v        some tests, with tracebacks
    python conformance/run.py --class torch --save     measure torch's class again and remember what passes
    python conformance/run.py --nccl-ranks 3           both classes over NCCL, with three ranks on one GPU

Exit status: 0 when ours passes all that torch's class passes, or the test is listed in exceptions.json; 1 when not;
2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

# Before any import of torch: it then looks for GPUs without using CUDA, which does not survive the fork of the ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

import standin

if any(argument.startswith("--nccl") for argument in sys.argv):
    standin.hide_gpus()

import disguise
import measure
import swap
from measure import Limits, Runner
from subjects import DdpClass
from suite import Kind, Outcome, Setting, Topic, next_setting

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
EXCEPTIONS = HERE / "exceptions.json"
BACKEND_EXCEPTIONS = HERE / "backend_exceptions.json"
QUICK_S = 540  # --quick ends within ten minutes, whatever hangs


# ------------------------------------------------------------------------------------------------- the two classes


def measure_both(
    only: str, torchs: Runner, ours: Runner | None, nccl_ranks: int | None
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Each chosen test with torch's class; if that passes, at once with ours in the same setting."""
    one_gpu = None if nccl_ranks is None else Setting(False, nccl_ranks, known_as="nccl", one_gpu=True)
    topics = torchs.host(one_gpu or Setting(stand_in=False, world_size=2)).topics()
    names = [name for name, topic in topics.items() if topic is Topic.DDP]
    chosen = [name for name in names if re.search(only, name)]
    print(f"torch {torch.__version__}: {len(names)} tests about DDP, {len(chosen)} chosen")
    by_torch, by_ours = dict[str, Outcome](), dict[str, Outcome]()
    torchs.expected = len(chosen)
    for name in chosen:
        outcome = torchs.search(name, next_setting) if one_gpu is None else torchs.run(name, one_gpu)
        by_torch[name] = outcome
        if ours is not None and outcome.kind is Kind.PASS:
            by_ours[name] = ours.run(name, outcome.setting)
    passed = len(settings_passed(by_torch))
    print(f"torch's class passes {passed} of {len(chosen)}; the others do not count\n")
    return by_torch, by_ours


def measure_ours(passed: dict[str, Setting], ours: Runner) -> dict[str, Outcome]:
    """What torch's class passed, in the same settings."""
    ours.expected = len(passed)
    return {name: ours.run(name, setting) for name, setting in passed.items()}


def settings_passed(outcomes: dict[str, Outcome]) -> dict[str, Setting]:
    return {name: outcome.setting for name, outcome in outcomes.items() if outcome.kind is Kind.PASS}


def read_baseline(only: str) -> dict[str, Setting]:
    remembered = json.loads(BASELINE.read_text())
    measure.warn_of_other_version(remembered["torch"], path=BASELINE, renew="--class torch --save")
    return {name: Setting.parse(setting) for name, setting in remembered["passes"].items() if re.search(only, name)}


def write_baseline(outcomes: dict[str, Outcome]) -> None:
    passes = {name: str(setting) for name, setting in sorted(settings_passed(outcomes).items())}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(setting)}" for name, setting in passes.items())
    version = json.dumps(torch.__version__.partition("+")[0])
    BASELINE.write_text(f'{{\n  "torch": {version},\n  "passes": {{\n{lines}\n  }}\n}}\n')
    print(f"{len(passes)} tests remembered in {BASELINE.name}")


# -------------------------------------------------------------------------------------------------- the comparison


def compare(subject: DdpClass, ours: dict[str, Outcome]) -> bool:
    """Prints both counts and every difference; True when all differences are explained."""
    differ = {name: outcome for name, outcome in ours.items() if outcome.kind is not Kind.PASS}
    name = subject.name if subject.backend == "gloo" else f"{subject.name} on {subject.backend}"
    print(f"\n{'torch':40}{len(ours):4} pass\n{name:40}{len(ours) - len(differ):4} pass")
    exceptions = [EXCEPTIONS] if subject.backend in ("gloo", "nccl") else [EXCEPTIONS, BACKEND_EXCEPTIONS]
    agreed = measure.explain(differ, *exceptions, reference="torch", subject=name)
    measure.name_needless(ours.keys() - differ.keys(), EXCEPTIONS)
    return agreed


# ------------------------------------------------------------------------------------------------- the command line


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--class", dest="class_name", default="both", metavar="CLASS", help="torch, lockstep, both or a dotted name"
    )
    parser.add_argument("--backend", default="gloo", help="what ours runs on (default gloo); torch's class is on gloo")
    parser.add_argument("--nccl-ranks", type=int, metavar="N", help="both classes over NCCL, with N ranks on one GPU")
    parser.add_argument("--quick", action="store_true", help=f"the same as --class lockstep, within {QUICK_S} s")
    parser.add_argument(
        "--only", default="", type=measure.a_pattern, metavar="REGEX", help="only tests whose name matches"
    )
    parser.add_argument("--save", action="store_true", help="with --class torch: remember what passes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to this file")
    parser.add_argument(
        "--timeout-s", type=measure.seconds, default=90, metavar="S", help="deadline of one test (default 90)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print full tracebacks")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        if arguments.class_name not in ("both", "lockstep"):
            parser.error(f"--quick measures lockstep, not {arguments.class_name}")
        arguments.class_name = "lockstep"
    if arguments.save and (arguments.class_name != "torch" or arguments.only):
        parser.error("--save needs --class torch, and all tests: no --only")
    if arguments.nccl_ranks is not None:
        if arguments.nccl_ranks < 2 or arguments.save or arguments.class_name != "both" or arguments.backend != "gloo":
            parser.error("--nccl-ranks takes at least 2, and none of --quick, --save, --class and --backend")
        if not torch.cuda.is_available():
            parser.error("--nccl-ranks needs a GPU, and torch sees none here")
        arguments.backend = "nccl"
    if arguments.class_name == "torch" and arguments.backend != "gloo":
        parser.error("torch's class on other backends is what backend.py measures")
    try:
        disguise.load(arguments.backend)
        for name in ("torch", "lockstep") if arguments.class_name == "both" else (arguments.class_name,):
            swap.load(name)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    limits = Limits(arguments.timeout_s, time.monotonic() + QUICK_S if arguments.quick else float("inf"))
    measured: dict[str, dict[str, Outcome]] = {}
    started = time.monotonic()
    name = "lockstep" if arguments.class_name == "both" else arguments.class_name
    subject, on = DdpClass(name, arguments.backend), "nccl" if arguments.nccl_ranks is not None else "gloo"
    with Runner(subject, limits, verbose=arguments.verbose) as ours:
        if arguments.class_name in ("torch", "both"):
            with Runner(DdpClass("torch", on), limits, verbose=arguments.verbose) as torchs:
                other = ours if arguments.class_name == "both" else None
                measured["torch"], by_ours = measure_both(arguments.only, torchs, other, arguments.nccl_ranks)
            passed = settings_passed(measured["torch"])
        else:
            passed = read_baseline(arguments.only)
            print(f"{subject.name}: {len(passed)} tests")
            by_ours = measure_ours(passed, ours)
    if not passed:
        print(f"--only {arguments.only}: no test of this name that torch's class passes", file=sys.stderr)
        return 2
    if arguments.save:
        write_baseline(measured["torch"])
    agreed = True
    if arguments.class_name != "torch":
        measured[subject.name] = by_ours
        agreed = compare(subject, by_ours)
    if arguments.json:
        measure.write_json(arguments.json, measured, what="classes")
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if agreed else 1


if __name__ == "__main__":
    with measure.ending_cleanly():
        sys.exit(main(sys.argv[1:]))
