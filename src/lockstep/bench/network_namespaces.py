"""Several hosts on one machine: network namespaces, joined by a switch, with links of a given speed.

    with Rig(hosts=2, mbit=1000) as rig:
        ...  # in a process that is to be on the second host: rig.hosts[1].enter()

Note [Nothing to clean up]
The namespaces have no names. Each is held by a process that reads from a pipe of ours, and by whoever has entered it.
When we end, in whatever way, the pipe closes, the holder ends, and the kernel takes the namespace and its links away.
So a run that was killed leaves nothing that the next one would have to find.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.errors import LockstepError

INTERFACE = "link0"
START_S = 10.0
_CLONE_NEWNET = 0x40000000
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class RigError(LockstepError):
    """Hosts cannot be made here."""


@dataclass(frozen=True)
class Host:
    number: int
    address: str
    holder_pid: int

    def enter(self) -> None:
        """Moves the calling thread to this host, and with it all threads it starts from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.holder_pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise RigError(f"host {self.number} cannot be entered: {os.strerror(ctypes.get_errno())}")


def sent_bytes() -> int:
    """What the host that the calling thread is on has sent over its link so far."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == INTERFACE:
            return int(figures.split()[8])
    raise RigError(f"there is no {INTERFACE} here: this thread is not on a host of a rig")


class Rig:
    """Hosts 10.77.0.1, 10.77.0.2, ...; what each sends and what each receives is limited to `mbit`."""

    def __init__(self, *, hosts: int, mbit: int) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts={hosts}: a rig has 1 to 250")
        self._count, self._mbit = hosts, mbit
        self._held = ExitStack()
        self.hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Self:
        refuse_where_impossible()
        with ExitStack() as held:
            switch = _hold_namespace(held)
            _inside(switch, "ip link add switch type bridge")
            _inside(switch, "ip link set switch up")
            self.hosts = tuple(
                Host(number, f"10.77.0.{number + 1}", _hold_namespace(held)) for number in range(self._count)
            )
            for host in self.hosts:
                self._connect(host, switch)
            self._held = held.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def _connect(self, host: Host, switch: int) -> None:
        port = f"port{host.number}"
        _run(f"ip link add {INTERFACE} netns {host.holder_pid} type veth peer name {port} netns {switch}")
        _inside(switch, f"ip link set {port} master switch")
        _inside(host.holder_pid, f"ip addr add {host.address}/24 dev {INTERFACE}")
        for namespace, interface in ((switch, port), (host.holder_pid, INTERFACE), (host.holder_pid, "lo")):
            _inside(namespace, f"ip link set {interface} up")
        # A limit at both ends: one for what the host sends, one for what it receives. The burst is what leaves at once
        # when the link was idle; with less than a packet that has not been cut up yet (64 KiB) nothing would leave.
        limit = f"tbf rate {self._mbit}mbit burst 128kb latency 100ms"
        _inside(host.holder_pid, f"tc qdisc add dev {INTERFACE} root {limit}")
        _inside(switch, f"tc qdisc add dev {port} root {limit}")


def refuse_where_impossible() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = ", ".join(sorted({_TOOLS[tool] for tool in missing}))
        raise RigError(f"several hosts on one machine need {', '.join(missing)}; install {packages} (Linux only)")
    if os.geteuid() != 0:
        raise RigError("several hosts on one machine are network namespaces, and those need root; run it with sudo")


def _hold_namespace(held: ExitStack) -> int:
    """A new namespace lives as long as `held` is open. Returns the process that holds it."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us; the holders end when we let them
    )
    held.callback(_let_go, process)
    assert process.stdout is not None
    assert process.stderr is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    if not ready or process.stdout.readline() != b"ready\n":
        process.kill()
        words = process.stderr.read().decode().strip()
        raise RigError(f"a network namespace could not be made: {words}; in a container this needs --privileged")
    return process.pid


def _let_go(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def _inside(holder_pid: int, command: str) -> None:
    _run(f"nsenter --net=/proc/{holder_pid}/ns/net {command}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=START_S)
    if done.returncode != 0:
        raise RigError(f"`{command}` failed: {done.stderr.strip()}")
