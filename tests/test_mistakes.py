"""Ten common mistakes, through the real launcher: soon a card says who, what, why and what to do.

docs/mistakes.md shows these cards beside what torchrun says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from on_workers import Failure, on_workers, try_on_workers
from runs import classify, data
from test_launch import (  # noqa: F401  (fixtures)
    DEADLINE_S,
    LAUNCHER,
    Stage,
    nothing_left_behind,
    outer_env,
    split_card,
    stage,
)

CARD_WITHIN_S = 15.0  # of the mistake

# Every program says when it makes its mistake, so that importing torch does not count.
HEAD = """
import resource, torch, lockstep
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

def now(): print("mistake", time.time(), flush=True)

class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 17 and "dataset" in sys.argv:
            now(); raise ValueError(f"bad sample {i}")
        return torch.full((8,), float(i)), i % 4

class Stream(IterableDataset):
    def __iter__(self):
        many = 48 if rank == 1 else 64
        for i in range(many): yield torch.full((8,), float(i)), i % 4
        if rank == 1: now()

def loss(model, batch):
    x, y = batch
    at_third = rank == 1 and batches.position.number == 3
    if at_third and "nan" in sys.argv:
        now(); return F.cross_entropy(model(x), y, reduction="sum") * float("nan"), len(y)
    if at_third and "memory" in sys.argv:
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))
        now(); torch.ones(2**30)
    if at_third and "kill" in sys.argv:
        time.sleep(1.2); now(); os.kill(os.getpid(), signal.SIGKILL)
    if at_third and "sleep" in sys.argv:
        now(); time.sleep(7)
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)

options = {word.split("=")[0]: int(word.split("=")[1]) for word in sys.argv if "=" in word}
"""

RUN = (
    HEAD
    + """
with lockstep.Run("run" if "directory" in sys.argv else None, seed=1, progress=False) as run:
    if "loader" in sys.argv:
        now(); list(DataLoader(TensorDataset(torch.ones(8, 2**20)), num_workers=1, batch_size=4))
    model = run.replicate(torch.nn.Linear(8, 4))
    dataset = Stream() if "stream" in sys.argv else Samples()
    if "wrong -n" in sys.argv: now()
    batches = run.batches(dataset, global_batch_size=16, epochs=3, **({"shards": 4} | options))
    for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.01)):
        run.step(loss, batch)
        if batch.number == 2 and rank == 0 and "evaluate" in sys.argv:
            now(); run.evaluate(lambda model, batch: (1.0, len(batch[1])), Samples())
        if "directory" in sys.argv and batch.number == 2:
            open("training", "w").close()
            while not os.path.exists("go on"): time.sleep(0.02)
"""
)

DDP = (
    HEAD
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.used(x) if "unused" in sys.argv else self.used(x) + self.spare(x)

dist.init_process_group("gloo")
model = DistributedDataParallel(Net())
if "unused" in sys.argv: now()
for step in range(4 if rank == 1 and "fewer" in sys.argv else 5):
    model(torch.ones(2, 8)).sum().backward()
if rank == 1: now()
"""
)


@dataclass(frozen=True)
class Outcome:
    card: str
    above: str
    status: int
    took_s: float  # from the mistake to the end of everything

    def has(self, *words: str) -> None:
        text = " ".join(line.lstrip("| ") for line in self.card.splitlines())
        for word in words:
            assert word in text, self.card

    def line(self, name: str) -> str:
        """An entry of the card."""
        found = re.search(rf"^\| {name} +(.*(?:\n\|        .*)*)", self.card, re.MULTILINE)
        assert found is not None, self.card
        return " ".join(part.lstrip("| ") for part in found[1].splitlines())


def fail(stage: Stage, program: str, *arguments: str, words: str = "", **env: str) -> Outcome:  # noqa: F811
    script = stage.script(program)
    done = stage.run("--plain", *(arguments or ("-n", "2")), script, *words.split(","), OMP_NUM_THREADS="1", **env)
    ended_s = time.time()
    assert done.returncode != 0, done.stdout + done.stderr
    above, card = split_card(done.stderr)
    at = re.findall(r"mistake ([\d.]+)", done.stdout)
    assert at, done.stdout + done.stderr
    outcome = Outcome(card, "\n".join(above), done.returncode, ended_s - float(at[0]))
    assert outcome.took_s < CARD_WITHIN_S
    return outcome


