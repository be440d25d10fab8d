"""A SLURM of our own on this machine: munged, slurmctld and a slurmd per node, in one folder, on ports of their own.

    with SlurmCluster(folder, nodes=2) as slurm:
        slurm.call("srun", "-n", "2", "hostname")

Needs the programs (Debian: slurm-wlm, munge) and root. No cgroups: it must work in a container.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
START_S = 300.0
CALL_S = 300.0

CONF = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=20
MinJobAge=300
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """ "" if it can be used here."""
    missing = [name for name in PROGRAMS if find(name) is None]
    if missing:
        return f"needs a SLURM: there is no {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a SLURM of our own needs root"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class SlurmCluster:
    def __init__(self, folder: Path, *, nodes: int = 1, cpus: int = 2) -> None:
        self.folder = folder
        self.names = [f"127.0.0.{number + 1}" for number in range(nodes)]  # names that lead somewhere
        ctld_port, *ports = free_ports(nodes + 1)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
            for name, port in zip(self.names, ports, strict=True)
        ]
        folder.mkdir(mode=0o700)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        self.conf = folder / "slurm.conf"
        self.conf.write_text(CONF.format(folder=folder, host=host, ctld_port=ctld_port, nodes="\n".join(lines)))
        told = [name for name in os.environ if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE")]
        self.env = {name: value for name, value in os.environ.items() if name not in told}
        self.env |= {"SLURM_CONF": str(self.conf)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        folder = self.folder
        try:
            files = ("key-file=munge.key", "socket=munge.socket", "pid-file=munged.pid", "log-file=munged.log")
            files = (*files, "seed-file=munge.seed")
            options = [f"--{name}={folder}/{file}" for name, _, file in (one.partition("=") for one in files)]
            self._start("munged", "--foreground", "--force", *options)
            self._wait_for(lambda: (folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-c", "-f", str(self.conf))
            for name in self.names:
                self._start("slurmd", "-D", "-c", "-f", str(self.conf), "-N", name)
            self._wait_for(self._is_idle, "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError, OSError):
            self.call("scancel", "--user=root", within_s=10)
            self._wait_for(lambda: not self.call("squeue", "--noheader", within_s=10).strip(), "jobs to end")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Processes with the folder in the command line or in the environment, without this one."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                    found += [int(entry.name)] if os.fsencode(self.folder) in text else []
        return found

    def call(self, *command: str, within_s: float = CALL_S, **env: str) -> str:
        """Its output, of which the end is shown if it fails."""
        done = subprocess.run(
            command, env=self.env | env, capture_output=True, text=True, timeout=within_s, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            raise subprocess.SubprocessError(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says about it."""
        fields = self.call("scontrol", "show", "job", "--oneliner", number).split()
        return {name: value for name, _, value in (field.partition("=") for field in fields)}

    def wait_for_job(self, number: str, states: tuple[str, ...], *, within_s: float) -> dict[str, str]:
        end_s = time.monotonic() + within_s
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < end_s, f"waited {within_s} s for job {number} to be {states}: {job}"
            time.sleep(0.2)
        return job

    def _start(self, name: str, *arguments: str) -> None:
        program = find(name)
        assert program is not None
        with (self.folder / f"{name}.out").open("ab") as log:
            daemon = subprocess.Popen(
                [program, *arguments], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)

    def _is_idle(self) -> bool:
        with suppress(subprocess.SubprocessError):
            states = self.call("sinfo", "--noheader", "--Node", "--format=%T", within_s=10).split()
            return states == ["idle"] * len(self.names)
        return False

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > end_s:
                logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.out"))
                raise TimeoutError(f"waited {START_S} s for {what}\n{logs}")
            time.sleep(0.1)
