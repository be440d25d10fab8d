"""One case with a real run: start `lockstep run`, strike, wait for the end, and write down all that can be seen."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import leftovers
from training_check import Hit, Mark, Seen
from training_life import is_alive, listens
from training_plan import ENDING, OUTSIDE, STACKS, Case, Strike, Who

MARK = "LOCKSTEP_TRAINING_CHAOS"  # in the environment of all processes we start, so that they can be found
PROGRAM = Path(__file__).with_name("training_program.py")
IDLE_PACE_S = 0.05  # between steps, while replacements start: steps are not to run out
LOOK_EVERY_S = 0.02
SLOW_S, STUCK_S = 20.0, 75.0  # no worker came by any place: it is written down where all are; the run is given up
FAST_S = 0.4  # so long the program runs as fast as a strike wants it
PASSED_OVER_S, PASSED_OVER_STEPS = 2.5, 13  # none that is meant came by, although all are there
REFERENCE_S = 300.0
AHEAD_S = 0.1  # a step takes a few milliseconds
FRAMES = 14  # of a stack, that are shown


class Stuck(Exception):
    """The run does not go on. The text tells where its workers are."""


class Job:
    """One run, as the driver sees it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.logs = folder / "logs"
        for name in ("lives", "names", "traces", "claims", "ends", "stacks", "logs"):
            (folder / name).mkdir(parents=True)
        self._pace_s, self._stop = IDLE_PACE_S, False
        self._order: dict[str, Any] | None = None
        self._tell()
        self.output = folder / "output"
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(case.workers), "--min", "1", "--max", "6"]
        command += ["--stall-s", str(case.stall_s), "--log-dir", str(self.logs), str(PROGRAM)]
        command += ["--folder", str(folder), "--variant", case.variant, "--seed", str(case.run_seed)]
        command += [
            "--backend",
            case.backend,
            "--save-every",
            str(case.save_every),
            "--num-workers",
            str(case.num_workers),
        ]
        command += ["--epochs", str(case.epochs), "--device", case.device, *(["--sharded"] if case.sharded else [])]
        command += ["--grad-comm", case.grad_comm]
        self._events_read, self.events = 0, list[dict[str, Any]]()
        self._looked_s, self._grew_s, self._size = 0.0, time.monotonic(), -1
        self._is_slow = False
        self.slow: list[str] = []  # where all were when nothing went on
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment(folder, case.device)
            )

    # -- what the program is told ------------------------------------------------------------------------------------

    def pace(self, pace_s: float) -> None:
        if pace_s != self._pace_s:
            self._pace_s = pace_s
            self._tell()

    def order(self, number: int, strike: Strike | None) -> None:
        self._order = None
        if strike is not None:
            what = {"place": strike.place, "who": strike.who, "also": strike.also, "nth": strike.nth}
            self._order = {"id": number, "signal": int(strike.signal), **what}
        self._tell()

    def stop(self) -> None:
        """End after the next step."""
        self._stop = True
        self._tell()

    def _tell(self) -> None:
        control = self.folder / "control"
        text = json.dumps({"pace_s": self._pace_s, "order": self._order, "stop": self._stop})
        control.with_suffix(".new").write_text(text)
        control.with_suffix(".new").rename(control)

    # -- what can be seen --------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def look(self) -> None:
        """At the events so far. Raises Stuck."""
        with suppress(OSError), (self.logs / "events.jsonl").open("rb") as file:
            file.seek(self._events_read)
            for line in file:
                if line.endswith(b"\n"):
                    self._events_read += len(line)
                    self.events.append(json.loads(line))
        now_s = time.monotonic()
        if now_s - self._looked_s > 1.0:
            self._looked_s = now_s
            size = self._events_read + sum(path.stat().st_size for path in (self.folder / "traces").iterdir())
            if size != self._size:
                self._size, self._grew_s, self._is_slow = size, now_s, False
        if now_s - self._grew_s > SLOW_S and not self._is_slow:
            self._is_slow = True
            said = "\n".join(self.output.read_text(errors="replace").splitlines()[-3:])
            self.slow.append(f"nothing has happened for {SLOW_S:.0f} s, since\n{said}\n{self.stacks()}")
        if now_s - self._grew_s > STUCK_S:
            raise Stuck(f"nothing has happened for {STUCK_S:.0f} s\n{self.stacks()}")

    def members(self) -> tuple[list[str], float]:
        """Who trains together, in the order of ranks, and since when; none while a generation is ending."""
        found: list[str] = []
        since_s = 0.0
        for event in self.events:
            if event["event"] == "generation":
                found, since_s = list(event["members"]), event["monotonic"]
            elif event["event"] in ("lost", "ended") and event["worker"] in found:
                found = []
        return found, since_s

    def pids(self) -> dict[str, int]:
        """Of all workers that ever told who they are, or of which the host agent has told that they are gone."""
        gone = re.findall(r"worker (\d+) \(pid (\d+)\)", self.output.read_text(errors="replace"))
        said = {path.read_text(): int(path.name) for path in (self.folder / "names").iterdir()}
        return {f"h0.{number}": int(pid) for number, pid in gone} | said

    def step(self) -> int:
        """The last that any worker has begun."""
        return max((_last_step(path) for path in (self.folder / "traces").iterdir()), default=-1)

    def claim(self, number: int) -> dict[str, Any] | None:
        with suppress(OSError):
            found: dict[str, Any] = json.loads((self.folder / "claims" / str(number)).read_text())
            return found
        return None

    def stacks(self) -> str:
        """Where each worker is, in words; loader processes write theirs to the file of their worker."""
        for pid in leftovers.marked_processes(f"{MARK}={self.folder}"):
            if listens(pid, STACKS):
                with suppress(ProcessLookupError):
                    os.kill(pid, STACKS)
                time.sleep(0.1)  # not all at once into one file
        time.sleep(1.0)
        lines = []
        for path in sorted((self.folder / "stacks").iterdir()):
            # One dump after the other, of all threads; the main thread is the last of each.
            dumps = path.read_text().split("Current thread")[1:]
            if dumps and is_alive(path.name):
                lines.append(f"pid {path.name}, most recent call first (all threads: {path}):")
                lines += ["\n".join(dump.splitlines()[1:FRAMES]) for dump in dumps]
        return "\n".join(lines)

    # -- end ---------------------------------------------------------------------------------------------------------

    def await_end(self) -> int:
        while self.process.poll() is None:
            self.look()
            time.sleep(LOOK_EVERY_S)
        self.look()
        return self.process.returncode

    def close(self) -> None:
        """Whatever happened, no process stays."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.strangers(within_s=3.0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strangers(self, within_s: float) -> dict[int, str]:
        """Processes of this run that are still there after so long."""
        end_s = time.monotonic() + within_s
        while (found := leftovers.marked_processes(f"{MARK}={self.folder}")) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found


def devices(device: str) -> dict[str, str]:
    """Hide the GPUs from runs on the CPU: a driver whose processes are killed leaves files of its own in /dev/shm."""
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def environment(folder: Path, device: str) -> dict[str, str]:
    return dict(os.environ) | devices(device) | {MARK: str(folder), "OMP_NUM_THREADS": "1"}


# ------------------------------------------------------------------------------------------------------------ one case


@contextmanager
def folder_for(case: Case) -> Iterator[Path]:
    """It stays if something was found, so that it can be looked at."""
    folder = Path(tempfile.mkdtemp(prefix=f"lockstep-training-{case.seed}-{case.number}-"))
    yield folder
    if not (folder / "keep").exists():
        shutil.rmtree(folder, ignore_errors=True)


def carry_out(case: Case, folder: Path, drive: Callable[[Job, Seen], None]) -> Seen:
    """`drive` does to the run what is to be done to it, and writes down whom it hit; then the run goes to its end."""
    seen, shm_before = Seen(case), leftovers.shm_files()
    job = Job(case, folder)
    try:
        drive(job, seen)
        job.pace(0.0)
        seen.status = job.await_end()
    except Stuck as stuck:
        seen.stuck = str(stuck)
    finally:
        if seen.status is not None:
            seen.left += [f"process {pid}: {what}" for pid, what in job.strangers(within_s=2.0).items()]
        job.close()
    seen.left += [*leftovers.shm_left(shm_before), *_ports_left(folder)]
    _collect(job, seen)
    return seen


def strike_all(job: Job, seen: Seen) -> None:
    """All that the case has in store."""
    dice = Random(f"outside {job.case.seed} {job.case.number}")
    for number, strike in enumerate(job.case.strikes):
        if strike.members and strike.place != ENDING:
            job.pace(IDLE_PACE_S)
        if not _await_members(job, strike):
            break
        if strike.members:
            job.pace(strike.pace_s)
        claim = _from_outside(job, strike, dice) if strike.place == OUTSIDE else _from_inside(job, number, strike)
        if claim is not None:
            seen.hits += [
                Hit(number, strike.place, pid, claim["at_s"], stopped=strike.late_s is not None, drained=strike.drains)
                for pid in claim["pids"]
            ]
            if strike.kills_other:
                time.sleep(AHEAD_S)  # meanwhile the others come to the next step, and wait there
                other = _from_outside(
                    job, Strike(OUTSIDE, dice.choice((Who.FIRST, Who.ANY))), dice, spare=claim["pids"]
                )
                if other is not None:
                    claim["at_s"] = other["at_s"]
                    # How long it takes to recover depends on us, so it is not counted: as with a stop.
                    seen.hits += [Hit(number, "behind", pid, other["at_s"], stopped=True) for pid in other["pids"]]
            if strike.drains:
                _await_left(job, claim["pids"])
            if strike.late_s is not None:
                _go_on(job, claim["pids"], claim["at_s"] + strike.late_s)


def _await_members(job: Job, strike: Strike) -> bool:
    """False: the run is over."""
    while not job.is_over:
        job.look()
        members, since_s = job.members()
        if strike.members == 0 or (len(members) >= strike.members and time.monotonic() - since_s >= strike.pause_s):
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _from_inside(job: Job, number: int, strike: Strike) -> dict[str, Any] | None:
    """The claim of the worker that was hit; None if none came by."""
    job.order(number, strike)
    all_there: tuple[float, int] | None = None  # since when, and since which step
    began_s = time.monotonic()
    while not job.is_over and job.claim(number) is None:
        job.look()
        now_s = time.monotonic()
        if len(job.members()[0]) < job.case.workers:
            all_there = None
        elif all_there is None:
            all_there = now_s, job.step()
        if strike.place != ENDING:  # which comes when it comes
            if all_there and now_s - all_there[0] > PASSED_OVER_S and job.step() - all_there[1] > PASSED_OVER_STEPS:
                break
            if now_s - began_s > FAST_S:
                job.pace(IDLE_PACE_S)
        time.sleep(LOOK_EVERY_S)
    job.order(number, None)
    time.sleep(LOOK_EVERY_S)  # a worker may have read the order just before
    return job.claim(number)


def _from_outside(job: Job, strike: Strike, dice: Random, spare: Sequence[int] = ()) -> dict[str, Any] | None:
    if not spare:
        time.sleep(dice.uniform(0.0, 0.25))
    job.look()
    members, pids = job.members()[0], job.pids()
    alive = [pids[one] for one in members if one in pids and pids[one] not in spare and not job.is_over]
    if not alive:
        return None
    first = alive[0] if strike.who is Who.FIRST else dice.choice(alive[1:] or alive)
    others = [pid for pid in alive if pid != first]
    victims = [first, *(others if strike.also < 0 else others[: strike.also])]
    at_s = time.monotonic()
    for pid in victims:
        assert pid > 1  # 0 would be a whole group: ours
        with suppress(ProcessLookupError):
            os.kill(pid, strike.signal)
    return {"at_s": at_s, "pids": victims}


def _await_left(job: Job, pids: list[int]) -> None:
    """Until none of these trains any more: if all workers are asked to leave at once, that ends the run."""
    while not job.is_over:
        job.look()
        named = job.pids()
        if not any(named.get(member) in pids for member in job.members()[0]):
            return
        time.sleep(LOOK_EVERY_S)


def _go_on(job: Job, pids: list[int], at_s: float) -> None:
    while time.monotonic() < at_s and not job.is_over:
        job.look()
        time.sleep(LOOK_EVERY_S)
    for pid in pids:
        with suppress(ProcessLookupError):  # it was taken for dead, and is
            os.kill(pid, signal.SIGCONT)


# ----------------------------------------------------------------------------------------------- what is written down


def _collect(job: Job, seen: Seen) -> None:
    folder = job.folder
    with suppress(Stuck):
        job.look()
    seen.events, seen.output = job.events, job.output.read_text(errors="replace")
    seen.pids, seen.slow = job.pids(), job.slow
    seen.traces = {int(path.name): _read_trace(path) for path in (folder / "traces").iterdir()}
    ends = [path for path in (folder / "ends").iterdir() if path.suffix != ".part"]
    seen.ends = {int(path.name): json.loads(path.read_text()) for path in ends}
    checkpoints = folder / "run" / "checkpoints"
    seen.checkpoints = sorted(os.listdir(checkpoints)) if checkpoints.is_dir() else []
    metrics = folder / "run" / "metrics.jsonl"
    seen.metrics = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if seen.status is not None:
        ledger = [sys.executable, "-m", "lockstep", "ledger", str(folder / "run"), "--json"]
        done = subprocess.run(ledger, capture_output=True, text=True, timeout=120, check=False)
        seen.ledger = "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stdout}{done.stderr}"


def _last_step(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200))
        lines = file.read().split(b"\n")
    return int(lines[-2].split()[3]) if len(lines) > 2 else -1  # the first may be the end of a line


def _read_trace(path: Path) -> list[Mark]:
    marks = []
    for line in path.read_text().splitlines():
        at_ns, generation, rank, step, place = line.split()
        marks.append(Mark(int(at_ns) / 1e9, int(generation), int(rank), int(step), place))
    return marks


def _ports_left(folder: Path) -> list[str]:
    """The port that the launcher had reserved must be free again."""
    found = []
    for port in {path.read_text() for path in (folder / "lives").iterdir()} - {""}:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port)))
                probe.listen()
            except OSError as error:
                found.append(f"port {port}: {error}")
    return found


class References:
    """What the programs compute undisturbed, in a world of one. Each is run once."""

    def __init__(self, device: str = "cpu") -> None:
        self._found: dict[str, dict[str, Any]] = {}
        self._device = device

    def need(self, programs: set[str], *, more: tuple[str, ...] = ()) -> None:
        missing = sorted(programs - set(self._found))
        if missing:
            command = [sys.executable, str(PROGRAM), "--device", self._device, *more, "--reference", *missing]
            env = dict(os.environ) | devices(self._device)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=REFERENCE_S, check=True, env=env)
            self._found |= dict(json.loads(line) for line in done.stdout.splitlines())

    def of(self, program: str) -> dict[str, Any]:
        self.need({program})
        return self._found[program]
