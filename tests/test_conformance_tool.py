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

TOOLS = Path(__file__).resolve().parent.parent / "conformance"
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

BACKENDS = """
import os, time
import torch, torch.distributed as dist

class Group(dist.ProcessGroup):
    '''Hands everything on to Gloo; what the tests below do not need is left out.'''
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensors, opts):
        return self.gloo.broadcast(tensors, opts)

    def allreduce(self, tensors, opts):
        return self.gloo.allreduce(tensors, opts)

    def allgather(self, outputs, inputs, opts):
        return self.gloo.allgather(outputs, inputs, opts)

class AddsOne(Group):
    def allreduce(self, tensors, opts):
        work = super().allreduce(tensors, opts)
        work.wait()
        tensors[0] += 1
        return work

class Hangs(Group):
    def allreduce(self, tensors, opts):
        with open(os.environ["HANGING"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(1000)

for name, cls in {"fair": Group, "wrong": AddsOne, "hangs": Hangs}.items():
    dist.Backend.register_backend(name, lambda *args, cls=cls: cls(*args), devices=["cpu"])
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts a tool with some classes and backends of our own within reach."""
    (tmp_path / "classes.py").write_text(CLASSES)
    (tmp_path / "backends.py").write_text(BACKENDS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HANGING": str(tmp_path / "hanging")}
    started = []

    def start(*arguments: str, tool: str = "run.py") -> subprocess.Popen[str]:
        command = [sys.executable, str(TOOLS / tool), *arguments]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def finish(tool: subprocess.Popen[str], *, status: int) -> str:
    output, _ = tool.communicate(timeout=300)
    assert tool.returncode == status, output
    return output


@pytest.mark.slow
def test_torch_class_passes_and_a_test_without_an_object_does_not_count(start, tmp_path):
    found = tmp_path / "found.json"
    tests = f"{NO_SYNC}$|test_ddp_namedtuple|test_dump_DDP"
    output = finish(start("--class", "torch", "--only", tests, "--json", str(found)), status=0)
    assert "passes 2 of 3" in output
    outcomes = json.loads(found.read_text())["classes"]["torch"]
    assert outcomes[NO_SYNC]["kind"] == outcomes["test_ddp_namedtuple"]["kind"] == "pass"
    setting = {"world_size": 2, "known_as": "gloo", "one_gpu": False}
    assert outcomes[NO_SYNC]["setting"] == {"stand_in": False, **setting}
    assert outcomes["test_ddp_namedtuple"]["setting"] == {"stand_in": True, **setting}
    assert outcomes[NO_SYNC]["built"] == 2
    assert "without building" in outcomes["test_dump_DDP_relevant_env_vars"]["reason"]


@pytest.mark.slow
def test_a_class_that_ignores_no_sync_is_a_difference(start):
    tests = f"{NO_SYNC}$|test_DistributedDataParallelCPU$"
    output = finish(start("--class", "classes.IgnoresNoSync", "--only", tests), status=1)
    assert "1 differ" in output
    assert f"{NO_SYNC}\n    torch: pass   classes.IgnoresNoSync: fail\n    AssertionError" in output


@pytest.mark.slow
def test_a_hang_ends_at_the_deadline(start):
    output = finish(start("--class", "classes.Hangs", "--only", f"{NO_SYNC}$", "--timeout-s", "2", "-v"), status=1)
    assert "in no_sync" in output  # where it hangs
    assert f"{NO_SYNC}\n    torch: pass   classes.Hangs: timeout" in output


LEFT_HANGING = {
    "run.py": ("--class", "classes.Hangs", "--only", f"{NO_SYNC}$"),
    "backend.py": ("--quick", "--backend", "backends.hangs", "--only", "all_reduce_sum_complex$"),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", LEFT_HANGING)
def test_no_process_is_left_behind(start, tmp_path, name, number):
    tool = start(*LEFT_HANGING[name], tool=name)
    hanging = tmp_path / "hanging"
    wait_until(lambda: hanging.exists() and len(hanging.read_text().split()) >= 2)
    ranks = [int(pid) for pid in hanging.read_text().split()]
    tool.send_signal(number)
    tool.communicate(timeout=120)
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def wait_until(condition, wait_s: float = 80) -> None:
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, f"not so within {wait_s} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_class_that_does_not_exist_is_a_wrong_argument(start):
    assert "cannot load classes.Missing" in finish(start("--class", "classes.Missing"), status=2)


# ------------------------------------------------------------------------------------------------- backend.py


@pytest.mark.slow
def test_gloo_passes_as_itself_and_taken_for_others_and_its_groups_are_counted(start, tmp_path):
    found = tmp_path / "found.json"
    tests = "test_(all_reduce_sum_complex|all_to_all_single_equal_split|reduce_scatter_v_cuda|broadcast_group)$"
    output = finish(start("--backend", "gloo", "--only", tests, "--json", str(found), tool="backend.py"), status=0)
    assert "gloo passes 11 of 11 cases" in output
    outcomes = json.loads(found.read_text())["backends"]["gloo"]
    assert outcomes["test_all_reduce_sum_complex (cpu x2)"]["built"] == 2
    assert outcomes["test_all_to_all_single_equal_split (cpu x4 mpi)"]["built"] == 4
    assert outcomes["test_reduce_scatter_v_cuda (stand-in x3 nccl)"]["kind"] == "pass"
    assert outcomes["test_broadcast_group (cpu x3)"]["built"] == 5  # three ranks, and two of them in a subgroup


@pytest.mark.slow
def test_a_backend_that_only_hands_on_passes_what_gloo_passes(start):
    tests = "test_(all_reduce_sum_complex|get_backend|broadcast|all_gather)$"
    output = finish(start("--backend", "backends.fair", "--only", tests, tool="backend.py"), status=0)
    assert "collectives         4             12      12      12\n" in output
    assert "0 differ" in output


@pytest.mark.slow
def test_a_backend_that_adds_wrongly_is_a_difference(start):
    tests = "test_(all_reduce_sum|all_reduce_values)$"
    output = finish(start("--quick", "--backend", "backends.wrong", "--only", tests, tool="backend.py"), status=1)
    assert "1 differ" in output  # PyTorch's own test looks at no value
    assert "test_all_reduce_values (cpu x3)\n    gloo: pass   wrong: fail\n    AssertionError" in output


@pytest.mark.slow
def test_a_collective_that_hangs_ends_at_the_deadline(start):
    options = ("--quick", "--backend", "backends.hangs", "--only", "all_reduce_sum_complex$", "--timeout-s", "2", "-v")
    output = finish(start(*options, tool="backend.py"), status=1)
    assert "in allreduce" in output  # where it hangs
    assert "gloo: pass   hangs: timeout" in output


@pytest.mark.slow
def test_a_backend_that_is_not_registered_is_a_wrong_argument(start):
    assert "torch.distributed knows" in finish(start("--backend", "backends.missing", tool="backend.py"), status=2)
    assert "cannot import nowhere" in finish(start("--backend", "nowhere.missing", tool="backend.py"), status=2)
