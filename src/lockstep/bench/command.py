"""`lockstep bench`: speed, always compared with an alternative in the same run.

lockstep bench step       step time with no communication, torch DDP and ours, on some workers of this machine
lockstep bench exact      step time with the same bits on any number of workers, beside the fastest there is
lockstep bench trace      what the trace of a run costs, and `lockstep watch` on it
lockstep bench wrapper    what the wrapper costs on one device, in time and memory
lockstep bench comm       collectives on shm, Gloo and NCCL, beside a plain copy of as many bytes
lockstep bench hosts      collectives over several hosts, made on this machine, and the bytes that leave each (root)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from lockstep.bench import (
    comm as bench_comm,
    exact as bench_exact,
    hosts as bench_hosts,
    plot,
    step as bench_step,
    trace as bench_trace,
    wrapper as bench_wrapper,
)
from lockstep.bench.collectives import Op, parse_size
from lockstep.bench.compared_wrappers import DEFAULT_ARMS, NONE, STEP_ARMS, check_backend, load_wrapper
from lockstep.bench.models import DEFAULT_MODELS, WORKLOADS
from lockstep.bench.rounds import RoundPlan
from lockstep.errors import LockstepError


def main(argv: list[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: the folder {arguments.json.absolute().parent} does not exist")
    if arguments.plot and (problem := plot.problem_with(arguments.plot)):
        parser.error(f"--plot {arguments.plot}: {problem}")
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except LockstepError as error:
        print(f"lockstep bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lockstep bench: interrupted", file=sys.stderr)
        return 130


def run_step(arguments: argparse.Namespace) -> int:
    return bench_step.run(step_settings(arguments, arms=arguments.arms), arguments.json)


def run_exact(arguments: argparse.Namespace) -> int:
    return bench_exact.run(step_settings(arguments, arms=()), arguments.backends, arguments.json)


def run_trace(arguments: argparse.Namespace) -> int:
    asked = {"rounds": arguments.rounds, "steps": arguments.steps, "quick": arguments.quick}
    return bench_trace.run(step_settings(arguments, arms=(bench_trace.ARM,)), **asked, json_path=arguments.json)


def step_settings(arguments: argparse.Namespace, *, arms: tuple[str, ...]) -> bench_step.StepSettings:
    plan = RoundPlan(
        warmup=3,
        rounds=arguments.rounds or (7 if arguments.quick else 21),
        steps=arguments.steps or (3 if arguments.quick else 5),
    )
    return bench_step.StepSettings(
        models=arguments.models,
        arms=arms,
        workers=arguments.workers,
        threads=arguments.threads,
        device=arguments.device or "cpu",
        plan=plan,
        wait_s=arguments.timeout_s,
    )


def run_wrapper(arguments: argparse.Namespace) -> int:
    settings = bench_wrapper.WrapperSettings(
        arms=arguments.arms,
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        rounds=arguments.rounds or (7 if arguments.quick else 21),
        steps=arguments.steps,
        batches=arguments.batches,
    )
    return bench_wrapper.run(settings, arguments.json)


def run_comm(arguments: argparse.Namespace) -> int:
    settings = bench_comm.CommSettings(
        ops=arguments.ops,
        workers=arguments.workers,
        sizes_bytes=arguments.sizes or (bench_comm.QUICK_SIZES if arguments.quick else bench_comm.SIZES),
        rounds=arguments.rounds or (7 if arguments.quick else 21),
        device=arguments.device or "cpu",
        wait_s=arguments.timeout_s,
    )
    return bench_comm.run(settings, arguments.json, arguments.plot)


def run_hosts(arguments: argparse.Namespace) -> int:
    settings = bench_hosts.HostsSettings(
        hosts=arguments.hosts,
        workers=arguments.workers,
        mbit=arguments.mbit,
        ops=arguments.ops or (bench_hosts.QUICK_OPS if arguments.quick else tuple(Op)),
        sizes_bytes=arguments.sizes or (bench_hosts.QUICK_SIZES if arguments.quick else bench_hosts.SIZES),
        rounds=arguments.rounds or (5 if arguments.quick else 11),
    )
    return bench_hosts.run(settings, arguments.json)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="step | exact | trace | wrapper | comm | hosts")
    step = commands.add_parser("step", help="step time on several workers: no communication, torch DDP, ours")
    step.set_defaults(run=run_step)
    exact = commands.add_parser("exact", help="step time of Run: exact, fast, and our DistributedDataParallel")
    exact.set_defaults(run=run_exact, plot=None)
    trace = commands.add_parser("trace", help="step time of Run with its trace and a view of it, and without")
    trace.set_defaults(run=run_trace, plot=None)
    exact.add_argument(
        "--backends", type=backend_names, default="shm,gloo", metavar="NAMES", help="with commas (default shm,gloo)"
    )
    for command, models in ((step, DEFAULT_MODELS), (exact, ("mlp", "gpt")), (trace, ("small", "gpt"))):
        command.add_argument("--workers", type=positive, default=2, metavar="N", help="worker processes (default 2)")
        command.add_argument("--threads", type=positive, default=1, metavar="N", help="of each worker (default 1)")
        command.add_argument(
            "--models", type=model_names, default=",".join(models), metavar="NAMES",
            help=f"of {', '.join(WORKLOADS)}, with commas (default {','.join(models)})",
        )  # fmt: skip
    wrapper = commands.add_parser("wrapper", help="time and memory the wrapper costs on one device, world size 1")
    wrapper.set_defaults(run=run_wrapper)
    wrapper.add_argument(
        "--batches", type=batch_names, default=(), metavar="SIZES", help="such as 1x128,8x1024 (default: all)"
    )
    comm = commands.add_parser("comm", help="time of collectives over their size: shm, Gloo, NCCL, a plain copy")
    comm.set_defaults(run=run_comm)
    ops = ",".join(Op)
    comm.add_argument("--ops", type=op_names, default=ops, metavar="NAMES", help=f"with commas (default {ops})")
    comm.add_argument(
        "--workers", type=worker_counts, default="2,4", metavar="N,N", help="one run for each (default 2,4)"
    )
    comm.add_argument(
        "--sizes", type=byte_sizes, default=(), metavar="SIZES",
        help="such as 4,4KiB,25MiB (default: powers of four from 4 B to 256 MiB, and 25 MiB; 4 of them with --quick)",
    )  # fmt: skip
    comm.add_argument("--plot", type=Path, metavar="FILE", help="draw time over size to this .svg or .png file")
    for command, arms in ((step, STEP_ARMS), (wrapper, DEFAULT_ARMS)):
        command.set_defaults(plot=None)
        command.add_argument(
            "--arms", type=arm_names, default=",".join(arms), metavar="NAMES",
            help=f"with commas (default {','.join(arms)}); a class with its dotted name, class@backend for a backend",
        )  # fmt: skip
    for command in (step, exact, trace, wrapper):
        command.add_argument("--steps", type=positive, metavar="N", help="steps of each arm in a round")
    for command in (step, exact, trace, comm):
        command.add_argument(
            "--timeout-s", type=positive, default=180, metavar="S", help="longest wait for a worker (default 180)"
        )
    for command in (step, exact, trace, wrapper, comm):
        command.add_argument("--device", choices=("cpu", "cuda"))
        rounds = "what takes 90 s, or 20 s" if command is trace else "21, or 7"
        command.add_argument("--rounds", type=positive, metavar="N", help=f"default {rounds} with --quick")
        command.add_argument("--quick", action="store_true", help="fewer rounds")
        command.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    add_hosts(commands.add_parser("hosts", help="collectives over several hosts: hierarchy, Gloo; needs root"))
    return parser


def add_hosts(hosts: argparse.ArgumentParser) -> None:
    hosts.set_defaults(run=run_hosts, device=None, plot=None)
    hosts.add_argument("--hosts", type=positive, default=2, metavar="N", help="network namespaces (default 2)")
    hosts.add_argument("--workers", type=positive, default=2, metavar="N", help="on each host (default 2)")
    hosts.add_argument("--mbit", type=positive, default=1000, metavar="N", help="speed of a link (default 1000 Mbit/s)")
    hosts.add_argument("--ops", type=op_names, default=(), metavar="NAMES", help=f"of {','.join(Op)} (default: all)")
    hosts.add_argument("--sizes", type=byte_sizes, default=(), metavar="SIZES", help="such as 4KiB,25MiB")
    hosts.add_argument("--rounds", type=positive, metavar="N", help="default 11, or 5 with --quick")
    hosts.add_argument("--quick", action="store_true", help="an all-reduce of 25 MiB only, and fewer rounds")
    hosts.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def batch_names(text: str) -> tuple[str, ...]:
    return distinct(text, allowed=[str(size) for sizes in bench_wrapper.SIZES.values() for size in sizes])


def model_names(text: str) -> tuple[str, ...]:
    return distinct(text, allowed=WORKLOADS)


def backend_names(text: str) -> tuple[str, ...]:
    return distinct(text, allowed=["shm", "gloo"])


def op_names(text: str) -> tuple[Op, ...]:
    return tuple(Op(name) for name in distinct(text, allowed=list(Op)))


def worker_counts(text: str) -> tuple[int, ...]:
    counts = tuple(positive(number) for number in distinct(text))
    if min(counts) < 2:
        raise argparse.ArgumentTypeError(f"{min(counts)} is too few: a collective takes 2 workers or more")
    return counts


def byte_sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(parse_size(size) for size in distinct(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a size twice")
    return found


def arm_names(text: str) -> tuple[str, ...]:
    names = distinct(text)
    try:
        for name in names:
            if name != NONE:
                load_wrapper(name)
                check_backend(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def distinct(text: str, *, allowed: Collection[str] | None = None) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if allowed is not None and name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is named twice")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
