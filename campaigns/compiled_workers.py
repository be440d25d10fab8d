"""How long until compiled workers train: one, several at once, and the replacement of one that was killed.

    python campaigns/compiled_workers.py                              a small GPT on the CPU
    python campaigns/compiled_workers.py --device cuda --model gpt2   GPT-2 124M on a GPU
    python campaigns/compiled_workers.py --regional                   only the layers are compiled

One worker and then several start with empty folders of compiled code. Then workers are killed, one at a time. Prints
the seconds until each worker has finished its first step, from the start of the launcher or from the kill on, the
longest time without a step of any worker after a kill, and whether all workers end with the same digest.

Exit status: 0 if several workers were ready in at most 1.2 of the time of one, replacements trained within 2 s in the
median, and all workers ended with the same digest; 1 if not (figures are in docs/benchmarks.md); 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

READY_WITHIN, TRAINS_WITHIN_S = 1.2, 2.0
STEPS_BETWEEN = 20  # of the replacement, before the next kill
DEADLINE_S = 600.0
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch, lockstep
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from lockstep.bench.models import GPT2_124M, GPT_SMALL, GptModel

folder, device, name, compiled = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
shape, length = (GPT2_124M, 256) if name == "gpt2" else (GPT_SMALL, 64)
with torch.device(device):
    model = GptModel(shape)
tokens = torch.randint(shape.vocabulary, (256, length + 1), generator=torch.Generator().manual_seed(0))

def record(**facts):
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **facts}) + "\\n")

def loss(model, batch):
    logits = model(batch[0][:, :-1])
    targets = batch[0][:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"), len(targets)

precision = "bf16" if device == "cuda" else "fp32"
with lockstep.Run(seed=1, compile=compiled, precision=precision, device=device, progress=False) as run:
    model = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = run.batches(TensorDataset(tokens), global_batch_size=8, shards=4, epochs=1_000_000)
    for batch in run.train(batches, optimizer):
        run.step(loss, batch)
        if device == "cuda":
            torch.cuda.synchronize()
        record(step=batch.number)
        if (folder / "stop").exists():
            run.stop()
    record(digest=run.digest())
"""


class CompiledRun:
    """A run of PROGRAM under `lockstep run`, with a folder of compiled code of its own."""

    def __init__(self, folder: Path, workers: int, device: str, model: str, *, is_regional: bool) -> None:
        self._records, cache = folder / "records", folder / "compiled"
        self._records.mkdir(parents=True)
        (folder / "train.py").write_text(PROGRAM)
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--min", "1", "--log-dir", "logs"]
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        self.started_s = time.time()
        self._launcher = subprocess.Popen(
            [*command, "train.py", str(self._records), device, model, '"regional"' if is_regional else "true"],
            cwd=folder,
            env=dict(os.environ) | env,
            stdout=(folder / "output").open("wb"),
            stderr=subprocess.STDOUT,
        )
        self._output = folder / "output"

    def wait(self, done: Callable[[], Any], what: str) -> None:
        """Wait until `done()`. Raises RuntimeError if the run ends before, or if that takes too long."""
        end_s = time.monotonic() + DEADLINE_S
        while not done():
            if self._launcher.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"no {what}:\n{self._output.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)

    def rows(self, process: int) -> list[dict[str, Any]]:
        text = (self._records / f"{process}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> dict[int, list[float]]:
        """Return when each process has finished its steps."""
        processes = [int(path.stem) for path in self._records.glob("*.jsonl")]
        return {one: [row["time"] for row in self.rows(one) if "step" in row] for one in processes}

    def kill_one(self) -> tuple[float, float]:
        """Kill a worker. Returns the seconds until its replacement trained, and the longest time without a step."""
        before = {process: steps[-1] for process, steps in self.steps().items() if steps}
        victim, killed_s = max(before, key=lambda process: before[process]), time.time()
        os.kill(victim, signal.SIGKILL)
        self.wait(lambda: [one for one, steps in self.steps().items() if steps and one not in before], "replacement")
        new = next(one for one, steps in self.steps().items() if steps and one not in before)
        self.wait(lambda: len(self.steps()[new]) >= STEPS_BETWEEN, "further steps")
        times = sorted(at for steps in self.steps().values() for at in steps if at > killed_s)
        return self.steps()[new][0] - killed_s, max(b - a for a, b in pairwise([killed_s, *times]))

    def end(self) -> list[str]:
        """Let the run stop, and return the digests of its workers. Raises RuntimeError if it fails."""
        (self._records / "stop").touch()
        if self._launcher.wait(120):
            raise RuntimeError(f"the run failed at its end:\n{self._output.read_text(errors='replace')[-4000:]}")
        processes = [int(path.stem) for path in self._records.glob("*.jsonl")]
        return [row["digest"] for one in processes for row in self.rows(one) if "digest" in row]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._launcher.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(30)
        self._launcher.kill()


def ready_s(run: CompiledRun, workers: int) -> float:
    """Wait until all workers train. Returns the seconds from the start of the launcher on."""
    run.wait(lambda: sum(len(steps) > 5 for steps in run.steps().values()) >= workers, "first steps")
    return max(steps[0] for steps in run.steps().values()) - run.started_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="how many start at once (default: 4)")
    parser.add_argument("--kills", type=int, default=3, help="how many are killed, one after the other (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("small", "gpt2"), default="small")
    parser.add_argument("--regional", action="store_true", help='compile="regional" instead of compile=True')
    chosen = parser.parse_args(arguments)
    if chosen.workers < 2 or chosen.kills < 1:
        parser.error("--workers must be at least 2, and --kills at least 1")
    with tempfile.TemporaryDirectory(prefix="lockstep-compiled-") as folder:
        ready = {}
        for workers in (1, chosen.workers):
            print(f"{workers} worker{'s' * (workers > 1)}, nothing compiled before ...", flush=True)
            place = Path(folder) / str(workers)
            run = CompiledRun(place, workers, chosen.device, chosen.model, is_regional=chosen.regional)
            try:
                ready[workers] = ready_s(run, workers)
                print(f"  all train after {ready[workers]:.1f} s", flush=True)
                kills = []
                for _ in range(chosen.kills if workers > 1 else 0):
                    kills.append(run.kill_one())
                    print(f"  killed: its replacement trains after {kills[-1][0]:.2f} s, "
                          f"no worker took a step for {kills[-1][1]:.2f} s", flush=True)  # fmt: skip
                digests = run.end()
            finally:
                run.kill()
            if len(digests) != workers or len(set(digests)) != 1:
                print(f"  {len(digests)} of {workers} workers ended, with {len(set(digests))} different digests")
                return 1
    ratio, replaced_s = ready[chosen.workers] / ready[1], statistics.median(took for took, _ in kills)
    print(f"{chosen.workers} workers are ready in {ratio:.2f} of the time of one (asked: {READY_WITHIN})")
    print(f"a replacement trains after {replaced_s:.2f} s in the median (asked: {TRAINS_WITHIN_S})")
    return 0 if ratio <= READY_WITHIN and replaced_s < TRAINS_WITHIN_S else 1


if __name__ == "__main__":
    sys.exit(main())
