"""`lockstep bench`: speed, always with a peer beside it in the same run.

    lockstep bench step       step time with no communication, torch DDP and ours, on some workers of this machine
    lockstep bench wrapper    what the wrapper costs on one device, in time and memory
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from lockstep.errors import LockstepError
from lockstep.measure import bench_step, bench_wrapper
from lockstep.measure.arms import DEFAULT_ARMS, NONE, load_wrapper
from lockstep.measure.models import DEFAULT_MODELS, WORKLOADS
from lockstep.measure.rounds import Plan


def main(argv: list[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: the folder {arguments.json.absolute().parent} does not exist")
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
    plan = Plan(
        warmup=3,
        rounds=arguments.rounds or (7 if arguments.quick else 21),
        steps=arguments.steps or (3 if arguments.quick else 5),
    )
    settings = bench_step.Settings(
        models=arguments.models,
        arms=arguments.arms,
        workers=arguments.workers,
        threads=arguments.threads,
        device=arguments.device or "cpu",
        plan=plan,
        wait_s=arguments.timeout_s,
    )
    return bench_step.run(settings, arguments.json)


def run_wrapper(arguments: argparse.Namespace) -> int:
    settings = bench_wrapper.Settings(
        arms=arguments.arms,
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        rounds=arguments.rounds or (7 if arguments.quick else 21),
        steps=arguments.steps,
        batches=arguments.batches,
    )
    return bench_wrapper.run(settings, arguments.json)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="step | wrapper")
    step = commands.add_parser("step", help="step time on several workers: no communication, torch DDP, ours")
    step.set_defaults(run=run_step)
    step.add_argument("--workers", type=positive, default=2, metavar="N", help="worker processes (default 2)")
    step.add_argument("--threads", type=positive, default=1, metavar="N", help="threads of each worker (default 1)")
    step.add_argument(
        "--models", type=model_names, default=",".join(DEFAULT_MODELS), metavar="NAMES",
        help=f"of {', '.join(WORKLOADS)}, with commas (default {','.join(DEFAULT_MODELS)})",
    )  # fmt: skip
    step.add_argument(
        "--timeout-s", type=positive, default=180, metavar="S", help="longest wait for a worker (default 180)"
    )
    wrapper = commands.add_parser("wrapper", help="time and memory the wrapper costs on one device, world size 1")
    wrapper.set_defaults(run=run_wrapper)
    wrapper.add_argument(
        "--batches", type=batch_names, default=(), metavar="SIZES", help="such as 1x128,8x1024 (default: all)"
    )
    for command in (step, wrapper):
        command.add_argument(
            "--arms", type=arm_names, default=",".join(DEFAULT_ARMS), metavar="NAMES",
            help=f"with commas (default {','.join(DEFAULT_ARMS)}); the dotted name of a class is an arm too",
        )  # fmt: skip
        command.add_argument("--device", choices=("cpu", "cuda"))
        command.add_argument("--rounds", type=positive, metavar="N", help="default 21, or 7 with --quick")
        command.add_argument("--steps", type=positive, metavar="N", help="steps of each arm in a round")
        command.add_argument("--quick", action="store_true", help="fewer rounds")
        command.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def batch_names(text: str) -> tuple[str, ...]:
    return distinct(text, allowed=[str(size) for sizes in bench_wrapper.SIZES.values() for size in sizes])


def model_names(text: str) -> tuple[str, ...]:
    return distinct(text, allowed=WORKLOADS)


def arm_names(text: str) -> tuple[str, ...]:
    names = distinct(text)
    try:
        for name in names:
            if name != NONE:
                load_wrapper(name)
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
