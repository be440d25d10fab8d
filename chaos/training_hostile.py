"""Attacks the control port of a run while it trains, and measures whether its steps take longer.

One run (`lockstep run --hosts 1 --rendezvous`), so that there is a port. Rounds take turns: in one the door is left
alone, in the next 200 strangers sit idle at it while forged, replayed, spliced and malformed messages come in, 10,000
over all rounds (strangers.py). The run must end with the bits of an undisturbed one, nothing may be answered, and the
median of the step times under attack may be at most 5 % above that of the others.

    python chaos/training_hostile.py                       on two cores with one worker: the attacker needs one itself
    python chaos/training_hostile.py --workers 4           on more

Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import strangers
from lockstep.control.wire import VARIABLE

MESSAGES, IDLE, ROUNDS, ROUND_S = 10_000, 200, 10, 4.0
LIMIT = 1.05


def train(folder: Path | None, steps: int | None) -> None:
    """The workers run it: a line per step with its end, until told to stop."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import lockstep

    dice = torch.Generator().manual_seed(1)
    x, y = torch.randn(512, 64, generator=dice), torch.randint(10, (512,), generator=dice)
    data = torch.utils.data.TensorDataset(x, y)

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    with lockstep.Run(None, seed=3, progress=False) as run:
        layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        model = run.replicate(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batches = run.batches(data, global_batch_size=64, shards=8, epochs=None)
        ends = None if folder is None or run.world.rank else (folder / "steps").open("w")
        count = 0
        for batch in run.train(batches, optimizer, steps=steps):
            run.step(loss, batch)
            count += 1
            if ends is not None:
                ends.write(f"{time.monotonic()}\n")
                ends.flush()
            if folder is not None and (folder / "stop").exists():
                run.stop()
        if ends is not None or folder is None:
            print(json.dumps({"steps": count, "digest": run.digest()}), flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, workers: int, port: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lockstep", "run", "--hosts", "1", "-n", str(workers)]
    command += ["--rendezvous", f"127.0.0.1:{port}", "--log-dir", str(folder / "logs")]
    command += [__file__, "--train", str(folder)]
    with (folder / "output").open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)


def await_steps(folder: Path, count: int) -> None:
    end_s = time.monotonic() + 90.0
    while not (folder / "steps").exists() or len((folder / "steps").read_text().splitlines()) < count:
        if time.monotonic() > end_s:
            raise TimeoutError(f"the run does not train:\n{(folder / 'output').read_text()}")
        time.sleep(0.1)


def attack(port: int, messages: int, seed: int, env: dict[str, str]) -> tuple[float, float, dict[str, Any]]:
    """When it began and when it was over, and what the attacker saw."""
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0))
        command = [sys.executable, strangers.__file__, str(port), str(messages), "--seed", str(seed)]
        began_s = time.monotonic()
        done = subprocess.run([*command, "--over-s", str(ROUND_S)], stdout=subprocess.PIPE, env=env, timeout=120)
        return began_s, time.monotonic(), json.loads(done.stdout)


def step_times(folder: Path, spans: list[tuple[float, float]]) -> list[float]:
    """Of the steps that are within one of the spans."""
    ends = [float(line) for line in (folder / "steps").read_text().splitlines()]
    return [after - before for before, after in pairwise(ends) if any(a <= before and after <= b for a, b in spans)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--messages", type=int, default=MESSAGES, metavar="N", help=f"default {MESSAGES}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.train is not None or chosen.alone is not None:
        train(chosen.train, chosen.alone)
        return 0
    if min(chosen.workers, chosen.messages, chosen.rounds) < 1:
        parser.error("--workers, --messages and --rounds must be positive")
    env = dict(os.environ) | {VARIABLE: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="lockstep-hostile-") as name:
        return measure(Path(name), chosen, env)


def measure(folder: Path, chosen: argparse.Namespace, env: dict[str, str]) -> int:
    port, quiet, hostile, sent, wrong = free_port(), [], [], 0, list[str]()
    process = start(folder, chosen.workers, port, env)
    try:
        await_steps(folder, 50)
        for number in range(chosen.rounds):
            began_s = time.monotonic()
            time.sleep(ROUND_S)
            quiet.append((began_s, time.monotonic()))
            began_s, ended_s, told = attack(port, -(-chosen.messages // chosen.rounds), number, env)
            hostile.append((began_s, ended_s))
            sent, wrong = sent + told["sent"], wrong + told["wrong"]
            before, now = step_times(folder, quiet), step_times(folder, hostile)
            medians = [1e3 * statistics.median(times) for times in (before, now)]
            print(f"round {number + 1} of {chosen.rounds}: a step takes {medians[0]:.2f} ms, under attack "
                  f"{medians[1]:.2f} ms (x{medians[1] / medians[0]:.3f}); {sent} messages", flush=True)  # fmt: skip
        (folder / "stop").touch()
        status = process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    output = (folder / "output").read_text()
    found = json.loads(next(line for line in output.splitlines() if '"digest"' in line).partition("] ")[2])
    alone = [sys.executable, __file__, "--alone", str(found["steps"])]
    undisturbed = json.loads(subprocess.run(alone, stdout=subprocess.PIPE, check=True, env=env).stdout)
    ratio = statistics.median(step_times(folder, hostile)) / statistics.median(step_times(folder, quiet))
    same = found == undisturbed
    print(f"{sent} hostile messages and {IDLE} idle strangers over {found['steps']} steps of {chosen.workers} workers: "
          f"step time x{ratio:.3f} (may be {LIMIT}), status {status}, {'the same' if same else 'OTHER'} bits, "
          f"{len(wrong)} were answered")  # fmt: skip
    return 0 if same and status == 0 and not wrong and ratio <= LIMIT else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
