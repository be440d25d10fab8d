"""Reads rank and world size from the environment. Pure. Without torch.

This is the only reader of RANK, WORLD_SIZE, LOCAL_*, MASTER_*, SLURM_*, OMPI_* and PMI_*. It refuses variables that are
incomplete or contradict each other: a worker that guesses wrong trains alone, or waits for workers that do not exist.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep.errors import WorldError


@dataclass(frozen=True)
class RankAssignment:
    """What the environment says about this worker. Fields that are None are determined when the workers join."""

    rank: int
    size: int
    source: str
    local_rank: int | None = None
    local_size: int | None = None
    addr: str | None = None
    port: int | None = None
    agent_store: bool = False  # torchrun's agent hosts the store, and rank 0 is a client like all workers
    attempt: int = 0  # torchrun's restart count: the store may still have keys of earlier attempts
    variables: str = field(default="", compare=False)  # the variables that define size and rank, for errors


def detect(env: Mapping[str, str]) -> RankAssignment | None:
    """Return what the environment says; None if it says nothing, which means a single worker.

    RANK/WORLD_SIZE come first, then the variables of SLURM or MPI. Where SLURM and MPI disagree, MPI is right: mpirun
    starts its daemons with srun, so that SLURM_* then describe the daemon and not the worker. Raises WorldError if
    variables are incomplete or contradict each other.
    """
    slurm, mpi = _from_slurm(env), _from_mpi(env)
    same = slurm is not None and mpi is not None and (slurm.rank, slurm.size) == (mpi.rank, mpi.size)
    launcher = slurm if mpi is None or same else mpi
    assignment = _from_torch(env, launcher)
    return None if assignment is None else _complete(assignment, env)


def _from_torch(env: Mapping[str, str], launcher: RankAssignment | None) -> RankAssignment | None:
    """RANK and WORLD_SIZE have priority, but must not contradict the launcher."""
    rank, size = read_int(env, "RANK"), read_int(env, "WORLD_SIZE", low=1)
    if rank is None and size is None:
        left_over = [f"{name}={env[name]!r}" for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if env.get(name)]
        if launcher is None and left_over:
            raise WorldError(
                f"{', '.join(left_over)} is set, but RANK and WORLD_SIZE are not: this worker cannot tell whether it "
                "is alone; set RANK and WORLD_SIZE too, or unset it to train on one worker"
            )
        return launcher
    if rank is None or size is None:
        # Batch scripts often export WORLD_SIZE and leave the rank to srun or mpirun: enough, if they agree.
        if launcher is not None and (launcher.rank == rank or launcher.size == size):
            return launcher
        given, missing = (f"WORLD_SIZE={size}", "RANK") if rank is None else (f"RANK={rank}", "WORLD_SIZE")
        contrast = "" if launcher is None else f", and {launcher.source} says rank {launcher.rank} of {launcher.size}"
        raise WorldError(
            f"{given} is set, but {missing} is not{contrast}; "
            f"set both (`lockstep run` and torchrun do), or unset {given}"
        )
    if rank >= size:
        raise WorldError(f"RANK={rank} is not below WORLD_SIZE={size}; ranks go from 0 to WORLD_SIZE-1")
    if launcher is not None:
        _refuse_contradiction(env, size, launcher)
    addr, port = (launcher.addr, launcher.port) if launcher is not None and launcher.size == size else (None, None)
    return RankAssignment(
        rank,
        size,
        "RANK/WORLD_SIZE",
        addr=addr,
        port=port,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=read_int(env, "TORCHELASTIC_RESTART_COUNT") or 0,
        variables=f"WORLD_SIZE={size}, RANK={rank}",
    )


def _refuse_contradiction(env: Mapping[str, str], size: int, launcher: RankAssignment) -> None:
    """Raise WorldError if WORLD_SIZE contradicts SLURM or MPI.

    A launcher inside each task multiplies the workers, which is no contradiction. torchrun and `lockstep run` set
    variables of their own; for other launchers WORLD_SIZE must be tasks x LOCAL_WORLD_SIZE.
    """
    nested = "TORCHELASTIC_RUN_ID" in env or "LOCKSTEP_RUN_DIR" in env
    local_size = read_int(env, "LOCAL_WORLD_SIZE", low=1)
    if nested or size == launcher.size or (local_size is not None and size == launcher.size * local_size):
        return
    raise WorldError(
        f"WORLD_SIZE={size} contradicts {launcher.source}, which started {launcher.size} "
        f"worker{'s' * (launcher.size != 1)}; unset RANK and WORLD_SIZE to follow {launcher.source}, "
        "or give both the same number"
    )


def _from_slurm(env: Mapping[str, str]) -> RankAssignment | None:
    """Return the assignment of a task that srun has started; None for other processes.

    SLURM variables alone prove nothing: a batch script has SLURM_PROCID=0 and SLURM_NTASKS=N too, and so may a shell
    in an interactive allocation, though a single `python` started there is the only worker. The difference:
    - a real step has a SLURM_STEP_ID below the reserved numbers at the top of the range (batch, interactive, extern);
    - a batch script has none, and ENVIRONMENT=BATCH with SLURM_PROCID=0;
    - without either (containers that pass on only some variables), SLURM_PROCID with SLURM_NTASKS > 1 is accepted.
    """
    rank = read_int(env, "SLURM_PROCID")
    if rank is None:
        return None
    step = read_int(env, "SLURM_STEP_ID")
    if step is not None and step >= 0xFFFFFFF0:
        return None
    # Inside a step SLURM_STEP_NUM_TASKS is the step's own number; SLURM_NTASKS may still be the whole job's.
    size_name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS", "").strip() else "SLURM_NTASKS"
    size = read_int(env, size_name, low=1)
    if step is None and rank == 0 and (env.get("ENVIRONMENT") == "BATCH" or size in (None, 1)):
        return None
    if size is None:
        raise WorldError(f"SLURM_PROCID={rank} is set, but SLURM_NTASKS is not; start the workers with `srun -n N`")
    if rank >= size:
        raise WorldError(f"SLURM_PROCID={rank} is not below SLURM_NTASKS={size}; start the workers with `srun -n N`")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    return RankAssignment(
        rank,
        size,
        "SLURM",
        local_rank=read_int(env, "SLURM_LOCALID"),
        addr=first_host(nodes) if nodes else None,
        port=_port_of(f"slurm {job} {step or 0}") if job else None,
        variables=f"{size_name}={size}, SLURM_PROCID={rank}",
    )


def missing_srun_warning(env: Mapping[str, str]) -> str:
    """Return a warning for a program that a batch script of several tasks has started without srun; "" otherwise."""
    tasks = read_int(env, "SLURM_NTASKS")
    if env.get("ENVIRONMENT") != "BATCH" or "SLURM_STEP_ID" in env or tasks is None or tasks < 2:
        return ""
    return (
        f"SLURM_NTASKS={tasks}, but the batch script has started this program without srun: it trains on one worker; "
        "`srun python ...` starts it on all of them"
    )


def advise_on_missing(assignment: RankAssignment) -> str:
    """Return what to do if expected workers are missing; "" if the source of the assignment gives no hint."""
    starts = {"SLURM": "srun", "Open MPI": "mpirun", "PMI": "mpiexec"}.get(assignment.source)
    if starts is None:
        return ""
    names = " and ".join(part.partition("=")[0] for part in assignment.variables.split(", "))
    return (
        f"start all of them together with `{starts} -n {assignment.size} python ...`, or on this host with "
        f"`lockstep run -n {assignment.size} ...`, or unset {names} to train on one worker"
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[003-005,9],login1` -> `gpu003`."""
    head = re.match(r"((?:[^\[\],]|\[[^\[\]]*\])+)(?:,|$)", nodes.strip())
    host = re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", head.group(1)) if head else ""
    if not host or not re.fullmatch(r"[\w.:-]+", host):
        raise WorldError(f"cannot read the first host in SLURM's node list {nodes!r}; set MASTER_ADDR to rank 0's host")
    return host


