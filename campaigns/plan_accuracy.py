"""How good are the predictions of `lockstep plan`? Predicts configurations, and measures them later.

    python campaigns/plan_accuracy.py predict          measures programs and links, and writes predictions
    git commit ...                                     so that nobody can change them afterwards
    python campaigns/plan_accuracy.py measure          measures all of them, and compares
    python campaigns/plan_accuracy.py show             compares what was measured

The configurations are drawn at random, from a fixed seed, out of all combinations of program, workers, hosts, links,
batch size, shards, kinds of sums and sharded optimisers. Several hosts are network namespaces of this machine (needs
root); their workers share its cores. On a GPU (--device cuda) all workers share it. The speed of these machines changes
from minute to minute, so that one worker is measured before and after each configuration, and predictions are
multiplied by what it takes now over what it took when the program was profiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plan_programs import MODELS

from lockstep.doctor.links import measure_sums
from lockstep.errors import LockstepError
from lockstep.plan.check import measure_beside, program_run, slowdown
from lockstep.plan.links import Link
from lockstep.plan.measure import Wanted, measure_program, probe
from lockstep.plan.memory import fit_memory
from lockstep.plan.profile import MeasuredSums, ProgramProfile, parse_links
from lockstep.plan.program_runs import ProgramRun, run_on_virtual_hosts
from lockstep.plan.step_time import Configuration, StepModel

DATA = Path(__file__).parent / "plan_accuracy_data"
PROGRAM = str(Path(__file__).parent / "plan_programs.py")
TIMEOUT_S = 400.0
CORES = len(os.sched_getaffinity(0))
ON_GPU = ("transformer", "convnet")
ON_CPU = ("mlp", "wide", "cnn", "language", "recurrent")


@dataclass(frozen=True)
class Drawn:
    """A configuration of a program."""

    program: str
    hosts: int
    workers: int  # on each host
    mbit: int
    backend: str
    global_batch_size: int
    shards: int
    grad_comm: str
    shard_optimizer: bool

    def configuration(self, device: str) -> Configuration:
        link = Link(f"{self.mbit} Mbit/s", 50e-6, self.mbit * 1e6 / 8, "measured") if self.hosts > 1 else None
        return Configuration(
            hosts=self.hosts,
            workers_per_host=self.workers,
            slots=max(1, CORES // self.hosts) if device == "cpu" else 1,
            global_batch_size=self.global_batch_size,
            shards=self.shards,
            backend=self.backend,
            link=link,
            grad_comm=self.grad_comm,
            shard_optimizer=self.shard_optimizer,
        )

    @staticmethod
    def from_row(row: dict[str, Any]) -> Drawn:
        return Drawn(**{one.name: row[one.name] for one in fields(Drawn)})

    @property
    def name(self) -> str:
        return f"{self.program}: {self.configuration('cpu').name()}"


def draw(seed: int, count: int, device: str) -> list[Drawn]:
    """Draw configurations without repetition, each kind of layout about equally often."""
    rng = random.Random(seed)
    layouts = [(1, 1, 0), (1, 2, 0), (1, 3, 0), (1, 4, 0)]
    if device == "cpu":
        layouts += [(2, workers, mbit) for workers in (1, 2) for mbit in (100, 1000, 10000)]
    programs = ON_CPU if device == "cpu" else ON_GPU
    found: list[Drawn] = []
    while len(found) < count:
        hosts, workers, mbit = layouts[len(found) % len(layouts)]
        program, size = rng.choice(programs), hosts * workers
        batch = int(MODELS[program].global_batch_size * rng.choice([0.5, 1, 2]))
        backend = "hierarchy" if hosts > 1 else rng.choice(["shm", "gloo"]) if device == "cpu" else "shm"
        comm = rng.choice(["fp32", "fp32", "int8", "int4"]) if size > 1 else "fp32"
        shards = rng.choice([size, size, size * 2, size * 4])
        one = Drawn(program, hosts, workers, mbit, backend, batch, shards, comm, size > 1 and rng.random() < 0.25)
        if one not in found:
            found.append(one)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_all_sums(device: str) -> list[MeasuredSums]:
    """Measure sums between all workers that the configurations have."""
    found: list[MeasuredSums] = []
    for backend in ("shm", "gloo") if device == "cpu" else ("shm",):
        say(f"sums over {backend}")
        found += parse_links(measure_sums([2, 3, 4], backend=backend))
    for mbit in (100, 1000, 10000) if device == "cpu" else ():
        for workers in (1, 2):
            say(f"sums between 2 hosts of {workers} at {mbit} Mbit/s")
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "links.json"
                how = ProgramRun(1, workers=workers, hosts=2, mbit=mbit)
                run_on_virtual_hosts(
                    how, ["-m", "lockstep.bench.links", str(path)], Path(folder), os.environ, TIMEOUT_S
                )
                found += [replace(one, mbit=mbit) for one in parse_links(json.loads(path.read_text()))]
    return found


def profile_of(name: str, sums: list[MeasuredSums], folder: Path) -> ProgramProfile:
    wanted = Wanted(steps=24, timeout_s=TIMEOUT_S, sums=False, sharded=True)
    return replace(measure_program([PROGRAM, name], wanted, folder, sums, say), program=name)


def predict(device: str, seed: int, count: int) -> None:
    drawn = draw(seed, count, device)
    sums, profiles = measure_all_sums(device), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted({one.program for one in drawn}):
            profiles[name] = profile_of(name, sums, Path(folder) / name)
    write_predictions(device, seed, drawn, profiles)


def write_predictions(device: str, seed: int, drawn: list[Drawn], profiles: dict[str, ProgramProfile]) -> None:
    rows, sums = list[dict[str, Any]](), next(iter(profiles.values())).sums
    for one in drawn:
        profile = profiles[one.program]
        step = StepModel(profile).predict(one.configuration(device))
        memory = fit_memory(profile.probes).predict(one.configuration(device))
        rows.append({**asdict(one), "step": asdict(step), "memory_bytes": memory.total_bytes})
    record = {
        "device": device,
        "seed": seed,
        "rows": rows,
        "profiles": {name: replace(profile, sums=()).to_json() for name, profile in profiles.items()},
        "sums": [asdict(one) for one in sums],
    }
    DATA.mkdir(exist_ok=True)
    path = DATA / f"predictions-{device}.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    say(f"{path}: {len(rows)} predictions; commit it before you measure")


def measure(device: str, limit_s: float) -> int:
    record = json.loads((DATA / f"predictions-{device}.json").read_text())
    profiles = {name: ProgramProfile.from_json(found) for name, found in record["profiles"].items()}
    path, done, speeds = DATA / f"measured-{device}.json", list[dict[str, Any]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(record["rows"]):
            one = Drawn.from_row(row)
            steps = max(10, min(40, int(limit_s / row["step"]["mid_s"])))
            how = program_run(one.configuration(device), max(steps, 40) if device == "cuda" else steps, one.mbit)
            base, place, program = profiles[one.program].base, Path(folder) / str(number), [PROGRAM, one.program]
            try:
                if device == "cuda":  # its speed does not change within minutes
                    if one.program not in speeds:
                        speeds[one.program] = slowdown(program, base, place / "before", TIMEOUT_S)
                    found, speed = probe(how, program, place / "run", TIMEOUT_S), speeds[one.program]
                else:
                    found, speed = measure_beside(how, program, base, place, TIMEOUT_S)
            except LockstepError as error:
                say(f"{one.name}: {error}")
                continue
            done.append(
                {"name": one.name, "measured_s": found.step_s, "speed": speed, "peak": found.memory_bytes["peak"]}
            )
            took = f"{1e3 * found.step_s:.1f} ms, predicted {1e3 * row['step']['mid_s']:.1f}"
            say(f"{number + 1}: {one.name}: {took}, one worker x {speed:.2f}")
            path.write_text(json.dumps(done, indent=1) + "\n")
    return show(device)


def show(device: str) -> int:
    record = json.loads((DATA / f"predictions-{device}.json").read_text())
    measured = {one["name"]: one for one in json.loads((DATA / f"measured-{device}.json").read_text())}
    errors, inside, memory = list[float](), list[bool](), list[float]()
    for row in record["rows"]:
        one = Drawn.from_row(row)
        if one.name not in measured:
            continue
        found, step = measured[one.name], row["step"]
        speed, took_s = found["speed"], found["measured_s"]
        errors.append(step["mid_s"] * speed / took_s - 1)
        inside.append(step["low_s"] * speed <= took_s <= step["high_s"] * speed)
        memory.append(row["memory_bytes"] / found["peak"] - 1 if found["peak"] else math.nan)
        print(
            f"{one.name:75} {1e3 * step['mid_s'] * speed:8.1f} [{1e3 * step['low_s'] * speed:8.1f}, "
            f"{1e3 * step['high_s'] * speed:8.1f}] {1e3 * took_s:8.1f} {errors[-1]:+7.1%} "
            f"{'' if inside[-1] else 'outside':8} memory {memory[-1]:+6.1%}"
        )
    size = sorted(map(abs, errors))
    within = sum(abs(one) <= 0.08 for one in memory) / len(memory)
    print(
        f"{len(errors)} of {len(record['rows'])} measured; error: median {statistics.median(size):.1%}, 90th percentile "
        f"{size[min(len(size) - 1, math.ceil(0.9 * len(size)) - 1)]:.1%}; inside the 90 % interval "
        f"{sum(inside) / len(inside):.0%}; peak memory within 8 %: {within:.0%}"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "show"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--count", type=int, default=47, help="of configurations (default: 47)")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a configuration is measured")
    chosen = parser.parse_args()
    if chosen.what == "predict":
        predict(chosen.device, chosen.seed, chosen.count)
        return 0
    return measure(chosen.device, chosen.seconds) if chosen.what == "measure" else show(chosen.device)


if __name__ == "__main__":
    sys.exit(main())
