"""The job that `lockstep run` starts, and the environment variables that each of its workers gets."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.hosts import Hosts, interface_to


@dataclass(frozen=True)
class Job:
    """What to run, and on how many workers. `command` is the command line of launcher/worker_main.py."""

    command: tuple[str, ...]
    workers: int  # on each host
    log_dir: Path
    grace_s: float = 10.0
    elastic: ElasticOptions | None = None
    hosts: Hosts | None = None  # None: this host only

    @property
    def id(self) -> str:
        """Equal for all workers that this run ever has, on every host."""
        if self.hosts is not None:
            return hashlib.sha256(self.hosts.secret + self.hosts.where.encode()).hexdigest()[:16]
        return f"{socket.gethostname()} {os.getpid()} {self.log_dir}"


@dataclass(frozen=True)
class ElasticOptions:
    """The allowed number of workers, and when a worker counts as lost."""

    least: int
    most: int
    stall_s: float = 10.0  # a worker without a heartbeat for so long is lost


def count_cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """The GPUs that NVIDIA's driver lists; CUDA is not loaded for that."""
    with suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def worker_env(base: Mapping[str, str], *, rank: int, job: Job, port: int, cores: int) -> dict[str, str]:
    """Returns the environment of one worker. Settings of the user for threads and network are kept."""
    # If the launcher itself runs under torchrun, these would lead the worker to torchrun's store.
    # Workers do not use the control store: its secret and its login are not theirs.
    hidden = ("TORCHELASTIC_", "LOCKSTEP_JOB_SECRET", "ETCDCTL_")
    env = {name: value for name, value in base.items() if not name.startswith(hidden)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.workers)))
    env.update(LOCAL_RANK=str(rank), PYTHONUNBUFFERED="1", LOCKSTEP_RUN_DIR=str(job.log_dir), LOCKSTEP_RUN_ID=job.id)
    env["LOCKSTEP_LAUNCHER"] = str(os.getpid())  # tells a worker from the processes that it starts
    if job.elastic is not None:
        env.setdefault("LOCKSTEP_SHARDS", str(job.elastic.most))  # a batch is cut for the largest number of workers
    if job.hosts is not None:
        return _env_for_hosts(env, job.hosts)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All workers are on this host. Gloo would otherwise resolve the host's name, which is often wrong on laptops
        # and with VPNs.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.workers),
        LOCAL_WORLD_SIZE=str(job.workers),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return env


def _env_for_hosts(env: dict[str, str], hosts: Hosts) -> dict[str, str]:
    """The environment in a run on several hosts, whose workers get rank and addresses from their host agents.

    Inherited variables that say the same are wrong, and are removed.
    """
    wrong = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in env.items() if name not in wrong} | {"LOCKSTEP_HOST": hosts.name}
    interface = env.get("GLOO_SOCKET_IFNAME") or interface_to(hosts.where)
    return env | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


@contextmanager
def reserve_port() -> Iterator[int]:
    """Yields a port that the system has chosen, and keeps it reserved until rank 0 listens on it.

    The socket is bound and never listens. With SO_REUSEADDR on both sides Linux then lets rank 0 bind the same port,
    on the loopback or on all addresses (torch's TCPStore and ours both set it), but gives it to no other process.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
