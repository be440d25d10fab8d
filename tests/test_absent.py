"""Tasks of SLURM that never come, with a /proc of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep import absent
from lockstep.absent import Absence
from lockstep.errors import WorldError
from lockstep.place import batch_note

TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits.py"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its first process, "self", is rank 0."""
    monkeypatch.setattr(absent, "LOOK_AFTER_S", 0.0)
    monkeypatch.setattr(absent, "LOOK_AGAIN_S", 0.0)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
    (tmp_path / "self" / "stat").write_text(stat_of(900))
    add(tmp_path, 100, TASK)
    return tmp_path


def stat_of(started_s: float) -> str:
    return f"1 (a ) b) S {' '.join(['0'] * 18)} {int(started_s * os.sysconf('SC_CLK_TCK'))} 0"


def add(proc: Path, pid: int, env: dict[str, str]) -> Path:
    (proc / str(pid)).mkdir()
    text = "\0".join(f"{name}={value}" for name, value in env.items())
    (proc / str(pid) / "environ").write_text(text)
    return proc / str(pid)


def look(proc: Path, env: dict[str, str], times: int = 2) -> None:
    absence = Absence(env, proc=proc)
    for _ in range(times):
        absence.look([1, 2])


def test_names_the_variables_their_values_and_what_to_do(proc: Path) -> None:
    add(proc, 101, TASK | {"SLURM_PROCID": "1"})
    with pytest.raises(WorldError) as raised:
        look(proc, TASK)
    for words in ("SLURM_NTASKS=3", "SLURM_PROCID=0", "SLURM_PROCID=2 is on", "srun -n 3", "unset SLURM_PROCID"):
        assert words in str(raised.value)


def test_whoever_is_there_may_be_slow(proc: Path) -> None:
    for rank in (1, 2):
        add(proc, 100 + rank, TASK | {"SLURM_PROCID": str(rank)})
    look(proc, TASK, times=5)


def test_once_is_not_enough(proc: Path) -> None:
    look(proc, TASK, times=1)


@pytest.mark.parametrize("other", [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}])
def test_tasks_of_others_do_not_count(proc: Path, other: dict[str, str]) -> None:
    for rank in (1, 2):
        add(proc, 100 + rank, TASK | {"SLURM_PROCID": str(rank)} | other)
    with pytest.raises(WorldError):
        look(proc, TASK)


@pytest.mark.parametrize(
    "env",
    [
        TASK | {"SLURM_NNODES": "2"},
        TASK | {"SLURM_STEP_NUM_NODES": "2"},
        {name: value for name, value in TASK.items() if name != "SLURM_NNODES"} | {"SLURM_NODELIST": "a[1-2]"},
        {name: value for name, value in TASK.items() if name != "SLURM_NNODES"},
        {name: value for name, value in TASK.items() if name != "SLURM_JOB_ID"},
    ],
)
def test_nothing_is_said_about_other_hosts(proc: Path, env: dict[str, str]) -> None:
    look(proc, env)


def test_nothing_is_said_in_a_container(proc: Path) -> None:
    (proc / "self" / "ns" / "pid").unlink()
    (proc / "self" / "ns" / "pid").symlink_to("pid:[4026532001]")
    look(proc, TASK)


@pytest.mark.parametrize(("started_s", "may_be_one"), [(899.0, True), (2.0, False)])
def test_a_process_that_hides_its_environment(
    proc: Path, monkeypatch: pytest.MonkeyPatch, started_s: float, may_be_one: bool
) -> None:
    hidden = add(proc, 101, {}) / "environ"
    (hidden.parent / "stat").write_text(stat_of(started_s))
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == hidden:
            raise PermissionError
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    if may_be_one:
        look(proc, TASK)
    else:
        with pytest.raises(WorldError):
            look(proc, TASK)


def test_a_program_of_a_batch_script_is_told_that_it_is_alone() -> None:
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert "SLURM_NTASKS=2" in batch_note(batch)
    assert "srun" in batch_note(batch)
    assert batch_note(batch | {"SLURM_NTASKS": "1"}) == ""
    assert batch_note(batch | {"SLURM_STEP_ID": "0"}) == ""
    assert batch_note({"SLURM_NTASKS": "2"}) == ""
    assert batch_note({}) == ""


@pytest.mark.skipif(not absent._sees_all(Path("/proc")), reason="in a container other tasks cannot be seen")
@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_one_task_of_two(rank: str) -> None:
    """For real: it must not wait for five minutes."""
    told = {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_JOB_ID": f"9{os.getpid()}", "SLURM_NODELIST": "localhost"}
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(DIGITS), "--steps", "3"], env=env | told, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "WorldError: SLURM_NTASKS=2 says" in done.stderr
    assert time.monotonic() - began_s < 30  # 7 s on a quiet machine, most of which is importing torch
