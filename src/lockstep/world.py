"""Who we are among the workers, and joining the others.

`detect` reads the environment and decides; it is pure, and the only reader of RANK, SLURM_*, OMPI_* and PMI_*.
`init` carries out what it says: meets the other workers at rank 0's store, agrees on a backend, forms the process
group and returns a `World`. A world of one goes the same way, with a store of its own, so that nothing that comes
after has to ask whether it is alone.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread

import torch
import torch.distributed as dist

from lockstep.errors import WorldError

JOIN_TIMEOUT_S = 300.0
# A store answers in milliseconds. Whoever accepts our connection and then says nothing for this long is no store.
HANDSHAKE_TIMEOUT_S = 30.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """The facts about this worker. `source` says how they were found out."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    backend: str
    source: str


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


# ---- detect: environment -> Place ----------------------------------------------------------------------------------


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
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE", low=1)
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
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _refuse_contradiction(env: Mapping[str, str], size: int, launcher: Place) -> None:
    """A launcher inside each SLURM or MPI task (torchrun, ours, ...) multiplies the workers; that is no contradiction.

    Those two say that it was them. Of the others we ask that the numbers work out: tasks x local workers.
    """
    nested = "TORCHELASTIC_RUN_ID" in env or "LOCKSTEP_RUN_DIR" in env
    local_size = _number(env, "LOCAL_WORLD_SIZE", low=1)
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
    rank = _number(env, "SLURM_PROCID")
    if rank is None:
        return None
    step = _number(env, "SLURM_STEP_ID")
    if step is not None and step >= 0xFFFFFFF0:
        return None
    # Inside a step SLURM_STEP_NUM_TASKS is the step's own number; SLURM_NTASKS may still be the whole job's.
    size = _number(env, "SLURM_STEP_NUM_TASKS", low=1) or _number(env, "SLURM_NTASKS", low=1)
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
        local_rank=_number(env, "SLURM_LOCALID"),
        addr=first_host(nodes) if nodes else None,
        port=_port_of(f"slurm {job} {step or 0}") if job else None,
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `gpu[003-005,9],login1` -> `gpu003`."""
    head = re.match(r"(?:[^\[\],]|\[[^\[\]]*\])+", nodes.strip())
    host = re.sub(r"\[\s*(\d+)[^\]]*\]", r"\1", head.group()) if head else ""
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
        rank, size = _number(env, rank_name), _number(env, size_name, low=1)
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
        local_size = _number(env, local[1], low=1)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
        return Place(
            rank,
            size,
            source,
            local_rank=_number(env, local[0]),
            local_size=local_size,
            addr=LOOPBACK if local_size == size else None,
            port=_port_of(f"mpi {job}") if job else None,
        )
    return None


def _complete(place: Place, env: Mapping[str, str]) -> Place:
    """LOCAL_*, MASTER_* where they are set, over what the launcher gave; and the checks that hold for every source."""
    local_rank, local_size = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE", low=1)
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
        raise WorldError(f"LOCAL_RANK={place.local_rank} is not below {name}={most}; local ranks start at 0 on each host")
    if place.size == 1:
        return replace(place, addr=None, port=None)
    port = _number(env, "MASTER_PORT", low=1)
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


def _number(env: Mapping[str, str], name: str, *, low: int = 0) -> int | None:
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


# ---- choose: facts -> device, backend ------------------------------------------------------------------------------


def choose_device(*, asked: torch.device | None, backend: str | None, gpus: int, local_rank: int) -> torch.device:
    """A GPU of our own where there is one. A backend that was asked for and knows no GPUs means the CPU."""
    nccl = backend is not None and "nccl" in backend
    if asked is not None and asked.type != "cuda":
        if nccl:
            raise ValueError(f"backend={backend!r} cannot move tensors on device={str(asked)!r}; use gloo, or a GPU")
        return asked
    if gpus == 0:
        if asked is not None or nccl:
            wish = f"device={str(asked)!r}" if asked is not None else f"backend={backend!r}"
            raise ValueError(f"{wish} needs a GPU, and torch sees none here; leave it out to train on the CPU")
        return torch.device("cpu")
    if asked is not None and asked.index is not None:
        if asked.index >= gpus:
            raise ValueError(f"device={str(asked)!r}, but torch sees {gpus} GPUs here, cuda:0 to cuda:{gpus - 1}")
        return asked
    if asked is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    # srun and Kubernetes often show each worker one GPU only, its own: then that is the one, whatever our local rank.
    return torch.device("cuda", local_rank % gpus)


def choose_backend(gpus: Sequence[str]) -> str:
    """`gpus` has the GPU of each rank, "" for none. NCCL refuses two workers on one GPU; Gloo takes everything."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def count_local(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """(local rank, local size) from the host of each rank."""
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


# ---- init: join the others -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    backend: str | None
    device: torch.device | None
    timeout_s: float | None


@dataclass
class _Memory:
    """What this process remembers between calls of `init`. One per process, like the default process group itself."""

    world: World | None = None
    asked: _Asked | None = None
    group: dist.ProcessGroup | None = None
    # Kept after the group is destroyed: rank 0 could not bind the port again while others still hold connections,
    # and a fast peer would join the old store. Each group formed on it gets its own generation of keys.
    store: dist.Store | None = None
    generation: int = 0


_memory = _Memory()


def init(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
) -> World:
    """Find out who we are, join the other workers, and return the facts.

    backend         "nccl" where every worker has a GPU of its own, else "gloo". Must be the same on all workers.
    device          cuda:<local rank> where there are GPUs, else the CPU.
    timeout_s       how long a collective may wait for the others; torch's own default if left out.
    join_timeout_s  how long to wait here for the others; LOCKSTEP_JOIN_TIMEOUT_S if left out, else 300.

    A process group that is already there is used as it is. Calling twice gives the same World again.
    """
    for name, value in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be a positive number of seconds")
    asked = _Asked(backend, torch.device(device) if device is not None else None, timeout_s)
    if dist.is_initialized() and _memory.world is not None and _memory.group is dist.group.WORLD:
        _refuse_other_wishes(_memory.world, asked)
        return _memory.world
    deadline = time.monotonic() + (join_timeout_s or _join_timeout_s(os.environ))
    if dist.is_initialized():
        world = _adopt(asked, deadline)
    else:
        world = _join(detect(os.environ) or Place(0, 1, "alone"), asked, deadline)
    _memory.world, _memory.asked, _memory.group = world, asked, dist.group.WORLD
    return world


def _refuse_other_wishes(world: World, asked: _Asked) -> None:
    first = _memory.asked
    assert first is not None
    given = world.device if asked.device is None or asked.device.index is not None else torch.device(world.device.type)
    for name, wish, is_now in (
        ("backend", asked.backend, world.backend),
        ("device", asked.device, given),
        ("timeout_s", asked.timeout_s, first.timeout_s),
    ):
        if wish is not None and wish != is_now:
            raise ValueError(
                f"lockstep.init({name}={str(wish)!r}), but this process has already joined with {name}={str(is_now)!r}; "
                "ask for it in the first call"
            )


def _join_timeout_s(env: Mapping[str, str]) -> float:
    text = env.get("LOCKSTEP_JOIN_TIMEOUT_S", "").strip()
    try:
        seconds = float(text or JOIN_TIMEOUT_S)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise WorldError(f"LOCKSTEP_JOIN_TIMEOUT_S={text!r} is not a positive number of seconds; correct or unset it")
    return seconds


def _adopt(asked: _Asked, deadline: float) -> World:
    """Somebody (Ray, the user's own code) has formed the group already; we only add what it does not say."""
    backend = str(dist.get_backend())
    if asked.backend not in (None, backend):
        raise ValueError(f"backend={asked.backend!r}, but the process group that is already there uses {backend!r}")
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = _number(os.environ, "LOCAL_RANK"), _number(os.environ, "LOCAL_WORLD_SIZE", low=1)
    if size == 1:
        local_rank, local_size = 0, 1
    if local_rank is None or local_size is None:
        store = dist.distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]
        meeting = _Meeting(dist.PrefixStore("lockstep/adopt", store), rank, size, "the process group's store", deadline)
        counted = count_local(meeting.swap("host", socket.gethostname()), rank)
        local_rank, local_size = counted if local_rank is None else (local_rank, counted[1])
    wish = asked.device
    if wish is None and "nccl" in backend and torch.cuda.current_device() != 0:
        wish = torch.device("cuda", torch.cuda.current_device())  # the program has chosen one; 0 may just be the default
    gpus = torch.cuda.device_count()
    device = choose_device(asked=wish, backend=backend, gpus=gpus, local_rank=local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(rank, size, local_rank, local_size, socket.gethostname(), device, backend, "process group")


def _join(place: Place, asked: _Asked, deadline: float) -> World:
    host = socket.gethostname()
    where = f"{place.addr}:{place.port}" if place.size > 1 else "a store of its own"
    if _memory.store is None:
        _memory.store = _open_store(place, deadline)
    store = dist.PrefixStore(f"lockstep/{place.attempt}/{_memory.generation}", _memory.store)
    try:
        meeting = _Meeting(store, place.rank, place.size, where, deadline)
        hosts = _introduce(meeting, place, host, asked.backend)
        counted = count_local(hosts, place.rank)
        local_rank = counted[0] if place.local_rank is None else place.local_rank
        local_size = counted[1] if place.local_size is None else place.local_size
        device = choose_device(
            asked=asked.device, backend=asked.backend, gpus=torch.cuda.device_count(), local_rank=local_rank
        )
        gpus = meeting.swap("gpu", _take_gpu(device, host))
        backend = asked.backend or choose_backend(gpus)
    except BaseException:
        _memory.store = None  # whoever stays outside must not keep the port, or a second try could not have it
        raise
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=None if asked.timeout_s is None else timedelta(seconds=asked.timeout_s),
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise WorldError(
            f"rank {place.rank} of {place.size} met the others at {where}, but the {backend} group could not be "
            f"formed: {first_line}; check that the hosts reach each other and that backend={backend!r} is installed"
        ) from error
    _memory.generation += 1
    _leave_at_exit()
    return World(place.rank, place.size, local_rank, local_size, host, device, backend, place.source)


def _introduce(meeting: _Meeting, place: Place, host: str, backend: str | None) -> list[str]:
    """Everybody tells who they are; everybody checks that the stories agree. Returns the host of each rank."""
    me = {"host": host, "pid": os.getpid(), "size": place.size, "backend": backend}
    cards = [json.loads(text) for text in meeting.swap("card", json.dumps(me))]
    for rank, card in enumerate(cards):
        who = f"rank {rank} (process {card['pid']} on {card['host']})"
        if card["size"] != place.size:
            raise WorldError(
                f"{who} was told that the world has {card['size']} workers, rank {place.rank} that it has {place.size}; "
                "start all workers with the same WORLD_SIZE"
            )
        if card["backend"] != backend:
            raise WorldError(
                f"{who} asked for backend={card['backend']!r}, rank {place.rank} for backend={backend!r}; "
                "call lockstep.init with the same backend on every worker"
            )
    mine = cards[place.rank]
    if mine != me:
        raise WorldError(
            f"two workers call themselves rank {place.rank}: process {me['pid']} on {host} and "
            f"process {mine['pid']} on {mine['host']}; give every worker its own RANK"
        )
    return [str(card["host"]) for card in cards]


def _take_gpu(device: torch.device, host: str) -> str:
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)  # before anything else touches CUDA: it would open a context on cuda:0
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", f"{host}/{device}"))


