"""What README.md and docs/ say is true: their Python runs, their command lines parse, their links lead somewhere.

How a block is run is said in a comment before it: see `pages.py`. `page_driver.py` runs them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import page_driver
from lockstep.cli import main as cli
from on_workers import run_program
from pages import (
    ROOT,
    Block,
    all_pages,
    blocks_of,
    commands_of,
    expected_output,
    headings_of,
    links_of,
    name_of,
    named_paths,
    written_pages,
)

TESTS = Path(__file__).resolve().parent
DEADLINE_S = 300
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_BACKEND", "LOCKSTEP_FAULTS")
PAGES = [path for path in written_pages() if name_of(path) != "docs/api.md"]
WITH_PYTHON = [name_of(path) for path in PAGES if "```python" in path.read_text()]


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in TOLD}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{clean.get('PYTHONPATH', '')}"}


# ---- code ----------------------------------------------------------------------------------------------------------


@functools.cache
def run_pages() -> tuple[str, list[dict[str, Any]]]:
    """Runs all pages in one process that has torch. What went wrong with it, and the outcomes of blocks."""
    with tempfile.TemporaryDirectory() as folder:
        script, results = write_caller(Path(folder), TESTS / "page_driver.py"), Path(folder) / "results"
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": environment()["PYTHONPATH"]}
        status, said = run_program(script, str(results), *WITH_PYTHON, timeout_s=DEADLINE_S, **env)
        found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return f"{status}: {said}" if status != 0 else "", found


def write_caller(folder: Path, script: Path) -> Path:
    """Write a script that runs another one: `run_program` writes beside the script what it prints."""
    caller = folder / "caller.py"
    caller.write_text(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    return caller


def outcomes() -> dict[str, list[dict[str, Any]]]:
    problem, found = run_pages()
    assert not problem, problem
    return {page: [one for one in found if one["where"].rpartition(":")[0] == page] for page in WITH_PYTHON}


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(page: str) -> None:
    for outcome in outcomes()[page]:
        assert not outcome["problem"], f"{outcome['where']}: {outcome['problem']}"


def test_what_is_not_run_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [one for page in outcomes().values() for one in page if one["not_run"]]
    with capsys.disabled():
        for one in left_out:
            print(f"\nnot run: {one['where']}: {one['not_run']}", end="")
    assert len(left_out) <= 6  # it is the exception
    everything = [block for path in PAGES for block in blocks_of(name_of(path), path.read_text())]
    assert all(block.marks["not run"] for block in everything if "not run" in block.marks)


def test_every_page_with_python_was_run() -> None:
    assert all(outcomes()[page] for page in WITH_PYTHON)
    assert {"README.md", "docs/tutorial.md"} <= set(WITH_PYTHON)


# ---- command lines -------------------------------------------------------------------------------------------------


class Parsed(Exception):
    pass


def command_lines() -> list[Any]:
    found = []
    for path in written_pages():
        for block in blocks_of(name_of(path), path.read_text()):
            found += [pytest.param(arguments, id=f"{block.where} {arguments}") for arguments in commands_of(block)]
    return found


@pytest.mark.parametrize("arguments", command_lines())
def test_a_command_line_parses(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        raise Parsed(parse(self, *given, **named))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as parsed:  # or SystemExit: it is not understood
        cli.main(arguments)
    chosen = parsed.value.args[0]
    if getattr(chosen, "command", "") == "run":
        assert chosen.program, "which program?"
        assert not chosen.program[0].startswith("-"), "an option that `lockstep run` has not"
    for word in arguments:
        assert not word.startswith("examples/") or (ROOT / word).is_file()


def test_there_are_command_lines() -> None:
    assert len(command_lines()) > 20


# ---- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", all_pages(), ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for link in links_of(text):
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link} in {path.name}"
        assert ROOT in target.parents, f"{link} in {path.name} leads out of the project"
        if heading:
            assert heading in headings_of(target.read_text()), f"{link}: there is no such heading"
    for name in named_paths(text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_every_page_can_be_found_from_the_readme() -> None:
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        text = page.read_text()
        ahead += [(page.parent / link.partition("#")[0]).resolve() for link in links_of(text) if link[0] != "#"]
        ahead += [ROOT / name for name in named_paths(text)]
    missing = set(written_pages()) - seen
    assert not missing


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=name_of)
def test_a_picture_is_used_and_says_what_it_shows(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in path.read_text()
    assert any(path.name in page.read_text() for page in written_pages())


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_api_reference_is_up_to_date(tmp_path: Path) -> None:
    status, said = run_program(write_caller(tmp_path, ROOT / "docs" / "make_api.py"), "--check")
    assert status == 0, said


# ---- the tutorial, with the real launcher ----------------------------------------------------------------------------


def tutorial() -> tuple[dict[str, str], list[str]]:
    """(its files, its command lines)"""
    blocks = blocks_of("docs/tutorial.md", (ROOT / "docs" / "tutorial.md").read_text())
    files = {block.marks["file"]: block.code for block in blocks if "file" in block.marks}
    lines = [line for block in blocks if block.language == "sh" for line in block.code.splitlines() if line.strip()]
    return files, lines


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = environment() | {"PATH": path}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    """Every command line of it, in order, as a reader would type them."""
    files, lines = tutorial()
    (tmp_path / "bin").mkdir()
    for name, command in (("lockstep", "-m lockstep "), ("python", "")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {command}"$@"\n')
        script.chmod(0o755)
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    digests = set()
    for line in lines:
        done = run_line(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        digests |= set(re.findall(r"digest ([0-9a-f]+)", done.stdout))
        if "LOCKSTEP_FAULTS" in line:
            assert "was lost; 1 worker continues" in done.stderr
    assert len(lines) > 8
    assert len(digests) == 2  # of the run, and of the one that has more epochs
    assert shutil.which("lockstep", path=str(tmp_path / "bin"))


# ---- the tools of this file ------------------------------------------------------------------------------------------


def test_blocks_are_found_with_their_marks() -> None:
    text = "a\n\n<!-- workers: 2 -->\n<!-- raises: ValueError: no -->\n```python\nx = 1\n```\n\n```sh\nls\n```\n"
    first, second = blocks_of("page.md", text)
    assert first == Block("page.md", 6, "python", "x = 1\n", {"workers": "2", "raises": "ValueError: no"})
    assert (second.line, second.marks) == (10, {})
    with pytest.raises(ValueError, match="it takes not run, workers"):
        blocks_of("page.md", "<!-- slow -->\n```python\n```\n")


def test_commands_are_found_in_shell() -> None:
    code = "$ lockstep run -n 2 \\\n  train.py --lr 1   # two\n"
    code += "A='[1, 2]' lockstep doctor && lockstep demo | tail\nls lockstep\n"
    found = list(commands_of(Block("page.md", 1, "sh", code)))
    assert found == [["run", "-n", "2", "train.py", "--lr", "1"], ["doctor"], ["demo"]]
    assert list(commands_of(Block("page.md", 1, "python", code))) == []


def test_output_may_be_cut_anywhere_and_left_out_in_part() -> None:
    pattern = expected_output("a b\n  c ...\nd\n")
    assert pattern.search("x a b c 1 2 3 d y")
    assert not pattern.search("a c b d")
    assert expected_output("one (1)").search("one (1)")
    assert not expected_output("one (1)").search("one 1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nx = 1\n```\n```python\nassert x == 1\n```\n", ""),
        ("```python\nprint(1 / 0)\n```\n", "ZeroDivisionError"),
        ("<!-- raises: KeyError: 'b' -->\n```python\n{'a': 1}['b']\n```\n", ""),
        ("<!-- raises: KeyError: 'b' -->\n```python\n{'a': 1}['a']\n```\n", "should raise KeyError"),
        ("<!-- raises: KeyError: 'b' -->\n```python\n{'a': 1}['c']\n```\n", "not KeyError: 'b', but"),
        ("```python\nprint('1 2')\n```\n<!-- output -->\n```text\n1\n2\n```\n", ""),
        ("```python\nprint('1 2')\n```\n<!-- output -->\n```text\n1 3\n```\n", "printed something else"),
        ("<!-- workers: 2 -->\n```python\nimport os\nassert os.environ['RANK'] == '0'\n```\n", "AssertionError"),
        ("<!-- before: x = 2 -->\n<!-- file: a.py -->\n```python\nassert x == 2\n```\n```python\nimport a\n```\n", ""),
        ("<!-- not run: no GPU -->\n```python\nboom\n```\n", ""),
    ],
)
def test_the_driver_finds_what_is_wrong(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_driver, "name_of", lambda path: path.name)
    (tmp_path / "page.md").write_text(text)
    found = [one.problem for one in page_driver.run_page(tmp_path / "page.md")]
    if problem:
        assert any(problem in one for one in found)
    else:
        assert not any(found)
