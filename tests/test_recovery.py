"""Workers are lost at named places of real runs, and every run ends with the digest of the undisturbed one.

Importing torch is what takes time. So a run loses many workers, one after the other, and two runs go on side by side.
The program waits at each step until the lost worker is replaced, so that the next fault finds a whole world.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.launcher.exit_policy import PREEMPTED
from on_workers import run_program
from test_launch import outer_env, processes_of, split_card, wait_for

DEADLINE_S = 300.0
AT_ONCE = 2
KILLED = -int(signal.SIGKILL)

PROGRAM = """
import hashlib, os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
import lockstep
from lockstep import faults
from runs import adamw, classify, data

env = os.environ
raises, pauses = env.get("RAISES", ""), env.get("PAUSES", "").split()
if "APART" in env:
    env["LOCKSTEP_HOST"] = f"that of process {{os.getpid()}}"


class Average:
    def __init__(self, model):
        self.model, self.count, self.values = model, 0, [p.detach().clone() for p in model.parameters()]

    def update(self):
        self.count += 1
        for value, parameter in zip(self.values, self.model.parameters()):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return {{"count": self.count, "values": [value.clone() for value in self.values]}}

    def load_state_dict(self, state):
        self.count, self.values = state["count"], [value.clone() for value in state["values"]]


def correct(model, batch):
    x, y = batch
    return (model(x).argmax(1) == y).sum(), len(y)


def is_whole():
    wanted = Path("whole").read_text() if Path("whole").exists() else env.get("WHOLE", "1")
    return str(run.world.size) in wanted.split() or run._session.calls.wants_to_move


def wait(until, at_most_s=30.0):
    end_s = time.monotonic() + at_most_s
    while not until() and time.monotonic() < end_s:
        time.sleep(0.005)


def scene(place):
    '''In which order workers come to a place.'''
    me, agent = faults.context.get("worker"), run._session.calls._agent
    if env["SCENE"] == "backward":
        if faults.context.get("step") == 4 and agent.generation == 1 and place == "backward":
            if me == "h0.1":
                os.kill(os.getpid(), 9)
            wait(lambda: agent.leave_reason() is not None)  # what it sends then fails inside of autograd
        return
    if env["SCENE"] == "both":  # two workers die at once; one after the other, each could be replaced in time
        if faults.context.get("step") == 10 and place == "top" and me == "h0.1":
            Path("pid").write_text(str(os.getpid()))
        if faults.context.get("step") == 10 and place == "reduced" and me == "h0.0":
            os.kill(int(Path("pid").read_text()), 9)
            os.kill(os.getpid(), 9)
        return
    if env["SCENE"] in ("orphan", "successor"):  # the source dies when the other one has its step, or its state
        if place == "restored" and me != "h0.0":
            Path("restored").touch()
        if me == "h0.0" and Path("restored").exists():
            os.kill(os.getpid(), 9)
    if env["SCENE"] == "route" and place == "joining" and me == "h0.0" and agent.generation == 2:
        lockstep.recovery.elastic_calls.ORDER_MUST_COME_WITHIN_S = 0.5
        raise lockstep.WorldError("no route to the others")
    if env["SCENE"] in ("successor", "route"):
        if place == "waiting" and faults.context.get("step") == 2 and me == "h0.1":
            os.kill(os.getpid(), 9)
        return
    behind = env["SCENE"] in ("behind", "orphan")
    turn = 1 if behind else 2
    if faults.context.get("step") != 4 or agent.generation > turn:
        return
    if place == "top" and me == "h0.1" and not behind:
        os.kill(os.getpid(), 9)
    if place == "reduced" and me in ("h0.0", "h0.2") and agent.generation == 2:
        wait(lambda: run._session.calls.wants_to_move)  # a newcomer can be let in when this step is over
    if place == "applied" and me == "h0.0":
        Path("applied").touch()
    if place == "committed" and me == "h0.2" and agent.generation == turn:
        wait(lambda: Path("applied").exists())
        os.kill(os.getpid(), 9)


def commit_late():
    '''It has not taken the step when it hears that a worker was lost, and another one has.'''
    generation = run._session.calls._agent.generation
    if faults.context.get("step") == 4 and faults.context["worker"] == "h0.1" and generation == 1:
        wait(lambda: run._session.calls._agent.leave_reason() is not None)
    run._session.calls._agent.check_commit()


if "DIES" in env and env["LOCAL_RANK"] == "0" and not Path("died").exists():
    Path("died").touch()
    os.kill(os.getpid(), 9)
options = {{"check_every": int(env.get("CHECK", 1)), "shard_optimizer": "SHARDED" in env}}
if "REDUNDANCY" in env:
    options["redundancy"] = int(env["REDUNDANCY"])
