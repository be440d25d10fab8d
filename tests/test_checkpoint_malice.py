"""Checkpoints that an attacker made, with every digest right. They are refused, and do nothing on the way."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import CheckpointError
from lockstep.checkpoint import format as layout
from lockstep.checkpoint.manifest import CHECKSUM_LINE_BYTES, MANIFEST, STATE, TENSORS, verify
from test_checkpoint import fast_path, split_tensors, write  # noqa: F401  (fast_path is a fixture)

WEIGHT = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
BIAS = {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}
HEADER = {"weight": WEIGHT, "bias": BIAS}
DEEP = "[" * 100_000 + "]" * 100_000
TENSOR = {"$": "tensor", "name": "weight"}
MOST_BYTES = 16 << 20


@pytest.fixture
def path(fast_path: Path) -> Path:  # noqa: F811
    return write(fast_path, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})


def seal(path: Path, **changes: Any) -> None:
    """A manifest that fits the files as they are now, but for `changes`."""
    fields = json.loads((path / MANIFEST).read_bytes()[:-CHECKSUM_LINE_BYTES])
    for name in fields["files"]:
        data = (path / name).read_bytes()
        fields["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal_text(path, json.dumps(fields | changes))


def seal_text(path: Path, text: str) -> None:
    data = text.encode()
    (path / MANIFEST).write_bytes(data + f"\n{hashlib.sha256(data).hexdigest()}\n".encode())


def refused(path: Path, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CheckpointError, for this reason, and before much memory is asked for."""
    empty = torch.empty

    def small_empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        assert torch.Size(shape).numel() < 1000
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", small_empty)
    for look in (verify, layout.read):
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=reason):
            look(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        tracemalloc.stop()


def test_a_forged_one_that_is_right_is_read(path: Path) -> None:
    """So the refusals below have the reasons they say."""
    body = (path / TENSORS).read_bytes()[-32:]
    header = json.dumps(HEADER).encode()
    (path / TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + body)
    seal(path)
    assert layout.read(path)["weight"].tolist() == [[1.0] * 3] * 2


# ---- tensors ---------------------------------------------------------------------------------------------------------


def header(changes: dict[str, Any]) -> bytes:
    return json.dumps(HEADER | changes).encode()


NO_SHAPE, NO_PLACE, PLACE = "has a shape that no tensor has", "has no place", "is said to be at"
HEADERS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{weight}", "Expecting property name"),
    "a list": (b"[1, 2]", "its header is not an object"),
    "a number": (b"17", "its header is not an object"),
    "metadata that is none": (header({"__metadata__": 3}), "its header is not an object"),
    "not UTF-8": (b'{"\xff": 1}', "can't decode byte 0xff"),
    "UTF-16": (json.dumps(HEADER).encode("utf-16"), "can't decode byte 0xff"),
    "NaN": (b'{"weight": NaN}', "NaN is not JSON"),
    "infinite": (b'{"weight": 1e999}', "1e999 is too large"),
    "a name twice": (json.dumps(HEADER)[:-1].encode() + b', "bias": 1}', "a name occurs twice"),
    "a number of very many digits": (b'{"weight": ' + b"9" * 100_000 + b"}", "a number of 100000 digits"),
    "very deep": (b'{"weight": ' + DEEP.encode() + b"}", "recursion"),
    "an entry that is none": (header({"bias": 1}), "must have dtype, shape and data_offsets"),
    "no shape": (header({"bias": {"dtype": "F32", "data_offsets": [24, 32]}}), "must have dtype, shape and"),
    "one field more": (header({"bias": BIAS | {"code": "x"}}), "must have dtype, shape and data_offsets"),
    "unknown dtype": (header({"bias": BIAS | {"dtype": "F128"}}), "has an unknown dtype"),
    "dtype that is none": (header({"bias": BIAS | {"dtype": [1]}}), "has an unknown dtype"),
    "shape that is none": (header({"bias": BIAS | {"shape": 2}}), NO_SHAPE),
    "negative shape": (header({"bias": BIAS | {"shape": [-1, -2]}}), NO_SHAPE),
    "true in a shape": (header({"bias": BIAS | {"shape": [2, True]}}), NO_SHAPE),
    "a fraction in a shape": (header({"bias": BIAS | {"shape": [2.0]}}), NO_SHAPE),
    "huge shape": (header({"bias": BIAS | {"shape": [2**62, 4]}}), NO_SHAPE),
    "huge number in a shape": (header({"bias": BIAS | {"shape": [10**900]}}), NO_SHAPE),
    "huge shape without bytes": (header({"bias": BIAS | {"shape": [0, 2**62, 2**62]}}), NO_SHAPE),
    "very many dimensions": (header({"bias": BIAS | {"shape": [2] + [1] * 64}}), NO_SHAPE),
    "shape does not fit": (header({"bias": BIAS | {"shape": [3]}}), PLACE),
    "dtype does not fit": (header({"bias": BIAS | {"dtype": "F64"}}), PLACE),
    "large shape": (header({"bias": BIAS | {"shape": [2**40]}}), PLACE),
    "no place": (header({"bias": BIAS | {"data_offsets": [24]}}), NO_PLACE),
    "place that is none": (header({"bias": BIAS | {"data_offsets": {"a": 1}}}), NO_PLACE),
    "negative place": (header({"bias": BIAS | {"data_offsets": [-8, 0]}}), NO_PLACE),
    "backwards": (header({"bias": BIAS | {"data_offsets": [32, 24]}}), PLACE),
    "overlapping": (header({"bias": BIAS | {"data_offsets": [16, 24]}}), PLACE),
    "a gap": (header({"weight": WEIGHT | {"shape": [4], "data_offsets": [0, 16]}}), PLACE),
    "the end is free": (header({"bias": BIAS | {"shape": [1], "data_offsets": [24, 28]}}), "tensors have 28 bytes"),
    "out of the file": (header({"bias": BIAS | {"shape": [4], "data_offsets": [24, 40]}}), "tensors have 40 bytes"),
    "far out of the file": (
        header({"bias": BIAS | {"shape": [2**40], "data_offsets": [24, 24 + 2**42]}}),
        "and there are 32",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_absurd_headers_of_tensors(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, reason = HEADERS[case]
    body = (path / TENSORS).read_bytes()[-32:]
    (path / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + body)
    seal(path)
    refused(path, rf"{TENSORS} is not what .*{reason}", monkeypatch)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 2**40, 1000])
def test_absurd_lengths_of_headers(path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / TENSORS).write_bytes(length.to_bytes(8, "little") + (path / TENSORS).read_bytes()[8:])
    seal(path)
    refused(path, f"a header of {length} bytes in a file of", monkeypatch)
    (path / TENSORS).write_bytes(b"\0\0\0")
    seal(path)
    refused(path, "a header of -1 bytes in a file of 3", monkeypatch)


def test_more_than_there_is_memory(path: Path) -> None:
    text = json.dumps({"weight": {"dtype": "U8", "shape": [2**42], "data_offsets": [0, 2**42]}}).encode()
    (path / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text)
    seal(path)
    os.truncate(path / TENSORS, 8 + len(text) + 2**42)  # it takes no room
    fields = json.loads((path / MANIFEST).read_bytes()[:-CHECKSUM_LINE_BYTES])
    fields["files"][TENSORS]["bytes"] += 2**42
    seal_text(path, json.dumps(fields))
    with pytest.raises(CheckpointError, match="does not fit into the memory of this machine, from 'weight' on"):
        layout.read(path)


def test_one_tensor_in_two_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_tensors(path)
    (path / "part-1.safetensors").write_bytes((path / "part-0.safetensors").read_bytes())
    seal(path)
    refused(path, "part-1.safetensors is not .* is in part-0.safetensors too", monkeypatch)


# ---- the rest of the state -------------------------------------------------------------------------------------------


def items(*pairs: Any) -> str:
    return json.dumps({"$": "dict", "items": list(pairs)})


BIAS_PLACE, WEIGHT_PLACE = ["bias", {"$": "tensor", "name": "bias"}], ["weight", TENSOR]
BOTH = [BIAS_PLACE, WEIGHT_PLACE]
NESTED: Any = 1
for _ in range(60):
    NESTED = [NESTED]
STATES: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "Expecting property name"),
    "very deep": (DEEP, "recursion"),
    "too deep": (items(*BOTH, ["a", NESTED]), "more than 50 levels"),
    "NaN": (items(*BOTH, ["a", float("nan")]), "NaN is not JSON"),
    "a name twice": ('{"$": "dict", "items": [], "items": []}', "a name occurs twice"),
    "many digits": (items(*BOTH).replace('"bias"', "9" * 5000, 1), "a number of 5000 digits"),
    "a list": (json.dumps([TENSOR, BIAS_PLACE[1]]), "the state is not a dict"),
    "unknown kind": (items(*BOTH, ["a", {"$": "module", "name": "os"}]), "an object of an unknown kind"),
    "no kind": (items(*BOTH, ["a", {}]), "an object of an unknown kind"),
    "a tensor and more": (items(BIAS_PLACE, ["weight", TENSOR | {"x": 1}]), "an object of an unknown kind"),
    "items that are none": ('{"$": "dict", "items": 3}', "an object of an unknown kind"),
    "no pairs": (items(*BOTH, ["a"]), "a dict that does not consist of pairs"),
    "a list as key": (items(*BOTH, [[1], 2]), "a key that no dict has"),
    "a dict in a key": (items(*BOTH, [{"$": "tuple", "items": [{"$": "dict", "items": []}]}, 2]), "a key that no dict"),
    "a tensor as key": (items(BIAS_PLACE, [TENSOR, 2]), "the tensor 'weight' is not there"),
    "a key twice": (items(*BOTH, [1, 2], [True, 3]), "a dict with a key that occurs twice"),
    "an odd float": (items(*BOTH, ["a", {"$": "float", "value": "1e5"}]), "an object of an unknown kind"),
    "a tensor that is not there": (items(*BOTH, ["a", {"$": "tensor", "name": "x"}]), "the tensor 'x' is not there"),
    "a tensor in two places": (items(*BOTH, ["a", TENSOR]), "the tensor 'weight' is not there, or it has two places"),
    "a tensor without a place": (items(WEIGHT_PLACE), "it has no place for 1 tensors, 'bias' for one"),
}


