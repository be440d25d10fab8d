"""Who we are among the workers, and joining the others.

`place.detect` says what the environment tells about us. `init` carries it out: it meets the other workers at rank 0's
store (`meeting`), agrees with them on a backend, forms the process group and returns a `World`. A world of one goes
the same way, with a store of its own, so that nothing that comes after has to ask whether it is alone.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _world

from lockstep.errors import PeerLostError, WorldError
from lockstep.failures.card import Card, draw
from lockstep.world import rendezvous
from lockstep.world.environment import Place, advise_on_missing, batch_note, detect, identify_host, read_number
from lockstep.world.join_liveness import Introduced
from lockstep.world.rendezvous import Announced, Meeting

JOIN_TIMEOUT_S = 300.0
LAST_TENSORS_S = 0.05


@dataclass(frozen=True)
class World:
    """The facts about this worker, which `lockstep.init` returns."""

    rank: int  # from 0 to size - 1
    size: int  # workers in all
    local_rank: int  # among those of this host
    local_size: int
    host: str
    device: torch.device
    backend: str  # of the process group: shm, nccl, gloo, hierarchy
    source: str  # how all this was found out


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


@dataclass(frozen=True)
class Choice:
    """A backend, and why."""

    backend: str
    reason: str


def choose_backend(gpus: Sequence[str], hosts: Sequence[str], *, linux: bool = True) -> Choice:
    """`gpus` has the GPU of each rank, "" for none; `hosts` its host. NCCL refuses two workers on one GPU."""
    if all(gpus) and len(set(gpus)) == len(gpus):
        return Choice("nccl", "every worker has a GPU of its own" if len(gpus) > 1 else "one worker, on a GPU")
    if not linux:
        return Choice("gloo", "shared memory between workers needs Linux")
    if any(gpus) and not all(gpus):
        return Choice("gloo", "some workers have a GPU and some have none")
    many = len(set(hosts))
    if many > 1:
        return Choice("hierarchy", f"{many} hosts: shared memory inside each, the network between them")
    return Choice("shm", "workers of one host that share a GPU" if any(gpus) else "all workers on one host, no GPUs")


def count_local(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """(local rank, local size) from the host of each rank."""
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


# ---- init: join the others -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    backend: str | None
    device: torch.device | None
    timeout_s: float | None
    connect_s: float | None = None


@dataclass
class _Memory:
    """What this process remembers between calls of `init`. One per process, like the default process group itself."""

    world: World | None = None
    asked: _Asked | None = None
    # Weak, like the one in `_leave_at_exit`: a group that somebody destroys must be free to close its connections.
    group: weakref.ref[dist.ProcessGroup] | None = None
    # Kept after the group is destroyed: rank 0 could not bind the port again while others still hold connections,
    # and a fast peer would join the old store. Each group formed on it gets its own generation of keys.
    store: Store | None = None
    place: Place | None = None
    generation: int = 0
    announced: str = ""  # the backend that was named last: a new generation is no news
    leaves_at_exit: int = 0  # the process that does: a fork of it does not


_memory = _Memory()


def init(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
) -> World:
    """Find out who we are, join the other workers, and return the facts.

    backend         LOCKSTEP_BACKEND if left out, else what fits: "nccl" where every worker has a GPU of its own,
                    "shm" on one host, "hierarchy" over several. Must be the same on all workers.
    device          cuda:<local rank> where there are GPUs, else the CPU.
    timeout_s       how long a collective may wait for the others; torch's own default if left out.
    join_timeout_s  how long to wait here for the others; LOCKSTEP_JOIN_TIMEOUT_S if left out, else 300.

    A process group that is already there is used as it is. Calling twice gives the same World again.
    """
    for name, value in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be a positive number of seconds")
    asked = _Asked(backend, torch.device(device) if device is not None else None, timeout_s)
    with _shown_on_a_card():
        return _find_or_join(asked, join_timeout_s)


@contextmanager
def _shown_on_a_card() -> Iterator[None]:
    """Our launcher makes one of what its workers say; without it, nobody else would."""
    try:
        yield
    except WorldError as error:
        if "LOCKSTEP_RUN_DIR" not in os.environ:
            error.add_note("\n" + draw(_card_of(error)).rstrip())
        raise


def _card_of(error: WorldError) -> Card:
    what, _, do = str(error).rpartition("; ")
    try:
        place = detect(os.environ)
    except WorldError:  # that is what it is about
        place = None
    who = f"rank {place.rank} of {place.size} ({place.source}), " if place is not None else ""
    return Card(
        title="lockstep: a worker could not join the others",
        who=f"{who}pid {os.getpid()} on {socket.gethostname()}",
        what=what or do,
        do=do if what else "",
    )


def _find_or_join(asked: _Asked, join_timeout_s: float | None) -> World:
    if _memory.world is not None and _is_current(_memory.group):
        _refuse_other_wishes(_memory.world, asked)
        return _memory.world
    deadline = time.monotonic() + (join_timeout_s or _join_timeout_s(os.environ))
    if dist.is_initialized():
        world = _adopt(asked, deadline)
    else:
        place = detect(os.environ)
        if place is None and (note := batch_note(os.environ)):
            print(f"lockstep: {note}", file=sys.stderr)
        world = _join(place or Place(0, 1, "alone"), asked, deadline)
    assert dist.group.WORLD is not None
    _memory.world, _memory.asked, _memory.group = world, asked, weakref.ref(dist.group.WORLD)
    return world


def _is_current(group: weakref.ref[dist.ProcessGroup] | None) -> bool:
    return group is not None and dist.is_initialized() and group() is dist.group.WORLD


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
                f"lockstep.init({name}={str(wish)!r}), but this process has already joined with "
                f"{name}={str(is_now)!r}; ask for it in the first call"
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
    if backend == "undefined":  # one per kind of device, left to torch
        backend = str(dist.get_backend_config())
    if asked.backend not in (None, backend):
        raise ValueError(f"backend={asked.backend!r}, but the process group that is already there uses {backend!r}")
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = read_number(os.environ, "LOCAL_RANK"), read_number(os.environ, "LOCAL_WORLD_SIZE", low=1)
    if size == 1:
        local_rank, local_size = 0, 1
    if local_rank is None or local_size is None:
        store = PrefixStore("lockstep/adopt", _get_default_store())
        others = Meeting(store, rank, size, "the process group's store", deadline)
        counted = count_local(others.swap("host", socket.gethostname()), rank)
        local_rank, local_size = counted if local_rank is None else (local_rank, counted[1])
    wish = asked.device
    if wish is None and "nccl" in backend and torch.cuda.current_device() != 0:
        # The program has chosen one. (It may have chosen 0 too; that we cannot tell from not having chosen.)
        wish = torch.device("cuda", torch.cuda.current_device())
    gpus = torch.cuda.device_count()
    device = choose_device(asked=wish, backend=backend, gpus=gpus, local_rank=local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(rank, size, local_rank, local_size, socket.gethostname(), device, backend, "process group")


def rejoin(
    place: Place,
    store: Store,
    *,
    backend: str | None,
    device: str | torch.device | None,
    deadline: float,
    connect_s: float,
) -> World:
    """Take part in another generation of an elastic run, whose members meet at `store`.

    `connect_s`: how long Gloo may take; it keeps to that for good, unless its group is told another time limit.
    """
    forget()
    asked = _Asked(backend, torch.device(device) if device is not None else None, None, connect_s)
    _memory.store, _memory.place, _memory.generation = store, place, 0
    world = _join(place, asked, deadline)
    assert dist.group.WORLD is not None
    _memory.world, _memory.asked, _memory.group = world, asked, weakref.ref(dist.group.WORLD)
    return world


def forget() -> None:
    """Give up the world that we are in, if we are in one. Nobody is waited for."""
    _memory.world = _memory.group = _memory.store = None
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch names groups by their number. One that failed while it was formed counts, and a newcomer has made none: they
    # would look for each other under different names.
    _world.group_count = 0


def _join(place: Place, asked: _Asked, deadline: float) -> World:
    asked = replace(asked, backend=wanted_backend(asked.backend, os.environ))
    host = socket.gethostname()
    where = "a store of its own" if place.size == 1 else "their supervisors"
    if place.addr is not None:
        where = f"{place.addr}:{place.port}"
    if _memory.store is None or _memory.place != place:
        _memory.store = None
        _memory.store, _memory.place, _memory.generation = _open_store(place, deadline), place, 0
    store = PrefixStore(f"lockstep/{place.attempt}/{_memory.generation}", _memory.store)
    try:
        others = Meeting(store, place.rank, place.size, where, deadline, _announced(place))
        hosts = _introduce(others, place, host, asked.backend)
        counted = count_local(hosts, place.rank)
        local_rank = counted[0] if place.local_rank is None else place.local_rank
        local_size = counted[1] if place.local_size is None else place.local_size
        device = choose_device(
            asked=asked.device, backend=asked.backend, gpus=torch.cuda.device_count(), local_rank=local_rank
        )
        gpus = others.swap("gpu", _take_gpu(device, host))
        homes = others.swap("home", identify_host())
        choice = choose_backend(gpus, homes, linux=sys.platform == "linux")
        backend = asked.backend or choice.backend
    except BaseException:
        _memory.store = None  # whoever stays outside must not keep the port, or a second try could not have it
        raise
    _memory.generation += 1
    limit_s = asked.connect_s if backend == "gloo" and asked.connect_s is not None else asked.timeout_s
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=None if limit_s is None else timedelta(seconds=limit_s),
            device_id=device if backend == "nccl" else None,
            pg_options=Introduced(others.processes) if backend == "shm" else None,
        )
    except PeerLostError:
        raise
    except (RuntimeError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise WorldError(
            f"rank {place.rank} of {place.size} met the others at {where}, but the {backend} group could not be "
            f"formed: {first_line}; check that the hosts reach each other and that backend={backend!r} is installed"
        ) from error
    _leave_at_exit()
    if place.rank == 0 and place.size > 1 and asked.backend is None and backend != _memory.announced:
        _memory.announced = backend
        said = f"lockstep: {place.size} workers over {backend}: {choice.reason}"
        print(f"{said} (lockstep.init(backend=...) or LOCKSTEP_BACKEND changes it)", file=sys.stderr)
    return World(place.rank, place.size, local_rank, local_size, host, device, backend, place.source)


def wanted_backend(asked: str | None, env: Mapping[str, str]) -> str | None:
    """What the program asks for, or else LOCKSTEP_BACKEND; None if neither does."""
    wish = asked or env.get("LOCKSTEP_BACKEND", "").strip() or None
    known = dist.Backend.backend_list
    for part in wish.split(",") if wish else ():
        if part.rpartition(":")[2].lower() not in known:
            source = f"backend={asked!r}" if asked else f"LOCKSTEP_BACKEND={wish!r}"
            raise ValueError(f"{source}: torch knows no backend {part!r}; name one of {', '.join(known)}")
    return wish


def _introduce(others: Meeting, place: Place, host: str, backend: str | None) -> list[str]:
    """Everybody tells who they are; everybody checks that the stories agree. Returns the host of each rank."""
    me = {"host": host, "pid": os.getpid(), "size": place.size, "backend": backend}
    cards = others.introduce(me)
    for rank, card in enumerate(cards):
        who = f"rank {rank} (process {card['pid']} on {card['host']})"
        if card["size"] != place.size:
            raise WorldError(
                f"{who} was told of {card['size']} workers, rank {place.rank} of {place.size}; "
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


def _open_store(place: Place, deadline: float) -> Store:
    if place.size == 1:
        return rendezvous.own_store()
    assert place.addr is not None
    assert place.port is not None
    if place.rank == 0 and not place.agent_store:
        return rendezvous.serve(place.addr, place.port)
    who, keeper = f"rank {place.rank} of {place.size}", "torchrun" if place.agent_store else "rank 0"
    announced = _announced(place)
    return rendezvous.connect(place.addr, place.port, deadline=deadline, who=who, keeper=keeper, announced=announced)


def _announced(place: Place) -> Announced:
    if not place.told_by:
        return Announced()
    tasks = "tasks" if place.source == "SLURM" else "workers"
    teller = "the environment" if place.source == "RANK/WORLD_SIZE" else place.source
    return Announced(f"{teller} announced {place.size} {tasks} ({place.told_by})", advise_on_missing(place))


def _take_gpu(device: torch.device, host: str) -> str:
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)  # before anything else touches CUDA: it would open a context on cuda:0
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", f"{host}/{device}"))


def _leave_at_exit() -> None:
    """Release the group we formed last when the program ends."""
    if _memory.leaves_at_exit == os.getpid():
        return
    _memory.leaves_at_exit = pid = os.getpid()

    def leave() -> None:
        if os.getpid() != pid:
            return  # a forked child has our group in its memory too, but not to give away
        # Not after an uncaught exception: tearing down may wait for peers, and they wait for us to be gone.
        if _is_current(_memory.group) and getattr(sys, "last_value", None) is None:
            dist.destroy_process_group()
        # If anybody still holds the group (a wrapped model does), its threads live on, and may be about to drop the
        # tensors of the last collective. For that they need the interpreter; without one, they abort the process.
        time.sleep(LAST_TENSORS_S)

    atexit.register(leave)
