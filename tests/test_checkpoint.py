"""A checkpoint on disk: what was written comes back bit for bit, and other programs can read it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import CheckpointError
from lockstep.checkpoint import format as layout, manifest, state_files
from lockstep.checkpoint.manifest import MANIFEST, STATE, TENSORS, verify


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """In memory where there is such a disk, for tests of many saves: they are about what is written, and when."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return str(tensor.dtype), tuple(tensor.shape), plain.view(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Down to the type of every number and the bits of every tensor."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bits(a) == bits(b)
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(p) is type(q) for p, q in zip(a, b, strict=True))
            and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def everything() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
    kinds = {f"of {dtype}": noise.view(dtype) for dtype in layout.DTYPES if dtype is not torch.bool}
    return {
        "tensors": kinds | {"of torch.bool": noise > 127},
        "shapes": [torch.tensor(1.5), torch.empty(0, 3), torch.empty(0, dtype=torch.int64), torch.ones(2, 1, 3)],
        "views": [torch.arange(12.0).view(3, 4).t(), torch.arange(9)[4:7], torch.ones(9)[5::9]],
        "lazy": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
        "parameter": torch.nn.Parameter(torch.ones(3)).detach(),
        "numbers": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "big": -(2**80)},
        "fractions": {"third": 1 / 3, "-0": -0.0, "tiny": 5e-324},
        "plain": [None, True, False, 0, 1, "", 'quo"te\n ü \ud800', (), [], {}, (1, (2.0, [3]))],
        "by number": {0: {"step": torch.tensor(3.0)}, 7: {"lr": 0.1}, (1, (2, "x")): "pair", None: 1, True: 2, 0.5: 3},
        # These would have one name.
        "names": {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), 5: torch.tensor(3), "5": torch.tensor(4)},
        "lists": [[torch.tensor(5)], {"0": torch.tensor(6)}, torch.tensor(7)],
        "__metadata__": torch.tensor(8),
        "": torch.tensor(9),
        "$": {"$": "tensor", "name": "lists/2"},
    }


def write(folder: Path, state: dict[str, Any], step: int = 1) -> Path:
    path = folder / manifest.directory_name(step)
    layout.write(path, step, layout.flatten(state))
    return path


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    state = everything()
    assert not same(state, everything() | {"plain": []})
    path = write(tmp_path, state)
    back = layout.read(path)
    assert same(back, state)
    assert math.copysign(1, back["fractions"]["-0"]) == -1
    # Each tensor has its own memory.
    back["shapes"][3].zero_()
    assert same(layout.read(path), state)


def test_no_tensors_and_nothing_at_all(tmp_path: Path) -> None:
    for n, state in enumerate(({}, {"a": 1}, {"a": torch.empty(0)})):
        assert same(layout.read(write(tmp_path, state, n)), state)


def test_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.file_io.PIECE_BYTES", 10)
    state = everything()
    path = write(tmp_path, state)
    assert same(layout.read(path), state)
    assert verify(path).manifest.state_sha256 == layout.digest_of(layout.flatten(state))


def test_the_tensors_are_a_safetensors_file(tmp_path: Path) -> None:
    """By the book: 8 bytes of length, a JSON header padded with blanks, and the bytes without a gap."""
    data = (write(tmp_path, everything()) / TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert data[8:9] == b"{"
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for start, stop in sorted(entry["data_offsets"] for entry in header.values()):
        assert start == end
        end = stop
    assert end == len(data) - 8 - length
    entry = header["shapes/3"]
    assert set(entry) == {"dtype", "shape", "data_offsets"}
    assert entry["dtype"] == "F32"
    assert entry["shape"] == [2, 1, 3]
    start, stop = (8 + length + at for at in entry["data_offsets"])
    assert data[start:stop] == torch.ones(6).numpy().tobytes()


def test_the_manifest_says_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path, {"weight": torch.ones(3), "lr": 0.1}, 42)
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, STATE, TENSORS]
    text = (path / MANIFEST).read_bytes()[: -manifest.CHECKSUM_LINE_BYTES]
    seal = (path / MANIFEST).read_text().split("\n")[-2]
    fields = json.loads(text)
    assert seal == hashlib.sha256(text).hexdigest()
    assert fields["version"] == 2
    assert fields["step"] == 42
    assert abs(fields["saved_at"] - time.time()) < 60
    expected = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert fields["versions"] == expected
    for name in (STATE, TENSORS):
        data = (path / name).read_bytes()
        assert fields["files"].pop(name) == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert not fields["files"]
    sha = hashlib.sha256(torch.ones(3).numpy().tobytes()).hexdigest()
    structure = {"$": "dict", "items": [["weight", {"$": "tensor", "name": "weight"}], ["lr", 0.1]]}
    whole = {"state": structure, "tensors": {"weight": ["F32", [3], sha]}}
    by_hand = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    assert fields["state_sha256"] == hashlib.sha256(by_hand).hexdigest()


