"""A worker that ends with status 0 in the middle of training: by os._exit or sys.exit, in the loss, in the loop, in a
callback. It is lost like any other; and a program that ends on all workers at once has ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.launcher.exit_policy import EARLY, Action, Decision, Exit, LaunchState, decide, exit_status, first_failure
from test_launch import Stage, split_card, stage  # noqa: F401
from test_recovery import Play, Show, perform

PROGRAM = """
import os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
import lockstep
from lockstep import faults
from runs import adamw, classify, data

# "how place worker step": worker 1 ends by `how` at `place` of step 3
plan = [line.split() for line in os.environ.get("EXITS", "").split(",") if line]


class Enough(Exception):
    pass


def leave(how):
    sys.stdout.flush()
    if how == "os._exit":
        os._exit(0)
    if how == "sys.exit":
        sys.exit(0)
    raise Enough


def at(place, number):
    for how, where, worker, step in plan:
        me = faults.context.get("worker", f"h0.{{run.world.rank}}")
        if where == place and int(step) == number and worker in ("all", "ever", me.partition(".")[2]):
            once = Path(f"{{how}} {{where}} {{step}} {{me}}")
            if worker == "ever" and run.world.rank != 0:
                continue
            if worker in ("all", "ever") or not once.exists():
                once.touch()
                if worker == "all" and os.environ.get("SLOW") and run.world.rank == 0:
                    time.sleep(float(os.environ["SLOW"]))
                leave(how)


def loss(model, batch):
    at("loss", here)
    return classify(model, batch)


def wait(run):
    end_s = time.monotonic() + 30
    size = int(os.environ.get("WHOLE", "1"))
    while run.world.size < size and not run._session.calls.wants_to_move and time.monotonic() < end_s:
        time.sleep(0.005)


def train():
    global run, here
    with lockstep.Run(os.environ.get("KEPT"), seed=7, progress=False, check_every=1, device="cpu") as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
        optimizer = adamw(model.parameters())
        optimizer.register_step_post_hook(lambda *_: at("callback", here))
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=8, epochs=5), optimizer):
            here = batch.number
            at("loop", here)
            wait(run)
            run.step(loss, batch)
        at("behind", 15)
        print("digest", run.digest(), flush=True)
    at("after", 15)


try:
    train()
except Enough:
    print("caught", flush=True)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    show = perform(tmp_path_factory.mktemp("alone") / "run", Play(workers=0, program=PROGRAM))
    assert show.status == 0, show.text
    return show.digests[0]


def play(folder: Path, *exits: str, workers: int = 3, backend: str = "shm", **env: str) -> Show:
    env = {"EXITS": ",".join(exits), **env}
    return perform(folder / "run", Play(workers=workers, backend=backend, program=PROGRAM, env=env))


EXITS = {"os._exit loss": (1, 2), "sys.exit loop": (2, 5), "os._exit callback": (0, 8)}
MORE_EXITS = EXITS | {"sys.exit loss": (3, 10), "caught loop": (4, 12)}


@pytest.mark.parametrize(
    ("exits", "backend"),
    [
        (EXITS, "shm"),
        pytest.param(MORE_EXITS, "shm", marks=pytest.mark.slow),
        pytest.param(MORE_EXITS, "gloo", marks=pytest.mark.slow),
    ],
    ids=["shm", "more, shm", "more, gloo"],
)
def test_it_is_replaced_and_nothing_is_lost(
    tmp_path: Path, exits: dict[str, tuple[int, int]], backend: str, undisturbed: str
) -> None:
    show = play(tmp_path, *(f"{how} {worker} {step}" for how, (worker, step) in exits.items()), backend=backend)
    assert show.status == 0, show.text
    assert show.lost == {f"h0.{n}": 0 for n in range(len(exits))}, show.text
    for how, (worker, step) in exits.items():
        where = "" if "os._exit" in how else rf" \(step {step}\)\n"  # where it was it has not said
        assert re.search(rf"worker {worker} \(pid \d+\) was lost: {EARLY}{where}", show.err), show.text
    assert show.digests == [undisturbed] * 3, show.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sys.exit", pytest.param("caught", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("place", "slow"), [("loop", "1.5"), pytest.param("loss", "", marks=pytest.mark.slow)])
