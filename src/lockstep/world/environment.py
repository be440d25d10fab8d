"""Which place among the workers the environment gives us, and which host this is. Pure but for that, and without torch.

This is the only reader of RANK, WORLD_SIZE, LOCAL_*, MASTER_*, SLURM_*, OMPI_* and PMI_*. It refuses what is half set
or contradicts itself: a worker that guesses wrong trains alone for a week, or waits for somebody who never comes.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import WorldError


@dataclass(frozen=True)
class Place:
    """What the environment says about this worker. None: it does not say, the workers find out when they meet."""

    rank: int
    size: int
    source: str
    local_rank: int | None = None
    local_size: int | None = None
    addr: str | None = None
    port: int | None = None
    agent_store: bool = False  # torchrun's agent keeps the store, rank 0 is a client like everybody
    attempt: int = 0  # torchrun's restarts may find the keys of the attempt before them
    told_by: str = field(default="", compare=False)  # the variables that said so, with their values, for errors


def detect(env: Mapping[str, str]) -> Place | None:
    """Who the environment says we are; None when it says nothing, which makes us a world of one.

    RANK/WORLD_SIZE come first, then the variables of the launcher that started us. Where SLURM and MPI disagree, MPI
    is right: mpirun starts its daemons with srun, so that SLURM_* then describe the daemon and not the worker.
    """
    slurm, mpi = _from_slurm(env), _from_mpi(env)
    same = slurm is not None and mpi is not None and (slurm.rank, slurm.size) == (mpi.rank, mpi.size)
    launcher = slurm if mpi is None or same else mpi
    place = _from_torch(env, launcher)
    return None if place is None else _complete(place, env)


def _from_torch(env: Mapping[str, str], launcher: Place | None) -> Place | None:
    """RANK and WORLD_SIZE win, but not against a launcher that tells another story."""
    rank, size = read_number(env, "RANK"), read_number(env, "WORLD_SIZE", low=1)
    if rank is None and size is None:
        left_over = [f"{name}={env[name]!r}" for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if env.get(name)]
        if launcher is None and left_over:
            raise WorldError(
                f"{', '.join(left_over)} is set, but RANK and WORLD_SIZE are not: this worker cannot tell whether it "
                "is alone; set RANK and WORLD_SIZE too, or unset it to train on one worker"
            )
        return launcher
    if rank is None or size is None:
        # Batch scripts like to export WORLD_SIZE and leave the rank to srun or mpirun: enough, if they agree.
        if launcher is not None and (launcher.rank == rank or launcher.size == size):
            return launcher
        here, gone = (f"WORLD_SIZE={size}", "RANK") if rank is None else (f"RANK={rank}", "WORLD_SIZE")
        told = "" if launcher is None else f", and {launcher.source} says rank {launcher.rank} of {launcher.size}"
        raise WorldError(
            f"{here} is set, but {gone} is not{told}; set both (`lockstep run` and torchrun do), or unset {here}"
        )
    if rank >= size:
        raise WorldError(f"RANK={rank} is not below WORLD_SIZE={size}; ranks go from 0 to WORLD_SIZE-1")
    if launcher is not None:
        _refuse_contradiction(env, size, launcher)
    addr, port = (launcher.addr, launcher.port) if launcher is not None and launcher.size == size else (None, None)
    return Place(
        rank,
        size,
        "RANK/WORLD_SIZE",
        addr=addr,
        port=port,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=read_number(env, "TORCHELASTIC_RESTART_COUNT") or 0,
        told_by=f"WORLD_SIZE={size}, RANK={rank}",
    )


def _refuse_contradiction(env: Mapping[str, str], size: int, launcher: Place) -> None:
    """A launcher inside each SLURM or MPI task (torchrun, ours, ...) multiplies the workers; that is no contradiction.

    Those two say that it was them. Of the others we ask that the numbers work out: tasks x local workers.
    """
    nested = "TORCHELASTIC_RUN_ID" in env or "LOCKSTEP_RUN_DIR" in env
    local_size = read_number(env, "LOCAL_WORLD_SIZE", low=1)
    if nested or size == launcher.size or (local_size is not None and size == launcher.size * local_size):
        return
    raise WorldError(
        f"WORLD_SIZE={size} contradicts {launcher.source}, which started {launcher.size} "
        f"worker{'s' * (launcher.size != 1)}; unset RANK and WORLD_SIZE to follow {launcher.source}, "
        "or give both the same number"
    )


def _from_slurm(env: Mapping[str, str]) -> Place | None:
    """A task that srun started.

    SLURM variables alone prove nothing: a batch script has SLURM_PROCID=0 and SLURM_NTASKS=N too, and so may a shell
    in an interactive allocation, though the one `python` started there is alone. What tells them apart:
    - a real step has a SLURM_STEP_ID below the reserved numbers at the top of the range (batch, interactive, extern);
    - a batch script has none, and ENVIRONMENT=BATCH with SLURM_PROCID=0;
    - without either (containers that pass on only some variables) we believe SLURM_PROCID with SLURM_NTASKS > 1.
    """
    rank = read_number(env, "SLURM_PROCID")
    if rank is None:
        return None
    step = read_number(env, "SLURM_STEP_ID")
    if step is not None and step >= 0xFFFFFFF0:
        return None
    # Inside a step SLURM_STEP_NUM_TASKS is the step's own number; SLURM_NTASKS may still be the whole job's.
    size_name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS", "").strip() else "SLURM_NTASKS"
    size = read_number(env, size_name, low=1)
    if step is None and rank == 0 and (env.get("ENVIRONMENT") == "BATCH" or size in (None, 1)):
        return None
    if size is None:
        raise WorldError(f"SLURM_PROCID={rank} is set, but SLURM_NTASKS is not; start the workers with `srun -n N`")
    if rank >= size:
        raise WorldError(f"SLURM_PROCID={rank} is not below SLURM_NTASKS={size}; start the workers with `srun -n N`")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    return Place(
        rank,
        size,
        "SLURM",
        local_rank=read_number(env, "SLURM_LOCALID"),
        addr=first_host(nodes) if nodes else None,
        port=_port_of(f"slurm {job} {step or 0}") if job else None,
        told_by=f"{size_name}={size}, SLURM_PROCID={rank}",
    )


def batch_note(env: Mapping[str, str]) -> str:
    """For a program that a batch script has started without srun, though the job has several tasks; "" else."""
    tasks = read_number(env, "SLURM_NTASKS")
    if env.get("ENVIRONMENT") != "BATCH" or "SLURM_STEP_ID" in env or tasks is None or tasks < 2:
        return ""
    return (
        f"SLURM_NTASKS={tasks}, but the batch script has started this program without srun: it trains on one worker; "
        "`srun python ...` starts it on all of them"
    )


def advise_on_missing(place: Place) -> str:
    """What to do if only some of the workers that `place` was told of come; "" if its source gives no hint."""
    starts = {"SLURM": "srun", "Open MPI": "mpirun", "PMI": "mpiexec"}.get(place.source)
    if starts is None:
        return ""
    names = " and ".join(part.partition("=")[0] for part in place.told_by.split(", "))
    return (
        f"start all of them together with `{starts} -n {place.size} python ...`, or on this host with `lockstep run "
        f"-n {place.size} ...`, or unset {names} to train on one worker"
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `gpu[003-005,9],login1` -> `gpu003`."""
    head = re.match(r"((?:[^\[\],]|\[[^\[\]]*\])+)(?:,|$)", nodes.strip())
    host = re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", head.group(1)) if head else ""
    if not host or not re.fullmatch(r"[\w.:-]+", host):
        raise WorldError(f"cannot read the first host in SLURM's node list {nodes!r}; set MASTER_ADDR to rank 0's host")
    return host


