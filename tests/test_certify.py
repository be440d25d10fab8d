"""`lockstep certify`: a program that keeps the promise, and some that do not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.cli import main as cli
from lockstep.cli.certify import Difference, Variant, first_difference, likely_cause, list_variants

PROGRAM = """
import torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def loss(model, batch):
    x, y = batch
    {mistake}
    if not model.training:
        {late_mistake}
    return F.mse_loss(model(x), y, reduction="sum"), len(x)

g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 2, generator=g))
with lockstep.Run("run", seed=1, progress=False, check_every=1000) as run:
    model = run.replicate(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in run.train(run.batches(data, global_batch_size=16, shards=4, epochs=5), optimizer):
        {body}
        run.step(loss, batch)
    raise AssertionError("certify ends the program before this")
"""


def seen(*losses: float, **tensors: int) -> dict[tuple[int, int], dict[str, object]]:
    return {
        (n, 0): {"what": "step", "figures": {"loss": loss}, "tensors": dict(tensors)} for n, loss in enumerate(losses)
    }


def test_the_first_difference_is_named() -> None:
    one = seen(1.0, 2.0, a=1, b=2)
    assert first_difference(one, seen(1.0, 2.0, a=1, b=2)) is None
    assert first_difference(one, seen(1.0, 3.0, a=1, b=2)) == Difference(1, [])
    assert first_difference(one, seen(1.0, 2.0, a=1, b=3)) == Difference(0, ["b"])
    assert first_difference(one, seen(1.0, 2.0, a=1)) == Difference(0, ["b"])
    evaluated = {"what": "run.evaluate", "figures": {"accuracy": [1, 2]}, "tensors": {"a": 1}}
    two = one | {(0, 1): evaluated}
    assert str(first_difference(two, one | {(0, 1): evaluated | {"figures": {}}})) == (
        "differs in run.evaluate, after step 0: the figures"
    )
    assert str(first_difference(two, one | {(0, 1): evaluated | {"tensors": {"a": 2}}})) == (
        "differs in run.evaluate, after step 0: a"
    )
    late = first_difference(one, seen(1.0, a=1, b=2))
    assert late is not None
    assert late.step == 1


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({0, 1, 2, 3, 4}, "does not repeat itself even on one worker"),
        ({1, 2, 3, 4}, "depends on the workers"),
        ({4}, "only the killed run differs"),
        ({3}, "only the resumed run differs"),
        ({3, 4}, "only the resumed and the killed run differs"),
        ({2}, "some numbers of workers differ"),
    ],
)
def test_the_likely_cause(wrong: set[int], cause: str) -> None:
    variants = list_variants([1, 2, 4], 8)[1:]
    assert variants[-2] == Variant("2 workers, resumed on 1 at step 4", 2, 4, resumed_after=4)
    assert variants[-1] == Variant("3 workers, one killed in step 4", 3, 4, killed_in=4)
    found = {arm: Difference(3, ["a"]) if n in wrong else None for n, arm in enumerate(variants)}
    assert cause in likely_cause(found)


def test_a_run_that_fails_is_no_other_result() -> None:
    """Not even the first one, which only repeats the program on one worker."""
    first, *others = list_variants([1, 2, 4], 8)[1:]
    failed = Difference(0, [], error="it took longer than 600 s")
    assert "longer than 600 s" in likely_cause({first: failed, **{arm: Difference(3, ["a"]) for arm in others}})


def certify(
    folder: Path,
    mistake: str,
    *options: str,
    monkeypatch: pytest.MonkeyPatch,
    late_mistake: str = "pass",
    body: str = "pass",
) -> int:
    (folder / "program.py").write_text(PROGRAM.format(mistake=mistake, late_mistake=late_mistake, body=body))
    monkeypatch.chdir(folder)
    return cli.main(["certify", "--workers", "1,2", "--steps", "4", *options, "program.py"])


@pytest.mark.slow
def test_a_good_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    status = certify(tmp_path, "pass", "--json", "certificate.json", monkeypatch=monkeypatch)
    said = capfd.readouterr().out
    assert status == 0, said
    assert said.count("the same bits") == 5
    assert "(4 shards)" in said
    assert json.loads((tmp_path / "certificate.json").read_text())["holds"] is True
    assert not (tmp_path / "run").exists()  # what the program would save is not touched


@pytest.mark.slow
def test_a_program_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a worker did before is not the same on another number of workers."""
    mistake = "loss.calls = getattr(loss, 'calls', 0) + 1; x = x * (1 + loss.calls)"
    assert certify(tmp_path, mistake, monkeypatch=monkeypatch) == 1
    said = capfd.readouterr().out
    assert "differs after step 0: 0.weight" in said
    assert "depends on the workers" in said


@pytest.mark.slow
def test_a_program_with_state_that_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A generator of its own; what it draws from torch follows from the step."""
    body = "optimizer.param_groups[0]['lr'] = float(torch.rand(())) + float(torch.rand((), generator=g))"
    assert certify(tmp_path, "pass", monkeypatch=monkeypatch, body=body) == 1
    said = capfd.readouterr().out
    assert re.search(r"resumed on 1 at step 2 \.+ differs after step 2: 0.weight", said)
    assert "only the resumed run differs" in said
    body = "optimizer.param_groups[0]['lr'] = float(torch.rand(()))"
    assert certify(tmp_path, "pass", monkeypatch=monkeypatch, body=body) == 0


@pytest.mark.slow
def test_a_program_whose_evaluation_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is ended before it evaluates; its loss in eval mode shows it."""
    mistake = "loss.calls = getattr(loss, 'calls', 0) + 1; x = x * (1 + loss.calls)"
    assert certify(tmp_path, "pass", monkeypatch=monkeypatch, late_mistake=mistake) == 1
    said = capfd.readouterr().out
    assert said.count("differs in the loss in eval mode, after step 3: the figures") == 2
    assert "depends on the workers" in said


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in [
        (["missing.py"], "there is no script 'missing.py'"),
        (["--workers", "two", "x.py"], "not a list of numbers"),
        ([], "which program?"),
    ]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["certify", *arguments])
        assert ended.value.code == 2
        assert words in capfd.readouterr().err
    (tmp_path / "idle.py").write_text("print('nothing')\n")
    assert cli.main(["certify", "idle.py"]) == 2
    assert "must train with a lockstep.Run" in capfd.readouterr().out
