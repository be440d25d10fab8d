"""The benchmarks run, through the command line, with real workers. How fast anything is, is not tested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.bench import command as bench
from lockstep.bench.rounds import Estimate, estimate, paired_ratio, rotated_order, slowest

ARMS = ("none", "torch", "lockstep")
STEP_ARMS = (*ARMS, "lockstep@shm")

CLASSES = """
import os, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Torch

class Raises(Torch):
    def forward(self, *inputs):
        if dist.get_rank(self.process_group) == 1:
            raise ArithmeticError("one and one is three")
        return super().forward(*inputs)

class Hangs(Torch):
    def forward(self, *inputs):
        with open(os.environ["HANGING"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path: Path):
    (tmp_path / "classes.py").write_text(CLASSES)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HANGING": str(tmp_path / "hanging")}
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lockstep.bench.command", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_step_measures_every_arm_on_two_workers(start, tmp_path):
    found = tmp_path / "found.json"
    process = start("step", "--quick", "--models", "tiny", "--rounds", "3", "--json", str(found))
    table, progress = process.communicate(timeout=300)
    assert process.returncode == 0, progress
    assert "round 3 of 3" in progress
    assert "hidden" in table
    record = json.loads(found.read_text())
    assert record["settings"]["workers"] == 2
    arms = record["models"]["tiny"]["arms"]
    assert tuple(arms) == STEP_ARMS
    for arm in STEP_ARMS:
        assert arm in table
        assert len(arms[arm]["rounds_ms"]) == 3
        assert min(arms[arm]["rounds_ms"]) > 0
    for arm in ("torch", "lockstep"):
        assert arms[arm]["alone_ms"]["median"] > 0
        assert sum(arms[arm]["bucket_bytes"]) == 4 * record["models"]["tiny"]["parameters"]
        assert arms[arm]["replicas_equal"]
    assert arms["lockstep"]["weights_equal_torch"]
    assert arms["lockstep@shm"]["weights_equal_torch"]  # with two workers there is but one order


@pytest.mark.slow
def test_wrapper_measures_every_arm_in_a_world_of_one(tmp_path, start):
    found = tmp_path / "found.json"
    process = start("wrapper", "--device", "cpu", "--rounds", "1", "--steps", "1", "--json", str(found))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for batch in json.loads(found.read_text())["batches"].values():
        assert tuple(batch) == ARMS
        assert all(arm["step_ms"]["median"] > 0 for arm in batch.values())


@pytest.mark.slow
def test_the_worker_that_failed_is_named(start):
    process = start("step", "--models", "tiny", "--arms", "none,classes.Raises")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "worker 1 of classes.Raises failed" in errors
    assert errors.rstrip().endswith("ArithmeticError: one and one is three")


@pytest.mark.slow
def test_no_worker_outlives_a_killed_parent(start, tmp_path):
    process = start("step", "--models", "tiny", "--arms", "classes.Hangs")
    hanging = tmp_path / "hanging"
    wait_until(lambda: hanging.exists() and len(hanging.read_text().split()) == 2)
    process.send_signal(signal.SIGKILL)
    workers = hanging.read_text().split()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def wait_until(condition, wait_s: float = 30) -> None:
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, f"not so within {wait_s} s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["stop"], "stop"),
        (["step", "--models", "mlp,rnn"], "'rnn' is not one of small, mlp, cnn, cnn-small, gpt"),
        (["step", "--models", "mlp,mlp"], "'mlp' is named twice"),
        (["step", "--workers", "0"], "'0' is not a positive number"),
        (["step", "--rounds", "many"], "'many' is not a positive number"),
        (["step", "--arms", "none,fast"], "arm 'fast': cannot load fast"),
        (["step", "--arms", "none,lockstep@tcp"], "arm 'lockstep@tcp': 'tcp' is not a backend"),
        (["step", "--arms", "torch.nn.Missing"], "arm 'torch.nn.Missing': cannot load"),
        (["step", "--json", "no/such/folder/found.json"], "no/such/folder does not exist"),
        (["step", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_arguments(arguments, says, capsys):
    with pytest.raises(SystemExit) as ending:
        bench.main(arguments)
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hosts", "2", "--workers", "3", "--backends", "gloo"], "--workers 3 cannot be distributed evenly"),
        (["--backends", "hierarchy"], "--backends hierarchy needs --hosts"),
        (["--hosts", "2"], "--backends shm is for one host"),
    ],
)
def test_wrong_hosts(arguments, says, capsys):
    assert bench.main(["exact", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_every_arm_is_first_equally_often():
    orders = [rotated_order("abc", number) for number in range(6)]
    assert sorted(order[0] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    assert all(sum(order.index(a) < order.index(b) for order in orders) == 3 for a, b in ("ab", "bc", "ac"))
    assert orders == [rotated_order("abc", number) for number in range(6, 12)]


def test_a_round_takes_as_long_as_its_slowest_worker():
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 4.0]}]) == {"a": [2.0, 5.0]}


def test_estimate_of_a_median():
    assert estimate([3.0]) == Estimate(3.0, 3.0, 3.0)
    assert estimate([5.0, 1.0, 3.0]) == Estimate(3.0, 1.0, 5.0)
    # Of 21 values, the 6th smallest to the 6th largest hold the median in 97.3 % of all runs; the 7th only in 92.2 %.
    assert estimate([float(value) for value in range(1, 22)]) == Estimate(11.0, 6.0, 16.0)


def test_ratios_are_taken_within_a_round():
    # Both arms get ten times slower in the second round; the ratio stays what it was.
    assert paired_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == Estimate(2.0, 2.0, 2.0)
