"""Cuts hosts of a training run off, from the store, from each other, from all, and checks that the result is the same.

Three hosts (network namespaces of this machine, so it needs root), a host agent and one or two workers on each. While
they train, a link goes down, or one direction of one connection: packets vanish, or are refused. Some cuts are shorter
than a lease, some longer. The run must end with status 0 everywhere and, bit by bit, with what a world of one computes;
must use every sample exactly once (`lockstep ledger`); must name the host that was lost; and no worker may commit a
step after a later generation has committed one: that would be two sides that both go on.

    python chaos/training_hosts.py                           100 cuts: about 20 minutes on two cores
    python chaos/training_hosts.py --quick                   5 cuts
    python chaos/training_hosts.py --seed 7 --only-case 3    one run again

The seed decides who is cut off, how and for how long; what the cut meets is the machine's.
Exit status: 0 when all of it held; 1 when not; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lockstep.bench import network_namespaces
from lockstep.bench.network_namespaces import INTERFACE, NamespaceHost, VirtualHosts

CUTS, QUICK_CUTS, CUTS_PER_RUN = 100, 5, 5
LEASE_S = 1.5
STEPS = 400
PACE_S = 0.05  # between steps, while hosts are cut off: steps are not to run out
PORT = 29400  # nothing else runs on these hosts
ALL_HERE_S = 60.0
END_S = 120.0
STACKS = signal.SIGRTMIN + 5  # workers write their stacks down
NAMES = ("ada", "bob", "cyd")  # ada keeps the store


# --------------------------------------------------------------------------------------------------------- the program


def train(folder: Path | None, steps: int) -> None:
    """The workers run it. In its folder it finds `pace`, and leaves `traces/PID` and `ends/PID`. Alone it has none."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import lockstep
    from lockstep import faults
    from lockstep.elastic import agent_client

    dice = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(233, 8, generator=dice), torch.randint(4, (233,), generator=dice))

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    agent = agent_client.current()
    if folder is not None:
        faulthandler.register(STACKS, file=(folder / "stacks" / str(os.getpid())).open("w"), all_threads=True)
        trace = os.open(folder / "traces" / str(os.getpid()), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

        def comes_by(place: str) -> None:
            generation = agent.generation if agent is not None else 0
            os.write(trace, f"{time.monotonic_ns()} {generation} {faults.context.get('step', -1)} {place}\n".encode())

        faults.hook = comes_by
    directory = None if folder is None else folder / "run"
    with lockstep.Run(directory, seed=5, progress=False, save_every=20, check_every=3) as run:
        model = run.replicate(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = run.batches(data, global_batch_size=24, shards=8, epochs=None)
        for batch in run.train(batches, optimizer, steps=steps):
            run.step(loss, batch)
            if folder is not None:
                time.sleep(float((folder / "pace").read_text()))
        if folder is None:
            print(run.digest())
        else:
            (folder / "ends" / str(os.getpid())).write_text(run.digest())


def reference(steps: int = STEPS) -> str:
    command = [sys.executable, __file__, "--train-alone", "--steps", str(steps)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout.strip()


# ----------------------------------------------------------------------------------------------------------- the hosts


@contextmanager
def hosts(count: int = 3) -> Iterator[tuple[NamespaceHost, ...]]:
    with VirtualHosts(hosts=count, mbit=1000) as made:
        yield made.hosts


def inside(host: NamespaceHost, command: str) -> None:
    network_namespaces._inside(host.holder_pid, command)


class Fleet:
    """One run on several hosts, and what can be done to it."""

    def __init__(
        self, folder: Path, hosts: Sequence[NamespaceHost], workers: int, *options: str, steps: int = STEPS
    ) -> None:
        self.folder, self.hosts, self.workers, self.options = folder, hosts, workers, options
        self.names = NAMES[: len(hosts)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.secret = secrets.token_hex(32)
        self.program: tuple[str, ...] = (__file__, "--train", str(folder), "--steps", str(steps))
        for name in ("traces", "ends", "stacks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.pace(PACE_S)

    @property
    def where(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def start(self, *names: str, **env: str) -> None:
        for name in names or self.names:
            host = self.hosts[self.names.index(name)]
            command = ["nsenter", f"--net=/proc/{host.holder_pid}/ns/net", sys.executable, "-m", "lockstep", "run"]
            command += ["--hosts", str(len(self.hosts)), "-n", str(self.workers), "--log-dir", f"{self.folder}/logs"]
            if "--store" not in self.options:
                command += ["--rendezvous", self.where]
            told = {"LOCKSTEP_HOST": name, "LOCKSTEP_JOB_SECRET": self.secret, "OMP_NUM_THREADS": "1"}
            ours = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
            with (self.folder / f"output-{name}").open("ab") as out:
                self.processes[name] = subprocess.Popen(
                    [*command, *self.options, *self.program],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=ours | told | env,
                )

    def pace(self, pace_s: float) -> None:
        (self.folder / "pace.new").write_text(str(pace_s))
        (self.folder / "pace.new").rename(self.folder / "pace")

    def output(self, name: str) -> str:
        return (self.folder / f"output-{name}").read_text(errors="replace")

    def outputs(self) -> str:
        return "\n".join(f"--- {name}\n{self.output(name)}" for name in self.processes)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "logs" / name / "events.jsonl"
        with suppress(OSError):
            return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return []

    def members(self, name: str = "") -> list[str]:
        """Of the last generation that this host has seen, the first one if none is named."""
        found = [event["members"] for event in self.events(name or self.names[0]) if event["event"] == "generation"]
        return found[-1] if found else []

    def pids(self, name: str) -> dict[str, int]:
        """The living workers of a host."""
        found: dict[str, int] = {}
        for event in self.events(name):
            if event["event"] == "started":
                found[event["worker"]] = event["pid"]
            elif event["event"] in ("lost", "ended"):
                found.pop(event["worker"], None)
        return found

    def steps(self) -> int:
        """How far it has come."""
        found = [-1]
        for path in (self.folder / "traces").iterdir():
            lines = path.read_text().splitlines()
            found += [int(line.split()[2]) for line in lines[-1:] if len(line.split()) == 4]
        return max(found)

    def await_(self, condition: Callable[[], object], what: str, *, within_s: float = ALL_HERE_S) -> None:
        end_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited {within_s:.0f} s for {what}\n{self.outputs()}\n{self.stacks()}")
            time.sleep(0.05)

    def stacks(self) -> str:
        """Where the workers are, in words."""
        pids = {pid: worker for name in self.names for worker, pid in self.pids(name).items()}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS)
        time.sleep(1.0)
        found = [(pids.get(int(path.name)), path.read_text()) for path in (self.folder / "stacks").iterdir()]
        return "\n".join(f"{worker}:\n{text}" for worker, text in found if text)

    def await_members(self, count: int, name: str = "") -> None:
        self.await_(lambda: len(self.members(name)) == count, f"{count} members")

    def await_step(self, step: int) -> None:
        self.await_(lambda: self.steps() >= step, f"step {step}")

    def await_end(self, *names: str, within_s: float = END_S) -> dict[str, int]:
        chosen = names or tuple(self.processes)
        self.await_(
            lambda: all(self.processes[name].poll() is not None for name in chosen), "the end", within_s=within_s
        )
        return {name: self.processes[name].returncode for name in chosen}

    def kill(self, name: str) -> None:
        """The host agent: its workers go with it."""
        self.processes[name].kill()
        self.processes[name].wait()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is found at the end ------------------------------------------------------------------------------------

    def digests(self) -> set[str]:
        return {path.read_text() for path in (self.folder / "ends").iterdir()}

    def ledger(self) -> str:
        """Empty if it proves that every sample was used once."""
        command = [sys.executable, "-m", "lockstep", "ledger", str(self.folder / "run")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def two_sides(self) -> str:
        """A step that was committed after one of a later generation; empty if there is none."""
        marks = []
        for path in (self.folder / "traces").iterdir():
            for line in path.read_text().splitlines():
                at_ns, generation, step, place = line.split()
                if place == "committed":
                    marks.append((int(at_ns), int(generation), int(step), path.name))
        newest = 0
        for _, generation, step, pid in sorted(marks):
            if generation < newest:
                return f"pid {pid} committed step {step} in generation {generation}, after one of generation {newest}"
            newest = generation
        return ""


# ---------------------------------------------------------------------------------------------------------------- cuts


@dataclass(frozen=True)
class Cut:
    """`link`: the host is alone. `lost`, `refused`: packets from one host to the other vanish, or are refused."""

    kind: str
    host: int
    other: int
    for_s: float
    after_s: float

    def __str__(self) -> str:
        to = "" if self.kind == "link" else f" to {NAMES[self.other]}"
        return f"{self.kind}: {NAMES[self.host]}{to} for {self.for_s:.2f} s"

    def make(self, hosts: Sequence[NamespaceHost]) -> None:
        inside(hosts[self.host], self._command(hosts, cut=True))

    def heal(self, hosts: Sequence[NamespaceHost]) -> None:
        inside(hosts[self.host], self._command(hosts, cut=False))

    def _command(self, hosts: Sequence[NamespaceHost], *, cut: bool) -> str:
        other = hosts[self.other].address
        match self.kind, cut:
            case "link", _:
                return f"ip link set {INTERFACE} {'down' if cut else 'up'}"
            case "lost", True:  # to a machine that is not there
                return f"ip neigh replace {other} lladdr 02:00:00:00:99:99 dev {INTERFACE} nud permanent"
            case "lost", False:
                return f"ip neigh del {other} dev {INTERFACE}"
            case _:
                return f"ip route {'add' if cut else 'del'} blackhole {other}/32"


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    workers: int
    cuts: tuple[Cut, ...]


def plan(seed: int, number: int) -> Case:
    dice = Random(f"hosts {seed} {number}")
    cuts = []
    for _ in range(CUTS_PER_RUN):
        kind = dice.choice(("link", "lost", "refused"))
        host, other = dice.sample(range(len(NAMES)), 2)
        for_s = LEASE_S * dice.choice((dice.uniform(0.2, 1.2), dice.uniform(0.8, 2.5)))
        cuts.append(Cut(kind, host, other, for_s, dice.uniform(0.0, 1.0)))
    return Case(seed, number, dice.choice((1, 1, 2)), tuple(cuts))


def carry_out(case: Case, folder: Path, wanted: str) -> list[str]:
    """What is wrong; empty if nothing is."""
    with hosts() as made, Fleet(folder, made, case.workers, "--min", "1", "--lease-s", str(LEASE_S)) as fleet:
        try:
            fleet.start()
            for cut in case.cuts:
                fleet.await_members(len(NAMES) * case.workers)
                time.sleep(cut.after_s)
                cut.make(made)
                time.sleep(cut.for_s)
                cut.heal(made)
            fleet.pace(0.0)
            statuses = fleet.await_end()
        except TimeoutError as stuck:
            return [str(stuck)]
        found = [f"{name} ended with status {status}" for name, status in statuses.items() if status != 0]
        found += [f"a worker has the digest {one}, undisturbed {wanted}" for one in fleet.digests() - {wanted}]
        found += [] if fleet.digests() else ["no worker came to the end"]
        found += [text for text in (fleet.ledger(), fleet.two_sides()) if text]
        for name in fleet.names:
            failed = [event for event in fleet.events(name) if event["event"] == "lost" and event["code"] != -9]
            found += [f"{event['worker']} failed with status {event['code']}" for event in failed]
            others = "".join(fleet.output(other) for other in fleet.names if other != name)
            lost = any(event["event"] == "lease lost" and event["workers"] for event in fleet.events(name))
            if lost and f"host {name} is lost" not in others and f"on {name} was lost" not in others:
                found.append(f"{name} lost its lease, and no other host says so")
        return found + ([fleet.outputs()] if found else [])


# ------------------------------------------------------------------------------------------------------------ campaign


def campaign(cases: Sequence[Case]) -> int:
    wanted, failed, began_s = reference(), 0, time.monotonic()
    kinds: Counter[str] = Counter()
    for done, case in enumerate(cases, 1):
        folder = Path(tempfile.mkdtemp(prefix=f"lockstep-hosts-{case.seed}-{case.number}-"))
        found = carry_out(case, folder, wanted)
        kinds.update(cut.kind for cut in case.cuts)
        if found:
            failed += 1
            print(f"seed {case.seed}, case {case.number}, {case.workers} workers on each host:")
            print("".join(f"    {cut}\n" for cut in case.cuts) + "".join(f"  {text}\n" for text in found))
            print(f"    again: python chaos/training_hosts.py --seed {case.seed} --only-case {case.number}; {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        took_s = time.monotonic() - began_s
        print(f"{kinds.total()} cuts in {done} runs, {failed} failed, {took_s:.0f} s", flush=True)
    print(", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())))
    return 1 if failed else 0


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, metavar="N", help=f"default {CUTS}; with --quick {QUICK_CUTS}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--only-case", type=int, metavar="N", help="this one of the seed")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train-alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.cuts is None:
        arguments.cuts = QUICK_CUTS if arguments.quick else CUTS
    if arguments.cuts < 1 or (arguments.only_case or 0) < 0:
        parser.error("--cuts must be positive, and cases are numbered from 0")
    return arguments


def main(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    if arguments.train is not None or arguments.train_alone:
        train(arguments.train, arguments.steps)
        return 0
    network_namespaces.check_requirements()
    numbers = range(-(-arguments.cuts // CUTS_PER_RUN))
    if arguments.only_case is not None:
        numbers = range(arguments.only_case, arguments.only_case + 1)
    return campaign([plan(arguments.seed, number) for number in numbers])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
