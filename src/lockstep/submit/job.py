"""A training program and the machines that it needs: the input of slurm.py, k8s.py and ray_train.py. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Cluster(Enum):
    SLURM = "slurm"
    K8S = "k8s"
    RAY = "ray"


@dataclass(frozen=True)
class WorkerLimits:
    """Allowed number of workers on all nodes together; None: the default of `lockstep run`."""

    least: int | None
    most: int | None


@dataclass(frozen=True)
class ClusterJob:
    """A training program, and the machines that it needs."""

    program: tuple[str, ...]  # what follows `python` on a command line
    name: str
    folder: str  # working directory of the program
    python: str
    nodes: int = 1
    workers: int = 1  # on each node
    gpus: int = 0  # on each node
    cpus: int = 1  # per worker
    limit_s: int | None = None
    save_s: int = 120  # the program is asked to save so long before the limit
    partition: str | None = None
    image: str | None = None
    elastic: WorkerLimits | None = None

    @property
    def all_workers(self) -> int:
        return self.nodes * self.workers

    @property
    def run_options(self) -> list[str]:
        """Options of `lockstep run` on each node."""
        options = ["-n", str(self.workers)]
        if self.elastic is not None:
            options += [] if self.elastic.least is None else ["--min", str(self.elastic.least)]
            options += [] if self.elastic.most is None else ["--max", str(self.elastic.most)]
        return options


# option -> the clusters that support it. `check` refuses it for the others, so that it is not ignored silently.
_SUPPORTED_BY: Final = {
    "--time": {Cluster.SLURM, Cluster.K8S},
    "--partition": {Cluster.SLURM},
    "--image": {Cluster.K8S},
    "--min, --max": {Cluster.SLURM, Cluster.K8S},
}


def check(job: ClusterJob, cluster: Cluster) -> None:
    """Raises ValueError for options that do not go together."""
    given = {
        "--time": job.limit_s,
        "--partition": job.partition,
        "--image": job.image,
        "--min, --max": job.elastic,
    }
    for option, value in given.items():
        if value is not None and cluster not in _SUPPORTED_BY[option]:
            others = " and ".join(f"--{one.value}" for one in Cluster if one in _SUPPORTED_BY[option])
            raise ValueError(f"--{cluster.value} knows no {option}: that is for {others}; leave it out")
    if cluster is Cluster.K8S and job.image is None:
        raise ValueError("--k8s needs --image: a container image that has the program, torch and lockstep in it")
    if job.elastic is not None:
        least, most = job.elastic.least or 1, job.elastic.most or job.all_workers
        if not least <= job.all_workers <= most:
            raise ValueError(
                f"--nodes {job.nodes} times -n {job.workers} is {job.all_workers} workers, which must be at "
                f"least --min ({least}) and at most --max ({most})"
            )
    if cluster is Cluster.SLURM and job.limit_s is not None and job.limit_s <= job.save_s:
        raise ValueError(
            f"--time is {job.limit_s} s, and the program is asked to save {job.save_s} s before it ends; "
            "give it more time, or choose a smaller --save-s"
        )
    if job.gpus and job.workers % job.gpus and job.workers > job.gpus:
        raise ValueError(f"-n {job.workers} workers do not share --gpus {job.gpus} evenly; choose a multiple of it")
    longest = 63 if cluster is Cluster.K8S else 200
    pattern = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?" if cluster is Cluster.K8S else r"[\w.+@-]+"
    if not re.fullmatch(pattern, job.name) or len(job.name) > longest:
        letters = "small letters, digits and -" if cluster is Cluster.K8S else "letters, digits and . _ + @ -"
        raise ValueError(f"--name {job.name!r} must be made of {letters}, {longest} at most")
    if any("\n" in word or "\0" in word for word in (*job.program, job.folder, job.python)):
        raise ValueError("a program, an argument or a folder with a line break in it cannot be written into a job")


def read_time(text: str) -> int:
    """Parses 90s, 30m, 12h, 2d, and SLURM's [D-]HH:MM:SS; returns seconds."""
    if short := re.fullmatch(r"(\d+)([smhd])", text):
        seconds = int(short[1]) * _UNITS_S[short[2]]
    elif clock := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        raise ValueError(f"{text!r} is not a time; it takes 90s, 30m, 12h, 2d or D-HH:MM:SS")
    if seconds == 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def name_after(program: str) -> str:
    """Returns a name that every cluster accepts: `src/train_big.py` -> `train-big`."""
    stem = re.sub(r"\.pyw?$", "", program.replace("\\", "/").rstrip("/").rpartition("/")[2])
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return plain or "train"
