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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.launcher.exit_policy import count_workers
from lockstep.launcher.job import count_cores, count_gpus, reserve_port
from lockstep.launcher.parent_watch import ParentWatch
from lockstep.report.live_status import read_status
from lockstep.report.run_folder import find_run

KILL_AT: Final = 0.4  # after this part of the steps
TURN_S: Final = 2.0  # a step that crosses the end of a turn does not count: longer turns lose fewer of the long steps
FREE: Final = 0.03  # cores are free if less than this part of their time is stolen
QUICK_EPOCHS: Final = 18
STEP_TIMES: Final = "step_times.txt"  # a line for each step: when it ended, by `time.monotonic`, and its samples
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

    @property
    def recovered_s(self) -> float | None:
        took = [float(line["took_s"]) for line in self.lines("event") if line.get("what") == "recovery"]
        return max(took, default=None)


Disturb = Callable[[Path, "subprocess.Popen[bytes]"], None]


class DemoRunner:
    def __init__(self, directory: Path, *, plain: bool, quick: bool) -> None:
        self.directory, self._plain, self.quick = directory, plain, quick

    def print(self, text: str) -> None:
        is_title = not text.startswith(" ")
        bold = is_title and sys.stdout.isatty() and not self._plain
        print(f"\n\x1b[1m{text}\x1b[0m" if bold else f"\n{text}" if is_title else text, flush=True)

    def train(self, which: str, name: str, *, workers: int, disturb: Disturb | None = None) -> DemoRun:
        """Runs one training of the demo. Raises LockstepError if it fails.

        Args:
            which: the module of the program.
            name: of its directory.
            workers: how many it starts with.
            disturb: is called with its directory in a thread while it runs.
        """
        folder = self.directory / name
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--min", "1"]
        command += ["--plain"] if self._plain else []
        command += ["--log-dir", str(self.directory / "logs" / name)]
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
                f"in {self.directory / 'logs' / name}"
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


Steps = Sequence[tuple[float, int]]  # when each step of a training ended, by `time.monotonic`, and its samples


@dataclass(frozen=True)
class Turn:
    """A time in which either the one training ran, or the separate ones."""

    begin_s: float
    end_s: float
    is_separate: bool
    stolen: float = 0.0  # the part of the cores' time that the host gave to other virtual machines


@dataclass(frozen=True)
class Speed:
    """Samples per second."""

    together: float  # all workers
    separate: float  # one of as many trainings on one worker each, at the same time
    ratio: float  # of the first to the second
    stolen: float  # see `Turn`


class SpeedTest:
    """Compares a training on several workers with as many separate trainings on one worker each.

    All of them are started, and in turns either the one or the others are stopped (SIGSTOP). So both are measured on
    the same cores in the same minute: the speed of a machine varies, and cores that share caches, a clock or a physical
    core are slower together than one of them alone, whatever runs on them.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers

    def run(self) -> Speed | None:
        """Returns the speeds; None if the training ended too soon. Raises LockstepError if a process fails."""
        turns: list[Turn] = []
        with ExitStack() as stack:
            watch = stack.enter_context(ParentWatch())  # kills them if this process is killed
            port = stack.enter_context(reserve_port())
            together, separate = [], []
            for number in range(self._workers):
                world: dict[str, object] = {"RANK": number, "LOCAL_RANK": number, "MASTER_ADDR": "127.0.0.1"}
                world |= {"WORLD_SIZE": self._workers, "LOCAL_WORLD_SIZE": self._workers, "MASTER_PORT": port}
                together.append(stack.enter_context(self._started("together", number, world, watch)))
                alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1} | gpu_env(number)
                separate.append(stack.enter_context(self._started(f"separate-{number}", 0, alone, watch)))
            end_s = time.monotonic() + END_WITHIN_S
            while not self._has_begun():
                self._check([*together, *separate], end_s)
                time.sleep(LOOK_EVERY_S)
            is_separate = False
            while unfinished := [process for process in together if process.poll() is None]:
                send_signal(together if is_separate else separate, signal.SIGSTOP)
                send_signal(separate if is_separate else together, signal.SIGCONT)
                begin_s, before = time.monotonic(), core_ticks()
                with suppress(subprocess.TimeoutExpired):
                    unfinished[0].wait(TURN_S)
                self._check([*together, *separate], end_s)
                total, stolen = (ticks - earlier for ticks, earlier in zip(core_ticks(), before, strict=True))
                turns.append(Turn(begin_s, time.monotonic(), is_separate, stolen / max(1, total)))
                is_separate = not is_separate and together[0].poll() is None
        separate_steps = [read_steps(path) for path in self._separate_folders()]
        return compare_speeds(read_steps(self._folder / "together"), separate_steps, turns)

    def _separate_folders(self) -> list[Path]:
        return [self._folder / f"separate-{number}" for number in range(self._workers)]

    def _started(
        self, name: str, rank: int, env: Mapping[str, object], watch: ParentWatch
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Starts a process, which is killed at the end of the context. Only the first worker's output is shown."""
        self._folder.mkdir(parents=True, exist_ok=True)
        is_shown = name == "together" and rank == 0
        log = self._folder / f"{name}-{rank}.log"
        return running(
            [sys.executable, "-m", "lockstep.demo.digits", "--directory", str(self._folder / name)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in env.items()}},
            log=None if is_shown else log,
            watch=watch,
        )

    def _has_begun(self) -> bool:
        return all(len(read_steps(path)) > 0 for path in [self._folder / "together", *self._separate_folders()])

    def _check(self, processes: Sequence[subprocess.Popen[bytes]], end_s: float) -> None:
        if time.monotonic() > end_s:
            raise LockstepError(
                f"the trainings did not end within {END_WITHIN_S:.0f} s; what they said is in {self._folder}"
            )
        for process in processes:
            if process.poll() not in (None, 0):
                raise LockstepError(
                    f"a training ended with status {process.returncode}: what it said is above, or in {self._folder}"
                )


