"""One program, unchanged, under everything that starts programs: one digest.

Real launchers, of which each test needs one; where it is missing, the test says so and is skipped. Nothing stays
behind: no process, no port, no file outside of pytest's own folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_cluster import SlurmCluster, free_ports, why_not

ROOT = Path(__file__).resolve().parent.parent
DIGITS = str(ROOT / "examples" / "digits.py")
SHORT = ("--steps", "20")
LONG = ("--batch", "8", "--steps", "700")  # some 15 seconds: long enough to be interrupted
DEADLINE_S = 300.0
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LOCKSTEP_BACKEND")

pytestmark = pytest.mark.timeout(400)
needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ray[train]'")


def environment(**more: str) -> dict[str, str]:
    """Ours, without what says who we are."""
    return {name: value for name, value in os.environ.items() if name not in TOLD} | more


def processes_of(folder: Path) -> list[int]:
    """Processes with the folder on the command line or in the environment, without this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                found += [int(entry.name)] if os.fsencode(folder) in text else []
    return found


def wait_for(condition: Callable[[], object], what: str, *, within_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {within_s:g} s for {what}"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """Processes that are started here get TMPDIR, and are found by it."""
    yield
    try:
        wait_for(lambda: not processes_of(tmp_path), "all processes of the test to be gone", within_s=20)
    finally:
        for pid in processes_of(tmp_path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(folder: Path, *command: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**{"TMPDIR": str(folder)} | env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """The output of each; all of it if one fails."""
    outputs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE_S)
            outputs.append(out)
            said = f"{process.args} ended with {process.returncode}\n{out[-4000:]}{err[-4000:]}"
            assert process.returncode == 0, said
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outputs


def run(folder: Path, *command: str, **env: str) -> str:
    return finish(start(folder, *command, **env))[0]


def digests_of(output: str) -> list[str]:
    return re.findall(r"digest ([0-9a-f]{64})", output)


def digest_of(output: str) -> str:
    """Of a program that has said it once."""
    (digest,) = digests_of(output) or [f"none in {output[-4000:]}"]
    return digest


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest under plain `python`."""
    return digest_of(run(tmp_path_factory.mktemp("alone"), sys.executable, DIGITS, *SHORT))


@pytest.fixture(scope="module")
def long_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(run(tmp_path_factory.mktemp("alone"), sys.executable, DIGITS, *LONG))


# ---- on one machine --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "2"), ("-n", "2", "--min", "1")], ids=["fixed", "elastic"])
def test_lockstep_run(tmp_path: Path, alone: str, options: tuple[str, ...]) -> None:
    assert digest_of(run(tmp_path, sys.executable, "-m", "lockstep", "run", *options, DIGITS, *SHORT)) == alone


@pytest.mark.slow
def test_lockstep_launch(tmp_path: Path, alone: str) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import runpy, sys
        import lockstep

        def train():
            sys.argv = {[DIGITS, *SHORT]!r}
            runpy.run_path(sys.argv[0], run_name="__main__")

        lockstep.launch(train, workers=2)
        """)
    )
    assert digest_of(run(tmp_path, sys.executable, "script.py")) == alone


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, DIGITS, *SHORT]


@pytest.mark.slow
def test_torchrun(tmp_path: Path, alone: str) -> None:
    assert digest_of(run(tmp_path, *torchrun("--standalone", "--nproc-per-node", "2"))) == alone


@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path: Path, alone: str) -> None:
    (port,) = free_ports(1)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", f"test-{port}")
    options = (*options, "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")
    outputs = finish(*(start(tmp_path, *torchrun(*options)) for _ in range(2)))
    assert digest_of("".join(outputs)) == alone


@pytest.mark.slow
@needs_mpi
def test_mpirun(tmp_path: Path, alone: str) -> None:
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    short = Path(tempfile.mkdtemp(prefix="mpi"))  # its sockets have long names
    try:
        command = ("mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, DIGITS, *SHORT)
        assert digest_of(run(tmp_path, *command, TMPDIR=str(short), MARK=str(tmp_path))) == alone
    finally:
        shutil.rmtree(short)


# ---- Ray -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_ray
def test_ray(tmp_path: Path, alone: str) -> None:
    run(tmp_path, sys.executable, "-m", "lockstep", "submit", "--ray", "-n", "2", "--out", "start.py", DIGITS, *SHORT)
    short = Path(tempfile.mkdtemp(prefix="ray"))  # its sockets have long names
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": str(short), "HOME": str(tmp_path)}
    try:
        output = start(tmp_path, sys.executable, "start.py", **quiet, MARK=str(tmp_path))
        out, err = output.communicate(timeout=DEADLINE_S)
        assert output.returncode == 0, out[-4000:] + err[-4000:]
        # It shows what workers say on standard output and on standard error.
        assert set(digests_of(out + err)) == {alone}
    finally:
        for pid in processes_of(tmp_path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(short)


# ---- SLURM -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes with two cores each; both are this machine."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2) as cluster:
        yield cluster
    wait_for(lambda: not cluster.processes(), "SLURM to end", within_s=20)


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize("options", [("-N1", "-n2"), ("-N2", "-n2"), ("-N2", "-n3")], ids=" ".join)
def test_srun(slurm: SlurmCluster, alone: str, options: tuple[str, ...]) -> None:
    assert digest_of(slurm.call("srun", *options, sys.executable, DIGITS, *SHORT)) == alone


@pytest.mark.slow
@needs_slurm
def test_srun_on_a_port_that_is_in_use(slurm: SlurmCluster, alone: str) -> None:
    """Two steps of one job at the same time, each with its own."""
    inner = f"{sys.executable} {DIGITS} {' '.join(SHORT)}"
    both = f"srun --exact -n1 {inner} & srun --exact -n1 {inner} & wait"
    output = slurm.call("salloc", "-N1", "-n2", "bash", "-c", both)
    assert digests_of(output) == [alone, alone]


@pytest.mark.slow
@needs_slurm
def test_a_step_with_fewer_tasks_than_its_job_has(slurm: SlurmCluster, alone: str) -> None:
    """SLURM_NTASKS may still be the job's; the step counts."""
    inner = f"srun -n1 env SLURM_NTASKS=2 {sys.executable} {DIGITS} {' '.join(SHORT)}"
    assert digest_of(slurm.call("salloc", "-N1", "-n2", "bash", "-c", inner)) == alone


class Batch:
    """A job from `lockstep submit`, of which everything is in one folder."""

    def __init__(self, slurm: SlurmCluster, folder: Path, options: tuple[str, ...], program: tuple[str, ...]) -> None:
        self.slurm, self.folder = slurm, folder / "it's my job"
        self.folder.mkdir(exist_ok=True)
        command = (sys.executable, "-m", "lockstep", "submit", "--slurm", *options, "--out", "job.sbatch", DIGITS)
        assert "start it with: sbatch job.sbatch" in run(self.folder, *command, *program)
        self.number = slurm.call("sbatch", "--parsable", str(self.folder / "job.sbatch")).strip()

    def output(self) -> str:
        file = self.folder / f"digits-{self.number}.out"
        return file.read_text() if file.exists() else ""

    def end(self, *states: str) -> str:
        """Its output, once it has ended as expected."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        job = self.slurm.wait_for_job(self.number, over, within_s=DEADLINE_S)
        assert job["JobState"] in states, self.output()[-4000:]
        return self.output()

    def wait_until_it_trains(self, kept: Path) -> None:
        wait_for(lambda: any(kept.glob("*")), f"files in {kept}; its output: {self.output()}", within_s=60)
        time.sleep(1.0)


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    "options",
    [("-n", "2"), ("--nodes", "2", "-n", "1"), ("-n", "2", "--min", "1"), ("--nodes", "2", "-n", "1", "--min", "1")],
    ids=" ".join,
)
def test_sbatch(slurm: SlurmCluster, tmp_path: Path, alone: str, options: tuple[str, ...]) -> None:
    batch = Batch(slurm, tmp_path, (*options, "--time", "10m", "--partition", "all"), SHORT)
    assert digest_of(batch.end("COMPLETED")) == alone
    assert not list(batch.folder.glob(".lockstep-secret*"))


@pytest.mark.slow
@needs_slurm
def test_submit_now(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    command = (sys.executable, "-m", "lockstep", "submit", "--slurm", "--now", "--out", str(tmp_path / "job"), DIGITS)
    answer = re.fullmatch(r"Submitted batch job (\d+)\n", slurm.call(*command, *SHORT, within_s=30))
    assert answer is not None
    slurm.wait_for_job(answer[1], ("COMPLETED",), within_s=DEADLINE_S)
    (output,) = Path.cwd().glob(f"digits-{answer[1]}.out")
    assert digest_of(output.read_text()) == alone
    output.unlink()


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    "options", [("-n", "2"), ("-n", "2", "--min", "1"), ("--nodes", "2", "-n", "1", "--min", "1")], ids=" ".join
)
def test_a_job_that_is_told_to_save_is_queued_again_and_goes_on(
    slurm: SlurmCluster, tmp_path: Path, long_alone: str, options: tuple[str, ...]
) -> None:
    batch = Batch(slurm, tmp_path, (*options, "--time", "10m"), (*LONG, "--directory", str(tmp_path / "kept")))
    batch.wait_until_it_trains(tmp_path / "kept")
    slurm.call("scancel", "--batch", "--signal=USR1", batch.number)
    wait_for(lambda: "the job is queued again" in batch.output(), "the job to save", within_s=60)
    wait_for(lambda: slurm.job(batch.number)["Restarts"] == "1", "the job to be queued again", within_s=60)
    early, end = digests_of(batch.end("COMPLETED"))  # the program tells its digest when it is told to end, too
    assert early != end == long_alone


@pytest.mark.slow
@needs_slurm
@pytest.mark.timeout(600)
def test_a_job_whose_time_is_up_is_queued_again_and_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    """SLURM looks twice a minute, so this program takes longer than that. Its limit is made shorter once it trains."""
    longest = ("--batch", "8")
    reference = digest_of(run(tmp_path, sys.executable, "-m", "lockstep", "run", "-n", "2", DIGITS, *longest))
    kept = tmp_path / "kept"
    options = ("-n", "1", "--time", "10m", "--save-s", "110")
    batch = Batch(slurm, tmp_path, options, (*longest, "--directory", str(kept)))
    batch.wait_until_it_trains(kept)
    slurm.call("scontrol", "update", f"JobId={batch.number}", "TimeLimit=2")
    wait_for(lambda: "the job is queued again" in batch.output(), "the job to save", within_s=60)
    wait_for(lambda: slurm.job(batch.number)["Restarts"] == "1", "the job to be queued again", within_s=60)
    slurm.call("scontrol", "update", f"JobId={batch.number}", "TimeLimit=10")
    early, end = digests_of(batch.end("COMPLETED"))
    assert early != end == reference


@pytest.mark.slow
@needs_slurm
def test_a_job_that_is_cancelled_has_saved_and_stays_away(slurm: SlurmCluster, tmp_path: Path, long_alone: str) -> None:
    program = (*LONG, "--directory", str(tmp_path / "kept"))
    first = Batch(slurm, tmp_path, ("-n", "2"), program)
    first.wait_until_it_trains(tmp_path / "kept")
    slurm.call("scancel", first.number)
    first.end("CANCELLED")
    wait_for(lambda: not slurm.call("squeue", "--noheader").strip(), "the job to end", within_s=60)
    listed = run(tmp_path, sys.executable, "-m", "lockstep", "checkpoint", "ls", str(tmp_path / "kept"))
    assert re.search(r"^\d+ .* yes$", listed, re.MULTILINE), listed
    assert digest_of(Batch(slurm, tmp_path, ("-n", "1"), program).end("COMPLETED")) == long_alone


@pytest.mark.slow
@needs_slurm
def test_a_job_that_fails_is_not_queued_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    batch = Batch(slurm, tmp_path, ("-n", "2"), ("--batch", "-1"))
    job_output = batch.end("FAILED")
    assert slurm.job(batch.number)["Restarts"] == "0"
    assert "ValueError" in job_output
