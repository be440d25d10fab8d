"""`lockstep checkpoint ls|verify|show|export`."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.manifest import STATE, TENSORS
from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.checkpoint import main
from on_workers import run_program
from test_checkpoint import bits
from test_checkpoint_damage import small_state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run", kept=3)
    for step in (10, 20, 30):
        store.save(step, small_state(step))
    return tmp_path / "run"


def damage(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:09d}" / TENSORS
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_ls_is_a_table(run: Path, capsys: Any) -> None:
    damage(run, 20)
    (run / "checkpoints" / "step-000000010" / "manifest.json").write_text("{}")
    for place in (run, run / "checkpoints"):
        assert main(["ls", str(place)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["step", "saved", "size", "state", "verified"]
        assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30"]
        assert lines[3].endswith("yes")
        assert "NO: " in lines[2]
        assert lines[2].endswith("tensors.safetensors is damaged: its SHA-256 is not the one it was written with; "
                                 "use an older one")  # fmt: skip
        assert lines[1].split()[1:4] == ["-", "-", "-"]
    assert main(["ls", str(run), "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("not read")
    assert "NO: " in lines[1]


def test_ls_for_programs(run: Path, capsys: Any) -> None:
    damage(run, 20)
    assert main(["ls", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["verified"]) for row in rows] == [(10, True), (20, False), (30, True)]
    assert "SHA-256" in rows[1]["reason"]
    assert len(rows[2]["state_sha256"]) == 64
    assert rows[2]["bytes"] > 500


def test_verify_tells_and_its_status_too(run: Path, capsys: Any) -> None:
    assert main(["verify", str(run)]) == 0
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["whole"] * 3
    damage(run, 10)
    assert main(["verify", str(run)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("DAMAGED: ")
    assert "step-000000010/tensors.safetensors" in first
    assert all(line.endswith("whole") for line in others)
    assert main(["verify", str(run / "checkpoints" / "step-000000030")]) == 0
    assert main(["verify", str(run / "checkpoints" / "step-000000010")]) == 1


def test_show(run: Path, capsys: Any) -> None:
    assert main(["show", str(run), "--step", "20"]) == 0
    text = capsys.readouterr().out
    versions = f"torch {torch.__version__}"
    for part in ("step       20, saved 20", "seed 7, exact True, shards 8", "epoch 0, number 20", versions):
        assert part in text
    lines = [line.split() for line in text.splitlines()]
    assert ["model/weight", "F32", "[3,", "2]", "24"] in lines
    assert ["optimizer", "2", "28", "B", "F32"] in lines
    assert main(["show", str(run), "--json", "--tensors"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 30
    assert report["run"] == {"seed": 7, "exact": True, "shards": 8}
    assert report["parts"]["model"] == {"tensors": 1, "bytes": 24}
    assert report["tensors"]["model/weight"]["shape"] == [3, 2]
    assert set(report["versions"]) == {"lockstep", "torch", "python"}


def test_show_takes_the_newest_that_is_whole(run: Path, capsys: Any) -> None:
    damage(run, 30)
    assert main(["show", str(run), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["step"] == 20
    assert told.err.startswith("lockstep: skipped: ")
    assert main(["show", str(run), "--step", "30"]) == 1
    assert "step-000000030/tensors.safetensors is damaged" in capsys.readouterr().err
    damage(run, 20)
    damage(run, 10)
    assert main(["show", str(run)]) == 1
    assert "none of the 3 checkpoints" in capsys.readouterr().err


def test_many_tensors_are_summed_up_and_names_cannot_move_the_cursor(tmp_path: Path, capsys: Any) -> None:
    CheckpointStore(tmp_path).save(1, {"model": {f"{n}\x1b[2J\ud800": torch.ones(n) for n in range(20)}})
    assert main(["show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "and 12 smaller ones: --tensors shows all" in text
    assert "'model/19\\x1b[2J\\ud800'" in text
    assert "\x1b" not in text
    assert main(["show", str(tmp_path), "--tensors"]) == 0
    assert capsys.readouterr().out.count("model/") == 20


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, entry in header.items():
        first, last = (start + at for at in entry["data_offsets"])
        found[name] = entry["dtype"], entry["shape"], data[first:last]
    return found


def test_export(run: Path, tmp_path: Path, capsys: Any) -> None:
    weight = small_state(20)["model"]["weight"]
    out = tmp_path / "model.safetensors"
    assert main(["export", str(run), str(out), "--step", "20"]) == 0
    assert read_safetensors(out) == {"weight": ("F32", [3, 2], bits(weight)[2])}
    assert "1 tensors of model" in capsys.readouterr().out
    assert main(["export", str(run), str(out)]) == 2
    assert "is there already; --force writes over it" in capsys.readouterr().err
    assert main(["export", str(run), str(out), "--force"]) == 0
    assert read_safetensors(out)["weight"][2] == bits(small_state(30)["model"]["weight"])[2]
    out = tmp_path / "model.pt"
    assert main(["export", str(run / "checkpoints" / "step-000000020"), str(out)]) == 0
    assert torch.equal(torch.load(out, weights_only=True)["weight"], weight)
    out = tmp_path / "optimizer.pt"
    assert main(["export", str(run), str(out), "--what", "optimizer"]) == 0
    assert torch.load(out, weights_only=True)["param_groups"][0]["betas"] == (0.9, 0.99)
    assert not list(tmp_path.glob(".*"))


EMA = """
import torch, lockstep
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

