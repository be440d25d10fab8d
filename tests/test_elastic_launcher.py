"""The launcher of an elastic run, where its surroundings are odd: a screen that does not read, a huge environment, logs
that cannot be written."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.launcher import output
from lockstep.launcher.parent_watch import unlink_nccl_files
from on_workers import run_program

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import lockstep

with lockstep.Run(seed=1, progress=False) as run:
    print("size", run.world.size, len(os.environ.get("HUGE0", "")), flush=True)
    for _ in range(int(os.environ.get("LINES", 0))):
        print("x" * 1000, flush=True)
    if os.environ.get("DIES") and run.world.rank == 1 and not Path("died").exists():
        Path("died").touch()
        while not Path("die").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if run.world.rank == 0:
        while os.environ.get("DIES") and not Path("go").exists():
            time.sleep(0.01)
    run.on_main(lambda: None)
    Path(f"done {run.world.rank}").touch()
"""


def launch(folder: Path, *, env: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    return subprocess.Popen(command, cwd=folder, env=dict(os.environ) | env, **more)


def wait_for(path: Path, *, within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    return path.exists()


@pytest.mark.slow
def test_no_worker_waits_for_a_screen_that_does_not_read(tmp_path: Path) -> None:
    """A paused `less`, say. Workers write more than all pipes hold, and still come to the end."""
    with launch(tmp_path, env={"LINES": "2000"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            assert wait_for(tmp_path / "done 0")
            assert wait_for(tmp_path / "done 1")
            assert launcher.stdout is not None
            said = launcher.stdout.read().decode()
            assert launcher.wait(30) == 0
        finally:
            launcher.kill()
    assert "the screen took nothing for a while; what is missing here is in the logs" in said
    assert (tmp_path / "logs" / "worker0.log").stat().st_size > 2000 * 1000


@pytest.mark.slow
def test_an_environment_that_is_larger_than_a_message(tmp_path: Path) -> None:
    huge = {f"HUGE{n}": "x" * 100_000 for n in range(5)}
    with launch(tmp_path, env=huge, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            said = launcher.communicate(timeout=300)[0].decode()
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert said.count("size 2 100000") == 2


@pytest.mark.slow
def test_a_worker_is_replaced_although_its_log_cannot_be_written(tmp_path: Path) -> None:
    with launch(tmp_path, env={"DIES": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            assert wait_for(tmp_path / "died")
            shutil.rmtree(tmp_path / "logs")
            (tmp_path / "die").touch()
            time.sleep(1.0)
            (tmp_path / "go").touch()
            said = launcher.communicate(timeout=300)[0].decode()
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert "worker 2 has no log: " in said


def test_a_screen_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    try:
        output.set_write_timeout(0.3)
        began_s = time.monotonic()
        for _ in range(50):
            output.write_all(theirs, b"y" * 10_000)
        assert 0.25 < time.monotonic() - began_s < 2.0
        first = os.read(ours, 1 << 20)
        assert set(first) == {ord("y")}
        output.write_all(theirs, b"again\n")
        assert os.read(ours, 1 << 20).endswith(b"what is missing here is in the logs\nagain\n")
    finally:
        output.clear_write_timeout()
        os.close(ours)
        os.close(theirs)


# ---- semaphores -----------------------------------------------------------------------------------------------------

# The semaphores that a process makes, as files.
NAMES = """
from multiprocessing import synchronize
names, make_name = [], synchronize.SemLock._make_name

def note_name():
    names.append(make_name())
    return names[-1]

synchronize.SemLock._make_name = staticmethod(note_name)

def files():
    return " ".join(f"/dev/shm/sem.{name[1:]}" for name in names)
"""

NAMED = (
    """
import multiprocessing, os, signal, sys, time
from pathlib import Path
"""
    + NAMES
    + """
held = [multiprocessing.get_context("spawn").Semaphore() for _ in range(3)]
Path(f"{os.environ['LOCAL_RANK']}.new").write_text(files())
Path(f"{os.environ['LOCAL_RANK']}.new").rename(os.environ["LOCAL_RANK"] + ".names")
end_s = time.monotonic() + 60
while not Path("die").exists() and time.monotonic() < end_s:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_a_worker_that_is_killed_leaves_no_semaphores(tmp_path: Path, victim: str) -> None:
    """Python's resource tracker, which would unlink them, is a child of the worker, and is killed with its group."""
    (tmp_path / "program.py").write_text(NAMED)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as launcher:
        try:
            for rank in range(2):
                assert wait_for(tmp_path / f"{rank}.names")
            names = [name for rank in range(2) for name in (tmp_path / f"{rank}.names").read_text().split()]
            assert len(names) == 6
            assert all(Path(name).exists() for name in names)
            if victim == "worker":
                (tmp_path / "die").touch()
                launcher.communicate(timeout=300)
            else:
                launcher.kill()
                launcher.communicate(timeout=300)
        finally:
            launcher.kill()
    end_s = time.monotonic() + 20
    while any(Path(name).exists() for name in names) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [name for name in names if Path(name).exists()] == []


def test_shared_memory_of_nccl_that_no_process_uses_is_removed() -> None:
    names = ("left", "opened", "mapped", "new", "before the run")
    paths = [Path(f"/dev/shm/nccl-test-{name}-{os.getpid()}") for name in names]
    _, opened, mapped, new, before = paths
    began_s = time.time() - 300
    try:
        for path in paths:
            path.write_bytes(b"x")
        with opened.open(), mapped.open("r+b") as file, mmap.mmap(file.fileno(), 1):
            for path in paths:
                made_s = time.time() if path == new else began_s - 10 if path == before else began_s + 10
                os.utime(path, (made_s, made_s))
            unlink_nccl_files(began_s)
            assert [path.exists() for path in paths] == [False, True, True, True, True]
        unlink_nccl_files(began_s)
        assert [path for path in paths if path.exists()] == [new, before]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


LOADED = (
    """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
"""
    + NAMES
    + """
if __name__ == "__main__":
    import lockstep
    from runs import classify, data

    torch.multiprocessing.set_start_method("{method}")
    with lockstep.Run(seed=7, progress=False, device="cpu") as run:
        model = run.replicate(torch.nn.Linear(16, 10))
        batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=4, num_workers=1)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            if batch.number == 3 and run.world.rank == 1 and not Path("names").exists():
                Path("names").write_text(files())
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(classify, batch)
        print("digest", run.digest(), flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_with_loaders_that_were_not_forked_leaves_no_semaphores(tmp_path: Path, method: str) -> None:
    text = LOADED.replace("{tests!r}", repr(str(Path(__file__).parent))).replace("{method}", method)
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = (tmp_path / "names").read_text().split()
    assert names
    assert [name for name in names if Path(name).exists()] == []


# ---- the compiler in the fork server ---------------------------------------------------------------------------------

FORKS = """
import os, socket, sys, time
from lockstep.launcher.fork_server import ForkRequest, ForkServer
from lockstep.launcher.parent_watch import ParentWatch, adopt_orphans

def fork():
    ours, theirs = socket.socketpair()
    request = ForkRequest(("worker.py",), dict(os.environ), os.getpid(), "AGENT")
    worker = server.fork(request, theirs.fileno(), watch.pipe)
    while not worker.pid:
        server.on_readable()
        assert not server.ended
        time.sleep(0.01)
    text = worker.stdout.read().decode().strip()
    assert worker.wait(30) == 0, worker.stderr.read()
    return text

def group():
    return [one for one in os.listdir("/proc") if one.isdigit() and in_group(one)]

def in_group(process):
    try:
        fields = open(f"/proc/{process}/stat").read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[2] == str(server._process.pid) and fields[0] != "Z"

adopt_orphans()
with ParentWatch("test") as watch:
    server = ForkServer(dict(os.environ), watch)
    print(fork())
    for _ in range(2):
        server.prepare_compiler()
    told, end_s = "", time.monotonic() + float(sys.argv[1])
    while "True" not in told and time.monotonic() < end_s:
        told = fork()
        time.sleep(0.2)
    print(told, "processes", len(group()))
    server.close()
    print("left", len(group()))
"""
WORKER = """
import os, sys
print("torch._inductor.compile_fx" in sys.modules, os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
"""
PATCHED = """
import sys
from pathlib import Path
if "lockstep.launcher.fork_server" in sys.orig_argv:
    from lockstep import _torch
    def fail():
        Path("asked").touch()
        raise RuntimeError("this torch has no compiler")
    def answer_yes():
        Path("asked").touch()
        return True
    {patch}
"""


def fork_workers(folder: Path, within_s: float, **env: str) -> list[str]:
    (folder / "forks.py").write_text(FORKS)
    (folder / "worker.py").write_text(WORKER)
    status, output = run_program(folder / "forks.py", str(within_s), **env)
    assert status == 0, output
    return output.splitlines()


@pytest.mark.slow
def test_workers_are_forked_with_the_compiler_once_it_is_imported(tmp_path: Path) -> None:
    assert fork_workers(tmp_path, 120.0) == ["False None", "True None processes 1", "left 0"]


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["_torch.prepare_compiler = fail", "_torch.is_in_bad_fork = answer_yes"])
def test_workers_are_forked_without_the_compiler_if_it_cannot_be_used(tmp_path: Path, patch: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(PATCHED.format(patch=patch))
    path = os.pathsep.join([str(tmp_path), str(Path(lockstep.__file__).parent.parent)])
    *_, told, left = fork_workers(tmp_path, 12.0, PYTHONPATH=path)
    assert (told, left) == ("False None processes 1", "left 0")
    assert (tmp_path / "asked").exists()


COMPILED = """
import os, signal, sys, time
from pathlib import Path
had_compiler = "torch._inductor.compile_fx" in sys.modules
import torch, lockstep
from torch.utils.data import TensorDataset

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.line(x)

def loss(model, batch):
    return model(batch[0]).square().sum(), len(batch[0])

torch.manual_seed(0)
with lockstep.Run(seed=1, device="cpu", progress=False, compile={"backend": "aot_eager"}) as run:
    model = run.replicate(Model())
    batches = run.batches(TensorDataset(torch.randn(8, 4)), global_batch_size=8, shards=2, epochs=100_000)
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.01)):
        run.step(loss, batch)
        Path(f"compiler {os.getpid()}" if had_compiler else f"none {os.getpid()}").touch()
        if Path("stop").exists():
            run.stop()
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_the_replacement_of_a_worker_that_compiles_has_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COMPILED)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--min", "1", "--log-dir", "logs", "program.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            end_s = time.monotonic() + 120.0
            while not (found := list(tmp_path.glob("compiler *"))) and time.monotonic() < end_s:
                for trained in tmp_path.glob("none *"):  # until a replacement comes from the successor
                    trained.unlink()
                    with suppress(ProcessLookupError):
                        os.kill(int(trained.name.split()[1]), signal.SIGKILL)
                    break
                time.sleep(1.0)
            (tmp_path / "stop").touch()
            output, _ = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert found
    assert launcher.returncode == 0, output
