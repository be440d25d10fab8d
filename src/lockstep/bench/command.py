"""`lockstep bench`: speed, always compared with an alternative in the same run.

lockstep bench step       step time with no communication, torch DDP and ours, on some workers of this machine
lockstep bench exact      step time with the same bits on any number of workers, beside the plain loop and torch DDP
lockstep bench trace      what the trace of a run costs, and `lockstep watch` on it
lockstep bench wrapper    what the wrapper costs on one device, in time and memory
lockstep bench comm       collectives on shm, Gloo and NCCL, beside a plain copy of as many bytes
lockstep bench hosts      collectives over several hosts, made on this machine, and the bytes that leave each (root)
lockstep bench codecs     compressed gradients over slow links, beside torch's communication hooks (root)
lockstep bench tuner      whether Run(grad_comm="auto") chooses the fastest kind, over links of several speeds (root)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch

from lockstep.bench import codecs, comm, exact, hosts, step, trace, tuner, wrapper
from lockstep.bench.collectives import Op, parse_size
from lockstep.bench.models import DEFAULT_MODELS, WORKLOADS
from lockstep.bench.network_namespaces import VirtualHosts
from lockstep.bench.rounds import RoundPlan
from lockstep.errors import LockstepError


def main(argv: list[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: the folder {arguments.json.absolute().parent} does not exist")
    if arguments.plot and (problem := comm.problem_with_plot(arguments.plot)):
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
    return step.run(step_settings(arguments, arms=arguments.arms), arguments.json)


def run_exact(arguments: argparse.Namespace) -> int:
    if "nccl" in arguments.backends and arguments.device != "cuda":
        raise LockstepError("--backends nccl needs --device cuda")
    hosts, backends = arguments.hosts, arguments.backends
    if hosts is not None and arguments.workers % hosts:
        raise LockstepError(f"--workers {arguments.workers} cannot be distributed evenly over --hosts {hosts}")
    if hosts is None and "hierarchy" in backends:
        raise LockstepError("--backends hierarchy needs --hosts")
    if hosts is not None and "shm" in backends:
        raise LockstepError("--backends shm is for one host: with --hosts use gloo, hierarchy")
    link = None if hosts is None else VirtualHosts(hosts=hosts, mbit=arguments.mbit)
    return exact.run(step_settings(arguments, arms=arguments.arms), backends, link, arguments.json)


def run_trace(arguments: argparse.Namespace) -> int:
    asked = {"rounds": arguments.rounds, "steps": arguments.steps, "quick": arguments.quick}
    return trace.run(step_settings(arguments, arms=(trace.ARM,)), **asked, json_path=arguments.json)


def rounds_of(arguments: argparse.Namespace) -> int:
    return arguments.rounds or (7 if arguments.quick else 21)


def step_settings(arguments: argparse.Namespace, *, arms: tuple[str, ...]) -> step.StepSettings:
    return step.StepSettings(
        models=arguments.models,
        arms=arms,
        workers=arguments.workers,
        threads=arguments.threads,
        device=arguments.device or "cpu",
        plan=RoundPlan(3, rounds_of(arguments), arguments.steps or (3 if arguments.quick else 5)),
        wait_s=arguments.timeout_s,
    )


def run_wrapper(arguments: argparse.Namespace) -> int:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = wrapper.WrapperSettings(
        arguments.arms, device, rounds_of(arguments), arguments.steps, batches=arguments.batches
    )
    return wrapper.run(settings, arguments.json)


def run_comm(arguments: argparse.Namespace) -> int:
    settings = comm.CommSettings(
        ops=arguments.ops,
        workers=arguments.workers,
        sizes_bytes=arguments.sizes or (comm.QUICK_SIZES if arguments.quick else comm.SIZES),
        rounds=rounds_of(arguments),
        device=arguments.device or "cpu",
        wait_s=arguments.timeout_s,
    )
    return comm.run(settings, arguments.json, arguments.plot)


def run_hosts(arguments: argparse.Namespace) -> int:
    settings = hosts.HostsSettings(
        hosts=arguments.hosts,
        workers=arguments.workers,
        mbit=arguments.mbit,
        ops=arguments.ops or (hosts.QUICK_OPS if arguments.quick else tuple(Op)),
        sizes_bytes=arguments.sizes or (hosts.QUICK_SIZES if arguments.quick else hosts.SIZES),
        rounds=arguments.rounds or (5 if arguments.quick else 11),
    )
    return hosts.run(settings, arguments.json)


def run_codecs(arguments: argparse.Namespace) -> int:
    settings = codecs.CodecSettings(
        hosts=arguments.hosts,
        workers=arguments.workers,
        mbit=arguments.mbit,
        models=arguments.models,
        rounds=arguments.rounds or (3 if arguments.quick else 9),
        steps=arguments.steps or 1,
    )
    return codecs.run(settings, arguments.device or "cpu", arguments.json)


def run_tuner(arguments: argparse.Namespace) -> int:
    return tuner.run(tuner.TunerSettings(arguments.models, arguments.links), arguments.json)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(
        required=True, metavar="step | exact | trace | wrapper | comm | hosts | codecs | tuner"
    )

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> Callable[..., object]:
        """Add a command. Returns its `add_argument`."""
        added = commands.add_parser(name, help=about)
        added.set_defaults(run=run, plot=None, device=None)
        return added.add_argument

    of_step = command("step", run_step, "step time on several workers: no communication, torch DDP, ours")
    of_exact = command(
        "exact", run_exact, "step time of Run and what exactness costs, beside the plain loop and torch DDP"
    )
    of_trace = command("trace", run_trace, "step time of Run with its trace and a view of it, and without")
    of_wrapper = command("wrapper", run_wrapper, "time and memory the wrapper costs on one device, world size 1")
    of_comm = command("comm", run_comm, "time of collectives over their size: shm, Gloo, NCCL, a plain copy")
    of_hosts = command("hosts", run_hosts, "collectives over several hosts: hierarchy, Gloo; needs root")
    about = "compressed gradients over slow links, beside torch's hooks; needs root. --device cuda: the kernels only"
    of_codecs = command("codecs", run_codecs, about)
    of_tuner = command(
        "tuner", run_tuner, 'whether Run(grad_comm="auto") chooses the fastest kind, over several links; needs root'
    )
    links = "Mbit/s of a link between two hosts, or shm, with commas (default 10000,1000,100,shm)"
    of_tuner("--links", type=link_speeds, default="10000,1000,100,shm", metavar="LINKS", help=links)
    of_tuner("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    backends = partial(distinct, allowed=["shm", "gloo", "nccl", "hierarchy"])
    about = "with commas (default shm,gloo); nccl needs --device cuda, hierarchy needs --hosts"
    of_exact("--backends", type=backends, default="shm,gloo", metavar="NAMES", help=about)
    about = "put the workers on so many network namespaces, connected by links (needs root; default: on this machine)"
    of_exact("--hosts", type=positive, metavar="N", help=about)
    of_exact("--mbit", type=positive, default=1000, metavar="N", help="speed of such a link (default 1000 Mbit/s)")
    by_default = "all but the compiled, audited and sharded ones; exact8-eager on a GPU only"
    about = f"of {', '.join(exact.NAMES)}, with commas (default: {by_default})"
    of_exact("--arms", type=partial(distinct, allowed=exact.NAMES), default=(), metavar="NAMES", help=about)
    for add, models in ((of_step, DEFAULT_MODELS), (of_exact, ("mlp", "gpt")), (of_trace, ("small", "gpt"))):
        add("--workers", type=positive, default=2, metavar="N", help="worker processes (default 2)")
        add("--threads", type=positive, default=1, metavar="N", help="of each worker (default 1)")
        some, about = ",".join(models), f"of {', '.join(WORKLOADS)}, with commas (default {','.join(models)})"
        add("--models", type=partial(distinct, allowed=WORKLOADS), default=some, metavar="NAMES", help=about)
    batches = partial(distinct, allowed=[str(size) for sizes in wrapper.SIZES.values() for size in sizes])
    of_wrapper("--batches", type=batches, default=(), metavar="SIZES", help="such as 1x128,8x1024 (default: all)")
    ops = ",".join(Op)
    of_comm("--ops", type=op_names, default=ops, metavar="NAMES", help=f"with commas (default {ops})")
    of_comm("--workers", type=worker_counts, default="2,4", metavar="N,N", help="one run for each (default 2,4)")
    sizes = "such as 4,4KiB,25MiB (default: powers of four from 4 B to 256 MiB, and 25 MiB; 4 of them with --quick)"
    of_comm("--sizes", type=byte_sizes, default=(), metavar="SIZES", help=sizes)
    of_comm("--plot", type=Path, metavar="FILE", help="draw time over size to this .svg or .png file")
    for add, arms in ((of_step, step.STEP_ARMS), (of_wrapper, step.DEFAULT_ARMS)):
        some = ",".join(arms)
        about = f"with commas (default {some}); a class with its dotted name, class@backend for a backend"
        add("--arms", type=arm_names, default=some, metavar="NAMES", help=about)
    for add in (of_step, of_exact, of_trace, of_wrapper, of_codecs):
        add("--steps", type=positive, metavar="N", help="steps of each arm in a round")
    for add in (of_step, of_exact, of_trace, of_comm):
        add("--timeout-s", type=positive, default=180, metavar="S", help="longest wait for a worker (default 180)")
    for add, workers, mbit in ((of_hosts, 2, 1000), (of_codecs, 1, 100)):
        add("--hosts", type=positive, default=2, metavar="N", help="network namespaces (default 2)")
        add("--workers", type=positive, default=workers, metavar="N", help=f"on each host (default {workers})")
        add("--mbit", type=positive, default=mbit, metavar="N", help=f"speed of a link (default {mbit} Mbit/s)")
    for add, some in ((of_codecs, "mlp,gpt"), (of_tuner, "small,cnn,gpt")):
        known = f"of {', '.join(WORKLOADS)}, with commas (default {some})"
        add("--models", type=partial(distinct, allowed=WORKLOADS), default=some, metavar="NAMES", help=known)
    of_hosts("--ops", type=op_names, default=(), metavar="NAMES", help=f"of {ops} (default: all)")
    of_hosts("--sizes", type=byte_sizes, default=(), metavar="SIZES", help="such as 4KiB,25MiB")
    of_all = (of_step, of_exact, of_trace, of_wrapper, of_comm, of_hosts, of_codecs)
    for add in of_all:
        if add is not of_hosts:
            add("--device", choices=("cpu", "cuda"))
        rounds = {of_trace: "what takes 90 s, or 20 s", of_hosts: "11, or 5", of_codecs: "9, or 3"}.get(add, "21, or 7")
        quick = "an all-reduce of 25 MiB only, and fewer rounds" if add is of_hosts else "fewer rounds"
        add("--rounds", type=positive, metavar="N", help=f"default {rounds} with --quick")
        add("--quick", action="store_true", help=quick)
        add("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


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


def link_speeds(text: str) -> tuple[str, ...]:
    links = distinct(text)
    for link in links:
        if link != tuner.SHM:
            positive(link)
    return links


def arm_names(text: str) -> tuple[str, ...]:
    names = distinct(text)
    try:
        for name in names:
            step.check_arm(name)
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
