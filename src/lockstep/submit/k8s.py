"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer, or a PyTorchJob of the older training operator.

Both operators set the number of the node and the address of the first node in each pod; torchrun then starts the
workers of a node. With --min or --max `lockstep run` does that, whose supervisors share a secret that must exist in the
namespace. `$(NAME)` in a command is replaced by Kubernetes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from lockstep.control.secret import VARIABLE
from lockstep.submit.job import ClusterJob
from lockstep.submit.yaml import write_yaml

RUNTIME: Final = "torch-distributed"  # a ClusterTrainingRuntime that Kubeflow Trainer provides
MEET_PORT: Final = 29401  # not that of torchrun
BACKOFF_LIMIT: Final = 10
SECRET_KEY: Final = "secret"
GPU: Final = "nvidia.com/gpu"


class JobKind(Enum):
    TRAIN_JOB = "TrainJob"
    PYTORCH_JOB = "PyTorchJob"


def write_manifest(job: ClusterJob, kind: JobKind) -> str:
    manifest = train_job(job) if kind is JobKind.TRAIN_JOB else pytorch_job(job)
    lines = ["Written by `lockstep submit --k8s`. The program is looked for from the image's working folder."]
    if needs_secret(job):
        lines.append(f"Needs a secret, made once: {make_secret(job)}")
    return "".join(f"# {line}\n" for line in lines) + write_yaml(manifest)


def needs_secret(job: ClusterJob) -> bool:
    return job.elastic is not None and job.nodes > 1


def secret_name(job: ClusterJob) -> str:
    return f"{job.name}-secret"


def make_secret(job: ClusterJob) -> str:
    """Returns the shell command. It reads the secret from standard input: `ps` would show it on a command line."""
    return (
        "openssl rand -hex 32 | tr -d '\\n' | "
        f"kubectl create secret generic {secret_name(job)} --from-file={SECRET_KEY}=/dev/stdin"
    )


def train_job(job: ClusterJob) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "image": job.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.workers,
        "command": _command(job, torchrun=[], first="$(PET_MASTER_ADDR)"),
        "env": _env(job),
        "resourcesPerNode": _resources(job),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    if job.limit_s is not None:
        spec["activeDeadlineSeconds"] = job.limit_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": JobKind.TRAIN_JOB.value,
        "metadata": {"name": job.name},
        "spec": spec,
    }


def pytorch_job(job: ClusterJob) -> dict[str, Any]:
    """The manifest of a PyTorchJob. The master is the first node; RANK is the number of the pod, not of a worker."""
    torchrun = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.workers}", "--node-rank=$(RANK)"]
    torchrun += ["--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
    # On the first node itself the operator sets MASTER_ADDR to `localhost`; the master's service works on all nodes.
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": _command(job, torchrun=torchrun, first=f"{job.name}-master-0"),
        "env": _env(job),
        "resources": _resources(job),
    }
    replicas = {"Master": 1} | ({"Worker": job.nodes - 1} if job.nodes > 1 else {})
    policy = {"cleanPodPolicy": "None", "backoffLimit": BACKOFF_LIMIT}
    if job.limit_s is not None:
        policy["activeDeadlineSeconds"] = job.limit_s
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": JobKind.PYTORCH_JOB.value,
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.workers),
            "runPolicy": policy,
            "pytorchReplicaSpecs": {
                role: {
                    "replicas": number,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": {"containers": [container]}},
                }
                for role, number in replicas.items()
            },
        },
    }


def _command(job: ClusterJob, *, torchrun: list[str], first: str) -> list[str]:
    program = [word.replace("$(", "$$(") for word in job.program]
    if job.elastic is None:
        return [job.python, "-m", "torch.distributed.run", *torchrun, *program]
    meet = ["--hosts", str(job.nodes), "--rendezvous", f"{first}:{MEET_PORT}"] if job.nodes > 1 else []
    return [job.python, "-m", "lockstep", "run", *job.run_options, *meet, *program]


def _env(job: ClusterJob) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": "OMP_NUM_THREADS", "value": str(job.cpus)}]
    if needs_secret(job):
        source = {"secretKeyRef": {"name": secret_name(job), "key": SECRET_KEY}}
        env.append({"name": VARIABLE, "valueFrom": source})
    return env


def _resources(job: ClusterJob) -> dict[str, Any]:
    limits = {GPU: str(job.gpus)} if job.gpus else {}
    return {"requests": {"cpu": str(job.cpus * job.workers)} | limits} | ({"limits": limits} if limits else {})
