"""Workers on shm that die, stop, leave or give up, with real processes; `make chaos` does the same at random."""

from __future__ import annotations

import ast
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.comm.shm import ShmGroup, group as group_module
from lockstep.errors import PeerLostError
from lockstep.world import world
from on_workers import fork_server

sys.path.append(str(Path(__file__).resolve().parent.parent / "chaos"))
from leftovers import holdings, settle, shm_files, shm_left

AT_ONCE_S = 3  # for a machine that is busy; the deadlines of the groups are far behind. `make chaos` allows one second


@pytest.fixture(autouse=True)
def _nothing_left_in_dev_shm() -> Iterator[None]:
    before = shm_files()
    yield
    assert shm_left(before) == []


def run(function: Callable[..., Any], workers: int, folder: Path, *, gone: set[int], within_s: float = 60) -> list[Any]:
    """What `function(rank, size, folder)` returned on each worker; None for those in `gone`, who are not waited for."""
    members = []
    for rank in range(workers):
        ours, theirs = fork_server().Pipe(duplex=False)
        process = fork_server().Process(target=_work, args=(function, rank, workers, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        members.append((process, ours))
    try:
        end_s = time.monotonic() + within_s
        for rank, (_, pipe) in enumerate(members):
            assert rank in gone or pipe.poll(end_s - time.monotonic()), f"rank {rank} did not finish in {within_s} s"
        return [None if rank in gone else pipe.recv() for rank, (_, pipe) in enumerate(members)]
    finally:
        for process, pipe in members:
            process.kill()
            process.join()
            pipe.close()


def _work(function: Callable[..., Any], rank: int, size: int, folder: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(function(rank, size, folder))
    wait([pipe], timeout=30)  # until we are killed: our end must not be taken for the fault under test
    os._exit(0)


def group_of(rank: int, size: int, folder: Path, *, timeout_s: float = 10) -> ShmGroup:
    return ShmGroup(dist.FileStore(str(folder / "store"), size), rank, size, timedelta(seconds=timeout_s))


def all_reduce_until_error(group: ShmGroup) -> tuple[PeerLostError, float]:
    """The error, and when it came."""
    tensor = torch.ones(10_000)
    while True:
        try:
            group.allreduce([tensor]).wait()
        except PeerLostError as error:
            return error, time.monotonic()


def leave_a_line(folder: Path) -> None:
    """Who does something drastic, and when."""
    (folder / "event").write_text(f"{os.getpid()} {time.monotonic()}")


def event(folder: Path) -> tuple[int, float]:
    pid, when_s = (folder / "event").read_text().split()
    return int(pid), float(when_s)


def soon(after_s: float, action: Callable[[], None]) -> None:
    threading.Timer(after_s, action).start()


# ------------------------------------------------------------------------------------------------------------- killed


def die(folder: Path) -> None:
    leave_a_line(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_all_reduce(rank: int, size: int, folder: Path) -> Any:
    before = holdings()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10))
    if rank == 1:
        soon(0.1, lambda: die(folder))
    error, raised_s = all_reduce_until_error(dist.distributed_c10d._get_default_group())
    said = (error.rank, error.pid, str(error), raised_s)
    dist.destroy_process_group()
    del store, error  # a traceback holds the group
    gc.collect()
    return *said, settle(before)


def test_a_killed_worker_is_named_at_once_and_nothing_of_the_group_stays(tmp_path: Path) -> None:
    results = run(killed_in_all_reduce, 3, tmp_path, gone={1})
    pid, died_s = event(tmp_path)
    for rank, named_pid, text, raised_s, left in (results[0], results[2]):
        assert (rank, named_pid) == (1, pid)
        assert f"rank 1 (pid {pid}) died in all_reduce #" in text
        assert raised_s - died_s < AT_ONCE_S
        assert left == []


def killed_while_forming(rank: int, size: int, folder: Path) -> Any:
    if rank == 2:
        time.sleep(30)  # so that the group cannot come about before the death
    if rank == 1:
        soon(0.3, lambda: die(folder))
    try:
        group_of(rank, size, folder)
    except PeerLostError as error:
        return error.rank, error.pid, str(error), time.monotonic()


def test_a_worker_killed_while_the_group_is_formed_is_named_though_another_is_missing(tmp_path: Path) -> None:
    rank, named_pid, text, raised_s = run(killed_while_forming, 3, tmp_path, gone={1, 2})[0]
    pid, died_s = event(tmp_path)
    assert (rank, named_pid) == (1, pid)
    assert f"rank 1 (pid {pid})" in text
    assert raised_s - died_s < AT_ONCE_S


# ------------------------------------------------------------------------------------------------ killed on the way


class Caught(NamedTuple):
    rank: int | None
    pid: int | None
    text: str
    raised_s: float


def lost_in(action: Callable[[], Any]) -> Caught:
    try:
        action()
    except PeerLostError as error:
        return Caught(error.rank, error.pid, str(error), time.monotonic())
    raise AssertionError("no worker was lost")


def check_named(caught: Caught, victim: int, folder: Path) -> None:
    pid, died_s = event(folder)
    assert (caught.rank, caught.pid) == (victim, pid)
    assert f"rank {victim} (pid {pid})" in caught.text
    assert 0 < caught.raised_s - died_s < AT_ONCE_S


def shm_world(rank: int, size: int, folder: Path) -> Any:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=40))
    return dist.distributed_c10d._get_default_group()


