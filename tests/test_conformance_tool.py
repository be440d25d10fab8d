"""The conformance tool itself: a tool that cannot turn red proves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "conformance" / "run.py"
NO_SYNC = "test_accumulate_gradients_no_sync"

CLASSES = """
import contextlib, os, time
from torch.nn.parallel import DistributedDataParallel as Torch

class IgnoresNoSync(Torch):
    @contextlib.contextmanager
    def no_sync(self):
        yield

class Hangs(Torch):
    def no_sync(self):
        with open(os.environ["HANGING"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts the tool with some classes of our own within reach."""
    (tmp_path / "classes.py").write_text(CLASSES)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HANGING": str(tmp_path / "hanging")}
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(TOOL), *arguments]
        tool = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(tool)
        return tool

    yield start
    for tool in started:
        tool.kill()
        tool.wait()


def finish(tool: subprocess.Popen[str], *, status: int) -> str:
    output, _ = tool.communicate(timeout=60)
    assert tool.returncode == status, output
    return output


def test_torch_class_passes_and_a_test_without_an_object_does_not_count(start, tmp_path):
    found = tmp_path / "found.json"
    tests = f"{NO_SYNC}$|test_ddp_namedtuple|test_dump_DDP"
    output = finish(start("--class", "torch", "--only", tests, "--json", str(found)), status=0)
    assert "passes 2 of 3" in output
    outcomes = json.loads(found.read_text())["classes"]["torch"]
    assert outcomes[NO_SYNC]["kind"] == outcomes["test_ddp_namedtuple"]["kind"] == "pass"
    assert outcomes[NO_SYNC]["setting"] == {"stand_in": False, "world_size": 2}
    assert outcomes["test_ddp_namedtuple"]["setting"] == {"stand_in": True, "world_size": 2}
    assert outcomes[NO_SYNC]["built"] == 2
    assert "without building" in outcomes["test_dump_DDP_relevant_env_vars"]["reason"]


def test_a_class_that_ignores_no_sync_is_a_difference(start):
    tests = f"{NO_SYNC}$|test_DistributedDataParallelCPU$"
    output = finish(start("--class", "classes.IgnoresNoSync", "--only", tests), status=1)
    assert "1 differ" in output
    assert f"{NO_SYNC}\n    torch: pass   classes.IgnoresNoSync: fail\n    AssertionError" in output


def test_a_hang_ends_at_the_deadline(start):
    output = finish(start("--class", "classes.Hangs", "--only", f"{NO_SYNC}$", "--timeout-s", "2", "-v"), status=1)
    assert "in no_sync" in output  # where it hangs
    assert f"{NO_SYNC}\n    torch: pass   classes.Hangs: timeout" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(start, tmp_path, number):
    tool = start("--class", "classes.Hangs", "--only", f"{NO_SYNC}$")
    hanging = tmp_path / "hanging"
    wait_until(lambda: hanging.exists() and len(hanging.read_text().split()) == 2)
    ranks = [int(pid) for pid in hanging.read_text().split()]
    tool.send_signal(number)
    tool.communicate(timeout=30)
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def wait_until(condition, wait_s: float = 30) -> None:
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, f"not so within {wait_s} s"
        time.sleep(0.05)


def test_a_class_that_does_not_exist_is_a_wrong_argument(start):
    assert "cannot load classes.Missing" in finish(start("--class", "classes.Missing"), status=2)
