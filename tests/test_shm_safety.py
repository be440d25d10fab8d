"""What must not go wrong on shm: strangers, workers that disagree, wrong arguments, forked children, little memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checks import Checks
from lockstep import DistributedDataParallel
from lockstep.comm.shm import ShmGroup, collectives
from lockstep.comm.shm.reduce_ops import Reduction
from lockstep.errors import DesyncError, LockstepError, SharedMemoryFullError
from on_workers import on_workers
from plain import KINDS, reduced, same_bits, some
from programs import train

CHECKS = Checks()
LONG = 100_000


def full(value: float, numel: int = 5) -> Tensor:
    return torch.full((numel,), float(value))


# --------------------------------------------------------------------------------------------------------- strangers

# Connects to a socket without a file, says something, and prints what it was given.
STRANGER = """
import json, os, socket, sys
name, says, uid = sys.argv[1], sys.argv[2], int(sys.argv[3])
if uid:
    os.setuid(uid)
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(b"\\0" + name.encode())
print("connected", flush=True)
if says:
    memory = os.memfd_create("stranger")
    os.ftruncate(memory, 1 << 27)
    socket.send_fds(link, [says.encode()], [memory])
link.settimeout(30)
try:
    data, fds, _, _ = socket.recv_fds(link, 4096, 4)
    print(f"given {data!r} and {len(fds)} descriptors", flush=True)
except ConnectionResetError:
    print("given b'' and 0 descriptors", flush=True)
"""


def sockets_of(pid: int) -> list[str]:
    """The abstract names at which this process listens for its group."""
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    by_inode = {f"socket:[{fields[6]}]": fields[7][1:] for fields in listed if fields[-1].startswith("@lockstep-")}
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it may be closed meanwhile
            links.append(os.readlink(fd))
    return sorted({by_inode[link] for link in links if link in by_inode})


def besieged(rank: int, size: int, folder: Path, uids: list[int]) -> Any:
    """Rank 1 joins only when strangers are at rank 0's door."""
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    store = dist.FileStore(str(folder / "store"), size)
    strangers = []
    if rank == 1:
        end_s = time.monotonic() + 10
        while not (names := sockets_of(pids[0])) and time.monotonic() < end_s:
            time.sleep(0.01)
        forged = f'{{"secret": "{"0" * 32}", "rank": 1, "size": {1 << 27}, "offer": 65536}}'
        known = forged.replace("0" * 32, store.get("secret").decode())
        for uid in uids:
            # A process that is no member is refused though it knows everything; silent ones must not block others.
            for says in (forged, "[]", "") if uid == 0 else (known, "not even JSON", ""):
                command = [sys.executable, "-c", STRANGER, names[0], says, str(uid)]
                strangers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                assert strangers[-1].stdout.readline() == "connected\n"
    began_s = time.monotonic()
    group = ShmGroup(store, rank, size, timedelta(seconds=20))
    took_s = time.monotonic() - began_s
    group.allreduce([tensor := full(rank)]).wait()
    dist.barrier()  # now no worker listens any more
    said = [stranger.communicate(timeout=120)[0].strip() for stranger in strangers]
    return tensor.tolist(), said, took_s if rank == 1 else 0


@pytest.mark.parametrize(
    "uids",
    [
        pytest.param([0], id="of the same user"),
        pytest.param(
            [65534], id="of another user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can be others")
        ),
    ],
)
def test_strangers_are_turned_away_and_the_group_forms(uids: list[int], tmp_path: Path) -> None:
    for tensor, said, took_s in on_workers(besieged, 2, tmp_path, uids):
        assert tensor == [1] * 5
        assert set(said) <= {"given b'' and 0 descriptors"}
        assert took_s < 4


# --------------------------------------------------------------------------------------------- who does not agree

ODD = 1  # this rank calls something else than the others
BETWEEN_TWO = ("size of broadcast", "size of gather", "size of scatter", "splits of all_to_all")

