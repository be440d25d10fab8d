"""The launcher, with real processes. Workers that do not need torch do not import it: that costs seconds each."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.demo.show import Speed, Turn, compare_speeds
from lockstep.launcher.exit_policy import (
    SETTLE_S,
    Action,
    Decision,
    Exit,
    LaunchState,
    count_workers,
    decide,
    describe,
    exit_status,
    first_failure,
    is_lost_peer,
    last_output,
)
from lockstep.launcher.job import ElasticOptions, Job, reserve_port, worker_env

# These do not say how fast the launcher is: on a machine that has much else to do, Python alone takes seconds to start.
DEADLINE_S = 300.0
SOON_S = 30.0  # less than what the workers would sleep
LAUNCHER = (sys.executable, "-m", "lockstep")


def outer_env(**more: str) -> dict[str, str]:
    """Ours, without what says who we are or how many threads to use."""
    told = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
    # Not `items()`: pytest removes a variable of its own meanwhile, in another thread.
    found = {name: os.environ.get(name) for name in os.environ if name not in told}
    return {name: value for name, value in found.items() if value is not None} | more


def processes_of(folder: Path) -> list[int]:
    """Processes with the folder on the command line or in the environment: launcher, workers and their children."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in text:
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], what: str, *, within_s: float = SOON_S) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {within_s} s for {what}"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    try:
        wait_for(lambda: not processes_of(tmp_path), "all processes of the test to be gone")
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


