"""`lockstep plan`: predicts speed, memory, money and failures of a program on other machines, from short runs of it."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final, TypeVar

from lockstep.errors import LockstepError
from lockstep.plan import batch_size, check, measure
from lockstep.plan.forecast import ConfigurationForecast, Plan, Question, headline, make_plan
from lockstep.plan.links import Link, parse_link
from lockstep.plan.page import render_plan
from lockstep.plan.profile import ProgramProfile, read_links, read_probe
from lockstep.plan.quantities import argument, count, duration, list_of, memory, price, read_question_text
from lockstep.report.page import to_json_value
from lockstep.report.table import columns, render

T = TypeVar("T")
MOST_ROWS: Final = 40
_ABOUT: Final = """\
Predict what a training program will do on more workers, hosts and other links: time of a step with a 90 % interval,
efficiency, memory, time and money to a target, and what failures cost. The predictions are computed from short runs of
the program on one and two workers of this machine, or from the trace of a run.
"""
_MORE: Final = """\
examples:
  lockstep plan train.py --lr 0.1                   makes the short runs itself (about a minute)
  lockstep plan runs/digits --workers 2,64 --json   from the trace of a run
  lockstep plan --hosts 1,2,4,8 --per-host 8 --link 25GbE,100Gbit/s --inside nvlink4 --price 3 train.py
  lockstep plan --ask "64 gpus, 8 per host, 100 Gbit/s, 3 $/h, 80 GiB" train.py
  lockstep plan --save digits.json train.py; lockstep plan digits.json --workers 128
  lockstep plan --check train.py                    predicted beside measured, on this machine
  lockstep plan --branch --target-loss 2.1 train.py steps to a loss, measured in short branches at several batch sizes