with lockstep.Run(env.get("KEPT"), seed=7, progress=False, **options) as run:
    if "SCENE" in env:
        faults.hook = scene
        if env["SCENE"] in ("behind", "orphan"):
            run._session.calls.check_commit = commit_late
    model = run.replicate(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 10)))
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    average, first = Average(model), run.on_main(lambda: [1.5, float("nan")])
    run.register_state(average=average)
    batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=8, num_workers=int(env.get("LOADERS", 0)))
    figures = {{}}
    for batch in run.train(batches, optimizer, scheduler=schedule):
        print("step", batch.number, "of", run.world.size, flush=True)
        if raises == "always" and batch.number == 4:
            raise ArithmeticError("always")
        if raises == "once" and batch.number == 4 and run.world.rank == 1 and not Path("raised").exists():
            Path("raised").touch()
            raise ArithmeticError("only once")
        wait(is_whole)
        run.step(classify, batch)
        if "APART" in env and run.world.size > 2:
            assert run._loop.state.context.gradients.scattered is not None, "gradients are not reduce-scattered"
        average.update()
        if batch.ends_epoch:
            figures[batch.epoch] = run.log(accuracy=run.evaluate(correct, data(50), batch_size=8))
        if str(batch.number) in pauses:
            Path(f"paused {{batch.number}}").touch()
            wait(lambda: run._session.stops.asked or Path(f"go {{batch.number}}").exists())
    sha = hashlib.sha256(b"".join(value.numpy().tobytes() for value in average.values)).hexdigest()
    after = run.evaluate(correct, data(50), batch_size=8)
    last = figures.get(7)
    print("digest", run.digest(), sha, average.count, float(after), last, first, flush=True)
if raises == "after" and run.world.rank == 0:
    raise OSError("disk full")
"""

NO_RUN = """
import os, sys, time
print("hello", os.environ["RANK"], flush=True)
time.sleep(0.2 * int(os.environ["RANK"]))
"""

NO_RUN_DIES = (
    NO_RUN
    + """
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
time.sleep(1)
"""
)

TWO_RUNS = """
import lockstep
for n in range(2):
    with lockstep.Run(seed=n, progress=False) as run:
        print("hello", run.on_main(lambda: n), flush=True)
"""

SYNCED = """
import lockstep, torch
with lockstep.Run(seed=1, progress=False) as run:
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(2, 2), lockstep.SyncBatchNorm(2)))
    batches = run.batches(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch_size=4, shards=2)
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
        raise AssertionError("not reached")
"""

FREEZES = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
import lockstep
from runs import classify, data

with lockstep.Run(os.environ.get("KEPT"), seed=7, progress=False, shard_optimizer="SHARDED" in os.environ) as run:
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    model[0].requires_grad_(False)
    batches = run.batches(data(96), global_batch_size=16, shards=8, epochs=3)
    for batch in run.train(batches, torch.optim.AdamW(model.parameters())):
        if batch.number in (3, 7, 9):
            model[0].requires_grad_(batch.number != 7)
        run.step(classify, batch)
    print("digest", run.digest(), flush=True)
"""

CHANGES = """
import os, sys, time
sys.path.insert(0, {tests!r})
import torch
import lockstep
from runs import classify, data

with lockstep.Run(os.environ.get("KEPT"), seed=7, progress=False) as run:
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    model[0].requires_grad_(False)
    batches = run.batches(data(96), global_batch_size=16, shards=8, epochs=3)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in run.train(batches, optimizer):
        if batch.number == 9:
            model[0].requires_grad_(False)
            run.evaluate(classify, data(50), batch_size=8)
        run.step(classify, batch)
        if batch.number == 3:
            run.save()
            optimizer.param_groups[0]["lr"] *= 0.5
        if batch.number == 5:
            model[0].requires_grad_(True)
            end_s = time.monotonic() + 30
            while "JOINS" in os.environ and not run._session.calls.wants_to_move and time.monotonic() < end_s:
                time.sleep(0.005)
    print("digest", run.digest(), flush=True)
"""

WATCHED = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
import lockstep
from runs import classify, data

with lockstep.Run(seed=7, progress=False) as run:
    model = run.replicate(torch.nn.Linear(16, 10))
    batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=None)
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.01), steps=300):
        end_s = time.monotonic() + 30
        while run.world.size < 2 and not run._session.calls.wants_to_move and time.monotonic() < end_s:
            time.sleep(0.005)
        run.step(classify, batch)
        awake = run._session.observer.active is run._session.observer
        print("step", batch.number, "awake" if awake else "asleep", flush=True)
