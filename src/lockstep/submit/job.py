"""What is to be started, and on what. Pure. Whoever writes for a cluster (slurm, k8s, ray_train) starts from here."""

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
class Elastic:
    """How many workers there may be, on all nodes together; None: what `lockstep run` takes."""

    least: int | None
    most: int | None


@dataclass(frozen=True)
class Order:
    """A training program, and the machines that it shall have."""

    program: tuple[str, ...]  # what follows `python` on a command line
    name: str
    folder: str  # in which the program is started
    python: str
    nodes: int = 1
    workers: int = 1  # on each node
    gpus: int = 0  # on each node
    cpus: int = 1  # of each worker
    limit_s: int | None = None
    save_s: int = 120  # before the limit, when the program is asked to save
    partition: str | None = None
    image: str | None = None
    elastic: Elastic | None = None

    @property
    def all_workers(self) -> int:
        return self.nodes * self.workers

    @property
    def run_options(self) -> list[str]:
        """For `lockstep run`, on each node."""
        options = ["-n", str(self.workers)]
        if self.elastic is not None:
            options += [] if self.elastic.least is None else ["--min", str(self.elastic.least)]
            options += [] if self.elastic.most is None else ["--max", str(self.elastic.most)]
        return options


# option -> the clusters that know it. `check` refuses it for the others: nobody shall believe that it was heeded.
_KNOWN_TO: Final = {
    "--time": {Cluster.SLURM, Cluster.K8S},
    "--partition": {Cluster.SLURM},
    "--image": {Cluster.K8S},
    "--min, --max": {Cluster.SLURM, Cluster.K8S},
}


def check(order: Order, cluster: Cluster) -> None:
    """ValueError says what does not go together."""
    given = {
        "--time": order.limit_s,
        "--partition": order.partition,
        "--image": order.image,
        "--min, --max": order.elastic,
    }
    for option, value in given.items():
        if value is not None and cluster not in _KNOWN_TO[option]:
            others = " and ".join(f"--{one.value}" for one in Cluster if one in _KNOWN_TO[option])
            raise ValueError(f"--{cluster.value} knows no {option}: that is for {others}; leave it out")
    if cluster is Cluster.K8S and order.image is None:
        raise ValueError("--k8s needs --image: a container image that has the program, torch and lockstep in it")
    if order.elastic is not None:
        least, most = order.elastic.least or 1, order.elastic.most or order.all_workers
        if not least <= order.all_workers <= most:
            raise ValueError(
                f"--nodes {order.nodes} times -n {order.workers} is {order.all_workers} workers, which must be at "
                f"least --min ({least}) and at most --max ({most})"
            )
    if cluster is Cluster.SLURM and order.limit_s is not None and order.limit_s <= order.save_s:
        raise ValueError(
            f"--time is {order.limit_s} s, and the program is asked to save {order.save_s} s before it ends; "
            "give it more time, or choose a smaller --save-s"
        )
    if order.gpus and order.workers % order.gpus and order.workers > order.gpus:
        raise ValueError(f"-n {order.workers} workers do not share --gpus {order.gpus} evenly; choose a multiple of it")
    longest = 63 if cluster is Cluster.K8S else 200
    pattern = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?" if cluster is Cluster.K8S else r"[\w.+@-]+"
    if not re.fullmatch(pattern, order.name) or len(order.name) > longest:
        letters = "small letters, digits and -" if cluster is Cluster.K8S else "letters, digits and . _ + @ -"
        raise ValueError(f"--name {order.name!r} must be made of {letters}, {longest} at most")
    if any("\n" in word or "\0" in word for word in (*order.program, order.folder, order.python)):
        raise ValueError("a program, an argument or a folder with a line break in it cannot be written into a job")


def read_time(text: str) -> int:
    """Seconds, from 90s, 30m, 12h, 2d, and SLURM's [D-]HH:MM:SS."""
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
    """A name that every cluster takes: `src/train_big.py` -> `train-big`."""
    stem = re.sub(r"\.pyw?$", "", program.replace("\\", "/").rstrip("/").rpartition("/")[2])
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return plain or "train"
