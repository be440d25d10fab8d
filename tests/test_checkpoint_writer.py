"""Checkpoints in the background: training goes on whatever the disk does, and is told what went wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import CheckpointError, faults
from lockstep.checkpoint import format as layout, writer as writing
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import CheckpointWriter

DEADLINE_S = 300.0


def state_of(number: int) -> dict[str, Any]:
    values = torch.full((1000,), float(number))
    return {"model": {"weight": values, "turned": values.view(10, 100).t()}, "place": [number, {"deep": (number,)}]}


def numbers(state: dict[Any, Any]) -> set[float]:
    """All numbers in a state; one, unless it is a mixture of two."""
    inside = {state["place"][0], *state["place"][1]["deep"]}
    return inside | {float(x) for tensor in state["model"].values() for x in tensor.unique()}


def steps_of(folder: Path) -> list[int]:
    return sorted(int(name[5:]) for name in os.listdir(folder / "checkpoints") if not name.startswith("."))


class SlowDisk:
    """Writing waits at its first write until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, place: str) -> None:
        if place == "write":
            self.reached.set()
            assert self.go_on.wait(DEADLINE_S)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(faults, "hook", disk)
    yield disk
    disk.go_on.set()


def test_what_was_submitted_is_written_whatever_becomes_of_the_state(tmp_path: Path, slow_disk: SlowDisk) -> None:
    said: list[str] = []
    with CheckpointWriter(CheckpointStore(tmp_path), said.append) as writer:
        state = state_of(1)
        writer.submit(1, state)
        assert slow_disk.reached.wait(DEADLINE_S)
        state["model"]["weight"].fill_(7)
        state["place"][1]["deep"] = (8,)
        state["place"].append(9)
        del state["model"]
        slow_disk.go_on.set()
        assert writer.drain(DEADLINE_S)
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert numbers(found.state) == {1}
    assert said == []


def test_many_saves_reuse_their_memory_and_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    host_memory = writing._host_memory
    monkeypatch.setattr(writing, "_host_memory", lambda tensor: made.append(tensor) or host_memory(tensor))
    seen: list[int] = []
    with CheckpointWriter(CheckpointStore(tmp_path), lambda text: None) as writer:
        state = state_of(0)
        for step in range(40):
            state["model"]["weight"].fill_(step)
            state["place"] = [step, {"deep": (step,)}]
            writer.submit(step, state)
            if step % 3 == 0:
                assert writer.drain(DEADLINE_S)
                found = CheckpointStore(tmp_path).newest()
                assert found is not None
                assert numbers(found.state) == {found.step}
                seen.append(found.step)
    assert seen == list(range(0, 40, 3))
    assert len(made) == 4  # two tensors, two sets
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert numbers(found.state) == {39}


def test_a_state_that_changes_its_shape(tmp_path: Path) -> None:
    with CheckpointWriter(CheckpointStore(tmp_path), pytest.fail) as writer:
        for step, tensor in enumerate((torch.ones(3), torch.ones(4), torch.ones(4).int(), torch.ones(()))):
            writer.submit(step, {"a": tensor})
            assert writer.drain(DEADLINE_S)
            assert (CheckpointStore(tmp_path).latest() or {})["a"].dtype == tensor.dtype
        writer.submit(9, {"b": torch.ones(2)})
        assert writer.drain(DEADLINE_S)
        assert list(CheckpointStore(tmp_path).latest() or {}) == ["b"]
        assert [list(copies._buffers) for copies in writer._free] == [[], ["b"]]  # one was enough


def test_on_a_slow_disk_the_newest_waits_and_the_others_are_named(tmp_path: Path, slow_disk: SlowDisk) -> None:
    said: list[str] = []
    writer = CheckpointWriter(CheckpointStore(tmp_path), said.append)
    writer.submit(1, state_of(1))
    assert slow_disk.reached.wait(DEADLINE_S)
    began = time.monotonic()
    for step in (2, 3, 4):
        writer.submit(step, state_of(step))
    assert time.monotonic() - began < 5.0
    assert not writer.drain(0.05)
    assert not (tmp_path / "checkpoints" / "step-000000001").exists()
    slow_disk.go_on.set()
    assert writer.drain(DEADLINE_S)
    assert steps_of(tmp_path) == [1, 4]
    assert [text.split(", which")[0] for text in said] == [
        "the checkpoint of step 2 was still waiting when that of step 3 came",
        "the checkpoint of step 3 was still waiting when that of step 4 came",
    ]
    assert all("step 1 is being written for" in text and "save less often" in text for text in said)
    assert writer.close(DEADLINE_S)
    assert writer.close(DEADLINE_S)
    assert not writer._thread.is_alive()
    with pytest.raises(CheckpointError, match="step 5 was submitted after the writer was closed"):
        writer.submit(5, state_of(5))