"""


def kill(at: str, worker: int, step: int | None = None, **more: Any) -> dict[str, Any]:
    return {"at": at, "worker": f"h0.{worker}", **({} if step is None else {"step": step}), **more}


@dataclass(frozen=True)
class Play:
    """A run, and what is done to it."""

    workers: int = 3
    backend: str = "shm"
    faults: tuple[dict[str, Any], ...] = ()
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    meddle: Callable[[Path, subprocess.Popen[str]], None] = lambda folder, launcher: None
    again: bool = False  # start it once more when it has ended
    program: str = PROGRAM

    @property
    def victims(self) -> list[str]:
        scenes = {"behind": [2], "midst": [1, 2], "backward": [1], "orphan": [2, 0], "successor": [1, 0], "route": [1]}
        scenes |= {"both": [0, 1]}
        victims = [f"h0.{number}" for number in scenes.get(self.env.get("SCENE", ""), [])]
        return victims + [str(one["worker"]) for one in self.faults]


@dataclass
class Show:
    """How it went."""

    folder: Path
    status: int
    out: str
    err: str
    took_s: float
    again: Show | None = None

    @property
    def text(self) -> str:
        return f"status {self.status} after {self.took_s:.1f} s\n{self.out}\n{self.err}"

    @property
    def digests(self) -> list[str]:
        """What each worker that came to the end has said."""
        return re.findall(r"^(?:\[worker \d+\] )?digest (.*)$", self.out, re.MULTILINE)

    def steps_of(self, worker: int) -> list[tuple[int, int]]:
        """(step, number of workers)"""
        found = re.findall(rf"^\[worker {worker}\] step (\d+) of (\d+)$", self.out, re.MULTILINE)
        return [(int(step), int(size)) for step, size in found]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def lost(self) -> dict[str, int]:
        return {event["worker"]: event["code"] for event in self.events("lost")}

    @property
    def sizes(self) -> list[int]:
        """Of all generations."""
        return [len(event["members"]) for event in self.events("generation")]


def start(folder: Path, play: Play) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(play.workers), "--min", "1"]
    command += ["--log-dir", str(folder / "logs"), *play.options, "program.py"]
    env = {"WHOLE": str(play.workers), "LOCKSTEP_BACKEND": play.backend, "LOCKSTEP_FAULTS": json.dumps(play.faults)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=outer_env(**(env | play.env)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def perform(folder: Path, play: Play) -> Show:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(play.program.format(tests=str(Path(__file__).parent)))
    began_s = time.monotonic()
    if not play.workers:
        status, out = run_program(folder / "program.py")
        return Show(folder, status, out, "", time.monotonic() - began_s)
    launcher = start(folder, play)
    try:
        play.meddle(folder, launcher)
        out, err = launcher.communicate(timeout=DEADLINE_S)
    except BaseException as error:
        launcher.kill()
        out, err = launcher.communicate(timeout=DEADLINE_S)
        return Show(folder, -1, out, f"{err}\n{error!r}", time.monotonic() - began_s)
    return Show(folder, launcher.returncode, out, err, time.monotonic() - began_s)


# ---- what is done to a run from outside ------------------------------------------------------------------------------


def events_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / "logs" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pid_of(folder: Path, worker: str) -> int:
    return next(int(e["pid"]) for e in events_in(folder) if e["event"] == "started" and e["worker"] == worker)


def cont_when_lost(folder: Path, launcher: subprocess.Popen[str]) -> None:
    """It was stopped, and given up. It is continued: too late."""
    wait_for(lambda: any(e["event"] == "lost" for e in events_in(folder)), "a worker to be lost", within_s=120)
    try:
        os.kill(pid_of(folder, "h0.1"), signal.SIGCONT)
    except ProcessLookupError:
        return
    raise AssertionError("it is still there")


def terminate(folder: Path, launcher: subprocess.Popen[str]) -> None:
    wait_for(lambda: (folder / "paused 7").exists(), "the run to pause", within_s=120)
    launcher.terminate()


def kill_launcher(folder: Path, launcher: subprocess.Popen[str]) -> None:
    wait_for(lambda: (folder / "paused 7").exists(), "the run to pause", within_s=120)
    launcher.kill()


def scale_up_and_down(folder: Path, launcher: subprocess.Popen[str]) -> None:
    def scale(workers: str, *, status: int = 0) -> str:
        command = [sys.executable, "-m", "lockstep", "scale", str(folder / "logs"), workers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    wait_for(lambda: (folder / "paused 2").exists(), "the run to pause", within_s=120)
    assert "can have 1 to 3" in scale("4", status=2)
    for workers, step in (("3", 2), ("2", 12)):
        wait_for(lambda: (folder / f"paused {step}").exists(), "the run to pause", within_s=120)  # noqa: B023
        scale(workers)
        (folder / "whole").write_text(workers)
        (folder / f"go {step}").touch()


PLAYS = {
    "undisturbed": Play(workers=0),
    **{
        f"in a step, {backend}": Play(
            backend=backend,
            faults=(
                kill("backward", 1, 2), kill("reduced", 2, 5), kill("optimizer", 0, 8), kill("applied", 3, 11),
                kill("top", 4, 14), kill("exchange", 5, 17), kill("committed", 6, 20),
            ),
        )
        for backend in ("shm", "gloo")
    },
    **{
        f"while they gather, {backend}": Play(
            backend=backend,
            faults=(
                kill("reduced", 1, 2), kill("joining", 2, nth=2), kill("forming", 3), kill("receiving-state", 4),
                kill("catching-up", 5), kill("joining", 6),
            ),
        )
        for backend in ("shm", "gloo")
    },
    **{
        f"the source, {backend}": Play(
            workers=4, backend=backend, faults=(kill("backward", 1, 2), kill("sending-state", 0)),
            env={"LOADERS": "1"},
        )
        for backend in ("shm", "gloo")
    },
    "the source, and no other has a state": Play(
        workers=2, env={"KEPT": "kept"}, options=("--checkpoint-every", "2"),
        faults=(kill("waiting", 1, 7), kill("sending-state", 0)),
    ),
    "killed before its Run": Play(workers=2, env={"DIES": "early"}),
    "no Run, and one is killed": Play(workers=2, program=NO_RUN_DIES),
    "two at once, and then all": Play(
        faults=(*(kill("reduced", n, 4) for n in (0, 1)), *(kill("applied", n, 10) for n in (2, 3, 4))),
    ),
    "all at once, saved": Play(
        workers=2, backend="gloo", faults=(kill("optimizer", 0, 10), kill("optimizer", 1, 10)),
        env={"KEPT": "kept"}, options=("--checkpoint-every", "4"),
    ),
    "between steps": Play(
        workers=2, backend="gloo", env={"KEPT": "kept"},
        faults=(kill("evaluating", 1, 2), kill("logging", 0, 5), kill("compared", 2, 9), kill("ending", 3)),
    ),
    "in a checkpoint": Play(
        workers=2, env={"KEPT": "kept"}, options=("--checkpoint-every", "2"),
        faults=(kill("copy", 0), kill("write", 1), kill("rename", 2), kill("verify", 3), kill("prune", 4)),
    ),
    "in the last checkpoint": Play(
        workers=2, env={"KEPT": "kept"}, options=("--checkpoint-every", "1000"), faults=(kill("write", 0),),
    ),
    "stopped": Play(
        faults=(kill("forward", 1, 3, signal=int(signal.SIGSTOP)),), options=("--stall-s", "1"), meddle=cont_when_lost
    ),
    "scaled": Play(
        workers=1, options=("--max", "3"), meddle=scale_up_and_down, env={"PAUSES": "2 12"}
    ),
    "raises once": Play(workers=2, env={"RAISES": "once"}),
    "raises always": Play(workers=2, env={"RAISES": "always"}),
    "raises after its Run": Play(workers=2, env={"RAISES": "after"}),
    "terminated": Play(workers=2, env={"KEPT": "kept", "PAUSES": "7"}, meddle=terminate, again=True),
    "launcher killed": Play(workers=2, env={"PAUSES": "7"}, meddle=kill_launcher),
    "no Run": Play(workers=2, program=NO_RUN),
    "two Runs": Play(workers=2, program=TWO_RUNS),
    "SyncBatchNorm": Play(workers=2, program=SYNCED),
    "a step behind": Play(env={"SCENE": "behind", "CHECK": "1000"}),
    **{
        f"a step behind, and the source is lost, {backend}": Play(
            backend=backend, env={"SCENE": "orphan", "CHECK": "1000"}
        )
        for backend in ("shm", "gloo")
    },
    "no route for a moment": Play(env={"SCENE": "route"}),
    "only the newcomer has the state": Play(workers=2, env={"SCENE": "successor"}),
    **{
        f"all in backward, {backend}": Play(workers=2, backend=backend, env={"SCENE": "backward"})
        for backend in ("shm", "gloo")
    },
    "watched": Play(workers=2, program=WATCHED, faults=(kill("applied", 1, 60),)),
    **{
        f"sharded, {backend}": Play(
            workers=4, backend=backend, env={"SHARDED": "yes", "KEPT": "kept"}, options=("--checkpoint-every", "5"),
            faults=(  # 3 has no copy of the part of 1, and 1 none of that of 3
                kill("weights", 1, 2), kill("moving-state", 3, nth=2), kill("optimizer", 2, 6), kill("weights", 0, 10),
                kill("applied", 4, 13), kill("backward", 5, 16),
            ),
        )
        for backend in ("shm", "gloo")
    },
    "sharded without copies": Play(
        env={"SHARDED": "yes", "KEPT": "kept", "REDUNDANCY": "0"}, options=("--checkpoint-every", "4"),
        faults=(kill("reduced", 1, 10),),
    ),
    "sharded without copies, scaled": Play(
        workers=1, options=("--max", "3"), meddle=scale_up_and_down,
        env={"PAUSES": "2 12", "SHARDED": "yes", "REDUNDANCY": "0"},
    ),
    "sharded, and only the newcomer has the weights": Play(
        workers=2, env={"SCENE": "successor", "SHARDED": "yes", "KEPT": "kept"}, options=("--checkpoint-every", "1"),
    ),
    "sharded, a step behind": Play(env={"SCENE": "behind", "CHECK": "1000", "SHARDED": "yes"}),
    "sharded, on other hosts": Play(
        workers=4, backend="gloo", env={"SHARDED": "yes", "KEPT": "kept", "APART": "yes"},
        options=("--checkpoint-every", "5"),
        faults=(
            kill("weights", 1, 2), kill("moving-state", 3, nth=2), kill("reduced", 2, 6), kill("weights", 0, 10),
            kill("applied", 4, 13), kill("exchange", 5, 16),
        ),
    ),
    **{
        f"sharded, on other hosts, {scene}": Play(
            backend="gloo", env={"SCENE": scene, "CHECK": "1000", "SHARDED": "yes", "APART": "yes"}
        )
        for scene in ("behind", "orphan")
    },
    "sharded, scaled": Play(
        workers=1, options=("--max", "3"), meddle=scale_up_and_down, env={"PAUSES": "2 12", "SHARDED": "yes"}
    ),
    "sharded, and both copies are lost": Play(
        workers=4, env={"SHARDED": "yes", "KEPT": "kept", "SCENE": "both"}, options=("--checkpoint-every", "4"),
    ),
    "freezes layers, undisturbed": Play(workers=0, program=FREEZES),
    **{
        f"freezes layers, killed before, {at}": Play(workers=2, program=FREEZES, faults=(kill(at, 1, 6),))
        for at in ("optimizer", "applied")
    },
    "freezes layers, sharded, killed before": Play(
        workers=2, program=FREEZES, faults=(kill("weights", 1, 6),), env={"SHARDED": "yes"}
    ),
    **{
        f"freezes layers, all killed{', sharded' * bool(env)}": Play(
            workers=2, program=FREEZES, faults=(kill("optimizer", 0, 6), kill("optimizer", 1, 6)),
            env={"KEPT": "kept", **env}, options=("--checkpoint-every", "2"),
        )
        for env in ({}, {"SHARDED": "yes"})
    },
    "changes, undisturbed": Play(workers=0, program=CHANGES),
    "changes, and one joins": Play(workers=2, program=CHANGES, faults=(kill("reduced", 1, 3),), env={"JOINS": "yes"}),
    "changes, and one is killed": Play(workers=3, program=CHANGES, faults=(kill("evaluating", 1, 9),)),
    "changes, and all are killed": Play(
        workers=2, program=CHANGES, faults=(kill("reduced", 0, 4), kill("reduced", 1, 4)), env={"KEPT": "kept"},
        options=("--checkpoint-every", "1000"),
    ),
    "in the midst of a step": Play(env={"SCENE": "midst", "CHECK": "1000", "WHOLE": "1 2 3"}),
}  # fmt: skip


OTHERS = (
    "undisturbed", "raises always", "raises after its Run", "terminated", "launcher killed", "no Run", "two Runs",
    "no Run, and one is killed", "SyncBatchNorm", "watched",
)  # fmt: skip
FREEZE = [name for name, play in PLAYS.items() if play.program == FREEZES and play.workers]
CHANGE = [name for name, play in PLAYS.items() if play.program == CHANGES and play.workers]
ENDS_WELL = [name for name in PLAYS if name not in OTHERS and PLAYS[name].program not in (FREEZES, CHANGES)]
SLOW = (
    "in a step, shm", "in a step, gloo", "all at once, saved", "while they gather, shm", "the source, shm",
    "the source, gloo", "killed before its Run", "in a checkpoint", "between steps", "raises once",
    "raises after its Run", "two Runs", "a step behind", "all in backward, shm", "all in backward, gloo",
    "in the midst of a step", "a step behind, and the source is lost, shm",
    "a step behind, and the source is lost, gloo", "only the newcomer has the state", "while they gather, gloo",
    "two at once, and then all", "the source, and no other has a state", "no route for a moment",
    "in the last checkpoint", "stopped", "no Run", "watched", "scaled", "SyncBatchNorm", "sharded, gloo",
    "sharded, scaled", "sharded, a step behind", "sharded, on other hosts, orphan", "sharded without copies",
    "sharded without copies, scaled",
    "sharded, and only the newcomer has the weights",
)  # fmt: skip
Shows = dict[str, "Future[Show]"]


@pytest.fixture(scope="module")
def shows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shows]:
    """Of the plays that the chosen tests ask for: all are begun at once, and AT_ONCE go on at a time."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [
        "undisturbed",
        "freezes layers, undisturbed",
        "changes, undisturbed",
        *dict.fromkeys(one["show"] for one in params if one.get("show") in PLAYS),
    ]
    root = tmp_path_factory.mktemp("recovery")

    def begin(number: int, play: Play) -> Show:
        show = perform(root / str(number), play)
        if play.again:
            show.again = perform(root / str(number), Play(play.workers, play.backend, env={"KEPT": "kept"}))
        return show

    pool = ThreadPoolExecutor(AT_ONCE)
    yield {name: pool.submit(begin, number, PLAYS[name]) for number, name in enumerate(names)}
    pool.shutdown(cancel_futures=True)
    for pid in processes_of(root):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def undisturbed(shows: Shows) -> str:
    show = shows["undisturbed"].result()
    assert show.status == 0, show.text
    (digest,) = show.digests
    return digest


