"""On a GPU times are those of its streams: the host only says what is to be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROGRAM = """
import sys, time, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

planted = sys.argv[2]

def loss(model, batch):
    x, y = batch
    if planted == "slow worker" and run.world.rank == 1:
        torch.cuda._sleep(20_000_000)  # about 10 ms of the GPU, and nothing of the host
    return F.mse_loss(model(x), y, reduction="sum"), len(x)

g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(4096, 256, generator=g), torch.randn(4096, 4, generator=g))
with lockstep.Run(sys.argv[1], seed=1, device="cuda", progress=False) as run:
    layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4)
    model = run.replicate(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for batch in run.train(run.batches(data, global_batch_size=64, shards=2, epochs=4), optimizer):
        run.step(loss, batch)
    print("noise", run.noise_scale)
"""


def trace_of(folder: Path, planted: str) -> dict[str, list[dict[str, Any]]]:
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "2", "--log-dir", "logs", "program.py", "run", planted],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((folder / "run" / "trace").glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["kind"], []).append(line | {"rank": path.name.split("-")[1]})
    return found


def sums(lines: list[dict[str, Any]], rank: str) -> dict[str, float]:
    mine = [line["phases"] for line in lines if line["rank"] == rank]
    return {name: sum(phases[name] for phases in mine) for name in mine[0]}


def test_times_of_the_gpu_add_up(tmp_path: Path) -> None:
    found = trace_of(tmp_path, "nothing")
    for line in found["steps"]:
        whole_s = line["t1"] - line["t0"]
        assert sum(line["phases"].values()) == pytest.approx(whole_s, rel=1e-3, abs=1e-3) or line["count"] < 9
        assert line["peak"] > 0
    assert found["noise"][-1]["scale"] is None or found["noise"][-1]["scale"] > 0
    spans = next(one for one in found["spans"] if one["step"] == 5 and one["rank"] == "rank0")["spans"]
    assert [name for name, *_ in spans][:4] == ["data", "between", "forward 0", "backward 0"]
    assert all(took_us >= 0 for _, _, _, took_us in spans)


def test_a_worker_whose_gpu_is_slow_is_waited_for(tmp_path: Path) -> None:
    found = trace_of(tmp_path, "slow worker")
    fast, slow = sums(found["steps"], "rank0"), sums(found["steps"], "rank1")
    assert max(slow, key=slow.__getitem__) == "forward", slow  # the host may be busy with other things, too
    waited = {rank for line in found["steps"] if line["rank"] == "rank0" for rank in line["waited_for"]}
    assert "1" in waited
    assert fast["waiting"] > slow["waiting"], (fast, slow)
