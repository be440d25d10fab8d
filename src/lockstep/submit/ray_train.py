"""Writes a program for Ray: Ray Train's TorchTrainer starts workers that run the training program unchanged.

Ray creates a process group before the program begins, and `lockstep.init()` uses that one.
"""

from __future__ import annotations

from lockstep.submit.job import ClusterJob

_PROGRAM = '''\
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
    resources: dict[str, float] = {"CPU": job.cpus}
    if job.gpus:
        resources["GPU"] = job.gpus / job.workers
    return _PROGRAM.format(
        folder=repr(job.folder),
        program=repr(list(job.program)),
        starts=STARTS,
        workers=job.all_workers,
        use_gpu=job.gpus > 0,
        resources=repr(resources),
        name=repr(job.name),
    )
