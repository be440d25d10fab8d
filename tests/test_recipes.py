"""The programs in examples/recipes, started as their first lines say: each learns what it promises, and one worker and
two end with the same digest.

`make test` runs some steps of all but one, in the same processes, since starting takes longest. Whole runs are slow.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from on_workers import run_program
from test_launch import Stage, nothing_left_behind, outer_env, stage, wait_for  # noqa: F401  (fixtures among them)

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "recipes"
LANGUAGE_MODEL = "language_model.py"
DEADLINE_S = 300


@dataclass(frozen=True)
class Recipe:
    promise: str  # in its docstring
    low: float = 0.0
    high: float = float("inf")
    arguments: tuple[str, ...] = ("5",)  # for a short run, if it has one


RECIPES = {
    "classifier.py": Recipe("above 95 %", low=95),
    "compiled.py": Recipe("below 0.01", high=0.01),
    "ddp_script.py": Recipe("below 0.02", high=0.02, arguments=("1",)),
    "ema.py": Recipe("above 90 %", low=90),
    "hf_style.py": Recipe("below 0.1 nats", high=0.1),
    LANGUAGE_MODEL: Recipe("below 1.1 nats", high=1.1),
    "nested_batches.py": Recipe("above 90 %", low=90),
    "stream.py": Recipe("below 0.02", high=0.02),
    "variable_lengths.py": Recipe("above 95 %", low=95),
}


@dataclass(frozen=True)
class End:
    """What a recipe prints last."""

    figure: float
    digest: str


def read_end(output: str) -> End:
    """Of rank 0, where there are several. A recipe prints one such line."""
    found = re.findall(r"^(?:\[rank 0\] )?([a-z ]*)([\d.]+)\b.*  digest ([0-9a-f]{64})$", output, re.MULTILINE)
    assert len(found) == 1, output
    return End(float(found[0][1]), found[0][2])


def run_python(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=outer_env(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_workers(stage: Stage, workers: int, *command: str, **env: str) -> str:  # noqa: F811
    done = stage.run("-n", str(workers), *command, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- what they look like ---------------------------------------------------------------------------------------------


def test_there_are_nine() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.py")) == sorted(RECIPES)
    listed = re.findall(r"^\| \[`(.+?)`\]\(\1\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_is_short_and_says_what_it_does(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) < 60
    says = text.split('"""')[1]
    for part in (f"python {name} ", f"lockstep run -n 2 {name} ", RECIPES[name].promise):
        assert part in says
    if name != "ddp_script.py":
        assert not re.search(r"rank\b(?! here)|world|\bdist\b|cuda", text)


# ---- some steps of each ----------------------------------------------------------------------------------------------

# Torch's compiler takes as long to start as all others together; tests/test_newcomer.py has a compiled model.
SHORT = [name for name in RECIPES if name != "compiled.py"]

ALL = """
import runpy, sys
sys.path.insert(0, {tests!r})
from test_recipes import FOLDER, RECIPES, SHORT

for name in SHORT:
    print("recipe", name, flush=True)
    sys.argv = [name, *RECIPES[name].arguments]
    runpy.run_path(str(FOLDER / name), run_name="__main__")
"""


