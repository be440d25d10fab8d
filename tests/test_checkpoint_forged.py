"""Random changes after which every digest is made right again: an error, or the same state as before. Nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lockstep import CheckpointError
from lockstep.checkpoint import format as layout
from lockstep.checkpoint.manifest import CHECKSUM_LINE_BYTES, MANIFEST, STATE, TENSORS
from test_checkpoint import everything, fast_path, same, write  # noqa: F401  (fast_path is a fixture)
from test_checkpoint_damage import overwrite
from test_checkpoint_malice import seal, seal_text

# What JSON is made of, and what might upset a reader of it.
WORDS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"NaN", b"Infinity", b"-1", b"0", b"1e999",
         b"9" * 30, b"9" * 5000, b'"$"', b'"tensor"', b'"F64"', b"\\ud800", b"\xff", b"\0", b"[" * 2000,
         b"9223372036854775807", b"18446744073709551616", b'"../x"', b'{"a":1,"a":1}']  # fmt: skip


def mutate(data: bytes, generator: random.Random) -> bytes:
    for _ in range(generator.choice([1, 1, 1, 2, 5])):
        at, size = generator.randrange(len(data) + 1), generator.choice([0, 1, 2, 8, 40])
        match generator.randrange(4):
            case 0:
                data = data[:at] + generator.choice(WORDS) + data[at + size :]
            case 1:
                data = data[:at] + data[at + size :]
            case 2:
                data = data[:at] + generator.randbytes(size) + data[at + size :]
            case _:
                other = generator.randrange(len(data) + 1)
                data = data[:at] + data[other : other + size] + data[at + size :]
    return data


def forge(folder: Path, count: int, *, seed: int) -> dict[str, int]:
    """How many were refused, by file. Those that were not gave the same state."""
    state, generator = everything(), random.Random(seed)
    path = write(folder, state)
    whole = {name: (path / name).read_bytes() for name in (MANIFEST, STATE, TENSORS)}
    refused = dict.fromkeys(whole, 0)
    for _ in range(count):
        name = generator.choice([*whole])
        if name == MANIFEST:
            text = mutate(whole[name][:-CHECKSUM_LINE_BYTES], generator)
            seal_text(path, text.decode("latin-1"))
        elif name == STATE:
            overwrite(path / name, mutate(whole[name], generator))
            seal(path)
        else:
            length = int.from_bytes(whole[name][:8], "little")
            text = mutate(whole[name][8 : 8 + length], generator)
            length = len(text) if generator.random() < 0.9 else generator.choice([0, 2**62, length, length + 1])
            overwrite(path / name, length.to_bytes(8, "little") + text + whole[name][8 + len(text) :])
            seal(path)
        try:
            assert same(layout.read(path), state)
        except CheckpointError:
            refused[name] += 1
        for changed in {name, MANIFEST}:
            overwrite(path / changed, whole[changed])
    assert same(layout.read(path), state)
    return refused


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
def test_random_forgeries(fast_path: Path, seed: int) -> None:  # noqa: F811
    refused = forge(fast_path, 1500, seed=seed)
    assert min(refused.values()) > 400
    assert sum(refused.values()) > 1200


def test_a_forged_manifest_that_is_right_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, everything())
    seal_text(path, json.dumps(json.loads((path / MANIFEST).read_bytes()[:-CHECKSUM_LINE_BYTES])))
    assert same(layout.read(path), everything())