DISAGREEMENTS: dict[str, Callable[[bool, Any], Any]] = {
    "size of all_reduce": lambda o, g: dist.all_reduce(full(1, 5 + o), group=g),
    "size of a large all_reduce": lambda o, g: dist.all_reduce(full(1, LONG + o), group=g),
    "a small and a large all_reduce": lambda o, g: dist.all_reduce(full(1, 5 if o else LONG), group=g),
    "operation": lambda o, g: dist.all_reduce(full(1), op=dist.ReduceOp.MAX if o else dist.ReduceOp.SUM, group=g),
    "dtype": lambda o, g: dist.all_reduce(full(1).double() if o else full(1, 10), group=g),
    "root of reduce": lambda o, g: dist.reduce(full(1), group_dst=1 if o else 0, group=g),
    "root of broadcast": lambda o, g: dist.broadcast(full(1), group_src=2 if o else 0, group=g),
    "size of broadcast": lambda o, g: dist.broadcast(full(1, 5 + o), group_src=0, group=g),
    "size of a large broadcast": lambda o, g: dist.broadcast(full(1, LONG + o), group_src=1, group=g),
    "size of all_gather": lambda o, g: dist.all_gather([full(0, 5 + o) for _ in range(3)], full(1, 5 + o), group=g),
    "size of reduce_scatter": lambda o, g: dist.reduce_scatter(full(0, 5 + o), [full(1, 5 + o)] * 3, group=g),
    "size of gather": lambda o, g: dist.gather(
        full(1, 5 + o), [full(0) for _ in range(3)] if dist.get_rank() == 0 else None, group_dst=0, group=g
    ),
    "size of scatter": lambda o, g: dist.scatter(
        full(1, 5 + o), [full(0) for _ in range(3)] if dist.get_rank() == 0 else None, group_src=0, group=g
    ),
    "splits of all_to_all": lambda o, g: dist.all_to_all(
        [full(0, 2) for _ in range(3)], [full(0, 2 + (o and r == 0)) for r in range(3)], group=g
    ),
    "another collective": lambda o, g: dist.barrier(group=g) if o else dist.all_reduce(full(1), group=g),
}


@CHECKS.workers(3)
def a_worker_that_disagrees_is_named_by_all_at_once(rank: int, size: int, group: Any) -> None:
    wrong = []
    for name, call in DISAGREEMENTS.items():
        group = dist.new_group(backend="shm", timeout=timedelta(seconds=10))
        began_s = time.monotonic()
        try:
            call(rank == ODD, group)
            # Ranks 0 and 1 do not fit together. Rank 2 has what is its own, and is told at its next call.
            if rank != 2 or name not in BETWEEN_TWO:
                wrong.append(f"{name}: no error")
        except DesyncError as error:
            named = [f"rank {r} (pid " in str(error) for r in range(size)]
            if not named[ODD] or sum(named) < 2:
                wrong.append(f"{name}: names the wrong ones: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        if time.monotonic() - began_s > 3:
            wrong.append(f"{name}: took {time.monotonic() - began_s:.1f} s")
        try:
            group.barrier().wait()
            wrong.append(f"{name}: the group goes on")
        except LockstepError:
            pass
    assert not wrong, "\n".join(wrong)


@CHECKS.workers(2)
def an_error_midway_on_one_worker_never_gives_wrong_sums_later(rank: int, size: int, group: Any) -> None:
    """Here that of a root that has no memory to add up in, when the others are through already."""
    usual = Reduction.run

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError("no more")

    Reduction.run = fail  # type: ignore[method-assign]
    try:
        dist.reduce(full(1), group_dst=0, group=group)
        assert rank != 0, "no error"
    except (MemoryError, LockstepError):
        pass
    Reduction.run = usual  # type: ignore[method-assign]
    totals = []
    with contextlib.suppress(LockstepError):
        for turn in range(4):
            dist.all_reduce(tensor := full(rank + turn), group=group)
            totals.append((turn, tensor[0].item()))
    assert all(total == 2 * turn + 1 for turn, total in totals), f"(turn, total): {totals}"


# -------------------------------------------------------------------------------------------------- wrong arguments


def wrong_calls(g: Any) -> dict[str, Callable[[], Any]]:
    """For a group of two; each must be refused before anything is sent."""
    pair, cpu, exchange = [full(0), full(0)], torch.device("cpu"), dist.all_to_all_single
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_gather into too few": lambda: dist.all_gather([full(0)], full(1), group=g),
        "all_gather into another size": lambda: dist.all_gather([full(0), full(0, 6)], full(1), group=g),
        "all_gather into another dtype": lambda: g.allgather([[full(0), full(0).int()]], [full(1)]),
        "all_gather_single into too little": lambda: single(full(0, 9), full(1), group=g),
        "all_gather_single into another dtype": lambda: single(full(0, 10).int(), full(1), group=g),
        "reduce_scatter of too few": lambda: dist.reduce_scatter(full(0), [full(1)], group=g),
        "reduce_scatter into another size": lambda: dist.reduce_scatter(full(0, 4), pair, group=g),
        "reduce_scatter_single of another size": lambda: scatter_single(full(0), full(1, 9), group=g),
        "reduce_scatter_single into another dtype": lambda: scatter_single(full(0).double(), full(1, 10), group=g),
        "gather of another size": lambda: dist.gather(full(1, 4), pair, group_dst=0, group=g),
        "scatter of another size": lambda: dist.scatter(full(1, 4), pair, group_src=0, group=g),
        "scatter of too few": lambda: dist.scatter(full(1), [full(0)], group_src=0, group=g),
        "all_to_all of too few": lambda: dist.all_to_all(pair, [full(1)], group=g),
        "all_to_all of rows that cannot be shared": lambda: exchange(full(0), full(1), group=g),
        "all_to_all of splits that do not add up": lambda: exchange(full(0), full(1), [2, 3], [1, 3], group=g),
        "all_to_all, not itself": lambda: exchange(full(0), full(1), [2, 3], [3, 2], group=g),
        "broadcast from no rank": lambda: dist.broadcast(full(1), group_src=2, group=g),
        "reduce to no rank": lambda: dist.reduce(full(1), group_dst=-1, group=g),
        "send to itself": lambda: g.send([full(1)], 0, 0),
        "send to no rank": lambda: g.send([full(1)], 5, 0),
        "receive from no rank": lambda: g.recv([full(1)], -2, 0),
        "all_reduce of two": lambda: g.allreduce(pair),
        "memory on no device of ours": lambda: g.allocate_tensor(3, dtype=torch.float32, device=torch.device("meta")),
        "a negative size": lambda: g.allocate_tensor(-1, dtype=torch.float32, device=cpu),
        "bits of floats": lambda: dist.all_reduce(full(1), op=dist.ReduceOp.BAND, group=g),
        "mean of bools": lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG, group=g),
        "largest of complex": lambda: g.allreduce([full(1).to(torch.complex64)], with_op(dist.ReduceOp.MAX)),
        "sum of eight bits": lambda: dist.all_reduce(full(1).to(torch.float8_e4m3fn), group=g),
    }


