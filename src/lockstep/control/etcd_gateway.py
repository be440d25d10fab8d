"""Requests to the JSON gateway of etcd (3.4 and later), with TLS and a login where they are asked for.

Of several endpoints the one that last answered is used first. A request that could not be sent, or may be repeated, is
sent to the next; a transaction that was sent and not answered is not: it may have been carried out.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar, final

from lockstep.control.connection import SCHEME, TLS_SCHEME, Address, configure_socket
from lockstep.control.store import Json, write_json
from lockstep.errors import LockstepError

CONNECT_S: Final = 1.0
ANSWER_S: Final = 1.5
QUIET_S: Final = 5.0  # a watch without events for so long is restarted: its etcd member may be cut off unnoticed
# Codes with which etcd refuses a request: a bad argument, no such lease, no permission, no room. Others are errors of
# the endpoint.
_REFUSED: Final = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED"}
_UNAUTHENTICATED: Final = 16
_FAILED_PRECONDITION: Final = 9  # of requests about the login: it is there already, or there is none
_NO_USER: Final = "user name is empty"  # code 3: the request has no token, and etcd wants one
_DENIED: Final = "permission denied"
_LOGIN_OFF: Final = "authentication is not enabled"

T = TypeVar("T")
Exchange: TypeAlias = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class Unreachable(LockstepError):
    """No endpoint gives a valid answer."""


class Refused(LockstepError):
    """etcd refuses the request. Nothing has changed."""


class _EndpointError(Exception):
    """A request to one endpoint failed. `sent`: it may have been carried out."""

    def __init__(self, message: str, *, sent: bool, code: int = 0) -> None:
        super().__init__(message)
        self.sent, self.code = sent, code


class _NotLoggedIn(Exception):
    """A request had no token, or one that has expired. It was not carried out."""


@dataclass(frozen=True)
class EtcdAccess:
    """How etcd is reached: with TLS or without, and as which user."""

    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    is_own: bool = False  # the hosts of the job run this etcd: its login may not exist yet
    creates_login_at: Address | None = None  # the member of this host, at which it creates the login of an own etcd

    @staticmethod
    def from_env(
        environ: Mapping[str, str], where: str, *, is_own: bool = False, creates_login_at: Address | None = None
    ) -> EtcdAccess:
        """Read the variables that etcdctl reads. Raises ValueError if they do not fit `where` or a file is unusable."""
        named = {name: environ.get(f"ETCDCTL_{name}", "") for name in ("CACERT", "CERT", "KEY", "USER", "PASSWORD")}
        tls = None
        if where.startswith(TLS_SCHEME):
            try:
                tls = ssl.create_default_context(cafile=named["CACERT"] or None)
                if named["CERT"]:
                    tls.load_cert_chain(named["CERT"], named["KEY"] or None)
            except OSError as error:  # ssl.SSLError among them
                files = ", ".join(f"ETCDCTL_{name}={named[name]}" for name in ("CACERT", "CERT", "KEY") if named[name])
                raise ValueError(f"the certificates for etcd cannot be loaded: {error} ({files})") from None
        elif given := [f"ETCDCTL_{name}" for name in ("CACERT", "CERT", "KEY") if named[name]]:
            raise ValueError(
                f"{' and '.join(given)} is set, but {where} is without TLS: write {where.replace(SCHEME, TLS_SCHEME)}, "
                "or unset it"
            )
        user, _, password = named["USER"].partition(":")
        return EtcdAccess(tls, user, named["PASSWORD"] or password, is_own, creates_login_at)


class LoginFailed(LockstepError):
    """etcd does not accept the user, or the user may not use the keys of the job. Trying again does not help."""


@final
class Gateway:
    """Sends requests to the first endpoint that answers. Several threads may use it."""

    def __init__(self, endpoints: list[Address], access: EtcdAccess | None = None) -> None:
        self._endpoints = list(endpoints)
        self._access = access or EtcdAccess()
        self._token = ""
        self._lock = threading.Lock()
        self._login_lock = threading.Lock()

    def call(self, path: str, body: Json, *, once: bool = False) -> Json:
        """Send a request. `once`: not to another endpoint if the first may have carried it out."""
        return self._first_answer(lambda endpoint: self._call(endpoint, path, body), once=once)

    def watch(self, body: Json) -> Iterator[Json]:
        """The results of one stream, until it breaks or is quiet for QUIET_S. Raises Unreachable if none starts."""
        connection, response = self._first_answer(lambda endpoint: self._begin_watch(endpoint, body), once=False)
        with closing(connection):
            connection.sock.settimeout(QUIET_S)
            try:
                while line := response.readline():
                    yield _result(json.loads(line))
            except (OSError, http.client.HTTPException, ValueError, _EndpointError, _NotLoggedIn):
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

    # -- one endpoint ------------------------------------------------------------------------------------------------

    def _call(self, endpoint: Address, path: str, body: Json) -> Json:
        return self._logged_in(endpoint, lambda token: self._ask(endpoint, path, body, token))

    def _begin_watch(self, endpoint: Address, body: Json) -> Exchange:
        def begin(token: str) -> Exchange:
            connection, response = self._send(endpoint, "/v3/watch", body, token)
            with _endpoint_errors(connection, OSError, http.client.HTTPException, ValueError, sent=True):
                created = _result(_parse(response, response.readline()))
                if created.get("canceled") and not int(created.get("compact_revision", 0)):
                    raise _NotLoggedIn(created.get("cancel_reason", "the watch was refused"))
                if not created.get("created"):
                    raise _EndpointError("no watch was created", sent=True)
            return connection, response

        return self._logged_in(endpoint, begin)

    def _send(self, endpoint: Address, path: str, body: Json, token: str = "") -> Exchange:
        connection = http.client.HTTPConnection(*endpoint, timeout=CONNECT_S)
        if self._access.tls is not None:
            connection = http.client.HTTPSConnection(*endpoint, timeout=CONNECT_S, context=self._access.tls)
        with _endpoint_errors(connection, OSError, sent=False):
            connection.connect()
            assert connection.sock is not None
            configure_socket(connection.sock)
            connection.sock.settimeout(ANSWER_S)
        # Without hasleader, an etcd member that has lost its cluster would let a watch wait forever.
        headers = {"Grpc-Metadata-hasleader": "true"} | ({"Authorization": token} if token else {})
        with _endpoint_errors(connection, OSError, http.client.HTTPException, sent=True):
            connection.request("POST", path, write_json(body), headers)
            return connection, connection.getresponse()

    # -- login -------------------------------------------------------------------------------------------------------

    def _logged_in(self, endpoint: Address, send: Callable[[str], T]) -> T:
        """Return what `send` returns for a token; log in before the first request, and when the token has expired."""
        token = self._token
        if not self._access.user:
            try:
                return send("")
            except (_NotLoggedIn, Refused) as problem:
                if isinstance(problem, Refused) and _DENIED not in str(problem):
                    raise
                raise LoginFailed(f"etcd wants a login ({problem}): set ETCDCTL_USER=NAME:PASSWORD") from None
        if token:
            with suppress(_NotLoggedIn):
                return send(token)
        try:
            return send(self._log_in(endpoint, token))
        except _NotLoggedIn as problem:  # it was not carried out
            raise _EndpointError(f"the new login is not accepted: {problem}", sent=False) from None

    def _log_in(self, endpoint: Address, expired: str) -> str:
        """Return a token that is not `expired`. Raises LoginFailed if the user is not accepted."""
        login = {"name": self._access.user, "password": self._access.password}
        with self._login_lock:
            if self._token != expired:  # another thread was faster
                return self._token
            try:
                try:
                    answer = self._ask(endpoint, "/v3/auth/authenticate", login)
                except _EndpointError as problem:
                    if _LOGIN_OFF not in str(problem):
                        raise
                    self._require_login(endpoint)
                    answer = self._ask(endpoint, "/v3/auth/authenticate", login)
            except (Refused, _NotLoggedIn) as problem:
                hint = ": the secrets of the hosts differ" if self._access.is_own else ""
                raise LoginFailed(f"etcd does not accept the user {self._access.user!r}: {problem}{hint}") from None
            except _EndpointError as problem:  # the request itself was not sent
                raise _EndpointError(str(problem), sent=False) from None
            self._token = answer["token"]
            return self._token

    def _require_login(self, endpoint: Address) -> None:
        """Create the user, with all rights, in an etcd of this job that has no login yet.

        Only at the member that this host runs: at another address there could be an etcd of others. Raises LoginFailed
        if this etcd is not the job's, and _EndpointError if another host has to create the login.
        """
        name = self._access.user
        if not self._access.is_own:
            raise LoginFailed(f"ETCDCTL_USER is {name}, but this etcd has no login: unset it")
        if endpoint != self._access.creates_login_at:
            raise _EndpointError("it has no login yet", sent=False)
        for path, body in (
            ("user/add", {"name": name, "password": self._access.password}),
            ("role/add", {"name": name}),
            ("user/grant", {"user": name, "role": name}),
            ("enable", {}),
        ):
            try:
                self._ask(endpoint, f"/v3/auth/{path}", body)
            except _NotLoggedIn:  # another host has just finished it
                return
            except _EndpointError as problem:
                if problem.code != _FAILED_PRECONDITION:  # another host was faster
                    raise

    def _ask(self, endpoint: Address, path: str, body: Json, token: str = "") -> Json:
        connection, response = self._send(endpoint, path, body, token)
        with closing(connection), _endpoint_errors(connection, OSError, http.client.HTTPException, sent=True):
            return _result(_parse(response, response.read()))


@contextmanager
def _endpoint_errors(connection: http.client.HTTPConnection, *errors: type[Exception], sent: bool) -> Iterator[None]:
    """Close the connection after any exception, and raise _EndpointError in place of one of `errors`."""
    try:
        yield
    except BaseException as error:
        connection.close()
        if not isinstance(error, errors):
            raise
        text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise _EndpointError(text, sent=sent) from None


def _parse(response: http.client.HTTPResponse, data: bytes) -> Json:
    """Raises _EndpointError if it is no JSON: some refusals of etcd are plain text."""
    try:
        return json.loads(data)
    except ValueError:
        text = " ".join(data.decode(errors="replace").split())[:200]
        raise _EndpointError(f"{text or 'an answer without content'} (HTTP {response.status})", sent=True) from None


def _result(answer: Json) -> Json:
    """The result in an answer: streams wrap results and errors. Raises Refused or _EndpointError for an error."""
    error = answer.get("error")
    if error is None:
        return answer.get("result", answer)
    details = error if isinstance(error, dict) else answer
    code = details.get("code", details.get("grpc_code"))
    message = details.get("message") or str(error)
    if code == _UNAUTHENTICATED or _NO_USER in message:
        raise _NotLoggedIn(message)
    if code in _REFUSED:
        raise Refused(message)
    raise _EndpointError(f"{message} (code {code})", sent=True, code=int(code or 0))
