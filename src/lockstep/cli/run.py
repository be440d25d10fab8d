"""`lockstep run`: starts a training program on several workers, and watches them. Imports no torch."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lockstep.control.connection import is_etcd
from lockstep.control.wire import VARIABLE, new_secret, read_secret
from lockstep.errors import LockstepError
from lockstep.failures.postmortem import could_not_start, show
from lockstep.launcher.etcd_member import check_members
from lockstep.launcher.exit_policy import count_workers
from lockstep.launcher.hosts import (
    LONGEST_LEASE_S,
    SHORTEST_LEASE_S,
    Hosts,
    check_etcd,
    check_rendezvous,
    make_host_name,
    wait_for_address,
)
from lockstep.launcher.job import ElasticOptions, Job, count_cores, count_gpus
from lockstep.launcher.output import piped_through, print_message
from lockstep.launcher.run_job import run_job
from lockstep.settings import Settings

_EPILOG = """\
Everything after the script's name belongs to the script. A program that runs under torchrun runs here unchanged:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, on a port that is free.

examples:
  lockstep run -n 2 train.py --epochs 3
  lockstep run -n 2 -m my_package.train --epochs 3
  lockstep run -n 2 --drop-in their_train.py      our DistributedDataParallel in a program you cannot edit
  lockstep run --hosts 3 -n 8 --rendezvous node1:29400 train.py       on each of three hosts, node1 among them

Ctrl-C and SIGTERM are passed on: a lockstep.Run finishes its step, saves and ends; a second Ctrl-C kills at once. If a
worker fails, the others are stopped, the exit status is the one of the first that failed (128 + the signal if it died
of one). The end of its output is shown, and last of all a card: who failed, where, why, and what to do.
The exit status is 2, and nothing is started, if the command line makes no sense.
"""


def count_of(what: str) -> Callable[[str], int]:
    """The type of an argument that is a number of something, 1 or more."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}; it takes 1 or more")
        return int(text)

    return count


worker_count = count_of("workers")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def slowness(text: str) -> str:
    """Check the value of --drop-slower-than, which travels as text."""
    try:
        Settings.from_env({"LOCKSTEP_DROP_SLOWER_THAN": text})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 1, such as 3x") from None
    return text


