"""etcd as the control store: a small bridge process between the host agent, which must not block, and etcd.

The host agent has one end of a socketpair, and uses RemoteStoreClient on it as with any control store. The bridge has
the other end as its standard input, and sends requests to the JSON gateway of etcd (3.4 and later); it may use threads,
and blocks, with deadlines. When it cannot reach etcd, it sends the client the reason and exits. To the client that is a
lost connection: it starts another bridge after a while. When the host agent is gone, the bridge's input ends, and it
exits.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

from lockstep.control.connection import READ_BYTES, SCHEME, TLS_SCHEME, OwnEtcd, parse_addresses
from lockstep.control.etcd_gateway import EtcdAccess, Gateway, LoginFailed, Refused, Unreachable
from lockstep.control.store import Change, Json, StoreEntry, check_key, check_revision, copy_value, write_json
from lockstep.control.wire import (
    VARIABLE,
    Channel,
    Message,
    WireError,
    change_as_row,
    check_request,
    cut_pages,
    cut_round,
    entry_as_row,
    read_secret,
)

CLOSE_S: Final = 3.0
FINAL_MESSAGE_S: Final = 1.0
LIST_AT_ONCE: Final = 64


@dataclass(frozen=True)
class Listing:
    changes: list[Change]
    revision: int


@dataclass(frozen=True)
class TransactionResult:
    """Whether a transaction was carried out, and the revision of the last change of its key (0 if it is not known)."""

    done: bool
    revision: int


@final
class Etcd:
    """The operations of a control store. The revision of a key is etcd's `mod_revision`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def list(self, prefix: str, after: str = "", *, most: int | None = None) -> Listing:
        """All keys below the prefix as of one revision; only keys greater than `after`, at most `most`."""
        start, end = prefix.encode(), _end_of(prefix)
        if after:
            start = max(start, after.encode() + b"\0")
        found: list[Change] = []
        revision = 0
        while True:
            limit = LIST_AT_ONCE if most is None else min(LIST_AT_ONCE, most - len(found))
            body = {"key": _encode(start), "range_end": _encode(end), "limit": limit, "revision": revision}
            answer = self._gateway.call("/v3/kv/range", body)
            revision = revision or int(answer["header"]["revision"])
            rows = answer.get("kvs", [])
            found += [_as_change(row) for row in rows]
            if not answer.get("more") or len(found) == most:
                return Listing(found, revision)
            start = base64.b64decode(rows[-1]["key"]) + b"\0"

    def get(self, key: str) -> StoreEntry | None:
        rows = self._gateway.call("/v3/kv/range", {"key": _encode(key.encode())}).get("kvs", [])
        return _as_change(rows[0]).entry if rows else None

    def cas(self, key: str, value: Json, revision: int, lease: str | None) -> TransactionResult:
        put = {"key": _encode(key.encode()), "value": _encode(write_json(value).encode()), "lease": lease or "0"}
        return self._transact(key, revision, {"request_put": put})

    def delete(self, key: str, revision: int) -> TransactionResult:
        if revision == 0:  # to etcd that is a key that does not exist, and deleting it succeeds
            return TransactionResult(False, 0)
        return self._transact(key, revision, {"request_delete_range": {"key": _encode(key.encode())}})

    def grant(self, ttl_s: float) -> str:
        """Returns the id of a new lease. etcd uses whole seconds, and may grant more; HeldLease uses the exact TTL."""
        return str(self._gateway.call("/v3/lease/grant", {"TTL": math.ceil(ttl_s)})["ID"])

    def keep_alive(self, lease: str) -> bool:
        return int(self._gateway.call("/v3/lease/keepalive", {"ID": lease}).get("TTL", 0)) > 0

    def revoke(self, lease: str) -> bool:
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": lease})
        except Refused:
            return False
        return True

    def watch(self, prefix: str, after: int) -> Iterator[Listing]:
        """The changes below the prefix after a revision, endless; ends only if etcd has compacted that revision."""
        while True:
            keys = {"key": _encode(prefix.encode()), "range_end": _encode(_end_of(prefix))}
            for result in self._gateway.watch({"create_request": {**keys, "start_revision": after + 1}}):
                if result.get("canceled"):
                    if int(result.get("compact_revision", 0)):
                        return
                    break
                changes = [_as_change(event["kv"], event.get("type", "PUT")) for event in result.get("events", [])]
                if changes:
                    after = max(change.revision for change in changes)
                    yield Listing(changes, after)

    def _transact(self, key: str, revision: int, success: Json) -> TransactionResult:
        same = {"key": _encode(key.encode()), "target": "MOD", "mod_revision": revision, "result": "EQUAL"}
        read_key = {"request_range": {"key": _encode(key.encode())}}
        body = {"compare": [same], "success": [success], "failure": [read_key]}
        answer = self._gateway.call("/v3/kv/txn", body, once=True)
        if answer.get("succeeded"):
            return TransactionResult(True, int(answer["header"]["revision"]))
        rows = answer["responses"][0]["response_range"].get("kvs", [])
        return TransactionResult(False, _as_change(rows[0]).revision if rows else 0)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _end_of(prefix: str) -> bytes:
    """The first key after all keys that begin with the prefix. UTF-8 never contains the byte 255."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])


def _as_change(row: dict[str, Any], kind: str = "PUT") -> Change:
    key, revision = base64.b64decode(row["key"]).decode(errors="replace"), int(row["mod_revision"])
    if kind == "DELETE":
        return Change(key, revision, None)
    try:
        value = json.loads(base64.b64decode(row.get("value", "")))
    except ValueError:
        text = f"the value of {key!r} in etcd is no JSON and not ours; give the job a prefix of its own"
        raise Unreachable(text) from None
    lease = row.get("lease", "0")
    return Change(key, revision, StoreEntry(value, revision, None if lease == "0" else lease))


# --------------------------------------------------------------------------------------------------------- the bridge


@final
class Bridge:
    """The host agent's side: a Dial for RemoteStoreClient that starts a new bridge process each time."""

    def __init__(self, where: str, secret: bytes, *, own: OwnEtcd | None = None) -> None:
        """`where` as in `parse_addresses`; any secret will do, it is only for the two ends of the socketpair."""
        self._where = where
        self._scheme = TLS_SCHEME if where.startswith(TLS_SCHEME) else SCHEME
        self._endpoints = parse_addresses(where)
        self._secret = secret
        self._own = own
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return self._where

    def __call__(self) -> socket.socket:
        self._stop(within_s=0)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "lockstep.control.etcd"]
        command += [self._scheme + ",".join(f"{host}:{port}" for host, port in self._endpoints)]
        root = {}
        if self._own is not None:
            root = {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": self._own.password}
            command += ["--own", *([f"{self._own.member[0]}:{self._own.member[1]}"] if self._own.member else [])]
        self._endpoints.append(self._endpoints.pop(0))  # in case it is stopped before it has tried them all
        with theirs:
            # In its own session: the launcher decides about Ctrl-C.
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, VARIABLE: self._secret.hex(), **root},
                start_new_session=True,
            )
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """Call it after the client has been closed: its last request, to end its lease, gets CLOSE_S."""
        self._stop(within_s=CLOSE_S)

    def _stop(self, *, within_s: float) -> None:
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._process.kill()
        self._process.wait()
        self._process = None