@pytest.mark.slow
def test_a_batch_fewer_on_one_worker(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, RUN, words="stream")
    seen.has("rank 1 failed", "UnevenDataError", "rank 1 has fewer batches than the others", "do not split it by rank")
    assert seen.line("who").startswith("rank 1 of 2, pid ")
    assert "for batch in run.train" in seen.card or "run.step(loss, batch)" in seen.card


@pytest.mark.slow
def test_a_batch_fewer_on_one_worker_of_a_torch_program(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, DDP, "-n", "2", "--drop-in", words="fewer")
    seen.has("rank 1 ended before the others", "rank 1 had fewer batches", "after 4 backward passes", "model.join()")
    assert seen.line("who").endswith("; rank 0 waited for it")
    seen.has("backward pass 5, bucket 1 of 1 (spare.bias .. used.weight)")


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_in_the_dataset(stage: Stage, loaders: int) -> None:  # noqa: F811
    seen = fail(stage, RUN, words=f"dataset,num_workers={loaders}")
    seen.has("DataError", "dataset[17] failed in epoch 0", "ValueError: bad sample 17", "try that sample alone")
    assert re.search(r"script\.py:\d+, in __getitem__\n\| +now\(\); raise ValueError", seen.card)
    who = seen.line("who")
    assert re.search(rf"^{who.split(' of ')[0]}: dataset\[17\]", seen.line("what").removeprefix("DataError: "))
    assert "step " in seen.line("where")


@pytest.mark.slow
def test_a_loss_that_is_not_a_number(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, RUN, words="nan")
    seen.has("rank 1 failed", "NonFiniteError", "the loss of shards 2, 3 is not a finite number, on rank 1")
    seen.has("elements of weight are infinite or not a number", "learning rate")
    assert seen.line("where") == "step 2, epoch 0 (both count from 0), in run.step"
    assert "run.step(loss, batch)" in seen.card


@pytest.mark.slow
def test_a_parameter_that_is_not_used(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, DDP, "-n", "2", "--drop-in", words="unused")
    seen.has("spare.weight, spare.bias", "got no gradient", "find_unused_parameters=True")
    assert "model(torch.ones(2, 8)).sum().backward()" in seen.card


@pytest.mark.slow
def test_out_of_memory(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, RUN, words="memory")
    seen.has("rank 1 failed", "you tried to allocate 4294967296 bytes", "could not get more memory", "fewer workers")
    seen.has("step 2, epoch 0 (both count from 0), shard 2, in run.step")
    assert re.search(r"script\.py:\d+, in loss\n\| +now\(\); torch\.ones", seen.card)


@pytest.mark.slow
def test_killed_as_the_kernel_does_out_of_memory(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, RUN, words="kill")
    assert seen.status == 128 + 9
    seen.has("rank 1 failed", "killed by SIGKILL", "out of memory", "dmesg", "after step 1, epoch 0")


@pytest.mark.slow
def test_an_elastic_run_that_gives_up_ends_with_a_card_too(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, RUN, "-n", "2", "--min", "1", words="dataset")
    seen.has("DataError", "ValueError: bad sample 17", "in __getitem__")
    assert re.match(r"worker \d( of 2| \(rank \d of \d then\)), pid \d+ on ", seen.line("who"))
    assert "giving up: " in seen.above


@pytest.mark.slow
def test_more_workers_than_shards(stage: Stage) -> None:  # noqa: F811
    seen = fail(stage, RUN, words="wrong -n,shards=1")
    seen.has("2 workers for 1 shard", "more workers than parts of a batch", "-n 1 at most", "shards=2 or more")
    assert "run.batches(" in seen.card