with lockstep.Run("run", seed=1, progress=False, device="cpu") as run:
    model = run.replicate(torch.nn.Linear(4, 1))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.register_state(ema=ema)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in run.train(run.batches(TensorDataset(torch.ones(32, 4)), global_batch_size=8, shards=8), optimizer):
        run.step(lambda model, part: (model(part[0]).square().sum(), len(part[0])), batch)
        ema.update_parameters(model)
torch.save(ema.state_dict(), "wanted.pt")
"""


def test_export_of_what_was_registered(tmp_path: Path, capsys: Any) -> None:
    """Of a program that keeps an average of its weights, as torch's own class does."""
    (tmp_path / "train.py").write_text(EMA)
    status, said = run_program(tmp_path / "train.py")
    assert status == 0, said
    wanted = torch.load(tmp_path / "wanted.pt", weights_only=True)
    out = tmp_path / "ema.safetensors"
    assert main(["export", str(tmp_path / "run"), str(out), "--what", "ema"]) == 0
    assert {name: found[2] for name, found in read_safetensors(out).items()} == {
        name: bits(tensor)[2] for name, tensor in wanted.items()
    }
    assert "3 tensors of ema" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ema.pt"), "--what", "ema"]) == 0
    found = torch.load(tmp_path / "ema.pt", weights_only=True)
    torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 1)).load_state_dict(found)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x.pt"), "--what", "average"]) == 1
    assert re.search(r"has no part 'average'; it has model, optimizer, .*\bema$", capsys.readouterr().err.strip())


def test_an_export_that_fails_leaves_what_was_there(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("model.safetensors", "model.pt"):
        out = tmp_path / name
        out.write_text("before")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            assert main(["export", str(run), str(out), "--force"]) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert out.read_text() == "before"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["ls", "{run}/nowhere"], 2, "there is no directory"),
        (["ls", "{run}/empty"], 2, "has no checkpoints: neither step-000000001"),
        (["show", "{run}", "--step", "11"], 2, "has no checkpoint of step 11; there are 10, 20, 30"),
        (["export", "{run}", "{run}/x.bin"], 2, "must end in .safetensors or .pt"),
        (["export", "{run}", "{run}/nowhere/x.pt"], 2, "there is no directory"),
        (["export", "{run}", "{run}/x.pt", "--what", "weights"], 1, "no part 'weights'; it has model, optimizer"),
        (["export", "{run}", "{run}/x.safetensors", "--what", "optimizer"], 1, "optimizer/state of .* is not a tensor"),
        (["export", "{run}", "{run}/x.safetensors", "--what", "schedule"], 1, "no part 'schedule'"),
    ],
)
def test_errors_are_one_line(run: Path, capsys: Any, arguments: list[str], status: int, reason: str) -> None:
    (run / "empty").mkdir()
    assert main([argument.replace("{run}", str(run)) for argument in arguments]) == status
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("lockstep: ")
    assert told.err.count("\n") == 1
    assert not list(run.glob("x.*"))
    assert re.search(reason, told.err)


@pytest.mark.parametrize("arguments", [[], ["ls"], ["burn", "x"], ["show", "x", "--step", "y"]])
def test_wrong_arguments(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: lockstep checkpoint" in capsys.readouterr().err


def test_help(capsys: Any) -> None:
    for arguments in (["--help"], ["ls", "--help"], ["export", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert "exit status: 0; 1 if a checkpoint is damaged" in capsys.readouterr().out


def test_without_torch_and_into_a_closed_pipe(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-000000010" / STATE).unlink()
    code = (
        "import sys, lockstep.cli.checkpoint as c\n"
        f"run, out = {str(run)!r}, {str(tmp_path / 'm.safetensors')!r}\n"
        "print([c.main(a) for a in (['ls', run], ['verify', run], ['show', run], ['export', run, out])])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout.endswith("[0, 1, 0, 0]\n")
    command = [sys.executable, "-m", "lockstep", "checkpoint", "ls", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as quiet:
        assert quiet.stdout is not None
        assert quiet.stderr is not None
        quiet.stdout.close()
        assert quiet.stderr.read() == ""
