"""How good are the predictions of `lockstep plan`? Predicts configurations, and measures them later.

    python campaigns/plan_accuracy.py predict          measures programs and links, and writes predictions
    git commit ...                                     so that they cannot be changed afterwards
    python campaigns/plan_accuracy.py measure          measures those that are not measured yet, and compares
    python campaigns/plan_accuracy.py show             compares what was measured
    python campaigns/plan_accuracy.py fit --device cuda   trains with less memory than predicted, and with a little more

The configurations are drawn at random, from a fixed seed, out of all combinations of program, workers, hosts, links,
batch size, shards, kinds of sums and sharded optimisers. Several hosts are network namespaces of this machine (needs
root); their workers share its cores. On a GPU (--device cuda) all workers share it. The speed of a machine that is
shared with others changes from minute to minute: with --beside a run of the profile is measured before and after each
configuration (one worker, or two for several workers), and predictions are multiplied by what it takes now over what it
took then.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plan_programs import MODELS

from lockstep.doctor.links import measure_sums
from lockstep.errors import LockstepError
from lockstep.plan.check import program_run, reference_run, slowdown
from lockstep.plan.configuration import Configuration
from lockstep.plan.links import Link
from lockstep.plan.measure import Wanted, measure_program, probe
from lockstep.plan.memory import fit_memory
from lockstep.plan.profile import MeasuredSums, ProgramProfile, SumPoint, parse_links
from lockstep.plan.program_runs import ProgramRun, run_on_virtual_hosts
from lockstep.plan.step_time import StepModel

DATA = Path(__file__).parent / "plan_accuracy_data"
PROGRAM = str(Path(__file__).parent / "plan_programs.py")
TIMEOUT_S = 400.0
CORES = len(os.sched_getaffinity(0))
TOO_LITTLE, ENOUGH = 0.9, 1.15  # of the memory that is predicted; an allocator cannot use all of its memory
FIT_STEPS = 12  # graphs are captured in the fifth
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
            hosts_are_virtual=self.hosts > 1,
        )

    @staticmethod
    def from_row(row: dict[str, Any]) -> Drawn:
        return Drawn(**{one.name: row[one.name] for one in fields(Drawn)})

    @property
    def name(self) -> str:
        return f"{self.program}: {self.configuration('cpu').name()}"


def draw(seed: int, count: int, device: str, programs: Sequence[str] = ()) -> list[Drawn]:
    """Draw configurations without repetition, each kind of layout about equally often; `programs`: of these only."""
    rng = random.Random(seed)
    layouts = [(1, 1, 0), (1, 2, 0), (1, 3, 0), (1, 4, 0)]
    if device == "cpu":
        layouts += [(2, workers, mbit) for workers in (1, 2) for mbit in (100, 1000, 10000)]
    programs = programs or (ON_CPU if device == "cpu" else ON_GPU)
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


def measure_all_sums(drawn: list[Drawn]) -> list[MeasuredSums]:
    """Measure sums between all workers that the configurations have, and between the two of every profile."""
    found: list[MeasuredSums] = []
    counts: dict[str, set[int]] = {"shm": {2}}
    for one in drawn:
        if one.hosts == 1 and one.workers > 1:
            counts.setdefault(one.backend, set()).add(one.workers)
    for backend, numbers in counts.items():
        say(f"sums over {backend}")
        found += parse_links(measure_sums(sorted(numbers), backend=backend))
    for mbit, workers in sorted({(one.mbit, one.workers) for one in drawn if one.hosts > 1}):
        say(f"sums between 2 hosts of {workers} at {mbit} Mbit/s")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "links.json"
            how = ProgramRun(1, workers=workers, hosts=2, mbit=mbit)
            run_on_virtual_hosts(how, ["-m", "lockstep.bench.links", str(path)], Path(folder), os.environ, TIMEOUT_S)
            found += [replace(one, mbit=mbit) for one in parse_links(json.loads(path.read_text()))]
    return found


def profile_of(name: str, sums: list[MeasuredSums], folder: Path) -> ProgramProfile:
    wanted = Wanted(steps=24, timeout_s=TIMEOUT_S, sums=False, sharded=True)
    return replace(measure_program([PROGRAM, name], wanted, folder, sums, say), program=name)


def predict(device: str, data: Path, drawn: list[Drawn]) -> None:
    sums, profiles = measure_all_sums(drawn), dict[str, ProgramProfile]()
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted({one.program for one in drawn}):
            profiles[name] = profile_of(name, sums, Path(folder) / name)
    write_predictions(device, data, drawn, profiles)


def read_profiles(path: Path) -> dict[str, ProgramProfile]:
    """The profiles of an earlier file of predictions, with its sums."""
    record = json.loads(path.read_text())
    sums = tuple(
        MeasuredSums(**{**one, "points": tuple(SumPoint(**p) for p in one["points"])}) for one in record["sums"]
    )
    return {name: replace(ProgramProfile.from_json(found), sums=sums) for name, found in record["profiles"].items()}


def write_predictions(device: str, data: Path, drawn: list[Drawn], profiles: dict[str, ProgramProfile]) -> None:
    rows, sums = list[dict[str, Any]](), next(iter(profiles.values())).sums
    for one in drawn:
        profile = profiles[one.program]
        step = StepModel(profile).predict(one.configuration(device))
        memory = fit_memory(profile.probes).predict(one.configuration(device))
        rows.append({**asdict(one), "step": asdict(step), "memory_bytes": memory.total_bytes})
    record = {
        "device": device,
        "rows": rows,
        "profiles": {name: replace(profile, sums=()).to_json() for name, profile in profiles.items()},
        "sums": [asdict(one) for one in sums],
    }
    data.mkdir(exist_ok=True)
    path = data / f"predictions-{device}.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    (data / f"measured-{device}.json").unlink(missing_ok=True)  # of other predictions
    say(f"{path}: {len(rows)} predictions; commit it before you measure")


def measure(device: str, data: Path, limit_s: float, *, beside: bool) -> int:
    record = json.loads((data / f"predictions-{device}.json").read_text())
    path = data / f"measured-{device}.json"
    done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    known = {one["name"] for one in done}
    models = {name: StepModel(ProgramProfile.from_json(found)) for name, found in record["profiles"].items()}
    rows = [row for row in record["rows"] if Drawn.from_row(row).name not in known]
    rows.sort(key=lambda row: (row["program"], row["hosts"] * row["workers"] > 1))
    last, before = None, 1.0
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            one = Drawn.from_row(row)
            config, program = one.configuration(device), [PROGRAM, one.program]
            steps = max(10, min(40, int(limit_s / row["step"]["mid_s"])))
            how = program_run(config, max(steps, 40) if device == "cuda" else steps, one.mbit)
            reference = reference_run(models[one.program], config)
            slower = 1.0
            try:
                if beside and reference is not last:
                    last, before = reference, slowdown(program, reference, Path(folder) / f"before{number}", TIMEOUT_S)
                found = probe(how, program, Path(folder) / str(number), TIMEOUT_S)
                if beside:
                    after = slowdown(program, reference, Path(folder) / f"after{number}", TIMEOUT_S)
                    slower, before = math.sqrt(before * after), after
            except LockstepError as error:
                say(f"{one.name}: {error}")
                last = None
                continue
            peak = found.memory_bytes["peak"]
            done.append({"name": one.name, "measured_s": found.step_s, "slowdown": slower, "peak": peak})
            took = f"{1e3 * found.step_s:.1f} ms, predicted {1e3 * row['step']['mid_s']:.1f} x {slower:.2f}"
            say(f"{number + 1}: {one.name}: {took}")
            path.write_text(json.dumps(done, indent=1) + "\n")
    return show(device, data)


def measure_fits(data: Path, seed: int, count: int) -> int:
    """Train with limited memory of a GPU, and compare whether it fits with what is predicted.

    Two of three configurations may use TOO_LITTLE of the memory that is predicted to be needed, one may use ENOUGH.
    """
    record = json.loads((data / "predictions-cuda.json").read_text())
    profiles = {name: ProgramProfile.from_json(found) for name, found in record["profiles"].items()}
    path, done = data / "fits-cuda.json", list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(draw(seed, count, "cuda")):
            config = one.configuration("cuda")
            memory = fit_memory(profiles[one.program].probes).predict(config)
            limit_mib = (ENOUGH if number % 3 == 2 else TOO_LITTLE) * memory.needed_bytes / 2**20
            program = [PROGRAM, one.program, "--memory-mib", f"{limit_mib:.0f}"]
            try:
                probe(program_run(config, FIT_STEPS, 0), program, Path(folder) / str(number), TIMEOUT_S)
                has_run = True
            except LockstepError as error:
                if "out of memory" not in str(error):
                    raise
                has_run = False
            predicted = number % 3 == 2
            done.append({"name": one.name, "limit_mib": limit_mib, "predicted_to_fit": predicted, "fits": has_run})
            outcome = f"{'fits' if has_run else 'does not fit'}, {'as' if has_run is predicted else 'NOT as'} predicted"
            say(f"{number + 1}: {one.name}, {limit_mib:.0f} MiB: {outcome}")
            path.write_text(json.dumps(done, indent=1) + "\n")
    for predicted in (False, True):
        group = [one for one in done if one["predicted_to_fit"] is predicted]
        right = sum(one["fits"] is predicted for one in group)
        print(f"predicted to {'fit' if predicted else 'be too large'}: {right} of {len(group)} right")
    return int(any(one["fits"] != one["predicted_to_fit"] for one in done))


@dataclass(frozen=True)
class Compared:
    """A prediction beside the measurement."""

    drawn: Drawn
    low_s: float
    mid_s: float
    high_s: float
    took_s: float
    memory_error: float

    @property
    def error(self) -> float:
        return self.mid_s / self.took_s - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.took_s <= self.high_s

    def __str__(self) -> str:
        interval = (
            f"{1e3 * self.mid_s:8.1f} [{1e3 * self.low_s:8.1f}, {1e3 * self.high_s:8.1f}] {1e3 * self.took_s:8.1f}"
        )
        outside = "" if self.is_inside else "outside"
        return f"{self.drawn.name:75} {interval} {self.error:+7.1%} {outside:8} memory {self.memory_error:+6.1%}"


def compare(device: str, data: Path) -> list[Compared]:
    record = json.loads((data / f"predictions-{device}.json").read_text())
    measured = {one["name"]: one for one in json.loads((data / f"measured-{device}.json").read_text())}
    found = []
    for row in record["rows"]:
        one, step = Drawn.from_row(row), row["step"]
        if (result := measured.get(one.name)) is not None:
            times = [step[name] * result.get("slowdown", 1.0) for name in ("low_s", "mid_s", "high_s")]
            memory = row["memory_bytes"] / result["peak"] - 1 if result["peak"] else math.nan
            found.append(Compared(one, *times, result["measured_s"], memory))
    return found


def choice_errors(found: list[Compared]) -> list[float]:
    """For each program and batch size: how much longer the configuration takes that is predicted to be the fastest."""
    groups: dict[tuple[str, int], list[Compared]] = {}
    for one in found:
        groups.setdefault((one.drawn.program, one.drawn.global_batch_size), []).append(one)
    return [
        min(group, key=lambda one: one.mid_s).took_s / min(one.took_s for one in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]


def show(device: str, data: Path) -> int:
    """Print all predictions beside their measurements. Returns 1 if they are worse than what was asked for."""
    found = compare(device, data)
    print("\n".join(map(str, found)))
    errors, choices = sorted(abs(one.error) for one in found), choice_errors(found)
    middle, most = statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1]
    inside = sum(one.is_inside for one in found) / len(found)
    memory = sum(abs(one.memory_error) <= 0.08 for one in found) / len(found)
    print(
        f"{len(found)} measured; error: median {middle:.1%}, 90th percentile {most:.1%}; inside the 90 % interval "
        f"{inside:.0%}; peak memory within 8 %: {memory:.0%}; the fastest of a program and batch as predicted "
        f"is within 5 % of the fastest in {sum(one <= 0.05 for one in choices)} of {len(choices)}"
    )
    return 0 if middle <= 0.06 and most <= 0.15 and 0.8 <= inside <= 0.98 and memory >= 0.9 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "show", "fit"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--count", type=int, default=47, help="of configurations (default: 47)")
    parser.add_argument("--programs", nargs="+", choices=(*ON_CPU, *ON_GPU), default=(), help="default: all")
    parser.add_argument("--data", type=Path, default=DATA, help="folder for predictions and measurements")
    parser.add_argument("--profiles", type=Path, help="predict from the measurements of an earlier file of predictions")
    parser.add_argument("--beside", action="store_true", help="measure a known run before and after each configuration")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a configuration is measured")
    chosen = parser.parse_args()
    if chosen.what == "predict":
        drawn = draw(chosen.seed, chosen.count, chosen.device, chosen.programs)
        if chosen.profiles is not None:
            write_predictions(chosen.device, chosen.data, drawn, read_profiles(chosen.profiles))
        else:
            predict(chosen.device, chosen.data, drawn)
        return 0
    if chosen.what == "measure":
        return measure(chosen.device, chosen.data, chosen.seconds, beside=chosen.beside)
    if chosen.what == "fit":
        return measure_fits(chosen.data, chosen.seed, chosen.count)
    return show(chosen.device, chosen.data)


if __name__ == "__main__":
    sys.exit(main())
