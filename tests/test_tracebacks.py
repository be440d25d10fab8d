"""What is shown of the traceback of a program that fails: the user's own lines, once; and how the program ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_launch import (  # noqa: F401  (fixtures)
    DEADLINE_S,
    Stage,
    nothing_left_behind,
    outer_env,
    split_card,
    stage,
)

OURS = os.sep + os.path.join("src", "lockstep") + os.sep
DATASET = """
import torch, lockstep

class Samples(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 17:
            raise ValueError(f"bad sample {i}")
        return torch.ones(8), 1

def loss(model, batch):
    if "loss" in sys.argv and run.world.rank == run.world.size - 1:
        model(batch[0], "too much")
    return model(batch[0]).sum(), len(batch[0])

with lockstep.Run(seed=1, progress=False) as run:
    model = run.replicate(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = int("num_workers=1" in sys.argv)
    for batch in run.train(run.batches(Samples(), global_batch_size=16, shards=8, num_workers=loaders), optimizer):
        run.step(loss, batch)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("", ["in __getitem__", 'raise ValueError(f"bad sample {i}")', "for batch in run.train", "direct cause"]),
        pytest.param(
            "num_workers=1",
            ["in __getitem__", 'raise ValueError(f"bad sample {i}")', "for batch in run.train"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "loss",
            ["run.step(loss, batch)", 'model(batch[0], "too much")', "takes 2 positional arguments but 3"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dataset", "loader process", "loss"],
)
def test_a_launcher_shows_the_users_own_lines_of_one_worker(stage: Stage, word: str, shown: list[str]) -> None:  # noqa: F811
    done = stage.run("--plain", "-n", "2", stage.script(DATASET), word, OMP_NUM_THREADS="1")
    assert done.returncode == 1
    above, card = split_card(done.stderr)
    assert len(done.stderr.splitlines()) < 40, done.stderr
    assert OURS not in "\n".join(above), done.stderr
    assert "site-packages" not in "\n".join(above), done.stderr
    (told,) = [line for line in above if line.startswith("lockstep: the traceback of rank 1, without ")]
    assert told.endswith("frames of lockstep and torch, which rank1.log has:")
    trace = above[above.index(told) + 1 :]
    assert all(line.startswith("[rank 1] ") for line in trace)
    for words in shown:
        assert sum(words in line for line in trace) == 1, done.stderr
    assert f"{stage.logs / 'rank1.log'}\n|        with the whole traceback\n" in card
    assert OURS in (stage.logs / "rank1.log").read_text()
    if "Traceback (most recent call last):" in (rank0 := (stage.logs / "rank0.log").read_text()):
        assert OURS in rank0
        assert [line for line in above if line.startswith("[rank 0]") and "PeerLostError: " in line], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_without_a_launcher_of_ours(stage: Stage, torchrun: bool) -> None:  # noqa: F811
    def run(**env: str) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if torchrun else []
        done = subprocess.run(
            [sys.executable, *launcher, stage.script(DATASET)],
            cwd=stage.folder,
            env=outer_env(OMP_NUM_THREADS="1", **env),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        mine = [line.removeprefix("[rank0]: ") for line in lines if line.startswith("[rank0]: ")]
        return "\n".join(mine)

    short = run()
    assert short.count('raise ValueError(f"bad sample {i}")') == 1
    assert short.count("for batch in run.train") == 1
    assert "frames of lockstep and torch left out; LOCKSTEP_TRACEBACK=full shows all)" in short.splitlines()[-1]
    assert OURS not in short
    if torchrun:
        assert OURS in run(LOCKSTEP_TRACEBACK="full")


def test_all_of_it_where_that_is_wanted(stage: Stage) -> None:  # noqa: F811
    """And what the program prints or raises itself stays as it is: nothing is left out there."""
    program = "def f(): raise ValueError('mine')\nf()\n"
    done = stage.run("-n", "1", stage.script(program))
    above, _ = split_card(done.stderr)
    at = above.index("lockstep: the traceback of rank 0:")
    folder = stage.folder
    assert above[at + 1 :] == [
        "[rank 0] Traceback (most recent call last):",
        f'[rank 0]   File "{folder}/script.py", line 4, in <module>',
        "[rank 0]     f()",
        f'[rank 0]   File "{folder}/script.py", line 3, in f',
        "[rank 0]     def f(): raise ValueError('mine')",
        "[rank 0]              ^^^^^^^^^^^^^^^^^^^^^^^^",
        "[rank 0] ValueError: mine",
    ]
    full = stage.run("-n", "1", stage.script(program), LOCKSTEP_TRACEBACK="full")
    before = split_card(full.stderr)[0]
    assert "[rank 0] Traceback (most recent call last):" in before[: before.index("lockstep: the traceback of rank 0:")]
    assert (stage.logs / "rank0.log").read_text().count("ValueError: mine") == 1


CHILD = "import lockstep\nwith lockstep.Run(progress=False): raise ValueError('of the child')\n"


@pytest.mark.slow
def test_a_process_that_a_worker_starts_prints_its_own_traceback(stage: Stage) -> None:  # noqa: F811
    """Its output may go anywhere, and the launcher knows nothing of it."""
    (stage.folder / "child.py").write_text(CHILD)
    script = stage.script(
        "env = {name: value for name, value in os.environ.items() if name not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')"
        " and not name.startswith('MASTER_')}\n"
        "done = subprocess.run([sys.executable, 'child.py'], env=env, capture_output=True, text=True)\n"
        "print(done.stderr)\n"
    )
    done = stage.run("-n", "1", script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "Traceback (most recent call last):" in done.stdout
    assert "raise ValueError('of the child')" in done.stdout


# ---- how a program ended -------------------------------------------------------------------------------------------

ENDS = {
    "syntax": ("def f(x:\n    return x\n", 1, ["what SyntaxError: '(' was never closed", "script.py:3", "def f(x:"]),
    "module": ("import no_such_module\n", 1, ["no module no_such_module", "script.py:3", "pip install"]),
    "name": (
        "from json import no_such_name\n",
        1,
        ["what ImportError: cannot import name 'no_such_name'", "script.py:3", "correct the line above"],
    ),
    "status": (
        "def stop(): sys.exit(3)\nprint('now', flush=True); stop()\n",
        3,
        ["the program called sys.exit(3); its last output: now", "script.py:3, in stop", "ended itself"],
    ),
    "message": (
        "sys.exit('no data; mount it')\n",
        1,
        ["the program called sys.exit with the message: no data; mount it script.py:3", "ended itself"],
    ),
    "raised": ("raise SystemExit(5)\n", 5, ["the program called sys.exit(5)", "script.py:3 raise SystemExit(5)"]),
    "at once": ("os._exit(4)\n", 4, ["exit status 4; it printed nothing", "not by sys.exit"]),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("how", [[], pytest.param(["--min", "1"], marks=pytest.mark.slow)], ids=["fixed", "elastic"])
def test_the_card_says_how_the_program_ended(stage: Stage, end: str, how: list[str]) -> None:  # noqa: F811
    program, status, words = ENDS[end]
    done = stage.run("--plain", "-n", "1", *how, stage.script(program))
    assert done.returncode == status, done.stderr
    _, card = split_card(done.stderr)
    text = " ".join(" ".join(line.lstrip("| ") for line in card.splitlines()).split())
    for word in words:
        assert word in text, card
    assert "sampler" not in card
    assert ("with the whole traceback" in card) == (end in ("syntax", "module", "name"))


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)", "raise SystemExit", "pass"])
def test_a_program_that_just_ends_has_no_card(stage: Stage, code: str) -> None:  # noqa: F811
    done = stage.run("-n", "1", stage.script(f"{code}\n"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(stage.logs.glob("failure*"))


def test_a_script_without_a_suffix_and_beside_other_modules(stage: Stage) -> None:  # noqa: F811
    """As `python` runs it: what is beside the script is found, also where the working folder is another."""
    folder = stage.folder / "sub"
    folder.mkdir()
    (folder / "neighbour.py").write_text("value = 7\n")
    (folder / "train").write_text("import neighbour\nprint(__name__, neighbour.value)\n")
    done = stage.run("-n", "1", str(Path("sub") / "train"))
    assert done.stdout == "[rank 0] __main__ 7\n", done.stderr
