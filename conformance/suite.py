"""PyTorch's distributed tests, as they ship inside the installed torch: which they are, and running one of them.

The module of tests reads its settings when it is imported, so every setting has its own *host*, a process that imports
the tests once. For each test it forks fresh ranks, which form their own process group.

    run.py or backend.py -> host, one per subject and setting -> the ranks of one test

All processes of a host form one session, which is killed as a whole; each dies with its parent, so that a SIGKILL of
run.py leaves nothing behind either.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.testing._internal import common_distributed

import standin
import swap
from lockstep.comm.abortable_group import share_gpu_over_nccl
from reductions import ReductionTests
from sharding import ShardingTests

START_S = 120  # for a host to import the tests
OWN = (ReductionTests, ShardingTests)
GRACE_S = 20  # for a host to report that its ranks ran out of time, with their tracebacks

# Sizes meant for a GPU that would take a CPU many minutes: integer constants of a test, and what stands for them.
SMALLER = {"test_ddp_uneven_inputs": {1000: 64}}

_fork = multiprocessing.get_context("fork")  # no import of torch in each rank


@dataclass(frozen=True, order=True)
class Setting:
    stand_in: bool
    world_size: int
    known_as: str = "gloo"  # the backend that the tests take ours for
    one_gpu: bool = False  # all ranks share it, over NCCL

    def __str__(self) -> str:
        if self.one_gpu:
            return f"one GPU x{self.world_size}"
        other = "" if self.known_as == "gloo" else f" {self.known_as}"
        return f"{'stand-in' if self.stand_in else 'cpu'} x{self.world_size}{other}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        device, size, *known_as = text.split()
        return cls(device == "stand-in", int(size.removeprefix("x")), *known_as)


class Kind(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    TIMEOUT = "timeout"
    CRASH = "crash"


class Topic(StrEnum):
    COLLECTIVES = "collectives"
    DDP = "DDP"
    OWN = "our own"  # what PyTorch's tests, as far as they are in the package, leave out


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    setting: Setting
    seconds: float
    built: int  # what the subject produced, over all ranks
    reason: str = ""


def next_setting(tried: list[Outcome]) -> Setting | None:
    """Where to try a test next, given what came before: as it is first, then with what it said it needs."""
    if not tried:
        return Setting(stand_in=False, world_size=2)
    last = tried[-1]
    if last.kind is not Kind.SKIP:
        return None
    if not last.setting.stand_in:
        return Setting(stand_in=True, world_size=2)
    if last.setting.world_size == 2 and "world size" in last.reason:
        return Setting(stand_in=True, world_size=4)
    return None


class Subject(Protocol):
    """What is tested: it puts itself where the tests will use it, and counts that they do."""

    @property
    def name(self) -> str: ...
    @property
    def product(self) -> str: ...
    def import_tests(self, setting: Setting, *, built: Path) -> types.ModuleType: ...


class Host:
    """Runs tests one after the other, in one setting, with one subject."""

    def __init__(self, subject: Subject, setting: Setting) -> None:
        self.subject, self.setting = subject, setting
        self._scratch = tempfile.TemporaryDirectory(prefix="lockstep-conformance-")
        self._process: Any = None
        self._pipe: Connection

    def topics(self) -> dict[str, Topic]:
        """All tests, and what each is about."""
        self._start()
        self._pipe.send(None)
        if not self._pipe.poll(START_S):
            raise TimeoutError(f"the tests were not listed within {START_S} s")
        found: dict[str, Topic] = self._pipe.recv()
        return found

    def run(self, test: str, *, timeout_s: float) -> Outcome:
        self._start()
        self._pipe.send((test, timeout_s))
        started = time.monotonic()
        try:
            if self._pipe.poll(timeout_s + GRACE_S):
                outcome: Outcome = self._pipe.recv()
                return outcome
            kind, what = Kind.TIMEOUT, f"no answer within {timeout_s + GRACE_S:.0f} s"
        except EOFError:
            kind, what = Kind.CRASH, "the process that runs the tests died"
        seconds = time.monotonic() - started
        self._kill()  # the next test gets a new host
        return Outcome(kind, self.setting, seconds, 0, f"{_tail(self._log)}\n{what}")

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = _fork.Pipe()
        self._process = _fork.Process(
            target=_serve, args=(self.subject, self.setting, Path(self._scratch.name), theirs), daemon=False
        )
        self._process.start()
        theirs.close()
        self._pipe = ours
        if not self._pipe.poll(START_S):
            raise TimeoutError(f"{self.setting}: the tests were not imported within {START_S} s\n{_tail(self._log)}")
        error = self._pipe.recv()
        if error:
            raise RuntimeError(f"{self.setting}: the tests could not be imported with {self.subject.name}\n{error}")

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # in case it has not made its session yet
            self._process.join()
            self._pipe.close()
            self._process = None

    @property
    def _log(self) -> Path:
        return Path(self._scratch.name) / "output"

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()
        self._scratch.cleanup()


def _tail(log: Path, characters: int = 20_000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


# ---------------------------------------------------------------------------------------------- inside a host


def _serve(subject: Subject, setting: Setting, scratch: Path, pipe: Connection) -> None:
    os.setsid()
    die_with_parent()
    log, built = scratch / "output", scratch / "built"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    try:
        suite = _load_suite(subject, setting, scratch)
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
    pipe.send(None)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            names = unittest.defaultTestLoader.getTestCaseNames(suite)
            pipe.send({name: _topic(suite, name) for name in names})
            continue
        os.truncate(log, 0)
        built.write_bytes(b"")
        test, timeout_s = request
        common_distributed.TIMEOUT_DEFAULT = timeout_s
        started = time.monotonic()
        kind, reason = _run(suite, test)
        seconds, objects = round(time.monotonic() - started, 2), built.stat().st_size
        if kind is Kind.TIMEOUT or "Expected exit code 0" in reason:  # a rank may have failed before its test began
            reason = f"{_tail(log)}\n{reason}"
        if kind is Kind.PASS and not objects:
            kind, reason = Kind.FAIL, f"passed without building {subject.product}"
        pipe.send(Outcome(kind, setting, seconds, objects, reason))


def _load_suite(subject: Subject, setting: Setting, scratch: Path) -> type[unittest.TestCase]:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(setting.world_size))  # read when the tests are imported
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(scratch / "compiled"))
    os.environ.pop("MASTER_PORT", None)
    tempfile.tempdir = str(scratch)
    torch.set_num_threads(1)
    common_distributed.TIMEOUT_OVERRIDE.clear()  # type: ignore[attr-defined]
    if setting.stand_in:
        standin.install(devices=setting.world_size)
    if setting.one_gpu:
        standin.install_one_gpu(devices=setting.world_size)
    tests: Any = subject.import_tests(setting, built=scratch / "built")

    class Tests(*OWN, tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(_fork.Process)

        def tearDown(self) -> None:
            ranks = self.processes
            super().tearDown()
            for rank in ranks:
                rank.kill()
                rank.join()

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            die_with_parent()
            if setting.one_gpu:
                standin.show_gpus()
                share_gpu_over_nccl(os.getpid())
            super()._run(*args, **kwargs)

    if setting.stand_in or setting.one_gpu:
        for test, sizes in SMALLER.items():
            if hasattr(Tests, test):
                _shrink(getattr(Tests, test), sizes)
    return Tests


def _run(suite: type[unittest.TestCase], test: str) -> tuple[Kind, str]:
    if not hasattr(suite, test):
        return Kind.FAIL, f"torch {torch.__version__} has no test of this name"
    result = unittest.TestResult()
    unittest.TestSuite([suite(test)]).run(result)  # a suite also calls setUpClass
    if result.skipped:
        return Kind.SKIP, result.skipped[0][1]
    for _, reason in result.errors + result.failures:
        return Kind.TIMEOUT if "terminated or timed out after" in reason else Kind.FAIL, reason
    return (Kind.PASS, "") if result.wasSuccessful() else (Kind.FAIL, "unexpected success")


def _topic(suite: type, test: str) -> Topic:
    if any(hasattr(own, test) for own in OWN):
        return Topic.OWN
    if swap.TORCH_CLASS.__name__ in _names_used(suite, getattr(suite, test)) or "ddp" in test.lower():
        return Topic.DDP
    return Topic.COLLECTIVES


def _names_used(suite: type, function: Callable[..., Any]) -> set[str]:
    """The names in a test's code, in the code of the helper methods it calls, and in theirs."""
    used: set[str] = set()
    todo, seen = [_code(function)], set()
    while todo:
        code = todo.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        used.update(code.co_names)
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        helpers = (getattr(suite, name, None) for name in code.co_names if not hasattr(unittest.TestCase, name))
        todo += [_code(helper) for helper in helpers]
    return used


def _code(function: Any) -> types.CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def _shrink(function: Any, sizes: dict[int, int]) -> None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    constants = tuple(sizes.get(value, value) if type(value) is int else value for value in function.__code__.co_consts)
    function.__code__ = function.__code__.replace(co_consts=constants)


def die_with_parent() -> None:
    """Linux: a SIGKILL for this process when its parent is gone. Elsewhere only the killing of the session remains."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
