"""`lockstep demo`: trains with and without a killed worker, compares the results, and measures. Imports no torch."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.launcher import scale_request
from lockstep.launcher.exit_policy import count_workers
from lockstep.launcher.job import count_cores, count_gpus
from lockstep.report.live_status import read_status
from lockstep.report.run_folder import find_run

KILL_AT: Final = 0.4  # after this part of the steps
PHASE_S: Final = 1.5  # how long a number of workers stays, where it changes
FREE: Final = 0.03  # cores are free if less than this part of their time is stolen
QUICK_EPOCHS: Final = 18
LOOK_EVERY_S: Final = 0.05
END_WITHIN_S: Final = 300.0

NEXT: Final = """\
What to try next:
  lockstep watch RUN                     how a run is doing, from another terminal
  lockstep run -n {workers} --min 1 train.py     your own program; docs/tutorial.md shows how it looks
  lockstep certify train.py              prove on it that any number of workers gives the same bits
  lockstep doctor                        look at this machine"""


@dataclass(frozen=True)
class Phase:
    """A time in which the number of workers did not change and none was started, in seconds of `time.monotonic`."""

    workers: int
    begin_s: float
    end_s: float
    stolen: float = 0.0  # the part of the cores' time that the host gave to other virtual machines


@dataclass(frozen=True)
class Speed:
    """Samples per second."""

    together: float
    alone: float
    ratio: float
    stolen: float  # see `Phase`


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

    def speed(self, phases: Sequence[Phase]) -> Speed | None:
        """Compare each phase on several workers with those on one worker before and after it; None if there are none.

        The speed of a machine varies from minute to minute, so only neighbouring phases are compared, and of those
        only the half in which the host took the least time from the cores.
        """
        windows = [(line["t0"], line["t1"], line["samples"]) for line in self.lines("steps")]
        rates = []
        for phase in phases:
            inside = [samples / (t1 - t0) for t0, t1, samples in windows if phase.begin_s <= t0 < t1 <= phase.end_s]
            rates += [(phase.workers, statistics.median(inside), phase.stolen)] if inside else []
        pairs = [sorted(pair) for pair in itertools.pairwise(rates) if 1 in (pair[0][0], pair[1][0])]
        if not pairs:
            return None
        pairs = sorted(pairs, key=lambda pair: max(stolen for *_, stolen in pair))[: (len(pairs) + 1) // 2]
        alone, together = (statistics.median(pair[which][1] for pair in pairs) for which in (0, 1))
        ratio = statistics.median(pair[1][1] / pair[0][1] for pair in pairs)
        return Speed(together, alone, ratio, max(stolen for pair in pairs for *_, stolen in pair))

    @property
    def recovered_s(self) -> float | None:
        took = [float(line["took_s"]) for line in self.lines("event") if line.get("what") == "recovery"]
        return max(took, default=None)


Disturb = Callable[[Path, "subprocess.Popen[bytes]"], None]


class DemoRunner:
    def __init__(self, directory: Path, *, plain: bool, quick: bool) -> None:
        self._directory, self._plain, self.quick = directory, plain, quick

    def print(self, text: str) -> None:
        is_title = not text.startswith(" ")
        bold = is_title and sys.stdout.isatty() and not self._plain
        print(f"\n\x1b[1m{text}\x1b[0m" if bold else f"\n{text}" if is_title else text, flush=True)

    def train(self, which: str, name: str, *, workers: int, most: int = 0, disturb: Disturb | None = None) -> DemoRun:
        """Runs one training of the demo. Raises LockstepError if it fails.

        Args:
            which: the module of the program.
            name: of its directory.
            workers: how many it starts with.
            most: how many it can have.
            disturb: is called with its directory in a thread while it runs.
        """
        folder = self._directory / name
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--min", "1"]
        command += ["--max", str(most)] if most else []
        command += ["--plain"] if self._plain else []
        command += ["--log-dir", str(self._directory / "logs" / name)]
        command += ["-m", f"lockstep.demo.{which}", "--directory", str(folder)]
        command += ["--epochs", str(QUICK_EPOCHS)] if self.quick else []
        with subprocess.Popen(command) as process:
            try:
                if disturb is not None:
                    threading.Thread(target=disturb, args=[folder, process], daemon=True).start()
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


def kill_one(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Kills the last worker in the middle of the training."""
    while process.poll() is None:
        now = read_status(find_run(folder))
        is_time = now is not None and now.state == "training" and now.steps and now.step >= KILL_AT * now.steps
        if now is not None and is_time and len(now.workers) > 1:
            with suppress(ProcessLookupError):
                os.kill(now.workers[-1].pid, signal.SIGKILL)
            return
        time.sleep(LOOK_EVERY_S)


