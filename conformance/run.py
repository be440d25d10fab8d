"""Runs PyTorch's own DistributedDataParallel tests against torch's class and against ours, and shows every difference.

The tests are those inside the installed torch package; none is copied. They run on the CPU with Gloo, each in a fresh
process group of ranks with a deadline. Tests written for GPUs run on a stand-in that lets `cuda` mean the CPU. A test
counts when torch's own class passes it in the same setting; one that passes without building an object of the class
under test is not a pass.

    python conformance/run.py                          both classes, side by side
    python conformance/run.py --quick                  ours, against the remembered list of what torch's class passes
    python conformance/run.py --only no_sync -v        some tests, with tracebacks
    python conformance/run.py --class torch --save     measure torch's class again and remember what passes

Exit status: 0 when ours passes all that torch's class passes, or the test is listed in exceptions.json; 1 when not;
2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import swap
from suite import Host, Kind, Outcome, Setting, next_setting

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
EXCEPTIONS = HERE / "exceptions.json"
QUICK_S = 540  # --quick ends within ten minutes, whatever hangs


@dataclass(frozen=True)
class Limits:
    """One test may take `test_s`; no test starts after `end` on the monotonic clock."""

    test_s: float
    end: float = float("inf")

    def for_next(self) -> float:
        return min(self.test_s, self.end - time.monotonic())


class Runner:
    """Runs tests with one class; keeps one host per setting, started when first needed."""

    def __init__(self, class_name: str, limits: Limits, *, verbose: bool) -> None:
        self.class_name, self.limits, self.verbose = class_name, limits, verbose
        self._hosts: dict[Setting, Host] = {}
        self._open = contextlib.ExitStack()

    def host(self, setting: Setting) -> Host:
        if setting not in self._hosts:
            self._hosts[setting] = self._open.enter_context(Host(self.class_name, setting))
        return self._hosts[setting]

    def search(self, test: str) -> Outcome:
        """Tries the settings until one lets the test run."""
        tried: list[Outcome] = []
        while setting := next_setting(tried):
            tried.append(self._run(test, setting))
        self._report(test, tried[-1])
        return tried[-1]

    def run(self, test: str, setting: Setting) -> Outcome:
        outcome = self._run(test, setting)
        self._report(test, outcome)
        return outcome

    def _run(self, test: str, setting: Setting) -> Outcome:
        timeout_s = self.limits.for_next()
        if timeout_s <= 0:
            return Outcome(Kind.TIMEOUT, setting, 0, 0, "not run: the time for the whole run was used up")
        return self.host(setting).run(test, timeout_s=timeout_s)

    def _report(self, test: str, outcome: Outcome) -> None:
        if self.verbose and outcome.kind is not Kind.PASS and outcome.reason:
            print(outcome.reason.rstrip())
        why = "" if outcome.kind is Kind.PASS else f"  {last_line(outcome.reason)[:120]}"
        print(f"{outcome.kind:8}{outcome.seconds:6.1f} s  {outcome.setting!s:13}{test}{why}", flush=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()


def last_line(reason: str) -> str:
    """The line that says what went wrong. Of the ranks that failed, the first that did not merely lose another one."""
    _, *ranks = re.split(r"^Process \d+ exited with error code \d+ and exception:$", reason, flags=re.MULTILINE)
    said = [_exception_line(trace) for trace in ranks or [reason]]
    lost_a_peer = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
    return next((line for line in said if not lost_a_peer.search(line)), said[0])


def _exception_line(trace: str) -> str:
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    # What follows the exception (frames of C++, advice) is not it; of a rank that was killed only the status is known.
    says = re.compile(r"[\w.]*(Error|Exception|Failure|Warning|Interrupt|Exit)\b|Expected exit code")
    return ([line for line in lines if says.match(line)] or lines or [""])[-1]


# ------------------------------------------------------------------------------------------------- the two classes


def measure_torch(only: str, runner: Runner) -> dict[str, Outcome]:
    names = runner.host(Setting(stand_in=False, world_size=2)).names()
    chosen = [name for name in names if re.search(only, name)]
    print(f"torch {torch.__version__}: {len(names)} tests about DDP, {len(chosen)} chosen")
    return {name: runner.search(name) for name in chosen}


def measure_other(passed: dict[str, Setting], runner: Runner) -> dict[str, Outcome]:
    """What torch's class passed, in the same settings. Sorted by setting: a host is started once."""
    return {name: runner.run(name, setting) for name, setting in sorted(passed.items(), key=lambda item: item[1])}


def settings_passed(outcomes: dict[str, Outcome]) -> dict[str, Setting]:
    return {name: outcome.setting for name, outcome in outcomes.items() if outcome.kind is Kind.PASS}