class Stage:
    """A folder with a script in it, and ways to launch it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"

    def script(self, text: str, name: str = "script.py") -> str:
        head = "import json, os, signal, subprocess, sys, time\nrank = int(os.environ.get('RANK', 0))\n"
        (self.folder / name).write_text(head + text)
        return name

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*LAUNCHER, "run", "--log-dir", str(self.logs), *arguments],
            cwd=self.folder,
            env=outer_env(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Where the tests run in the background SIGINT may be ignored, and child processes inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        launcher = self.start(*arguments, **env)
        return self.end(launcher)

    def end(self, launcher: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        try:
            out, err = launcher.communicate("typed\n", timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            raise
        return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, err)

    def wait_for_files(self, *names: str) -> None:
        # A busy machine has taken 34 s to start workers that take 6.
        wait_for(lambda: all((self.folder / name).exists() for name in names), f"files {names}", within_s=DEADLINE_S)


def split_card(said: str) -> tuple[list[str], str]:
    """What was said before the card, and the card: the very last thing."""
    above, found, card = said.partition("\n+-- lockstep: ")
    assert found, said
    assert said.endswith("-" * 20 + "\n")
    assert "\n+-- lockstep: " not in card
    return above.splitlines(), card


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


# ---- a run that goes well ------------------------------------------------------------------------------------------


def test_each_worker_knows_who_it_is(stage: Stage) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS PYTHONUNBUFFERED"
    script = stage.script(
        f"print(json.dumps([os.environ[name] for name in '{names}'.split()]))\n"
        "print('port', os.environ['MASTER_PORT'], 'dir', os.environ['LOCKSTEP_RUN_DIR'])\n"
        "print('stdin', repr(sys.stdin.read()))\n"
        "print('elastic', [name for name in os.environ if name.startswith('TORCHELASTIC_')])\n"
    )
    done = stage.run("-n", "2", script, TORCHELASTIC_USE_AGENT_STORE="True", RANK="7")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in ("0", "1"):
        lines = (stage.logs / f"rank{rank}.log").read_text().splitlines()
        assert json.loads(lines[0]) == [rank, "2", rank, "2", "0", "127.0.0.1", threads, "1"]
        assert re.fullmatch(rf"port [1-9]\d+ dir {stage.logs}", lines[1])
        assert lines[2:] == ["stdin ''", "elastic []"]
        assert [f"[rank {rank}] {line}" for line in lines] == [
            line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}]")
        ]
    assert len(done.stdout.splitlines()) == 8


def test_output_is_prefixed_line_by_line_and_logged_as_it_is(stage: Stage) -> None:
    script = stage.script(
        "out = sys.stdout.buffer\n"
        "out.write(b'one\\ntwo'); out.flush(); time.sleep(0.1); out.write(b' and a half\\n')\n"
        "out.write(b'10%\\r20%\\rdone\\r\\n'); out.write(b'caf\\xe9 \\x0c same line\\n')\n"
        "out.write(b'no newline at the end')\n"
        "out.flush(); sys.stderr.write('to stderr\\n')\n"
    )
    launcher = subprocess.run(
        [*LAUNCHER, "run", "--log-dir", stage.logs, "-n", "1", script],
        cwd=stage.folder,
        env=outer_env(),
        capture_output=True,
        timeout=DEADLINE_S,
    )
    lines = [b"one\n", b"two and a half\n", b"10%\r", b"20%\r", b"done\r\n", b"caf\xe9 \x0c same line\n"]
    assert launcher.stdout == b"".join(b"[rank 0] " + line for line in lines) + b"[rank 0] no newline at the end\n"
    assert launcher.stderr == b"[rank 0] to stderr\n"
    log = (stage.logs / "rank0.log").read_bytes()
    assert log.replace(b"to stderr\n", b"") == b"".join(lines) + b"no newline at the end"


SELF_PORTRAIT = "print(json.dumps([sys.argv, __name__, __file__, sys.path[0], bool(__spec__), __package__]))\n"


@pytest.mark.parametrize("how", [["sub/portrait.py"], ["-m", "sub.portrait"]], ids=["script", "module"])
def test_a_program_runs_as_python_would_run_it(stage: Stage, how: list[str]) -> None:
    (stage.folder / "sub").mkdir()
    stage.script(SELF_PORTRAIT, "sub/portrait.py")
    command = [*how, "--lr", "0.1", "-n", "3", "--", "-m", "x y"]
    plain = subprocess.run(
        [sys.executable, *command], cwd=stage.folder, capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    done = stage.run("-n", "1", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[rank 0] {plain.stdout}"
    assert "x y" in plain.stdout


def test_a_leading_double_dash_ends_our_options(stage: Stage) -> None:
    done = stage.run("-n", "1", "--", stage.script("print(sys.argv[1:])\n"), "--", "a")
    assert done.stdout == "[rank 0] ['--', 'a']\n"


def test_the_default_folder_for_logs(stage: Stage) -> None:
    script = stage.script("print('kept')\n")
    subprocess.run([*LAUNCHER, "run", "-n", "1", script], cwd=stage.folder, check=True, timeout=DEADLINE_S)
    (folder,) = (stage.folder / "lockstep-logs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-\d+", folder.name)
    assert (folder / "rank0.log").read_text() == "kept\n"


def test_the_launcher_does_not_load_torch(stage: Stage) -> None:
    script = stage.script("print('torch' in open(f'/proc/{os.getppid()}/maps').read())\n")
    assert stage.run("-n", "1", script).stdout == "[rank 0] False\n"
    imports = "import sys, lockstep.cli.main, lockstep.cli.run, lockstep.launcher.worker_main"
    code = f"{imports}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "False False\n", done.stderr


def test_torch_is_imported_without_garbage_collection(stage: Stage) -> None:
    (stage.folder / "torch").mkdir()
    (stage.folder / "torch" / "__init__.py").write_text("import gc\nduring = gc.isenabled()\n")
    script = stage.script(
        "import gc, importlib.util\nimportlib.util.find_spec('torch')\nimport torch\n"
        "print(torch.during, gc.isenabled(), gc.get_freeze_count() > 0, type(torch.__spec__.loader).__name__)\n"
        "print(importlib.reload(torch).during)\n"
    )
    assert stage.run("-n", "1", script).stdout == "[rank 0] False True True SourceFileLoader\n[rank 0] True\n"


def test_drop_in_puts_our_class_in_torchs_place(stage: Stage) -> None:
    (stage.folder / "sub").mkdir()
    script = stage.script(
        SELF_PORTRAIT + "import pickle, lockstep, torch\n"
        "class Local: pass\n"
        "print(torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel)\n"
        "print(type(pickle.loads(pickle.dumps(Local()))) is Local)\n",
        "sub/portrait.py",
    )
    done = stage.run("-n", "1", "--drop-in", f"sub/{Path(script).name}", "--x", OMP_NUM_THREADS="1")
    folder = stage.folder / "sub"
    portrait = [["sub/portrait.py", "--x"], "__main__", str(folder / "portrait.py"), str(folder), False, None]
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    assert json.loads(lines[0]) == portrait
    assert lines[1:] == ["True", "True"]


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_the_demo(tmp_path: Path, quick: bool) -> None:
    command = [*LAUNCHER, "demo", "--directory", str(tmp_path / "demo"), *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=outer_env(), capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"weights +(\w+)…|(\w+)… on one", done.stdout))) == 2
    assert "… on one: the same bits" in done.stdout
    assert quick or re.search(r"speed +[\d,]+ samples/s: x\d.\d\d of 2, efficiency \d+%", done.stdout)
    assert "was lost: killed by SIGKILL" in done.stderr
    assert re.search(r"killed +and the others continued after \d+ ms", done.stdout)
    page = (tmp_path / "demo" / "digits" / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    shown = [row["worker"] for row in data["scenes"][data["best"]]["rows"]]
    assert len(shown) >= 2
    assert "worker 0" in shown
    assert "worker lost" in [one["what"] for one in data["story"]["happenings"]]
    assert done.stderr.count("where the time went: lockstep report ") == (2 if quick else 4)
    assert float(re.findall(r"accuracy +([\d.]+)%", done.stdout)[-1]) > 95
    again = subprocess.run(command, env=outer_env(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert again.returncode == 2
    assert "is not empty; give another --directory" in again.stderr


def test_the_speed_of_the_demo_compares_neighbouring_turns() -> None:
    """Without the steps that lie in two of them. Here the machine becomes slower and slower."""
    together: list[tuple[float, int]] = [(0.0, 0), (1.0, 190), (2.0, 190), (3.5, 7), (4.0, 3), (5.0, 76), (6.0, 5)]
    one, other = [(1.5, 3), (3.0, 150), (4.0, 100), (6.5, 20), (7.5, 20)], [(2.0, 0), (4.0, 200), (6.0, 9), (8.0, 40)]
    turns = [Turn(0, 2, False), Turn(2, 4, True), Turn(4, 6, False), Turn(6, 8, True, stolen=0.5)]
    # Pairs: 190 to 200 samples/s, 40.5 to 200; not 40.5 to 40, when time was stolen
    found = compare_speeds(together, [one, other], turns)
    assert found == Speed(together=115.25, separate=100.0, ratio=1.1525, stolen=0.0)
    assert compare_speeds(together, [one, other], turns[:1]) is None
    assert compare_speeds(together, [one, []], turns) is None


# ---- a command line that makes no sense ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n", "2", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["-n", "2", "-m", "nowhere.at.all"], "there is no module 'nowhere.at.all'"),
        (["-n", "2"], "what shall the workers run"),
        (["-n", "0", "script.py"], "'0' is not a number of workers"),
        (["-n", "-1", "script.py"], "-n"),
        (["-n", "two", "script.py"], "'two' is not a number of workers"),
        (["-n", "2", "--grace-s", "x", "script.py"], "'x' is not a number of seconds"),
        (["-n", "2", "--nonsense", "script.py"], "--nonsense"),
        (["--log-dir", "script.py/logs", "script.py"], "cannot write logs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused_and_nothing_started(stage: Stage, arguments: list[str], named: str) -> None:
    stage.script("open('started', 'w')\n")
    done = stage.run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (stage.folder / "started").exists()
    assert not stage.logs.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, "lockstep 0."),
        (["--help"], 0, "lockstep run -n 4 train.py"),
        (["run", "--help"], 0, "128 + the signal"),
        ([], 2, "commands:"),
        (["frobnicate"], 2, "invalid choice: 'frobnicate'"),
    ],
)
def test_the_command_line_explains_itself(arguments: list[str], status: int, said: str) -> None:
    done = subprocess.run([*LAUNCHER, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == status
    assert said in done.stdout + done.stderr


# ---- a worker that fails -------------------------------------------------------------------------------------------


def test_the_first_to_fail_is_blamed_though_its_peer_was_seen_to_end_first(stage: Stage) -> None:
    script = stage.script(
        "if rank == 1:\n"
        "    try:\n"
        "        {}['missing']\n"
        "    except KeyError as error:\n"
        "        import traceback; cause = ValueError('the real one'); cause.__cause__ = error\n"
        "        traceback.print_exception(cause)\n"
        "    open('raised', 'w').close(); time.sleep(0.4); os._exit(7)\n"
        "while not os.path.exists('raised'): time.sleep(0.005)\n"
        "raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')\n"
    )
    done = stage.run("-n", "2", script)
    assert done.returncode == 7
    lines, card = split_card(done.stderr)
    report = lines.index("lockstep: rank 1 of 2 failed first: exit status 7")
    assert f"logs of all workers are in {stage.logs}" in lines[report + 1]
    assert lines[report + 3] == "[rank 1] Traceback (most recent call last):"
    assert "KeyError: 'missing'" in "\n".join(lines[report:])
    assert lines[-1] == "[rank 1] ValueError: the real one"
    assert any("Connection closed by peer" in line for line in lines[:report])
    assert "| what   ValueError: the real one\n" in card
    assert "script.py:5\n" in card, "the cause is in the user's own code"
    assert "Connection closed" not in card


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_of_a_signal(stage: Stage, sign: signal.Signals) -> None:
    script = stage.script(f"if rank == 1: print('last line'); os.kill(os.getpid(), {int(sign)})\ntime.sleep(60)\n")
    begin_s = time.monotonic()
    done = stage.run("-n", "2", script)
    assert done.returncode == 128 + sign
    assert f"rank 1 of 2 failed first: killed by {sign.name}" in done.stderr
    lines, card = split_card(done.stderr)
    assert lines[-1] == "[rank 1] last line"
    assert f"| what   killed by {sign.name}; its last output: last line" in card
    assert time.monotonic() - begin_s < SOON_S


def test_peers_that_do_not_obey_are_killed_after_the_grace(stage: Stage) -> None:
    script = stage.script(
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('no'))\n"
        "    open('deaf', 'w').close()\n"
        "    while True: time.sleep(1)\n"
        "while not os.path.exists('deaf'): time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    done = stage.run("-n", "2", "--grace-s", "2", script)
    assert done.returncode == 3
    assert "[rank 0] no\n" in done.stdout
    lines, card = split_card(done.stderr)
    assert lines[-1] == "lockstep: rank 1 printed nothing"
    assert "| what   the program called sys.exit(3)\n" in card


def test_what_a_worker_started_ends_with_the_run(stage: Stage) -> None:
    """The child ignores SIGTERM and holds the worker's output open; neither keeps the launcher waiting."""
    script = stage.script(
        "child = \"import signal, time; signal.signal(15, signal.SIG_IGN); open('deaf', 'w'); time.sleep(100)\"\n"
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "while not os.path.exists('deaf'): time.sleep(0.01)\n"
    )
    begin_s = time.monotonic()
    done = stage.run("-n", "1", "--grace-s", "0.5", script)
    assert done.returncode == 0
    assert time.monotonic() - begin_s < SOON_S
    assert not processes_of(stage.folder)


