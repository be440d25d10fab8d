"""A training program with the machines that it needs, and the file with which a cluster starts it. Pure.

SLURM gets a batch script, Kubernetes a manifest (JSON, which kubectl takes), Ray a program.

Note [Save and requeue]
SLURM sends SIGUSR1 to the batch script some time before the limit. The script passes it on to srun, and srun to the
tasks: the program saves after its step and ends with status 75. Only then the script requeues the job, and the next
start resumes from the checkpoint. A job that is cancelled (SIGTERM) saves, too, and is not requeued. A preempted job is
requeued by SLURM itself.

srun must not end the other tasks when one ends with a status that is not 0 (--kill-on-bad-exit): after a save all tasks
end with status 75, and a killed task would hide that. A worker whose peer fails notices that itself.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from lockstep.control.wire import VARIABLE
from lockstep.launcher.exit_policy import PREEMPTED

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Cluster(Enum):
    SLURM = "slurm"
    K8S = "k8s"
    RAY = "ray"


@dataclass(frozen=True)
class WorkerLimits:
    """Allowed number of workers on all nodes together; None: the default of `lockstep run`."""

    least: int | None
    most: int | None


@dataclass(frozen=True)
class ClusterJob:
    program: tuple[str, ...]  # what follows `python` on a command line
    name: str
    folder: str  # working directory of the program
    python: str
    nodes: int = 1
    workers: int = 1  # on each node
    gpus: int = 0  # on each node
    cpus: int = 1  # per worker
    limit_s: int | None = None
    save_s: int = 120  # the program is asked to save so long before the limit
    partition: str | None = None
    image: str | None = None
    elastic: WorkerLimits | None = None

    @property
    def all_workers(self) -> int:
        return self.nodes * self.workers

    @property
    def run_options(self) -> list[str]:
        """Options of `lockstep run` on each node."""
        options = ["-n", str(self.workers)]
        if self.elastic is not None:
            options += [] if self.elastic.least is None else ["--min", str(self.elastic.least)]
            options += [] if self.elastic.most is None else ["--max", str(self.elastic.most)]
        return options


def check(job: ClusterJob, cluster: Cluster) -> None:
    """Raises ValueError for options that do not go together, or that this cluster would silently ignore."""
    for option, value, clusters in (
        ("--time", job.limit_s, (Cluster.SLURM, Cluster.K8S)),
        ("--partition", job.partition, (Cluster.SLURM,)),
        ("--image", job.image, (Cluster.K8S,)),
        ("--min, --max", job.elastic, (Cluster.SLURM, Cluster.K8S)),
    ):
        if value is not None and cluster not in clusters:
            others = " and ".join(f"--{one.value}" for one in clusters)
            raise ValueError(f"--{cluster.value} knows no {option}: that is for {others}; leave it out")
    if cluster is Cluster.K8S and job.image is None:
        raise ValueError("--k8s needs --image: a container image that has the program, torch and lockstep in it")
    if job.elastic is not None:
        least, most = job.elastic.least or 1, job.elastic.most or job.all_workers
        if not least <= job.all_workers <= most:
            raise ValueError(
                f"--nodes {job.nodes} times -n {job.workers} is {job.all_workers} workers, which must be at "
                f"least --min ({least}) and at most --max ({most})"
            )
    if cluster is Cluster.SLURM and job.limit_s is not None and job.limit_s <= job.save_s:
        raise ValueError(
            f"--time is {job.limit_s} s, and the program is asked to save {job.save_s} s before it ends; "
            "give it more time, or choose a smaller --save-s"
        )
    if job.gpus and job.workers % job.gpus and job.workers > job.gpus:
        raise ValueError(f"-n {job.workers} workers do not share --gpus {job.gpus} evenly; choose a multiple of it")
    longest = 63 if cluster is Cluster.K8S else 200
    pattern = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?" if cluster is Cluster.K8S else r"[\w.+@-]+"
    if not re.fullmatch(pattern, job.name) or len(job.name) > longest:
        letters = "small letters, digits and -" if cluster is Cluster.K8S else "letters, digits and . _ + @ -"
        raise ValueError(f"--name {job.name!r} must be made of {letters}, {longest} at most")
    if any("\n" in word or "\0" in word for word in (*job.program, job.folder, job.python)):
        raise ValueError("a program, an argument or a folder with a line break in it cannot be written into a job")


def read_time(text: str) -> int:
    """Parses 90s, 30m, 12h, 2d, and SLURM's [D-]HH:MM:SS; returns seconds."""
    if short := re.fullmatch(r"(\d+)([smhd])", text):
        seconds = int(short[1]) * _UNITS_S[short[2]]
    elif clock := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        raise ValueError(f"{text!r} is not a time; it takes 90s, 30m, 12h, 2d or D-HH:MM:SS")
    if seconds == 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def name_after(program: str) -> str:
    """Returns a name that every cluster accepts: `src/train_big.py` -> `train-big`."""
    stem = re.sub(r"\.pyw?$", "", program.replace("\\", "/").rstrip("/").rpartition("/")[2])
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return plain or "train"


