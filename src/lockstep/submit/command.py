"""`lockstep submit`: writes the file with which a cluster starts a training program."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.submit import cluster_files
from lockstep.submit.cluster_files import Cluster, ClusterJob, WorkerLimits, check, name_after, read_time

_ABOUT = """\
Write what a cluster needs to start a training program: a batch script for SLURM, a manifest for Kubernetes, a program
for Ray. Nothing is started unless you say --now. Everything after the script's name belongs to the script.

examples:
  lockstep submit --slurm --print --nodes 2 -n 4 --gpus 4 --time 12h train.py --lr 0.1
  lockstep submit --slurm --nodes 4 -n 8 --min 8 --time 1d train.py      a lost node is gone on without
  lockstep submit --k8s --image registry.example/train:1 --nodes 2 -n 8 --gpus 8 train.py
  lockstep submit --ray -n 4 --out start.py train.py
"""
_ENDS = "Exit status: 0 when it was written; that of sbatch, kubectl or ray with --now; 2 for wrong arguments."


@dataclass(frozen=True)
class ClusterFile:
    """A file for a cluster, and the commands that use it."""

    text: str
    file_name: str
    before: tuple[str, ...]  # shell commands that have to be called once before
    submit: tuple[str, ...]  # the command, to which the file's name is appended


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    chosen = parser.parse_args(argv)
    cluster: Cluster = chosen.cluster
    try:
        job = _read(chosen)
        check(job, cluster)
        file = write(job, cluster)
    except ValueError as error:
        parser.error(str(error))
    if chosen.print:
        print(file.text, end="")
        return 0
    path = chosen.out or Path(file.file_name)
    try:
        path.write_text(file.text)
    except OSError as error:
        parser.error(f"cannot write {path}: {error.strerror}; choose another place with --out")
    command = [*file.submit, str(path)]
    if not chosen.now:
        steps = " && ".join((*file.before, shlex.join(command)))
        print(f"wrote {path}; start it with: {steps}")
        return 0
    for line in file.before:
        print(f"it waits until this command has been called: {line}", flush=True)
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        missing = f"wrote {path}, but there is no `{command[0]}` here; call `{shlex.join(command)}` where it is"
        print(f"lockstep: {missing}", file=sys.stderr)
        return 1


def write(job: ClusterJob, cluster: Cluster) -> ClusterFile:
    if cluster is Cluster.SLURM:
        return ClusterFile(cluster_files.write_batch(job), f"{job.name}.sbatch", (), ("sbatch",))
    if cluster is Cluster.RAY:
        submit = ("ray", "job", "submit", "--no-wait", "--", "python")
        return ClusterFile(cluster_files.write_program(job), f"{job.name}_ray.py", (), submit)
    before = (cluster_files.make_secret(job),) if cluster_files.needs_secret(job) else ()
    return ClusterFile(cluster_files.write_manifest(job), f"{job.name}.json", before, ("kubectl", "create", "-f"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep submit",
        usage="lockstep submit (--slurm | --k8s | --ray) [--print | --out FILE] [options] (script.py | -m module) ...",
        description=_ABOUT,
        epilog=_ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    for cluster, what in (
        (Cluster.SLURM, "a batch script for sbatch"),
        (Cluster.K8S, "a manifest for Kubeflow, for kubectl"),
        (Cluster.RAY, "a program with Ray Train's TorchTrainer"),
    ):
        where.add_argument(f"--{cluster.value}", dest="cluster", action="store_const", const=cluster, help=what)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--print", action="store_true", help="to standard output, and write no file")
    output.add_argument("--out", type=Path, metavar="FILE", help="default: named after the job, in this folder")
    parser.add_argument("--now", action="store_true", help="submit it, and show the answer")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="how many machines (default: 1)")
    parser.add_argument(
        "-n", dest="workers", type=_count, metavar="N", help="workers on each (default: as many as --gpus, or 1)"
    )
    parser.add_argument("--gpus", type=_number, default=0, metavar="N", help="GPUs of each machine (default: none)")
    parser.add_argument("--cpus", type=_count, default=1, metavar="N", help="cores of each worker (default: 1)")
    parser.add_argument("--time", type=_time, metavar="T", help="the longest it may take: 30m, 12h, 2d, D-HH:MM:SS")
    parser.add_argument("--name", help="of the job (default: after the script)")
    parser.add_argument("--python", help="the interpreter (default: this one; `python` with --k8s)")
    parser.add_argument("--min", dest="least", type=_count, metavar="N", help="as for `lockstep run`: lost workers are")
    parser.add_argument("--max", dest="most", type=_count, metavar="N", help="replaced, and the others go on meanwhile")
    only = parser.add_argument_group("for one of them")
    only.add_argument("--partition", metavar="P", help="SLURM: the partition")
    only.add_argument(
        "--save-s", type=_count, default=120, metavar="S", help="SLURM: save so long before the end (default: 120)"
    )
    only.add_argument("--image", help="Kubernetes: the container image")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as for `python -m`")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _read(chosen: argparse.Namespace) -> ClusterJob:
    program = chosen.program[1:] if chosen.program[:1] == ["--"] else chosen.program
    if chosen.print and chosen.now:
        raise ValueError("--print and --now: shall it be shown or started? Leave one of them out")
    if not program:
        raise ValueError("what shall the workers run? Give a script, or a module with -m")
    if not chosen.module and program[0].startswith("-"):
        raise ValueError(f"unknown option {program[0]!r}; options of the script come after the script")
    # With --k8s the script may exist only in the image.
    if not chosen.module and chosen.cluster is not Cluster.K8S and not os.path.isfile(program[0]):
        raise ValueError(f"there is no script {program[0]!r}, seen from {os.getcwd()}")
    is_elastic = chosen.least is not None or chosen.most is not None
    return ClusterJob(
        program=(*(["-m"] if chosen.module else []), *program),
        name=chosen.name or name_after(program[0].rpartition(".")[2] if chosen.module else program[0]),
        folder=os.getcwd(),
        python=chosen.python or ("python" if chosen.cluster is Cluster.K8S else sys.executable),
        nodes=chosen.nodes,
        workers=chosen.workers or chosen.gpus or 1,
        gpus=chosen.gpus,
        cpus=chosen.cpus,
        limit_s=chosen.time,
        save_s=chosen.save_s,
        partition=chosen.partition,
        image=chosen.image,
        elastic=WorkerLimits(chosen.least, chosen.most) if is_elastic else None,
    )


def _number(text: str, least: int = 0) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
    return int(text)


def _count(text: str) -> int:
    return _number(text, 1)


def _time(text: str) -> int:
    try:
        return read_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