def wait_for(file: Path, within_s: float = 30) -> None:
    end_s = time.monotonic() + within_s
    while not file.exists():
        assert time.monotonic() < end_s, f"{file.name} did not come"
        time.sleep(0.01)


def killed_in_lockstep_init(rank: int, size: int, folder: Path) -> Any:
    victim, moment, port = (folder / "plan").read_text().split()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def die_in_my_turn(*args: Any, **options: Any) -> None:
        time.sleep(0.3)  # the others wait by now
        die(folder)

    if rank == int(victim):
        # In `moment` it has shown its card, and not yet begun with the group.
        module: Any = {"_select_gpu": world, "init_process_group": dist}[moment]
        setattr(module, moment, die_in_my_turn)
    return lost_in(lambda: lockstep.init(backend="shm", join_timeout_s=40, timeout_s=40))


@pytest.mark.few(2)
@pytest.mark.parametrize("moment", ["_select_gpu", "init_process_group"])
@pytest.mark.parametrize("victim", [0, 1])  # rank 0 keeps the store
def test_a_worker_killed_between_its_card_and_the_group_is_named_at_once(
    tmp_path: Path, victim: int, moment: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "plan").write_text(f"{victim} {moment} {port}")
    results = run(killed_in_lockstep_init, 3, tmp_path, gone={victim})
    for caught in (results[rank] for rank in range(3) if rank != victim):
        check_named(caught, victim, tmp_path)


def killed_before_it_has_memory(rank: int, size: int, folder: Path) -> Any:
    if rank == 1:
        group_module.create_segment = lambda: die(folder)  # type: ignore[assignment,return-value]
    if rank == 2:
        wait_for(folder / "second")  # by now two are dead, and the lower rank is not the cause
    caught = lost_in(lambda: shm_world(rank, size, folder))
    if rank == 0:
        (folder / "caught").write_text(repr(tuple(caught)))
        (folder / "second").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return caught


def test_a_worker_killed_as_it_begins_to_join_is_named_also_by_who_comes_late(tmp_path: Path) -> None:
    late = run(killed_before_it_has_memory, 3, tmp_path, gone={0, 1})[2]
    prompt = Caught(*ast.literal_eval((tmp_path / "caught").read_text()))
    check_named(prompt, 1, tmp_path)
    assert (late.rank, late.pid, late.text) == (1, prompt.pid, prompt.text)


def killed_before_new_group(rank: int, size: int, folder: Path) -> Any:
    shm_world(rank, size, folder)
    if rank == 2:
        time.sleep(0.3)
        die(folder)
    if rank == 0:
        dist.new_group([1, 2, 3])  # is not in it, so need not wait
        wait_for(folder / "third")  # by now two are dead, and the lower rank is not the cause
        return lost_in(dist.barrier)
    caught = lost_in(lambda: dist.new_group([1, 2, 3], timeout=timedelta(seconds=40)))
    if rank == 1:
        (folder / "caught").write_text(repr(tuple(caught)))
        (folder / "third").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return caught


def test_a_worker_killed_before_it_joins_a_subgroup_is_named_at_once_by_its_global_rank(tmp_path: Path) -> None:
    in_the_whole, _, _, in_the_part = run(killed_before_new_group, 4, tmp_path, gone={1, 2})
    for caught in (in_the_part, Caught(*ast.literal_eval((tmp_path / "caught").read_text()))):
        check_named(caught, 2, tmp_path)
    assert (in_the_whole.rank, in_the_whole.pid) == (2, in_the_part.pid)


def ends_because_of_another(rank: int, size: int, folder: Path) -> Any:
    shm_world(rank, size, folder)
    if rank == 1:
        time.sleep(0.3)
        die(folder)
    if rank == 2:
        lost_in(dist.barrier)
        os.kill(os.getpid(), signal.SIGKILL)
    # Rank 1 has nothing to do with this group, but is the reason why rank 2 does not come to it.
    return lost_in(lambda: dist.new_group([0, 2], use_local_synchronization=True, timeout=timedelta(seconds=40)))


def test_who_ended_because_of_another_is_not_to_blame_for_a_subgroup_that_failed(tmp_path: Path) -> None:
    check_named(run(ends_because_of_another, 3, tmp_path, gone={1, 2})[0], 1, tmp_path)


def goes_on_without(rank: int, size: int, folder: Path) -> Any:
    shm_world(rank, size, folder)
    if rank == 1:
        die(folder)
    lost_in(dist.barrier)
    group: Any = dist.new_group([0, 2], use_local_synchronization=True, timeout=timedelta(seconds=20))
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group)
    return tensor.sum().item()


