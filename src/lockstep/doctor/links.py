"""`lockstep doctor --links FILE`: measures sums of gradients between workers, and hosts, for `lockstep plan`.

The measurement itself (bench/links.py) runs in workers that `lockstep run` starts, or torchrun on several hosts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.errors import LockstepError

LINES_SHOWN: Final = 8


@dataclass(frozen=True)
class SeveralHosts:
    """Hosts that measure together. `rendezvous` is HOST:PORT, with an address of one of them."""

    count: int
    rendezvous: str

    def launcher(self, workers: int) -> list[str]:
        """The command that starts workers on this host: torchrun, whose ranks are fixed, as the measurement needs.

        Raises LockstepError if there is no way to the address.
        """
        host, _, port = self.rendezvous.rpartition(":")
        try:
            family, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing, but selects the address of this host on the way there
                own = probe.getsockname()[0]
        except (OSError, ValueError) as error:
            raise LockstepError(
                f"--rendezvous {self.rendezvous}: {error}; write HOST:PORT, such as host1:29400"
            ) from None
        options = {
            "--nnodes": str(self.count),
            "--nproc-per-node": str(workers),
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": self.rendezvous,
            "--rdzv-id": f"lockstep-links-{workers}",
            "--rdzv-conf": f"is_host={own == address[0]}",
            "--local-addr": own,
        }
        return [sys.executable, "-m", "torch.distributed.run", *(text for pair in options.items() for text in pair)]


def measure_sums(
    counts: Sequence[int], *, hosts: SeveralHosts | None = None, backend: str = "", timeout_s: float = 600.0
) -> dict[str, Any]:
    """Measure sums between so many workers, one number after the other; with `hosts`, so many on each of them.

    Returns facts about the machine and the list `sums`, which is empty on hosts that do not have rank 0. Raises
    LockstepError with the last lines of the workers if they fail.
    """
    found: dict[str, Any] = {"sums": []}
    env = {**os.environ} | ({"LOCKSTEP_BACKEND": backend} if backend else {})
    if hosts is not None:
        env = {"LOCKSTEP_BACKEND": "hierarchy", "OMP_NUM_THREADS": "1", **env}
    with tempfile.TemporaryDirectory(prefix="lockstep-links-") as folder:
        for count in counts:
            path = Path(folder) / f"{count}.json"
            start = [
                sys.executable,
                "-m",
                "lockstep",
                "run",
                "-n",
                str(count),
                "--plain",
                "--log-dir",
                f"{folder}/logs",
            ]
            command = start if hosts is None else hosts.launcher(count)
            command += ["-m", "lockstep.bench.links", str(path)]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
            except subprocess.TimeoutExpired:
                raise LockstepError(f"sums between {count} workers were not measured within {timeout_s:g} s") from None
            if done.returncode != 0:
                last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LINES_SHOWN:])
                raise LockstepError(f"sums between {count} workers could not be measured:\n{last}")
            if path.exists():
                one = json.loads(path.read_text())
                found = {**one, "sums": [*found["sums"], *one["sums"]]}
    return found


def write_links(path: Path, counts: Sequence[int], *, hosts: SeveralHosts | None, say: Callable[[str], None]) -> int:
    """Measure sums, write them to `path`, and print a table. Returns the exit status."""
    say(f"measuring sums between {', '.join(map(str, counts))} workers ...")
    found = measure_sums(counts, hosts=hosts)
    say("")
    if not found["sums"]:
        print("measured; the host of rank 0 has the file")
        return 0
    try:
        path.write_text(json.dumps(found) + "\n")
    except OSError as error:
        raise LockstepError(f"{path} cannot be written: {error.strerror}; choose another file") from None
    for one in found["sums"]:
        last = one["points"][-1]
        rate = last["bytes"] / last["seconds"] / 1e6
        where = (
            f"{one['workers_per_host']} workers" if one["hosts"] == 1 else f"{one['hosts']} x {one['workers_per_host']}"
        )
        size = f"{last['bytes'] / 2**20:.0f} MiB in {1e3 * last['seconds']:.2f} ms"
        print(f"{where:10} {one['backend']:10} {one['grad_comm']:5} {size:24} {rate:,.0f} MB/s")
    print(f"{path}: for `lockstep plan --links {path}`")
    return 0