@dataclass(frozen=True)
class _Meeting:
    """All workers at one store, with one deadline for everything they still have to tell each other."""

    store: dist.Store
    rank: int
    size: int
    where: str
    deadline: float

    def swap(self, topic: str, mine: str) -> list[str]:
        """Tell the others, and return what each rank told. Polls: a wait inside the store logs a page on a timeout."""
        pause_s = 0.002
        try:
            self.store.set(f"{topic}/{self.rank}", mine)
            for rank in range(self.size):
                while not self.store.check([f"{topic}/{rank}"]):
                    if time.monotonic() > self.deadline:
                        raise self._nobody(topic)
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 0.25)
            return [self.store.get(f"{topic}/{rank}").decode() for rank in range(self.size)]
        except dist.DistError as error:
            raise WorldError(
                f"rank {self.rank} of {self.size} lost the store at {self.where} while joining: whoever keeps it "
                "(rank 0, or torchrun) went away; look at the first error in its output"
            ) from error

    def _nobody(self, topic: str) -> WorldError:
        gone = [str(rank) for rank in range(self.size) if not self.store.check([f"{topic}/{rank}"])]
        names = ", ".join(gone[:8]) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
        return WorldError(
            f"rank {self.rank} of {self.size} waited at {self.where} for rank{'s' * (len(gone) != 1)} {names}, in vain; "
            f"check that they were started with the same MASTER_ADDR and MASTER_PORT, that they can reach "
            f"{self.where}, and that they did not fail before; LOCKSTEP_JOIN_TIMEOUT_S allows more time"
        )