def test_survivors_form_a_subgroup_though_the_group_of_all_has_a_dead_member(tmp_path: Path) -> None:
    assert run(goes_on_without, 3, tmp_path, gone={1}) == [20, None, 20]


# ------------------------------------------------------------------------------------------------- silent, or leaving


def stopped(rank: int, size: int, folder: Path) -> Any:
    group = group_of(rank, size, folder, timeout_s=1)
    if rank == 1:
        leave_a_line(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
    error, raised_s = all_reduce_until_error(group)
    return error.rank, error.pid, str(error), raised_s


def test_a_stopped_worker_is_named_at_the_deadline_not_before(tmp_path: Path) -> None:
    results = run(stopped, 3, tmp_path, gone={1})
    pid, stopped_s = event(tmp_path)
    for rank, named_pid, text, raised_s in (results[0], results[2]):
        assert (rank, named_pid) == (1, pid)
        assert f"rank 1 (pid {pid})" in text
        assert 0.9 < raised_s - stopped_s < 1 + AT_ONCE_S


def leaves(rank: int, size: int, folder: Path) -> Any:
    group = group_of(rank, size, folder)
    if rank == 1:
        time.sleep(0.2)  # the others wait by now
        leave_a_line(folder)
        group.shutdown()
        return None
    error, raised_s = all_reduce_until_error(group)
    return error.rank, error.pid, str(error), raised_s


def test_a_worker_that_leaves_in_peace_is_named_by_those_who_wait(tmp_path: Path) -> None:
    results = run(leaves, 3, tmp_path, gone=set())
    pid, left_s = event(tmp_path)
    for rank, named_pid, text, raised_s in (results[0], results[2]):
        assert (rank, named_pid) == (1, pid)
        assert f"rank 1 (pid {pid}) left" in text
        assert raised_s - left_s < AT_ONCE_S


def aborts(rank: int, size: int, folder: Path) -> Any:
    group = group_of(rank, size, folder)
    if rank == 1:
        time.sleep(30)  # never comes
    aborted_s = []

    def abort() -> None:
        aborted_s.append(time.monotonic())
        group.abort()

    # One that waits in its own thread, one that was started before and is carried out by the group's.
    started = group.allreduce([torch.ones(4)])
    soon(0.3, abort)
    freed = []
    for wait_for in (started.wait, lambda: group.barrier().wait()):
        try:
            wait_for()
        except RuntimeError as error:
            freed.append((time.monotonic(), str(error)))
    return aborted_s[0], freed


def test_abort_from_another_thread_frees_a_waiter_at_once(tmp_path: Path) -> None:
    aborted_s, freed = run(aborts, 2, tmp_path, gone={1})[0]
    assert len(freed) == 2
    for freed_s, text in freed:
        assert freed_s - aborted_s < AT_ONCE_S
        assert "abort" in text


def aborted_under_its_hands(rank: int, size: int, folder: Path) -> Any:
    """By another thread, after this one has told the others of its call and before it waits for them."""
    group = group_of(rank, size, folder)
    if rank == 1:
        time.sleep(30)  # never comes
    found, mine = [], torch.ones(4)
    sync = group._sync
    arrive = sync.arrive

    def arrive_and_abort() -> int:
        phase = arrive()
        aborting = threading.Thread(target=group.abort)
        aborting.start()
        aborting.join()
        return phase

    sync.arrive = arrive_and_abort  # type: ignore[method-assign]
    try:
        group.allreduce([mine]).wait()
        found.append(f"got {mine.tolist()}")
    except RuntimeError as error:
        found.append(str(error))
    return found


@pytest.mark.slow
def test_a_collective_whose_group_is_aborted_under_its_hands_gives_no_garbage(tmp_path: Path) -> None:
    (said,) = run(aborted_under_its_hands, 2, tmp_path, gone={1})[0]
    assert "this shm group was aborted by rank 0" in said


# ----------------------------------------------------------------------------------------------------- nothing amiss


def comes_and_goes(rank: int, size: int, folder: Path) -> Any:
    before = holdings()
    during = 0
    for turn in range(3):
        store = dist.FileStore(str(folder / f"store-{turn}"), size)
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10))
        group: Any = dist.distributed_c10d._get_default_group()
        tensor = group.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
        works = [dist.all_reduce(t, async_op=True) for t in (tensor.fill_(1), torch.ones(100_000))]
        for work in works:
            assert work is not None
            work.wait()
        assert bool((tensor == size).all())
        during = len(holdings().descriptors)
        dist.destroy_process_group()
        del store, group, tensor, works, work
    gc.collect()
    return during - len(before.descriptors), settle(before)


def test_descriptors_threads_and_memory_are_as_before_when_a_group_is_destroyed(tmp_path: Path) -> None:
    for held, left in run(comes_and_goes, 2, tmp_path, gone=set()):
        assert held > 0, "a group that holds nothing shows nothing"
        assert left == []
