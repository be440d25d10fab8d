"""What `lockstep submit` writes. That it works under a real SLURM and a real Ray is in test_clusters.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.submit.cluster_files import (
    Cluster,
    ClusterJob,
    WorkerLimits,
    check,
    name_after,
    read_time,
    train_job,
    write_batch,
    write_manifest,
    write_program,
)
from lockstep.submit.command import main, write

SMALL = ClusterJob(
    program=("train.py", "--lr", "0.1"), name="train", folder="/home/me/work", python="python3", workers=2
)
LARGE = replace(SMALL, nodes=4, workers=8, gpus=8, cpus=6, limit_s=12 * 3600)
LASTING = replace(LARGE, elastic=WorkerLimits(8, 64))
IMAGE = "example/train:1"
ODD = 'it\'s $(a) "test" `x` \\ #é'


# ---- what was asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43200), ("2d", 172800), ("1-02:03:04", 93784), ("00:10:00", 600)],
)
def test_times(text: str, seconds: int) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "1.5h", "-1h", "0m", "1:2:3", "00:61:00", "2w"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        read_time(text)


@pytest.mark.parametrize(
    ("program", "name"),
    [("src/Train_Big.py", "train-big"), ("train.py", "train"), ("..py", "train"), ("x" * 90 + ".py", "x" * 40)],
)
def test_a_job_is_named_after_its_program(program: str, name: str) -> None:
    assert name_after(program) == name
    for cluster in Cluster:
        check(replace(SMALL, name=name, image=IMAGE if cluster is Cluster.K8S else None), cluster)


@pytest.mark.parametrize(
    ("order", "cluster", "words"),
    [
        (replace(SMALL, limit_s=60), Cluster.RAY, "knows no --time: that is for --slurm and --k8s"),
        (replace(SMALL, partition="gpu"), Cluster.K8S, "knows no --partition"),
        (replace(SMALL, image=IMAGE), Cluster.SLURM, "knows no --image"),
        (replace(SMALL, elastic=WorkerLimits(1, None)), Cluster.RAY, "knows no --min, --max"),
        (SMALL, Cluster.K8S, "--k8s needs --image"),
        (
            replace(SMALL, elastic=WorkerLimits(3, None)),
            Cluster.SLURM,
            r"2 workers, which must be at least --min \(3\)",
        ),
        (replace(SMALL, elastic=WorkerLimits(None, 1)), Cluster.SLURM, r"at most --max \(1\)"),
        (replace(SMALL, limit_s=120), Cluster.SLURM, "asked to save 120 s before"),
        (replace(SMALL, workers=3, gpus=2), Cluster.SLURM, "-n 3 workers do not share --gpus 2 evenly"),
        (replace(SMALL, name="a b"), Cluster.SLURM, "--name 'a b' must be made of letters"),
        (replace(SMALL, name="Train", image=IMAGE), Cluster.K8S, "small letters"),
        (replace(SMALL, program=("train.py", "a\nb")), Cluster.SLURM, "line break"),
    ],
)
def test_what_does_not_go_together(order: ClusterJob, cluster: Cluster, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(order, cluster)


# ---- SLURM -----------------------------------------------------------------------------------------------------------


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_task_per_worker() -> None:
    text = write_batch(replace(LARGE, partition="gpu"))
    asked = directives(text)
    assert {"nodes": "4", "ntasks-per-node": "8", "cpus-per-task": "6", "gpus-per-node": "8"}.items() <= asked.items()
    assert asked["time"] == "0-12:00:00"
    assert asked["partition"] == "gpu"
    assert asked["signal"] == "B:USR1@120"
    assert {"requeue", "open-mode"} <= asked.keys()
    assert "\nsrun --kill-on-bad-exit=0 --cpus-per-task=6 python3 train.py --lr 0.1 &\n" in text


def test_a_host_agent_per_node() -> None:
    text = write_batch(LASTING)
    assert directives(text)["ntasks-per-node"] == "1"
    assert directives(text)["cpus-per-task"] == "48"
    assert "no-kill" in directives(text)
    command = next(line for line in text.splitlines() if line.startswith("srun "))
    assert "-m lockstep run -n 8 --min 8 --max 64" in command
    assert '--hosts 4 --rendezvous "$meet" --secret-file "$secret" train.py --lr 0.1 &' in command
    alone = write_batch(replace(LASTING, nodes=1))
    assert "--hosts" not in alone
    assert "secret" not in alone


@pytest.mark.parametrize("order", [SMALL, LASTING, replace(SMALL, program=(ODD, ODD), folder=f"/x/{ODD}", python=ODD)])
def test_bash_can_read_it(order: ClusterJob) -> None:
    done = subprocess.run(["bash", "-n"], input=write_batch(order), text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("ends", "signal", "status", "queued"),
    [
        ("exit 0", "", 0, False),
        ("exit 7", "", 7, False),
        ("sleep 30 & wait; exit 75", "USR1", 75, True),
        ("sleep 30 & wait; exit 75", "TERM", 75, False),
        ("sleep 30 & wait; exit 0", "USR1", 0, False),
        ("exit 75", "", 75, False),
    ],
)
def test_only_what_was_saved_because_time_is_up_is_queued_again(
    tmp_path: Path, ends: str, signal: str, status: int, queued: bool
) -> None:
    """With an srun and an scontrol of ours."""
    (tmp_path / "srun").write_text(f"#!/bin/bash\ntrap 'kill %1' USR1 TERM\ntouch up\n{ends}\n")
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" > asked\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    text = write_batch(replace(SMALL, folder=str(tmp_path)))
    poke = f"(until [ -e up ]; do sleep 0.05; done; sleep 0.2; kill -{signal} $$) &\n" if signal else ""
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
    done = subprocess.run(
        ["bash", "-c", poke + text], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=20
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "asked").exists() == queued
    if queued:
        assert (tmp_path / "asked").read_text() == "requeue 42\n"


# ---- Kubernetes ------------------------------------------------------------------------------------------------------

ORDERS = [replace(order, image=IMAGE) for order in (SMALL, LARGE, LASTING)]


@pytest.mark.parametrize("order", ORDERS, ids=["small", "large", "lasting"])
def test_a_train_job_is_what_the_published_schema_says(order: ClusterJob) -> None:
    """The models of kubeflow-trainer-api are made from it; whatever they do not know is missing when they write."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the package kubeflow-trainer-api")
    job = train_job(order)
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_resources_of_a_node() -> None:
    trainer = train_job(ORDERS[1])["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    assert trainer["command"][-3:] == ["train.py", "--lr", "0.1"]


def test_host_agents_in_kubernetes_share_a_secret_that_is_not_in_the_manifest() -> None:
    text = write_manifest(ORDERS[2])
    assert "secretKeyRef" in text
    assert "kubectl create secret generic train-secret" in text
    assert "$(PET_MASTER_ADDR):29401" in text
    assert "secretKeyRef" not in write_manifest(ORDERS[1])
    assert "secretKeyRef" not in write_manifest(replace(ORDERS[2], nodes=1))


def test_kubernetes_replaces_nothing_in_the_arguments_of_the_program() -> None:
    job = train_job(replace(ORDERS[0], program=("train.py", "$(HOME)", "$x")))
    assert job["spec"]["trainer"]["command"][-2:] == ["$$(HOME)", "$x"]


@pytest.mark.parametrize("order", [*ORDERS, replace(ORDERS[0], program=(ODD, ODD))])
def test_a_manifest_is_json(order: ClusterJob) -> None:
    assert json.loads(write_manifest(order)) == train_job(order)


# ---- Ray -------------------------------------------------------------------------------------------------------------


def test_a_program_for_ray() -> None:
    text = write_program(replace(LARGE, workers=16, limit_s=None, folder='/it\'s """here"""'))
    compile(text, "ray.py", "exec")
    assert "num_workers=64, use_gpu=True, resources_per_worker={'CPU': 6, 'GPU': 0.5}" in text


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_print_writes_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--slurm", "--print", "--nodes", "2", "-n", "3", "train.py", "--nodes", "9"]) == 0
    text = capsys.readouterr().out
    assert directives(text)["nodes"] == "2"
    assert directives(text)["chdir"] == str(folder)
    assert f"{sys.executable} train.py --nodes 9 &" in text
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("arguments", "name", "next_step"),
    [
        (["--slurm"], "train.sbatch", "sbatch train.sbatch"),
        (["--slurm", "--name", "big"], "big.sbatch", "sbatch big.sbatch"),
        (["--k8s", "--image", IMAGE], "train.json", "kubectl create -f train.json"),
        (["--ray"], "train_ray.py", "ray job submit --no-wait -- python train_ray.py"),
        (["--ray", "--out", "x.py"], "x.py", "ray job submit --no-wait -- python x.py"),
    ],
)
def test_a_file_and_what_to_do_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], name: str, next_step: str
) -> None:
    assert main([*arguments, "train.py"]) == 0
    assert capsys.readouterr().out == f"wrote {name}; start it with: {next_step}\n"
    assert (folder / name).read_text()


