"""What the doctor says of planted facts, of real trouble in the environment, and of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.doctor import command, facts
from lockstep.doctor.facts import Gpu, Machine, Space, Torch
from lockstep.doctor.judge import Level, judge
from lockstep.plan.profile import read_links
from lockstep.world.environment import RankAssignment

GIB = 1 << 30
CPU = Torch("2.13.0+cpu", gloo=True, import_s=2.0)
CUDA = Torch("2.11.0", "12.8", (Gpu("H200", 140 * GIB),) * 2, nccl="2.27.3", gloo=True, import_s=3.0)
SOUND = Machine(
    host="node1",
    torch=CPU,
    cores=8,
    usable_cores=8,
    quota_cores=None,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    memory_limit_bytes=None,
    shm=Space("/dev/shm", 32 * GIB, 32 * GIB),
    directory=Space("/data", 900 * GIB, 800 * GIB),
    open_files=65536,
    interfaces=("lo", "eth0"),
    host_addresses=("10.0.0.7",),
    loopback_problem="",
    driver_gpus=0,
    clock_is_set=True,
    env={},
    place=None,
)
WITH_GPUS = replace(SOUND, torch=CUDA, driver_gpus=2)


def test_a_sound_machine_has_nothing_to_change() -> None:
    for machine in (SOUND, WITH_GPUS, replace(SOUND, place=RankAssignment(3, 8, "SLURM"))):
        assert {finding.level for finding in judge(machine)} == {Level.GOOD}
        assert not any(finding.advice for finding in judge(machine))


@pytest.mark.parametrize(
    ("machine", "level", "words"),
    [
        (replace(SOUND, torch=Torch(problem="No module named 'torch'")), Level.BAD, "pip install 'torch>=2.11'"),
        (replace(SOUND, torch=Torch(problem="undefined symbol: x")), Level.BAD, "undefined symbol"),
        (replace(SOUND, torch=replace(CPU, version="2.9.1")), Level.BAD, "needs 2.11 or newer"),
        (replace(SOUND, torch=replace(CPU, import_s=40.0)), Level.WARN, "network disk"),
        (replace(SOUND, torch=replace(CPU, gloo=False)), Level.WARN, "no Gloo"),
        (replace(SOUND, quota_cores=2.5), Level.WARN, "time of 2.5 -> workers count the 8: start `lockstep run -n 2"),
        (replace(SOUND, quota_cores=0.5), Level.WARN, "lockstep run -n 1"),
        (replace(SOUND, env={"OMP_NUM_THREADS": "16"}), Level.WARN, "OMP_NUM_THREADS=16"),
        (replace(SOUND, available_bytes=GIB), Level.WARN, "1.0 of 64.0 GiB free"),
        (replace(SOUND, memory_limit_bytes=GIB), Level.WARN, "this container may have 1.0"),
        (replace(SOUND, driver_gpus=2), Level.BAD, "2 here, and this torch was built for CPUs"),
        (
            replace(SOUND, driver_gpus=2, torch=replace(CUDA, gpus=(), gpu_problem="driver too old")),
            Level.BAD,
            "torch finds none: driver too old",
        ),
        (
            replace(SOUND, driver_gpus=2, torch=replace(CUDA, gpus=()), env={"CUDA_VISIBLE_DEVICES": ""}),
            Level.NOTE,
            "hides all 2",
        ),
        (replace(WITH_GPUS, driver_gpus=8, env={"CUDA_VISIBLE_DEVICES": "0,1"}), Level.NOTE, "hides some of 8"),
        (replace(SOUND, loopback_problem="Operation not permitted"), Level.BAD, "127.0.0.1 does not work"),
        (replace(SOUND, env={"GLOO_SOCKET_IFNAME": "eth"}), Level.BAD, "interface eth -> set it to one of: lo, eth0"),
        (replace(WITH_GPUS, env={"NCCL_SOCKET_IFNAME": "eth,ib"}), Level.BAD, "there is no interface ib"),
        (replace(WITH_GPUS, env={"NCCL_P2P_DISABLE": "1"}), Level.WARN, "NCCL_P2P_DISABLE is set"),
        (replace(SOUND, shm=Space("/dev/shm", 64 << 20, 64 << 20)), Level.WARN, "64 MiB"),
        (replace(SOUND, shm=Space("/dev/shm", problem="no such place")), Level.WARN, "no such place"),
        (replace(SOUND, directory=Space("/data", GIB, GIB, "may not write")), Level.BAD, "/data: may not write"),
        (replace(SOUND, directory=Space("/data", 2 * GIB, GIB)), Level.WARN, "three checkpoints must fit"),
        (replace(SOUND, open_files=256), Level.WARN, "ulimit -n 65536"),
        (replace(SOUND, host_addresses=()), Level.WARN, "node1 stands for no address"),
        (replace(SOUND, host_addresses=("127.0.1.1", "::1")), Level.NOTE, "stands for 127.0.1.1, ::1 only"),
        (replace(SOUND, place_problem="RANK=3 is set, but WORLD_SIZE is not"), Level.BAD, "WORLD_SIZE is not"),
        (replace(SOUND, env={"SLURM_NTASKS": "4"}), Level.WARN, "start it with srun, which makes 4 workers"),
        (
            replace(WITH_GPUS, place=RankAssignment(0, 4, "SLURM", local_size=4)),
            Level.NOTE,
            "4 workers here share 2 GPUs",
        ),
        (replace(SOUND, master_problem="MASTER_PORT=1 cannot be"), Level.BAD, "choose another port"),
        (replace(SOUND, clock_is_set=False), Level.NOTE, "no time server"),
    ],
)  # fmt: skip
def test_what_is_said_of_trouble(machine: Machine, level: Level, words: str) -> None:
    found = [finding for finding in judge(machine) if finding.level is not Level.GOOD]
    assert [finding.level for finding in found] == [level]
    assert words in f"{found[0].found} -> {found[0].advice}"


@pytest.mark.parametrize("name", ["eth", "lo", "^docker", "=eth0"])
def test_interfaces_that_are_there(name: str) -> None:
    env = {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": "lo"}
    assert {finding.level for finding in judge(replace(SOUND, env=env))} == {Level.GOOD}


# ---- facts -----------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_least_of_all_groups_around_us_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(membership, "0::/jobs/mine\n")
    assert facts.cgroup_cores(root, membership) is None
    assert facts.cgroup_memory(root, membership) is None
    write(root / "jobs" / "cpu.max", "150000 100000\n")
    write(root / "jobs" / "mine" / "cpu.max", "max 100000\n")
    write(root / "jobs" / "memory.max", "max\n")
    write(root / "jobs" / "mine" / "memory.max", "2147483648\n")
    assert facts.cgroup_cores(root, membership) == 1.5
    assert facts.cgroup_memory(root, membership) == 2 * GIB


def test_groups_of_the_older_kind(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(membership, "4:cpu,cpuacct:/docker/abc\n")
    write(root / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(root / "cpu" / "cpu.cfs_period_us", "100000\n")
    write(root / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert facts.cgroup_cores(root, membership) is None
    assert facts.cgroup_memory(root, membership) is None
    write(root / "cpu" / "cpu.cfs_quota_us", "400000\n")
    write(root / "memory" / "memory.limit_in_bytes", "1073741824\n")
    assert facts.cgroup_cores(root, membership) == 4.0
    assert facts.cgroup_memory(root, membership) == GIB


def test_room_on_disks(tmp_path: Path) -> None:
    room = facts.space_of(tmp_path / "not" / "there" / "yet")
    assert room.total_bytes > 0
    assert not room.problem
    (tmp_path / "file").touch()
    assert "is no directory" in facts.space_of(tmp_path / "file" / "run").problem


def test_names_that_stand_for_nothing() -> None:
    assert facts.addresses_of("localhost")
    assert facts.addresses_of("no-such-host.invalid") == ()


# ---- through the front door ------------------------------------------------------------------------------------------


def doctor(*arguments: str, **env: str) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ) | env,
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_this_machine_can_train() -> None:
    status, findings = doctor()
    assert status == 0
    trial = findings[-1]
    assert (trial["topic"], trial["level"]) == ("trial", "ok")
    assert "2 workers on " in trial["found"]


@pytest.mark.slow
def test_trouble_in_the_environment_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        status, findings = doctor("--no-trial", "--dir", str(tmp_path / "file"), GLOO_SOCKET_IFNAME="nope0", **env)
    assert status == 1
    bad = "\n".join(finding["found"] for finding in findings if finding["level"] == "PROBLEM")
    assert f"MASTER_PORT={port} cannot be listened on" in bad
    assert "is no directory" in bad
    assert "there is no interface nope0" in bad
    status, findings = doctor("--no-trial", RANK="1")
    assert status == 1
    assert any("RANK=1 is set, but WORLD_SIZE is not" in finding["found"] for finding in findings)


@pytest.mark.slow
def test_workers_that_cannot_meet_are_a_problem() -> None:
    """The interface that Gloo is told to use is not there, and Gloo is what the workers are told to use."""
    status, findings = doctor(LOCKSTEP_BACKEND="gloo", GLOO_SOCKET_IFNAME="nope0")
    assert status == 1
    assert (findings[-1]["topic"], findings[-1]["level"]) == ("trial", "PROBLEM")
    assert "2 workers failed" in findings[-1]["found"]


def test_words_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "inspect_machine", lambda env, directory: replace(SOUND, quota_cores=2.0, open_files=99)
    )
    assert command.main(["--no-trial"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("+ torch          2.13.0+cpu, built for CPUs")
    assert last == "no problems, 2 warnings"
    monkeypatch.setattr(command, "inspect_machine", lambda env, directory: replace(SOUND, loopback_problem="no"))
    assert command.main(["--no-trial"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 problem, no warnings"


@pytest.mark.slow
def test_sums_between_workers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    assert command.main(["--links", str(path), "-n", "2"]) == 0
    found = read_links(path)
    assert {(one.backend, one.workers_per_host, one.grad_comm) for one in found} == {
        ("shm", 2, kind) for kind in ("fp32", "int8", "int4")
    }
    for one in found:
        seconds = [point.seconds for point in one.points]
        assert 0 < seconds[0] < seconds[-1]
    assert "2 workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--links", "x.json", "-n", "1"], "is not a list of numbers of workers"),
        (["--links", "missing/x.json"], "there is no folder"),
        (["--links", "x.json", "--hosts", "2"], "belong together"),
        (["--links", "x.json", "--hosts", "1", "--rendezvous", "a:1"], "several hosts are 2 or more"),
        (["--hosts", "2"], "belong to --links"),
    ],
)
def test_links_with_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert words in capsys.readouterr().err


def test_a_rendezvous_that_is_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--links", "x.json", "--hosts", "2", "--rendezvous", "host1"]) == 1
    assert "--rendezvous host1: " in (said := capsys.readouterr().err)
    assert "write HOST:PORT, such as host1:29400" in said
