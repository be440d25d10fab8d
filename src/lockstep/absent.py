"""Workers that SLURM has announced and that were never started: what /proc shows of it.

`SLURM_NTASKS=2` in the environment of one process that nobody started with srun would make it wait for a peer until the
deadline, five minutes, and then doubt the network. But tasks of one host are started together, and each has its number
in its environment. So if all of them belong on this host, and the one that we wait for is not among its processes, it
will not come.

We say so only where we must see it: in the machine's own process namespace (a container has another), and if no process
of our user hides its environment that might be one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, final

from lockstep.errors import WorldError
from lockstep.place import read_number

LOOK_AFTER_S: Final = 2.0  # we have imported torch by then: whoever was started together with us is there
LOOK_AGAIN_S: Final = 1.5  # once is not enough: in the moment of exec a process has no environment
TOGETHER_S: Final = 300.0  # whoever is older than we are by so much is no task of our step
_FIRST_NAMESPACE: Final = "pid:[4026531836]"  # the kernel's own number for it


@final
class Absence:
    """Of tasks of our own SLURM step. One per wait."""

    def __init__(self, env: Mapping[str, str], *, proc: Path = Path("/proc")) -> None:
        self._env, self._proc = env, proc
        self._is_of_use = _is_one_host(env) and _sees_all(proc)
        self._look_at_s = time.monotonic() + LOOK_AFTER_S
        self._missed: set[int] = set()  # when we looked last

    def look(self, awaited: Iterable[int]) -> None:
        """Raise WorldError if one of these ranks will not come. Cheap: it looks every second or two."""
        if not self._is_of_use or time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + LOOK_AGAIN_S
        missed, present = set(awaited), _tasks_here(self._env, self._proc)
        missed = set() if present is None else missed - present
        if again := sorted(missed & self._missed):
            raise WorldError(_explain(self._env, again))
        self._missed = missed


def _is_one_host(env: Mapping[str, str]) -> bool:
    """All tasks of the step belong on this host."""
    if "SLURM_PROCID" not in env or not _job(env)[0]:
        return False
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        if (count := read_number(env, name)) is not None:
            return count == 1
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    if nodes:
        return not set(nodes) & set(",[")
    return env.get("MASTER_ADDR", "") in ("localhost", "127.0.0.1", "::1")


def _sees_all(proc: Path) -> bool:
    try:
        return os.readlink(proc / "self" / "ns" / "pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def _job(env: Mapping[str, str]) -> tuple[str, str]:
    """Which step of which job."""
    job, step = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID"), env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    return job or "", step or ""


def _tasks_here(env: Mapping[str, str], proc: Path) -> set[int] | None:
    """The numbers of the tasks of our step that have a process here; None if one may be hidden."""
    found = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            text = (entry / "environ").read_bytes()
        except PermissionError:
            if _started_s(entry) > _started_s(proc / "self") - TOGETHER_S:
                return None
            continue
        except OSError:
            continue  # it has just ended
        theirs = dict(line.partition("=")[::2] for line in text.decode(errors="replace").split("\0"))
        if theirs.get("SLURM_PROCID", "").isdecimal() and _job(theirs) == _job(env):
            found.add(int(theirs["SLURM_PROCID"]))
    return found


def _started_s(entry: Path) -> float:
    """Since the machine was started; as if it were just now if it has ended meanwhile."""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return float("inf")


def _explain(env: Mapping[str, str], missed: list[int]) -> str:
    name = next(one for one in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID") if env.get(one))
    numbers = ", ".join(map(str, missed[:8])) + (f" and {len(missed) - 8} more" if len(missed) > 8 else "")
    return (
        f"{name}={env[name]} says how many workers there are, and this one has SLURM_PROCID={env['SLURM_PROCID']}; but "
        f"no process with SLURM_PROCID={numbers} is on this host, where they all belong: not all of the tasks were "
        f"started, or they have ended; start them together with `srun -n {env[name]} python ...`, or unset "
        "SLURM_PROCID to train on one worker"
    )