def split_tensors(path: Path) -> None:
    """The same state with its tensors in two files, as many workers could write it."""
    contents = verify(path)
    files, data = dict(contents.manifest.files), (path / TENSORS).read_bytes()
    (path / TENSORS).unlink()
    del files[TENSORS]
    for n in range(2):
        mine = dict(list(contents.tensors.items())[n::2])
        pieces = [data[e.start : e.start + e.spec.bytes] for e in mine.values()]
        header = layout.make_header({name: entry.spec for name, entry in mine.items()})
        files[f"part-{n}.safetensors"] = layout.file_io.write_new(path / f"part-{n}.safetensors", [header, *pieces])
    made = manifest.Manifest(contents.manifest.step, 1.0, {}, contents.manifest.state_sha256, files)
    (path / MANIFEST).write_bytes(manifest.encode(made))


def test_tensors_in_several_files_are_the_same_state(tmp_path: Path) -> None:
    state = everything()
    path = write(tmp_path, state)
    before = verify(path)
    split_tensors(path)
    assert len(list(path.iterdir())) == 4
    assert same(layout.read(path), state)
    assert state_files.digest(before.structure, verify(path).tensors) == before.manifest.state_sha256


@pytest.mark.parametrize(
    "other",
    [
        {"weight": torch.ones(3, 2), "lr": 0.2},
        {"weight": torch.ones(3, 2), "lr": 0.1, "more": None},
        {"weight": torch.ones(2, 3), "lr": 0.1},
        {"weight": torch.ones(3, 2).int(), "lr": 0.1},
        {"weight": torch.ones(3, 2).mul(-1), "lr": 0.1},
        {"heavy": torch.ones(3, 2), "lr": 0.1},
        {"weight": torch.ones(3, 2), "lr": "0.1"},
    ],
)
def test_another_state_has_another_digest(other: dict[str, Any]) -> None:
    state = {"weight": torch.ones(3, 2), "lr": 0.1}
    assert layout.digest_of(layout.flatten(state)) == layout.digest_of(layout.flatten(dict(state)))
    assert layout.digest_of(layout.flatten(other)) != layout.digest_of(layout.flatten(state))


class Odd(torch.Tensor):
    pass


def too_deep() -> Any:
    value: Any = 1
    for _ in range(10_000):
        value = [value]
    return value


BAD = [
    object(), {1, 2}, b"bytes", torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128), 10**1000,
    torch.ones(2, device="meta"), torch.ones(2).as_subclass(Odd), {object(): 1}, {torch.ones(1): 1}, too_deep(),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(type(bad)))
def test_what_cannot_be_saved_is_named(bad: object) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer/fine/0/odd.* is "):
        layout.flatten({"optimizer": {"fine": [{"odd": bad}]}})


def test_what_is_as_deep_as_allowed_comes_back(tmp_path: Path) -> None:
    for nest in (lambda inside: {"a": inside}, lambda inside: [inside], lambda inside: (inside,)):
        state: Any = torch.ones(1)
        for _ in range(state_files.LEVELS - 1):
            state = nest(state)
        assert same(layout.read(write(tmp_path, {"a": state}, len(list(tmp_path.iterdir())))), {"a": state})


@pytest.mark.parametrize(("version", "advice"), [(1, "never released: begin that run anew"), (3, "update it")])
def test_other_formats_are_refused(tmp_path: Path, version: int, advice: str) -> None:
    path = tmp_path / "step-000000001"
    path.mkdir()
    text = json.dumps({"version": version, "state": {"$": "dict", "items": []}, "sha256": {TENSORS: "0"}}).encode()
    (path / MANIFEST).write_bytes(text + f"\n{hashlib.sha256(text).hexdigest()}\n".encode())
    with pytest.raises(CheckpointError, match=f"format {version}, and this Lockstep reads 2; .*{advice}"):
        layout.read(path)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": 1}, 5)
    for name in ("step-000000006", "copy", "step-5", "step-0000000005"):
        path = path.rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} holds the checkpoint of step 5, so it was renamed"):
            layout.read(path)
    assert layout.read(path.rename(tmp_path / "step-000000005")) == {"a": 1}


def test_verifying_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, everything())
    code = (
        "import sys, pathlib, lockstep.checkpoint.export, lockstep.cli.checkpoint\n"
        f"print(lockstep.cli.checkpoint.main(['verify', {str(path)!r}]))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout.endswith("whole\n0\n")
