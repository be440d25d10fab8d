"""Checkpoints that got damaged: flipped bits, cuts, pieces in the wrong place. None is ever loaded, the one before is.

`campaigns/checkpoints.py` does the same in larger numbers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import CheckpointError
from lockstep.checkpoint import format as layout
from lockstep.checkpoint.manifest import MANIFEST, STATE, TENSORS, verify
from lockstep.checkpoint.store import CheckpointStore
from test_checkpoint import fast_path, same  # noqa: F401  (fast_path is a fixture)

STEPS = (10, 20, 30)


def small_state(seed: int) -> dict[str, Any]:
    """As a Run makes them, after one step. A few kilobytes, as its bits are flipped one by one."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2, generator=generator)
    groups = [{"lr": 0.1 * seed, "betas": (0.9, 0.99), "params": [0]}]
    return {
        "model": {"weight": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(float(seed)), "mean": weight * 2}}, "param_groups": groups},
        "schedule": None,
        "batches": {"epoch": 0, "number": seed},
        "run": {"seed": 7, "exact": True, "shards": 8},
    }


def make(folder: Path) -> CheckpointStore:
    store = CheckpointStore(folder, kept=len(STEPS))
    for step in STEPS:
        store.save(step, small_state(step))
    return store


def overwrite(path: Path, data: bytes) -> None:
    """Faster than write_bytes: ext4 waits for the disk when a file was made empty first."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))
    os.close(handle)


# ---- one bit ---------------------------------------------------------------------------------------------------------


def flip_every_bit(path: Path, check: Callable[[], Any], *, every: int = 1) -> Iterator[bool]:
    """For every bit of a file: was it noticed?"""
    whole = path.read_bytes()
    handle = os.open(path, os.O_WRONLY)
    try:
        for bit in range(0, 8 * len(whole), every):
            at = bit // 8
            os.pwrite(handle, bytes([whole[at] ^ 1 << bit % 8]), at)
            try:
                check()
            except CheckpointError:
                yield True
            else:
                yield False
            os.pwrite(handle, whole[at : at + 1], at)
    finally:
        os.close(handle)
        path.write_bytes(whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [MANIFEST, STATE, TENSORS])
def test_every_single_bit_counts(fast_path: Path, name: str) -> None:  # noqa: F811
    store = make(fast_path)
    path = store.path_of(30)
    noticed = list(flip_every_bit(path / name, lambda: verify(path)))
    assert len(noticed) == 8 * (path / name).stat().st_size
    assert all(noticed)
    assert all(flip_every_bit(path / name, lambda: layout.read(path), every=37))
    assert same(layout.read(path), small_state(30))


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_the_error_names_the_file(tmp_path: Path, name: str) -> None:
    path = make(tmp_path).path_of(30)
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"step-000000030/{name} is damaged: its SHA-256 is not the one"):
        layout.read(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"step-000000030/{name} (is missing|cannot be read: No such file)"):
        layout.read(path)


# ---- anything else ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    what: str
    steps: frozenset[int]  # which checkpoints it hurt; none: it changed nothing


class Vandal:
    """Damages checkpoints at random, and can put everything back."""

    def __init__(self, store: CheckpointStore, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.files = {path: path.read_bytes() for step in STEPS for path in sorted(store.path_of(step).iterdir())}
        self.touched: set[Path] = set()
        self.kinds = [self.cut, self.grow, self.splice, self.blank, self.shift, self.swap_files, self.swap_directories,
                      self.remove, self.add]  # fmt: skip

    def strike(self) -> Damage:
        kind = self.random.choice(self.kinds)
        hurt = kind()
        return Damage(kind.__name__, frozenset(int(path.name[-9:]) for path in hurt))

    def repair(self) -> None:
        for step in STEPS:
            folder = self.store.path_of(step)
            for name in {*os.listdir(folder)} - {MANIFEST, STATE, TENSORS}:
                (folder / name).unlink()
        for path in self.touched:
            overwrite(path, self.files[path])
        self.touched.clear()

    def cut(self) -> list[Path]:
        path, data = self._any()
        return self._put(path, data[: self.random.randrange(len(data))])

    def grow(self) -> list[Path]:
        path, data = self._any()
        return self._put(path, data + self.random.choice([b"\0", b"\n", b" ", data, data[-66:]]))

    def splice(self) -> list[Path]:
        """A piece of one file over a place in another, of the same checkpoint or not."""
        (path, data), (_, other) = self._any(), self._any()
        size = self.random.randrange(1, min(len(data), len(other)) + 1)
        start, at = self.random.randrange(len(other) - size + 1), self.random.randrange(len(data) - size + 1)
        return self._put(path, data[:at] + other[start : start + size] + data[at + size :])

    def blank(self) -> list[Path]:
        """What a power failure leaves of a file that was not synced."""
        path, data = self._any()
        at = self.random.randrange(len(data))
        size = self.random.choice([1, 8, 512, len(data)])
        return self._put(path, (data[:at] + b"\0" * size)[: len(data)] + data[at + size :])

    def shift(self) -> list[Path]:
        path, data = self._any()
        at, size = self.random.randrange(len(data)), self.random.randrange(1, 9)
        return self._put(path, data[:at] + data[at + size :] + data[at : at + size])

    def swap_files(self) -> list[Path]:
        a, b = self.random.sample(STEPS, 2)
        names = self.random.sample([MANIFEST, STATE, TENSORS], self.random.choice([1, 2, 3]))
        for name in names:
            mine, theirs = self.store.path_of(a) / name, self.store.path_of(b) / name
            self._put(mine, self.files[theirs])
            self._put(theirs, self.files[mine])
        return [self.store.path_of(a), self.store.path_of(b)]

    def swap_directories(self) -> list[Path]:
        a, b = (self.store.path_of(step) for step in self.random.sample(STEPS, 2))
        for source, target in ((a, a.with_name("x")), (b, a), (a.with_name("x"), b)):
            source.rename(target)
        self.touched |= set(self.files)
        return [a, b]

    def remove(self) -> list[Path]:
        path, _ = self._any()
        path.unlink()
        self.touched.add(path)
        return [path.parent]

    def add(self) -> list[Path]:
        path, data = self._any()
        (path.parent / self.random.choice(["x", ".hidden", "more.safetensors", "data.pkl", "ü"])).write_bytes(data)
        return [path.parent]

    def _any(self) -> tuple[Path, bytes]:
        """Files of all sizes as often, and the newest checkpoint most often."""
        step = self.random.choice((*STEPS, 30, 30))
        path = self.store.path_of(step) / self.random.choice([MANIFEST, STATE, TENSORS])
        return path, self.files[path]

    def _put(self, path: Path, data: bytes) -> list[Path]:
        overwrite(path, data)
        self.touched.add(path)
        return [path.parent] if data != self.files[path] else []


def check_newest(store: CheckpointStore, damage: Damage) -> None:
    """The newest that was not hurt, and the hurt ones before it by name."""
    good = [step for step in STEPS if step not in damage.steps]
    found = store.newest()
    assert found is not None, damage
    assert found.step == max(good), damage
    assert found.path == store.path_of(found.step)
    assert same(found.state, small_state(found.step)), damage
    skipped = [step for step in reversed(STEPS) if step > found.step]
    assert [bad.path for bad in found.skipped] == [store.path_of(step) for step in skipped], damage


def vandalise(folder: Path, count: int, *, seed: int) -> dict[str, int]:
    """Damage after damage, each on checkpoints that are whole. Returns how many of each kind were noticed."""
    store = make(folder)
    vandal, noticed = Vandal(store, seed), {}
    while sum(noticed.values()) < count:
        damage = vandal.strike()
        check_newest(store, damage)
        if damage.steps:
            for step in damage.steps:
                with pytest.raises(CheckpointError):
                    verify(store.path_of(step))
            noticed[damage.what] = noticed.get(damage.what, 0) + 1
        vandal.repair()
    assert [found.step for found in [store.newest()] if found] == [30]
    return noticed


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 600), *(pytest.param(seed, 2500, marks=pytest.mark.slow) for seed in (0, 1, 2, 3))]
)
def test_damage_is_noticed_and_the_newest_that_is_whole_counts(fast_path: Path, seed: int, count: int) -> None:  # noqa: F811
    noticed = vandalise(fast_path, count, seed=seed)
    assert len(noticed) == 9
    assert min(noticed.values()) > count // 17


def test_when_all_are_damaged_all_reasons_are_told(tmp_path: Path) -> None:
    store = make(tmp_path)
    (store.path_of(10) / STATE).unlink()
    (store.path_of(20) / TENSORS).write_bytes(b"")
    (store.path_of(30) / "stranger").touch()
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    text = str(caught.value)
    assert "none of the 3 checkpoints" in text
    assert "step-000000010/state.json is missing" in text
    assert "step-000000020/tensors.safetensors is damaged: it has 0 bytes and not" in text
    assert "step-000000030/stranger' does not belong to the checkpoint" in text
