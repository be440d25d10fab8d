"""Real runs with a known flaw: the times of a report add up, and the flaw comes out on top."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.measure.rig import Host, Rig, RigError
from lockstep.measure.story import Story, tell
from lockstep.measure.timeline import read_trace

DEADLINE_S = 90
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
        with Rig(hosts=1, mbit=1000):
            return True
    except RigError:
        return False


def on_hosts(hosts: Sequence[Host], folder: Path, arguments: Sequence[str]) -> None:
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


def check_that_times_add_up(story: Story, folder: Path, steps: int) -> None:
    assert [usage.rank for usage in story.usages] == [0, 1]
    for usage in story.usages:
        took_s = json.loads((folder / f"took{usage.rank}.json").read_text())  # measured by the program itself
        assert usage.steps == steps
        assert sum(usage.phases.values()) == pytest.approx(took_s, rel=0.03, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["worker", "data"])
def test_what_was_planted_is_on_top(planted: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    here(tmp_path, [planted, "100", "32"])
    story = tell(read_trace(tmp_path / "run", now_s=time.time()))
    check_that_times_add_up(story, tmp_path, 100)
    assert story.causes[0].kind == planted, story.causes
    if planted == "worker":
        assert "rank 1" in story.causes[0].sentence
        assert "compute" in story.causes[0].sentence


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")
def test_a_slow_network_is_on_top(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with Rig(hosts=2, mbit=100) as rig:
        on_hosts(rig.hosts, tmp_path, ["network", "40", "256"])
    story = tell(read_trace(tmp_path / "run", now_s=time.time()))
    check_that_times_add_up(story, tmp_path, 40)
    assert story.causes[0].kind == "communication", story.causes
