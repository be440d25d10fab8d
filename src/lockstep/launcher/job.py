"""What `lockstep run` is asked to start, and the environment that it gives to each worker."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.launcher.hosts import Hosts, interface_to

PREEMPTED: Final = 75  # exit status of a worker that was asked to end, and has saved (train/run.py)
INTERRUPTED: Final = 128 + signal.SIGINT  # exit status of the launcher, when that was by Ctrl-C


@dataclass(frozen=True)
class Job:
    """What to run: `command` is for launcher/worker_main.py."""

    command: tuple[str, ...]
    workers: int  # on each host
    log_dir: Path
    grace_s: float = 10.0
    elastic: Elastic | None = None
    hosts: Hosts | None = None  # None: this one

    @property
    def id(self) -> str:
        """The same for all workers that this run will ever have, on every host."""
        if self.hosts is not None:
            return hashlib.sha256(self.hosts.secret + self.hosts.where.encode()).hexdigest()[:16]
        return f"{socket.gethostname()} {os.getpid()} {self.log_dir}"


@dataclass(frozen=True)
class Elastic:
    """How many workers there may be, and what counts as lost."""

    least: int
    most: int
    stall_s: float = 10.0  # without a sign of life


def count_cores() -> int:
    """Those we may use, not those the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """NVIDIA's driver lists them without CUDA being loaded."""
    with suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def worker_env(base: Mapping[str, str], *, rank: int, job: Job, port: int, cores: int) -> dict[str, str]:
    """The environment of one worker. What the user has set about threads and network stays."""
    # Left over from a torchrun around us, these would send the worker to a store that is not ours.
    env = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    env.pop("LOCKSTEP_JOB_SECRET", None)  # theirs is not the control store
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // job.workers)))
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env):
        # Gradients and activations are freed and wanted again in every step. glibc would give their pages back to the
        # system and fault them in anew: a third of the step of a 25 M parameter MLP on a CPU.
        env.update(MALLOC_TRIM_THRESHOLD_=str(2**30), MALLOC_MMAP_THRESHOLD_=str(2**25))
    env.update(LOCAL_RANK=str(rank), PYTHONUNBUFFERED="1", LOCKSTEP_RUN_DIR=str(job.log_dir), LOCKSTEP_RUN_ID=job.id)
    env["LOCKSTEP_LAUNCHER"] = str(os.getpid())  # so that a worker knows itself from what it starts
    if job.hosts is not None:
        return _among_hosts(env, job.hosts)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All workers are here. Gloo would otherwise look the host's name up, and laptops and VPNs answer nonsense.
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


def _among_hosts(env: dict[str, str], hosts: Hosts) -> dict[str, str]:
    """Workers of several hosts find each other through their supervisors: what else says who they are is wrong."""
    wrong = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in env.items() if name not in wrong} | {"LOCKSTEP_HOST": hosts.name}
    interface = env.get("GLOO_SOCKET_IFNAME") or interface_to(hosts.where)
    return env | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


@contextmanager
def reserve_port() -> Iterator[int]:
    """A port that the system has chosen and that stays ours until rank 0 listens on it.

    The socket is bound and never listens. With SO_REUSEADDR on both sides Linux then lets rank 0 bind the same port,
    on the loopback or on all addresses (torch's TCPStore and our own both set it), but hands it out to nobody else.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
