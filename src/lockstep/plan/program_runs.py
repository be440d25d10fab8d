"""Starts the user's program for a few steps with other settings, on this machine, and returns where its trace is.

Several hosts are network namespaces of this machine (bench/network_namespaces.py), which need root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.bench.network_namespaces import INTERFACE, VirtualHosts
from lockstep.errors import LockstepError

STORE_PORT: Final = 29500  # no other program runs on virtual hosts
LINES_SHOWN: Final = 15


@dataclass(frozen=True)
class ProgramRun:
    """How the program is started.

    workers            on each host
    mbit               speed of the links between virtual hosts; 0 on one host
    backend            "": as the program chooses
    steps, global_batch_size, shards, options  see `lockstep.train.probe.Probe`
    """

    steps: int
    workers: int = 1
    hosts: int = 1
    mbit: int = 0
    backend: str = ""
    global_batch_size: int | None = None
    shards: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    lr_factor: float = 1.0

    def probe(self) -> str:
        """The value of LOCKSTEP_PROBE."""
        names = ("steps", "global_batch_size", "shards", "options", "start", "lr_factor")
        return json.dumps({name: value for name, value in asdict(self).items() if name in names})

    def __str__(self) -> str:
        count = self.workers * self.hosts
        text = f"{count} worker{'s' * (count > 1)}" + (f" on {self.hosts} hosts" if self.hosts > 1 else "")
        text += f", batch {self.global_batch_size}" if self.global_batch_size else ""
        text += f", {self.shards} shard{'s' * (self.shards > 1)}" if self.shards else ""
        return text + "".join(f", {name}={value}" for name, value in self.options.items() if value not in ("fp32", 0))


def run_program(how: ProgramRun, program: Sequence[str], folder: Path, timeout_s: float) -> Path:
    """Run the program to its end. Returns the folder with its trace.

    program  a script, or "-m" and a module, and its arguments

    Raises LockstepError with the end of its output if it fails or takes longer than `timeout_s`.
    """
    folder.mkdir(parents=True)
    env = {**os.environ, "LOCKSTEP_PROBE": how.probe()} | ({"LOCKSTEP_BACKEND": how.backend} if how.backend else {})
    if how.hosts == 1:
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(how.workers), "--plain"]
        _finish(how, [_start([*command, "--log-dir", str(folder), *program], env, folder / "output.txt")], timeout_s)
    else:
        run_on_virtual_hosts(how, program, folder, env, timeout_s)
    if not (folder / "trace").exists():
        raise LockstepError(f"{how}: no step was made; the program must train with a lockstep.Run")
    return folder


def run_on_virtual_hosts(
    how: ProgramRun, program: Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float
) -> None:
    """Run a program on virtual hosts to its end. Raises LockstepError if it fails."""
    command = [sys.executable, *program]
    with ExitStack() as resources:
        virtual = resources.enter_context(VirtualHosts(hosts=how.hosts, mbit=how.mbit))
        started = []
        for rank in range(how.hosts * how.workers):
            host = virtual.hosts[rank // how.workers]
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(how.hosts * how.workers),
                "LOCAL_RANK": str(rank % how.workers),
                "LOCAL_WORLD_SIZE": str(how.workers),
                "MASTER_ADDR": virtual.hosts[0].address,
                "MASTER_PORT": str(STORE_PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "LOCKSTEP_HOST": f"host{host.number}",
                "LOCKSTEP_RUN_DIR": str(folder),
                "LOCKSTEP_BACKEND": how.backend or "hierarchy",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns that the hosts have no names
                "OMP_NUM_THREADS": "1",
            }
            enter = ["nsenter", f"--net=/proc/{host.holder_pid}/ns/net"]
            started.append(_start([*enter, *command], {**env, **place}, folder / f"output{rank}.txt"))
            resources.callback(started[-1].process.kill)
        _finish(how, started, timeout_s)


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    output: Path


def _start(command: Sequence[str], env: Mapping[str, str], output: Path) -> _Started:
    with output.open("wb") as file:
        return _Started(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT), output)


def _finish(how: ProgramRun, started: Sequence[_Started], timeout_s: float) -> None:
    """Wait for the processes; if one fails or time runs out, end all, and raise LockstepError."""
    end_s = time.monotonic() + timeout_s
    try:
        while None in (statuses := [one.process.poll() for one in started]):
            if any(statuses):
                break  # the first that failed says why; the others fail because of it
            if time.monotonic() > end_s:
                raise LockstepError(f"{how}: not done after {timeout_s:g} s; see --timeout-s and --probe-steps")
            time.sleep(0.05)
        for one in started:
            if one.process.returncode:
                last = "\n".join(one.output.read_text(errors="replace").rstrip().splitlines()[-LINES_SHOWN:])
                raise LockstepError(
                    f"{how}: the program ended with status {one.process.returncode}; its logs are deleted, so run it "
                    f"alone to see more:\n{last}"
                )
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.terminate()
        for one in started:
            try:
                one.process.wait(10.0)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