@pytest.fixture
def show(request: pytest.FixtureRequest, shows: Shows) -> Show:
    return shows[request.param].result()


def of(*names: str) -> Any:
    """Decorates a test of these plays."""
    plays = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]
    return pytest.mark.parametrize("show", plays, indirect=True)


# ---- the tests -------------------------------------------------------------------------------------------------------


@of(*ENDS_WELL)
def test_the_digest_is_that_of_the_undisturbed_run(show: Show, undisturbed: str) -> None:
    assert show.status == 0, show.text
    assert set(show.digests) == {undisturbed}, show.text
    assert len(show.digests) >= show.sizes[-1], show.text


@of(*FREEZE)
def test_layers_that_are_frozen_and_trained_again_have_the_bits_of_the_undisturbed_run(
    show: Show, shows: Shows
) -> None:
    """A worker is lost when the program has just frozen a layer, or all are, after it has begun to train another."""
    undisturbed = shows["freezes layers, undisturbed"].result()
    assert undisturbed.status == 0, undisturbed.text
    assert show.status == 0, show.text
    assert set(show.digests) == set(undisturbed.digests), show.text
    assert show.lost, show.text


@of(*CHANGE)
def test_what_a_loop_changes_between_two_steps_has_the_bits_of_the_undisturbed_run(show: Show, shows: Shows) -> None:
    """What is trained, behind a step and before one, and the learning rate after the program has asked to save."""
    undisturbed = shows["changes, undisturbed"].result()
    assert undisturbed.status == 0, undisturbed.text
    assert show.status == 0, show.text
    assert set(show.digests) == set(undisturbed.digests), show.text
    assert set(show.lost.values()) == {KILLED}, show.text  # no other worker failed


