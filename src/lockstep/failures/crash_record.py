"""What a worker that fails writes down for its launcher, and what it prints of its traceback.

The file is in the folder of logs, and is named after the process. Nothing here needs torch.

Note [Tracebacks]
Of a failed run the user wants to see one traceback, that of the worker that failed first, and in it the lines of the
program. Only the launcher knows which worker that is. So a worker under a launcher prints one line, and hands its
traceback over in the file: whole, for its log, and cut, for the terminal if it was the first. Without a launcher the
cut one is printed. LOCKSTEP_TRACEBACK=full prints it whole in both cases.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from traceback import TracebackException
from types import TracebackType
from typing import Any, Final, final

from lockstep.failures import traceback_parser

LONGEST_TRACE: Final = 200_000
LONGEST_LINE: Final = 300
ENDED_ITSELF: Final = "SystemExit"
_NO_FAILURE: Final = (None, 0, 75)  # 75: it was asked to end, and has saved (train/run.py)


@dataclass(frozen=True)
class Facts:
    pid: int
    host: str
    kind: str  # of exception
    text: str
    trace: str  # as Python prints it, causes and all
    where: dict[str, Any] = field(default_factory=dict)  # rank, size, step, epoch, call, shard
    short: str = ""  # `trace` with the user's own frames only
    left_out: int = 0  # frames that `short` does not have
    is_printed: bool = False  # the worker has printed `trace` itself


def path_of(folder: Path, pid: int) -> Path:
    return folder / f"failure-{pid}.json"


def write(folder: Path, facts: Facts) -> bool:
    """Whole, or not at all: then it returns False. A disk that is full must not hide the error itself."""
    path = path_of(folder, facts.pid)
    with suppress(OSError):
        path.with_suffix(".new").write_text(json.dumps(asdict(facts)))
        path.with_suffix(".new").replace(path)
        return True
    return False


def read(folder: Path, pid: int, name: str) -> Facts | None:
    """None: it wrote nothing, or nothing that we understand. The file then bears the worker's name."""
    path = path_of(folder, pid)
    try:
        facts = Facts(**json.loads(path.read_bytes()))
        path.replace(folder / f"failure-{name}.json")
    except (OSError, ValueError, TypeError):
        return None
    return facts if isinstance(facts.where, dict) and facts.pid == pid else None


@dataclass(frozen=True)
class RunMark:
    """What a worker leaves for its launcher while it is in a Run, in case that it ends there with status 0."""

    is_left: bool = False  # by an exception, or at the end of the interpreter; False: it is inside
    facts: Facts | None = None  # about sys.exit, if that was how


def mark_path(folder: Path, pid: int) -> Path:
    return folder / f"in-run-{pid}.json"


def take_mark(folder: Path, pid: int) -> RunMark | None:
    """Read and remove the mark of a process that has ended. None: it was not in a Run, or had come to its end."""
    path = mark_path(folder, pid)
    try:
        told = json.loads(path.read_bytes())
        path.unlink()
        return RunMark(bool(told["is_left"]), None if told["facts"] is None else Facts(**told["facts"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return RunMark()  # half written


Where = Callable[[TracebackType | None], dict[str, Any]]


@final
class CrashHook:
    """A `sys.excepthook`: see Note [Tracebacks]."""

    def __init__(self, env: Mapping[str, str], where: Where = lambda trace: {}) -> None:
        """`where`: what is known about the place of the failure, for the card."""
        self._where, self._pid = where, os.getpid()
        # Not in a process that a worker has started: its output may go elsewhere, and its file is not read.
        is_worker = env.get("LOCKSTEP_LAUNCHER") == str(os.getppid())
        self._folder = Path(env["LOCKSTEP_RUN_DIR"]) if is_worker and env.get("LOCKSTEP_RUN_DIR") else None
        self._prints_all = env.get("LOCKSTEP_TRACEBACK", "").strip().lower() == "full"
        self._before = sys.excepthook
        self._is_removed = False

    def install(self) -> None:
        self._before, sys.excepthook = sys.excepthook, self

    def remove(self) -> None:
        self._is_removed = True  # torch may have kept us, to put us back when its group ends
        if sys.excepthook == self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_told = False
        if not self._is_removed and os.getpid() == self._pid:
            with suppress(Exception):
                is_told = self._tell(kind, error, trace)
        if not is_told:
            self._before(kind, error, trace)

    def note_exit(self, error: SystemExit) -> None:
        """Write down that the program has ended itself, for which Python prints no traceback."""
        if self._folder is None or os.getpid() != self._pid or error.code in _NO_FAILURE:
            return
        how = f"({error.code})" if isinstance(error.code, int) else f" with the message: {error.code}"
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        self._write(ENDED_ITSELF, f"the program called sys.exit{how}", trace, error.__traceback__, is_printed=True)

    def mark_run(self, mark: RunMark | None) -> None:
        """Leave this mark for the launcher, if there is one, in place of the one before. None: take it away."""
        if self._folder is None or os.getpid() != self._pid:
            return
        path = mark_path(self._folder, self._pid)
        with suppress(OSError):
            if mark is None:
                path.unlink(missing_ok=True)
            else:
                path.with_suffix(".new").write_text(json.dumps(asdict(mark)))
                path.with_suffix(".new").replace(path)

    def describe_exit(self, error: SystemExit) -> Facts:
        """What is known of a sys.exit() that has left a Run."""
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        text = f"the program called sys.exit({'' if error.code is None else error.code}) in the middle of its Run"
        where: dict[str, Any] = {}
        with suppress(Exception):
            where = self._where(error.__traceback__)
        return Facts(self._pid, socket.gethostname(), ENDED_ITSELF, text, trace, where, is_printed=True)

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
        """False: the traceback has yet to be printed, whole."""
        told = TracebackException(kind, error, trace)
        whole = "".join(told.format())[-LONGEST_TRACE:]
        left_out = traceback_parser.cut(told)
        short = "".join(told.format())
        if self._folder is not None and isinstance(error, Exception):
            text, shown = str(error), {"short": short, "left_out": left_out, "is_printed": self._prints_all}
            if not self._write(kind.__name__, text, whole, trace, **shown) or self._prints_all:
                return False
            print(f"{kind.__name__}: {text}".splitlines()[0][:LONGEST_LINE], file=sys.stderr, flush=True)
            return True
        if left_out == 0 or self._prints_all:
            return False
        what = f"{left_out} frame{'s' if left_out > 1 else ''} of lockstep and torch"
        note = f"({what} left out; LOCKSTEP_TRACEBACK=full shows all)"
        print(f"{short}{note}", file=sys.stderr, flush=True)
        return True

    def _write(self, kind: str, text: str, whole: str, trace: TracebackType | None, **shown: Any) -> bool:
        assert self._folder is not None
        where: dict[str, Any] = {}
        with suppress(Exception):
            where = self._where(trace)
        return write(self._folder, Facts(self._pid, socket.gethostname(), kind, text, whole, where, **shown))