def test_a_program_that_ends_on_all_workers_has_ended(tmp_path: Path, how: str, place: str, slow: str) -> None:
    show = play(tmp_path, f"{how} {place} all 4", SLOW=slow, workers=2)
    assert show.status == 0, show.text
    assert "lost" not in show.err
    assert show.lost == {}
    assert len(show.events("started")) == 2


@pytest.mark.slow
def test_what_comes_behind_the_run_is_the_programs_own(tmp_path: Path, undisturbed: str) -> None:
    show = play(tmp_path, "os._exit after all 15", workers=2)
    assert show.status == 0, show.text
    assert show.digests == [undisturbed] * 2
    assert show.lost == {}


@pytest.mark.slow
def test_one_that_always_does_it_is_given_up_and_named(tmp_path: Path) -> None:
    show = play(tmp_path, "os._exit loss ever 3")
    assert show.status == 1, show.text
    assert f"was lost: {EARLY}" in show.err
    assert "giving up: 2 workers failed with the same error" in show.err
    _, card = split_card(show.err)
    assert card.startswith("worker "), card
    assert "it ended with status 0 in the middle of training" in card
    assert "To end the training, `break`" in card


FIXED = {
    "os._exit loss 1 3": (EARLY, "rank 1 failed"),
    "sys.exit loop 1 3": ("the program called sys.exit(0) in the middle of its Run", "rank 1 failed"),
    "os._exit callback 0 3": (EARLY, "rank 0 failed"),
    "caught loop 1 3": (EARLY, "rank 1 failed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("exits", FIXED)
def test_in_a_fixed_world_it_is_named_and_not_its_peers(stage: Stage, exits: str, backend: str) -> None:  # noqa: F811
    script = stage.script(PROGRAM.format(tests=str(Path(__file__).parent)))
    done = stage.run("-n", "2", script, EXITS=exits, LOCKSTEP_BACKEND=backend)
    what, title = FIXED[exits]
    assert done.returncode == 1, done.stderr
    above, card = split_card(done.stderr)
    assert card.startswith(title), done.stderr
    assert " ".join(what.split()[:8]) in " ".join(card.replace("|", " ").split()), card
    assert any(f"{title[:6]} of 2 failed first: {EARLY}" in line for line in above), above
    assert list(stage.logs.glob("in-run-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_rank_0_that_leaves_alone_has_not_ended_the_training(
    stage: Stage,  # noqa: F811
    backend: str,
    undisturbed: str,
) -> None:
    script = stage.script(PROGRAM.format(tests=str(Path(__file__).parent)))
    done = stage.run("-n", "2", script, EXITS="sys.exit loop 0 3", KEPT="kept", LOCKSTEP_BACKEND=backend)
    assert done.returncode == 1, done.stderr
    assert split_card(done.stderr)[1].startswith("rank 0 failed"), done.stderr
    assert not (stage.folder / "kept" / "stopped.json").exists()
    again = stage.run("-n", "2", script, KEPT="kept", LOCKSTEP_BACKEND=backend)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(f"digest {undisturbed}") == 2, again.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "exits",
    [
        "sys.exit loop all 3",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("caught loop all 3", "os._exit after all 15")),
    ],
)
def test_in_a_fixed_world_all_may_end(stage: Stage, exits: str) -> None:  # noqa: F811
    script = stage.script(PROGRAM.format(tests=str(Path(__file__).parent)))
    done = stage.run("-n", "2", script, EXITS=exits, KEPT="kept", SLOW="1.5")
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert (stage.folder / "kept" / "stopped.json").exists() is ("all 3" in exits)


def test_who_is_to_blame() -> None:
    early, peer = Exit(1, 0, 5.0, early=True), Exit(0, 1, 4.99, lost_peer=True)
    assert decide(LaunchState(now_s=5.0, alive=1, grace_s=10.0, exits=[early])) == Decision(Action.STOP)
    assert first_failure([peer, early]) == early
    assert exit_status([peer, early], None) == 1
    quit_, own = Exit(1, 0, 5.0, quit=True), Exit(0, 3, 5.1)
    assert decide(LaunchState(now_s=5.0, alive=1, grace_s=10.0, exits=[quit_])) == Decision(Action.WAIT)
    assert first_failure([quit_]) is None
    assert first_failure([quit_, peer]) == Exit(1, 0, 5.0, quit=True, early=True)
    assert exit_status([quit_, peer], None) == 1
    assert first_failure([quit_, own]) == own