def with_op(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return options


@CHECKS.workers(2)
def wrong_arguments_are_refused_before_anything_is_sent(rank: int, size: int, group: Any) -> None:
    wrong = []
    for name, call in wrong_calls(group).items() if rank == 0 else ():
        try:
            call()
            wrong.append(f"{name}: no error")
        except (ValueError, TypeError):
            pass
        except RuntimeError as error:  # torch's word for a reduction that does not fit the dtype
            if "ReduceOp" not in str(error) and "reduced" not in str(error):
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    dist.all_reduce(tensor := full(rank), group=group)  # the other has waited for nothing but this
    assert tensor.eq(1).all()
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------------------- forks


@CHECKS.workers(2)
def a_forked_child_is_told_and_does_no_harm(rank: int, size: int, group: Any) -> None:
    lent = group.allocate_tensor(LONG, dtype=torch.float32, device=torch.device("cpu")).fill_(7)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, "\n".join(_what_a_child_is_told(group)).encode())
        del lent  # frees nothing of the parent's
        gc.collect()
        group.shutdown()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(told) == 6
    assert all("belongs to the parent process; a forked child cannot use it" in line for line in told), told
    again = group.allocate_tensor(LONG, dtype=torch.float32, device=torch.device("cpu")).fill_(rank)
    dist.all_reduce(again, group=group)
    assert again.eq(1).all()
    assert lent.eq(7).all()


def _what_a_child_is_told(group: Any) -> list[str]:
    told = []
    for call in (
        lambda: group.allreduce([full(1)]),
        lambda: group.barrier(),
        lambda: group.send([full(1)], 1 - group.rank(), 0),
        lambda: group.recv([full(1)], 1 - group.rank(), 0),
        lambda: group.recv_anysource([full(1)], 0),
        lambda: group.allocate_tensor(3, dtype=torch.float32, device=torch.device("cpu")),
    ):
        try:
            call()
            told.append("nothing")
        except RuntimeError as error:
            told.append(str(error).replace("\n", " "))
    return told


# ----------------------------------------------------------------------------------------------------------- by name


