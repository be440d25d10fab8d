"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer, or a PyTorchJob of the older training operator.

Both operators tell each pod which node it is and where the first one is; torchrun then starts the workers of a node.
With --min or --max that is done by `lockstep run`, whose supervisors share a secret that must be in the namespace
already. `$(NAME)` in a command is replaced by Kubernetes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from lockstep.control.secret import VARIABLE
from lockstep.submit.job import Order
from lockstep.submit.yaml import write_yaml

RUNTIME: Final = "torch-distributed"  # the ClusterTrainingRuntime that Kubeflow Trainer comes with
MEET_PORT: Final = 29401  # not that of torchrun
BACKOFF_LIMIT: Final = 10
SECRET_KEY: Final = "secret"
GPU: Final = "nvidia.com/gpu"


class Kind(Enum):
    TRAIN_JOB = "TrainJob"
    PYTORCH_JOB = "PyTorchJob"


def write_manifest(order: Order, kind: Kind) -> str:
    manifest = train_job(order) if kind is Kind.TRAIN_JOB else pytorch_job(order)
    lines = ["Written by `lockstep submit --k8s`. The program is looked for from the image's working folder."]
    if needs_secret(order):
        lines.append(f"Needs a secret, made once: {make_secret(order)}")
    return "".join(f"# {line}\n" for line in lines) + write_yaml(manifest)


def needs_secret(order: Order) -> bool:
    return order.elastic is not None and order.nodes > 1


def secret_name(order: Order) -> str:
    return f"{order.name}-secret"


def make_secret(order: Order) -> str:
    """The command. The secret comes from standard input: `ps` would show it on a command line."""
    return (
        "openssl rand -hex 32 | tr -d '\\n' | "
        f"kubectl create secret generic {secret_name(order)} --from-file={SECRET_KEY}=/dev/stdin"
    )


def train_job(order: Order) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "image": order.image,
        "numNodes": order.nodes,
        "numProcPerNode": order.workers,
        "command": _command(order, torchrun=[], first="$(PET_MASTER_ADDR)"),
        "env": _env(order),
        "resourcesPerNode": _resources(order),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    if order.limit_s is not None:
        spec["activeDeadlineSeconds"] = order.limit_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": Kind.TRAIN_JOB.value,
        "metadata": {"name": order.name},
        "spec": spec,
    }


def pytorch_job(order: Order) -> dict[str, Any]:
    """The master is the first node. In this operator RANK is the number of the pod, not of a worker."""
    torchrun = [f"--nnodes={order.nodes}", f"--nproc-per-node={order.workers}", "--node-rank=$(RANK)"]
    torchrun += ["--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
    # On the first node itself the operator calls the master `localhost`; its service leads there from everywhere.
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": order.image,
        "command": _command(order, torchrun=torchrun, first=f"{order.name}-master-0"),
        "env": _env(order),
        "resources": _resources(order),
    }
    replicas = {"Master": 1} | ({"Worker": order.nodes - 1} if order.nodes > 1 else {})
    policy = {"cleanPodPolicy": "None", "backoffLimit": BACKOFF_LIMIT}
    if order.limit_s is not None:
        policy["activeDeadlineSeconds"] = order.limit_s
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": Kind.PYTORCH_JOB.value,
        "metadata": {"name": order.name},
        "spec": {
            "nprocPerNode": str(order.workers),
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


def _command(order: Order, *, torchrun: list[str], first: str) -> list[str]:
    program = [word.replace("$(", "$$(") for word in order.program]
    if order.elastic is None:
        return [order.python, "-m", "torch.distributed.run", *torchrun, *program]
    meet = ["--hosts", str(order.nodes), "--rendezvous", f"{first}:{MEET_PORT}"] if order.nodes > 1 else []
    return [order.python, "-m", "lockstep", "run", *order.run_options, *meet, *program]


def _env(order: Order) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": "OMP_NUM_THREADS", "value": str(order.cpus)}]
    if needs_secret(order):
        source = {"secretKeyRef": {"name": secret_name(order), "key": SECRET_KEY}}
        env.append({"name": VARIABLE, "valueFrom": source})
    return env


def _resources(order: Order) -> dict[str, Any]:
    limits = {GPU: str(order.gpus)} if order.gpus else {}
    return {"requests": {"cpu": str(order.cpus * order.workers)} | limits} | ({"limits": limits} if limits else {})