@final
class _ClientEnd:
    """The bridge's end of the socketpair. Two threads send on it: answers and pushes."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock = sock
        self.channel = Channel(secret, is_server=True)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        # If the client has closed its end, its last request may still be in our input: `serve` ends with the input.
        with self._lock, suppress(ConnectionError):
            self.sock.sendall(self.channel.outgoing(message))

    def fail(self, error: Exception) -> NoReturn:
        """Send the client the error and exit, from any thread, whatever the others wait for."""
        if self.channel.is_open and self._lock.acquire(timeout=FINAL_MESSAGE_S):
            with suppress(OSError):
                self.sock.settimeout(FINAL_MESSAGE_S)
                self.sock.sendall(self.channel.outgoing({"trouble": str(error)}))
        os._exit(1)


def serve(client_end: _ClientEnd, etcd: Etcd) -> None:
    """Answer requests until the client closes its end. Raises WireError, Unreachable, OSError."""
    watches = 0
    while data := client_end.sock.recv(READ_BYTES):
        messages = client_end.channel.feed(data)
        if handshake := client_end.channel.take_handshake():
            client_end.sock.sendall(handshake)
        for message in messages:
            check_request(message)
            result: Message = {"done": True}
            if message["do"] == "watch":
                watches += 1
                if watches > 1:
                    raise WireError("a second watch on one connection; connect again for that")
            else:
                try:
                    result = answer(etcd, message)
                except (Refused, ValueError) as error:
                    result = {"error": str(error)}
            client_end.send({"id": message["id"], **result})
            if message["do"] == "watch":
                threading.Thread(target=_watch, args=(client_end, etcd, message["prefix"]), daemon=True).start()


def answer(etcd: Etcd, request: Message) -> Message:
    """Like `server.answer`, with etcd as the store."""
    match request:
        case {"do": "get", "key": key}:
            return {"entry": entry_as_row(key, etcd.get(check_key(key)))}
        case {"do": "list", "prefix": prefix, "after": after}:
            listed = etcd.list(check_key(prefix), after, most=LIST_AT_ONCE)
            pages = cut_pages(listed.changes)
            more = len(pages) > 1 or len(listed.changes) == LIST_AT_ONCE
            return {"entries": [change_as_row(one) for one in pages[0]], "more": more}
        case {"do": "cas", "key": key, "value": value, "revision": revision, "lease": lease}:
            check_revision(revision)
            return vars(etcd.cas(check_key(key), copy_value(value), revision, lease))
        case {"do": "delete", "key": key, "revision": revision}:
            check_revision(revision)
            return vars(etcd.delete(check_key(key), revision))
        case {"do": "grant", "ttl_s": ttl_s}:
            return {"lease": etcd.grant(ttl_s)}
        case {"do": "keep_alive", "lease": lease}:
            return {"done": etcd.keep_alive(lease)}
        case {"do": "revoke", "lease": lease}:
            return {"done": etcd.revoke(lease)}
    raise AssertionError(request["do"])


def _watch(client_end: _ClientEnd, etcd: Etcd, prefix: str) -> None:
    try:
        while True:
            listed = etcd.list(check_key(prefix))
            _push(client_end, listed, anew=True)
            for news in etcd.watch(prefix, listed.revision):
                _push(client_end, news, anew=False)
    except (Unreachable, LoginFailed, Refused, OSError, ValueError) as error:
        client_end.fail(error)


def _push(client_end: _ClientEnd, listed: Listing, *, anew: bool) -> None:
    for push in cut_round(listed.changes, listed.revision, anew=anew):
        client_end.send(push.as_message())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m lockstep.control.etcd", description=__doc__.partition("\n")[0])
    parser.add_argument("where", metavar="etcd://HOST:2379,...")
    about = "the hosts of the job run this etcd; the member of this host, if there is one"
    parser.add_argument("--own", nargs="?", const="", metavar="HOST:PORT", help=about)
    options = parser.parse_args(argv)
    (member,) = parse_addresses(options.own) if options.own else (None,)
    client_end = _ClientEnd(socket.socket(fileno=os.dup(0)), read_secret(os.environ))
    client_end.sock.setblocking(True)
    try:
        access = EtcdAccess.from_env(os.environ, options.where, is_own=options.own is not None, creates_login_at=member)
        serve(client_end, Etcd(Gateway(parse_addresses(options.where), access)))
    except (Unreachable, LoginFailed, WireError, OSError, ValueError) as error:
        client_end.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()
