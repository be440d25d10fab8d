"""The checkpoints of a run: which are kept, and what is verified before what is removed."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import CheckpointError, faults
from lockstep.checkpoint.manifest import MANIFEST, TENSORS
from lockstep.checkpoint.store import CheckpointStore, choose_outdated
from test_checkpoint import same


def there(folder: Path) -> list[str]:
    return sorted(name.replace("step-", "").lstrip("0") for name in os.listdir(folder / "checkpoints"))


def damage(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[-1] ^= 1
    (path / TENSORS).write_bytes(data)


# ---- which are kept --------------------------------------------------------------------------------------------------


def test_the_newest_counts_and_the_last_two_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.newest() is None
    assert store.latest() is None
    assert store.last() is None
    for step in (5, 20, 100, 100):
        assert store.save(step, {"step": step}) == tmp_path / "checkpoints" / f"step-{step:09d}"
    assert there(tmp_path) == ["100", "20"]
    found = store.newest()
    assert found is not None
    assert (found.step, found.state, found.path, found.skipped) == (100, {"step": 100}, store.path_of(100), ())
    assert store.latest() == {"step": 100}
    assert store.last() == store.path_of(100)


def test_more_can_be_kept_but_not_less(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=3)
    for step in range(6):
        store.save(step, {"step": step})
    assert there(tmp_path) == ["3", "4", "5"]
    for kept in (1, 0, -1, 2.5):
        with pytest.raises(ValueError, match="2 is the least"):
            CheckpointStore(tmp_path, kept=kept)  # type: ignore[arg-type]
    for step in (-1, 1.5, 10**18):
        with pytest.raises(ValueError, match="must be a whole number, 0 or more"):
            store.save(step, {})  # type: ignore[arg-type]


def test_steps_of_ten_digits_are_in_order(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (999_999_999, 10**9, 10**10):
        store.save(step, {"step": step})
    assert store.latest() == {"step": 10**10}
    assert there(tmp_path) == ["10000000000", "1000000000"][::-1]


def test_what_is_outdated_is_decided_by_what_is_whole() -> None:
    """All that can be there: five steps, each whole, damaged or missing; one of them was just written."""
    for kept, condition in itertools.product((2, 3), itertools.product((None, False, True), repeat=5)):
        steps = {step: whole for step, whole in enumerate(condition) if whole is not None}
        for written in [step for step, whole in steps.items() if whole]:
            gone = choose_outdated(steps, lambda step: steps[step] is True, written=written, kept=kept)  # noqa: B023
            left = [step for step in steps if step not in gone and step <= written]
            whole_left = [step for step in left if steps[step]]
            assert written in left
            assert all(step < written for step in gone)
            assert len(whole_left) == min(kept, sum(steps[step] for step in steps if step <= written))
            if gone:  # as few as are needed, and the oldest of all
                assert len(whole_left) == kept
                assert max(gone) < min(left)


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, {"step": torch.tensor(step)})
    damage(store.path_of(2))
    store = CheckpointStore(tmp_path)  # which did not write it
    found = store.newest()
    assert found is not None
    assert found.step == 1
    assert [bad.path for bad in found.skipped] == [store.path_of(2)]
    assert "tensors.safetensors is damaged: its SHA-256" in found.skipped[0].reason
    store.save(3, {"step": torch.tensor(3)})
    assert there(tmp_path) == ["1", "2", "3"]
    store.save(4, {"step": torch.tensor(4)})
    assert there(tmp_path) == ["3", "4"]


def test_one_that_this_store_wrote_and_lost_does_not_count_either(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, {"step": torch.tensor(step)})
    (store.path_of(2) / TENSORS).unlink()
    store.save(3, {"step": torch.tensor(3)})
    assert there(tmp_path) == ["1", "2", "3"]


def test_later_ones_that_are_damaged_do_not_push_out_the_one_that_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, kept=4)
    for step in (10, 20, 30, 40):
        store.save(step, {"step": torch.tensor(step)})
    damage(store.path_of(30))
    damage(store.path_of(40))
    store = CheckpointStore(tmp_path)
    store.save(25, {"step": torch.tensor(25)})
    assert there(tmp_path) == ["20", "25", "30", "40"]
    found = store.newest()
    assert found is not None
    assert found.step == 25
    store.save(40, {"step": torch.tensor(41)})  # in the place of a damaged one
    assert there(tmp_path) == ["25", "30", "40"]
    assert store.latest() == {"step": torch.tensor(41)}


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_the_same_state_again_is_not_written_again(tmp_path: Path) -> None:
    store, state = CheckpointStore(tmp_path), {"weight": torch.ones(3), "step": 1}
    path = store.save(1, state)
    assert path is not None
    before = (path / MANIFEST).stat().st_ino
    store.save(1, {"weight": torch.ones(3), "step": 1})
    assert (path / MANIFEST).stat().st_ino == before
    store.save(1, state | {"step": 2})
    assert (path / MANIFEST).stat().st_ino != before
    assert same(store.latest(), state | {"step": 2})
    before = (path / MANIFEST).stat().st_ino
    damage(path)
    store.save(1, state | {"step": 2})  # the same, but damaged since
    assert (path / MANIFEST).stat().st_ino != before
    assert same(store.latest(), state | {"step": 2})
    assert there(tmp_path) == ["1"]


def test_the_old_one_gets_its_name_back_if_the_new_one_cannot_have_it(tmp_path: Path, monkeypatch: Any) -> None:
    store, rename = CheckpointStore(tmp_path), os.rename
    store.save(1, {"step": 1})

    def fail_for_new(source: Path, target: Path) -> None:
        if source.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_new)
    with pytest.raises(OSError, match="Input/output"):
        store.save(1, {"step": 2})
    assert there(tmp_path) == ["1"]
    assert store.latest() == {"step": 1}


@pytest.mark.parametrize("again", [False, True])
def test_what_is_read_back_wrongly_gets_no_name_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, {"step": torch.tensor(step)})

    def break_disk(place: str) -> None:
        if place == "verify":
            for partial in (tmp_path / "checkpoints").glob(".*.partial"):
                damage(partial)

    monkeypatch.setattr(faults, "hook", break_disk)
    with pytest.raises(CheckpointError, match=r"partial/tensors.safetensors is damaged"):
        store.save(2 if again else 3, {"step": torch.tensor(3)})
    assert there(tmp_path) == ["1", "2"]
    assert store.latest() == {"step": torch.tensor(2)}


def test_the_fence_is_asked_last_and_drops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, order = CheckpointStore(tmp_path), []
    for step in (1, 2):
        store.save(step, {"step": step})
    monkeypatch.setattr(faults, "hook", order.append)

    def fence(answer: bool) -> bool:
        order.append("fence")
        return answer

    assert store.save(3, {"step": 3}, fence=lambda: fence(False)) is None
    assert there(tmp_path) == ["1", "2"]
    assert order[-1] == "fence"
    order.clear()
    assert store.save(3, {"step": 3}, fence=lambda: fence(True)) == store.path_of(3)
    assert order[order.index("fence") - 1 : order.index("fence") + 2] == ["verify", "fence", "rename"]
    assert set(order) == {"write", "fsync", "verify", "fence", "rename", "prune"}
    assert there(tmp_path) == ["2", "3"]


def test_the_fence_counts_for_the_same_state_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"step": 1})
    assert store.save(1, {"step": 1}, fence=lambda: False) is None
    assert store.save(1, {"step": 1}, fence=lambda: True) == store.path_of(1)


def test_what_is_removed_while_it_is_read_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"step": 1})

    def save_two_more(place: str) -> None:
        monkeypatch.setattr(faults, "hook", None)
        for step in (2, 3):
            CheckpointStore(tmp_path).save(step, {"step": step})

    monkeypatch.setattr(faults, "hook", save_two_more)
    found = store.newest()
    assert found is not None
    assert (found.step, found.state, found.skipped) == (3, {"step": 3}, ())


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    for mask, directory, file in ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)):
        before = os.umask(mask)
        try:
            path = CheckpointStore(tmp_path / oct(mask)).save(1, {"a": torch.ones(1)})
        finally:
            os.umask(before)
        assert path is not None
        assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [directory] * 2
        assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {file}


def test_strange_things_in_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"step": 1})
    store.path_of(2).touch()
    store.path_of(3).symlink_to("nowhere")
    store.path_of(4).mkdir()
    (tmp_path / "checkpoints" / "step-5").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").touch()
    found = store.newest()
    assert found is not None
    assert [bad.path for bad in found.skipped] == [store.path_of(step) for step in (4, 3, 2)]
    for step in (2, 3, 4):
        store.save(step, {"step": step})
    assert there(tmp_path) == ["3", "4", "5", "notes.txt"]
    assert store.latest() == {"step": 4}