def test_a_module(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--slurm", "--print", "-m", "package.train", "--x"]) == 0
    text = capsys.readouterr().out
    assert "-m package.train --x &" in text
    assert directives(text)["job-name"] == "train"


def test_now_submits_and_hands_the_answer_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "sbatch").write_text('#!/bin/sh\necho "Submitted $1"\nexit 3\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert main(["--slurm", "--now", "train.py"]) == 3
    assert capfd.readouterr().out == "Submitted train.sbatch\n"
    (folder / "sbatch").unlink()
    if shutil.which("sbatch") is None:
        assert main(["--slurm", "--now", "train.py"]) == 1
        assert "there is no `sbatch` here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py"], "one of the arguments --slurm --k8s --ray is required"),
        (["--slurm", "--ray", "train.py"], "not allowed with"),
        (["--slurm"], "what shall the workers run?"),
        (["--slurm", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["--slurm", "--nodes", "0", "train.py"], "'0' must be a whole number, 1 or more"),
        (["--slurm", "-n", "two", "train.py"], "'two' must be a whole number"),
        (["--slurm", "--gpus", "-1", "train.py"], "--gpus"),
        (["--slurm", "--time", "30", "train.py"], "'30' is not a time"),
        (["--slurm", "--nonsense", "train.py"], "--nonsense"),
        (["--slurm", "--print", "--now", "train.py"], "shown or started"),
        (["--k8s", "train.py"], "--k8s needs --image"),
        (["--slurm", "--out", "no/such/folder/x", "train.py"], "cannot write no/such/folder/x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused_and_nothing_written(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_every_cluster_has_a_way_to_submit() -> None:
    for cluster in Cluster:
        assert write(replace(SMALL, image=IMAGE), cluster).submit
