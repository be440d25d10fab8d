"""The examples, as a user would start them: one digest, whatever the launcher and the number of workers.

Their full runs are in `make convergence`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
sys.path.append(str(ROOT / "campaigns"))
from convergence import Case, Row, large_batch, main, plan, read_figure, show  # noqa: E402

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LOCKSTEP_BACKEND")
DEADLINE_S = 300


@dataclass(frozen=True)
class End:
    digest: str
    figure: float


def start(name: str, *arguments: str, workers: int | None = None, logs: Path | None = None) -> subprocess.Popen[str]:
    """Under plain Python, or under the launcher."""
    launcher = ["-m", "lockstep", "run", "-n", str(workers), "--log-dir", str(logs)] if workers else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *arguments]
    env = {key: value for key, value in os.environ.items() if key not in TOLD}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output + errors
    return output


def end_of(process: subprocess.Popen[str]) -> End:
    """What the program printed, once."""
    output = finish(process)
    digests, figure = re.findall(r"digest ([0-9a-f]{64})$", output, re.MULTILINE), read_figure(output)
    assert len(digests) == 1, output
    assert figure is not None, output
    return End(digests[0], figure)


def test_there_are_three() -> None:
    assert [path.name for path in EXAMPLES] == ["chargpt.py", "cifar_like.py", "digits.py"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_is_short_and_knows_nothing_of_other_workers(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert not re.search(r"rank|world|cuda|\bdist\b", text, re.IGNORECASE)


@pytest.mark.slow
def test_help_says_what_it_does_and_how_it_is_started() -> None:
    helps = {path.name: start(path.name, "--help") for path in EXAMPLES}  # side by side: most of it is importing torch
    for name, process in helps.items():
        text = finish(process)
        assert f"lockstep run -n 2 examples/{name}" in text or f"lockstep run -n 3 examples/{name}" in text
        for option in ("--steps", "--seed", "--directory"):
            assert option in text


@pytest.mark.parametrize(
    ("name", "arguments", "differently"),
    [
        pytest.param("chargpt.py", ("--steps", "3", "--text", str(ROOT / "README.md")), (), marks=pytest.mark.slow),
        pytest.param(
            *("cifar_like.py", ("--steps", "6", "--optimizer", "lars"), ("--num-workers", "1")), marks=pytest.mark.slow
        ),
    ],
    ids=["chargpt", "cifar_like"],
)
def test_one_digest(name: str, arguments: tuple[str, ...], differently: tuple[str, ...], tmp_path: Path) -> None:
    alone = end_of(start(name, *arguments))
    assert end_of(start(name, *arguments, *differently, workers=3, logs=tmp_path)) == alone


@pytest.mark.slow
def test_digits_are_learned_and_a_run_goes_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    arguments, kept = ("--batch", "128", "--seed", "1"), ("--directory", str(tmp_path / "kept"))
    whole = end_of(start("digits.py", *arguments))
    assert whole.figure >= 97.0
    part = end_of(start("digits.py", *arguments, *kept, "--steps", "5"))
    assert part.digest != whole.digest
    assert end_of(start("digits.py", *arguments, *kept, workers=2, logs=tmp_path / "logs")) == whole


@pytest.mark.slow
def test_another_seed_is_another_run() -> None:
    first, second = (start("digits.py", "--steps", "2", "--seed", seed) for seed in ("1", "2"))
    assert end_of(first).digest != end_of(second).digest


# ------------------------------------------------------------------------------------------------- the long campaign


def test_a_figure_is_read_from_one_line_with_a_digest() -> None:
    digest = "3f" * 32
    assert read_figure(f"[rank 0] accuracy 99.17%  digest {digest}\n") == 99.17
    assert read_figure(f"1.342 nats per character  digest {digest}\n") == 1.342
    assert read_figure("accuracy 99.17%\n") is None
    assert read_figure(f"accuracy 99.17%  digest {digest}\n" * 2) is None


def test_a_row_holds_if_its_figure_is_where_it_should_be() -> None:
    high, low = Case("digits.py", low=97.0), Case("chargpt.py", high=1.5)
    assert [Row(high, 0, figure).holds for figure in (96.99, 97.0, 100.0, None)] == [False, True, True, False]
    assert [Row(low, 0, figure).holds for figure in (1.2, 1.5, 1.51)] == [True, True, False]
    assert "97.00 or more" in show(Row(high, 0, 98.0))
    assert "NO" in show(Row(high, 0, None))


def test_a_large_batch_may_differ_by_one_percent_either_way() -> None:
    case = large_batch(Row(Case("digits.py", low=97.0), 0, 98.61))
    assert case is not None
    assert case.wanted == "97.61 to 99.61"
    assert [Row(case, 0, figure).holds for figure in (97.6, 97.61, 99.61, 99.62)] == [False, True, True, False]
    assert large_batch(Row(Case("chargpt.py", high=1.5), 0, 1.3)) is None


def test_the_campaign_covers_every_example_and_several_seeds() -> None:
    assert {case.program for case, _ in plan(quick=True)} == {path.name for path in EXAMPLES}
    assert len({seed for case, seed in plan(quick=False) if case.program == "digits.py"}) >= 5
    assert len(plan(quick=True)) < len(plan(quick=False))


def test_the_campaign_turns_red(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"digits.py": 99.0, "cifar_like.py": 97.0, "chargpt.py": 1.3}
    monkeypatch.setattr("convergence.run", lambda case, seed, workers: Row(case, seed, figures[case.program]))
    assert main(["--quick"]) == 0
    figures["chargpt.py"] = 1.6
    assert main(["--quick"]) == 1
    assert "1 do not hold" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--workers", "9"])
    assert ended.value.code == 2