def _open_store(place: Place, deadline: float) -> dist.Store:
    if place.size == 1:
        return dist.HashStore()
    assert place.addr is not None
    assert place.port is not None
    if place.rank == 0 and not place.agent_store:
        return _serve(place.addr, place.port)
    return _connect(place.addr, place.port, place, deadline)


def _serve(addr: str, port: int) -> dist.Store:
    """Rank 0 listens. On the loopback only if that is the address: the store believes whoever can reach it."""
    try:
        loopback = addr == "localhost" or ip_address(addr).is_loopback
    except ValueError:
        loopback = False
    try:
        if loopback and ":" in addr:
            listener, addr = socket.create_server((addr, port), family=socket.AF_INET6, backlog=1024), "::1"
        elif loopback:
            addr = LOOPBACK if addr == "localhost" else addr
            listener = socket.create_server((addr, port), backlog=1024)
        else:
            # MASTER_ADDR may be a name that leads here from outside only, so we talk to ourselves on the loopback.
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
            addr = LOOPBACK
    except OSError as error:
        raise WorldError(
            f"rank 0 cannot listen on MASTER_PORT={port}: {error.strerror}; set MASTER_PORT to a free port, the same on "
            f"every worker (`lockstep run` and `torchrun --standalone` choose one), or end what holds it: "
            f"`ss -ltnp 'sport = :{port}'` names it"
        ) from error
    patience = timedelta(seconds=HANDSHAKE_TIMEOUT_S)
    # The store owns the descriptor from here on, and closes it.
    return dist.TCPStore(addr, port, None, True, patience, False, master_listen_fd=listener.detach())


