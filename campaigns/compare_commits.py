"""Speed of the drop-in and of collectives: this working tree beside an earlier commit, in one run.

    python campaigns/compare_commits.py c78b9c8                  three models: half an hour on two cores
    python campaigns/compare_commits.py HEAD --quick             one small model, few rounds
    python campaigns/compare_commits.py HEAD~5 --models gpt --sizes 4KiB,25MiB

The sources of the commit are unpacked under another package name, so that both versions are measured in interleaved
rounds, beside torch DDP: two runs one after the other differ by more on a machine that others use, too. The same code
may be some percent faster in one process than in another, so all workers are started anew several times; the medians of
these starts are what the table shows. The package and the backends of the commit are called `lockstep_before`,
`shm_before` and `hierarchy_before`.

Exit status: 0 if each median ratio of now over before is at most 1.02, or its 95 % interval reaches down to that; 1 if
not; 2 for wrong arguments. The table shows both; an interval tells how much the run can say.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from lockstep.bench import collectives, step
from lockstep.bench.collectives import Case, CommJob, Op, parse_size
from lockstep.bench.models import WORKLOADS
from lockstep.bench.rounds import Estimate, RoundPlan, estimate, slowest
from lockstep.bench.workers import BenchWorker, Workers
from lockstep.report.table import columns, render

LIMIT = 1.02
BEFORE = "before"
PACKAGE, SHM = f"lockstep_{BEFORE}", f"shm_{BEFORE}"
PAIRS = {"lockstep": f"{PACKAGE}.DistributedDataParallel", "lockstep@shm": f"{PACKAGE}.DistributedDataParallel@{SHM}"}
KINDS_OF_MEMORY = ("group memory", "own memory")
collectives.ARMS[SHM] = tuple(f"{SHM}, {kind}" for kind in KINDS_OF_MEMORY)  # in workers, too: they import this file
WAIT_S = 180.0


def unpack(commit: str, folder: Path) -> None:
    """Write the package of this commit to `folder`, as `lockstep_before`. Raises ValueError without such a commit."""
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "archive", "--format=tar", commit, "src/lockstep"]
    archived = subprocess.run(command, capture_output=True, check=False)
    if archived.returncode:
        raise ValueError(f"no package of commit {commit!r}: {archived.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "src" / "lockstep").rename(folder / PACKAGE)
    for path in (folder / PACKAGE).rglob("*.py"):
        text = re.sub(r"\blockstep\b", PACKAGE, path.read_text())
        path.write_text(re.sub(r'"(shm|hierarchy)"', rf'"\1_{BEFORE}"', text))


def compare_steps(models: Sequence[str], rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Yield (name, now over before in each round) of each model and backend. Prints `lockstep bench step`, too."""
    arms = (step.TORCH, *(arm for pair in PAIRS.items() for arm in pair))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        settings = step.StepSettings(tuple(models), arms, 2, 1, "cpu", RoundPlan(3, rounds, 5), WAIT_S)
        step.run(settings, Path(file.name))
        record = json.loads(Path(file.name).read_text())
    for model, result in record["models"].items():
        times = {arm: values["rounds_ms"] for arm, values in result["arms"].items()}
        for now, before in PAIRS.items():
            yield f"step, {model}, {now}", ratios(times[now], times[before])


def compare_collectives(sizes: Sequence[int], rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Yield (name, now over before in each round) of each collective, size and kind of memory: two workers, shm."""
    cases = tuple(Case(op, 2, size) for op in Op for size in sizes)
    job = CommJob(cases, ("shm", SHM), rounds, "cpu")
    with Workers(2, work_on_collectives, job, wait_s=WAIT_S) as workers:
        for case_times in workers.results_by(lambda times: times.case):
            times = slowest([worker.times_ms for worker in case_times])
            for kind in KINDS_OF_MEMORY:
                yield f"{case_times[0].case}, {kind}", ratios(times[f"shm, {kind}"], times[f"{SHM}, {kind}"])


def work_on_collectives(worker: BenchWorker, job: CommJob) -> None:
    __import__(PACKAGE)  # registers its backends
    collectives.work(worker, job)


def ratios(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(now, before, strict=True)]


def rows_of(found: Mapping[str, Estimate]) -> list[tuple[str, str, str]]:
    return [(name, str(ratio), "" if ratio.median <= LIMIT else verdict_of(ratio)) for name, ratio in found.items()]


def verdict_of(ratio: Estimate) -> str:
    return "slower" if ratio.low > LIMIT else "not certain"


def names_in(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--models", default="mlp,cnn,gpt", metavar="NAMES", help='default mlp,cnn,gpt; "" for none')
    parser.add_argument("--sizes", default="4KiB,1MiB,25MiB", metavar="SIZES", help='of collectives; "" for none')
    parser.add_argument("--rounds", type=int, default=10, help="of each start (default 10)")
    parser.add_argument("--starts", type=int, default=7, help="of all workers (default 7)")
    parser.add_argument("--quick", action="store_true", help="other defaults: small, 4KiB,1MiB, 5 rounds, 2 starts")
    if "--quick" in sys.argv:
        parser.set_defaults(models="small", sizes="4KiB,1MiB", rounds=5, starts=2)
    arguments = parser.parse_args()
    models, rounds, starts = names_in(arguments.models), arguments.rounds, arguments.starts
    if min(rounds, starts) < 1:
        parser.error("--rounds and --starts: at least 1")
    if unknown := [name for name in models if name not in WORKLOADS]:
        parser.error(f"--models: {unknown[0]!r} is not one of {', '.join(WORKLOADS)}")
    with tempfile.TemporaryDirectory(prefix="lockstep-before-") as folder:
        try:
            sizes = [parse_size(text) for text in names_in(arguments.sizes)]
            unpack(arguments.commit, Path(folder))
        except ValueError as error:
            print(f"compare_commits: {error}", file=sys.stderr)
            return 2
        sys.path.insert(0, folder)  # workers get it from here
        medians: dict[str, list[float]] = {}
        measures = [partial(compare_collectives, sizes, rounds)] if sizes else []
        measures += [partial(compare_steps, models, rounds)] if models else []
        for measure in measures * starts:
            for name, of_rounds in measure():
                medians.setdefault(name, []).append(statistics.median(of_rounds))
                print(f"{name}: {estimate(of_rounds)}", file=sys.stderr, flush=True)
    results = {name: estimate(of_starts) for name, of_starts in medians.items()}
    print(render(columns("measurement", f">now over {arguments.commit}", ""), rows_of(results)))
    return int(any(ratio.low > LIMIT for ratio in results.values()))


if __name__ == "__main__":
    sys.exit(main())
