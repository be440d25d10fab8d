"""Draws conclusions from the facts about a machine: findings with advice. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lockstep.doctor.facts import Machine

LEAST_TORCH: Final = (2, 11)
LEAST_SHM_BYTES: Final = 1 << 30
LEAST_DISK_BYTES: Final = 2 << 30
LEAST_MEMORY_BYTES: Final = 2 << 30
LEAST_OPEN_FILES: Final = 1024
_GIB: Final = 1 << 30
_SLOWER: Final = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


class Level(Enum):
    GOOD = "ok"
    NOTE = "note"  # for information
    WARN = "warning"  # training works, but slower or less reliably than it could
    BAD = "PROBLEM"  # training will fail


@dataclass(frozen=True)
class Finding:
    level: Level
    topic: str
    found: str
    advice: str = ""


def judge(machine: Machine) -> list[Finding]:
    topics = (_torch, _cores, _memory, _gpus, _interfaces, _shared_memory, _directory, _files, _names, _launch, _clock)
    return [finding for topic in topics for finding in topic(machine)]


def _torch(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch
    if torch.problem:
        how = "pip install 'torch>=2.11'" if "No module named" in torch.problem else "install it again"
        yield Finding(Level.BAD, "torch", f"cannot be imported: {torch.problem}", how)
        return
    build = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
    found = f"{torch.version}, built {build}, imported in {torch.import_s:.1f} s"
    if _version(torch.version) < LEAST_TORCH:
        yield Finding(Level.BAD, "torch", found, "Lockstep needs 2.11 or newer: pip install 'torch>=2.11'")
    elif torch.import_s > 20:
        yield Finding(Level.WARN, "torch", found, "that is slow: is it on a network disk? Install it on a local one")
    else:
        yield Finding(Level.GOOD, "torch", found)
    if not torch.gloo:
        yield Finding(Level.WARN, "torch", "it has no Gloo", "workers of several hosts without GPUs need it")


def _cores(machine: Machine) -> Iterator[Finding]:
    usable, quota = machine.usable_cores, machine.quota_cores
    found = f"{usable} of {machine.cores} may be used" if usable < machine.cores else f"{usable}"
    if quota is not None and quota < usable:
        advice = f"workers count the {usable}: start `lockstep run -n {max(1, int(quota))}`, and with OMP_NUM_THREADS=1"
        yield Finding(Level.WARN, "cores", f"{found}, but this container gets the time of {quota:g}", advice)
    else:
        yield Finding(Level.GOOD, "cores", found)
    threads = machine.env.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable:
        advice = "unset it: `lockstep run` shares the cores out among the workers"
        found = f"OMP_NUM_THREADS={threads}: every worker will start that many threads"
        yield Finding(Level.WARN, "cores", found, advice)


def _memory(machine: Machine) -> Iterator[Finding]:
    limit = machine.memory_limit_bytes
    found = f"{machine.available_bytes / _GIB:.1f} of {machine.memory_bytes / _GIB:.1f} GiB free"
    room = machine.available_bytes
    if limit is not None and limit < machine.memory_bytes:
        found, room = f"{found}, and this container may have {limit / _GIB:.1f}", min(room, limit)
    if room < LEAST_MEMORY_BYTES:
        advice = "a worker takes about 0.3 GiB before it has a model: start fewer, or give it more"
        yield Finding(Level.WARN, "memory", found, advice)
    else:
        yield Finding(Level.GOOD, "memory", found)


def _gpus(machine: Machine) -> Iterator[Finding]:
    torch, hidden = machine.torch, machine.env.get("CUDA_VISIBLE_DEVICES")
    if torch.problem:
        return
    if torch.gpus:
        names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / _GIB:.0f} GiB)" for gpu in torch.gpus)
        yield Finding(Level.GOOD, "GPUs", f"{len(torch.gpus)}: {names}; NCCL {torch.nccl or 'is missing'}")
        if hidden is not None and len(torch.gpus) < machine.driver_gpus:
            yield Finding(Level.NOTE, "GPUs", f"CUDA_VISIBLE_DEVICES={hidden} hides some of {machine.driver_gpus}")
    elif machine.driver_gpus and not torch.cuda:
        advice = "install a build of torch with CUDA (pytorch.org says which), or workers train on the CPU"
        yield Finding(Level.BAD, "GPUs", f"{machine.driver_gpus} here, and this torch was built for CPUs", advice)
    elif machine.driver_gpus and hidden is not None and hidden.strip() in ("", "-1"):
        yield Finding(Level.NOTE, "GPUs", f"CUDA_VISIBLE_DEVICES={hidden!r} hides all {machine.driver_gpus}")
    elif machine.driver_gpus:
        advice = "compare `nvidia-smi` with the CUDA of torch: an older driver must be updated"
        found = f"{machine.driver_gpus} here, and torch finds none: {torch.gpu_problem}"
        yield Finding(Level.BAD, "GPUs", found, advice)
    else:
        yield Finding(Level.GOOD, "GPUs", "none: workers train on the CPU, over shared memory")


def _interfaces(machine: Machine) -> Iterator[Finding]:
    if machine.loopback_problem:
        advice = "workers of one machine meet there: allow it, or bring the interface lo up"
        yield Finding(Level.BAD, "network", f"127.0.0.1 does not work: {machine.loopback_problem}", advice)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = machine.env.get(variable, "")
        if not wanted or wanted.startswith(("^", "=")):
            continue
        exact = variable.startswith("GLOO")  # NCCL takes beginnings of names
        for name in wanted.split(","):
            if not any(one == name or (not exact and one.startswith(name)) for one in machine.interfaces):
                advice = f"set it to one of: {', '.join(machine.interfaces)}; or unset it"
                yield Finding(Level.BAD, "network", f"{variable}={wanted}: there is no interface {name}", advice)
    for variable in _SLOWER:
        if machine.env.get(variable, "0") not in ("", "0"):
            yield Finding(Level.WARN, "network", f"{variable} is set", "NCCL takes a slower way: unset it if you can")


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    shm = machine.shm
    advice = "Docker: --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    if shm.problem:
        yield Finding(Level.WARN, "shared memory", f"{shm.path}: {shm.problem}", advice)
    elif shm.total_bytes < LEAST_SHM_BYTES:
        found = f"{shm.path} has {shm.total_bytes / (1 << 20):.0f} MiB"
        found += "; Lockstep's own collectives do without it, but loaders of torch's DataLoader and NCCL use it"
        yield Finding(Level.WARN, "shared memory", found, advice)
    else:
        yield Finding(Level.GOOD, "shared memory", f"{shm.path}: {shm.free_bytes / _GIB:.1f} GiB free")


def _directory(machine: Machine) -> Iterator[Finding]:
    disk = machine.directory
    if disk.problem:
        yield Finding(Level.BAD, "disk", f"{disk.path}: {disk.problem}", "give the run another directory")
    elif disk.free_bytes < LEAST_DISK_BYTES:
        found = f"{disk.path}: {disk.free_bytes / _GIB:.1f} GiB free"
        advice = "three checkpoints must fit, each with the weights and what the optimiser remembers"
        yield Finding(Level.WARN, "disk", found, advice)
    else:
        yield Finding(Level.GOOD, "disk", f"{disk.path}: {disk.free_bytes / _GIB:.0f} GiB free")


def _files(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.open_files < LEAST_OPEN_FILES:
        yield Finding(Level.WARN, "limits", f"{machine.open_files} open files per process", "ulimit -n 65536")


def _names(machine: Machine) -> Iterator[Finding]:
    host, addresses = machine.host, machine.host_addresses
    if not addresses:
        advice = "training on this machine works; for several, put the name into DNS or /etc/hosts"
        yield Finding(Level.WARN, "name", f"{host} stands for no address", advice)
    elif all(one.startswith("127.") or one == "::1" for one in addresses):
        advice = "training on this machine works; other hosts need an address of the network for it in /etc/hosts"
        yield Finding(Level.NOTE, "name", f"{host} stands for {', '.join(addresses)} only", advice)
    else:
        yield Finding(Level.GOOD, "name", f"{host} is {', '.join(addresses)}")


def _launch(machine: Machine) -> Iterator[Finding]:
    env, place = machine.env, machine.place
    tasks = env.get("SLURM_NTASKS", "")
    if machine.place_problem:
        yield Finding(Level.BAD, "launch", machine.place_problem)
    elif place is not None:
        yield Finding(Level.GOOD, "launch", f"rank {place.rank} of {place.size} workers, says {place.source}")
        local = place.local_size or 0
        if machine.torch.gpus and local > len(machine.torch.gpus):
            found = f"{local} workers here share {len(machine.torch.gpus)} GPUs"
            yield Finding(Level.NOTE, "launch", found, "that is good for tests; for speed start one worker per GPU")
    elif tasks.isdigit() and int(tasks) > 1:
        found = f"a SLURM job of {tasks} tasks, and this shell is none of them: a program started here is alone"
        yield Finding(Level.WARN, "launch", found, f"start it with srun, which makes {tasks} workers of it")
    else:
        found = "no launcher has started this process: `lockstep run -n N train.py` starts workers"
        yield Finding(Level.GOOD, "launch", found)
    if machine.master_problem:
        advice = "choose another port or host, or leave it out: `lockstep run` finds a free one"
        yield Finding(Level.BAD, "launch", machine.master_problem, advice)
    if machine.settings_problem:
        yield Finding(Level.BAD, "settings", machine.settings_problem)


def _clock(machine: Machine) -> Iterator[Finding]:
    if machine.clock_is_set is False:
        advice = "only times in logs depend on it: Lockstep itself uses clocks that cannot be set"
        yield Finding(Level.NOTE, "clock", "no time server sets it", advice)


def _version(text: str) -> tuple[int, ...]:
    """Returns major and minor version: 2.13.0+cpu -> (2, 13)."""
    numbers = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in one if c.isdigit()) or 0) for one in numbers)
