"""Workers that share a GPU are killed, and the others continue in the same processes: over shm, and over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROGRAM = """
import os, sys, time, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset
from lockstep.comm.abortable_group import share_gpu_over_nccl

share_gpu_over_nccl(os.getpid())

def loss(model, batch):
    x, y = batch
    time.sleep(0.002)
    return F.mse_loss(model(x), y, reduction="sum"), len(x)

g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(224, 16, generator=g), torch.randn(224, 4, generator=g))
with lockstep.Run(sys.argv[1], seed=1, device="cuda:0", backend=sys.argv[2], save_every=7, progress=False) as run:
    layers = nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 4)
    model = run.replicate(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in run.train(run.batches(data, global_batch_size=32, shards=8, epochs=10), optimizer):
        run.step(loss, batch)
    print("digest", run.digest(), flush=True)
"""


def digests(folder: Path, workers: int, faults: list[dict[str, object]], backend: str) -> set[str]:
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    command = ["-m", "lockstep", "run", "-n", str(workers), "--min", "1", "--log-dir", str(folder / "logs")]
    done = subprocess.run(
        [sys.executable, *command, "program.py", "run", backend],
        cwd=folder,
        env=os.environ | {"LOCKSTEP_FAULTS": json.dumps(faults)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.split()[-1] for line in done.stdout.splitlines() if "digest" in line}


@pytest.mark.parametrize("backend", ["shm", "nccl"])
def test_a_killed_worker_changes_no_bit(tmp_path: Path, backend: str) -> None:
    alone = digests(tmp_path / "alone", 1, [], "shm")
    faults: list[dict[str, object]] = [
        {"at": "backward", "step": 5, "worker": "h0.1"},
        {"at": "optimizer", "step": 20, "worker": "h0.0"},
        {"at": "waiting", "step": 40, "worker": "h0.2"},
    ]
    assert digests(tmp_path / "killed", 3, faults, backend) == alone
    assert len(alone) == 1
    lost = [line for line in (tmp_path / "killed/logs/events.jsonl").read_text().splitlines() if '"lost"' in line]
    assert len(lost) >= 2