def test_faults_also_hit_a_run_that_is_not_elastic(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FREEZES.format(tests=str(Path(__file__).parent)))
    faults = [{"at": "optimizer", "step": 4, "rank": 0}]
    status, _ = run_program(tmp_path / "program.py", LOCKSTEP_FAULTS=json.dumps(faults))
    assert status == 128 + signal.SIGKILL


@of("no route for a moment")
def test_a_generation_that_cannot_be_formed_is_left(show: Show) -> None:
    assert "generation 2 could not be formed, and is left: no route to the others" in show.err, show.text


@of("only the newcomer has the state")
def test_the_newcomer_goes_on_where_the_others_were(show: Show) -> None:
    """There is no checkpoint: without the state it would begin at step 0."""
    assert show.steps_of(2)[0][0] >= 2, show.text


@of(*(name for name in ENDS_WELL if not name.startswith("raises")))
def test_no_worker_fails_because_another_was_lost(show: Show, request: pytest.FixtureRequest) -> None:
    """The run would end well all the same: a worker that fails is replaced, too."""
    play, lost = PLAYS[request.node.callspec.params["show"]], show.lost
    assert set(lost.values()) <= {KILLED}, show.text
    for worker in lost.keys() - play.victims:  # it came when it was too late
        assert show.steps_of(int(worker.removeprefix("h0."))) == [], show.text