def _from_mpi(env: Mapping[str, str]) -> RankAssignment | None:
    """Return the assignment by mpirun or mpiexec: Open MPI, or the PMI family (MPICH, Intel MPI, Cray)."""
    open_mpi = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for source, names in (
        ("Open MPI", [f"OMPI_COMM_WORLD_{name}" for name in open_mpi]),
        ("PMI", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    ):
        rank_name, size_name, local_rank_name, local_size_name = names
        rank, size = read_int(env, rank_name), read_int(env, size_name, low=1)
        if rank is None and size is None:
            continue
        if rank is None or size is None:
            given, missing = (f"{size_name}={size}", rank_name) if rank is None else (f"{rank_name}={rank}", size_name)
            raise WorldError(f"{given} is set, but {missing} is not; start the workers with mpirun, or unset {given}")
        if rank >= size:
            raise WorldError(f"{rank_name}={rank} is not below {size_name}={size}; start the workers with mpirun")
        local_size = read_int(env, local_size_name, low=1)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        return RankAssignment(
            rank,
            size,
            source,
            local_rank=read_int(env, local_rank_name),
            local_size=local_size,
            addr="127.0.0.1" if local_size == size else None,
            port=_port_of(f"mpi {job}") if job else None,
            variables=f"{size_name}={size}, {rank_name}={rank}",
        )
    return None


def _complete(assignment: RankAssignment, env: Mapping[str, str]) -> RankAssignment:
    """Add LOCAL_* and MASTER_*, which override the launcher's values, and check what must hold for every source."""
    local_rank, local_size = read_int(env, "LOCAL_RANK"), read_int(env, "LOCAL_WORLD_SIZE", low=1)
    assignment = replace(
        assignment,
        local_rank=assignment.local_rank if local_rank is None else local_rank,
        local_size=assignment.local_size if local_size is None else local_size,
        addr=env.get("MASTER_ADDR") or assignment.addr,
    )
    most = assignment.size if assignment.local_size is None else assignment.local_size
    name = "LOCAL_WORLD_SIZE" if assignment.local_size is not None else "WORLD_SIZE"
    if most > assignment.size:
        raise WorldError(
            f"LOCAL_WORLD_SIZE={most} is more than the whole world has, {assignment.size}; correct one of them"
        )
    if assignment.local_rank is not None and assignment.local_rank >= most:
        raise WorldError(
            f"LOCAL_RANK={assignment.local_rank} is not below {name}={most}; local ranks count from 0 on each host"
        )
    if assignment.size == 1:
        return replace(assignment, addr=None, port=None)
    port = read_int(env, "MASTER_PORT", low=1)
    if port is not None and port > 65535:
        raise WorldError(f"MASTER_PORT={port} is not a port; choose one from 1024 to 65535, the same on every worker")
    assignment = replace(assignment, port=port or assignment.port)
    found = {"MASTER_ADDR": assignment.addr, "MASTER_PORT": assignment.port}
    if missing := [name for name, value in found.items() if not value]:
        raise WorldError(
            f"{assignment.source} says rank {assignment.rank} of {assignment.size}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: the workers cannot find each other; set MASTER_ADDR to "
            "the host of rank 0 and MASTER_PORT to a free port there, the same on every worker"
        )
    return assignment


def read_int(env: Mapping[str, str], name: str, *, low: int = 0) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise WorldError(f"{name}={text!r} is not a whole number; correct it or unset it")
    if int(text) < low:
        raise WorldError(f"{name}={text} is below {low}; correct it or unset it")
    return int(text)


def _port_of(job: str) -> int:
    """Return a port that is the same for all tasks of a job, usually differs between jobs, and is not ephemeral."""
    return 20000 + zlib.crc32(job.encode()) % 10000
