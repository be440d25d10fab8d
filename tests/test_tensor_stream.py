"""Checkpoints of a distributed state: its tensors are written while they arrive, and are mapped when it is read."""

from __future__ import annotations

import itertools
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.checkpoint import file_io, format as layout, tensor_stream
from lockstep.checkpoint.manifest import read as read_manifest
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.tensor_stream import StalledDiskError, TensorStream
from lockstep.checkpoint.writer import CheckpointWriter
from lockstep.ddp import state_holders
from lockstep.errors import CheckpointError
from on_workers import on_workers
from runs import classify, data

TENSORS = [torch.arange(n * 10, n * 10 + 10, dtype=torch.float32) for n in range(5)]
WAIT_S = 20.0


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def put_all(stream: TensorStream, count: int = len(TENSORS)) -> None:
    for tensor in TENSORS[:count]:
        stream.put(tensor)
    stream.end()


def test_few_tensors_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", 2 * TENSORS[0].nbytes)
    stream = TensorStream()
    places = [stream.add(one.dtype, tuple(one.shape)) for one in TENSORS]
    sender = in_thread(lambda: put_all(stream))
    sender.join(1.0)
    assert sender.is_alive()
    assert len(stream._waiting) == 2
    for place, tensor in zip(places, TENSORS, strict=True):
        assert torch.equal(place.take(), tensor)
        assert place.nbytes == tensor.nbytes
    sender.join(WAIT_S)
    assert not sender.is_alive()


def test_what_nobody_writes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", TENSORS[0].nbytes)
    stream = TensorStream()
    for one in TENSORS:
        stream.add(one.dtype, tuple(one.shape))
    sender = in_thread(lambda: put_all(stream))
    sender.join(0.2)
    stream.abandon()
    sender.join(WAIT_S)
    assert not sender.is_alive()
    assert not stream._waiting


def test_a_disk_that_takes_nothing_stops_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", TENSORS[0].nbytes)
    monkeypatch.setattr(tensor_stream, "STALLED_S", 0.3)
    monkeypatch.setattr(tensor_stream, "CHECK_EVERY_S", 0.05)
    stream = TensorStream()
    places = [stream.add(one.dtype, tuple(one.shape)) for one in TENSORS]
    put_all(stream)  # returns although nothing is taken
    assert torch.equal(places[0].take(), TENSORS[0])
    with pytest.raises(StalledDiskError, match="nothing was read or written for"):
        places[1].take()


