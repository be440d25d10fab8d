"""The command line. It imports torch only in the workers, and in what needs it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from lockstep import __version__
from lockstep.control.secret import VARIABLE, new_secret, read_secret
from lockstep.errors import LockstepError
from lockstep.failures.postmortem import could_not_start, show
from lockstep.launcher import scale_request
from lockstep.launcher.exit_policy import count_workers
from lockstep.launcher.hosts import (
    LONGEST_LEASE_S,
    SHORTEST_LEASE_S,
    Hosts,
    await_address,
    check_where,
    name_host,
)
from lockstep.launcher.job import Elastic, Job, count_cores, count_gpus
from lockstep.launcher.output import say, shown_by
from lockstep.launcher.run_job import supervise

_TOP = """\
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

_RUN = """\
Everything after the script's name belongs to the script. A program that runs under torchrun runs here unchanged:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, on a port that is free.

examples:
  lockstep run -n 2 train.py --epochs 3
  lockstep run -n 2 -m my_package.train --epochs 3
  lockstep run -n 2 --drop-in their_train.py      our DistributedDataParallel in a program you cannot edit
  lockstep run --hosts 3 -n 8 --rendezvous node1:29400 train.py       on each of three hosts, node1 among them

Ctrl-C and SIGTERM are passed on: a lockstep.Run finishes its step, saves and ends; a second Ctrl-C kills at once. If a
worker fails, the others are stopped, the exit status is the one of the first that failed (128 + the signal if it died
of one). Its last words are shown, and as the very last thing a card: who failed, where, why, and what to do.
The exit status is 2, and nothing is started, if the command line makes no sense.
"""


