"""`lockstep.launch`, from scripts and from a real Jupyter kernel. No worker outlives the call or its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import LockstepError
from on_workers import run_program
from test_launch import nothing_left_behind, processes_of, wait_for  # noqa: F401  (a fixture)

DEADLINE_S = 300.0
SOON_S = 30.0
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_BACKEND")


def write_script(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text("import os, signal, sys, time\nimport torch, lockstep\n" + textwrap.dedent(text))
    return script


def start(folder: Path, text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(write_script(folder, text))],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in TOLD} | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests run in the background SIGINT may be ignored, and child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(folder: Path, text: str) -> str:
    status, out = run_program(write_script(folder, text))
    assert status == 0, out
    return out


def own_lines(out: str) -> list[str]:
    """Return the lines that the script has printed itself, without those of workers."""
    return [line for line in out.splitlines() if not line.startswith("[rank")]


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_the_result_of_rank_0_and_the_output_of_all(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        class Found:  # of this very script
            def __init__(self, total): self.total = total

        def add(number, more):
            world = lockstep.init()
            print(f"rank {world.rank} of {world.size}, local {world.local_rank}")
            os.write(1, b"from below\\n")
            total = torch.full((2,), float(number + world.rank))
            torch.distributed.all_reduce(total)
            return Found(total), more, world.rank, torch.get_num_threads()

        found, more, rank, threads = lockstep.launch(add, 10, {"a": 1}, workers=2)
        print("result", found.total.tolist(), more, rank, threads)
        print("again", lockstep.launch(lambda: os.environ["WORLD_SIZE"], workers=1), "RANK" in os.environ)
        print("nothing", lockstep.launch(lambda: None, workers=2))
        print("large", len(lockstep.launch(lambda: bytes(50_000_000), workers=1)))
        """,
    )
    lines = out.splitlines()
    assert lines[-4:] == ["result [21.0, 21.0] {'a': 1} 0 1", "again 1 False", "nothing None", "large 50000000"]
    for rank in (0, 1):
        assert f"[rank {rank}] rank {rank} of 2, local {rank}" in lines
        assert f"[rank {rank}] from below" in lines


@pytest.mark.slow
def test_the_state_of_the_caller_does_no_harm(tmp_path: Path) -> None:
    """It has used torch's threads, has made a Run, has threads of its own, and handlers for the end."""
    out = run(
        tmp_path,
        """
        import atexit, threading
        atexit.register(lambda: print("the end of", os.getpid()))
        torch.set_num_threads(2)
        net = torch.nn.Linear(600, 600)
        net(torch.randn(600, 600)).sum().backward()
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        with lockstep.Run(seed=1, progress=False) as solo:
            solo.replicate(net)
        torch.distributed.destroy_process_group()

        def learn():
            with lockstep.Run(seed=1, progress=False) as run:
                model = run.replicate(torch.nn.Linear(600, 600))
                data = torch.utils.data.TensorDataset(torch.randn(64, 600))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for batch in run.train(run.batches(data, global_batch_size=16, shards=8, num_workers=1), optimizer):
                    run.step(lambda net, x: (net(x[0]).pow(2).sum(), len(x[0])), batch)
                return run.digest(), run.world.size
        first, second = lockstep.launch(learn, workers=1), lockstep.launch(learn, workers=2)
        assert first[0] == second[0], (first, second)
        print("sizes", first[1], second[1], "me", os.getpid())
        """,
    )
    lines = own_lines(out)
    me = lines[0].split()[-1]
    assert lines == [f"sizes 1 2 me {me}", f"the end of {me}"]


def test_what_cannot_come_back(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        try:
            lockstep.launch(lambda: (x for x in "ab"), workers=1)
        except lockstep.WorkerFailedError as error:
            print(error)
        """,
    )
    assert "TypeError: what the function returned, a generator, cannot be handed back" in out
    assert "return numbers, text, tensors, a state dict" in out


# ---- a worker that fails ---------------------------------------------------------------------------------------------


def test_the_traceback_of_the_first_that_failed(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        def fail():
            world = lockstep.init()
            if world.rank == 1:
                raise ValueError("a bad number")
            torch.distributed.barrier()

        began = time.monotonic()
        try:
            lockstep.launch(fail, workers=3)
        except lockstep.WorkerFailedError as error:
            print(error.rank, error.status, isinstance(error, lockstep.LockstepError))
            print(error)
        print("soon", time.monotonic() - began < 30)
        """,
    )
    lines = own_lines(out)
    assert lines[0] == "1 1 True"
    assert lines[1] == "rank 1 of 3 failed first: ValueError: a bad number"
    assert lines[3] == "Traceback (most recent call last):"
    assert "script.py" in lines[4]  # and not our own files
    assert 'raise ValueError("a bad number")' in out
    assert "Peer" not in out
    assert lines[-1] == "soon True"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 failed first: killed by SIGKILL"),
        pytest.param("sys.exit(3)", "rank 1 of 2 failed first: exit status 3", marks=pytest.mark.slow),
        ("sys.exit(75)", "rank 1 of 2 was asked to end, and has saved"),
    ],
)
def test_a_worker_that_ends_without_a_word(tmp_path: Path, deed: str, words: str) -> None:
    out = run(
        tmp_path,
        f"""
        def fail():
            if os.environ["RANK"] == "1":
                print("last line", file=sys.stderr); {deed}
            time.sleep(3600)

        try:
            lockstep.launch(fail, workers=2)
        except lockstep.WorkerFailedError as error:
            print(error)
        """,
    )
    assert own_lines(out)[0].startswith(words)