def test_a_slow_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as pieces are written, of this checkpoint or of the one before it; and it is printed."""
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", TENSORS[0].nbytes)
    monkeypatch.setattr(tensor_stream, "STALLED_S", 0.4)
    monkeypatch.setattr(tensor_stream, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(tensor_stream, "REPORT_EVERY_S", 0.5)
    stream, said = TensorStream(), list[str]()
    places = [stream.add(one.dtype, tuple(one.shape)) for one in TENSORS]
    stream.put(TENSORS[0])
    sender = in_thread(lambda: stream.put(TENSORS[1], report=said.append))
    for _ in range(20):
        file_io.count_piece()
        sender.join(0.1)
    assert sender.is_alive()
    assert torch.equal(places[0].take(), TENSORS[0])
    sender.join(WAIT_S)
    assert torch.equal(places[1].take(), TENSORS[1])
    assert "training waits for a checkpoint to be written" in said[0]


def test_an_error_elsewhere_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", TENSORS[0].nbytes)
    monkeypatch.setattr(tensor_stream, "CHECK_EVERY_S", 0.05)
    stream = TensorStream()

    def check() -> None:
        raise lockstep.PeerLostError("rank 1 is gone")

    stream.put(TENSORS[0], check=check)
    with pytest.raises(lockstep.PeerLostError):
        stream.put(TENSORS[1], check=check)


def test_the_order_is_checked() -> None:
    stream = TensorStream()
    _, second = (stream.add(one.dtype, tuple(one.shape)) for one in TENSORS[:2])
    with pytest.raises(CheckpointError, match="not taken in their order"):
        second.take()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def state(tensors: Any) -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}, "optimizer": {n: {"m": one} for n, one in enumerate(tensors)}, "step": 3}


def test_the_files_are_those_of_a_state_that_is_here(tmp_path: Path) -> None:
    problems = list[str]()
    stream = TensorStream()
    with CheckpointWriter(CheckpointStore(tmp_path / "streamed"), problems.append) as writer:
        writer.submit(3, state([stream.add(one.dtype, tuple(one.shape)) for one in TENSORS]))
        put_all(stream)
    with CheckpointWriter(CheckpointStore(tmp_path / "here"), problems.append) as writer:
        writer.submit(3, state(TENSORS))
    assert not problems
    folders = [tmp_path / name / "checkpoints" / "step-000000003" for name in ("streamed", "here")]
    assert read_manifest(folders[0]).state_sha256 == read_manifest(folders[1]).state_sha256
    assert len({(folder / "tensors.safetensors").read_bytes() for folder in folders}) == 1


def test_a_lost_worker_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """Nothing is reported, since the other workers save again; the next checkpoint is written."""
    problems, store = list[str](), CheckpointStore(tmp_path)
    streams = [TensorStream(), TensorStream()]
    with CheckpointWriter(store, problems.append) as writer:
        for step, (stream, count) in enumerate(zip(streams, (2, 5), strict=True)):
            writer.submit(step, state([stream.add(one.dtype, tuple(one.shape)) for one in TENSORS]))
            put_all(stream, count)
            assert writer.drain(WAIT_S)
    assert not problems
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
    assert stream._is_abandoned


def test_a_request_that_is_replaced_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", TENSORS[0].nbytes)
    problems, streams = list[str](), [TensorStream() for _ in range(3)]
    with CheckpointWriter(CheckpointStore(tmp_path), problems.append) as writer:
        for step, stream in enumerate(streams):  # the first is being written, the second waits, the third replaces it
            writer.submit(step, state([stream.add(one.dtype, tuple(one.shape)) for one in TENSORS]))
        put_all(streams[1])  # returns at once
        put_all(streams[0])
        put_all(streams[2])
    assert len(problems) == 1
    assert "the checkpoint of step 1 was still waiting when that of step 2 came" in problems[0]
    with pytest.raises(CheckpointError):
        streams[1]._places[0].take()


def test_tensors_are_mapped_from_their_file(tmp_path: Path) -> None:
    tensors = [*TENSORS, torch.arange(7, dtype=torch.uint8), torch.rand(3, 5).double(), torch.empty(0, 4)]
    folder = CheckpointStore(tmp_path).save(1, state(tensors))
    assert folder is not None
    found = layout.read(folder, is_mapped=lambda name: name.startswith("optimizer/"))
    assert all(torch.equal(found["optimizer"][n]["m"], one) for n, one in enumerate(tensors))
    found["optimizer"][0]["m"].fill_(5.0)  # of the memory only
    assert layout.read(folder)["optimizer"][0]["m"][1] == 1.0
    damaged = bytearray((folder / "tensors.safetensors").read_bytes())
    damaged[-1] ^= 1
    (folder / "tensors.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        layout.read(folder, is_mapped=lambda _: True)


# -- a run -------------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 8, 1024  # 8 MiB of state for each layer
MIB = 1024 * 1024


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save_and_measure(rank: int, size: int, folder: str) -> tuple[float, float, str]:
    """By how many MiB saving raises the peak of this process, and computing the digest."""
    tensor_stream.LIMIT_BYTES = state_holders.CHUNK_BYTES = 4 * MIB  # type: ignore[misc]
    with lockstep.Run(folder, seed=7, progress=False, device="cpu", shard_optimizer=True) as run:
        layers = [torch.nn.Linear(16, WIDTH), *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))]
        model = run.replicate(torch.nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = run.batches(data(64), global_batch_size=16, shards=size)
        for batch in run.train(batches, optimizer, steps=2):
            run.step(classify, batch)
        before = peak_mib()
        run.save()
        run._session.checkpoints.drain(lambda: None)
        saved = peak_mib()
        return saved - before, peak_mib() - saved, run.digest()


def test_no_worker_has_the_whole_state(tmp_path: Path) -> None:
    by_rank = on_workers(save_and_measure, 2, str(tmp_path))
    state_mib = LAYERS * 8
    model_mib = LAYERS * 4  # a copy of which rank 0 writes
    for saving, hashing, _ in by_rank:
        assert saving < model_mib + state_mib / 2
        assert hashing < state_mib / 2
    assert by_rank[0][2] == by_rank[1][2]


class FailsOnce:
    """Its state cannot be read the first time that rank 0 saves it."""

    def __init__(self) -> None:
        self.fails = True

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def save_in_vain(rank: int, size: int, folder: str) -> tuple[str, list[str]]:
    said = []
    with lockstep.Run(folder, seed=7, progress=False, device="cpu", shard_optimizer=True) as run:
        model = run.replicate(torch.nn.Linear(16, 10))
        run.register_state(own=(own := FailsOnce()))
        own.fails = False
        batches = run.batches(data(64), global_batch_size=16, shards=size)
        for batch in run.train(batches, torch.optim.AdamW(model.parameters(), lr=1e-3)):
            run.step(classify, batch)
        for own.fails in (False, True, False):
            try:
                run.save()
            except RuntimeError as error:
                said.append(str(error))
        return run.digest(), said


def test_an_error_of_rank_0_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    by_rank = on_workers(save_in_vain, 2, str(tmp_path))
    assert [said for _, said in by_rank] == [["not now"], []]
    assert by_rank[0][0] == by_rank[1][0]


def test_the_time_between_two_saves_begins_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run whose disk takes longer for a checkpoint than `save_every` would save after every step."""
    put, saved = TensorStream.put, list[int]()

    def put_slowly(self: TensorStream, tensor: torch.Tensor, **options: Any) -> None:
        time.sleep(0.03)
        put(self, tensor, **options)

    monkeypatch.setattr(TensorStream, "put", put_slowly)
    with lockstep.Run(tmp_path, progress=False, device="cpu", shard_optimizer=True, save_every="0.3s") as run:
        model = run.replicate(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))
        batches = run.batches(data(64), global_batch_size=16, shards=1, epochs=10)
        save = run._session.checkpoints.save

        def save_and_note(plan: Any, here: Any, **more: Any) -> None:
            saved.append(here.number)
            save(plan, here, **more)

        monkeypatch.setattr(run._session.checkpoints, "save", save_and_note)
        for batch in run.train(batches, torch.optim.AdamW(model.parameters(), lr=1e-3)):
            run.step(classify, batch)
            time.sleep(0.02)
    assert len(saved) > 2
    assert all(later - earlier > 4 for earlier, later in itertools.pairwise(saved[:-1]))