def test_a_child_that_never_stops_writing_does_not_keep_the_launcher(stage: Stage) -> None:
    """It leaves the worker's process group, so that it is not ours to end; but the run must be over."""
    script = stage.script(
        "subprocess.Popen(['timeout', '60', 'yes', 'still here'], start_new_session=True)\ntime.sleep(0.2)\n"
    )
    begin_s = time.monotonic()
    launcher = subprocess.run(
        [*LAUNCHER, "run", "--log-dir", stage.logs, "-n", "1", script],
        cwd=stage.folder,
        env=outer_env(),
        stdout=subprocess.DEVNULL,
        timeout=DEADLINE_S,
    )
    assert launcher.returncode == 0
    assert time.monotonic() - begin_s < SOON_S


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_full_disk_ends_the_log_and_not_the_training(stage: Stage) -> None:
    stage.logs.mkdir()
    (stage.logs / "rank0.log").symlink_to("/dev/full")
    done = stage.run("-n", "1", stage.script("print('one'); time.sleep(0.2); print('two')\n"))
    assert (done.returncode, done.stdout) == (0, "[rank 0] one\n[rank 0] two\n")
    assert done.stderr.count("the log of rank 0 ends here") == 1


def test_what_a_worker_started_may_tidy_up_first(stage: Stage) -> None:
    child = (
        "import signal, sys, time\n"
        "def tidy(*_): time.sleep(0.1); open('tidy', 'w'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, tidy); open('up', 'w'); time.sleep(100)\n"
    )
    script = stage.script(
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\nwhile not os.path.exists('up'): time.sleep(0.01)\n"
    )
    assert stage.run("-n", "1", script).returncode == 0
    assert (stage.folder / "tidy").exists()


