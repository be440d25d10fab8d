"""The record of an uncaught exception that a worker writes for its launcher, and the traceback that it prints.

The file is in the folder of logs, and is named after the process. Nothing here needs torch.

Note [Tracebacks]
After a failed run the user wants to see one traceback, that of the worker that failed first, and only the frames of the
program in it. Only the launcher knows which worker failed first. So a worker under a launcher prints one line, and
writes its traceback into the record: in full for its log, and shortened for the terminal in case it failed first.
Without a launcher the shortened traceback is printed. LOCKSTEP_TRACEBACK=full prints the full one in both cases.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from traceback import TracebackException
from types import TracebackType
from typing import Any, Final, final

from lockstep.failures import traceback_parser
from lockstep.settings import Settings

LONGEST_TRACE: Final = 200_000
LONGEST_LINE: Final = 300
ENDED_ITSELF: Final = "SystemExit"


@dataclass(frozen=True)
class CrashRecord:
    pid: int
    host: str
    kind: str  # class name of the exception
    text: str  # its message
    trace: str  # as Python prints it, with its causes
    where: dict[str, Any] = field(default_factory=dict)  # rank, size, step, epoch, call, shard, device, memory
    short: str = ""  # `trace` with the user's own frames only
    left_out: int = 0  # number of frames that `short` leaves out
    is_printed: bool = False  # the worker has printed `trace` itself


def path_of(folder: Path, pid: int) -> Path:
    return folder / f"failure-{pid}.json"


def mark_path(folder: Path, pid: int) -> Path:
    return folder / f"in-run-{pid}.json"


def write(path: Path, facts: CrashRecord | RunMark) -> bool:
    """Writes the file atomically. Returns False if that fails: a full disk must not hide the error itself."""
    with suppress(OSError):
        path.with_suffix(".new").write_text(json.dumps(asdict(facts)))
        path.with_suffix(".new").replace(path)
        return True
    return False


def read(folder: Path, pid: int, name: str) -> CrashRecord | None:
    """Reads the record of a process and renames the file after the worker. Returns None if there is no valid record."""
    path = path_of(folder, pid)
    try:
        facts = CrashRecord(**json.loads(path.read_bytes()))
        path.replace(folder / f"failure-{name}.json")
    except (OSError, ValueError, TypeError):
        return None
    return facts if isinstance(facts.where, dict) and facts.pid == pid else None


@dataclass(frozen=True)
class RunMark:
    """File that a worker keeps while it is in a Run, so that its launcher notices an exit with status 0 there."""

    is_left: bool = False  # the Run was left by an exception or at interpreter exit; False: the worker is inside
    facts: CrashRecord | None = None  # record of the sys.exit() that left it, if so (the name is the JSON key)


def take_mark(folder: Path, pid: int) -> RunMark | None:
    """Reads and removes the mark of a process that has ended. Returns None if the process was not in a Run, or had
    reached its end."""
    path = mark_path(folder, pid)
    try:
        mark = json.loads(path.read_bytes())
        path.unlink()
        return RunMark(bool(mark["is_left"]), None if mark["facts"] is None else CrashRecord(**mark["facts"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return RunMark()  # incomplete file


Where = Callable[[TracebackType | None], dict[str, Any]]


@final
class CrashHook:
    """A `sys.excepthook` that writes the crash record: see Note [Tracebacks]."""

    def __init__(self, settings: Settings, where: Where = lambda trace: {}) -> None:
        """`where` returns what is known about the place of the failure, for the card."""
        self._where, self._pid = where, os.getpid()
        # No record in a process that a worker has started: the launcher would not read it.
        is_worker = settings.launcher == os.getppid()
        self._folder = Path(settings.run_dir) if is_worker and settings.run_dir else None
        self._prints_all = (settings.traceback or "").lower() == "full"
        self._before = sys.excepthook
        self._is_removed = False

    def install(self) -> None:
        self._before, sys.excepthook = sys.excepthook, self

    def remove(self) -> None:
        self._is_removed = True  # torch may have saved this hook, and may install it again when its group ends
        if sys.excepthook == self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_reported = False
        if not self._is_removed and os.getpid() == self._pid:
            with suppress(Exception):
                is_reported = self._report(kind, error, trace)
        if not is_reported:
            self._before(kind, error, trace)

    def record_exit(self, error: SystemExit) -> None:
        """Records a sys.exit() that is a failure, for which Python prints no traceback."""
        if self._folder is not None and os.getpid() == self._pid:
            how = f"({error.code})" if isinstance(error.code, int) else f" with the message: {error.code}"
            write(path_of(self._folder, self._pid), self._describe_exit(error, f"the program called sys.exit{how}"))

    def mark_run(self, mark: RunMark | None) -> None:
        """Writes this mark for the launcher, if there is one; None removes it."""
        if self._folder is None or os.getpid() != self._pid:
            return
        path = mark_path(self._folder, self._pid)
        if mark is not None:
            write(path, mark)
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def describe_exit(self, error: SystemExit) -> CrashRecord:
        """Returns the record of a sys.exit() that has left a Run."""
        code = "" if error.code is None else error.code
        return self._describe_exit(error, f"the program called sys.exit({code}) in the middle of its Run")

    def _describe_exit(self, error: SystemExit, text: str) -> CrashRecord:
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        return self._describe(ENDED_ITSELF, text, trace, error.__traceback__, is_printed=True)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
        """Returns False if the caller has to print the full traceback."""
        exception = TracebackException(kind, error, trace)
        full = "".join(exception.format())[-LONGEST_TRACE:]
        left_out = traceback_parser.cut(exception)
        short = "".join(exception.format())
        if self._folder is not None and isinstance(error, Exception):
            text, shown = str(error), {"short": short, "left_out": left_out, "is_printed": self._prints_all}
            facts = self._describe(kind.__name__, text, full, trace, **shown)
            if not write(path_of(self._folder, self._pid), facts) or self._prints_all:
                return False
            print(f"{kind.__name__}: {text}".splitlines()[0][:LONGEST_LINE], file=sys.stderr, flush=True)
            return True
        if left_out == 0 or self._prints_all:
            return False
        what = f"{left_out} frame{'s' if left_out > 1 else ''} of lockstep and torch"
        note = f"({what} left out; LOCKSTEP_TRACEBACK=full shows all)"
        print(f"{short}{note}", file=sys.stderr, flush=True)
        return True

    def _describe(self, kind: str, text: str, full: str, trace: TracebackType | None, **shown: Any) -> CrashRecord:
        where: dict[str, Any] = {}
        with suppress(Exception):
            where = self._where(trace)
        return CrashRecord(self._pid, socket.gethostname(), kind, text, full, where, **shown)
