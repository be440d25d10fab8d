"""Runs a program as `python` would, after putting our DistributedDataParallel in torch's place.

    python -m lockstep.elastic.worker train.py args...
    python -m lockstep.elastic.worker -m package.train args...

This is what `lockstep run --drop-in` starts. Without --drop-in, workers are plain `python train.py`.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
from types import ModuleType


def main() -> None:
    import lockstep

    lockstep.install_ddp()
    run_program(sys.argv[1:])


def run_program(arguments: list[str]) -> None:
    """`arguments`: what follows `python` on a command line."""
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
    if os.path.isdir(path) or not path.endswith((".py", ".pyw")):
        runpy.run_path(path, run_name="__main__")  # a folder or an archive with a __main__.py, or compiled code
        return
    path = os.path.abspath(path)
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
    main()