@of(*(name for name in ENDS_WELL if PLAYS[name].victims))
def test_all_who_should_die_did_and_were_replaced(show: Show, request: pytest.FixtureRequest) -> None:
    play = PLAYS[request.node.callspec.params["show"]]
    lost = show.lost
    assert {worker: lost.get(worker) for worker in play.victims} == dict.fromkeys(play.victims, KILLED), show.text
    assert len(show.events("started")) >= play.workers + len(play.victims)
    if "WHOLE" not in play.env:  # those who are left wait for the new ones
        assert play.workers in show.sizes[-2:], show.text  # the very last one may have lost a worker at the end


@pytest.mark.slow
@of("watched")
def test_a_newcomer_looks_at_the_steps_that_the_others_look_at(show: Show) -> None:
    """Or they would not hear how long each of them waited: `Note [Steps that are timed]`."""
    assert show.status == 0, show.text
    said = re.findall(r"^\[worker (\d+)\] step (\d+) (awake|asleep)$", show.out, re.MULTILINE)
    old, new = ({int(step): how for worker, step, how in said if worker == one} for one in "02")
    assert max(new, default=0) == 299, show.text
    assert {step: old[step] for step in new} == new, show.text
    assert set(new.values()) == {"awake", "asleep"}, show.text


@of("two at once, and then all")
def test_without_a_checkpoint_it_begins_anew(show: Show) -> None:
    for worker in (5, 6, 7):
        assert [step for step, _ in show.steps_of(worker)] == list(range(24)), show.text
    assert 1 in show.sizes  # who was left after the first two