Options of lockstep come before the program; everything after it belongs to the program. `lockstep doctor --links FILE`
measures sums between workers and hosts, and --links FILE reads it. Exit status: 0 when a plan was made, with --check if
most predictions held; 1 when something failed or was refused; 2 for wrong arguments.
"""
GRAD_COMMS: Final = ("fp32", "bf16", "fp16", "int8", "int4")
BACKENDS: Final = ("shm", "gloo", "hierarchy", "nccl", "ring", "tree")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep plan",
        usage="lockstep plan [options] (RUN | PROFILE.json | script.py | -m module) [args ...]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    grid = parser.add_argument_group("the grid; lists of values, such as 1,2,4")
    add = grid.add_argument
    add(
        "--workers",
        type=list_of(count),
        metavar="N,..",
        help="numbers of workers, on as few hosts as --per-host allows",
    )
    add("--hosts", type=list_of(count), metavar="N,..", help="numbers of hosts, each with --per-host workers")
    add(
        "--per-host",
        type=list_of(count),
        metavar="N,..",
        help="workers on a host (default: one per core or GPU, at most 8)",
    )
    add("--batch", type=list_of(count), metavar="N,..", help="global batch sizes (default: that of the program)")
    add(
        "--shards",
        type=list_of(count),
        metavar="N,..",
        help="of a batch (default: one for each worker, or as many as the run has)",
    )
    add("--link", type=list_of(parse_link), metavar="L,..", help="between hosts: a speed, 100Gbit/s, or a name, 25GbE")
    add("--inside", type=argument(parse_link), metavar="L", help="between the GPUs of a host: nvlink4, pcie4, ..")
    add("--backend", type=list_of(str), metavar="B,..", help="shm, gloo, hierarchy, nccl, ring, tree (default: chosen)")
    add("--grad-comm", type=list_of(str), metavar="C,..", help="fp32, bf16, int8, int4 (default: fp32)")
    add("--shard-optimizer", action="store_true", help="also predict with a sharded optimiser")
    add("--redundancy", type=int, choices=(0, 1), default=0, help="with it: 1: with a copy of each part (default: 0)")
    add("--bucket-mib", type=list_of(count), metavar="M,..", help="sizes of buckets in MiB (default: 25)")
    world = parser.add_argument_group("the machines")
    add = world.add_argument
    add("--ask", metavar="TEXT", help='the same in one text: "64 gpus, 8 per host, 100 Gbit/s, 3 $/h, 80 GiB"')
    add(
        "--memory",
        type=argument(memory),
        metavar="80GiB",
        help="of a worker; says what does not fit, and by which part",
    )
    add("--price", type=argument(price), metavar="P", help="of a worker and hour, such as 3 or '2.5 EUR/h'")
    add("--mtbf", type=argument(duration), metavar="T", help="mean time between failures of one worker, such as 5000h")
    add("--cores-per-host", type=argument(count), metavar="N", help="on a CPU (default: as on this machine)")
    add("--steps", type=argument(count), metavar="N", help="of the whole training with the program's batch size")
    add("--links", type=Path, action="append", default=[], metavar="FILE", help="written by `lockstep doctor --links`")
    how = parser.add_argument_group("how it is measured")
    add = how.add_argument
    add("--probe-steps", type=argument(count), default=24, metavar="N", help="steps of each short run (default: 24)")
    add("--no-links", action="store_true", help="do not measure sums between workers of this machine")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="for each short run (default: 600)")
    add("--check", action="store_true", help="measure some configurations on this machine beside their predictions")
    add("--branch", action="store_true", help="measure how many steps other batch sizes need, from a checkpoint")
    add("--from", dest="start", type=Path, metavar="RUN", help="with --branch: the run whose checkpoint is the start")
    add("--target-loss", type=float, metavar="X", help="with --branch: the loss to reach")
    add("--branch-steps", type=argument(count), default=120, metavar="N", help="of the branch with the program's batch")
    about = "how --branch changes the learning rate with the batch: linear, sqrt, none (default: linear)"
    add("--lr-rule", choices=("linear", "sqrt", "none"), default="linear", help=about)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print everything for programs; files only if asked for")
    out.add_argument("--out", type=Path, metavar="FILE", help="for the page (default: lockstep-plan.html)")
    about = "a run directory, into which plan.json is written: `lockstep report` then shows what was predicted"
    out.add_argument("--for", dest="run_directory", type=Path, metavar="RUN", help=about)
    out.add_argument("--save", type=Path, metavar="FILE", help="for what was measured, to plan again without measuring")
    parser.add_argument("-m", dest="module", action="store_true", help="plan for a module, like `python -m`")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    chosen = parser.parse_args(_options_first(parser, list(argv)))
    if not chosen.program:
        parser.error("plan for what? Give a script, a module with -m, the directory of a run, or a file of --save")
    try:
        if chosen.ask is not None:
            for name, value in read_question_text(chosen.ask).items():
                setattr(chosen, name, value)
    except ValueError as error:
        parser.error(f"--ask: {error}")
    _check_combinations(parser, chosen)
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
            return _plan(chosen, Path(folder))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130


def _check_combinations(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Refuse what contradicts itself, and files that cannot be written, before anything is measured."""
    if chosen.workers and chosen.hosts:
        parser.error("--workers is for all hosts together: give --workers and --per-host, or --hosts and --per-host")
    if not chosen.branch and (chosen.target_loss is not None or chosen.start is not None):
        parser.error("--target-loss and --from belong to --branch")
    if chosen.branch and chosen.branch_steps < batch_size.LEAST_STEPS:
        parser.error(f"--branch-steps {chosen.branch_steps}: branches need {batch_size.LEAST_STEPS} steps or more")
    for option, path in (("--save", chosen.save), ("--out", chosen.out)):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{option} {path}: there is no folder {path.absolute().parent}")
    if chosen.run_directory is not None and chosen.run_directory.is_file():
        parser.error(f"--for {chosen.run_directory} is a file; give the directory of a run")


def _options_first(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """After a run or a profile, which take no arguments, options may follow: `lockstep plan RUN --workers 2,64`."""
    if arguments and not arguments[0].startswith("-"):
        place = Path(arguments[0])
        if place.is_dir() or place.suffix == ".json":
            return [*arguments[1:], arguments[0]]
    return arguments


def _plan(chosen: argparse.Namespace, folder: Path) -> int:
    profile, program = _measure(chosen, folder)
    if chosen.save is not None:
        _write(chosen.save, json.dumps(profile.to_json()) + "\n", "--save")
    question = _question(chosen, profile)
    branches = _branch(chosen, profile, program, folder / "branches") if chosen.branch else None
    plan = make_plan(profile, question, branches=branches)
    status = 0
    if chosen.check:
        checked = check.check_plan(plan, program, folder / "check", timeout_s=chosen.timeout_s, say=_say)
        plan = replace(plan, checked=[one.to_json() for one in checked])
        status = 0 if check.holds(checked) else 1
    found = to_json_value(plan.to_json())
    text = as_text(plan)
    if chosen.run_directory is not None:
        _write(chosen.run_directory / "plan.json", json.dumps(found, allow_nan=False) + "\n", "--for")
    print(json.dumps(found, allow_nan=False) if chosen.json else text)
    page = chosen.out or (None if chosen.json else Path("lockstep-plan.html"))
    if page is not None:
        _write(page, render_plan(found, text), "--out")
        if not chosen.json:
            print(f"{page}  ({page.stat().st_size / 1e3:,.0f} kB)")
    return status


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"{path} cannot be written: {error.strerror}; choose another place with {option}") from None


