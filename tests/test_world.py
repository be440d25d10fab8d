"""Who we are: what the environment says, what we refuse, and joining for real."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import WorldError
from lockstep.settings import Settings
from lockstep.world import rendezvous
from lockstep.world.environment import RankAssignment, detect, first_host, missing_srun_warning
from lockstep.world.rendezvous import Rendezvous
from lockstep.world.world import _exchange_identities, choose_backend, choose_device, count_local, wanted_backend
from test_launch import split_card

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[001-008]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
MASTER = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


# ---- detect: what is understood ------------------------------------------------------------------------------------


def test_an_empty_environment_says_nothing() -> None:
    assert detect({}) is None
    assert detect({"RANK": "", "WORLD_SIZE": " ", "PATH": "/bin"}) is None


def test_rank_and_world_size() -> None:
    assert detect(TWO) == RankAssignment(1, 2, "RANK/WORLD_SIZE", addr="10.0.0.1", port=29500)
    assert detect(TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == RankAssignment(
        1, 2, "RANK/WORLD_SIZE", local_rank=1, local_size=2, addr="10.0.0.1", port=29500
    )


def test_a_world_of_one_needs_no_place_to_meet() -> None:
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == RankAssignment(0, 1, "RANK/WORLD_SIZE")
    assert detect({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}) == RankAssignment(0, 1, "RANK/WORLD_SIZE")


def test_torchrun_keeps_the_store_and_numbers_its_restarts() -> None:
    place = detect(TWO | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert place is not None
    assert place.agent_store
    assert place.attempt == 2
    static = detect(TWO | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert static is not None
    assert not static.agent_store


def test_an_srun_step() -> None:
    place = detect(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.addr, place.source) == (3, 4, 1, "gpu007", "SLURM")
    assert place.port is not None
    assert 20000 <= place.port < 30000
    assert detect(SRUN | {"SLURM_PROCID": "0"}).port == place.port  # type: ignore[union-attr]
    assert detect(SRUN | {"SLURM_STEP_ID": "1"}).port != place.port  # type: ignore[union-attr]
    assert detect(SRUN | {"SLURM_JOB_ID": "4712"}).port != place.port  # type: ignore[union-attr]


def test_inside_a_step_its_own_number_of_tasks_counts_not_the_jobs() -> None:
    place = detect(SRUN | {"SLURM_NTASKS": "16"})
    assert place is not None
    assert place.size == 4


def test_the_users_place_to_meet_wins_over_slurms() -> None:
    place = detect(SRUN | MASTER)
    assert place is not None
    assert (place.addr, place.port, place.source) == ("10.0.0.9", 1234, "SLURM")


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(without(SRUN, "SLURM_PROCID", "SLURM_STEP_ID"), id="salloc"),
        pytest.param(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)}, id="interactive step"),
        pytest.param(
            without(SRUN, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
            | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
            id="batch script",
        ),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, id="batch script, one task"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, id="batch script, no -n"),
    ],
)
def test_a_shell_inside_a_slurm_job_is_no_task(shell: dict[str, str]) -> None:
    assert detect(shell) is None


def test_a_container_that_hides_the_step_is_still_a_task() -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "a,b"}
    place = detect(env)
    assert place is not None
    assert (place.rank, place.size, place.addr) == (0, 2, "a")


def test_open_mpi_on_one_host_needs_nothing_more() -> None:
    place = detect(MPIRUN)
    assert place is not None
    assert place.port is not None
    assert place == RankAssignment(2, 4, "Open MPI", local_rank=2, local_size=4, addr="127.0.0.1", port=place.port)
    assert detect(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}).port == place.port  # type: ignore[union-attr]


def test_pmi() -> None:
    assert detect(PMI | MASTER) == RankAssignment(0, 2, "PMI", local_rank=0, local_size=1, addr="10.0.0.9", port=1234)
    assert detect({"PMI_RANK": "0", "PMI_SIZE": "1"}) == RankAssignment(0, 1, "PMI")


def test_rank_wins_over_slurm_which_wins_over_mpi_that_agrees() -> None:
    env = SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}
    assert detect(env).source == "SLURM"  # type: ignore[union-attr]
    assert detect(env | TWO | {"RANK": "2", "WORLD_SIZE": "4"}).source == "RANK/WORLD_SIZE"  # type: ignore[union-attr]


def test_mpirun_inside_a_slurm_job_is_the_one_to_believe() -> None:
    # mpirun's daemons are the SLURM tasks, one per host.
    place = detect(SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | MPIRUN | MASTER)
    assert place is not None
    assert (place.rank, place.size, place.source) == (2, 4, "Open MPI")


@pytest.mark.parametrize("mark", [{"TORCHELASTIC_RUN_ID": "x"}, {"LOCKSTEP_RUN_DIR": "/x"}, {"LOCAL_WORLD_SIZE": "2"}])
def test_a_launcher_inside_each_slurm_task_multiplies_the_workers(mark: dict[str, str]) -> None:
    place = detect(SRUN | TWO | {"RANK": "7", "WORLD_SIZE": "8"} | mark)
    assert place is not None
    assert (place.rank, place.size) == (7, 8)


def test_batch_scripts_may_leave_the_rank_to_srun() -> None:
    place = detect(SRUN | {"WORLD_SIZE": "4"})
    assert place is not None
    assert (place.rank, place.size, place.source) == (3, 4, "SLURM")


def test_rank_without_a_place_to_meet_takes_slurms() -> None:
    place = detect(SRUN | {"RANK": "3", "WORLD_SIZE": "4"})
    assert place is not None
    assert (place.addr, place.source) == ("gpu007", "RANK/WORLD_SIZE")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("gpu[003-005,010],login1", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("rack[1-2]n[01-04],x", "rack1n01"),
        ("node-12.cluster.local,node-13.cluster.local", "node-12.cluster.local"),
        (" a[0-1]-ib ", "a0-ib"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",", "a[", "[]", "a[x]"])
def test_a_node_list_that_cannot_be_read_is_named(nodes: str) -> None:
    with pytest.raises(WorldError, match="MASTER_ADDR"):
        first_host(nodes)


# ---- detect: what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK='1'", "RANK and WORLD_SIZE"]),
        (MASTER, ["MASTER_ADDR='10.0.0.9'", "MASTER_PORT='1234'"]),
        (TWO | {"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        (TWO | {"RANK": "one"}, ["RANK='one'", "whole number"]),
        (TWO | {"WORLD_SIZE": "2.0"}, ["WORLD_SIZE='2.0'"]),
        (TWO | {"RANK": "-1"}, ["RANK=-1"]),
        (TWO | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        (TWO | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TWO | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "WORLD_SIZE=2"]),
        (TWO | {"LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3", "2"]),
        (TWO | {"LOCAL_RANK": "x"}, ["LOCAL_RANK='x'"]),
        (without(TWO, "MASTER_ADDR"), ["MASTER_ADDR", "rank 1 of 2"]),
        (without(TWO, "MASTER_PORT"), ["MASTER_PORT"]),
        (without(TWO, "MASTER_PORT", "MASTER_ADDR"), ["MASTER_ADDR and MASTER_PORT are"]),
        (TWO | {"MASTER_PORT": "0"}, ["MASTER_PORT=0"]),
        (TWO | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        (TWO | {"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        (SRUN | {"SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "SLURM_NTASKS=4"]),
        (SRUN | {"SLURM_PROCID": "a"}, ["SLURM_PROCID='a'"]),
        (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), ["SLURM_PROCID=3", "SLURM_NTASKS"]),
        (without(SRUN, "SLURM_JOB_ID"), ["SLURM", "MASTER_PORT"]),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), ["SLURM", "MASTER_ADDR"]),
        (SRUN | TWO, ["WORLD_SIZE=2", "SLURM", "4"]),
        (SRUN | TWO | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM", "4"]),
        (SRUN | {"WORLD_SIZE": "3"}, ["WORLD_SIZE=3", "RANK", "SLURM says rank 3 of 4"]),
        (MPIRUN | TWO, ["WORLD_SIZE=2", "Open MPI", "4"]),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE"]),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"]),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ["Open MPI", "MASTER_ADDR"]),
        (without(MPIRUN, "PMIX_NAMESPACE"), ["Open MPI", "MASTER_PORT"]),
        ({"PMI_RANK": "0"}, ["PMI_RANK=0", "PMI_SIZE"]),
        ({"PMI_SIZE": "2"}, ["PMI_SIZE=2", "PMI_RANK"]),
        (PMI, ["PMI says rank 0 of 2", "MASTER_ADDR and MASTER_PORT"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_half_set_and_contradictory_environments_are_refused(env: dict[str, str], named: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        detect(env)
    for words in named:
        assert words in str(caught.value)


def test_a_program_of_a_batch_script_is_told_that_it_is_alone() -> None:
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert "SLURM_NTASKS=2" in missing_srun_warning(batch)
    assert "srun" in missing_srun_warning(batch)
    assert missing_srun_warning(batch | {"SLURM_NTASKS": "1"}) == ""
    assert missing_srun_warning(batch | {"SLURM_STEP_ID": "0"}) == ""
    assert missing_srun_warning({"SLURM_NTASKS": "2"}) == ""
    assert missing_srun_warning({}) == ""


# ---- choose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "backend", "gpus", "local_rank", "expected"),
    [
        (None, None, 0, 3, "cpu"),
        (None, None, 4, 3, "cuda:3"),
        (None, None, 1, 3, "cuda:0"),
        (None, None, 2, 3, "cuda:1"),
        (None, "nccl", 4, 1, "cuda:1"),
        (None, "cpu:gloo,cuda:nccl", 4, 1, "cuda:1"),
        (None, "gloo", 4, 1, "cpu"),
        ("cuda", "gloo", 4, 1, "cuda:1"),
        ("cuda:2", None, 4, 1, "cuda:2"),
        ("cpu", None, 4, 1, "cpu"),
        ("cpu", "gloo", 0, 0, "cpu"),
    ],
)
def test_choose_device(asked: str | None, backend: str | None, gpus: int, local_rank: int, expected: str) -> None:
    wish = torch.device(asked) if asked else None
    assert choose_device(requested=wish, backend=backend, gpus=gpus, local_rank=local_rank) == torch.device(expected)


@pytest.mark.parametrize(
    ("asked", "backend", "gpus", "named"),
    [
        ("cpu", "nccl", 1, "backend='nccl'"),
        ("cuda", None, 0, "device='cuda'"),
        (None, "nccl", 0, "backend='nccl'"),
        ("cuda:4", None, 4, "cuda:4"),
    ],
)
def test_impossible_devices_are_refused(asked: str | None, backend: str | None, gpus: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        choose_device(requested=torch.device(asked) if asked else None, backend=backend, gpus=gpus, local_rank=0)


def test_nccl_only_where_every_worker_has_a_gpu_of_its_own() -> None:
    def chosen(gpus: list[str], hosts: str, **more: bool) -> str:
        return choose_backend(gpus, list(hosts), **more).backend

    assert chosen(["a"], "h") == "nccl"
    assert chosen(["a", "b", "c"], "hhi") == "nccl"
    assert chosen(["a", "b", "a"], "hhh") == "shm"
    assert chosen(["a", ""], "hh") == "gloo"
    assert chosen(["", ""], "hh") == "shm"
    assert chosen([""], "h") == "shm"
    assert chosen(["", "", "", ""], "hhii") == "hierarchy"
    assert chosen(["a", "a", "b", "b"], "hhii") == "hierarchy"
    assert chosen(["", ""], "hh", linux=False) == "gloo"


def test_local_ranks_from_hosts() -> None:
    hosts = ["a", "b", "a", "b", "b"]
    assert [count_local(hosts, rank) for rank in range(5)] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("asked", "variable", "wished"),
    [
        (None, "", None),
        (None, " gloo ", "gloo"),
        ("shm", "gloo", "shm"),
        ("cpu:shm,cuda:nccl", "", "cpu:shm,cuda:nccl"),
    ],
)
def test_the_program_outdoes_the_variable(asked: str | None, variable: str, wished: str | None) -> None:
    assert wanted_backend(asked, Settings.from_env({"LOCKSTEP_BACKEND": variable})) == wished


def test_unknown_backends_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"LOCKSTEP_BACKEND='tcp': torch knows no backend 'tcp'; name one of .*shm"):
        wanted_backend(None, Settings.from_env({"LOCKSTEP_BACKEND": "tcp"}))
    with pytest.raises(ValueError, match=r"backend='cpu:shm,cuda:ncl': torch knows no backend 'cuda:ncl'"):
        wanted_backend("cpu:shm,cuda:ncl", Settings.from_env({}))


# ---- the rendezvous --------------------------------------------------------------------------------------------------


class Told:
    """A store in which every key is there already, with these values, whatever we set."""

    def __init__(self, cards: list[dict[str, Any]]) -> None:
        self.cards = cards

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return json.dumps(self.cards[int(key.rpartition("/")[2])]).encode()


def introduce(**other: Any) -> list[str]:
    process = {"process": {"pid": 5, "started": "", "space": ""}}
    me = {"host": "here", "pid": os.getpid(), "size": 2, "backend": None} | process
    they = {"host": "there", "pid": 5, "size": 2, "backend": None} | process
    told = Told([me | other.pop("me", {}), they | other])
    rendezvous = Rendezvous(told, 0, 2, "nowhere", time.monotonic() + 1)  # type: ignore[arg-type]
    return _exchange_identities(rendezvous, RankAssignment(0, 2, "test"), "here", None)


def test_workers_that_agree_learn_their_hosts() -> None:
    assert introduce() == ["here", "there"]


def test_workers_that_disagree_are_named() -> None:
    with pytest.raises(WorldError, match=r"rank 1 \(process 5 on there\) was told of 3 workers, rank 0 of 2"):
        introduce(size=3)
    with pytest.raises(WorldError, match=r"rank 1 .* backend='gloo', rank 0 for backend=None"):
        introduce(backend="gloo")
    with pytest.raises(
        WorldError, match=rf"two workers call themselves rank 0: process {os.getpid()} .* process 6 on x"
    ):
        introduce(me={"pid": 6, "host": "x"})


def test_a_rendezvous_that_no_one_joins_says_who_is_missing() -> None:
    meet = Rendezvous(dist.HashStore(), 1, 12, "host:1", time.monotonic() + 0.1)
    with pytest.raises(WorldError, match=r"rank 1 of 12 waited at host:1 for ranks 0, 2, 3, 4, 5, 6, 7, 8 and 3 more"):
        meet.exchange("x", "mine")


# ---- init, in this process -----------------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment that says nothing, and no process group left afterwards."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(
            ("SLURM_", "OMPI_", "PMI", "MPI_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "LOCKSTEP_")
        ):
            monkeypatch.delenv(name)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def set_env(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_a_world_of_one_is_a_real_one(env: pytest.MonkeyPatch) -> None:
    world = lockstep.init(device="cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert (world.device, world.backend, world.source) == (torch.device("cpu"), "shm", "alone")
    assert world.host == socket.gethostname()
    value = torch.arange(3.0)
    dist.all_reduce(value)
    assert value.tolist() == [0, 1, 2]
    with pytest.raises(AttributeError):
        world.rank = 1  # type: ignore[misc]


def test_calling_twice_gives_the_same_world_and_refuses_other_wishes(env: pytest.MonkeyPatch) -> None:
    world = lockstep.init(device="cpu", timeout_s=60)
    assert lockstep.init() is world
    assert lockstep.init(backend="shm", device="cpu", timeout_s=60, join_timeout_s=1) is world
    with pytest.raises(ValueError, match=r"backend='nccl'.*already joined with backend='shm'"):
        lockstep.init(backend="nccl")
    with pytest.raises(ValueError, match=r"device='cuda:0'.*'cpu'"):
        lockstep.init(device="cuda:0")
    with pytest.raises(ValueError, match=r"timeout_s='30'.*'60'"):
        lockstep.init(timeout_s=30)
    assert lockstep.init() is world


def test_after_the_group_is_destroyed_we_join_again(env: pytest.MonkeyPatch) -> None:
    first = lockstep.init(device="cpu")
    dist.destroy_process_group()
    again = lockstep.init(device="cpu")
    assert again == first
    assert dist.is_initialized()


def test_in_another_place_the_old_store_does_not_count(env: pytest.MonkeyPatch, free_port: int) -> None:
    lockstep.init(device="cpu")
    dist.destroy_process_group()
    set_env(env, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    with pytest.raises(WorldError, match=f"127.0.0.1:{free_port} for rank 1"), listening(free_port):
        lockstep.init(join_timeout_s=0.3)


def test_a_group_that_is_there_is_used_as_it_is(env: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    set_env(env, RANK=3, WORLD_SIZE=8)  # would be refused, but is not read
    with pytest.raises(ValueError, match="already there uses 'gloo'"):
        lockstep.init(backend="nccl", device="cpu")
    world = lockstep.init(device="cpu")
    assert (world.rank, world.size, world.backend, world.source) == (0, 1, "gloo", "process group")
    assert dist.group.WORLD is group
    assert lockstep.init() is world


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"timeout_s": -1}, {"join_timeout_s": float("nan")}])
def test_wrong_arguments_change_nothing(env: pytest.MonkeyPatch, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        lockstep.init(**wrong)  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_a_half_set_environment_joins_nothing(env: pytest.MonkeyPatch) -> None:
    set_env(env, WORLD_SIZE=2)
    with pytest.raises(WorldError, match="WORLD_SIZE=2 is set, but RANK is not"):
        lockstep.init()
    assert not dist.is_initialized()


def test_a_join_timeout_that_is_no_number_is_refused(env: pytest.MonkeyPatch) -> None:
    set_env(env, LOCKSTEP_JOIN_TIMEOUT_S="soon")
    with pytest.raises(WorldError, match="LOCKSTEP_JOIN_TIMEOUT_S='soon'"):
        lockstep.init()


@pytest.mark.parametrize("addr", ["127.0.0.1", "localhost", "rank0.example"])
def test_a_port_that_is_taken_is_named_at_once(env: pytest.MonkeyPatch, addr: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        set_env(env, RANK=0, WORLD_SIZE=2, MASTER_ADDR=addr, MASTER_PORT=port)
        begin_s = time.monotonic()
        with pytest.raises(WorldError, match=rf"MASTER_PORT={port}: Address already in use; set MASTER_PORT"):
            lockstep.init()
        assert time.monotonic() - begin_s < 5
    assert not dist.is_initialized()


def test_rank_0_says_whom_it_waited_for_and_gives_the_port_back(env: pytest.MonkeyPatch, free_port: int) -> None:
    set_env(env, RANK=0, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port, LOCKSTEP_JOIN_TIMEOUT_S=0.3)
    for _ in range(2):
        with pytest.raises(WorldError, match=rf"rank 0 of 3 waited at 127.0.0.1:{free_port} for ranks 1, 2"):
            lockstep.init()
    socket.create_server(("127.0.0.1", free_port)).close()


def test_the_others_say_that_rank_0_is_missing(env: pytest.MonkeyPatch, free_port: int) -> None:
    set_env(env, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    begin_s = time.monotonic()
    with pytest.raises(WorldError, match=rf"rank 1 of 2 waited for rank 0 at 127.0.0.1:{free_port}.*refused"):
        lockstep.init(join_timeout_s=0.3)
    assert time.monotonic() - begin_s < 5


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_task_of_those_that_slurm_announced_says_which_variables_announced_them(
    env: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int, rank: int
) -> None:
    env.setattr(rendezvous, "NOTICE_S", 0.1)
    told = {"SLURM_JOB_ID": free_port, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_NTASKS": 3}
    set_env(env, **told, SLURM_NODELIST="localhost", LOCKSTEP_JOIN_TIMEOUT_S=2)
    with pytest.raises(WorldError) as caught:
        lockstep.init()
    awaited = ["for ranks 1, 2", "only rank 0 came"] if rank == 0 else ["for rank 0", "rank 0 did not come"]
    announced = f"SLURM announced 3 tasks (SLURM_NTASKS=3, SLURM_PROCID={rank})"
    advice = ["`srun -n 3 python ...`", "unset SLURM_NTASKS and SLURM_PROCID", "`lockstep run", "JOIN_TIMEOUT_S allows"]
    for words in (*awaited, announced, *advice):
        assert words in str(caught.value)
    (notice,) = [line for line in capsys.readouterr().err.splitlines() if "waits for" in line]
    assert f"rank {rank} of 3 waits for rank {1 - rank}" in notice
    assert announced in notice


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Another process must be listening on the port in the meantime."""
    found: list[bool] = []
    stop = threading.Event()

    def knock() -> None:
        while not stop.wait(0.01) and not found:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                found.append(True)

    knocker = threading.Thread(target=knock)
    knocker.start()
    try:
        yield
    finally:
        stop.set()
        knocker.join()
        assert found


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---- init, among real workers --------------------------------------------------------------------------------------

