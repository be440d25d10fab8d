"""Runs a program as `python` would, and writes down what ends it (failures/crash_record.py).

    python -m lockstep.launcher.worker_main train.py args...
    python -m lockstep.launcher.worker_main -m package.train args...
    python -m lockstep.launcher.worker_main --drop-in train.py args...   our DistributedDataParallel is in torch's place

This is what `lockstep run` starts.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
import zipfile
from types import ModuleType

from lockstep.failures.crash_record import CrashHook
from lockstep.launcher.parent_watch import name_semaphores


def become(program: list[str]) -> None:
    """Run it as `python` would; its traceback begins with it, and not with us."""
    hook = CrashHook(os.environ)
    hook.install()
    if os.environ.get("LOCKSTEP_LAUNCHER") == str(os.getppid()):
        name_semaphores(os.environ)
    try:
        run_program(program)
    except SystemExit as error:
        hook.note_exit(error)
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and _is_start(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _is_start(file: str) -> bool:
    """Of the code that starts a program."""
    return file in (__file__, "<frozen runpy>")


def run_program(arguments: list[str]) -> None:
    """`arguments`: what follows `python` on a command line, perhaps after --drop-in."""
    if arguments[:1] == ["--drop-in"]:
        import lockstep

        lockstep.install_ddp()
        arguments = arguments[1:]
    if arguments[:1] == ["-m"]:
        sys.argv = arguments[1:]
        # `python -m` has put the working folder in sys.path[0] for us already, as it would for the program.
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        run_script(arguments[0])


def run_script(path: str) -> None:
    """The script becomes the real `__main__`, for good: pickle, multiprocessing and atexit look for it there.

    `runpy.run_path` would take the module away again at the end, before atexit.
    """
    if os.path.isdir(path) or path.endswith(".pyc") or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")  # a folder or an archive with a __main__.py, or compiled code
        return
    path = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main_module.__dict__["__builtins__"] = __builtins__
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec")
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


if __name__ == "__main__":
    become(sys.argv[1:])
