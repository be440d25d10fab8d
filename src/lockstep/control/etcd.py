"""An etcd as the control store: a small process beside the supervisor, which must not block, that speaks to both.

The supervisor holds one end of a socketpair and sees a control store there: it uses Client as it is. The process has
the other end as its standard input, and asks etcd; threads are allowed in it. When it cannot reach etcd it tells the
client why, and ends. For the client that is a lost connection: it starts another one, after a while, and begins anew.
When the supervisor is gone, its input ends, and so does it.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn, final

from lockstep.control.etcd_gateway import Etcd, Gateway, Listed, Refused, Unreachable
from lockstep.control.frames import Channel, Message, WireError
from lockstep.control.messages import check_request, cut_pages, cut_round, entry_as_row
from lockstep.control.secret import VARIABLE, read_secret
from lockstep.control.sockets import parse_addresses
from lockstep.control.store import check_key, check_revision, copy_value

READ_BYTES: Final = 65536
LIST_PAGE: Final = 64
LEAVE_S: Final = 3.0
LAST_WORD_S: Final = 1.0


@final
class Bridge:
    """The supervisor's side: a Dial for Client, which starts the process anew each time."""

    def __init__(self, endpoints: str, secret: bytes) -> None:
        """`endpoints` as in `parse_addresses`; the secret is for the two of us, any will do."""
        self._where = endpoints
        self._endpoints = parse_addresses(endpoints)
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return self._where

    def __call__(self) -> socket.socket:
        self._end(within_s=0)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "lockstep.control.etcd"]
        for host, port in self._endpoints:
            command += ["--endpoint", f"{host}:{port}"]
        self._endpoints.append(self._endpoints.pop(0))  # should it not even come to try the last one
        with theirs:
            # A session of its own: Ctrl-C is for the supervisor to decide about.
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, VARIABLE: self._secret.hex()},
                start_new_session=True,
            )
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """After the client has been closed: its last words, the end of its lease, get a moment."""
        self._end(within_s=LEAVE_S)

    def _end(self, *, within_s: float) -> None:
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._process.kill()
        self._process.wait()
        self._process = None


@final
class _Line:
    """To the supervisor. Answers and pushes come from two threads."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock = sock
        self.channel = Channel(secret, is_server=True)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        # If the supervisor has hung up, its last wish may still lie in our input: `serve` ends when that does.
        with self._lock, suppress(ConnectionError):
            self.sock.sendall(self.channel.outgoing(message))

    def end(self, error: Exception) -> NoReturn:
        """From any thread, whatever the others wait for."""
        if self.channel.is_open and self._lock.acquire(timeout=LAST_WORD_S):
            with suppress(OSError):
                self.sock.settimeout(LAST_WORD_S)
                self.sock.sendall(self.channel.outgoing({"trouble": str(error)}))
        os._exit(1)


def serve(line: _Line, etcd: Etcd) -> None:
    """Until the supervisor hangs up. Raises WireError, Unreachable, OSError."""
    watches = 0
    while data := line.sock.recv(READ_BYTES):
        messages = line.channel.feed(data)
        if greeting := line.channel.take_greeting():
            line.sock.sendall(greeting)
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
            line.send({"id": message["id"], **result})
            if message["do"] == "watch":
                threading.Thread(target=_watch, args=(line, etcd, message["prefix"]), daemon=True).start()


def answer(etcd: Etcd, request: Message) -> Message:
    """Like server.answer."""
    match request:
        case {"do": "get", "key": key}:
            return {"entry": entry_as_row(key, etcd.get(check_key(key)))}
        case {"do": "list", "prefix": prefix, "after": after}:
            listed = etcd.list(check_key(prefix), after, most=LIST_PAGE)
            pages = cut_pages(listed.changes)
            rows = [entry_as_row(one.key, one.entry) for one in pages[0]]
            return {"entries": rows, "more": len(pages) > 1 or len(listed.changes) == LIST_PAGE}
        case {"do": "cas", "key": key, "value": value, "revision": revision, "lease": lease}:
            check_revision(revision)
            outcome = etcd.cas(check_key(key), copy_value(value), revision, lease)
            return {"done": outcome.done, "revision": outcome.last.revision}
        case {"do": "delete", "key": key, "revision": revision}:
            check_revision(revision)
            outcome = etcd.delete(check_key(key), revision)
            return {"done": outcome.done, "revision": outcome.last.revision}
        case {"do": "grant", "ttl_s": ttl_s}:
            return {"lease": etcd.grant(ttl_s)}
        case {"do": "keep_alive", "lease": lease}:
            return {"done": etcd.keep_alive(lease)}
        case {"do": "revoke", "lease": lease}:
            return {"done": etcd.revoke(lease)}
    raise AssertionError(request["do"])


def _watch(line: _Line, etcd: Etcd, prefix: str) -> None:
    try:
        while True:
            listed = etcd.list(check_key(prefix))
            _push(line, listed, anew=True)
            for news in etcd.watch(prefix, listed.revision):
                _push(line, news, anew=False)
    except (Unreachable, Refused, OSError, ValueError) as error:
        line.end(error)


def _push(line: _Line, listed: Listed, *, anew: bool) -> None:
    for push in cut_round(listed.changes, listed.revision, anew=anew):
        line.send(push.as_message())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m lockstep.control.etcd", description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoint", action="append", required=True, metavar="HOST:PORT", help="may be given again")
    options = parser.parse_args(argv)
    endpoints = [one for text in options.endpoint for one in parse_addresses(text)]
    line = _Line(socket.socket(fileno=os.dup(0)), read_secret(os.environ))
    line.sock.setblocking(True)
    try:
        serve(line, Etcd(Gateway(endpoints)))
    except (Unreachable, WireError, OSError) as error:
        line.end(error)
    os._exit(0)


if __name__ == "__main__":
    main()