def _from_mpi(env: Mapping[str, str]) -> Place | None:
    """A process that mpirun or mpiexec started: Open MPI, or one of the PMI family (MPICH, Intel MPI, Cray)."""
    families = (
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI", "PMI_RANK", "PMI_SIZE"),
    )
    for source, rank_name, size_name in families:
        rank, size = read_number(env, rank_name), read_number(env, size_name, low=1)
        if rank is None and size is None:
            continue
        if rank is None or size is None:
            here, gone = (f"{size_name}={size}", rank_name) if rank is None else (f"{rank_name}={rank}", size_name)
            raise WorldError(f"{here} is set, but {gone} is not; start the workers with mpirun, or unset {here}")
        if rank >= size:
            raise WorldError(f"{rank_name}={rank} is not below {size_name}={size}; start the workers with mpirun")
        local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        if source == "PMI":
            local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        local_size = read_number(env, local[1], low=1)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        return Place(
            rank,
            size,
            source,
            local_rank=read_number(env, local[0]),
            local_size=local_size,
            addr="127.0.0.1" if local_size == size else None,
            port=_port_of(f"mpi {job}") if job else None,
            told_by=f"{size_name}={size}, {rank_name}={rank}",
        )
    return None


def _complete(place: Place, env: Mapping[str, str]) -> Place:
    """LOCAL_*, MASTER_* where they are set, over what the launcher gave; and the checks that hold for every source."""
    local_rank, local_size = read_number(env, "LOCAL_RANK"), read_number(env, "LOCAL_WORLD_SIZE", low=1)
    place = replace(
        place,
        local_rank=place.local_rank if local_rank is None else local_rank,
        local_size=place.local_size if local_size is None else local_size,
        addr=env.get("MASTER_ADDR") or place.addr,
    )
    most = place.size if place.local_size is None else place.local_size
    name = "LOCAL_WORLD_SIZE" if place.local_size is not None else "WORLD_SIZE"
    if most > place.size:
        raise WorldError(f"LOCAL_WORLD_SIZE={most} is more than the whole world has, {place.size}; correct one of them")
    if place.local_rank is not None and place.local_rank >= most:
        raise WorldError(
            f"LOCAL_RANK={place.local_rank} is not below {name}={most}; local ranks count from 0 on each host"
        )
    if place.size == 1:
        return replace(place, addr=None, port=None)
    port = read_number(env, "MASTER_PORT", low=1)
    if port is not None and port > 65535:
        raise WorldError(f"MASTER_PORT={port} is not a port; choose one from 1024 to 65535, the same on every worker")
    place = replace(place, port=port or place.port)
    gone = [name for name, value in (("MASTER_ADDR", place.addr), ("MASTER_PORT", place.port)) if not value]
    if gone:
        raise WorldError(
            f"{place.source} says rank {place.rank} of {place.size}, but {' and '.join(gone)} "
            f"{'is' if len(gone) == 1 else 'are'} not set: the workers have no place to meet; set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there, the same on every worker"
        )
    return place


def read_number(env: Mapping[str, str], name: str, *, low: int = 0) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise WorldError(f"{name}={text!r} is not a whole number; correct it or unset it")
    if int(text) < low:
        raise WorldError(f"{name}={text} is below {low}; correct it or unset it")
    return int(text)


def _port_of(job: str) -> int:
    """The same port for all tasks of a job, other ones for most others, below the range the system hands out."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def identify_host(environment: Mapping[str, str] = os.environ) -> str:
    """Workers with the same text are on one host: the same running kernel, and the same network namespace in it.

    The namespace, because shared memory is handed over at a Unix socket, and those do not lead out of one. Containers
    of one machine count as hosts of their own unless they share it (`--network=host`). Whether memory can really be
    shared shows when the workers of a host try. LOCKSTEP_HOST overrides all this.
    """
    if name := environment.get("LOCKSTEP_HOST", "").strip():
        return name
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()