def read_baseline(only: str) -> dict[str, Setting]:
    remembered = json.loads(BASELINE.read_text())
    if remembered["torch"] != torch.__version__.partition("+")[0]:
        print(
            f"note: {BASELINE.name} is of torch {remembered['torch']}, this is torch {torch.__version__}; "
            "renew it with --class torch --save"
        )
    return {name: Setting(**setting) for name, setting in remembered["passes"].items() if re.search(only, name)}


def write_baseline(outcomes: dict[str, Outcome]) -> None:
    passes = {name: asdict(setting) for name, setting in sorted(settings_passed(outcomes).items())}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(setting)}" for name, setting in passes.items())
    version = json.dumps(torch.__version__.partition("+")[0])
    BASELINE.write_text(f'{{\n  "torch": {version},\n  "passes": {{\n{lines}\n  }}\n}}\n')
    print(f"{len(passes)} tests remembered in {BASELINE.name}")


# -------------------------------------------------------------------------------------------------- the comparison


def compare(class_name: str, passed: dict[str, Setting], ours: dict[str, Outcome]) -> bool:
    """Prints both counts and every difference; True when all differences are explained."""
    exceptions: dict[str, str] = json.loads(EXCEPTIONS.read_text())
    differ = {name: outcome for name, outcome in ours.items() if outcome.kind is not Kind.PASS}
    explained = sorted(differ.keys() & exceptions.keys())
    unexplained = sorted(differ.keys() - exceptions.keys())
    print(f"\n{'torch':40}{len(passed):4} pass\n{class_name:40}{len(ours) - len(differ):4} pass")
    print(f"{len(differ)} differ, {len(explained)} of them explained in {EXCEPTIONS.name}")
    for name in unexplained:
        print(f"  {name}\n    torch: pass   {class_name}: {differ[name].kind}\n    {last_line(differ[name].reason)}")
    for name in explained:
        print(f"  {name}\n    torch: pass   {class_name}: {differ[name].kind}, explained: {exceptions[name]}")
    for name in sorted(exceptions.keys() & ours.keys() - differ.keys()):
        print(f"  {name}: passes now, {EXCEPTIONS.name} need not list it")
    return not unexplained


def write_json(path: Path, outcomes: dict[str, dict[str, Outcome]]) -> None:
    classes = {name: {test: asdict(outcome) for test, outcome in found.items()} for name, found in outcomes.items()}
    path.write_text(json.dumps({"torch": torch.__version__, "classes": classes}, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------- the command line


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--class", dest="class_name", default="both", metavar="CLASS", help="torch, lockstep, both or a dotted name"
    )
    parser.add_argument("--quick", action="store_true", help=f"the same as --class lockstep, within {QUICK_S} s")
    parser.add_argument("--only", default="", metavar="REGEX", help="only tests whose name matches")
    parser.add_argument("--save", action="store_true", help="with --class torch: remember what passes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to this file")
    parser.add_argument("--timeout-s", type=float, default=90, metavar="S", help="deadline of one test (default 90)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print full tracebacks")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        if arguments.class_name not in ("both", "lockstep"):
            parser.error(f"--quick measures lockstep, not {arguments.class_name}")
        arguments.class_name = "lockstep"
    if arguments.save and (arguments.class_name != "torch" or arguments.only):
        parser.error("--save needs --class torch, and all tests: no --only")
    if arguments.timeout_s <= 0:
        parser.error(f"--timeout-s {arguments.timeout_s:g}: must be positive")
    try:
        re.compile(arguments.only)
    except re.error as error:
        parser.error(f"--only {arguments.only}: {error}")
    try:
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
    if arguments.class_name in ("torch", "both"):
        with Runner("torch", limits, verbose=arguments.verbose) as runner:
            measured["torch"] = measure_torch(arguments.only, runner)
        passed = settings_passed(measured["torch"])
        print(f"torch's class passes {len(passed)} of {len(measured['torch'])}; the others do not count\n")
    else:
        passed = read_baseline(arguments.only)
    if not passed:
        print(f"--only {arguments.only}: no test of this name that torch's class passes", file=sys.stderr)
        return 2
    if arguments.save:
        write_baseline(measured["torch"])
    agreed = True
    if arguments.class_name != "torch":
        class_name = "lockstep" if arguments.class_name == "both" else arguments.class_name
        print(f"{class_name}: {len(passed)} tests")
        with Runner(class_name, limits, verbose=arguments.verbose) as runner:
            measured[class_name] = measure_other(passed, runner)
        agreed = compare(class_name, passed, measured[class_name])
    if arguments.json:
        write_json(arguments.json, measured)
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if agreed else 1


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that every host is killed on the way out."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")


if __name__ == "__main__":
    with ending_cleanly():
        sys.exit(main(sys.argv[1:]))