# ---- the end ---------------------------------------------------------------------------------------------------------

LASTING = """
    def last():
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", os.getcwd()])
        {first}
        while True:
            try:
                open(f"up{{os.environ['RANK']}}", "w").close()
                time.sleep(3600)
            except KeyboardInterrupt:
                {interrupted}

    try:
        lockstep.launch(last, workers=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


def is_up(folder: Path) -> bool:
    return (folder / "up0").exists() and (folder / "up1").exists()


def test_ctrl_c_ends_them_all(tmp_path: Path) -> None:
    process = start(tmp_path, LASTING.format(first="", interrupted="print('mine'); raise"))
    wait_for(lambda: is_up(tmp_path), "the workers")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.stdout.splitlines()[-1] == "interrupted"
    assert done.stdout.count("mine") == 2
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_a_second_ctrl_c_kills_those_who_do_not_listen(tmp_path: Path) -> None:
    process = start(tmp_path, LASTING.format(first="", interrupted="print('no', flush=True)"))
    wait_for(lambda: is_up(tmp_path), "the workers")
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finish(process).stdout.splitlines()[-1] == "interrupted"
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.few(1)
@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_worker_outlives_the_caller(tmp_path: Path, sign: signal.Signals) -> None:
    """Neither the workers nor their children, though they ignore what can be ignored."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = start(tmp_path, LASTING.format(first=deaf, interrupted="pass"))
    wait_for(lambda: is_up(tmp_path), "the workers")
    process.send_signal(sign)
    process.wait(SOON_S)
    finish(process)
    wait_for(lambda: not processes_of(tmp_path), "all processes to be gone")


@pytest.mark.slow
def test_what_a_worker_leaves_behind_ends_with_the_call(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        def leave():
            import subprocess
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", os.getcwd()])
        lockstep.launch(leave, workers=2)
        """,
    )
    wait_for(lambda: not processes_of(tmp_path), "all processes to be gone")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "workers", "error", "words"),
    [
        (print, 0, ValueError, "workers=0 must be 1 or more"),
        (print, -2, ValueError, "workers=-2 must be"),
        (print, "2", TypeError, "workers='2' must be a whole number"),
        (print, True, TypeError, "workers=True must be"),
        ("train.py", 2, TypeError, "'train.py' is not a function"),
    ],
)
def test_wrong_arguments(fn: object, workers: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lockstep.launch(fn, workers=workers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK/WORLD_SIZE says rank 1 of 2"),
        ({"LOCKSTEP_RUN_DIR": "/x"}, "`lockstep run` has started it"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "Open"),
    ],
)
def test_inside_a_worker(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockstepError, match=f"inside a worker .{words}"):
        lockstep.launch(print, workers=2)


@pytest.mark.slow
def test_a_launch_inside_of_a_launch(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
        try:
            lockstep.launch(lambda: lockstep.launch(print, workers=2), workers=1)
        except lockstep.WorkerFailedError as error:
            print(error)
        """,
    )
    assert "lockstep.launch was called inside a worker (RANK/WORLD_SIZE says rank 0 of 1)" in out


def test_a_machine_on_which_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LockstepError, match=r"works on Linux only, and this is darwin.*lockstep run"):
        lockstep.launch(print, workers=2)


def test_a_process_that_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LockstepError, match=r"CUDA is in use in this process already.*restart the kernel"):
        lockstep.launch(print, workers=2)


@pytest.mark.slow
def test_a_process_that_is_in_a_group(tmp_path: Path) -> None:
    done = finish(start(tmp_path, "lockstep.init()\nlockstep.launch(print, workers=2)"))
    assert done.returncode == 1
    assert "in a process group already" in done.stderr
    assert "destroy_process_group() first" in done.stderr


# ---- a real notebook -------------------------------------------------------------------------------------------------

CELLS = (
    "import os, torch, lockstep, threading\nprint(len(threading.enumerate()) > 1)",
    "def add(number):\n"
    "    world = lockstep.init()\n"
    "    print('hello from', world.rank)\n"
    "    total = torch.tensor([number + world.rank])\n"
    "    torch.distributed.all_reduce(total)\n"
    "    return total\n"
    "lockstep.launch(add, 4, workers=2)",
    "def fail():\n    raise KeyError('lost in a cell')\ntry:\n    lockstep.launch(fail, workers=2)\n"
    "except lockstep.WorkerFailedError as error:\n    print(error)",
    "lockstep.launch(add, 5, workers=2)",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_a_jupyter_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the packages nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs the packages nbclient and ipykernel")
    import nbformat

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    assert shown[0] == "True\n"
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1"} <= set(shown[1].splitlines())
    assert notebook.cells[1].outputs[-1].data["text/plain"] == "tensor([9])"
    assert "KeyError: 'lost in a cell'" in shown[2]
    assert "raise KeyError('lost in a cell')" in shown[2]
    assert notebook.cells[3].outputs[-1].data["text/plain"] == "tensor([11])"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_stop_button_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("jupyter_client.manager", reason="needs the packages nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs the packages nbclient and ipykernel")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path), startup_timeout=90)
    try:
        text = "import lockstep, os, time\ndef wait():\n    open('up' + os.environ['RANK'], 'w').close()\n"
        asked = client.execute(f"{text}    time.sleep(3600)\nlockstep.launch(wait, workers=2)")
        wait_for(lambda: is_up(tmp_path), "the workers")
        kernel.interrupt_kernel()
        answer = client.get_shell_msg(timeout=SOON_S)
        assert answer["parent_header"]["msg_id"] == asked
        assert answer["content"]["ename"] == "KeyboardInterrupt"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