# ---- SLURM -----------------------------------------------------------------------------------------------------------

_HEAD = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --cpus-per-task={cpus}
{more}#SBATCH --chdir={folder}
#SBATCH --output={name}-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{save_s}

# Written by `lockstep submit --slurm`. {about}
# Before the time is up the run saves and ends with status {preempted}; then the job is queued again, and goes on.
"""

_ELASTIC = """
# The host agents of the nodes meet at the first node, and know each other by a secret that only this job has.
secret="$PWD/.lockstep-secret-$SLURM_JOB_ID"
rm -f "$secret"
(umask 077; {python} -c 'import secrets; print(secrets.token_hex(32))' > "$secret") || exit 1
trap 'rm -f "$secret"' EXIT
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
meet="$first:$((20000 + SLURM_JOB_ID % 10000))"
"""

_TAIL = """
asked='' heard=''
pass_on() {{ heard=1; kill -"$1" "$step" 2> /dev/null; }}
trap 'asked=1; pass_on USR1' USR1
trap 'pass_on TERM' TERM

{command} &
step=$!
while :; do
    heard=''
    wait "$step"
    status=$?
    [ -n "$heard" ] || break  # a signal ends `wait` early, and the step goes on
done

if [ "$status" -eq {preempted} ] && [ -n "$asked" ]; then
    echo "saved; the job is queued again, and goes on from there"
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$status" -eq {preempted} ]; then
    echo "saved; \\`sbatch\\` it again to go on"
