"""Runs a program as `python` would, and records an exception that ends it (failures/crash_record.py).

    python -m lockstep.launcher.worker_main train.py args...
    python -m lockstep.launcher.worker_main -m package.train args...
    python -m lockstep.launcher.worker_main --drop-in train.py args...   our DistributedDataParallel replaces torch's

`lockstep run` starts this module in every worker.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from types import ModuleType

from lockstep.failures.crash_record import CrashHook
from lockstep.launcher.exit_policy import PREEMPTED
from lockstep.launcher.parent_watch import name_semaphores
from lockstep.settings import Settings
from lockstep.world.freed_memory import keep_freed_memory


class TorchFinder:
    """A finder of `sys.meta_path` that imports torch without garbage collection, and freezes its objects.

    Collections of a million objects that all stay are an eighth of the time of the import; after it they would delay
    steps, and the end of the process. The fork server freezes them as well. `torch._dynamo`, which the first optimiser
    imports, is not frozen: by then there are objects of the program.
    """

    def __init__(self) -> None:
        self._wanted, self._is_searching = {"torch", "torch._dynamo"}, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._wanted or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and isinstance(loader := spec.loader, importlib.machinery.SourceFileLoader):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self._wanted.discard(name)
                del loader.__dict__["exec_module"]
                is_enabled = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                finally:
                    if name == "torch":
                        gc.freeze()
                    if is_enabled:
                        gc.enable()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run_as_main(program: list[str]) -> None:
    """Runs the program as `python` would. Its traceback begins with the program's own frames."""
    hook = CrashHook(Settings.from_env(os.environ))
    hook.install()
    keep_freed_memory(os.environ)
    settings = Settings.from_env(os.environ)
    if settings.launcher == os.getppid():
        name_semaphores(settings.run_id)
    try:
        run_program(program)
    except SystemExit as error:
        if error.code not in (None, 0, PREEMPTED):
            hook.record_exit(error)
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and _is_start(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _is_start(file: str) -> bool:
    """Whether the file belongs to the code that starts the program."""
    return file in (__file__, "<frozen runpy>")


def run_program(arguments: list[str]) -> None:
    """Runs the program. `arguments` is what follows `python` on a command line, perhaps after --drop-in."""
    if arguments[:1] == ["--drop-in"]:
        import lockstep

        lockstep.install_ddp()
        arguments = arguments[1:]
    if arguments[:1] == ["-m"]:
        sys.argv = arguments[1:]
        # `python -m` has set sys.path[0] to the working folder for this module, as it would for the program.
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        run_script(arguments[0])


def run_script(path: str) -> None:
    """Runs the script as the real `__main__`, where pickle, multiprocessing and atexit look for it.

    `runpy.run_path` would remove the module at the end, before atexit.
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
    sys.meta_path.insert(0, TorchFinder())
    run_as_main(sys.argv[1:])
