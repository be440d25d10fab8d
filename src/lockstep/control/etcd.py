"""etcd as the control store: a small bridge process between the host agent, which must not block, and etcd.

The host agent has one end of a socketpair, and uses RemoteStoreClient on it as with any control store. The bridge has
the other end as its standard input, and sends requests to etcd; it may use threads. When it cannot reach etcd, it sends
the client the reason and exits. To the client that is a lost connection: it starts another bridge after a while. When
the host agent is gone, the bridge's input ends, and it exits.
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

from lockstep.control.etcd_gateway import Etcd, Gateway, Listing, Refused, Unreachable
from lockstep.control.frames import Channel, Message, WireError
from lockstep.control.messages import check_request, cut_pages, cut_round, entry_as_row
from lockstep.control.secret import VARIABLE, read_secret
from lockstep.control.sockets import parse_addresses
from lockstep.control.store import check_key, check_revision, copy_value

READ_BYTES: Final = 65536
LIST_PAGE: Final = 64
CLOSE_S: Final = 3.0
FINAL_MESSAGE_S: Final = 1.0


@final
class Bridge:
    """The host agent's side: a Dial for RemoteStoreClient that starts a new bridge process each time."""

    def __init__(self, endpoints: str, secret: bytes) -> None:
        """`endpoints` as in `parse_addresses`; any secret will do, it is only for the two ends of the socketpair."""
        self._where = endpoints
        self._endpoints = parse_addresses(endpoints)
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return self._where

    def __call__(self) -> socket.socket:
        self._stop(within_s=0)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "lockstep.control.etcd"]
        for host, port in self._endpoints:
            command += ["--endpoint", f"{host}:{port}"]
        self._endpoints.append(self._endpoints.pop(0))  # in case it is stopped before it has tried them all
        with theirs:
            # In its own session: the launcher decides about Ctrl-C.
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
            listed = etcd.list(check_key(prefix), after, most=LIST_PAGE)
            pages = cut_pages(listed.changes)
            rows = [entry_as_row(one.key, one.entry) for one in pages[0]]
            return {"entries": rows, "more": len(pages) > 1 or len(listed.changes) == LIST_PAGE}
        case {"do": "cas", "key": key, "value": value, "revision": revision, "lease": lease}:
            check_revision(revision)
            result = etcd.cas(check_key(key), copy_value(value), revision, lease)
            return {"done": result.done, "revision": result.last.revision}
        case {"do": "delete", "key": key, "revision": revision}:
            check_revision(revision)
            result = etcd.delete(check_key(key), revision)
            return {"done": result.done, "revision": result.last.revision}
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
    except (Unreachable, Refused, OSError, ValueError) as error:
        client_end.fail(error)


def _push(client_end: _ClientEnd, listed: Listing, *, anew: bool) -> None:
    for push in cut_round(listed.changes, listed.revision, anew=anew):
        client_end.send(push.as_message())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m lockstep.control.etcd", description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoint", action="append", required=True, metavar="HOST:PORT", help="may be given again")
    options = parser.parse_args(argv)
    endpoints = [one for text in options.endpoint for one in parse_addresses(text)]
    client_end = _ClientEnd(socket.socket(fileno=os.dup(0)), read_secret(os.environ))
    client_end.sock.setblocking(True)
    try:
        serve(client_end, Etcd(Gateway(endpoints)))
    except (Unreachable, WireError, OSError) as error:
        client_end.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()
