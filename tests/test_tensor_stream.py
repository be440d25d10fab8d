"""Checkpoints of a distributed state: its tensors are written while they arrive, and are mapped when it is read."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.checkpoint import format as layout, tensor_stream
from lockstep.checkpoint.manifest import read as read_manifest
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.tensor_stream import TensorStream
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
    with pytest.raises(CheckpointError, match="could be written for"):
        places[1].take()


def test_an_error_elsewhere_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "LIMIT_BYTES", TENSORS[0].nbytes)
    monkeypatch.setattr(tensor_stream, "CHECK_EVERY_S", 0.05)
    stream = TensorStream()

    def check() -> None:
        raise lockstep.PeerLostError("rank 1 is gone")

    stream.put(TENSORS[0], check)
    with pytest.raises(lockstep.PeerLostError):
        stream.put(TENSORS[1], check)


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

LAYERS, WIDTH = 12, 1024  # 8 MiB of state for each layer
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
