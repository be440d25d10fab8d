"""Real runs with a known flaw: the times of a report add up, and the flaw comes out on top."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.bench.network_namespaces import NamespaceError, NamespaceHost, VirtualHosts
from lockstep.report.summary import RunSummary, summarize
from lockstep.report.trace_reader import read_trace

DEADLINE_S = 300
PROGRAM = """
import json, sys, time, torch, lockstep
from torch import nn
from torch.utils.data import Dataset

planted, steps, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Samples(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        if planted == "data":
            time.sleep(0.003)
        return torch.full((width,), index / 4096)

def loss(model, x):
    if planted == "worker" and run.world.rank == 1:
        time.sleep(0.010)
    return model(x).square().sum(), len(x)

with lockstep.Run("run", seed=1, device="cpu", progress=False, save_every="1h") as run:
    model = run.replicate(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = run.batches(Samples(), global_batch_size=16, shards=4, epochs=None)
    began_s = None
    for batch in run.train(batches, optimizer, steps=steps):
        began_s = began_s or time.monotonic()
        run.step(loss, batch)
    took_s = time.monotonic() - began_s
    with open(f"took{run.world.rank}.json", "w") as file:
        json.dump(took_s, file)
"""


def can_make_hosts() -> bool:
    try:
        with VirtualHosts(hosts=1, mbit=1000):
            return True
    except NamespaceError:
        return False


def on_hosts(hosts: Sequence[NamespaceHost], folder: Path, arguments: Sequence[str]) -> None:
    """One worker on each, started as a scheduler would."""
    processes = []
    for rank, host in enumerate(hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "link0"}
        env |= {"LOCKSTEP_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "train.py", *arguments]
        processes.append(subprocess.Popen(command, cwd=folder, env=os.environ | env, preexec_fn=host.enter))
    try:
        end_s = time.monotonic() + DEADLINE_S
        assert [process.wait(max(1.0, end_s - time.monotonic())) for process in processes] == [0] * len(hosts)
    finally:
        for process in processes:
            process.kill()


def here(folder: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--log-dir", "logs", "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]


def check_that_times_add_up(story: RunSummary, folder: Path, steps: int) -> None:
    assert [usage.rank for usage in story.usages] == [0, 1]
    for usage in story.usages:
        took_s = json.loads((folder / f"took{usage.rank}.json").read_text())  # measured by the program itself
        assert usage.steps == steps
        assert sum(usage.phases.values()) == pytest.approx(took_s, rel=0.03, abs=0.03)


# docs/run.md has the two lines in the loop.
LOGS = """
import time, mlflow, torch, wandb, lockstep
from torch.utils.data import TensorDataset

def loss(model, part):
    time.sleep(0.005)
    return model(part[0]).square().sum(), len(part[0])

with lockstep.Run("run", seed=1, device="cpu") as run:
    model = run.replicate(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = run.batches(TensorDataset(torch.ones(640, 4)), global_batch_size=16, shards=4, epochs=None)
    for batch in run.train(batches, optimizer, steps=60):
        result = run.step(loss, batch)
        metrics = run.log(loss=result.loss, half=0.5)
        run.on_main(lambda: (wandb.run or wandb.init(id="x", resume="allow")) and wandb.log(metrics, step=batch.number))
        run.on_main(lambda: mlflow.log_metrics(metrics, step=batch.number))
    run.log(accuracy=0.75)
"""
STAND_IN = """
import json, os

run = None

def init(id, resume):
    global run
    assert run is None
    run = object()
    return run

def {name}(metrics, step):
    with open("{module}.jsonl", "a") as file:
        print(json.dumps([os.getpid(), step, metrics["loss"]]), file=file)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that logs metrics and loses worker 1 in step 20: its folder, and what it wrote to the terminal."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "train.py").write_text(LOGS)
    for module, name in (("wandb", "log"), ("mlflow", "log_metrics")):
        (folder / f"{module}.py").write_text(STAND_IN.format(module=module, name=name))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "train.py"]
    env = os.environ | {"LOCKSTEP_FAULTS": json.dumps([{"at": "forward", "step": 20, "worker": "h0.1"}])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout + done.stderr


def test_a_worker_that_was_killed_is_among_the_events(killed: tuple[Path, str]) -> None:
    folder, _ = killed
    for place in ("run", "logs"):
        story = summarize(read_trace(folder / place, now_s=time.time()))
        told = [one.text for one in story.happenings if one.what in ("training", "worker lost", "worker started")]
        assert told[:2] == ["begins on 2 workers", "worker 1 was killed by SIGKILL"]
        assert "worker 2 was started in place of worker 1" in told
        # Who is missing is known only if it had written a line of its trace before it was killed.
        assert {"continues on 1 worker: without worker 1", "continues on 1 worker"} & set(told)
        assert {usage.worker for usage in story.usages} > {"worker 0"}
    command = [sys.executable, "-m", "lockstep", "report", "run"]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=True).stdout
    assert ": worker 1 was killed by SIGKILL\n" in text
    assert "accuracy 0.75 at step 60" in text
    assert not re.search(r"\bh0\.|\brank\b|`", text), text


def test_metrics_are_in_the_report_the_view_and_the_terminal(killed: tuple[Path, str]) -> None:
    folder, seen = killed
    curves = {curve.name: curve for curve in summarize(read_trace(folder / "run", now_s=time.time())).metrics}
    assert curves["accuracy"].points == ((60, 0.75),)
    assert curves["half"].points[-1] == (60, 0.5)
    assert len(curves["loss"].points) >= 2
    command = [sys.executable, "-m", "lockstep", "watch", "run", "--once"]
    now = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "accuracy 0.75" in now
    assert re.search(r"lockstep: step 60  accuracy 0.75$", seen, re.MULTILINE), seen
    assert len(re.findall(r"lockstep: where the time went: lockstep report run$", seen, re.MULTILINE)) == 1, seen


@pytest.mark.parametrize("module", ["wandb", "mlflow"])
def test_a_tracker_gets_every_step_once_from_one_worker(killed: tuple[Path, str], module: str) -> None:
    folder, _ = killed
    told = [json.loads(line) for line in (folder / f"{module}.jsonl").read_text().splitlines()]
    assert [step for _, step, _ in told] == list(range(60))
    assert len({pid for pid, _, _ in told}) == 1
    losses = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [loss for *_, loss in told] == [line["loss"] for line in losses if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["worker", "data"])
def test_what_was_planted_is_on_top(planted: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    here(tmp_path, [planted, "100", "32"])
    story = summarize(read_trace(tmp_path / "run", now_s=time.time()))
    check_that_times_add_up(story, tmp_path, 100)
    assert story.causes[0].kind == planted, story.causes
    if planted == "worker":
        assert "rank 1" in story.causes[0].sentence
        assert "compute" in story.causes[0].sentence


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")
def test_a_slow_network_is_on_top(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with VirtualHosts(hosts=2, mbit=100) as virtual:
        on_hosts(virtual.hosts, tmp_path, ["network", "40", "256"])
    story = summarize(read_trace(tmp_path / "run", now_s=time.time()))
    check_that_times_add_up(story, tmp_path, 40)
    assert story.causes[0].kind == "communication", story.causes
