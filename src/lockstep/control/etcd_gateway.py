"""The operations of a control store on etcd, through its JSON gateway (etcd 3.4 and later). Blocks, with deadlines.

Of several endpoints the one that last answered is used first. A request that could not be sent, or may be repeated, is
sent to the next; a transaction that was sent and not answered is not: it may have been carried out.
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

from lockstep.control.sockets import Address, configure_socket
from lockstep.control.store import Change, Json, StoreEntry, write_json
from lockstep.errors import LockstepError

CONNECT_S: Final = 1.0
ANSWER_S: Final = 1.5
QUIET_S: Final = 5.0  # a watch without events for so long is restarted: its etcd member may be cut off unnoticed
LIST_AT_ONCE: Final = 64
# Codes with which etcd refuses a request: a bad argument, no such lease, no room. Others are errors of the endpoint.
_REFUSED: Final = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 8: "RESOURCE_EXHAUSTED"}

T = TypeVar("T")


class Unreachable(LockstepError):
    """No endpoint gives a valid answer."""


class Refused(LockstepError):
    """etcd refuses the request. Nothing has changed."""


class _EndpointError(Exception):
    """A request to one endpoint failed. `sent`: it may have been carried out."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class Listing:
    changes: list[Change]
    revision: int


@dataclass(frozen=True)
class TransactionResult:
    """Whether a transaction was carried out, and the last change of its key (revision 0 if that is not known)."""

    done: bool
    last: Change


@final
class Gateway:
    """Sends requests to the first endpoint that answers. Several threads may use it."""

    def __init__(self, endpoints: list[Address]) -> None:
        self._endpoints = list(endpoints)
        self._lock = threading.Lock()

    def call(self, path: str, body: Json, *, once: bool = False) -> Json:
        """Send a request. `once`: not to another endpoint if the first may have carried it out."""
        return self._first_answer(lambda endpoint: _call(endpoint, path, body), once=once)

    def watch(self, body: Json) -> Iterator[Json]:
        """The results of one stream, until it breaks or is quiet for QUIET_S. Raises Unreachable if none starts."""
        connection, response = self._first_answer(lambda endpoint: _begin_watch(endpoint, body), once=False)
        with closing(connection):
            connection.sock.settimeout(QUIET_S)
            try:
                while line := response.readline():
                    yield _result(json.loads(line))
            except (OSError, http.client.HTTPException, ValueError, _EndpointError):
                return  # the caller starts another stream, at another endpoint if need be

    def _first_answer(self, ask: Callable[[Address], T], *, once: bool) -> T:
        with self._lock:
            order = list(self._endpoints)
        problems = []
        for endpoint in order:
            try:
                result = ask(endpoint)
            except _EndpointError as problem:
                problems.append(f"{endpoint[0]}:{endpoint[1]}: {problem}")
                with self._lock:  # to the end of the queue
                    self._endpoints.sort(key=lambda one: one == endpoint)
                if once and problem.sent:
                    break
                continue
            return result
        raise Unreachable("etcd does not answer; " + "; ".join(problems))


def _call(endpoint: Address, path: str, body: Json) -> Json:
    connection, response = _send(endpoint, path, body)
    with closing(connection):
        try:
            return _result(json.loads(response.read()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _EndpointError(_error_text(error), sent=True) from None


def _begin_watch(
    endpoint: Address, body: Json
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:  # fmt: skip
    connection, response = _send(endpoint, "/v3/watch", body)
    try:
        if not _result(json.loads(response.readline())).get("created"):
            raise _EndpointError("no watch was created", sent=True)
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        raise _EndpointError(_error_text(error), sent=True) from None
    except _EndpointError:
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
        configure_socket(connection.sock)
        connection.sock.settimeout(ANSWER_S)
    except OSError as error:
        connection.close()
        raise _EndpointError(_error_text(error), sent=False) from None
    try:
        # Without it, an etcd member that has lost its cluster would let a watch wait forever.
        connection.request("POST", path, write_json(body), {"Grpc-Metadata-hasleader": "true"})
        return connection, connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise _EndpointError(_error_text(error), sent=True) from None


def _result(answer: Json) -> Json:
    """The result in an answer: streams wrap results and errors. Raises Refused or _EndpointError for an error."""
    error = answer.get("error")
    if error is None:
        return answer.get("result", answer)
    details = error if isinstance(error, dict) else answer
    code = details.get("code", details.get("grpc_code"))
    message = details.get("message") or str(error)
    if code in _REFUSED:
        raise Refused(message)
    raise _EndpointError(f"{message} (code {code})", sent=True)


def _error_text(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


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
        answer = self._transact(key, revision, {"request_put": put})
        if answer.get("succeeded"):
            at = int(answer["header"]["revision"])
            return TransactionResult(True, Change(key, at, StoreEntry(value, at, lease)))
        return _failed_transaction(key, answer)

    def delete(self, key: str, revision: int) -> TransactionResult:
        if revision == 0:  # to etcd that is a key that does not exist, and deleting it succeeds
            return TransactionResult(False, Change(key, 0, None))
        answer = self._transact(key, revision, {"request_delete_range": {"key": _encode(key.encode())}})
        if answer.get("succeeded"):
            return TransactionResult(True, Change(key, int(answer["header"]["revision"]), None))
        return _failed_transaction(key, answer)

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

    def _transact(self, key: str, revision: int, success: Json) -> Json:
        same = {"key": _encode(key.encode()), "target": "MOD", "mod_revision": revision, "result": "EQUAL"}
        read_key = {"request_range": {"key": _encode(key.encode())}}
        return self._gateway.call(
            "/v3/kv/txn", {"compare": [same], "success": [success], "failure": [read_key]}, once=True
        )


def _failed_transaction(key: str, answer: Json) -> TransactionResult:
    rows = answer["responses"][0]["response_range"].get("kvs", [])
    return TransactionResult(False, _as_change(rows[0]) if rows else Change(key, 0, None))


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
