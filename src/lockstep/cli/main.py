"""The command line: `lockstep COMMAND ...`. Imports no torch; a command that needs it imports it when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lockstep import __version__
from lockstep.cli import ledger, run, scale

_EPILOG = """\
commands:
  run     start a training program on several workers of this machine, or of several
  submit  write what SLURM, Kubernetes or Ray need to start a training program
  doctor  look at this machine, start two workers as a trial, and say what to change
  watch   show how a run is doing, from anywhere, while it goes on
  demo    train on two to four workers, kill one, and show that the result is that of one worker (about a minute)
  report  say where the time of a run went, as a page and in the terminal
  scale   change the number of workers of a run that goes on
  certify prove on your own program that any number of workers, and a killed one, give the same bits
  ledger  prove that a run has used every sample exactly once in every epoch
  checkpoint  list, verify, show and export what a run has saved
  bench   measure a training step beside torch's DistributedDataParallel, and collectives beside Gloo

examples:
  lockstep demo
  lockstep run -n 4 train.py --lr 0.1
  lockstep run --help
"""

# Commands whose options are part of the parser here.
_HERE = {"run": run, "scale": scale, "ledger": ledger}
# Commands that parse all their options themselves, --help included; they are imported when they are called.
_ELSEWHERE = {
    "demo": "lockstep.demo.show",
    "watch": "lockstep.report.live_view",
    "report": "lockstep.report.command",
    "submit": "lockstep.submit.command",
    "doctor": "lockstep.doctor.command",
    "certify": "lockstep.cli.certify",
    "checkpoint": "lockstep.cli.checkpoint",
    "bench": "lockstep.bench.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser, arguments = _parser(), list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in _ELSEWHERE:
        status: int | None = importlib.import_module(_ELSEWHERE[arguments[0]]).main(arguments[1:])
        return status or 0
    chosen = parser.parse_args(arguments)
    if chosen.command in _HERE:
        status = _HERE[chosen.command].main(chosen)
        return status or 0
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep",
        usage="lockstep [-h] [--version] COMMAND ...",
        description="Data-parallel training for PyTorch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(prog="lockstep", dest="command", metavar="command", help=argparse.SUPPRESS)
    for command in _HERE.values():
        command.add_parser(commands)
    for name in _ELSEWHERE:
        commands.add_parser(name, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