def _connect(addr: str, port: int, place: Place, deadline: float) -> dist.Store:
    """Knock until somebody listens, then shake hands.

    TCPStore would do both, but it logs a stack trace for each attempt, does not keep to its timeout, and waits
    for ever for a stranger that accepts the connection and says nothing: hence the thread.
    """
    pause_s = 0.01
    while True:
        try:
            socket.create_connection((addr, port), timeout=max(0.1, min(10.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                keeper = "torchrun" if place.agent_store else "rank 0"
                raise WorldError(
                    f"rank {place.rank} of {place.size} waited for {keeper} at {addr}:{port}, in vain ({error}); check "
                    "that it was started, that MASTER_ADDR and MASTER_PORT are the same on every worker, and that "
                    "nothing between the hosts blocks the port; LOCKSTEP_JOIN_TIMEOUT_S allows more time"
                ) from error
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)
    made: list[dist.Store | BaseException] = []

    def shake_hands() -> None:
        try:
            made.append(dist.TCPStore(addr, port, None, False, timedelta(seconds=HANDSHAKE_TIMEOUT_S)))
        except BaseException as error:
            made.append(error)

    thread = Thread(target=shake_hands, name="lockstep-join", daemon=True)
    thread.start()
    thread.join(max(1.0, min(HANDSHAKE_TIMEOUT_S, deadline - time.monotonic())))
    if made and isinstance(made[0], dist.Store):
        return made[0]
    cause = made[0] if made and isinstance(made[0], BaseException) else None
    raise WorldError(
        f"rank {place.rank} of {place.size} reached {addr}:{port}, but what listens there is no store of rank 0; "
        "another program has the port: set MASTER_PORT to a free one, the same on every worker"
    ) from cause


def _leave_at_exit() -> None:
    """Release the group we formed when the program ends in peace.

    After an uncaught exception we do not: tearing down may wait for peers, and they wait for us to be gone.
    """
    pid, group = os.getpid(), dist.group.WORLD

    def leave() -> None:
        ours = os.getpid() == pid and dist.is_initialized() and dist.group.WORLD is group
        if ours and getattr(sys, "last_value", None) is None:
            dist.destroy_process_group()

    atexit.register(leave)
