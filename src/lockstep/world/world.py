"""`lockstep.init`: joins the other workers, and returns this worker's `World`.

`init` reads rank and size from the environment (environment.py), finds the other workers through the store of rank 0
(rendezvous.py), agrees with them on a backend, and creates the process group. A single worker takes the same path with
a local store, so that no later code has to distinguish that case.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep._torch import PrefixStore, Store, distributed_state, get_default_store
from lockstep.errors import PeerLostError, WorldError
from lockstep.failures.card import Card, draw
from lockstep.process_identity import identify_host
from lockstep.settings import Settings
from lockstep.world import environment
from lockstep.world.environment import RankAssignment, read_int
from lockstep.world.rendezvous import ExpectedWorkers, KnownProcesses, Rendezvous, open_store

_log = logging.getLogger(__name__)

LAST_TENSORS_S = 0.05


@dataclass(frozen=True)
class World:
    """This worker's rank, device and process group, as returned by `lockstep.init`."""

    rank: int  # from 0 to size - 1
    size: int  # number of workers
    local_rank: int  # among the workers of this host
    local_size: int
    host: str
    device: torch.device
    backend: str  # of the process group: shm, nccl, gloo, hierarchy
    source: str  # where rank and size come from


# ---- choice of device and backend (pure) ---------------------------------------------------------------------------


