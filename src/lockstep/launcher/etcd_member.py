"""A member of an etcd cluster that the hosts of a run start themselves: `lockstep run --start-etcd`.

Each host whose address is among those of --store runs one member, beside its host agent. With three members the run
continues when any one of these hosts is lost. etcd reads its own settings, certificates among them, from ETCD_*
variables. The login is the user root with a password that is derived from the secret of the job.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from lockstep.control.connection import TLS_SCHEME, Address, is_loopback, parse_addresses
from lockstep.errors import LockstepError
from lockstep.launcher.output import print_message
from lockstep.launcher.parent_watch import ParentWatch

PEER_PORT_OFFSET: Final = 1  # etcd's own convention: 2379 for clients, 2380 for other members
START_S: Final = 0.5  # if something is wrong with its options, etcd ends within this time
ALONE: Final = "this host runs no member of the etcd: it was one, and its data is gone (a fixed --log-dir keeps it)"
TLS_VARIABLES: Final = (
    "ETCD_CERT_FILE",
    "ETCD_KEY_FILE",
    "ETCD_PEER_CERT_FILE",
    "ETCD_PEER_KEY_FILE",
    "ETCD_PEER_TRUSTED_CA_FILE",
    "ETCD_PEER_CLIENT_CERT_AUTH",
)
STOP_WITHIN_S: Final = 5.0
READ_WITHIN_S: Final = 2.0  # time for the other hosts to read the last records before a member ends


def root_password(secret: bytes) -> str:
    """Return the password of the user root in the etcd of a job."""
    return hmac.new(secret, b"the login to the etcd of a job", hashlib.sha256).hexdigest()


def check_members(where: str, environ: Mapping[str, str]) -> None:
    """Raises ValueError if the hosts that `where` names cannot run an etcd."""
    if len(parse_addresses(where)) % 2 == 0:
        raise ValueError(
            f"--start-etcd: {where} names {len(parse_addresses(where))} members; name 3 or 5 (or 1, which may not be "
            "lost): more than half of them must be alive, so an even number helps nothing"
        )
    missing = [name for name in TLS_VARIABLES if not environ.get(name)]
    if where.startswith(TLS_SCHEME) and missing:
        raise ValueError(f"--start-etcd: {where} is with TLS; for that etcd needs {', '.join(missing)} as well")


@final
class EtcdMember:
    """The etcd process of this host. It ends with the launcher, also if that is killed."""

    def __init__(
        self, process: subprocess.Popen[bytes], address: Address, log: Path, parent_watch: ParentWatch, *, is_only: bool
    ) -> None:
        self._process, self.address, self._log, self._parent_watch = process, address, log, parent_watch
        self.is_only = is_only  # the etcd has no other members
        self._end_is_known = False

    @staticmethod
    def start(where: str, secret: bytes, folder: Path, parent_watch: ParentWatch) -> EtcdMember | None:
        """Start the member of this host; return None, with a message, if this host does not run one.

        Raises LockstepError if it cannot be started.
        """
        addresses = parse_addresses(where)
        found = [(address, own) for address in addresses if (own := _own_address(address)) is not None]
        if not found:
            print_message(f"no address in {where} is one of this host, so it runs no member of the etcd")
            return None
        (address, own), *_ = found
        program = shutil.which(os.environ.get("ETCD") or "etcd")
        if program is None:
            raise LockstepError(
                "--start-etcd: there is no etcd on the PATH; install it (Debian: etcd-server) or set $ETCD"
            )
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "etcd.log"
        began = log.stat().st_size if log.exists() else 0
        command = [program, *_options(address, own, where, secret, folder)]
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={
                    name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "ETCDCTL_"))
                },
                start_new_session=True,  # the launcher decides about Ctrl-C
                preexec_fn=parent_watch.child_setup(),
            )
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(START_S)
            parent_watch.release(process.pid)
            said = log.read_bytes()[began:].decode(errors="replace").strip()
            if "already been bootstrapped" in said:
                print_message(f"{ALONE}: {len(addresses) - 1} members are left, and the run uses those")
                return None
            last = said.rpartition("\n")[2]
            raise LockstepError(f"--start-etcd: etcd ended at once with status {status}: {last} (all of it in {log})")
        return EtcdMember(process, address, log, parent_watch, is_only=len(addresses) == 1)

    def check(self) -> None:
        """Print a message if the member has ended."""
        if not self._end_is_known and (status := self._process.poll()) is not None:
            self._end_is_known = True
            print_message(
                f"the etcd of this host has ended with status {status}; the run uses the other members. See {self._log}"
            )

    def close(self) -> None:
        """End the member, after a moment in which other hosts can read what was written last."""
        if self._process.poll() is None:
            time.sleep(READ_WITHIN_S)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_WITHIN_S)
        self._process.kill()
        self._process.wait()
        self._parent_watch.release(self._process.pid)


def _options(address: Address, own: str, where: str, secret: bytes, folder: Path) -> list[str]:
    """Return the options of the member at `address`, which listens on the numeric address `own`."""
    scheme = "https" if where.startswith(TLS_SCHEME) else "http"

    def url(address: Address, offset: int = 0) -> str:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"{scheme}://{host}:{address[1] + offset}"

    def name(address: Address) -> str:
        return f"{address[0]}-{address[1]}"

    # Debian resolves a host's own name to its loopback, where other hosts could not connect.
    everywhere = is_loopback(own) and not is_loopback(address[0])
    listening = ("0.0.0.0" if everywhere else own, address[1])
    token = hmac.new(secret, b"the etcd at " + where.encode(), hashlib.sha256).hexdigest()[:16]
    values = {
        "name": name(address),
        "data-dir": folder / f"data-{token}",  # an earlier job may have used this folder
        "listen-client-urls": url(listening),
        "advertise-client-urls": url(address),
        "listen-peer-urls": url(listening, PEER_PORT_OFFSET),
        "initial-advertise-peer-urls": url(address, PEER_PORT_OFFSET),
        "initial-cluster": ",".join(f"{name(one)}={url(one, PEER_PORT_OFFSET)}" for one in parse_addresses(where)),
        "initial-cluster-token": token,
    }
    return [f"--{option}={value}" for option, value in values.items()]


def _own_address(address: Address) -> str | None:
    """Return the numeric address if it is one of this host, else None. Raises LockstepError if the port is in use."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError:  # in Kubernetes the name of a lost host is unknown
        return None
    for family, kind, protocol, _, place in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind(place)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue
                where = f"{address[0]}:{address[1]}"
                raise LockstepError(f"--start-etcd: {where} is in use on this host; name another port") from None
            return str(place[0])
    return None
