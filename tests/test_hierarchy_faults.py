"""Workers of a `hierarchy` that die, stop or give up: all others are told who it was, and none waits in vain."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.hierarchy import HierarchicalGroup, HierarchyOptions
from lockstep.errors import DesyncError, LockstepError, PeerLostError
from on_workers import fork_server

LARGE, SMALL = 600_000, 100  # elements: in chunks, and in one go
SOON_S = 3.0


def run(function: Callable[..., Any], hosts: str, *args: Any, gone: Sequence[int] = ()) -> list[Any]:
    """What `function(rank, *args)` returned on each worker, except for those that are `gone`."""
    members = []
    for rank in range(len(hosts)):
        ours, theirs = fork_server().Pipe(duplex=False)
        process = fork_server().Process(target=_work, args=(theirs, function, rank, hosts, *args), daemon=True)
        process.start()
        theirs.close()
        members.append((process, ours))
    try:
        end = time.monotonic() + 100
        survivors = [rank for rank in range(len(hosts)) if rank not in gone]
        for rank in survivors:
            assert members[rank][1].poll(max(0, end - time.monotonic())), f"rank {rank} did not finish"
        return [members[rank][1].recv() for rank in survivors]
    finally:
        for process, pipe in members:
            process.kill()
            process.join()
            pipe.close()


def _work(pipe: Any, function: Callable[..., Any], rank: int, hosts: str, *args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCKSTEP_HOST"] = hosts[rank]
    pipe.send(function(rank, hosts, *args))
    wait([pipe], timeout=100)  # until we are killed: our end must not be taken for the fault under test
    os._exit(0)


def join(rank: int, hosts: str, folder: Path, *, timeout_s: float = 60) -> Any:
    """The group, when every worker has finished a collective: one that is being formed fails in another way."""
    store = dist.FileStore(str(folder / "store"), len(hosts))
    group: Any = HierarchicalGroup(store, rank, len(hosts), timedelta(seconds=timeout_s), options=HierarchyOptions())
    group.allreduce([torch.zeros(SMALL)]).wait()
    await_all(rank, hosts, folder, "joined")
    return group


def await_all(rank: int, hosts: str, folder: Path, what: str) -> None:
    """Wait until all workers have come here."""
    (folder / f"{what} {rank}").touch()
    end = time.monotonic() + 60
    while not all((folder / f"{what} {other}").exists() for other in range(len(hosts))):
        assert time.monotonic() < end, f"rank {rank} waits for the others: {what}"
        time.sleep(0.01)


def reduce_until_error(group: Any, numel: int) -> tuple[LockstepError, float]:
    tensor = torch.zeros(numel)
    while True:
        try:
            group.allreduce([tensor]).wait()
        except LockstepError as error:
            return error, time.monotonic()


def strike(rank: int, hosts: str, folder: Path, victim: int, number: int, numel: int, timeout_s: float) -> Any:
    """(type of the error, rank it names, its text, seconds after the blow)"""
    group = join(rank, hosts, folder, timeout_s=timeout_s)
    at = folder / "struck"
    if rank == victim:

        def blow() -> None:
            time.sleep(0.2)
            at.write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)

        threading.Thread(target=blow).start()
    error, when = reduce_until_error(group, numel)
    again = reduce_until_error(group, numel)[0]
    assert str(again) == str(error)  # and at once
    return type(error), getattr(error, "rank", None), str(error), when - float(at.read_text())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("hosts", "victim", "numel"),
    [("aabb", 2, LARGE), ("aabb", 1, SMALL), ("aab", 2, LARGE), ("aab", 1, LARGE), ("abc", 1, LARGE)],
)
def test_a_worker_that_dies_is_named_on_every_host(hosts, victim, numel, tmp_path):
    for sort, named, text, after_s in run(strike, hosts, tmp_path, victim, signal.SIGKILL, numel, 60.0, gone=[victim]):
        assert sort is PeerLostError
        assert named == victim, text
        assert f"rank {victim} (pid" in text
        assert after_s < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "victim"), [("aabb", 3), ("ab", 1)])
def test_a_worker_that_is_stopped_is_named_at_the_deadline(hosts, victim, tmp_path):
    for sort, named, text, after_s in run(strike, hosts, tmp_path, victim, signal.SIGSTOP, SMALL, 6.0, gone=[victim]):
        assert sort is PeerLostError
        assert named == victim, text
        assert 5.5 < after_s < 6.0 + SOON_S


def give_up(rank: int, hosts: str, folder: Path) -> tuple[str, float]:
    group = join(rank, hosts, folder)
    if rank == 1:
        time.sleep(0.3)
        waiting = group.allreduce([torch.zeros(SMALL)])
        started = time.monotonic()
        (folder / "struck").write_text(str(started))
        group.abort()
        with suppress(LockstepError):  # it may have come to an end just before
            waiting.wait()
        return str(reduce_until_error(group, SMALL)[0]), time.monotonic() - started
    error, when = reduce_until_error(group, SMALL)
    return str(error), when - float((folder / "struck").read_text())


def test_abort_frees_all_workers(tmp_path):
    for text, after_s in run(give_up, "aabb", tmp_path):
        assert text.startswith("rank 1 (pid"), text
        assert "aborted the group" in text
        assert after_s < SOON_S


def stumble(rank: int, hosts: str, folder: Path) -> str:
    group = join(rank, hosts, folder)
    if rank == 2:
        group._on_host.all_reduce = None  # something that cannot happen
    return str(reduce_until_error(group, LARGE)[0])


def test_an_error_on_one_worker_ends_the_collective_on_all(tmp_path):
    for text in run(stumble, "aabb", tmp_path):
        assert text.startswith("rank 2 (pid")
        assert "failed in all_reduce #2" in text


def differ(rank: int, hosts: str, folder: Path) -> tuple[type, str]:
    group = join(rank, hosts, folder)
    error, _ = reduce_until_error(group, LARGE if rank == 1 else SMALL)
    return type(error), str(error)


def test_workers_that_call_different_collectives_are_told_so(tmp_path):
    answers = run(differ, "aabb", tmp_path)
    assert DesyncError in [sort for sort, _ in answers]
    for _, text in answers:
        assert "look for control flow that depends on the rank" in text


def come_and_go(rank: int, hosts: str, folder: Path) -> tuple[Any, Any]:
    """What this process has open before and after a few groups: descriptors, and threads of all languages."""
    (folder / "first").mkdir(exist_ok=True)
    form_and_leave(rank, hosts, folder / "first")  # what torch keeps for good
    before = holdings()
    for name in ("second", "third"):
        (folder / name).mkdir(exist_ok=True)
        form_and_leave(rank, hosts, folder / name)
    end = time.monotonic() + 5
    while holdings() != before and time.monotonic() < end:
        time.sleep(0.05)
    return before, holdings()


def form_and_leave(rank: int, hosts: str, folder: Path) -> None:
    group = join(rank, hosts, folder)
    group.allreduce([torch.zeros(LARGE)]).wait()
    group.barrier().wait()
    await_all(rank, hosts, folder, "leaving")
    group.shutdown()
    del group
    gc.collect()


def holdings() -> tuple[int, int]:
    sockets = [fd for fd in os.listdir("/proc/self/fd") if _is_socket(fd)]
    return len(sockets), len(os.listdir("/proc/self/task"))


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def test_a_group_that_is_shut_down_leaves_nothing_behind(tmp_path):
    for before, after in run(come_and_go, "aabb", tmp_path):
        assert after == before


def wait_alone(rank: int, hosts: str, folder: Path) -> str:
    started = time.monotonic()
    with pytest.raises(LockstepError) as caught:
        join(rank, "ab", folder, timeout_s=1.0)
    assert time.monotonic() - started < 5
    return str(caught.value)


def test_forming_with_a_worker_that_does_not_come_says_who(tmp_path):
    (text,) = run(wait_alone, "a", tmp_path)
    assert "waited 1 s for rank 1 of 2" in text