def choose_device(*, requested: torch.device | None, backend: str | None, gpus: int, local_rank: int) -> torch.device:
    """Return the device: a GPU where there is one, the CPU if a backend without GPU support was requested."""
    nccl = backend is not None and "nccl" in backend
    if requested is not None and requested.type != "cuda":
        if nccl:
            where = f"device={str(requested)!r}"
            raise ValueError(f"backend={backend!r} cannot move tensors on {where}; use gloo, or a GPU")
        return requested
    if gpus == 0:
        if requested is not None or nccl:
            wish = f"device={str(requested)!r}" if requested is not None else f"backend={backend!r}"
            raise ValueError(f"{wish} needs a GPU, and torch sees none here; leave it out to train on the CPU")
        return torch.device("cpu")
    if requested is not None and requested.index is not None:
        if requested.index >= gpus:
            raise ValueError(f"device={str(requested)!r}, but torch sees {gpus} GPUs here, cuda:0 to cuda:{gpus - 1}")
        return requested
    if requested is None and backend in ("gloo", "mpi"):
        return torch.device("cpu")
    # srun and Kubernetes often show each worker only its own GPU: then that one is used, whatever the local rank.
    return torch.device("cuda", local_rank % gpus)


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and the reason for choosing it."""

    backend: str
    reason: str


def choose_backend(gpus: Sequence[str], hosts: Sequence[str], *, linux: bool = True) -> BackendChoice:
    """Choose a backend. NCCL refuses two workers on one GPU.

    gpus   identity of each rank's GPU, "" for none
    hosts  identity of each rank's host
    """
    if all(gpus) and len(set(gpus)) == len(gpus):
        return BackendChoice("nccl", "every worker has a GPU of its own" if len(gpus) > 1 else "one worker, on a GPU")
    if not linux:
        return BackendChoice("gloo", "shared memory between workers needs Linux")
    if any(gpus) and not all(gpus):
        return BackendChoice("gloo", "some workers have a GPU and some have none")
    many = len(set(hosts))
    if many > 1:
        return BackendChoice("hierarchy", f"{many} hosts: shared memory inside each, the network between them")
    reason = "workers of one host that share a GPU" if any(gpus) else "all workers on one host, no GPUs"
    return BackendChoice("shm", reason)


def count_local(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """Return (local rank, local size), given the host of each rank."""
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


# ---- init ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Requested:
    """Arguments of `init` or `rejoin`."""

    backend: str | None
    device: torch.device | None
    timeout_s: float | None
    connect_s: float | None = None
    on_backend: Callable[[str], None] = lambda backend: None


@dataclass
class _ProcessState:
    """State between calls of `init`. One per process, like the default process group itself."""

    world: World | None = None
    requested: _Requested | None = None
    # Weak: a group that the program destroys must be free to close its connections.
    group: weakref.ref[dist.ProcessGroup] | None = None
    # Kept after the group is destroyed: rank 0 could not bind the port again while other workers are still connected,
    # and a fast peer would join the old store. The keys of each group have the number of its generation as a prefix.
    store: Store | None = None
    assignment: RankAssignment | None = None
    generation: int = 0
    printed_backend: str = ""  # printed again only if it changes
    destroys_at_exit: int = 0  # pid of the process with the exit handler: a fork has none


_state = _ProcessState()


def init(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
) -> World:
    """Join the other workers, create the default process group, and return this worker's World.

    backend         Default: LOCKSTEP_BACKEND, or else "nccl" if every worker has a GPU of its own, "shm" on one host,
                    "hierarchy" over several. Must be the same on all workers.
    device          Default: cuda:<local rank> where there are GPUs, else the CPU.
    timeout_s       How long a collective may wait for other workers. Default: that of torch.
    join_timeout_s  How long to wait here for other workers. Default: LOCKSTEP_JOIN_TIMEOUT_S, or else 300.

    An existing default process group is used as it is. Calling it again returns the same World. Raises WorldError if
    the environment is inconsistent or workers are missing, PeerLostError if one dies, ValueError for wrong arguments.
    """
    for name, value in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be a positive number of seconds")
    requested = _Requested(backend, torch.device(device) if device is not None else None, timeout_s)
    with _with_failure_card():
        return _get_or_join(requested, join_timeout_s)


@contextmanager
def _with_failure_card() -> Iterator[None]:
    """Add a failure card to a WorldError, unless `lockstep run` started this worker: it prints one itself."""
    try:
        yield
    except WorldError as error:
        if "LOCKSTEP_RUN_DIR" in os.environ:
            raise
        what, _, do = str(error).rpartition("; ")
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        with suppress(WorldError):  # `error` may be about the environment itself
            if (assignment := environment.detect(os.environ)) is not None:
                who = f"rank {assignment.rank} of {assignment.size} ({assignment.source}), {who}"
        title = "lockstep: a worker could not join the others"
        error.add_note("\n" + draw(Card(title=title, who=who, what=what or do, do=do if what else "")).rstrip())
        raise


def _get_or_join(requested: _Requested, join_timeout_s: float | None) -> World:
    if _state.world is not None and _is_current(_state.group):
        _check_same_request(_state.world, requested)
        return _state.world
    deadline = time.monotonic() + (join_timeout_s or _read_settings().join_timeout_s)
    if dist.is_initialized():
        world = _use_existing_group(requested, deadline)
    else:
        assignment = environment.detect(os.environ)
        if assignment is None and (warning := environment.missing_srun_warning(os.environ)):
            _log.warning(warning)
        world = _join(assignment or RankAssignment(0, 1, "alone"), requested, deadline)
    return _record(world, requested)


def _record(world: World, requested: _Requested) -> World:
    assert dist.group.WORLD is not None
    _state.world, _state.requested, _state.group = world, requested, weakref.ref(dist.group.WORLD)
    return world


def _is_current(group: weakref.ref[dist.ProcessGroup] | None) -> bool:
    return group is not None and dist.is_initialized() and group() is dist.group.WORLD


def _check_same_request(world: World, requested: _Requested) -> None:
    first = _state.requested
    assert first is not None
    any_index = requested.device is not None and requested.device.index is None
    given = torch.device(world.device.type) if any_index else world.device
    for name, wish, is_now in (
        ("backend", requested.backend, world.backend),
        ("device", requested.device, given),
        ("timeout_s", requested.timeout_s, first.timeout_s),
    ):
        if wish is not None and wish != is_now:
            raise ValueError(
                f"lockstep.init({name}={str(wish)!r}), but this process has already joined with "
                f"{name}={str(is_now)!r}; ask for it in the first call"
            )


def _read_settings() -> Settings:
    try:
        return Settings.from_env(os.environ)
    except ValueError as error:
        raise WorldError(str(error)) from None


def _use_existing_group(requested: _Requested, deadline: float) -> World:
    """Return the World of a process group that other code (Ray, the program itself) has created."""
    backend = str(dist.get_backend())
    if backend == "undefined":  # torch has chosen one for each device type
        backend = str(dist.get_backend_config())
    if requested.backend not in (None, backend):
        raise ValueError(f"backend={requested.backend!r}, but the process group that is already there uses {backend!r}")
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = read_int(os.environ, "LOCAL_RANK"), read_int(os.environ, "LOCAL_WORLD_SIZE", low=1)
    if size == 1:
        local_rank, local_size = 0, 1
    if local_rank is None or local_size is None:
        store = PrefixStore("lockstep/adopt", get_default_store())
        others = Rendezvous(store, rank, size, "the process group's store", deadline)
        counted = count_local(others.exchange("host", socket.gethostname()), rank)
        local_rank, local_size = counted if local_rank is None else (local_rank, counted[1])
    wish = requested.device
    if wish is None and "nccl" in backend and torch.cuda.current_device() != 0:
        # The program has called set_device. (Device 0 cannot be distinguished from the default.)
        wish = torch.device("cuda", torch.cuda.current_device())
    gpus = torch.cuda.device_count()
    device = choose_device(requested=wish, backend=backend, gpus=gpus, local_rank=local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(rank, size, local_rank, local_size, socket.gethostname(), device, backend, "process group")


def rejoin(
    assignment: RankAssignment,
    store: Store,
    *,
    backend: str | None,
    device: str | torch.device | None,
    deadline: float,
    connect_s: float,
    on_backend: Callable[[str], None],
) -> World:
    """Join another generation of an elastic run, whose workers share `store`.

    connect_s   The time limit for connecting with Gloo. It stays the timeout of that group until it is changed.
    on_backend  Is called with the backend before the group is created.
    """
    leave_world()
    requested = _Requested(backend, torch.device(device) if device is not None else None, None, connect_s, on_backend)
    _state.store, _state.assignment, _state.generation = store, assignment, 0
    return _record(_join(assignment, requested, deadline), requested)


def leave_world(*, aborted: Sequence[dist.ProcessGroup] = ()) -> None:
    """Destroy the default process group, if there is one. Does not wait for other workers.

    aborted  Groups that torch only forgets: shutting down a group of NCCL that was aborted blocks.
    """
    _state.world = _state.group = _state.store = None
    if dist.is_initialized():
        for group in aborted:
            distributed_state().pg_names.pop(group, None)  # those that are in it are shut down
        dist.destroy_process_group()
    # Torch names groups by a counter. A group whose creation failed counts too, and a new worker has created none: they
    # would look for each other under different names.
    distributed_state().group_count = 0


def _join(assignment: RankAssignment, requested: _Requested, deadline: float) -> World:
    requested = replace(requested, backend=wanted_backend(requested.backend, Settings.from_env(os.environ)))
    host = socket.gethostname()
    where = "a store of its own" if assignment.size == 1 else "their host agents"
    if assignment.addr is not None:
        where = f"{assignment.addr}:{assignment.port}"
    expected = _expected_workers(assignment)
    if _state.store is None or _state.assignment != assignment:
        _state.store = None
        _state.store, _state.assignment, _state.generation = open_store(assignment, deadline, expected), assignment, 0
    store = PrefixStore(f"lockstep/{assignment.attempt}/{_state.generation}", _state.store)
    try:
        others = Rendezvous(store, assignment.rank, assignment.size, where, deadline, expected)
        hosts = _exchange_identities(others, assignment, host, requested.backend)
        counted = count_local(hosts, assignment.rank)
        local_rank = counted[0] if assignment.local_rank is None else assignment.local_rank
        local_size = counted[1] if assignment.local_size is None else assignment.local_size
        device = choose_device(
            requested=requested.device, backend=requested.backend, gpus=torch.cuda.device_count(), local_rank=local_rank
        )
        gpus = others.exchange("gpu", _select_gpu(device, host))
        host_ids = others.exchange("home", identify_host())
        choice = choose_backend(gpus, host_ids, linux=sys.platform == "linux")
        backend = requested.backend or choice.backend
    except BaseException:
        _state.store = None  # release the port, so that a second attempt can bind it
        raise
    _state.generation += 1
    requested.on_backend(backend)
    limit_s = requested.connect_s if backend == "gloo" and requested.connect_s is not None else requested.timeout_s
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=assignment.rank,
            world_size=assignment.size,
            timeout=None if limit_s is None else timedelta(seconds=limit_s),
            device_id=device if backend == "nccl" else None,
            pg_options=KnownProcesses(others.processes) if backend == "shm" else None,
        )
    except PeerLostError:
        raise
    except (RuntimeError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise WorldError(
            f"rank {assignment.rank} of {assignment.size} met the others at {where}, but the {backend} group could not "
            f"be formed: {first_line}; check that the hosts reach each other and that backend={backend!r} is installed"
        ) from error
    _destroy_at_exit()
    if assignment.rank == 0 and assignment.size > 1 and requested.backend is None and backend != _state.printed_backend:
        _state.printed_backend = backend
        chosen = f"{assignment.size} workers over {backend}: {choice.reason}"
        _log.info("%s (lockstep.init(backend=...) or LOCKSTEP_BACKEND changes it)", chosen)
    return World(assignment.rank, assignment.size, local_rank, local_size, host, device, backend, assignment.source)


def wanted_backend(requested: str | None, settings: Settings) -> str | None:
    """Return the requested backend, or else LOCKSTEP_BACKEND; None if neither is set. Raises ValueError if unknown."""
    wish = requested or settings.backend
    known = dist.Backend.backend_list
    for part in wish.split(",") if wish else ():
        if part.rpartition(":")[2].lower() not in known:
            source = f"backend={requested!r}" if requested else f"LOCKSTEP_BACKEND={wish!r}"
            raise ValueError(f"{source}: torch knows no backend {part!r}; name one of {', '.join(known)}")
    return wish


def _exchange_identities(others: Rendezvous, assignment: RankAssignment, host: str, backend: str | None) -> list[str]:
    """Exchange size and backend, and check that all workers agree. Returns the host of each rank."""
    me = {"host": host, "pid": os.getpid(), "size": assignment.size, "backend": backend}
    identities = others.exchange_identities(me)
    for rank, identity in enumerate(identities):
        who = f"rank {rank} (process {identity['pid']} on {identity['host']})"
        if identity["size"] != assignment.size:
            raise WorldError(
                f"{who} was told of {identity['size']} workers, rank {assignment.rank} of {assignment.size}; "
                "start all workers with the same WORLD_SIZE"
            )
        if identity["backend"] != backend:
            raise WorldError(
                f"{who} asked for backend={identity['backend']!r}, rank {assignment.rank} for backend={backend!r}; "
                "call lockstep.init with the same backend on every worker"
            )
    mine = identities[assignment.rank]
    if mine != me:
        raise WorldError(
            f"two workers call themselves rank {assignment.rank}: process {me['pid']} on {host} and "
            f"process {mine['pid']} on {mine['host']}; give every worker its own RANK"
        )
    return [str(identity["host"]) for identity in identities]


def _expected_workers(assignment: RankAssignment) -> ExpectedWorkers:
    if not assignment.variables:
        return ExpectedWorkers()
    tasks = "tasks" if assignment.source == "SLURM" else "workers"
    source = "the environment" if assignment.source == "RANK/WORLD_SIZE" else assignment.source
    announcement = f"{source} announced {assignment.size} {tasks} ({assignment.variables})"
    return ExpectedWorkers(announcement, environment.advise_on_missing(assignment))


def _select_gpu(device: torch.device, host: str) -> str:
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)  # before any other use of CUDA, which would create a context on cuda:0
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", f"{host}/{device}"))


def _destroy_at_exit() -> None:
    """Destroy the group that was created last when the program exits."""
    if _state.destroys_at_exit == os.getpid():
        return
    _state.destroys_at_exit = pid = os.getpid()

    def destroy() -> None:
        if os.getpid() != pid:
            return  # a forked child has a copy of the group, which it must not destroy
        # Not after an uncaught exception: destroying may wait for peers, which wait for this process to end.
        if _is_current(_state.group) and getattr(sys, "last_value", None) is None:
            dist.destroy_process_group()
        # If there are other references to the group (a wrapped model has one), its threads continue, and may be about
        # to release the tensors of the last collective. They need the interpreter for it, and abort without one.
        time.sleep(LAST_TENSORS_S)

    atexit.register(destroy)