fi
exit "$status"
"""


def write_batch(job: ClusterJob) -> str:
    """Returns the script. It starts a task per worker; with --min or --max a host agent per node, which replaces lost
    workers."""
    tasks, cpus = (job.workers, job.cpus) if job.elastic is None else (1, job.workers * job.cpus)
    more = [f"--gpus-per-node={job.gpus}"] if job.gpus else []
    more += [] if job.limit_s is None else [f"--time={_clock(job.limit_s)}"]
    more += [] if job.partition is None else [f"--partition={shlex.quote(job.partition)}"]
    more += [] if job.elastic is None else ["--no-kill"]  # the run continues without a lost node
    head = _HEAD.format(
        name=job.name,
        nodes=job.nodes,
        tasks=tasks,
        cpus=cpus,
        more="".join(f"#SBATCH {option}\n" for option in more),
        folder=shlex.quote(job.folder),
        save_s=job.save_s,
        about="srun starts every worker." if job.elastic is None else "srun starts a host agent on every node.",
        preempted=PREEMPTED,
    )
    srun = ["srun", "--kill-on-bad-exit=0", f"--cpus-per-task={cpus}"]
    if job.elastic is None:
        head += f'\nexport OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{job.cpus}}}" PYTHONUNBUFFERED=1\n'
        command = shlex.join([*srun, job.python, *job.program])
    else:
        launcher = shlex.join([*srun, "--no-kill", job.python, "-m", "lockstep", "run", *job.run_options])
        launcher += ' --log-dir "lockstep-logs/$SLURM_JOB_ID"'
        if job.nodes > 1:
            head += _ELASTIC.format(python=shlex.quote(job.python))
            launcher += f' --hosts {job.nodes} --rendezvous "$meet" --secret-file "$secret"'
        command = f"{launcher} {shlex.join(job.program)}"
    return head + _TAIL.format(command=command, preempted=PREEMPTED)


def _clock(seconds: int) -> str:
    """Formats a duration for --time, rounded up to minutes, which is what SLURM counts in."""
    minutes = -(-seconds // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


# ---- Kubernetes ------------------------------------------------------------------------------------------------------

# Kubeflow Trainer sets the number of the node and the address of the first node in each pod; torchrun then starts the
# workers of a node. With --min or --max `lockstep run` does that, whose host agents share a secret that must exist in
# the namespace. `$(NAME)` in a command is replaced by Kubernetes.
RUNTIME: Final = "torch-distributed"  # a ClusterTrainingRuntime that Kubeflow Trainer provides
MEET_PORT: Final = 29401  # not that of torchrun
SECRET_KEY: Final = "secret"
GPU: Final = "nvidia.com/gpu"


def write_manifest(job: ClusterJob) -> str:
    return json.dumps(train_job(job), indent=2) + "\n"


def needs_secret(job: ClusterJob) -> bool:
    return job.elastic is not None and job.nodes > 1


def make_secret(job: ClusterJob) -> str:
    """Returns the shell command. It reads the secret from standard input: `ps` would show it on a command line."""
    return (
        "openssl rand -hex 32 | tr -d '\\n' | "
        f"kubectl create secret generic {job.name}-secret --from-file={SECRET_KEY}=/dev/stdin"
    )


def train_job(job: ClusterJob) -> dict[str, Any]:
    """The manifest of a TrainJob of Kubeflow Trainer."""
    about = "Written by `lockstep submit --k8s`. The program is looked for from the image's working folder."
    env: list[dict[str, Any]] = [{"name": "OMP_NUM_THREADS", "value": str(job.cpus)}]
    if needs_secret(job):
        about += f" Needs a secret, made once: {make_secret(job)}"
        source = {"secretKeyRef": {"name": f"{job.name}-secret", "key": SECRET_KEY}}
        env.append({"name": VARIABLE, "valueFrom": source})
    limits = {GPU: str(job.gpus)} if job.gpus else {}
    trainer: dict[str, Any] = {
        "image": job.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.workers,
        "command": _command(job),
        "env": env,
        "resourcesPerNode": {"requests": {"cpu": str(job.cpus * job.workers)} | limits}
        | ({"limits": limits} if limits else {}),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    if job.limit_s is not None:
        spec["activeDeadlineSeconds"] = job.limit_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name, "annotations": {"lockstep/about": about}},
        "spec": spec,
    }


def _command(job: ClusterJob) -> list[str]:
    program = [word.replace("$(", "$$(") for word in job.program]
    if job.elastic is None:
        return [job.python, "-m", "torch.distributed.run", *program]
    meet = ["--hosts", str(job.nodes), "--rendezvous", f"$(PET_MASTER_ADDR):{MEET_PORT}"] if job.nodes > 1 else []
    return [job.python, "-m", "lockstep", "run", *job.run_options, *meet, *program]


# ---- Ray -------------------------------------------------------------------------------------------------------------

# Ray creates a process group before the program begins, and `lockstep.init()` uses that one.
_RAY_PROGRAM = '''\
"""Written by `lockstep submit --ray`. Every node must see FOLDER."""

import os
import runpy
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER = {folder}
PROGRAM = {program}
STARTS = {starts}  # a worker that is lost: all are started again, and go on from the last checkpoint of their Run


def work() -> None:
    """On each worker."""
    os.chdir(FOLDER)
    if PROGRAM[0] == "-m":
        sys.argv[:] = PROGRAM[1:]
        sys.path.insert(0, FOLDER)
        runpy.run_module(PROGRAM[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = PROGRAM
        sys.path.insert(0, os.path.dirname(os.path.abspath(PROGRAM[0])))
        runpy.run_path(PROGRAM[0], run_name="__main__")


if __name__ == "__main__":
    TorchTrainer(
        work,
        scaling_config=ScalingConfig(
            num_workers={workers}, use_gpu={use_gpu}, resources_per_worker={resources}, placement_strategy="PACK"
        ),
        run_config=RunConfig(name={name}, failure_config=FailureConfig(max_failures=STARTS)),
    ).fit()
'''
STARTS = 3


def write_program(job: ClusterJob) -> str:
    """Returns a program for Ray Train's TorchTrainer, whose workers run the training program unchanged."""
    resources: dict[str, float] = {"CPU": job.cpus}
    if job.gpus:
        resources["GPU"] = job.gpus / job.workers
    return _RAY_PROGRAM.format(
        folder=repr(job.folder),
        program=repr(list(job.program)),
        starts=STARTS,
        workers=job.all_workers,
        use_gpu=job.gpus > 0,
        resources=repr(resources),
        name=repr(job.name),
    )
