"""The command line: `lockstep COMMAND ...`. Imports no torch; a command that needs it imports it when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.cli import run
from lockstep.errors import LockstepError
from lockstep.launcher import scale_request
from lockstep.version import __version__

_EPILOG = """\
commands:
  run     start a training program on several workers of this machine, or of several
  submit  write what SLURM, Kubernetes or Ray need to start a training program
  doctor  look at this machine, start two workers as a trial, and say what to change
  watch   show how a run is doing, from anywhere, while it runs
  demo    train on two to four workers, kill one, and show that the result is that of one worker (about a minute)
  plan    predict speed, memory and cost on more workers and hosts, from short runs of a program
  report  say where the time of a run went, as a page and in the terminal
  scale   change the number of workers of a run in progress
  drain   let a worker leave a run in progress after its step, and be replaced
  certify prove on your own program that any number of workers, and a killed one, give the same bits
  ledger  prove that a run has used every sample exactly once in every epoch
  checkpoint  list, verify, show and export what a run has saved
  bench   measure a training step beside torch's DistributedDataParallel, and collectives beside Gloo

examples:
  lockstep demo
  lockstep run -n 4 train.py --lr 0.1
  lockstep run --help
"""

# Commands that parse all their options themselves, --help included; they are imported when they are called.
_ELSEWHERE = {
    "demo": "lockstep.demo.show",
    "watch": "lockstep.report.live_view",
    "report": "lockstep.report.command",
    "submit": "lockstep.submit.command",
    "doctor": "lockstep.doctor.command",
    "plan": "lockstep.plan.command",
    "certify": "lockstep.cli.certify",
    "checkpoint": "lockstep.cli.checkpoint",
    "bench": "lockstep.bench.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser, arguments = _parser(), list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in _ELSEWHERE:
        # By SystemExit, so that `with` and `finally` end the programs that the command has started.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            status: int | None = importlib.import_module(_ELSEWHERE[arguments[0]]).main(arguments[1:])
            sys.stdout.flush()
        except BrokenPipeError:
            if not _has_lost_its_reader():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at its end
            return 0
        return status or 0
    chosen = parser.parse_args(arguments)
    here = {"run": run.main, "scale": _scale, "drain": _drain, "ledger": _ledger}
    if chosen.command in here:
        return here[chosen.command](chosen)
    parser.print_help()
    return 2


def _has_lost_its_reader() -> bool:
    """Whether the process that read the output has ended: `lockstep report RUN | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


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
    run.add_parser(commands)
    about = "Change the number of workers of a run that was started with --min or --max."
    scale = commands.add_parser("scale", description=about)
    about = "its folder of logs, or the directory of its lockstep.Run"
    scale.add_argument("run", type=Path, metavar="RUN", help=about)
    scale.add_argument("workers", type=run.worker_count, metavar="N", help="how many workers it shall have")
    about = (
        "Let workers leave a run that was started with --min or --max, between two steps: no step is computed again, "
        "and others take their place. SIGTERM to a worker does the same."
    )
    drain = commands.add_parser("drain", description=about)
    drain.add_argument("run", type=Path, metavar="RUN", help="its folder of logs, or the directory of its lockstep.Run")
    about = "its number, as the launcher prints it; on several hosts, of this one. None: all workers of this host"
    drain.add_argument("workers", type=_worker_number, nargs="*", metavar="WORKER", help=about)
    about = "Prove that a run has used every sample exactly once in every epoch, whatever happened."
    ledger = commands.add_parser("ledger", description=about)
    ledger.add_argument("run", type=Path, metavar="RUN", help="the directory of a lockstep.Run")
    ledger.add_argument("--json", action="store_true", help="for programs")
    for name in _ELSEWHERE:
        commands.add_parser(name, add_help=False)
    return parser


def _worker_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a worker, such as 1 in `worker 1 (pid 4711)`")
    return int(text)


def _scale(chosen: argparse.Namespace) -> int:
    """Asks a run that was started with --min or --max for another number of workers."""
    asked = f"asked for {chosen.workers} workers; its output says when it has them"
    return _send(chosen.run, scale_request.Request(workers=chosen.workers), asked)


def _drain(chosen: argparse.Namespace) -> int:
    """Asks a run that was started with --min or --max to let some workers leave."""
    names = ", ".join(f"worker {number}" for number in chosen.workers) or "all workers of this host"
    asked = f"asked {names} to leave; its output says when that is done"
    return _send(chosen.run, scale_request.Request(leaving=tuple(chosen.workers)), asked)


def _send(directory: Path, request: scale_request.Request, asked: str) -> int:
    try:
        scale_request.send_request(directory, request)
    except scale_request.OutOfBounds as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except scale_request.NotRunning as error:
        print(
            f"lockstep: {directory} is not a run that goes on and was started with --min or --max ({error}); give the "
            "folder of its logs, which `lockstep run` prints or takes as --log-dir",
            file=sys.stderr,
        )
        return 2
    print(asked)
    return 0


def _ledger(chosen: argparse.Namespace) -> int:
    """Proves that a run has used every sample exactly once in every epoch."""
    from lockstep.data.ledger import prove

    try:
        proof = prove(chosen.run)
    except (LockstepError, OSError) as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(asdict(proof) | {"holds": proof.holds}))
        return 0 if proof.holds else 1
    for epoch in proof.epochs:
        coverage = "each sample once" if epoch.complete else "as far as it came, each once" if epoch.exact else ""
        said = epoch.problem or epoch.note or coverage
        print(f"epoch {epoch.number}: {epoch.steps} steps, {epoch.samples} samples: {said}")
    again = f", resumed {proof.restarts} times" if proof.restarts else ""
    holds = "proven" if proof.claims_each_once else "no step is missing, and none was applied twice"
    print(f"{proof.steps} steps over {proof.samples} samples{again}: {holds if proof.holds else 'DOES NOT HOLD'}")
    return 0 if proof.holds else 1


if __name__ == "__main__":
    sys.exit(main())
