"""A disk that is full, gone, read-only or failing: it is told, the last checkpoint stays, the next save works."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import faults
from lockstep.checkpoint.manifest import TENSORS
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import CheckpointWriter, describe_failure
from test_checkpoint_writer import DEADLINE_S, state_of, steps_of


@pytest.mark.parametrize(
    ("call", "code", "advice"),
    [
        ("write", errno.ENOSPC, "free some space"),
        ("write", errno.EDQUOT, "quota"),
        ("write", errno.EIO, "the disk fails"),
        ("fsync", errno.EIO, "the disk fails"),
        ("fsync", errno.ENOSPC, "free some space"),
        ("mkdir", errno.EROFS, "mount it for writing"),
        ("mkdir", errno.EACCES, "let this user write"),
        ("rename", errno.ESTALE, "mount it again"),
        ("rename", errno.EXDEV, "look at that disk"),
    ],
)
def test_a_failing_disk_is_told_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, advice: str
) -> None:
    said: list[str] = []
    with CheckpointWriter(CheckpointStore(tmp_path), said.append) as writer:
        writer.submit(1, state_of(1))
        assert writer.drain(DEADLINE_S)
        with monkeypatch.context() as broken:

            def fail(*args: Any) -> None:
                raise OSError(code, os.strerror(code))

            broken.setattr(os, call, fail)
            writer.submit(2, state_of(2))
            assert writer.drain(DEADLINE_S)
        assert steps_of(tmp_path) == [1]
        assert len(said) == 1
        for part in (
            f"the checkpoint of step 2 was not written to {tmp_path}/checkpoints/step-000000002: ",
            f"{os.strerror(code)} ({errno.errorcode[code]})",
            f"the last one is {tmp_path}/checkpoints/step-000000001, and it stays",
            "training goes on, and the next save tries again",
            advice,
        ):
            assert part in said[0]
        writer.submit(3, state_of(3))
        assert writer.drain(DEADLINE_S)
    assert len(said) == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000001", "step-000000003"]


def test_a_directory_that_is_gone_is_told_and_not_made_again(tmp_path: Path) -> None:
    """It may be a disk that was unmounted: what is below it is another disk."""
    said: list[str] = []
    run = tmp_path / "runs" / "mine"
    with CheckpointWriter(CheckpointStore(run), said.append) as writer:
        writer.submit(1, state_of(1))
        assert writer.drain(DEADLINE_S)
        shutil.rmtree(run)
        writer.submit(2, state_of(2))
        assert writer.drain(DEADLINE_S)
        assert not run.exists()
        assert "No such file or directory (ENOENT)" in said[0]
        assert "there is none before it" in said[0]
        assert "make it again, or mount its disk" in said[0]
        run.mkdir()
        writer.submit(3, state_of(3))
        assert writer.drain(DEADLINE_S)
    assert len(said) == 1
    assert steps_of(run) == [3]


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_a_file_in_the_place_of_a_directory(tmp_path: Path, place: str) -> None:
    said: list[str] = []
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    with CheckpointWriter(CheckpointStore(tmp_path / "run"), said.append) as writer:
        writer.submit(1, state_of(1))
    assert "something else is in the place of a directory: move it away" in said[0]
    assert (tmp_path / place).read_text() == "mine"


def test_what_is_read_back_wrongly_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_bits(place: str) -> None:
        if place == "verify":
            for path in (tmp_path / "checkpoints").glob(f".*.partial/{TENSORS}"):
                path.write_bytes(path.read_bytes()[:-1] + b"!")

    monkeypatch.setattr(faults, "hook", lose_bits)
    said: list[str] = []
    with CheckpointWriter(CheckpointStore(tmp_path), said.append) as writer:
        writer.submit(1, state_of(1))
    assert "read back, it was not what was written" in said[0]
    assert "its SHA-256" in said[0]
    assert os.listdir(tmp_path / "checkpoints") == []


def test_old_ones_that_cannot_be_removed_are_another_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with CheckpointWriter(CheckpointStore(tmp_path), said.append) as writer:
        for step in (1, 2):
            writer.submit(step, state_of(step))
            assert writer.drain(DEADLINE_S)

        def fail(place: str) -> None:
            if place == "prune":
                raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(faults, "hook", fail)
        writer.submit(3, state_of(3))
    assert steps_of(tmp_path) == [1, 2, 3]
    assert "the checkpoint of step 3 is in" in said[0]
    assert "older ones could not be removed: [Errno 13] Permission denied" in said[0]


def test_no_memory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: Any, **options: Any) -> None:
        raise RuntimeError("can't allocate memory: you tried to allocate 4000 bytes\nmore")

    said: list[str] = []
    with CheckpointWriter(CheckpointStore(tmp_path), said.append) as writer:
        state, more = state_of(1), state_of(2)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            writer.submit(1, state)
        writer.submit(2, more)
    assert "step 1 was not written" in said[0]
    assert "no memory for a copy of the state: can't allocate memory: you tried to allocate 4000 bytes;" in said[0]
    assert steps_of(tmp_path) == [2]


def test_words_for_errors_without_a_number() -> None:
    text = describe_failure(3, Path("/x"), OSError("odd"), Path("/y"))
    assert "step 3 was not written to /x: OSError: odd; the last one is /y, and it stays" in text