class Resizer:
    """Changes between one worker and `workers` until the training ends, and records the phases."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.phases: list[Phase] = []

    def __call__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        size, begin_s, ticks = 1, None, _core_ticks()
        while process.poll() is None:
            now, now_s = read_status(find_run(folder)), time.monotonic()
            if begin_s is None and now is not None and now.state == "training" and len(now.workers) == size:
                begin_s, ticks = now_s, _core_ticks()
            elif begin_s is not None and now_s > begin_s + PHASE_S:
                total, stolen = (after - before for after, before in zip(_core_ticks(), ticks, strict=True))
                self.phases.append(Phase(size, begin_s, now_s, stolen / max(1, total)))
                size, begin_s = (self._workers if size == 1 else 1), None
                with suppress(scale_request.NotRunning):  # it has just ended
                    scale_request.send_request(folder, scale_request.Request(workers=size))
            time.sleep(LOOK_EVERY_S)


def _core_ticks() -> tuple[int, int]:
    """Return clock ticks of all cores since boot: all, and those that the host gave to other virtual machines."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[7] if len(ticks) == 8 else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep demo",
        description="Train two small models on several workers of this machine, kill one of them on the way, and "
        "show that the result is what one worker alone computes, to the last bit. Takes one to two minutes.",
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
    many = runner.train("digits", "digits", workers=workers, disturb=kill_one)
    runner.print("2. The same on one worker, undisturbed.")
    alone = runner.train("digits", "digits-alone", workers=1)
    text = resized = None
    resizer = Resizer(workers)
    if not runner.quick:
        runner.print(f"3. The same, now on one worker, now on {workers}: the number changes while it trains.")
        resized = runner.train("digits", "digits-resized", workers=1, most=workers, disturb=resizer)
        runner.print(f"4. A character GPT on {workers} workers.")
        text = runner.train("text", "text", workers=workers)
    runner.print("What came out")
    is_same = many.digest == alone.digest
    took = many.recovered_s
    runner.print(f"  weights      {many.digest[:16]}… on {workers} workers, one of which was killed")
    comparison = "the same bits" if is_same else "NOT the same: please report it"
    runner.print(f"               {alone.digest[:16]}… on one: {comparison}")
    if resized is not None:
        is_same = is_same and resized.digest == alone.digest
        comparison = "the same bits" if resized.digest == alone.digest else "NOT the same: please report it"
        runner.print(f"               {resized.digest[:16]}… on one and {workers} in turn: {comparison}")
    killed = f"and the others continued after {1000 * took:.0f} ms" if took else "none in time"
    runner.print(f"  killed       {killed}")
    runner.print(f"  accuracy     {many.result['accuracy']:.2%} of 360 digits that it has never seen")
    if resized is not None and (speed := resized.speed(resizer.phases)) is not None:
        runner.print(
            f"  speed        {speed.together:,.0f} samples/s, {speed.alone:,.0f} on one worker: "
            f"x{speed.ratio:.2f} of {workers}, efficiency {speed.ratio / workers:.0%}"
        )
        if speed.stolen >= FREE:
            runner.print(
                f"               (the cores were not free: the host took up to {speed.stolen:.0%} of their time)"
            )
    if text is not None:
        wrote = " ".join(text.result["text"][-42:].split())
        runner.print(f"  GPT          {text.result['nats']:.2f} nats per character; it writes: “{wrote}”")
    from lockstep.report.command import write_report

    print(f"  report       {os.path.relpath(write_report(many.folder))}", flush=True)
    runner.print(f"  took         {time.monotonic() - began_s:.0f} s")
    print("\n" + NEXT.format(workers=workers))
    return 0 if is_same else 1