JOIN = """
import json, os, sys, torch, torch.distributed as dist, lockstep
world = lockstep.init(device="cpu")
value = torch.tensor([world.rank + 1.0])
dist.all_reduce(value)
dist.destroy_process_group()
lockstep.init(device="cpu")  # all of us, once more, at the same store
dist.all_reduce(value)
facts = [world.rank, world.size, world.local_rank, world.local_size, world.backend, world.source, value.item()]
with open(sys.argv[1] + "/" + str(world.rank), "w") as out:
    json.dump(facts, out)
"""

ADOPT = """
import json, sys, torch.distributed as dist, lockstep
dist.init_process_group("gloo")
world = lockstep.init(device="cpu")
facts = [world.rank, world.size, world.local_rank, world.local_size, world.backend, world.source]
with open(sys.argv[1] + "/" + str(world.rank), "w") as out:
    json.dump(facts, out)
"""


def quiet_env(**more: str) -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "PYTHONPATH") if name in os.environ}
    return keep | {"OMP_NUM_THREADS": "1"} | more


def told(folder: Path) -> list[list[object]]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, tmp_path / "join.py", tmp_path], check=True, timeout=300, env=quiet_env())
    assert told(tmp_path) == [[rank, 2, rank, 2, "shm", "RANK/WORLD_SIZE", 6.0] for rank in range(2)]