# -- which worker has what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_found_wherever_entries_overlap(seed: int) -> None:
    dice, numel = random.Random(seed), 200
    holders = state_holders.StateHolders(None, {}, device=torch.device("cpu"))
    holders._size = 4
    cuts = [sorted({0, numel, *(dice.randrange(numel) for _ in range(5))}) for _ in range(2)]
    entries = [
        state_holders._Entry(start, stop, dice.randrange(4), n)
        for kind in cuts
        for n, (start, stop) in enumerate(itertools.pairwise(kind))
    ]
    holders._entries = {0: sorted(entries)}
    for near in range(4):
        first, last = sorted(dice.sample(range(numel + 1), 2))
        found = holders.pieces(state_holders.Interval(0, first, last), near=near)
        assert [place for piece, _ in found for place in range(piece.start, piece.stop)] == list(range(first, last))
        for piece, entry in found:
            assert piece.owner == entry.rank
            assert entry.start <= piece.start <= piece.stop <= entry.stop
            having = [one for one in entries if one.start <= piece.start and piece.stop <= one.stop]
            assert (piece.owner - near) % 4 == min((one.rank - near) % 4 for one in having)
    holders._entries = {0: [one for one in entries if one.start > 0]}
    with pytest.raises(lockstep.LockstepError, match="no worker has the optimiser's state of parameter 0"):
        holders.pieces(state_holders.Interval(0, 0, numel))


def send_from_one(rank: int, size: int) -> list[list[float]] | None:
    """All of the state is on the last worker: it is broadcast, not gathered."""
    gathered = list[int]()
    state = {"m": torch.arange(100.0), "step": 5}
    mine = {state_holders.Interval(0, 0, 100): state} if rank == size - 1 else {}
    group = torch.distributed.group.WORLD
    holders = state_holders.StateHolders(group, mine, device=torch.device("cpu"))
    holders._group = Counting(group, gathered)
    outline = state_holders.StateOutline.of_parameters(holders, [torch.zeros(10, 10)], set())
    found = outline.collect()
    assert not gathered
    return None if found is None else [state["m"].tolist() for state in found.values()]


class Counting:
    """A process group that records how often it gathers."""

    def __init__(self, group: Any, gathered: list[int]) -> None:
        self._group, self._gathered = group, gathered

    def __getattr__(self, name: str) -> Any:
        if name == "_allgather_base":
            self._gathered.append(1)
        return getattr(self._group, name)


def test_what_one_worker_has_is_not_gathered_from_all() -> None:
    found = on_workers(send_from_one, 3)
    assert found == [[torch.arange(100.0).view(10, 10).tolist()], None, None]
