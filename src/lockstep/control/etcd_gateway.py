"""The records of a control store in an etcd, through its JSON gateway (etcd 3.4 and later). Blocks, with deadlines.

Of several endpoints the one that last answered is asked first. What could not be sent, or may be asked twice, goes on
to the next; a transaction that was sent and not answered does not: nobody knows whether it happened.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from lockstep.control.sockets import Address, set_up
from lockstep.control.store import Change, Entry, Json, write_json
from lockstep.errors import LockstepError

CONNECT_S: Final = 1.0
ANSWER_S: Final = 1.5
QUIET_S: Final = 5.0  # a watch without news for so long is begun again: its member may be cut off and not know it
LIST_AT_ONCE: Final = 64
# What etcd has understood and will not do: a bad argument, no such lease, no room. Anything else is trouble of its own.
_REFUSED: Final = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 8: "RESOURCE_EXHAUSTED"}

T = TypeVar("T")


class Unreachable(LockstepError):
    """No endpoint answers as it should."""


class Refused(LockstepError):
    """etcd has understood, and does not do it. Nothing has changed."""


class _Trouble(Exception):
    """With one endpoint. `sent`: it may have done what it was asked."""

    def __init__(self, words: str, *, sent: bool) -> None:
        super().__init__(words)
        self.sent = sent


@dataclass(frozen=True)
class Listed:
    changes: list[Change]
    revision: int


@dataclass(frozen=True)
class Outcome:
    """`last`: what was done to the key, or else the last that had been done to it; revision 0 if that is not known."""

    done: bool
    last: Change


@final
class Gateway:
    """Calls to whichever endpoint answers. May be used by several threads."""

    def __init__(self, endpoints: list[Address]) -> None:
        self._endpoints = list(endpoints)
        self._lock = threading.Lock()

    def call(self, path: str, body: Json, *, once: bool = False) -> Json:
        """`once`: do not ask anybody else if the first may have done it."""
        return self._anywhere(lambda endpoint: _call(endpoint, path, body), once=once)

    def watch(self, body: Json) -> Iterator[Json]:
        """The results of one stream, until it is quiet for too long or breaks. Unreachable if none can be begun."""
        connection, response = self._anywhere(lambda endpoint: _begin_watch(endpoint, body), once=False)
        with closing(connection):
            connection.sock.settimeout(QUIET_S)
            try:
                while line := response.readline():
                    yield _result(json.loads(line))
            except (OSError, http.client.HTTPException, ValueError, _Trouble):
                return  # begun again, elsewhere if need be

    def _anywhere(self, ask: Callable[[Address], T], *, once: bool) -> T:
        with self._lock:
            order = list(self._endpoints)
        words = []
        for endpoint in order:
            try:
                result = ask(endpoint)
            except _Trouble as trouble:
                words.append(f"{endpoint[0]}:{endpoint[1]}: {trouble}")
                with self._lock:  # to the end of the queue
                    self._endpoints.sort(key=lambda one: one == endpoint)
                if once and trouble.sent:
                    break
                continue
            return result
        raise Unreachable("etcd does not answer; " + "; ".join(words))


def _call(endpoint: Address, path: str, body: Json) -> Json:
    connection, response = _send(endpoint, path, body)
    with closing(connection):
        try:
            return _result(json.loads(response.read()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Trouble(_words(error), sent=True) from None


def _begin_watch(
    endpoint: Address, body: Json
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:  # fmt: skip
    connection, response = _send(endpoint, "/v3/watch", body)
    try:
        if not _result(json.loads(response.readline())).get("created"):
            raise _Trouble("no watch was created", sent=True)
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        raise _Trouble(_words(error), sent=True) from None
    except _Trouble:
        connection.close()
        raise
    return connection, response


def _send(
    endpoint: Address, path: str, body: Json
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:  # fmt: skip
    connection = http.client.HTTPConnection(*endpoint, timeout=CONNECT_S)
    try:
        connection.connect()
        assert connection.sock is not None
        set_up(connection.sock)
        connection.sock.settimeout(ANSWER_S)
    except OSError as error:
        connection.close()
        raise _Trouble(_words(error), sent=False) from None
    try:
        # A member that has lost its cluster would otherwise let a watch wait for ever.
        connection.request("POST", path, write_json(body), {"Grpc-Metadata-hasleader": "true"})
        return connection, connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise _Trouble(_words(error), sent=True) from None


def _result(answer: Json) -> Json:
    """Streams wrap their results, and their errors."""
    error = answer.get("error")
    if error is None:
        return answer.get("result", answer)
    details = error if isinstance(error, dict) else answer
    code = details.get("code", details.get("grpc_code"))
    words = details.get("message") or str(error)
    if code in _REFUSED:
        raise Refused(words)
    raise _Trouble(f"{words} (code {code})", sent=True)


def _words(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


@final
class Etcd:
    """The operations of a store. A revision of ours is etcd's revision of the key's last modification."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def list(self, prefix: str, after: str = "", *, most: int | None = None) -> Listed:
        """All below the prefix as of one revision; `after` and `most`: keys after that one, at most so many."""
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
                return Listed(found, revision)
            start = base64.b64decode(rows[-1]["key"]) + b"\0"

    def get(self, key: str) -> Entry | None:
        rows = self._gateway.call("/v3/kv/range", {"key": _encode(key.encode())}).get("kvs", [])
        return _as_change(rows[0]).entry if rows else None

    def cas(self, key: str, value: Json, revision: int, lease: str | None) -> Outcome:
        put = {"key": _encode(key.encode()), "value": _encode(write_json(value).encode()), "lease": lease or "0"}
        answer = self._transact(key, revision, {"request_put": put})
        if answer.get("succeeded"):
            at = int(answer["header"]["revision"])
            return Outcome(True, Change(key, at, Entry(value, at, lease)))
        return _not_done(key, answer)

    def delete(self, key: str, revision: int) -> Outcome:
        if revision == 0:  # for etcd that is a key which is not there, and deleting it a success
            return Outcome(False, Change(key, 0, None))
        answer = self._transact(key, revision, {"request_delete_range": {"key": _encode(key.encode())}})
        if answer.get("succeeded"):
            return Outcome(True, Change(key, int(answer["header"]["revision"]), None))
        return _not_done(key, answer)

    def grant(self, ttl_s: float) -> str:
        """etcd counts whole seconds, and may give more than it was asked for. Our holder counts for itself."""
        return str(self._gateway.call("/v3/lease/grant", {"TTL": math.ceil(ttl_s)})["ID"])

    def keep_alive(self, lease: str) -> bool:
        return int(self._gateway.call("/v3/lease/keepalive", {"ID": lease}).get("TTL", 0)) > 0

    def revoke(self, lease: str) -> bool:
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": lease})
        except Refused:
            return False
        return True

    def watch(self, prefix: str, after: int) -> Iterator[Listed]:
        """What changes below the prefix after a revision, without end; ends only if etcd has forgotten that."""
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
                    yield Listed(changes, after)

    def _transact(self, key: str, revision: int, success: Json) -> Json:
        same = {"key": _encode(key.encode()), "target": "MOD", "mod_revision": revision, "result": "EQUAL"}
        look = {"request_range": {"key": _encode(key.encode())}}
        return self._gateway.call("/v3/kv/txn", {"compare": [same], "success": [success], "failure": [look]}, once=True)


def _not_done(key: str, answer: Json) -> Outcome:
    rows = answer["responses"][0]["response_range"].get("kvs", [])
    return Outcome(False, _as_change(rows[0]) if rows else Change(key, 0, None))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _end_of(prefix: str) -> bytes:
    """The first key after all that begin with the prefix. UTF-8 never has the byte 255."""
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
    return Change(key, revision, Entry(value, revision, None if lease == "0" else lease))