def _say(text: str) -> None:
    """Tell what is being measured, on standard error."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def _measure(chosen: argparse.Namespace, folder: Path) -> tuple[ProgramProfile, list[str]]:
    """What is known of the program, and the program itself; empty if there is only its trace."""
    links = [one for path in chosen.links for one in read_links(path)]
    first = Path(chosen.program[0])
    if not chosen.module and (first.is_dir() or first.suffix == ".json"):
        if len(chosen.program) > 1:
            raise LockstepError(f"{' '.join(chosen.program[1:])}: options come before {first}")
        if chosen.check or chosen.branch:
            raise LockstepError("--check and --branch run the program: give the program, not a run")
        if first.is_dir():
            return measure.with_checkpoints(ProgramProfile(first.name, (read_probe(first),), tuple(links)), first), []
        try:
            found = ProgramProfile.from_json(json.loads(first.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LockstepError(f"{first} cannot be read as a profile: {error}; --save FILE writes one") from None
        return replace(found, sums=(*links, *found.sums)), []
    program = [*(["-m"] if chosen.module else []), *chosen.program]
    if not chosen.module and not first.exists():
        raise LockstepError(f"there is no script, run or profile {str(first)!r}, seen from {os.getcwd()}")
    wanted = measure.Wanted(
        steps=chosen.probe_steps,
        timeout_s=chosen.timeout_s,
        sums=not chosen.no_links and not links,
        sharded=chosen.shard_optimizer,
    )
    return measure.measure_program(program, wanted, folder / "probes", links, _say), program


def _branch(
    chosen: argparse.Namespace, profile: ProgramProfile, program: Sequence[str], folder: Path
) -> batch_size.BatchForecast:
    """Train branches with half, once and twice the batch size of the program."""
    batch = profile.base.global_batch_size
    if batch < 2:
        raise LockstepError("--branch tries half of the batch size of the program, which is 1")
    plan = batch_size.BranchPlan(
        start=chosen.start,
        batches=(batch // 2, batch, 2 * batch),
        base_batch_size=batch,
        steps=chosen.branch_steps,
        rule=batch_size.LearningRateRule(chosen.lr_rule),
    )
    branches = batch_size.run_branches(plan, program, folder=folder, timeout_s=chosen.timeout_s, report=_say)
    try:
        return batch_size.forecast(branches, base_batch_size=batch, target_loss=chosen.target_loss)
    except ValueError as error:
        raise LockstepError(str(error)) from None


def _question(chosen: argparse.Namespace, profile: ProgramProfile) -> Question:
    on_gpu = profile.device != "cpu"
    cores = chosen.cores_per_host or (None if on_gpu else profile.base.slots)
    most = max(chosen.per_host or (), default=0) or min(8, cores or 8)
    if chosen.workers:
        layouts = tuple(_split(number, most) for number in chosen.workers)
    elif chosen.hosts:
        layouts = tuple(product(chosen.hosts, chosen.per_host or (most,)))
    else:
        layouts = tuple((1, number) for number in chosen.per_host or (n for n in (1, 2, 4, 8) if n <= most))
    return Question(
        layouts=layouts,
        slots=cores,
        links=chosen.link or measured_links(profile) or (parse_link("25gbe"),),
        inside=chosen.inside,
        backends=_known("--backend", chosen.backend, BACKENDS),
        global_batch_sizes=tuple(chosen.batch or ()),
        shards=tuple(chosen.shards or (0,)),
        grad_comms=_known("--grad-comm", chosen.grad_comm, GRAD_COMMS) or ("fp32",),
        shard_optimizer=(False, True) if chosen.shard_optimizer else (False,),
        redundancy=chosen.redundancy,
        bucket_mib=tuple(chosen.bucket_mib or (None,)),
        memory_bytes=chosen.memory,
        price_per_hour=None if chosen.price is None else chosen.price[0],
        currency="$" if chosen.price is None else chosen.price[1],
        target_steps=chosen.steps,
        mtbf_s=chosen.mtbf,
        text=chosen.ask or "",
    )


def measured_links(profile: ProgramProfile) -> tuple[Link, ...]:
    """The link between hosts that `lockstep doctor --links` has measured, if it has."""
    for one in profile.sums:
        if one.hosts > 1 and one.grad_comm == "fp32" and not one.mbit:
            last = one.points[-1]
            sent = 2 * (one.hosts - 1) / one.hosts * last.size_bytes
            return (Link("measured", one.points[0].seconds / 2, sent / last.seconds, "measured"),)
    return ()


def _known(option: str, given: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    for one in given or ():
        if one not in known:
            raise LockstepError(f"{option} {one}: choose from {', '.join(known)}")
    return tuple(given or ())


def _split(workers: int, most: int) -> tuple[int, int]:
    """Distribute workers over as few hosts as possible: (hosts, workers on each)."""
    hosts = -(-workers // most)
    while workers % hosts:
        hosts += 1
    return hosts, workers // hosts


COLUMNS: Final = columns(
    *(">workers", ">hosts", "link", ">batch", ">shards", "sends", "optimiser", ">step ms", "90 %", ">samples/s"),
    *(">efficiency", ">exposed", ">memory MiB", "fits", ">hours", ">cost"),
)


def as_text(plan: Plan) -> str:
    """The plan for a terminal."""
    shown = [one for one in plan.forecasts if one.is_best or one.is_pareto]
    shown = (shown + [one for one in plan.forecasts if not (one.is_best or one.is_pareto)])[:MOST_ROWS]
    kept = {id(one) for one in (plan.best, *shown)}
    rows = [_row(one, plan) for one in plan.forecasts if id(one) in kept]
    lines = [headline(plan), "", render(COLUMNS, rows)]
    if len(plan.forecasts) > len(rows):
        lines.append(f"({len(plan.forecasts) - len(rows)} more; --json and the page have all)")
    lines.append("* recommended; + fastest for its cost (Pareto front)")
    failures = plan.failures()
    if failures is not None and plan.best.goodput is not None:
        every, goodput = plan.best.checkpoint_every_s, plan.best.goodput
        saved = "never" if every is None or math.isinf(every) else f"every {every / 60:,.1f} minutes"
        lines.append(
            f"failures    {goodput['recovery_in_place']:.2%} of the time is progress with recovery in place, "
            f"{goodput['restart']:.2%} with restarts from checkpoints, then best saved {saved}; {failures['notes'][0]}"
        )
    if (batch := plan.batch_sizes()) is not None:
        lines.append(f"batch       {batch['advice']}")
    if plan.checked:
        lines += ["", check.as_table(plan.checked)]
    return "\n".join([*lines, *(f"note        {note}" for note in plan.notes)])


def _fits_text(one: ConfigurationForecast) -> str:
    if one.fits is None:
        return ""
    if not one.fits:
        return f"no: {one.memory.largest_kind}"
    return "without CUDA graphs" if one.fits_without_graphs else "yes"


def _row(one: ConfigurationForecast, plan: Plan) -> tuple[str, ...]:
    config, step = one.config, one.step
    mark = "*" if one.is_best else "+" if one.is_pareto else ""
    return (
        f"{mark}{config.workers}",
        f"{config.hosts}",
        config.link.name if config.link is not None else "",
        f"{config.global_batch_size}",
        f"{config.shards}",
        config.grad_comm,
        "sharded" if config.shard_optimizer else "",
        f"{1e3 * step.mid_s:.1f}",
        f"{1e3 * step.low_s:.1f} to {1e3 * step.high_s:.1f}",
        f"{one.samples_per_s:,.0f}",
        f"{one.efficiency:.0%}",
        f"{step.parts_s['exposed communication'] / step.mid_s:.0%}",
        f"{one.memory.total_bytes / 2**20:,.0f}",
        _fits_text(one),
        "" if one.hours is None else f"{one.hours:,.3g}",
        "" if one.cost is None else f"{one.cost:,.3g} {plan.question.currency}",
    )