@pytest.mark.parametrize("case", STATES)
def test_absurd_states(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, reason = STATES[case]
    (path / STATE).write_text(text)
    seal(path)
    refused(path, rf"{STATE} is not what .*{reason}", monkeypatch)


def test_another_state_than_the_manifest_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / STATE).write_text(items(*BOTH, ["a", 1]))
    seal(path)
    refused(path, "its state has another SHA-256", monkeypatch)


# ---- the manifest, and names -----------------------------------------------------------------------------------------

FIELDS, NAME = "does not have the fields", "is not the name of a file in a checkpoint"
ZEROS = {"bytes": 0, "sha256": "0" * 64}
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda fields: [1], "it has no version"),
    "true for a version": (lambda fields: fields | {"version": True}, "it has no version"),
    "no version": (lambda fields: {}, "it has no version"),
    "one field more": (lambda fields: fields | {"code": 1}, FIELDS),
    "no files": (lambda fields: {k: v for k, v in fields.items() if k != "files"}, FIELDS),
    "files that are none": (lambda fields: fields | {"files": [STATE]}, FIELDS),
    "negative step": (lambda fields: fields | {"step": -1}, FIELDS),
    "half a step": (lambda fields: fields | {"step": 1.0}, FIELDS),
    "time as a text": (lambda fields: fields | {"saved_at": "now"}, FIELDS),
    "a time too late": (lambda fields: fields | {"saved_at": 1e300}, FIELDS),
    "a time of many digits": (lambda fields: fields | {"saved_at": 10**999}, FIELDS),
    "no SHA-256 of the state": (lambda fields: fields | {"state_sha256": "0" * 63}, FIELDS),
    "versions": (lambda fields: fields | {"versions": {"torch": 2}}, "a version is not a text"),
    "no state": (lambda fields: fields | {"files": {TENSORS: ZEROS}}, f"{STATE} is not listed"),
    "size as a text": (lambda fields: fields | {"files": {STATE: ZEROS | {"bytes": "1"}}}, "has no size"),
    "negative size": (lambda fields: fields | {"files": {STATE: ZEROS | {"bytes": -1}}}, "has no size"),
    "SHA-256 in capitals": (lambda fields: fields | {"files": {STATE: ZEROS | {"sha256": "A" * 64}}}, "no SHA-256"),
    "a file's field more": (lambda fields: fields | {"files": {STATE: ZEROS | {"x": 1}}}, "has no size or no SHA-256"),
}
NAMES = ["../x.safetensors", "a/b.safetensors", "/etc/x.safetensors", "..", ".", "", MANIFEST, "data.pkl",
         ".x.safetensors", "a\0.safetensors", "a\n.safetensors", "x" * 200 + ".safetensors", "..\\x.safetensors",
         "x.safetensors/", "state.json.safetensors\n", "ü.safetensors"]  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_absurd_manifests(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, reason = MANIFESTS[case]
    fields = json.loads((path / MANIFEST).read_bytes()[:-CHECKSUM_LINE_BYTES])
    seal_text(path, json.dumps(change(fields)))
    refused(path, rf"{MANIFEST} is not what .*{reason}", monkeypatch)


@pytest.mark.parametrize("text", [DEEP, '{"version": 2, "version": 2}', '{"version": NaN}', "9" * 5000, ""])
def test_manifests_that_are_no_json(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seal_text(path, text)
    refused(path, rf"{MANIFEST} is not what Lockstep writes", monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "x.safetensors").write_bytes((path / TENSORS).read_bytes())
    fields = json.loads((path / MANIFEST).read_bytes()[:-CHECKSUM_LINE_BYTES])
    fields["files"][name] = fields["files"].pop(TENSORS)
    seal_text(path, json.dumps(fields))
    refused(path, NAME, monkeypatch)


def test_what_is_no_plain_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MANIFEST, STATE, TENSORS):
        elsewhere = path.parent / name
        (path / name).rename(elsewhere)
        (path / name).symlink_to(elsewhere)
        refused(path, rf"{name} (is not a plain file|cannot be read: Too many levels of symbolic links)", monkeypatch)
        (path / name).unlink()
        os.mkfifo(path / name)  # no process will ever write into it
        refused(path, rf"{name} is not a plain file", monkeypatch)
        (path / name).unlink()
        (path / name).mkdir()
        refused(path, rf"{name} is not a plain file", monkeypatch)
        (path / name).rmdir()
        elsewhere.rename(path / name)
    layout.verify(path)
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    refused(path, "is not a directory, or a link to one", monkeypatch)
    path.unlink()
    path.touch()
    refused(path, "is not a directory, or a link to one", monkeypatch)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", [MANIFEST, STATE, TENSORS, "data.pkl", "more.safetensors"])
def test_pickles_are_not_opened(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = path.parent / "ran"
    poison = pickle.dumps(Bomb(ran))
    pickle.loads(poison)
    assert ran.is_dir()
    ran.rmdir()
    (path / name).write_bytes(poison)
    refused(path, name, monkeypatch)
    if name in (STATE, TENSORS):
        seal(path)
        refused(path, name, monkeypatch)
    assert not ran.exists()