@pytest.mark.slow
def test_importing_lockstep_registers_whichever_comes_first() -> None:
    known = "assert 'shm' in d.Backend.backend_list and d.is_backend_available('shm')"
    programs = [
        f"import sys, lockstep; assert 'torch' not in sys.modules; import torch.distributed as d; {known}",
        f"import torch.distributed as d; import lockstep; {known}",
    ]
    running = [subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True) for text in programs]
    for process in running:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error


def by_name(rank: int, size: int, folder: Path) -> None:
    for number, backend in enumerate(("cpu:shm", "cpu:shm,cuda:gloo", "cuda:gloo,cpu:shm")):
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / f"{number}"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10))
        part = dist.new_group([0, 1], backend=backend)
        for group in (None, part):
            dist.all_reduce(tensor := full(rank), group=group)
            assert tensor.eq(1).all()
            dist.all_gather_object(got := [None] * size, rank, group=group)
            assert got == [0, 1]
            dist.barrier(group=group)
        digests = train(DistributedDataParallel, "mlp", rank, steps=2)
        dist.all_gather_object(got, digests[1::2])
        assert got[0] == got[1]


def test_as_the_cpu_part_of_a_backend_for_several_devices(tmp_path: Path) -> None:
    on_workers(by_name, 2, tmp_path)


# ----------------------------------------------------------------------------------------------------- scarce memory


@pytest.fixture
def small_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of so many MB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
        assert os.statvfs(folder).f_bfree == os.statvfs(folder).f_blocks, "something is left"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def in_scarce_memory(rank: int, size: int, folder: Path) -> tuple[int, list[str]]:
    os.environ["LOCKSTEP_SHM_DIR"] = str(folder)
    group: Any = dist.new_group(backend="shm", timeout=timedelta(seconds=10))
    assert os.listdir(folder) == [], "without a name"
    for numel in (5, LONG, 1 << 20):
        ours = [some(torch.float32, numel, r) for r in range(size)]
        tensor = ours[rank].clone()
        dist.all_reduce(tensor, group=group)
        assert same_bits(tensor, reduced(KINDS.SUM, ours))
        dist.all_gather(got := [torch.empty(numel) for _ in ours], ours[rank], group=group)
        assert all(map(same_bits, got, ours))
    advice = r"--shm-size|LOCKSTEP_SHM_DIR"
    with pytest.raises(SharedMemoryFullError, match=rf"a tensor of 16777216 x float32 needs 64\.0 MiB .*({advice})"):
        group.allocate_tensor(16 << 20, dtype=torch.float32, device=torch.device("cpu"))
    dist.barrier(group=group)

    scarce = functools.partial(DistributedDataParallel, process_group=group)
    digests = train(scarce, "mlp", rank, steps=3)
    hoard = []
    while True:  # until nothing is left
        try:
            hoard.append(group.allocate_tensor(1 << 18, dtype=torch.uint8, device=torch.device("cpu")).fill_(1))
        except SharedMemoryFullError as full_up:
            assert re.search(advice, str(full_up))
            break
    dist.barrier(group=group)
    assert train(scarce, "mlp", rank, steps=3) == digests, "in ordinary memory"
    return group._host.section_bytes, digests[1::2]


# 64 MB is the size of /dev/shm in a container of Docker.
@pytest.mark.few(1)
@pytest.mark.parametrize(("small_folder", "workers"), [(64, 2), (64, 6), (8, 4)], indirect=["small_folder"])
def test_where_memory_is_scarce_slots_are_smaller_and_training_goes_on(workers: int, small_folder: Path) -> None:
    results = on_workers(in_scarce_memory, workers, small_folder)
    assert all(digests == results[0][1] for _, digests in results)
    sections = {section for section, _ in results}
    assert len(sections) == 1
    assert workers != 4 or sections.pop() < collectives.SLOT_BYTES // workers


@pytest.mark.parametrize(("name", "size"), CHECKS.cases())
def test_safety(name: str, size: int) -> None:
    failures = CHECKS.failures(name, size)
    assert not failures, failures


# ---- many files ------------------------------------------------------------------------------------------------------


def with_many_files(rank: int, size: int, store: str) -> list[float]:
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    group = ShmGroup(dist.FileStore(store, size), rank, size, timedelta(seconds=60))
    group.allreduce([tensor := full(rank + 1.0)], dist.AllreduceOptions()).wait()
    assert min(kept) < 1024 < max(kept)
    return tensor.tolist()


def test_a_program_may_have_more_than_a_thousand_open_files(tmp_path: Path) -> None:
    assert on_workers(with_many_files, 2, str(tmp_path / "store")) == [[3.0] * 5] * 2
