"""Running many tests with one subject, and saying how two subjects differ: what run.py and backend.py share."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from suite import Host, Kind, Outcome, Setting, Subject


@dataclass(frozen=True)
class Limits:
    """One test may take `test_s`; no test starts after `end` on the monotonic clock."""

    test_s: float
    end: float = float("inf")

    def for_next(self) -> float:
        return min(self.test_s, self.end - time.monotonic())


class Runner:
    """Runs tests with one subject; keeps one host per setting, started when first needed."""

    def __init__(self, subject: Subject, limits: Limits, *, verbose: bool) -> None:
        self.subject, self.limits, self.verbose = subject, limits, verbose
        self.expected = self._reported = 0  # lines; for a progress display, if it is known how many there will be
        self._hosts: dict[Setting, Host] = {}
        self._open = contextlib.ExitStack()

    def host(self, setting: Setting) -> Host:
        if setting not in self._hosts:
            self._hosts[setting] = self._open.enter_context(Host(self.subject, setting))
        return self._hosts[setting]

    def search(self, test: str, next_setting: Callable[[list[Outcome]], Setting | None]) -> Outcome:
        """Tries settings until one lets the test run."""
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
        self._reported += 1
        progress = f"{self._reported:{len(str(self.expected))}}/{self.expected}" if self.expected else self.subject.name
        print(f"{progress:9}{outcome.kind:8}{outcome.seconds:6.1f} s  {outcome.setting!s:18}{test}{why}", flush=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()


def last_line(reason: str) -> str:
    """The line that says what went wrong. Of the ranks that failed, the first that did not merely lose another one."""
    _, *ranks = re.split(r"^Process \d+ exited with error code \d+ and exception:$", reason, flags=re.MULTILINE)
    said = [_exception_line(trace) for trace in ranks or [reason]]
    lost_a_peer = re.compile(r"Connection (closed|reset) by peer|Broken pipe|PeerLostError")
    return next((line for line in said if not lost_a_peer.search(line)), said[0])


def _exception_line(trace: str) -> str:
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    # What follows the exception (frames of C++, advice) is not it; of a rank that was killed only the status is known.
    says = re.compile(r"[\w.]*(Error|Exception|Failure|Warning|Interrupt|Exit|Lost|DesyncError)\b|Expected exit code")
    return ([line for line in lines if says.match(line)] or lines or [""])[-1]


def explain(differ: dict[str, Outcome], *exceptions: Path, reference: str, subject: str) -> bool:
    """Prints every difference; True when a file of exceptions has a reason for each. `differ` is keyed by the name of a
    test, with more behind a space where a test ran in several settings."""
    reasons: dict[str, str] = {}
    for path in exceptions:
        reasons |= json.loads(path.read_text())
    explained = {name: reasons[test] for name in sorted(differ) if (test := name.partition(" ")[0]) in reasons}
    unexplained = sorted(differ.keys() - explained.keys())
    files = " or ".join(path.name for path in exceptions)
    print(f"{len(differ)} differ, {len(explained)} of them explained in {files}")
    for name in unexplained:
        kind, reason = differ[name].kind, last_line(differ[name].reason)
        print(f"  {name}\n    {reference}: pass   {subject}: {kind}\n    {reason}")
    for name, why in explained.items():
        print(f"  {name}\n    {reference}: pass   {subject}: {differ[name].kind}, explained: {why}")
    return not unexplained


def name_needless(passed: set[str], exceptions: Path) -> None:
    for name in sorted(json.loads(exceptions.read_text()).keys() & passed):
        print(f"  {name}: passes now, {exceptions.name} need not list it")


def warn_of_other_version(remembered: str, *, path: Path, renew: str) -> None:
    if remembered != torch.__version__.partition("+")[0]:
        print(f"note: {path.name} is of torch {remembered}, this is torch {torch.__version__}; renew it with {renew}")


def write_json(path: Path, outcomes: dict[str, dict[str, Outcome]], *, what: str) -> None:
    found = {name: {test: asdict(outcome) for test, outcome in tests.items()} for name, tests in outcomes.items()}
    path.write_text(json.dumps({"torch": torch.__version__, what: found}, indent=1) + "\n")


def a_pattern(text: str) -> str:
    """For argparse: a regular expression, as it was given."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return text


def seconds(text: str) -> float:
    """For argparse: a positive number of seconds."""
    if not text.replace(".", "", 1).isdigit() or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return float(text)


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that every host is killed on the way out."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