def test_no_workers_at_all(stage: Stage) -> None:  # noqa: F811
    done = stage.run("-n", "0", stage.script(""))
    assert done.returncode == 2
    assert "'0' is not a number of workers" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_port_that_is_taken(stage: Stage) -> None:  # noqa: F811
    """The launcher itself chooses a free one, whatever MASTER_PORT says; a program may insist."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        program = HEAD + f"os.environ['MASTER_PORT'] = '{port}'\nnow(); lockstep.init()\n"
        seen = fail(stage, program, MASTER_PORT=port)
        seen.has(f"cannot listen on MASTER_PORT={port}", "another program has the port", "leave MASTER_PORT unset")
        assert seen.line("who").startswith("rank 0 of 2")
        quiet = stage.run("-n", "2", stage.script("print(os.environ['MASTER_PORT'])\n"), MASTER_PORT=port)
    assert quiet.returncode == 0
    assert port not in quiet.stdout


def can_mount() -> bool:
    tried = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    try:
        return subprocess.run(tried, capture_output=True, timeout=120).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small /dev/shm")
@pytest.mark.parametrize("words", ["loader", "num_workers=1"])
def test_a_tiny_dev_shm(stage: Stage, words: str) -> None:  # noqa: F811
    """Ours needs none. Torch's DataLoader does."""
    arguments = [*LAUNCHER, "run", "--plain", "--log-dir", str(stage.logs), "-n", "2", stage.script(RUN), words]
    inside = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh", *arguments]
    env = outer_env(OMP_NUM_THREADS="1")
    done = subprocess.run(inside, cwd=stage.folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    if words == "num_workers=1":
        assert done.returncode == 0, done.stderr
        return
    _, card = split_card(done.stderr)
    text = " ".join(line.lstrip("| ") for line in card.splitlines())
    for word in ("shared memory is full", "No space left on device", "--shm-size", "list(DataLoader("):
        assert word in text, card


@pytest.mark.slow
def test_slurm_speaks_of_more_workers_than_there_are(stage: Stage) -> None:  # noqa: F811
    """Without a launcher of ours: the worker draws its card itself, when its time to join is over."""
    told = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "0"}
    told |= {"SLURM_NNODES": "1", "SLURM_NODELIST": socket.gethostname(), "SLURM_LOCALID": "0"}
    script = stage.script(HEAD + "now(); lockstep.init()\n")
    done = subprocess.run(
        [sys.executable, script],
        cwd=stage.folder,
        env=outer_env(**told, LOCKSTEP_JOIN_TIMEOUT_S="1"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    took_s = time.time() - float(done.stdout.split()[1])
    assert done.returncode == 1
    above, card = split_card(done.stderr)
    assert "WorldError" in above[-1]  # and the traceback
    text = " ".join(" ".join(line.lstrip("| ") for line in card.splitlines()).split())
    for word in (
        *("who rank 0 of 2 (SLURM)", f"on {socket.gethostname()}", "for rank 1, in vain"),
        *("SLURM announced 2 tasks (SLURM_NTASKS=2, SLURM_PROCID=0), and only rank 0 came", "do start all of them"),
        *("`srun -n 2 python ...`", "unset SLURM_NTASKS and SLURM_PROCID", "`lockstep run -n 2 ...`"),
    ):
        assert word in text, card
    assert took_s < CARD_WITHIN_S


@pytest.mark.slow
def test_two_programs_on_one_run_directory(stage: Stage) -> None:  # noqa: F811
    (stage.folder / "second.py").write_text(
        "import time, lockstep\nprint('mistake', time.time(), flush=True)\n"
        "with lockstep.Run('run', seed=1, progress=False): pass\n"
    )
    first = stage.start("--plain", "-n", "1", stage.script(RUN), "directory", OMP_NUM_THREADS="1")
    try:
        stage.wait_for_files("training")
        pid = json.loads((stage.folder / "run" / "run.lock").read_text())["pid"]
        second = Stage(stage.folder)
        second.logs = stage.folder / "logs of the second"
        done = second.run("--plain", "-n", "1", "second.py", OMP_NUM_THREADS="1")
        took_s = time.time() - float(re.findall(r"mistake ([\d.]+)", done.stdout)[0])
        watched = subprocess.run(
            [*LAUNCHER, "ledger", "run"], cwd=stage.folder, capture_output=True, text=True, timeout=DEADLINE_S
        )
    finally:
        (stage.folder / "go on").touch()
        assert stage.end(first).returncode == 0
    assert "in use" not in watched.stderr
    _, card = split_card(done.stderr)
    text = " ".join(line.lstrip("| ") for line in card.splitlines())
    holder = f"the run of process {pid} on {socket.gethostname()}, since 20"
    for word in (holder, "DirectoryInUseError", "a directory of its own"):
        assert word in text, card
    assert took_s < CARD_WITHIN_S


@pytest.mark.slow
def test_two_elastic_programs_on_one_run_directory(stage: Stage) -> None:  # noqa: F811
    """A worker that takes the place of rank 0 may have the directory; another run may not, also in between."""
    script = stage.script(RUN.replace("rank == 0", "run.world.rank == 0"))
    first = stage.start("--plain", "-n", "2", "--min", "1", script, "directory", OMP_NUM_THREADS="1")
    try:
        stage.wait_for_files("training")
        pid = json.loads((stage.folder / "run" / "run.lock").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)  # the other one has not noticed, and still the directory is theirs
        second = Stage(stage.folder)
        second.logs = stage.folder / "logs of the second"
        done = second.run("--plain", "-n", "2", "--min", "1", script, "directory", OMP_NUM_THREADS="1")
    finally:
        (stage.folder / "go on").touch()
        ended = stage.end(first)
    assert ended.returncode == 0, ended.stderr
    assert done.returncode == 1
    _, card = split_card(done.stderr)
    text = " ".join(line.lstrip("| ") for line in card.splitlines())
    for word in ("worker ", "DirectoryInUseError", f"on {socket.gethostname()}, since 20", "a directory of its own"):
        assert word in text, card
    for file in (stage.folder / "run" / "trace").glob("*.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines() if '"event"' in line]
        assert "error" not in {event.get("what") for event in events}, events  # the second wrote nothing there


# ---- beside the ten ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_only_rank_0_evaluates(stage: Stage, backend: str) -> None:  # noqa: F811
    seen = fail(stage, RUN, words="evaluate", LOCKSTEP_BACKEND=backend)
    seen.has("DesyncError", "mismatching collectives", "if rank == 0:", "run.on_main(...)")
    assert re.search(r"rank \d called run\.(evaluate|step), but rank \d called run\.(evaluate|step)", seen.card)


OTHER_CALLS = """
import torch, lockstep
from torch.utils.data import TensorDataset
with lockstep.Run(seed=1, progress=False) as run:
    model = run.replicate(torch.nn.Linear(8, 1))
    first, second = sys.argv[1:]
    calls = {
        "run.log": lambda: run.log(x=1.0),
        "run.evaluate": lambda: run.evaluate(lambda model, batch: (1.0, 1), TensorDataset(torch.ones(8, 8))),
        "run.on_main": lambda: run.on_main(lambda: 1),
    }
    run.log(y=2.0)
    calls[sys.argv[1 + rank]]()
"""


def make_other_calls(rank: int, size: int, calls: list[str]) -> None:
    sys.argv[1:] = calls
    exec(OTHER_CALLS, {"sys": sys, "rank": rank})


def test_workers_in_different_calls_are_named_to_both() -> None:
    calls = ["run.evaluate", "run.log"]
    for text in try_on_workers(make_other_calls, 2, calls):
        assert isinstance(text, Failure)
        assert re.search(
            r"DesyncError: rank (0 called run.evaluate, but rank 1|1 called run.log, but rank 0) called", text
        )


@pytest.mark.slow
@pytest.mark.parametrize("calls", [["run.evaluate", "run.log"], ["run.log", "run.on_main"]])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_workers_in_different_calls_of_the_run(stage: Stage, backend: str, calls: list[str]) -> None:  # noqa: F811
    """On every backend both workers and both calls are named."""
    script = stage.script(OTHER_CALLS)
    done = stage.run("--plain", "-n", "2", script, *calls, OMP_NUM_THREADS="1", LOCKSTEP_BACKEND=backend)
    assert done.returncode == 1
    _, card = split_card(done.stderr)
    text = " ".join(line.lstrip("| ") for line in card.splitlines())
    said = [f"rank {one} called {calls[one]}, but rank {1 - one} called {calls[1 - one]}; look for" for one in (0, 1)]
    assert any(f"DesyncError: {words}" in text for words in said), card


@pytest.mark.slow
def test_a_stall_shows_where_the_missing_worker_is(stage: Stage) -> None:  # noqa: F811
    script = stage.script(RUN)
    done = stage.run("--plain", "-n", "2", script, "sleep", OMP_NUM_THREADS="1", LOCKSTEP_STALL_S="2")
    assert done.returncode == 0, done.stderr
    said = done.stderr.replace("[rank 0] ", "")
    assert re.search(r"rank 0 has waited \d s in .*; arrived: rank 0; missing: rank 1 \(pid \d+", said), said
    assert "rank 1 is here:" in said
    assert "now(); time.sleep(7)" in said


LOCK = """
import sys
from pathlib import Path
from lockstep.recovery.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), sys.argv[2])
lock.acquire(leads=sys.argv[3] == "rank 0")
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Starts a process that takes the lock of a directory, and holds it until the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(run: str, role: str = "rank 0") -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", LOCK, str(tmp_path), run, role]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[str]) -> str:
    """Of a process that has taken the lock (and still has it), or was refused."""
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout.readline() or process.stderr.read()


def test_the_lock_of_a_run_directory(tmp_path: Path, lock: Callable[..., subprocess.Popen[str]]) -> None:
    """A later rank 0 of the same run may have it although an earlier one still lives; another run may not."""
    first = lock("one")
    assert outcome(first) == "taken\n"
    later = lock("one")
    assert outcome(later) == "taken\n"
    refused = outcome(lock("two"))
    assert f"DirectoryInUseError: the run directory {tmp_path} is in use by the run of process {later.pid}" in refused
    for process in (first, later):
        process.kill()
        process.wait()
    assert outcome(lock("two")) == "taken\n"


@pytest.mark.parametrize("content", ["", '{"host": "elsewhere", "pid": 1, "since": "2020", "run": "old"}'])
def test_rank_0_may_come_after_others_of_its_run(
    tmp_path: Path, lock: Callable[..., subprocess.Popen[str]], content: str
) -> None:
    """Whatever an earlier run has left in the file. The others keep the directory when rank 0 is gone."""
    (tmp_path / "run.lock").write_text(content)
    others = [lock("one", f"rank {rank}") for rank in (1, 2)]
    assert [outcome(other) for other in others] == ["taken\n"] * 2
    first = lock("one")
    assert outcome(first) == "taken\n"
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == first.pid
    first.kill()
    first.wait()
    assert f"in use by the run of process {first.pid}" in outcome(lock("two"))
    assert outcome(lock("one")) == "taken\n"


def test_of_runs_that_start_together_one_gets_the_directory(lock: Callable[..., subprocess.Popen[str]]) -> None:
    outcomes = [outcome(process) for process in [lock(run) for run in ("one", "two", "three")]]
    assert outcomes.count("taken\n") == 1
    assert sum("DirectoryInUseError" in text and "the run of process" in text for text in outcomes) == 2


def two_runs(rank: int, size: int, folder: str) -> list[str]:
    """One inside of the other with one directory, and one after the other. Returns what was said and the digests."""
    directory, said = Path(folder), []

    def train(run: Any, inside: Callable[[], None] = lambda: None) -> str:
        model = run.replicate(torch.nn.Linear(16, 10))
        batches = run.batches(data(64), global_batch_size=16, shards=4, epochs=1)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.1)):
            if batch.number == 1:
                inside()
            run.step(classify, batch)
        return str(run.digest())

    def begin_another() -> None:
        (directory / "link").symlink_to(directory, target_is_directory=True) if rank == 0 else None
        for path in (directory, directory / "." / "link" if rank == 0 else directory):
            try:
                with lockstep.Run(path, seed=7, progress=False, device="cpu"):
                    raise AssertionError("not reached")
            except lockstep.errors.DirectoryInUseError as error:
                said.append(str(error))

    with lockstep.Run(directory, seed=7, progress=False, device="cpu") as run:
        said.append(train(run, begin_another))
    with lockstep.Run(directory, seed=7, progress=False, device="cpu") as run:  # finished, and read once more
        said.append(train(run))
    with (
        lockstep.Run(directory / "a", seed=7, progress=False, device="cpu") as run,
        lockstep.Run(directory / "b", seed=7, progress=False, device="cpu") as other,
    ):
        said.append(train(run))
        said.append(train(other))
    return said


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_runs_of_one_program_with_one_directory(tmp_path: Path, size: int) -> None:
    for first, second, *digests, _ in on_workers(two_runs, size, str(tmp_path)):  # the last has other initial weights
        for said in (first, second):
            assert "is in use by another Run of this program (process " in said
            assert "End that one first, or give each Run a directory of its own" in said
        assert len(set(digests)) == 1