def add_parser(commands: Any) -> None:
    """`commands` is what `ArgumentParser.add_subparsers` returns."""
    parser = commands.add_parser(
        "run",
        usage="lockstep run [-n N] [--min N] [--max N] [options] (script.py | -m module) [args ...]",
        description="Start a training program on several workers of this machine, and watch them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    about = "how many workers, on each host (default: one per visible GPU; without a GPU one per core, at most four)"
    add("-n", dest="workers", type=worker_count, metavar="N", help=about)
    add("--drop-in", action="store_true", help="put our DistributedDataParallel in torch's place first")
    about = "for the output of each worker, rank0.log and so on; what is there is written over "
    add("--log-dir", type=Path, metavar="DIR", help=about + "(default: lockstep-logs/<time>-<process>)")
    about = "no picture of the progress, only lines (so it is without a terminal)"
    add("--plain", action="store_true", help=about)
    about = "seconds between asking a worker to end and killing it (default: 10)"
    add("--grace-s", type=seconds, default=10.0, metavar="S", help=about)
    about = "lost workers are replaced, and the others continue meanwhile as long as there are N (needs a lockstep.Run)"
    add("--min", dest="least", type=worker_count, metavar="N", help=about)
    about = "the most workers that `lockstep scale` may ask for"
    add("--max", dest="most", type=worker_count, metavar="N", help=about)
    about = "with --min or --max: a worker without a sign of life for so long counts as lost (default: 10)"
    add("--stall-s", type=seconds, default=10.0, metavar="S", help=about)
    about = (
        "with --min or --max: a worker that takes this many times as long for a sample as the others, in 32 steps, "
        "leaves, and is not replaced (default: none leaves)"
    )
    add("--drop-slower-than", type=slowness, metavar="3x", help=about)
    about = "steps, or a time in s, m or h, between checkpoints of a lockstep.Run that does not say itself"
    add("--checkpoint-every", metavar="N|5m", help=about)
    about = "a lockstep.Run starts over: what is in its directory is moved to `previous-1` there, and not resumed"
    add("--fresh", action="store_true", help=about)
    add("-m", dest="module", action="store_true", help="run a module, like `python -m`")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    about = "start the same command on each; LOCKSTEP_JOB_SECRET must be set"
    add = parser.add_argument_group("several hosts", about).add_argument
    add("--hosts", type=count_of("hosts"), metavar="N", help="how many (default: 1)")
    add("--rendezvous", metavar="HOST:PORT", help="an address of the host that is to keep the records")
    about = "keep the records in an etcd instead; etcds:// with TLS (ETCDCTL_CACERT, _CERT, _KEY, _USER as for etcdctl)"
    add("--store", metavar="etcd://HOST:2379,..", help=about)
    about = "each host that --store names runs a member of that etcd: with three, any one of them may be lost"
    add("--start-etcd", action="store_true", help=about)
    add("--secret-file", type=Path, metavar="FILE", help="in place of LOCKSTEP_JOB_SECRET")
    for name, default_s, what in (
        ("--lease-s", 5.0, "a host that was not heard of for so long is lost"),
        ("--give-up-s", 600.0, "end without reaching the records for so long"),
        (
            "--stuck-s",
            300.0,
            "if hosts cannot reach each other and training has stopped for so long, leave one of them out",
        ),
    ):
        add(name, type=seconds, default=default_s, metavar="S", help=f"{what} (default: {default_s:g})")
    parser.set_defaults(parser=parser)


def main(chosen: argparse.Namespace) -> int:
    """Starts the workers, watches them, and returns the exit status."""
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
        hosts = _read_hosts(chosen, Settings.from_env(os.environ))
    except (OSError, ValueError) as error:
        refuse(str(error))
    elastic, total = None, workers * (hosts.count if hosts is not None else 1)
    if chosen.least is not None or chosen.most is not None or hosts is not None:
        # Without --min, a run on several hosts waits until all of them are there.
        elastic = ElasticOptions(chosen.least or (1 if hosts is None else total), chosen.most or total, chosen.stall_s)
        if not elastic.least <= total <= elastic.most:
            all_of = f"-n {workers}" if hosts is None else f"--hosts {hosts.count} times -n {workers}"
            refuse(f"{all_of} must be at least --min ({elastic.least}) and at most --max ({elastic.most})")
    if chosen.drop_slower_than is not None and elastic is None:
        refuse("--drop-slower-than needs --min or --max: without, the others cannot continue without a worker")
    log_dir = (chosen.log_dir or Path("lockstep-logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    if hosts is not None:
        log_dir /= hosts.title  # a folder per host: all hosts may share --log-dir
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"cannot write logs to {log_dir}: {error.strerror}; choose another folder with --log-dir")
    command = [*(["--drop-in"] if chosen.drop_in else []), *(["-m"] if chosen.module else []), *program]
    if chosen.checkpoint_every is not None:
        os.environ["LOCKSTEP_CHECKPOINT_EVERY"] = chosen.checkpoint_every
    if chosen.drop_slower_than is not None:
        os.environ["LOCKSTEP_DROP_SLOWER_THAN"] = chosen.drop_slower_than
    if chosen.fresh:
        os.environ["LOCKSTEP_FRESH"] = "1"
    try:
        if hosts is not None:
            wait_for_address(hosts, print_message)
            if is_etcd(hosts.where) and not hosts.starts_etcd:
                print_message(check_etcd(hosts))
        with nullcontext() if chosen.plain else _live_view(log_dir):
            return run_job(Job(tuple(command), workers, log_dir, chosen.grace_s, elastic, hosts))
    except (LockstepError, OSError) as error:
        show(could_not_start(error, workers))
        return 1


def _live_view(log_dir: Path) -> AbstractContextManager[None]:
    """Pipes the output through the live view, if there is a terminal for it."""
    from lockstep.report.live_view import VARIABLE as SHOWN, can_draw

    os.environ.pop(SHOWN, None)  # set by a launcher that has started this one
    if not can_draw():
        return nullcontext()
    os.environ[SHOWN] = "1"
    return piped_through([sys.executable, "-m", "lockstep.report.live_view", str(log_dir)])


def _read_hosts(chosen: argparse.Namespace, settings: Settings) -> Hosts | None:
    """Returns None for a run on this host only. Raises ValueError for options that do not go together."""
    where = chosen.store or chosen.rendezvous
    if where is None:
        if (chosen.hosts or 1) > 1:
            raise ValueError(
                f"--hosts {chosen.hosts}: where do they meet? Give --rendezvous HOST:PORT, an address of one of them, "
                "or --store etcd://HOST:2379"
            )
        return None
    if chosen.store is not None and not is_etcd(chosen.store):
        raise ValueError(f"--store {chosen.store}: it takes etcd://HOST:2379,...; our own is where --rendezvous says")
    if chosen.store is None and chosen.start_etcd:
        raise ValueError("--start-etcd: which hosts run it? Give --store etcd://HOST:2379,HOST:2379,HOST:2379")
    if chosen.store is not None and chosen.rendezvous is not None:
        raise ValueError("--store and --rendezvous: with an etcd no other rendezvous is needed; leave one of them out")
    if chosen.hosts is None:
        raise ValueError(f"{where}: how many hosts meet there? Give --hosts")
    check_rendezvous(where)
    if chosen.store is not None:
        from lockstep.control.etcd_gateway import EtcdAccess  # here, so that only its users import http.client

        EtcdAccess.from_env(os.environ, where)
    if chosen.start_etcd:
        check_members(where, os.environ)
    alone = chosen.hosts == 1 and chosen.secret_file is None and VARIABLE not in os.environ
    secret = new_secret() if alone and chosen.store is None else read_secret(os.environ, chosen.secret_file)
    if not SHORTEST_LEASE_S <= chosen.lease_s <= LONGEST_LEASE_S:
        raise ValueError(f"--lease-s {chosen.lease_s:g} must be {SHORTEST_LEASE_S:g} to {LONGEST_LEASE_S:g}")
    times_s = (chosen.lease_s, chosen.give_up_s, chosen.stuck_s)
    return Hosts(chosen.hosts, where, make_host_name(settings.host), secret, *times_s, starts_etcd=chosen.start_etcd)


def _module_exists(name: str) -> bool:
    """Looks for the outermost package only: a deeper search would import it, and torch, into the launcher."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]
