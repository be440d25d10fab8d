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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from lockstep.control.connection import TLS_SCHEME, Address, parse_addresses
from lockstep.errors import LockstepError
from lockstep.launcher.parent_watch import ParentWatch

PEER_PORT_OFFSET: Final = 1  # etcd's own convention: 2379 for clients, 2380 for other members
START_S: Final = 0.5  # if something is wrong with its options, etcd ends within this time
STOP_WITHIN_S: Final = 5.0
READ_WITHIN_S: Final = 2.0  # time for the other hosts to read the last records before a member ends


def root_password(secret: bytes) -> str:
    """Return the password of the user root in the etcd of a job."""
    return hmac.new(secret, b"the login to the etcd of a job", hashlib.sha256).hexdigest()


def check_start(where: str, environ: Mapping[str, str]) -> str:
    """Return the path of the etcd program. Raises ValueError if a member cannot be started."""
    program = environ.get("ETCD") or shutil.which("etcd")
    if program is None:
        raise ValueError("--start-etcd: there is no etcd on the PATH; install it (Debian: etcd-server), or set $ETCD")
    if len(parse_addresses(where)) % 2 == 0:
        raise ValueError(
            f"--start-etcd: {where} names {len(parse_addresses(where))} members; name 3 or 5 (or 1, which may not be "
            "lost): more than half of them must be alive, so an even number helps nothing"
        )
    if where.startswith(TLS_SCHEME) and not (environ.get("ETCD_CERT_FILE") and environ.get("ETCD_PEER_CERT_FILE")):
        raise ValueError(
            f"--start-etcd: {where} is with TLS, so etcd needs certificates: set ETCD_CERT_FILE, ETCD_KEY_FILE, "
            "ETCD_PEER_CERT_FILE, ETCD_PEER_KEY_FILE and ETCD_PEER_TRUSTED_CA_FILE (docs/security.md)"
        )
    return program


@final
class EtcdMember:
    """The etcd process of this host. It ends with the launcher, also if that is killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @staticmethod
    def start(where: str, secret: bytes, folder: Path, parent_watch: ParentWatch) -> EtcdMember | None:
        """Start the member of this host; return None if none of the addresses is this host's.

        Raises LockstepError if the port is taken, or etcd ends at once.
        """
        program = check_start(where, os.environ)
        addresses = parse_addresses(where)
        mine = next((address for address in addresses if _is_own(address)), None)
        if mine is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "etcd.log"
        command = [program, *_options(mine, addresses, where.startswith(TLS_SCHEME), secret, folder)]
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # the launcher decides about Ctrl-C
                preexec_fn=parent_watch.child_setup(),
            )
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(START_S)
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise LockstepError(f"--start-etcd: etcd ended at once with status {status}: {last} (all of it in {log})")
        return EtcdMember(process)

    def __enter__(self) -> EtcdMember:
        return self

    def __exit__(self, *_: object) -> None:
        """End the member, after a moment in which other hosts can read what was written last."""
        if self._process.poll() is None:
            time.sleep(READ_WITHIN_S)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_WITHIN_S)
        self._process.kill()
        self._process.wait()


def _options(mine: Address, addresses: Sequence[Address], tls: bool, secret: bytes, folder: Path) -> list[str]:
    scheme = "https" if tls else "http"

    def url(address: Address, offset: int = 0) -> str:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"{scheme}://{host}:{address[1] + offset}"

    def name(address: Address) -> str:
        return f"{address[0]}-{address[1]}"

    # etcd does not listen on names. A host whose name is that of its loopback interface listens on all addresses.
    numeric = socket.gethostbyname(mine[0]) if ":" not in mine[0] else mine[0]
    listening = ("0.0.0.0" if numeric.startswith("127.") and numeric != mine[0] else numeric, mine[1])
    cluster = ",".join(f"{name(one)}={url(one, PEER_PORT_OFFSET)}" for one in addresses)
    values = {
        "name": name(mine),
        "data-dir": folder / "data",
        "listen-client-urls": url(listening),
        "advertise-client-urls": url(mine),
        "listen-peer-urls": url(listening, PEER_PORT_OFFSET),
        "initial-advertise-peer-urls": url(mine, PEER_PORT_OFFSET),
        "initial-cluster": cluster,
        "initial-cluster-token": hmac.new(secret, b"the name of an etcd", hashlib.sha256).hexdigest()[:16],
    }
    return [f"--{option}={value}" for option, value in values.items()]


def _is_own(address: Address) -> bool:
    """Whether this host has the address. Raises LockstepError if the port is taken."""
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind(place)
                return True
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise LockstepError(
                        f"--start-etcd: {address[0]}:{address[1]} is in use here. If an etcd runs already, leave "
                        "--start-etcd out; else name another port"
                    ) from None
    return False