def test_waiting_says_what_for(tmp_path: Path, slow_disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(writing, "REPORT_EVERY_S", 0.01)

    def say(text: str) -> None:
        said.append(text)
        slow_disk.go_on.set()

    with CheckpointWriter(CheckpointStore(tmp_path), say) as background:
        background.submit(1, state_of(1))
    assert "waiting for the checkpoint of step 1, written to" in said[0]
    assert steps_of(tmp_path) == [1]


def test_close_gives_up_what_takes_too_long(tmp_path: Path, slow_disk: SlowDisk) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path), lambda text: None)
    writer.submit(1, state_of(1))
    assert slow_disk.reached.wait(DEADLINE_S)
    writer.submit(2, state_of(2))
    assert not writer.close(0.05)
    slow_disk.go_on.set()
    writer._thread.join(DEADLINE_S)
    assert not writer._thread.is_alive()
    assert steps_of(tmp_path) == [1]


def test_a_state_that_cannot_be_saved_is_the_callers_error(tmp_path: Path) -> None:
    with CheckpointWriter(CheckpointStore(tmp_path), pytest.fail) as writer:
        with pytest.raises(CheckpointError, match="odd is a object, which a checkpoint cannot hold"):
            writer.submit(1, {"odd": object()})
        writer.submit(2, state_of(2))
    assert steps_of(tmp_path) == [2]


def test_a_bug_does_not_end_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def complain(text: str) -> None:
        raise KeyError("no")

    with CheckpointWriter(CheckpointStore(tmp_path), complain) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "write", lambda *args, **options: 1 / 0)
            writer.submit(1, state_of(1))
            assert writer.drain(DEADLINE_S)
        writer.submit(2, state_of(2))
    assert steps_of(tmp_path) == [2]
    assert "ZeroDivisionError: division by zero; there is none before it" in capsys.readouterr().err


def test_who_lost_the_right_to_write_changes_nothing(tmp_path: Path) -> None:
    may_write = True
    with CheckpointWriter(CheckpointStore(tmp_path), pytest.fail, fence=lambda: may_write) as writer:
        for step in (1, 2, 3):
            writer.submit(step, state_of(step))
            assert writer.drain(DEADLINE_S)
            may_write = step < 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000001", "step-000000002"]


def test_places_where_tests_can_break_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    monkeypatch.setattr(faults, "hook", lambda place: places.append((place, threading.current_thread().name)))
    with CheckpointWriter(CheckpointStore(tmp_path), pytest.fail) as writer:
        for step in range(3):
            writer.submit(step, state_of(step))
            writer.drain(DEADLINE_S)
    assert {place for place, _ in places} == {"copy", "write", "fsync", "verify", "rename", "prune"}
    for place, thread in places:
        assert (thread == "lockstep-checkpoint") == (place != "copy")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_a_gpu_through_pinned_memory(tmp_path: Path) -> None:
    weights = torch.zeros(64, 1 << 16, device="cuda")
    said: list[str] = []
    with CheckpointWriter(CheckpointStore(tmp_path), said.append) as writer:
        for step in range(1, 20):
            weights.fill_(step)
            other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            state = {"turned": weights.t(), "one": weights[3, 5], "count": torch.tensor(step), "list": [weights[::2]]}
            writer.submit(step, state)
            with torch.cuda.stream(other):  # which does not wait for the copies
                weights.fill_(-1)
            torch.cuda.synchronize()
            if step % 4 == 0:
                assert writer.drain(DEADLINE_S)
        assert writer.drain(DEADLINE_S)
        buffers = writer._free[-1]._buffers
        assert {name: buffer.is_pinned() for name, buffer in buffers.items()} == {
            "turned": True, "one": True, "count": False, "list/0": True,
        }  # fmt: skip
    for step in steps_of(tmp_path):
        found = layout.read(tmp_path / "checkpoints" / f"step-{step:09d}")
        assert {float(x) for t in (found["turned"], found["one"], found["list"][0]) for x in t.unique()} == {step}
    assert found["count"] == 19
    assert found["turned"].shape == (1 << 16, 64)
