"""A disk that is full for a while: training goes on, it is told once, and nothing is missing afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.data.ledger import prove
from lockstep.errors import LockstepError
from lockstep.run_files import Appender, append_lines, prepare

FULL = Path("/dev/full")  # every write to it finds no space


def fill(*paths: Path) -> None:
    """Whatever is written to these files from now on finds no space."""
    for path in paths:
        path.rename(path.with_suffix(".real"))
        path.symlink_to(FULL)


def free(*paths: Path) -> None:
    for path in paths:
        path.unlink()
        path.with_suffix(".real").rename(path)


def test_lines_are_added(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert append_lines(path, ["one", "two"]) == 8
    assert append_lines(path, ["three"]) == 14
    assert path.read_text() == "one\ntwo\nthree\n"


def test_what_does_not_fit_is_not_written_in_part(tmp_path: Path) -> None:
    """The file may have 100 bytes: the second line fits in part."""
    program = (
        "import resource, sys; from pathlib import Path; from lockstep.run_files import append_lines\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "append_lines(Path(sys.argv[1]), ['x' * 79])\n"
        "append_lines(Path(sys.argv[1]), ['y' * 79])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "lines")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "No space left on device" in done.stderr
    assert (tmp_path / "lines").read_text() == "x" * 79 + "\n"


def test_a_full_disk_is_told_once_and_so_is_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "lines"
    file = Appender(path, "the file of lines")
    assert file.add(["one"]) == 4
    fill(path)
    assert file.add(["two"]) is None
    assert file.add(["two", "three"]) is None
    free(path)
    assert file.add(["two", "three", "four"]) == 19
    assert path.read_text() == "one\ntwo\nthree\nfour\n"
    first, second = capsys.readouterr().err.splitlines()
    for part in (f"the file of lines, {path}, cannot be written", "(ENOSPC)", "training continues", "free some space"):
        assert part in first
    assert "is written again" in second


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be a disk that was unmounted: what is below it is another disk."""
    file = Appender(tmp_path / "run" / "lines", "the file of lines")
    file.add(["one"])
    shutil.rmtree(tmp_path / "run")
    assert file.add(["two"]) is None
    assert not (tmp_path / "run").exists()
    assert "make it again, or mount its disk" in capsys.readouterr().err


@pytest.mark.parametrize(("place", "problem"), [("file", "move it away"), ("file/run", "move it away")])
def test_a_directory_that_cannot_be_one_is_told_at_once(tmp_path: Path, place: str, problem: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockstepError, match=problem) as told:
        prepare(tmp_path / place)
    assert f"the directory of the run, {tmp_path / place}, cannot be used" in str(told.value)


TRAIN = """
import resource, sys, torch, lockstep
folder, full_from, full_to = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(16, 2), torch.arange(16.0))
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with lockstep.Run(folder, seed=1, save_every=10, progress=False) as run:
    model = run.replicate(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for batch in run.train(run.batches(data, global_batch_size=4, shards=2, epochs=10), optimizer):
        if batch.number == full_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
        if batch.number == full_to:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        result = run.step(lambda net, one: (((net(one[0])[:, 0] - one[1]) ** 2).sum(), len(one[0])), batch)
        run.log(loss=result.loss)
    print(run.digest())
"""


def train(folder: Path, *, full_from: int = -1, full_to: int = -1) -> tuple[str, str]:
    """40 steps, with figures after each, and a checkpoint after every tenth: the digest, and what was said.

    From one step to another no file may grow, neither that of the ledger nor those of a checkpoint.
    """
    command = [sys.executable, "-c", TRAIN, str(folder), str(full_from), str(full_to)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_goes_on_and_its_ledger_and_figures_are_whole(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    digest, _ = train(tmp_path / "undisturbed")
    found, said = train(folder, full_from=5, full_to=25)
    assert found == digest
    assert prove(folder).holds
    assert prove(folder).steps == 40
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert said.count("the ledger, ") == said.count("the file of metrics, ") == 2  # it cannot be written; it is again
    assert "the checkpoint of step 10 was not written" in said
    assert "the checkpoint of step 20 was not written" in said
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000000030", "step-000000040"]
