"""Checkpoints on disk: what was written comes back bit for bit, or an error names the file that is not as it was."""

from __future__ import annotations

import json
import math
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import crew
from lockstep import CheckpointError
from lockstep.checkpoint import format as layout
from lockstep.checkpoint.store import Store

DEADLINE_S = 30.0
ANYWHERE = 0


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Down to the type of every number and the bits of every tensor."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bits(a) == bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(p) is type(q) for p, q in zip(a, b, strict=True)) and all(
            same(a[key], b[key]) for key in a
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def everything() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
    kinds = {f"of {dtype}": noise.view(dtype) for dtype in layout._DTYPES if dtype is not torch.bool}
    return {
        "tensors": kinds | {"of torch.bool": noise > 127},
        "shapes": [torch.tensor(1.5), torch.empty(0, 3), torch.empty(0, dtype=torch.int64), torch.ones(2, 1, 3)],
        "views": {"transposed": torch.arange(12.0).view(3, 4).t(), "part": torch.arange(9)[4:7]},
        "numbers": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "tenth": 0.1, "-0": -0.0, "big": 2**80},
        "plain": [None, True, False, 0, 1, "", 'quo"te\n ü', (), [], {}, (1, (2.0, [3]))],
        "by number": {0: {"step": torch.tensor(3.0)}, 7: {"lr": 0.1}, (1, 2): "pair", None: 1, True: 2},
        # These would have one name.
        "names": {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), 5: torch.tensor(3), "5": torch.tensor(4)},
        "lists": [[torch.tensor(5)], {"0": torch.tensor(6)}, torch.tensor(7)],
    }


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    state = everything()
    assert not same(state, everything() | {"plain": []})
    layout.write(tmp_path / "one", state)
    back = layout.read(tmp_path / "one")
    assert same(back, state)
    assert math.copysign(1, back["numbers"]["-0"]) == -1
    # Each tensor has its own memory.
    back["shapes"][3].zero_()
    assert same(layout.read(tmp_path / "one"), state)


def test_no_tensors_and_nothing_at_all(tmp_path: Path) -> None:
    for n, state in enumerate(({}, {"a": 1}, {"a": torch.empty(0)})):
        layout.write(tmp_path / str(n), state)
        assert same(layout.read(tmp_path / str(n)), state)


def test_the_tensors_are_a_safetensors_file(tmp_path: Path) -> None:
    """By the book: 8 bytes of length, a JSON header padded with blanks, and the bytes without a gap."""
    state = everything()
    layout.write(tmp_path / "one", state)
    data = (tmp_path / "one" / layout.TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    end = 0
    for entry in header.values():
        assert set(entry) == {"dtype", "shape", "data_offsets"}
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
    assert end == len(data) - 8 - length
    entry = header["shapes/3"]
    assert entry["dtype"] == "F32"
    assert entry["shape"] == [2, 1, 3]
    start, stop = (8 + length + at for at in entry["data_offsets"])
    assert data[start:stop] == torch.ones(6).numpy().tobytes()


def test_any_flipped_bit_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    state = {"weight": torch.randn(20, 5), "step": torch.tensor(3.0), "lr": 0.1, "betas": (0.9, 0.99), "on": None}
    layout.write(tmp_path / "one", state)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [layout.MANIFEST, layout.TENSORS]
    generator = random.Random(3)
    for name in (layout.MANIFEST, layout.TENSORS):
        path = tmp_path / "one" / name
        whole = path.read_bytes()
        ends = [*range(80), *range(8 * len(whole) - 80, 8 * len(whole))]
        for bit in [*ends, *generator.sample(range(8 * len(whole)), 200)]:
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=name):
                layout.read(tmp_path / "one")
        path.write_bytes(whole)
    assert same(layout.read(tmp_path / "one"), state)


@pytest.mark.parametrize("name", [layout.MANIFEST, layout.TENSORS])
def test_what_is_cut_off_or_missing_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    layout.write(tmp_path / "one", {"weight": torch.ones(5)})
    path = tmp_path / "one" / name
    whole = path.read_bytes()
    for kept in (0, 1, 7, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=name):
            layout.read(tmp_path / "one")
    path.write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match=name):
        layout.read(tmp_path / "one")
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read"):
        layout.read(tmp_path / "one")


@pytest.mark.parametrize("bad", [object(), {1, 2}, torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_what_cannot_be_saved_is_named_and_leaves_nothing_behind(tmp_path: Path, bad: object) -> None:
    with pytest.raises(CheckpointError, match="optimizer/fine/0/odd is a"):
        layout.write(tmp_path / "one", {"optimizer": {"fine": [{"odd": bad}]}})
    assert list(tmp_path.iterdir()) == []


def test_a_format_of_the_future_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(layout, "VERSION", 2)
        layout.write(tmp_path / "one", {})
    with pytest.raises(CheckpointError, match="format 2, and this Lockstep reads 1"):
        layout.read(tmp_path / "one")


# ---- the checkpoints of a run ---------------------------------------------------------------------------------------


def test_the_newest_counts_and_the_last_two_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.latest() is None
    for step in (5, 20, 100, 100):
        store.save(step, {"step": step})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000000020", "step-000000100"]
    assert store.latest() == {"step": 100}


def keep_writing(folder: Path, place: int, here: Connection) -> None:
    """Save one checkpoint after the other. `place`: stand still before that sync, for the test to kill us there."""
    store, blob, count = Store(folder), torch.zeros(1 << 20), 0
    store.save(1, {"step": 1, "blob": blob})
    sync = os.fsync

    def counted_sync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == place:
            here.send("here")
            time.sleep(2 * DEADLINE_S)
        sync(handle)

    os.fsync = counted_sync
    if place == ANYWHERE:
        here.send("here")
    for step in range(2, 1000):
        store.save(step, {"step": step, "blob": blob + step})


@pytest.mark.parametrize("place", [1, 2, 3, 4, ANYWHERE])
def test_a_kill_while_writing_leaves_the_last_checkpoint_usable(tmp_path: Path, place: int) -> None:
    ours, theirs = crew._context.Pipe(duplex=False)
    writer = crew._context.Process(target=keep_writing, args=(tmp_path, place, theirs), daemon=True)
    writer.start()
    try:
        assert ours.poll(DEADLINE_S), "it never came to that place"
        if place == ANYWHERE:
            time.sleep(random.uniform(0.02, 0.1))
    finally:
        writer.kill()
        writer.join(DEADLINE_S)
    found = Store(tmp_path).latest()
    assert found is not None
    assert torch.equal(found["blob"], torch.full((1 << 20,), 0.0 if found["step"] == 1 else found["step"]))
    if place in (1, 2, 3):  # the tensors, the manifest, their folder
        assert found["step"] == 1
        assert list((tmp_path / "checkpoints").glob(".*.partial")), "it was not killed while it wrote"
    # The next one goes on, and clears up.
    Store(tmp_path).save(5000, {"step": 5000})
    assert Store(tmp_path).latest() == {"step": 5000}
    assert not list((tmp_path / "checkpoints").glob(".*"))