GLOO = """
import torch, torch.distributed as dist, lockstep
world = lockstep.init(device="cpu")
if world.rank == 1:
    raise ValueError("no such batch")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_worker_that_raises_among_real_peers(stage: Stage) -> None:
    done = stage.run("-n", "2", stage.script(GLOO))
    assert done.returncode == 1
    lines, card = split_card(done.stderr)
    assert lines[-1] == "[rank 1] ValueError: no such batch"
    assert "| what   ValueError: no such batch\n" in card
    assert "rank 1 of 2 failed first" in done.stderr
    assert "[rank1]:" not in done.stderr  # torch's own prefix, inside ours


PLAIN_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1); dist.all_reduce(value); print("sum", value.item())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_only_knows_torch_finds_the_port_free(stage: Stage) -> None:
    done = stage.run("-n", "2", stage.script(PLAIN_TORCH))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] sum 2.0", "[rank 1] sum 2.0"]


# ---- signals -------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_passed_on(stage: Stage) -> None:
    script = stage.script(
        "try:\n    open(f'up{rank}', 'w').close()\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted'); raise\n"
    )
    launcher = stage.start("-n", "2", script)
    stage.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGINT)
    done = stage.end(launcher)
    assert done.returncode == 130
    assert sorted(done.stdout.splitlines()) == ["[rank 0] interrupted", "[rank 1] interrupted"]
    assert "failed first" not in done.stderr


def test_a_second_ctrl_c_kills_at_once(stage: Stage) -> None:
    script = stage.script(
        "signal.signal(signal.SIGINT, lambda *_: open(f'heard{rank}', 'w').close())\n"
        "open(f'up{rank}', 'w').close()\n"
        "while True: time.sleep(1)\n"
    )
    launcher = stage.start("-n", "2", "--grace-s", "60", script)
    stage.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGINT)
    stage.wait_for_files("heard0", "heard1")
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert stage.end(launcher).returncode == 130


def test_sigterm_is_passed_on_to_workers_that_save_and_leave(stage: Stage) -> None:
    script = stage.script(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "def save(*_): time.sleep(0.2); print('saved with the child', child.poll()); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(f'up{rank}', 'w').close()\n"
        "time.sleep(60)\n"
    )
    launcher = stage.start("-n", "2", script)
    stage.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGTERM)
    done = stage.end(launcher)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] saved with the child None" for rank in range(2)]


def test_sigterm_to_workers_that_do_not_care(stage: Stage) -> None:
    script = stage.script(
        "if rank: signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'up{rank}', 'w').close()\ntime.sleep(60)\n"
    )
    launcher = stage.start("-n", "2", "--grace-s", "0.3", script)
    stage.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGTERM)
    assert stage.end(launcher).returncode == 143


def test_user_signals_are_passed_on_and_end_nothing(stage: Stage) -> None:
    script = stage.script(
        "signal.signal(signal.SIGUSR1, lambda *_: open(f'heard{rank}', 'w').close())\n"
        "open(f'up{rank}', 'w').close()\n"
        "while not os.path.exists('heard0'): time.sleep(0.01)\n"
        "print('went on')\n"
    )
    launcher = stage.start("-n", "1", script)
    stage.wait_for_files("up0")
    launcher.send_signal(signal.SIGUSR1)
    done = stage.end(launcher)
    assert (done.returncode, done.stdout) == (0, "[rank 0] went on\n")


def test_a_reader_that_goes_away_ends_the_run(stage: Stage) -> None:
    script = stage.script("while True: print('line'); time.sleep(0.01)\n")
    launcher = stage.start("-n", "2", script)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
    assert launcher.stderr is not None
    assert "Traceback" not in launcher.stderr.read()
    launcher.stderr.close()
    assert launcher.stdin is not None
    launcher.stdin.close()


FAMILY = (
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
    "print(os.getpid(), child.pid)\n"
    "open(f'new{rank}', 'w').write(f'{os.getpid()} {child.pid}')\n"
    "os.rename(f'new{rank}', f'up{rank}')\n"  # never seen half written
    "time.sleep(100)\n"
)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "with its process group"])
def test_no_worker_outlives_a_launcher_that_is_killed(stage: Stage, kill: Callable[[int, int], None]) -> None:
    launcher = stage.start("-n", "2", stage.script(FAMILY))
    stage.wait_for_files("up0", "up1")
    assert len(processes_of(stage.folder)) == 6  # launcher, watcher, two workers, two children
    kill(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=DEADLINE_S)
    wait_for(lambda: not processes_of(stage.folder), "workers and their children to be gone")


def test_workers_do_not_outlive_launcher_and_guardian(stage: Stage) -> None:
    """All processes called lockstep are killed. Children of workers may be left then, the workers may not."""
    launcher = stage.start("-n", "2", stage.script(FAMILY))
    stage.wait_for_files("up0", "up1")
    families = [tuple(map(int, (stage.folder / f"up{rank}").read_text().split())) for rank in range(2)]
    workers = {worker for worker, _ in families}
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (watcher,) = {int(pid) for pid in children} - workers
    os.kill(watcher, signal.SIGKILL)
    launcher.kill()
    launcher.wait(timeout=DEADLINE_S)
    wait_for(lambda: not workers & set(processes_of(stage.folder)), "workers to be gone")
    for _, child in families:
        os.kill(child, signal.SIGKILL)
    launcher.communicate(timeout=DEADLINE_S)


# ---- the pure parts ------------------------------------------------------------------------------------------------

NOW = 100.0


def scene(*exits: Exit, alive: int = 1, stop_sent_at_s: float | None = None, interrupts: int = 0) -> LaunchState:
    return LaunchState(
        now_s=NOW, alive=alive, grace_s=10, exits=exits, stop_sent_at_s=stop_sent_at_s, interrupts=interrupts
    )


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (scene(), Decision(Action.WAIT)),
        (scene(Exit(0, 0, NOW)), Decision(Action.WAIT)),
        (scene(alive=0), Decision(Action.DONE)),
        (scene(Exit(0, 1, NOW), alive=0), Decision(Action.DONE)),
        (scene(Exit(0, 1, NOW)), Decision(Action.STOP)),
        (scene(Exit(0, -9, NOW)), Decision(Action.STOP)),
        (scene(Exit(0, 1, NOW, lost_peer=True)), Decision(Action.WAIT, NOW + SETTLE_S)),
        (scene(Exit(0, 1, NOW - SETTLE_S, lost_peer=True)), Decision(Action.STOP)),
        (scene(Exit(0, 1, NOW, lost_peer=True), Exit(1, 1, NOW)), Decision(Action.STOP)),
        (scene(Exit(0, 1, NOW), stop_sent_at_s=NOW - 1), Decision(Action.WAIT, NOW + 9)),
        (scene(Exit(0, 1, NOW), stop_sent_at_s=NOW - 10), Decision(Action.KILL)),
        (scene(stop_sent_at_s=NOW, interrupts=1), Decision(Action.WAIT, NOW + 10)),
        (scene(stop_sent_at_s=NOW, interrupts=2), Decision(Action.KILL)),
    ],
)
def test_decide(seen: LaunchState, expected: Decision) -> None:
    assert decide(seen) == expected


def test_decide_kills_once() -> None:
    assert decide(LaunchState(now_s=NOW, alive=1, grace_s=0, stop_sent_at_s=0, interrupts=3, killed=True)) == Decision(
        Action.WAIT
    )


LOST = Exit(0, 1, NOW, lost_peer=True)
CAUSE = Exit(1, 3, NOW + 0.01)


@pytest.mark.parametrize(
    ("exits", "rank"),
    [
        ([], None),
        ([Exit(0, 0, NOW)], None),
        ([Exit(2, 0, NOW), CAUSE], 1),
        ([CAUSE, LOST], 1),
        ([LOST, CAUSE], 1),
        ([LOST, Exit(1, -9, NOW + 0.5)], 1),
        ([LOST, Exit(1, 3, NOW + SETTLE_S + 0.1)], 0),
        ([LOST, Exit(1, -15, NOW + 0.5, stop_sent=True)], 0),
        ([LOST, Exit(2, 1, NOW, lost_peer=True)], 0),
        ([Exit(0, 5, NOW), Exit(1, 6, NOW)], 0),
        ([Exit(1, -2, NOW, stop_sent=True), Exit(0, -2, NOW, stop_sent=True)], 1),
    ],
)
def test_blame(exits: list[Exit], rank: int | None) -> None:
    culprit = first_failure(exits)
    assert (None if culprit is None else culprit.rank) == rank


@pytest.mark.parametrize(
    ("exits", "asked", "status"),
    [
        ([Exit(0, 0, NOW)], None, 0),
        ([Exit(0, 0, NOW, stop_sent=True)], signal.SIGTERM, 0),
        ([LOST, CAUSE], None, 3),
        ([Exit(0, -9, NOW)], None, 137),
        ([Exit(0, -2, NOW, stop_sent=True)], signal.SIGINT, 130),
        ([Exit(0, -9, NOW, stop_sent=True)], signal.SIGTERM, 143),
        ([Exit(0, 4, NOW, stop_sent=True)], signal.SIGTERM, 4),
        ([Exit(0, -11, NOW), Exit(1, -15, NOW, stop_sent=True)], signal.SIGTERM, 139),
    ],
)
def test_exit_status(exits: list[Exit], asked: int | None, status: int) -> None:
    assert exit_status(exits, asked) == status


def test_describe() -> None:
    assert describe(3) == "exit status 3"
    assert describe(-11) == "killed by SIGSEGV"
    assert "out of memory" in describe(-9)
    assert describe(-63) == "killed by signal 63"


def test_last_words_are_the_last_traceback_with_its_causes() -> None:
    old = "Traceback (most recent call last):\nOldError: handled\nwent on\n"
    cause = "Traceback (most recent call last):\n  File 1\nKeyError: 1\n"
    both = "\nDuring handling of the above exception, another exception occurred:\n\n"
    last = "Traceback (most recent call last):\n  File 2\nValueError: 2\n"
    assert last_output(old + cause + both + last, "x") == (cause + both + last).splitlines()
    prefixed = "".join(f"[rank1]: {line}\n" for line in (cause + both + last).splitlines())
    assert last_output(prefixed, "x") == (cause + both + last).splitlines()


def test_last_words_without_a_traceback_are_the_last_lines() -> None:
    assert last_output("", "") == []
    assert last_output("a warning\n", "a warning\nthen this\n\n") == ["a warning", "then this"]
    assert last_output("", "\n".join(map(str, range(100)))) == [str(i) for i in range(80, 100)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28909.", True),
        ("lockstep.errors.PeerLostError: rank 1 went away", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("torch.distributed.DistBackendError: NCCL error ... ncclRemoteError: A call failed possibly", True),
        ("lockstep.errors.WorldError: rank 1 of 2 lost the store at 127.0.0.1:1 while joining", True),
        ("ValueError: no such batch", False),
        ("", False),
    ],
)
def test_lost_peers_are_recognised(words: str, expected: bool) -> None:
    assert is_lost_peer(["Traceback (most recent call last):", words]) is expected


def test_only_the_end_of_the_words_counts_for_a_lost_peer() -> None:
    assert not is_lost_peer(["Connection reset by peer, trying again"] + ["working"] * 15)


@pytest.mark.parametrize(
    ("visible", "gpus", "cores", "expected"),
    [
        (None, 0, 1, 1),
        (None, 0, 3, 3),
        (None, 0, 64, 4),
        (None, 8, 64, 8),
        ("0,1", 8, 64, 2),
        ("GPU-abc", 8, 64, 1),
        ("0,-1,2", 8, 64, 1),
        ("", 8, 2, 2),
        ("-1", 8, 2, 2),
        ("0,1", 0, 2, 2),
        ("0,1,2,3", 2, 64, 2),
    ],
)
def test_how_many_workers_by_default(visible: str | None, gpus: int, cores: int, expected: int) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_workers(env, gpus=gpus, cores=cores) == expected


@pytest.mark.parametrize(("workers", "cores", "threads"), [(2, 8, "4"), (3, 8, "2"), (4, 2, "1")])
def test_cores_are_shared_out(workers: int, cores: int, threads: str) -> None:
    job = Job(("x",), workers, Path("/logs"))
    assert worker_env({}, rank=0, job=job, port=1, cores=cores)["OMP_NUM_THREADS"] == threads
    mine = worker_env({"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"}, rank=0, job=job, port=1, cores=cores)
    assert (mine["OMP_NUM_THREADS"], mine["GLOO_SOCKET_IFNAME"]) == ("7", "eth9")


def test_workers_keep_freed_memory_unless_the_user_has_chosen_settings(stage: Stage) -> None:
    script = stage.script(
        "import resource\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for n in range(5):\n"
        "    before = faults()\n"
        "    large = b'x' * 2**26\n"
        "    del large\n"
        "print(faults() - before)\n"
    )
    kept = stage.run("-n", "1", script)
    not_kept = stage.run("-n", "1", script, MALLOC_MMAP_THRESHOLD_="131072")
    assert int(kept.stdout.split()[-1]) < 100 < 2**26 // 4096 <= int(not_kept.stdout.split()[-1])


def test_an_elastic_run_has_shards_for_the_largest_number_of_workers() -> None:
    fixed, elastic = Job(("x",), 2, Path("/logs")), Job(("x",), 2, Path("/logs"), elastic=ElasticOptions(1, 5))
    assert "LOCKSTEP_SHARDS" not in worker_env({}, rank=0, job=fixed, port=1, cores=2)
    assert worker_env({}, rank=0, job=elastic, port=1, cores=2)["LOCKSTEP_SHARDS"] == "5"
    assert worker_env({"LOCKSTEP_SHARDS": "8"}, rank=0, job=elastic, port=1, cores=2)["LOCKSTEP_SHARDS"] == "8"


def test_a_reserved_port_is_not_handed_out_but_can_be_listened_on() -> None:
    with reserve_port() as port:
        with socket.create_server(("127.0.0.1", port)):
            pass
        with socket.create_server(("", port)):
            pass
        with socket.socket() as rude, pytest.raises(OSError):  # without SO_REUSEADDR, as most programs are not
            rude.bind(("127.0.0.1", port))
