"""Collects facts about this machine as plain values; judge.py draws conclusions. torch runs in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.errors import WorldError
from lockstep.launcher.job import count_cores, count_gpus
from lockstep.settings import Settings
from lockstep.version import __version__
from lockstep.world.environment import RankAssignment, detect

TORCH_WITHIN_S: Final = 120.0
RESOLVE_WITHIN_S: Final = 10
_UNSYNCHRONISED: Final = 5  # what adjtimex returns for a clock that no time server sets

# Runs in a process of its own, because importing torch takes seconds, and may crash.
_ASK_TORCH: Final = """
import json, time
began = time.monotonic()
import torch
import torch.distributed as dist
gpus, why = [], ""
try:
    if torch.version.cuda and not torch.cuda.is_available():
        torch.cuda.init()
    for n in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(n)
        gpus.append({"name": one.name, "memory_bytes": one.total_memory})
except Exception as error:
    why = str(error).splitlines()[0]
nccl = ""
if dist.is_available() and dist.is_nccl_available():
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        nccl = f"unknown ({error})"
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": gpus, "gpu_problem": why, "nccl": nccl,
    "gloo": dist.is_available() and dist.is_gloo_available(), "import_s": time.monotonic() - began,
}))
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    version: str = ""
    cuda: str = ""  # CUDA version that it was built for
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    nccl: str = ""
    gloo: bool = False
    import_s: float = 0.0
    problem: str = ""  # why it cannot be imported


@dataclass(frozen=True)
class Space:
    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    host: str
    torch: Torch
    cores: int  # of the machine
    usable_cores: int  # by this process
    quota_cores: float | None  # core time that a container may use
    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None  # of a container
    shm: Space
    directory: Space
    open_files: int
    interfaces: tuple[str, ...]
    host_addresses: tuple[str, ...]  # that its name resolves to; empty: it does not resolve
    loopback_problem: str
    driver_gpus: int  # that NVIDIA's driver lists
    clock_is_set: bool | None  # by a time server; None: unknown
    env: Mapping[str, str]
    place: RankAssignment | None  # rank and size that a launcher has set; None: there is no launcher
    place_problem: str = ""
    master_problem: str = ""  # with MASTER_ADDR or MASTER_PORT
    settings_problem: str = ""  # with a LOCKSTEP_* variable
    python: tuple[int, ...] = field(default_factory=lambda: tuple(sys.version_info[:3]))
    lockstep: str = __version__


def inspect_machine(env: Mapping[str, str], directory: Path) -> Machine:
    """Collects all facts. Takes a few seconds, most of them to import torch."""
    place, place_problem = None, ""
    try:
        place = detect(env)
    except WorldError as error:
        place_problem = str(error)
    settings, settings_problem = Settings(), ""
    try:
        settings = Settings.from_env(env)
    except ValueError as error:
        settings_problem = str(error)
    host, memory = socket.gethostname(), _read_meminfo()
    return Machine(
        host=host,
        torch=ask_torch(),
        cores=os.cpu_count() or 1,
        usable_cores=count_cores(),
        quota_cores=cgroup_cores(),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        memory_limit_bytes=cgroup_memory(),
        shm=space_of(Path(settings.shm_dir or "/dev/shm")),
        directory=space_of(directory),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        host_addresses=addresses_of(host),
        loopback_problem=_try_loopback(),
        driver_gpus=count_gpus(),
        clock_is_set=_is_clock_set(),
        env=env,
        place=place,
        place_problem=place_problem,
        master_problem=_try_master(env, place),
        settings_problem=settings_problem,
    )


def ask_torch() -> Torch:
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        return Torch(problem=f"`import torch` takes more than {TORCH_WITHIN_S:.0f} s")
    try:
        facts = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}, without output"]
        return Torch(problem=lines[-1])
    gpus = tuple(Gpu(**one) for one in facts.pop("gpus"))
    return Torch(gpus=gpus, **facts)


# ---- cores and memory ------------------------------------------------------------------------------------------------


def cgroup_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns the smallest CPU quota of all control groups that contain this process, in cores."""
    found = []
    for folder in _groups(root, membership):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            found.append(int(words[0]) / int(words[1]))
    quota, period = (_read(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # cgroup v1
    if quota and period and int(quota) > 0:
        found.append(int(quota) / int(period))
    return min(found, default=None)


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    texts = [_read(folder / "memory.max") for folder in _groups(root, membership)]
    texts.append(_read(root / "memory" / "memory.limit_in_bytes"))
    limits = [int(text) for text in texts if text.isdigit()]
    return min((one for one in limits if one < 1 << 60), default=None)  # cgroup v1 has a huge number for "no limit"


def _groups(root: Path, membership: Path) -> list[Path]:
    """Returns the control group of this process and its parents, innermost first."""
    lines = [line.split(":", 2) for line in _read(membership).splitlines()]
    own = next((parts[2] for parts in lines if len(parts) == 3 and parts[0] == "0"), "/")
    inner = root / own.lstrip("/")
    return [inner, *(parent for parent in inner.parents if parent == root or root in parent.parents)]


def _read_meminfo() -> dict[str, int]:
    rows = [line.split() for line in _read(Path("/proc/meminfo")).splitlines()]
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ---- disks, network, clock, GPUs -------------------------------------------------------------------------------------


def space_of(path: Path) -> Space:
    """Returns the disk space of the directory, or of the first parent that exists."""
    there = next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
    if not there.is_dir():
        return Space(str(path), problem=f"{there} is no directory")
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return Space(str(path), problem=str(error))
    problem = "" if os.access(there, os.W_OK | os.X_OK) else f"this user may not write to {there}"
    return Space(str(path), usage.total, usage.free, problem)


def addresses_of(host: str) -> tuple[str, ...]:
    """Resolves the name in a process of its own, with a timeout: a name server that does not answer takes minutes."""
    program = "import socket, sys; print(*sorted({one[4][0] for one in socket.getaddrinfo(sys.argv[1], None)}))"
    command = [sys.executable, "-c", program, host]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        return ()
    return tuple(done.stdout.split()) if done.returncode == 0 else ()


def _try_loopback() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return ""
    except OSError as error:
        return str(error)


def _try_master(env: Mapping[str, str], place: RankAssignment | None) -> str:
    """Returns why rank 0 cannot listen at MASTER_ADDR and MASTER_PORT, or why others cannot find it; "" if they can."""
    host = env.get("MASTER_ADDR")
    if place is None or host is None:
        return ""
    if not addresses_of(host):
        return f"MASTER_ADDR={host!r} stands for no address"
    if place.rank != 0 or place.agent_store or not env.get("MASTER_PORT", "").isdigit():
        return ""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(env["MASTER_PORT"])))
            probe.listen()
            return ""
    except (OSError, OverflowError) as error:
        return f"MASTER_PORT={env['MASTER_PORT']} cannot be listened on: {error}"


def _is_clock_set() -> bool | None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    try:
        state = libc.adjtimex(ctypes.create_string_buffer(512))  # more than the kernel fills in
    except AttributeError:
        return None
    return None if state < 0 else state != _UNSYNCHRONISED
