"""`lockstep demo`: trains with and without a killed worker, compares the results, and measures. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.launcher.exit_policy import count_workers
from lockstep.launcher.job import count_cores, count_gpus
from lockstep.report.live_status import read_status
from lockstep.report.run_folder import find_run

KILL_AT: Final = 0.4  # after this part of the steps
QUICK_EPOCHS: Final = 12
LOOK_EVERY_S: Final = 0.05
END_WITHIN_S: Final = 300.0

NEXT: Final = """\
What to try next:
  lockstep watch RUN                     how a run is doing, from another terminal
  lockstep run -n {workers} --min 1 train.py     your own program; docs/tutorial.md shows how it looks
  lockstep certify train.py              prove on it that any number of workers gives the same bits
  lockstep doctor                        look at this machine"""


@dataclass(frozen=True)
class DemoRun:
    """A finished run of the demo."""

    folder: Path
    result: dict[str, Any]

    @property
    def digest(self) -> str:
        return str(self.result["digest"])

    def lines(self, *kinds: str) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("trace/*.jsonl")):
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # a worker that was killed may have left an incomplete line
                    if (found := json.loads(line)).get("kind") in kinds:
                        yield found

    def samples_per_s(self, workers: int) -> float:
        """Median over the windows of steps with that many workers, without the first window of each generation."""
        found, size, windows = [], 0, 0
        for line in self.lines("world", "steps"):
            if line["kind"] == "world":
                size, windows = line["size"], 0
                continue
            windows += 1
            if size == workers and windows > 1:
                found.append(line["samples"] / (line["t1"] - line["t0"]))
        return float(statistics.median(found)) if found else math.nan

    @property
    def recovered_s(self) -> float | None:
        took = [float(line["took_s"]) for line in self.lines("event") if line.get("what") == "recovery"]
        return max(took, default=None)


class DemoRunner:
    def __init__(self, directory: Path, *, plain: bool, quick: bool) -> None:
        self._directory, self._plain, self.quick = directory, plain, quick

    def print(self, text: str) -> None:
        is_title = not text.startswith(" ")
        bold = is_title and sys.stdout.isatty() and not self._plain
        print(f"\n\x1b[1m{text}\x1b[0m" if bold else f"\n{text}" if is_title else text, flush=True)

    def train(self, which: str, name: str, *, workers: int, kills: bool = False) -> DemoRun:
        """Runs one training of the demo. Raises LockstepError if it fails."""
        folder = self._directory / name
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--min", "1"]
        command += ["--plain"] if self._plain else []
        command += ["--log-dir", str(self._directory / "logs" / name)]
        command += ["-m", f"lockstep.demo.{which}", "--directory", str(folder)]
        command += ["--epochs", str(QUICK_EPOCHS)] if self.quick else []
        with subprocess.Popen(command) as process:
            try:
                if kills:
                    threading.Thread(target=self._kill_one, args=[folder, process], daemon=True).start()
                status = process.wait(END_WITHIN_S)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                raise
        if status != 0:
            raise LockstepError(
                f"{which} on {workers} workers ended with status {status}: what it said last is above, and all of it "
                f"in {self._directory / 'logs' / name}"
            )
        return DemoRun(folder, json.loads((folder / "result.json").read_text()))

    def _kill_one(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        """Kills the last worker in the middle of the training. Runs in a thread."""
        while process.poll() is None:
            now = read_status(find_run(folder))
            is_time = now is not None and now.state == "training" and now.steps and now.step >= KILL_AT * now.steps
            if now is not None and is_time and len(now.workers) > 1:
                with suppress(ProcessLookupError):
                    os.kill(now.workers[-1].pid, signal.SIGKILL)
                return
            time.sleep(LOOK_EVERY_S)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep demo",
        description="Train two small models on several workers of this machine, kill one of them on the way, and "
        "show that the result is what one worker alone computes, to the last bit. Takes about a minute.",
    )
    default = "one per visible GPU; without a GPU one per core, two to four"
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help=f"how many workers (default: {default})")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for what it writes (default: runs/demo-TIME)")
    parser.add_argument("--plain", action="store_true", help="lines instead of a picture (so it is without a terminal)")
    parser.add_argument("--quick", action="store_true", help="the digits only, and fewer epochs")
    chosen = parser.parse_args(arguments)
    workers = chosen.workers or max(2, count_workers(os.environ, gpus=count_gpus(), cores=count_cores()))
    if workers < 2:
        parser.error(f"-n {workers}: one of the workers is killed, so there must be two at least")
    directory = (chosen.directory or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if directory.exists() and any(directory.iterdir()):
        parser.error(f"{directory} is not empty; give another --directory")
    try:
        return run_demo(DemoRunner(directory, plain=chosen.plain, quick=chosen.quick), workers)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run_demo(runner: DemoRunner, workers: int) -> int:
    began_s = time.monotonic()
    runner.print(f"1. Handwritten digits on {workers} workers. One of them will be killed, in the middle.")
    many = runner.train("digits", "digits", workers=workers, kills=True)
    runner.print("2. The same on one worker, undisturbed.")
    alone = runner.train("digits", "digits-alone", workers=1)
    text = None
    if not runner.quick:
        runner.print(f"3. A character GPT on {workers} workers.")
        text = runner.train("text", "text", workers=workers)
    runner.print("What came out")
    is_same = many.digest == alone.digest
    together, one = many.samples_per_s(workers), alone.samples_per_s(1)
    took = many.recovered_s
    runner.print(f"  weights      {many.digest[:16]}… on {workers} workers, one of which was killed")
    comparison = "the same bits" if is_same else "NOT the same: please report it"
    runner.print(f"               {alone.digest[:16]}… on one: {comparison}")
    killed = f"and the others continued after {1000 * took:.0f} ms" if took else "none in time"
    runner.print(f"  killed       {killed}")
    runner.print(f"  accuracy     {many.result['accuracy']:.2%} of 360 digits that it has never seen")
    if not math.isnan(together + one):  # NaN if a run was too short
        runner.print(
            f"  speed        {together:,.0f} samples/s, {one:,.0f} on one worker: x{together / one:.2f} of {workers}, "
            f"efficiency {together / one / workers:.0%}"
        )
    if text is not None:
        wrote = " ".join(text.result["text"][-42:].split())
        runner.print(f"  GPT          {text.result['nats']:.2f} nats per character; it writes: “{wrote}”")
    from lockstep.report.command import write_report

    print(f"  report       {os.path.relpath(write_report(many.folder))}", flush=True)
    runner.print(f"  took         {time.monotonic() - began_s:.0f} s")
    print("\n" + NEXT.format(workers=workers))
    return 0 if is_same else 1