# Commands that have their own options, --help among them, and are imported when they are called.
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
    if chosen.command == "run":
        return _run(chosen)
    if chosen.command == "ledger":
        return _ledger(chosen)
    if chosen.command == "scale":
        return _scale(chosen)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lockstep",
        usage="lockstep [-h] [--version] COMMAND ...",
        description="Data-parallel training for PyTorch.",
        epilog=_TOP,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(prog="lockstep", dest="command", metavar="command", help=argparse.SUPPRESS)

    run = commands.add_parser(
        "run",
        usage="lockstep run [-n N] [--min N] [--max N] [options] (script.py | -m module) [args ...]",
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
        help="how many workers, on each host (default: one per visible GPU; without a GPU one per core, at most four)",
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
        "--plain", action="store_true", help="no picture of the progress, only lines (so it is without a terminal)"
    )
    run.add_argument(
        "--grace-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds between asking a worker to end and killing it (default: 10)",
    )
    run.add_argument(
        "--min",
        dest="least",
        type=_workers,
        metavar="N",
        help="lost workers are replaced, and the others go on meanwhile as long as there are N (needs a lockstep.Run)",
    )
    run.add_argument(
        "--max", dest="most", type=_workers, metavar="N", help="the most workers that `lockstep scale` may ask for"
    )
    run.add_argument(
        "--stall-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="with --min or --max: a worker without a sign of life for so long counts as lost (default: 10)",
    )
    run.add_argument(
        "--checkpoint-every",
        metavar="N|5m",
        help="steps, or a time in s, m or h, between checkpoints of a lockstep.Run that does not say itself",
    )
    run.add_argument(
        "--fresh",
        action="store_true",
        help="a lockstep.Run starts over: what is in its directory is moved to `previous-1` there, and not resumed",
    )
    several = run.add_argument_group("several hosts", "start the same command on each; LOCKSTEP_JOB_SECRET must be set")
    several.add_argument("--hosts", type=_hosts, metavar="N", help="how many (default: 1)")
    several.add_argument("--rendezvous", metavar="HOST:PORT", help="an address of the host that is to keep the records")
    several.add_argument("--store", metavar="etcd://HOST:2379,..", help="keep the records in an etcd instead")
    several.add_argument("--secret-file", type=Path, metavar="FILE", help="in place of LOCKSTEP_JOB_SECRET")
    for name, default_s, what in (
        ("--lease-s", 5.0, "a host that was not heard of for so long is lost"),
        ("--give-up-s", 600.0, "end without reaching the records for so long"),
        ("--stuck-s", 300.0, "of hosts that do not reach each other while nothing goes on for so long, leave one out"),
    ):
        several.add_argument(
            name, type=_seconds, default=default_s, metavar="S", help=f"{what} (default: {default_s:g})"
        )
    run.add_argument("-m", dest="module", action="store_true", help="run a module, like `python -m`")
    run.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(parser=run)

    scale = commands.add_parser(
        "scale", description="Change the number of workers of a run that was started with --min or --max."
    )
    scale.add_argument("run", type=Path, metavar="RUN", help="its folder of logs, or the directory of its lockstep.Run")
    scale.add_argument("workers", type=_workers, metavar="N", help="how many workers it shall have")
    ledger = commands.add_parser(
        "ledger", description="Prove that a run has used every sample exactly once in every epoch, whatever happened."
    )
    ledger.add_argument("run", type=Path, metavar="RUN", help="the directory of a lockstep.Run")
    ledger.add_argument("--json", action="store_true", help="for programs")
    for name in _ELSEWHERE:
        commands.add_parser(name, add_help=False)
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
    try:
        hosts = _read_hosts(chosen)
    except (OSError, ValueError) as error:
        refuse(str(error))
    elastic, total = None, workers * (hosts.count if hosts is not None else 1)
    if chosen.least is not None or chosen.most is not None or hosts is not None:
        # A host that is late is no reason to begin without it; who wants that says --min.
        elastic = Elastic(chosen.least or (1 if hosts is None else total), chosen.most or total, chosen.stall_s)
        if not elastic.least <= total <= elastic.most:
            all_of = f"-n {workers}" if hosts is None else f"--hosts {hosts.count} times -n {workers}"
            refuse(f"{all_of} must be at least --min ({elastic.least}) and at most --max ({elastic.most})")
    log_dir = (chosen.log_dir or Path("lockstep-logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    log_dir = log_dir / hosts.title if hosts is not None else log_dir  # which may be shared by all of them
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"cannot write logs to {log_dir}: {error.strerror}; choose another folder with --log-dir")
    command = [*(["-m"] if chosen.module else []), *program]
    if chosen.drop_in:
        command = ["--drop-in", *command]
    if chosen.checkpoint_every is not None:
        os.environ["LOCKSTEP_CHECKPOINT_EVERY"] = chosen.checkpoint_every
    if chosen.fresh:
        os.environ["LOCKSTEP_FRESH"] = "1"
    try:
        if hosts is not None:
            await_address(hosts, say)
        with nullcontext() if chosen.plain else _shown(log_dir):
            return supervise(Job(tuple(command), workers, log_dir, chosen.grace_s, elastic, hosts))
    except (LockstepError, OSError) as error:
        show(could_not_start(error, workers))
        return 1


def _shown(log_dir: Path) -> AbstractContextManager[None]:
    """With a picture, where there is a terminal for it."""
    from lockstep.report.live_view import VARIABLE as SHOWN
    from lockstep.report.live_view import can_draw

    os.environ.pop(SHOWN, None)  # of a launcher around this one
    if not can_draw():
        return nullcontext()
    os.environ[SHOWN] = "1"
    return shown_by([sys.executable, "-m", "lockstep.report.live_view", str(log_dir)])


def _read_hosts(chosen: argparse.Namespace) -> Hosts | None:
    """None: this one alone. ValueError says what does not go together."""
    where = chosen.store or chosen.rendezvous
    if where is None:
        if (chosen.hosts or 1) > 1:
            raise ValueError(
                f"--hosts {chosen.hosts}: where do they meet? Give --rendezvous HOST:PORT, an address of one of them, "
                "or --store etcd://HOST:2379"
            )
        return None
    if chosen.store is not None and not chosen.store.startswith("etcd://"):
        raise ValueError(f"--store {chosen.store}: it takes etcd://HOST:2379,...; our own is where --rendezvous says")
    if chosen.store is not None and chosen.rendezvous is not None:
        raise ValueError("--store and --rendezvous: with an etcd no other rendezvous is needed; leave one of them out")
    if chosen.hosts is None:
        raise ValueError(f"{where}: how many hosts meet there? Give --hosts")
    check_where(where)
    alone = chosen.hosts == 1 and chosen.secret_file is None and VARIABLE not in os.environ
    secret = new_secret() if alone and chosen.store is None else read_secret(os.environ, chosen.secret_file)
    if not SHORTEST_LEASE_S <= chosen.lease_s <= LONGEST_LEASE_S:
        raise ValueError(f"--lease-s {chosen.lease_s:g} must be {SHORTEST_LEASE_S:g} to {LONGEST_LEASE_S:g}")
    times_s = (chosen.lease_s, chosen.give_up_s, chosen.stuck_s)
    return Hosts(chosen.hosts, where, name_host(os.environ), secret, *times_s)


def _scale(chosen: argparse.Namespace) -> int:
    try:
        scale_request.ask(chosen.run, chosen.workers)
    except scale_request.OutOfBounds as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except scale_request.NotRunning as error:
        print(
            f"lockstep: {chosen.run} is not a run that goes on and was started with --min or --max ({error}); give the "
            "folder of its logs, which `lockstep run` prints or takes as --log-dir",
            file=sys.stderr,
        )
        return 2
    print(f"asked for {chosen.workers} workers; its output says when it has them")
    return 0


def _ledger(chosen: argparse.Namespace) -> int:
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
        verdict = "each sample once" if epoch.complete else "as far as it came, each once" if epoch.exact else ""
        said = epoch.problem or epoch.note or verdict
        print(f"epoch {epoch.number}: {epoch.steps} steps, {epoch.samples} samples: {said}")
    again = f", resumed {proof.restarts} times" if proof.restarts else ""
    holds = "proven" if proof.claims_each_once else "no step is missing, and none was applied twice"
    print(f"{proof.steps} steps over {proof.samples} samples{again}: {holds if proof.holds else 'DOES NOT HOLD'}")
    return 0 if proof.holds else 1


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


def _hosts(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts; it takes 1 or more")
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