@pytest.mark.slow
def test_under_srun(tmp_path: Path, free_port: int) -> None:
    """SLURM's variables as srun sets them for two tasks on this host."""
    (tmp_path / "join.py").write_text(JOIN)
    workers = [
        subprocess.Popen(
            [sys.executable, tmp_path / "join.py", tmp_path],
            env=quiet_env(
                SLURM_JOB_ID=str(free_port),
                SLURM_STEP_ID="0",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_NTASKS="2",
                SLURM_STEP_NODELIST="localhost",
            ),
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    assert told(tmp_path) == [[rank, 2, rank, 2, "shm", "SLURM", 6.0] for rank in range(2)]


@pytest.mark.slow
def test_a_stranger_at_the_port_is_not_waited_for() -> None:
    """In a process of its own, which must also be able to end: TCPStore itself would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", "import lockstep; lockstep.init(join_timeout_s=1)"],
            env=quiet_env(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1
    above, card = split_card(done.stderr)
    assert f"reached 127.0.0.1:{port}, but what listens there is not the store of rank 0" in above[-1]
    assert "could not join the others" in card


@pytest.mark.slow
def test_a_group_of_two_is_adopted_and_local_ranks_are_counted(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "adopt.py").write_text(ADOPT)
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    workers = [
        subprocess.Popen([sys.executable, tmp_path / "adopt.py", tmp_path], env=quiet_env(RANK=str(rank), **meet))
        for rank in range(2)
    ]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    assert told(tmp_path) == [[rank, 2, rank, 2, "gloo", "process group"] for rank in range(2)]