@pytest.mark.slow
@of("all at once, saved")
def test_with_a_checkpoint_it_goes_on_from_there(show: Show) -> None:
    for worker in (2, 3):
        assert [step for step, _ in show.steps_of(worker)] == list(range(8, 24)), show.text
    command = [sys.executable, "-m", "lockstep", "ledger", str(show.folder / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed 1 times: proven" in done.stdout


@of("in a step, shm", "in a step, gloo", "the source, shm", "the source, gloo", "sharded, shm", "sharded, gloo")
def test_those_who_are_left_go_on_where_they_were(show: Show) -> None:
    """No worker begins anew: every step was begun by a newcomer at the latest where the others were."""
    workers = range(len(show.events("started")))
    firsts = [show.steps_of(worker)[0][0] for worker in workers if show.steps_of(worker)]
    assert firsts.count(0) == show.sizes[0], show.text
    for worker in workers:
        steps = [step for step, _ in show.steps_of(worker)]
        assert steps == sorted(set(steps)), show.text  # none twice, none left out
        assert steps == list(range(steps[0], steps[-1] + 1)) if steps else True


@of("in a checkpoint")
def test_killed_writers_leave_whole_checkpoints_only(show: Show) -> None:
    folder = show.folder / "kept" / "checkpoints"
    assert sorted(os.listdir(folder)) == ["step-000000022", "step-000000024"], show.text
    found = CheckpointStore(folder.parent).newest()
    assert found is not None
    assert (found.step, found.skipped) == (24, ())


@of("between steps")
def test_figures_are_written_once(show: Show) -> None:
    lines = [json.loads(line) for line in (show.folder / "kept" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(3, 25, 3))


@of("stopped")
def test_a_worker_that_is_stopped_is_given_up(show: Show) -> None:
    assert re.search(r"worker 1 \(pid \d+\) is killed: it gave no sign of life for \d+\.\d s", show.err), show.text
    assert show.sizes == [3, 2, 3]  # and nothing happened when it was continued


@of("scaled")
def test_workers_are_added_and_sent_home(show: Show) -> None:
    assert show.sizes[0] == 1
    assert show.sizes[-1] == 2
    assert 3 in show.sizes
    assert show.lost == {}, show.text
    assert {event["worker"]: event["code"] for event in show.events("ended")} == {f"h0.{n}": 0 for n in range(3)}
    assert [size for _, size in show.steps_of(0)][-1] == 2


@of("raises once")
def test_a_worker_that_fails_once_is_replaced(show: Show) -> None:
    assert show.lost == {"h0.1": 1}, show.text
    assert "worker 1 (pid" in show.err
    assert "was lost: exit status 1: ArithmeticError: only once" in show.err


@of("raises always")
def test_a_program_that_always_fails_ends_soon_and_says_why(show: Show) -> None:
    assert show.status == 1, show.text
    assert "giving up: 2 workers failed with the same error, and no step was made in between" in show.err
    last, card = split_card(show.err)
    assert "| what   ArithmeticError: always\n" in card
    assert re.fullmatch(r"\[worker \d\] ArithmeticError: always", last[-1]), show.text
    assert any(re.fullmatch(r"\[worker \d\] Traceback \(most recent call last\):", line) for line in last[-10:])
    assert show.digests == []
    assert len(show.events("started")) <= 4


@of("raises after its Run")
def test_a_program_that_fails_after_its_run_has_failed(show: Show, undisturbed: str) -> None:
    assert show.status == 1, show.text
    assert show.digests == [undisturbed] * 2
    lines, card = split_card(show.err)
    assert lines[-1].endswith("OSError: disk full"), show.text
    assert "what   OSError: disk full" in card, show.text
    assert len(show.events("started")) == 2  # it is not done again


@pytest.mark.slow  # tests/test_drain.py has a shorter one, which does not resume
@of("terminated")
def test_sigterm_saves_and_another_run_goes_on(show: Show, undisturbed: str) -> None:
    assert show.status == PREEMPTED, show.text
    assert show.digests != [undisturbed] * 2
    assert show.again is not None
    assert show.again.status == 0, show.again.text
    assert show.again.digests == [undisturbed] * 2, show.again.text
    first, second = (one.steps_of(0) for one in (show, show.again))
    assert [step for step, _ in first + second] == list(range(24))
    assert first[-1][0] in (7, 8)


@of("launcher killed")
def test_no_worker_outlives_the_launcher(show: Show) -> None:
    assert show.status == KILLED, show.text
    assert show.digests == []
    wait_for(lambda: not processes_of(show.folder), "workers and template to be gone")


@of("no Run")
def test_a_program_without_a_run_is_run_once_by_each(show: Show) -> None:
    assert show.status == 0, show.text
    assert sorted(show.out.splitlines()) == ["[worker 0] hello 0", "[worker 1] hello 1"]


@pytest.mark.slow
@of("no Run, and one is killed")
def test_a_program_without_a_run_has_failed_if_one_was_killed(show: Show) -> None:
    assert show.status == 128 + signal.SIGKILL, show.text
    assert sorted(show.out.splitlines()) == ["[worker 0] hello 0", "[worker 1] hello 1"]
    assert "worker 0 of 2 failed first: killed by SIGKILL" in show.err


@of("two Runs")
def test_a_second_run_is_refused(show: Show) -> None:
    assert show.status == 1, show.text
    assert sorted(show.out.splitlines()) == ["[worker 0] hello 0", "[worker 1] hello 0"]
    lines, _ = split_card(show.err)
    assert "LockstepError: a program has one Run if it is started with --min or --max" in lines[-1]


@of("SyncBatchNorm")
def test_what_depends_on_the_number_of_workers_is_refused(show: Show) -> None:
    assert show.status == 1, show.text
    lines, _ = split_card(show.err)
    assert "1 is a SyncBatchNorm: what it computes depends on the number of workers" in lines[-1]


@of("in the last checkpoint", "in a checkpoint")
def test_the_last_checkpoint_is_there(show: Show) -> None:
    """The worker that was writing it was lost, and nothing else was ever saved."""
    assert "step-000000024" in os.listdir(show.folder / "kept" / "checkpoints"), show.text


@of("sharded, and both copies are lost")
def test_a_part_of_which_both_copies_are_lost_is_read_from_the_checkpoint(show: Show) -> None:
    assert "no worker has the optimiser's state of 0.weight any more: those that kept it are lost" in show.err, (
        show.text
    )
    assert "All workers start again, from the last checkpoint if there is one" in show.err, show.text
    assert [event["why"].count("those that kept it are lost") for event in show.events("goes back")] == [1], show.text
    for worker in (4, 5):  # they had started when that was found, and have not been killed
        assert [step for step, _ in show.steps_of(worker)] == list(range(8, 24)), show.text


@of("a step behind", "sharded, a step behind", "in the midst of a step")
def test_the_scene_was_as_it_should_be(show: Show, request: pytest.FixtureRequest) -> None:
    """Or the digest would prove nothing."""
    second, *_ = (event for event in show.events("generation") if "h0.2 was lost" in event["why"])
    at_top = second["position"] == [5, 0]  # else the one that is ahead has got its next batch, and no other can join
    in_exchange = second["position"] == [4, 2] and "sharded" in request.node.callspec.params["show"]
    assert at_top or in_exchange or second["position"] == [5, 1], show.text
    if "a step behind" in request.node.callspec.params["show"]:
        assert second["members"] == ["h0.0", "h0.1"], show.text
    else:
        assert second["members"] == (["h0.0", "h0.3"] if at_top else ["h0.0"]), show.text
        assert show.steps_of(3)[0][0] == (5 if at_top else 6)


def test_nothing_is_left_behind(shows: Shows) -> None:
    done = [future.result() for future in shows.values()]
    root = done[0].folder.parent
    wait_for(lambda: not processes_of(root), "all processes of the runs to be gone")
    pids = {str(event["pid"]) for show in done for event in events_in(show.folder) if event["event"] == "started"}
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    assert [name for name in names if pids & set(re.findall(r"\d+", name))] == []
