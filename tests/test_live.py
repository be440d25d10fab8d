"""The view of a run: what is read, what is said of it, and the picture in a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.report import live_view
from lockstep.report.live_status import read_status
from lockstep.report.run_folder import find_run
from lockstep.step.step_types import Result
from lockstep.train import progress

PROGRAM = """
import time, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def loss(model, part):
    time.sleep(0.004)
    return model(part[0]).square().sum(), len(part[0])

with lockstep.Run("run", seed=1, device="cpu") as run:
    model = run.replicate(nn.Linear(4, 1))
    data = TensorDataset(torch.ones(640, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for part in run.train(run.batches(data, global_batch_size=16, shards=4, epochs=6), optimizer):
        run.step(loss, part)
    run.log(accuracy=0.75)
    run.on_main(lambda: print("the program itself speaks"))
"""


def said(rank: int, **more: Any) -> dict[str, Any]:
    who = {"worker": f"h0.{rank}", "pid": 7, "host": "here", "rank": rank, "size": 2, "generation": 1}
    where = {"unix_s": 100.0, "state": "training", "steps": 100, "step": 40, "epoch": 2, "global_batch_size": 32}
    figures = {"loss": 0.5, "lr": 0.1, "samples_per_s": 64.0, "metrics": {}, "rss": 2**28, "peak": None}
    work = {"forward": 0.3, "backward": 0.3, "update": 0.1}
    phases = work | {"data": 0.1, "exposed": 0.1, "waiting": 0.1, "between": 0.0}
    return who | where | figures | {"phases": phases, "waited_for": {"1": 0.1}} | more


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "trace").mkdir()
    return tmp_path


def write(run: Path, *told: dict[str, Any]) -> None:
    for one in told:
        (run / "trace" / f"{one['worker']}.now").write_text(json.dumps(one))


def test_what_is_left_and_how_much_of_it_is_work(run: Path) -> None:
    write(run, said(0), said(1))
    now = read_status(find_run(run), now_s=101.0)
    assert now is not None
    assert (now.left_s, now.efficiency, len(now.workers)) == (60 * 32 / 64, pytest.approx(0.7), 2)
    assert live_view.describe(now) == (
        "step 40/100  epoch 2  loss 0.5  64 samples/s  0:30 left  70% computing  2 workers  training"
    )


def test_only_those_count_who_are_there(run: Path) -> None:
    gone, other = said(2, unix_s=10.0), said(3, generation=0)
    write(run, said(0, metrics={"accuracy": 0.9}), gone, other)
    (run / "trace" / "h0.9.now").write_text('{"unix_s": ')  # being written
    now = read_status(find_run(run), now_s=101.0)
    assert now is not None
    assert [worker.name for worker in now.workers] == ["worker 0"]
    assert "accuracy 0.9" in live_view.describe(now)
    silent = read_status(find_run(run), now_s=1000.0)
    assert silent is not None
    assert silent.state == "silent"


@pytest.mark.parametrize(
    "damage",
    [
        *({name: wrong} for name in said(0) for wrong in ("?", None, [], {"?": "?"}, -1e300)),
        {"unix_s": 1e400, "pid": 0, "phases": {"data": "?"}, "waited_for": {"?": 1.0}, "metrics": {"loss": [1]}},
    ],
    ids=str,
)
def test_a_damaged_status_file_is_no_error(run: Path, damage: dict[str, Any]) -> None:
    write(run, said(0))
    (run / "trace" / "h0.1.now").write_text(json.dumps(said(1) | damage))
    (run / "trace" / "h0.2.now").write_bytes(b"[" * 100_000)
    (run / "trace" / "1-h0.0-7.jsonl").write_text('[1]\n{"kind": "event"}\n{"kind": "event", "what": [], "t": "?"}\n')
    (run / "launch.json").write_text('{"logs": 1}')
    now = read_status(find_run(run), now_s=101.0)
    assert now is not None
    assert "worker 0" in [worker.name for worker in now.workers] or "generation" in damage
    assert live_view.describe(now)
    if pytest.importorskip("rich"):
        live_view.draw(now)


def test_a_relative_pointer_is_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, logs = tmp_path / "moved" / "run", tmp_path / "moved" / "logs"
    for folder in (run / "trace", logs):
        folder.mkdir(parents=True)
    (run / "launch.json").write_text('{"logs": "../logs"}')
    (logs / "run.json").write_text('{"directory": "../run"}')
    monkeypatch.chdir(tmp_path)
    assert find_run(run).trace == run / "trace"
    assert find_run(run).logs == run / "../logs"
    assert find_run(logs).trace == logs / "../run" / "trace"
    (logs / "run.json").write_text(json.dumps({"directory": str(run)}))
    assert find_run(logs).trace == run / "trace"


def test_no_worker_has_written_a_status(run: Path) -> None:
    assert read_status(find_run(run)) is None
    pytest.importorskip("rich")
    live_view.draw(None)


def test_the_picture_has_all_of_it(run: Path) -> None:
    console = pytest.importorskip("rich.console").Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    events = [
        *({"time": 98.0, "event": "started", "worker": worker, "slot": 0} for worker in ("h0.5", "h0.0")),
        {"time": 99.0, "event": "lost", "worker": "h0.1", "code": -9},
        {"time": 99.1, "event": "recovered", "worker": "h0.0", "took_s": 0.123},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"cut o')
    write(run, said(0), said(1, loss=float("nan"), worker="[bold]h1.1"))
    console.print(live_view.draw(read_status(find_run(run), now_s=101.0)))
    text = console.export_text()
    assert re.search(r"256 MiB +1 +7 ", text), text  # worker 0 came in the place of worker 5
    for part in ("step 40 of 100", "0:30 left", "70%", "worker 0", "[bold]h1.1", "256 MiB", "lost workers 1"):
        assert part in text, text
    assert "rank" not in text
    assert re.search(r"10% +\[bold\]h1.1 +256", text), text  # whom worker 0 waits for
    assert "worker 1 was killed by SIGKILL" in text
    assert "worker 0 continues after 123 ms" in text


def test_events_of_a_trace_have_the_time_at_which_they_happened_and_are_told_once(run: Path) -> None:
    write(run, said(0), said(1))
    (run / "events.jsonl").write_text(json.dumps({"time": 97.5, "event": "lost", "worker": "h0.2"}) + "\n")
    for rank, clock_s in ((0, 0.0), (1, 40.0)):  # a monotonic clock begins anywhere
        lines: list[dict[str, Any]] = [{"kind": "head", "unix_s": 90.0, "t": clock_s}]
        lines += [{"kind": "event", "what": "checkpoint", "step": 5, "t": clock_s + 7}] if rank == 0 else []
        lines += [{"kind": "event", "what": "evaluate", "step": 9, "t": clock_s + 8}]
        (run / "trace" / f"1-h0.{rank}-7.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = read_status(find_run(run), now_s=101.0)
    assert now is not None
    told = [(event.unix_s, event.text) for event in now.events]
    assert told == [(97.0, "checkpoint saved at step 5"), (97.5, "worker 2 was lost"), (98.0, "evaluation at step 9")]


@pytest.mark.parametrize("width", [60, 84, 100])
def test_a_figure_stays_beside_its_name(run: Path, width: int) -> None:
    console = pytest.importorskip("rich.console").Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    (run / "events.jsonl").write_text(json.dumps({"time": 99.0, "event": "lost", "worker": "h0.1"}) + "\n")
    write(run, said(0, metrics={"accuracy": 0.9944, "perplexity": 12.34}), said(1))
    console.print(live_view.draw(read_status(find_run(run), now_s=101.0)))
    text = console.export_text()
    for part in ("epoch 2", "accuracy 0.9944", "perplexity 12.34", "samples/s 64", "computing 70%", "lost workers 1"):
        assert part in text, text


def test_the_line_of_a_run_without_a_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the last metrics, and comes from the worker that is rank 0 now."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    leads, lines = [True], []
    line = progress.Progress(steps=3, is_printing=lambda: leads[0])
    for number in range(3):
        leads[0] = number != 1
        result = Result(number, 0.5, 1.0, None, skipped=False, stop_asked_by=(), waited_s=0.0)
        line.step(result, epoch=0, samples=8, waited_for_data_s=0.0)
        line.log(number + 1, {"accuracy": 0.25 * number})
        lines.append(re.sub(r"[\d,]+ samples/s", "8 samples/s", capsys.readouterr().err))
    assert lines == [
        "lockstep: step 1/3  epoch 0  loss 0.5  8 samples/s  waiting for data 0%\n",
        "",
        "lockstep: step 3/3  epoch 0  loss 0.5  accuracy 0.25  8 samples/s  waiting for data 0%\n",
    ]
    line.end(3)
    capsys.readouterr()
    line.log(3, {"accuracy": 0.75})
    assert capsys.readouterr().err == "lockstep: step 3  accuracy 0.75\n"
    (tmp_path / "trace").mkdir()
    for trace in (None, tmp_path / "trace", tmp_path / "none"):
        line.print_report_command(trace)
    assert capsys.readouterr().err == ""
    (tmp_path / "trace" / "1.jsonl").touch()
    line.print_report_command(tmp_path / "trace")
    leads[0] = False
    line.print_report_command(tmp_path / "trace")
    assert capsys.readouterr().err == f"lockstep: where the time went: lockstep report {tmp_path}\n"


def test_where_there_is_no_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "watch", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert f"there is no trace of a run in {tmp_path}: give the directory of a lockstep.Run" in done.stderr


# ---- a real terminal -------------------------------------------------------------------------------------------------


def in_terminal(command: list[str], folder: Path, *, kill_after: str = "") -> tuple[int, str]:
    """Exit status, and all that was written. `kill_after`: Ctrl-C once this was seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", "OMP_NUM_THREADS": "1"}
        os.execv(sys.executable, [sys.executable, "-m", "lockstep", *command])
    seen, end_s = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end_s:
            if select.select([terminal], [], [], 0.5)[0]:
                try:
                    seen += os.read(terminal, 1 << 16)
                except OSError:
                    break
            if kill_after and kill_after.encode() in seen:
                os.write(terminal, b"\x03")
                kill_after = ""
        else:
            pytest.fail(f"it does not end: {seen.decode(errors='replace')[-3000:]}")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode(errors="replace"))
    finally:
        os.close(terminal)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_shows_itself_below_what_its_workers_print(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    (tmp_path / "train.py").write_text(PROGRAM)
    status, seen = in_terminal(["run", "-n", "2", "--log-dir", "logs", "train.py"], tmp_path)
    assert status == 0, seen[-3000:]
    assert "[rank 0] the program itself speaks" in seen
    assert "╭─ lockstep" in seen
    last = seen[seen.rindex("╭─ lockstep") :]
    for part in ("240", "accuracy", "0.75", "rank 0", "rank 1", "ended"):
        assert part in last, last
    assert "samples/s  waiting for data" not in seen  # that line is for those who have no picture


@pytest.mark.slow
def test_plain_is_plain(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    status, seen = in_terminal(["run", "-n", "2", "--plain", "--log-dir", "logs", "train.py"], tmp_path)
    assert status == 0
    assert "╭" not in seen
    assert "[rank 0] the program itself speaks" in seen
    watched = subprocess.run(
        [sys.executable, "-m", "lockstep", "watch", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert watched.returncode == 0
    assert watched.stdout.startswith("step 240/240  epoch 5  loss ")
    assert "accuracy 0.75  2 workers  ended" in watched.stdout


@pytest.mark.slow
def test_who_fails_has_the_last_word(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    (tmp_path / "train.py").write_text(PROGRAM.replace("run.log(accuracy=0.75)", "raise KeyError('of the program')"))
    status, seen = in_terminal(["run", "-n", "2", "--log-dir", "logs", "train.py"], tmp_path)
    assert status == 1
    card = seen.rindex("| what   KeyError: 'of the program'")
    # The rest of the card follows, and perhaps a picture that was drawn after it, and erased at the end.
    assert all(line.strip()[0] in "|+╭│╰" for line in seen[card:].splitlines() if line.strip()), seen[-2000:]


@pytest.mark.slow
def test_the_death_of_the_picture_ends_nothing_but_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    logs = tmp_path / "logs"  # its command line has it, and that of no other run
    kill = f"subprocess.run(['pkill', '-9', '-f', 'lockstep.report.live_view {logs}$']); time.sleep(1)"
    (tmp_path / "train.py").write_text("import subprocess\n" + PROGRAM.replace("run.log(accuracy=0.75)", kill))
    status, seen = in_terminal(["run", "-n", "2", "--log-dir", str(logs), "train.py"], tmp_path)
    assert status == 0, seen[-3000:]
    assert "[rank 0] the program itself speaks" in seen


@pytest.mark.slow
def test_ctrl_c_reaches_the_workers_and_ends_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    (tmp_path / "train.py").write_text(PROGRAM.replace("epochs=6", "epochs=6000"))
    status, seen = in_terminal(["run", "-n", "2", "--log-dir", "logs", "train.py"], tmp_path, kill_after="computing")
    assert status in (130, 1, -2), seen[-2000:]