def gpu_env(number: int) -> dict[str, str]:
    """Returns what lets a process see one GPU only, the one with this number; nothing where there are fewer."""
    if number >= count_gpus():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


@contextmanager
def running(
    command: Sequence[str], *, env: Mapping[str, str], log: Path | None, watch: ParentWatch
) -> Iterator[subprocess.Popen[bytes]]:
    with ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=watch.child_setup(),  # safe: this process has no other thread that holds a lock
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            watch.release(process.pid)


def send_signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def read_steps(folder: Path) -> Steps:
    try:
        lines = (folder / STEP_TIMES).read_text().splitlines()
    except OSError:
        return []
    return [(float(end_s), int(samples)) for end_s, samples in map(str.split, lines)]


def compare_speeds(together: Steps, separate: Sequence[Steps], turns: Sequence[Turn]) -> Speed | None:
    """Compares each turn of the separate trainings with the turns before and after it; None if there are none.

    Only steps that lie in one turn count, and of the pairs of turns only the half in which the host took the least time
    from the cores: workers that wait for each other lose more by it than separate trainings.
    """
    rates: list[tuple[bool, float, float]] = []
    for turn in turns:
        chosen = separate if turn.is_separate else [together]
        found = [rate_between(steps, turn.begin_s, turn.end_s) for steps in chosen]
        if all(found):
            rates.append((turn.is_separate, sum(found), turn.stolen))
    pairs = [sorted(pair) for pair in itertools.pairwise(rates) if pair[0][0] != pair[1][0]]
    if not pairs:
        return None
    pairs = sorted(pairs, key=lambda pair: max(stolen for *_, stolen in pair))[: (len(pairs) + 1) // 2]
    together_rate, separate_rate = (statistics.mean(pair[which][1] for pair in pairs) for which in (0, 1))
    most_stolen = max(stolen for pair in pairs for *_, stolen in pair)
    alone = separate_rate / len(separate)
    return Speed(together_rate, alone, together_rate / alone, most_stolen)


def core_ticks() -> tuple[int, int]:
    """Return clock ticks of all cores since boot: all, and those that the host gave to other virtual machines."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[7] if len(ticks) == 8 else 0


def rate_between(steps: Steps, begin_s: float, end_s: float) -> float:
    """Returns samples per second of the steps that begin and end between these times; 0 if there are none."""
    inside = [(b - a, n) for (a, _), (b, n) in itertools.pairwise(steps) if begin_s <= a < b <= end_s]
    return sum(n for _, n in inside) / sum(s for s, _ in inside) if inside else 0.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep demo",
        description="Train two small models on several workers of this machine, kill one of them on the way, and "
        "show that the result is what one worker alone computes, to the last bit. Takes about two minutes.",
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
    text = speed = None
    if not runner.quick:
        runner.print(f"3. How fast? {workers} workers in turns with {workers} separate trainings, on the same cores.")
        speed = SpeedTest(runner.directory / "digits-speed", workers).run()
        runner.print(f"4. A character GPT on {workers} workers.")
        text = runner.train("text", "text", workers=workers)
    runner.print("What came out")
    is_same = many.digest == alone.digest
    took = many.recovered_s
    runner.print(f"  weights      {many.digest[:16]}… on {workers} workers, one of which was killed")
    comparison = "the same bits" if is_same else "NOT the same: please report it"
    runner.print(f"               {alone.digest[:16]}… on one: {comparison}")
    killed = f"and the others continued after {1000 * took:.0f} ms" if took else "none in time"
    runner.print(f"  killed       {killed}")
    runner.print(f"  accuracy     {many.result['accuracy']:.2%} of 360 digits that it has never seen")
    if speed is not None:
        runner.print(
            f"  speed        {speed.together:,.0f} samples/s: x{speed.ratio:.2f} of {workers}, efficiency "
            f"{speed.ratio / workers:.0%}"
        )
        runner.print(
            f"               (a separate training on one worker, {workers} at a time: {speed.separate:,.0f} samples/s)"
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