def ends_of_all(output: str) -> dict[str, End]:
    parts = re.split(r"^recipe (.+)$", output, flags=re.MULTILINE)
    return {name: read_end(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """Some steps of each recipe, on one worker."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "all.py").write_text(ALL.format(tests=str(Path(__file__).parent)))
    status, output = run_program(folder / "all.py")
    assert status == 0, output
    return ends_of_all(output)


@pytest.mark.timeout(DEADLINE_S)
def test_two_workers_compute_what_one_does(tmp_path: Path, alone: dict[str, End]) -> None:
    (tmp_path / "all.py").write_text(ALL.format(tests=str(Path(__file__).parent)))
    status, output = run_program(tmp_path / "all.py", workers=2)
    assert status == 0, output
    together = ends_of_all(output)
    assert list(together) == list(alone) == list(SHORT)
    different = {name for name in SHORT if together[name] != alone[name]}
    assert different <= {"ddp_script.py"}  # a mean over two workers is rounded in another place


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("name", RECIPES)
def test_learns_what_it_promises_on_one_worker_and_on_two(stage: Stage, tmp_path: Path, name: str) -> None:  # noqa: F811
    (tmp_path / "alone").mkdir()
    alone = read_end(run_python(tmp_path / "alone", str(FOLDER / name)))
    together = read_end(run_workers(stage, 2, str(FOLDER / name)))
    for end in (alone, together):
        assert RECIPES[name].low < end.figure < RECIPES[name].high
    assert together == alone or name == "ddp_script.py"
    if name == "ema.py":
        weights = [exported(folder) for folder in (tmp_path / "alone", stage.folder)]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The averaged weights, by the command in the docstring of ema.py."""
    run_python(folder, "-m", "lockstep", "checkpoint", "export", "runs/ema", "ema.pt", "--what", "ema")
    found: dict[str, torch.Tensor] = torch.load(folder / "ema.pt")
    assert any(key.endswith("0.weight") for key in found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_the_script_for_ddp_ends_with_the_bits_of_torchs_class(stage: Stage) -> None:  # noqa: F811
    ours = (FOLDER / "ddp_script.py").read_text()
    line = next(line for line in ours.splitlines() if line.startswith("from lockstep import Dist"))
    before = ours.replace(line, line.partition("# was: ")[2])
    assert before != ours
    ends = [
        read_end(run_workers(stage, 2, stage.script(text, name), "1", LOCKSTEP_BACKEND="gloo"))
        for name, text in (("ours.py", ours), ("torchs.py", before))
    ]
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_a_stream_is_resumed_on_another_number_of_workers(stage: Stage, tmp_path: Path) -> None:  # noqa: F811
    program = str(FOLDER / "stream.py")
    (tmp_path / "whole").mkdir()
    whole = read_end(run_python(tmp_path / "whole", program))
    assert read_end(run_workers(stage, 2, program, "30")) != whole
    assert read_end(run_workers(stage, 3, program)) == whole


# ---- the language model is interrupted -------------------------------------------------------------------------------


def interrupt(stage: Stage, workers: int, number: signal.Signals, *arguments: str) -> int:  # noqa: F811
    """Start it on so many workers, send the signal to the launcher after the first checkpoint; its exit status."""
    launcher = stage.start("-n", str(workers), str(FOLDER / LANGUAGE_MODEL), *arguments)
    checkpoints = stage.folder / "runs" / "language_model" / "checkpoints"
    wait_for(lambda: checkpoints.is_dir() and any(checkpoints.iterdir()), "a checkpoint", within_s=100)
    launcher.send_signal(number)
    done = stage.end(launcher)
    assert "digest" not in done.stdout, "nothing is printed about a model that is not trained"
    if number != signal.SIGKILL:
        assert len(re.findall(r"saved at step \d+; the same command continues", done.stderr)) == 1, done.stderr
        assert "Traceback" not in done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_after_ctrl_c_it_resumes_on_one_worker(stage: Stage, tmp_path: Path) -> None:  # noqa: F811
    program, steps = str(FOLDER / LANGUAGE_MODEL), "60"
    (tmp_path / "alone").mkdir()
    undisturbed = read_end(run_python(tmp_path / "alone", program, steps))
    assert interrupt(stage, 2, signal.SIGINT, steps) == 130
    assert read_end(run_python(stage.folder, program, steps)) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_after_three_interruptions_on_other_numbers_of_workers_it_ends_as_if_left_alone(
    stage: Stage,  # noqa: F811
    tmp_path: Path,
) -> None:
    program = str(FOLDER / LANGUAGE_MODEL)
    (tmp_path / "alone").mkdir()
    undisturbed = read_end(run_python(tmp_path / "alone", program))
    for number, status, before, after in (
        (signal.SIGINT, 130, 1, 2),
        (signal.SIGTERM, 75, 2, 3),
        (signal.SIGKILL, -signal.SIGKILL, 3, 1),
    ):
        one = Stage(tmp_path / number.name)
        one.folder.mkdir()
        assert interrupt(one, before, number) == status
        assert read_end(run_workers(one, after, program)) == undisturbed
    again = one.run("-n", "2", program)  # the program has ended its training: nothing is left to do
    assert "by the program; nothing to train; --fresh" in again.stderr
    assert read_end(again.stdout) == undisturbed
    assert read_end(run_workers(one, 2, "--fresh", program)) == undisturbed
