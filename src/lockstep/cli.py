"""The command line. It imports torch only in the workers, and in what needs it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep import __version__
from lockstep.elastic.supervisor import Job, count_cores, count_gpus, supervise
from lockstep.elastic.verdict import count_workers

_TOP = """\
commands:
  run     start a training program on several workers of this machine
  demo    train on two workers and show that the replicas stay identical (under a minute)
  bench   measure a training step beside torch's DistributedDataParallel, and collectives beside Gloo

examples:
  lockstep demo
  lockstep run -n 4 train.py --lr 0.1
  lockstep run --help
"""

_RUN = """\
Everything after the script's name belongs to the script. A program that runs under torchrun runs here unchanged:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, on a port that is free.

examples:
  lockstep run -n 2 train.py --epochs 3
  lockstep run -n 2 -m my_package.train --epochs 3
  lockstep run -n 2 --drop-in their_train.py      our DistributedDataParallel in a program you cannot edit

Ctrl-C and SIGTERM are passed on; a second Ctrl-C kills at once. If a worker fails, the others are stopped, the exit
status is the one of the first that failed (128 + the signal if it died of one), and its last words are shown last.
The exit status is 2, and nothing is started, if the command line makes no sense.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser, arguments = _parser(), list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        # It has its own options, --help among them.
        from lockstep.measure.bench import main as bench

        return bench(arguments[1:]) or 0
    chosen = parser.parse_args(arguments)
    if chosen.command == "run":
        return _run(chosen)
    if chosen.command == "demo":
        return _demo(chosen)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lockstep",
        usage="lockstep [-h] [--version] {run,demo,bench} ...",
        description="Data-parallel training for PyTorch.",
        epilog=_TOP,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", help=argparse.SUPPRESS)

    run = commands.add_parser(
        "run",
        prog="lockstep run",
        usage="lockstep run [-n N] [--drop-in] [--log-dir DIR] [--grace-s S] (script.py | -m module) [args ...]",
        description="Start a training program on several workers of this machine, and watch them.",
        epilog=_RUN,
        formatter_class=raw,
        allow_abbrev=False,
    )
    run.add_argument(
        "-n",
        dest="workers",
        type=_workers,
        metavar="N",
        help="how many workers (default: one per visible GPU; without a GPU one per core, at most four)",
    )
    run.add_argument("--drop-in", action="store_true", help="put our DistributedDataParallel in torch's place first")
    run.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="for the output of each worker, rank0.log and so on; what is there is written over "
        "(default: lockstep-logs/<time>-<process>)",
    )
    run.add_argument(
        "--grace-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds between asking a worker to end and killing it (default: 10)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module, like `python -m`")
    run.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(parser=run)

    demo = commands.add_parser(
        "demo", description="Train a small network on the digits of scikit-learn, on CPU or GPU."
    )
    demo.add_argument("-n", dest="workers", type=_workers, default=2, metavar="N", help="how many workers (default: 2)")
    commands.add_parser("bench", add_help=False)
    return parser


def _run(chosen: argparse.Namespace) -> int:
    refuse = chosen.parser.error
    program = chosen.program[1:] if chosen.program[:1] == ["--"] else chosen.program
    if not program:
        refuse("what shall the workers run? Give a script, or a module with -m")
    if chosen.module and not _module_exists(program[0]):
        refuse(f"there is no module {program[0]!r}, seen from {os.getcwd()}")
    if not chosen.module and program[0].startswith("-"):
        refuse(f"unknown option {program[0]!r}; options of the script come after the script")
    if not chosen.module and not os.path.exists(program[0]):
        refuse(f"there is no script {program[0]!r}, seen from {os.getcwd()}")
    workers = chosen.workers or count_workers(os.environ, gpus=count_gpus(), cores=count_cores())
    log_dir = (chosen.log_dir or Path("lockstep-logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"cannot write logs to {log_dir}: {error.strerror}; choose another folder with --log-dir")
    command = [*(["-m"] if chosen.module else []), *program]
    if chosen.drop_in:
        command = ["-m", "lockstep.elastic.worker", *command]
    try:
        return supervise(Job(tuple(command), workers, log_dir, chosen.grace_s))
    except OSError as error:
        print(f"lockstep: could not start {workers} workers: {error}; try fewer with -n", file=sys.stderr)
        return 1


def _demo(chosen: argparse.Namespace) -> int:
    log_dir = Path(tempfile.mkdtemp(prefix="lockstep-demo-"))
    status = supervise(Job(("-m", "lockstep.demo"), chosen.workers, log_dir))
    if status == 0:
        shutil.rmtree(log_dir, ignore_errors=True)
    return status


def _module_exists(name: str) -> bool:
    """Looks for the outermost package only: looking deeper would import it, torch and all, into the launcher."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers; it takes 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
