"""Several virtual hosts on one machine: network namespaces, joined by a bridge, with links of a given speed.

    with VirtualHosts(hosts=2, mbit=1000) as virtual:
        ...  # in a process that shall run on the second host: virtual.hosts[1].enter()

Note [Nothing to clean up]
The namespaces have no names. Each is kept open by a holder process, which reads from a pipe of this process, and by the
processes that have entered it. When this process ends in any way, the pipe closes, the holder ends, and the kernel
removes the namespace and its links. So a run that was killed leaves nothing that the next one would have to clean up.
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


class NamespaceError(LockstepError):
    """Virtual hosts cannot be created on this machine."""


@dataclass(frozen=True)
class NamespaceHost:
    number: int
    address: str
    holder_pid: int

    def enter(self) -> None:
        """Move the calling thread, and all threads that it starts later, to this host. Raises NamespaceError."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.holder_pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise NamespaceError(f"host {self.number} cannot be entered: {os.strerror(ctypes.get_errno())}")


def sent_bytes() -> int:
    """Bytes that the host of the calling thread has sent over its link so far. Raises NamespaceError."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise NamespaceError(f"there is no {INTERFACE} here: this thread is not on a virtual host")


class VirtualHosts:
    """Hosts 10.77.0.1, 10.77.0.2, ...; each sends and receives at most `mbit` Mbit/s."""

    def __init__(self, *, hosts: int, mbit: int) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts={hosts}: it must be 1 to 250")
        self._count, self._mbit = hosts, mbit
        self._resources = ExitStack()
        self.hosts: tuple[NamespaceHost, ...] = ()

    def __str__(self) -> str:
        return f"{self._count} hosts, links of {self._mbit} Mbit/s"

    def __enter__(self) -> Self:
        check_requirements()
        with ExitStack() as resources:
            switch = _create_namespace(resources)
            _inside(switch, "ip link add switch type bridge")
            _inside(switch, "ip link set switch up")
            self.hosts = tuple(
                NamespaceHost(number, f"10.77.0.{number + 1}", _create_namespace(resources))
                for number in range(self._count)
            )
            for host in self.hosts:
                self._connect(host, switch)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def _connect(self, host: NamespaceHost, switch: int) -> None:
        port = f"port{host.number}"
        _run(f"ip link add {INTERFACE} netns {host.holder_pid} type veth peer name {port} netns {switch}")
        _inside(switch, f"ip link set {port} master switch")
        _inside(host.holder_pid, f"ip addr add {host.address}/24 dev {INTERFACE}")
        for namespace, interface in ((switch, port), (host.holder_pid, INTERFACE), (host.holder_pid, "lo")):
            _inside(namespace, f"ip link set {interface} up")
        # A limit at both ends: one for what the host sends, one for what it receives. The burst is sent at once after
        # the link was idle; with less than a packet before segmentation (64 KiB) nothing would be sent.
        limit = f"tbf rate {self._mbit}mbit burst 128kb latency 100ms"
        _inside(host.holder_pid, f"tc qdisc add dev {INTERFACE} root {limit}")
        _inside(switch, f"tc qdisc add dev {port} root {limit}")


def check_requirements() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = ", ".join(sorted({_TOOLS[tool] for tool in missing}))
        raise NamespaceError(f"several hosts on one machine need {', '.join(missing)}; install {packages} (Linux only)")
    if os.geteuid() != 0:
        raise NamespaceError("several hosts on one machine are network namespaces, which need root; run it with sudo")


def _create_namespace(resources: ExitStack) -> int:
    """A new namespace lives as long as `held` is open. Returns the process that holds it."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C shall not reach the holders; they end with `resources`
    )
    resources.callback(_stop, process)
    assert process.stdout is not None
    assert process.stderr is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    if not ready or process.stdout.readline() != b"ready\n":
        process.kill()
        words = process.stderr.read().decode().strip()
        raise NamespaceError(f"a network namespace could not be made: {words}; in a container this needs --privileged")
    return process.pid


def _stop(process: subprocess.Popen[bytes]) -> None:
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
        raise NamespaceError(f"`{command}` failed: {done.stderr.strip()}")
