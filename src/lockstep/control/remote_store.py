"""The client of a store in another process: over TCP to server.py, over a socketpair to etcd.py.

It mirrors all keys below its prefix, and holds one lease across connections. Each connection first renews the lease and
then watches the keys; when it has both, the client is connected.
"""

from __future__ import annotations

import math
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

from lockstep.control.connection import (
    Dial,
    OwnEtcd,
    ProgressTimeout,
    ReconnectingLink,
    TcpDial,
    is_etcd,
    parse_addresses,
)
from lockstep.control.store import (
    ClientOptions,
    ControlError,
    HeldLease,
    Json,
    OnLost,
    StoreClient,
    StoreEntry,
    ThenBool,
    ThenEntry,
    check_below,
    check_revision,
    copy_value,
    no_lease_error,
)
from lockstep.control.wire import Message, Push, WireError, message_as_push, new_secret, read_field


def connect_store(
    where: str, secret: bytes, selector: selectors.BaseSelector, *, options: ClientOptions, on_lost: OnLost,
    own_etcd: OwnEtcd | None = None,
) -> StoreClient:  # fmt: skip
    """A client of the store at `where`: HOST:PORT of the host agent that has it, or etcd://HOST:PORT,HOST:PORT,..."""
    addresses = parse_addresses(where)
    dial: Dial
    if is_etcd(where):
        from lockstep.control.etcd import Bridge  # here, so that only its users import http.client

        secret = new_secret()  # for the two ends of the socketpair; etcd does not have the job's
        dial = Bridge(where, secret, own=own_etcd)
    elif len(addresses) == 1:
        dial = TcpDial(*addresses[0])
    else:
        count = len(addresses)
        raise ValueError(f"{where!r} names {count} hosts, and only one can hold the store; or is it etcd://...?")
    return RemoteStoreClient(dial, secret, selector, options=options, on_lost=on_lost)


@final
class Mirror:
    """A copy of the keys of a store below a prefix, as of one revision at a time. Pure."""

    def __init__(self) -> None:
        self.entries: Mapping[str, StoreEntry] = MappingProxyType({})
        self.revision = 0
        self.is_whole = False  # whether all keys have arrived since `restart`
        self._next: dict[str, StoreEntry] | None = None

    def restart(self) -> None:
        """A new connection, perhaps to another store: the old entries stay until all of the new ones have arrived."""
        self.is_whole, self._next = False, None

    def apply(self, push: Push) -> None:
        if push.anew:
            self._next = {}
        elif self._next is None:
            if not self.is_whole:
                raise WireError("changes were pushed before the entries that they change")
            self._next = dict(self.entries)
        for change in push.changes:
            if change.entry is None:
                self._next.pop(change.key, None)
            else:
                self._next[change.key] = change.entry
        if push.complete:
            self.entries, self._next = MappingProxyType(self._next), None
            self.revision, self.is_whole = push.revision, True


@final
class RemoteStoreClient:
    """Satisfies StoreClient. Registers sockets with `selector`; the data of each key is an object with `ready(mask)`.

    `on_lost` is called with the reason each time that the lease has ended, and with it the keys under it, which may
    still be in the store. A new lease is requested automatically.
    """

    def __init__(
        self, dial: Dial, secret: bytes, selector: selectors.BaseSelector, *, options: ClientOptions, on_lost: OnLost
    ) -> None:
        self._options, self._on_lost = options, on_lost
        timeout_s, on_open, on_push = options.answer_timeout_s, self._on_open, self._on_push
        self._link = ReconnectingLink(
            dial, secret, selector, answer_timeout_s=timeout_s, on_open=on_open, on_push=on_push
        )
        self._progress = ProgressTimeout(timeout_s)
        self._mirror = Mirror()
        # (revision, deliver) of answers; each is delivered when the mirror has reached its revision
        self._pending_results: deque[tuple[int, Callable[[], None]]] = deque()
        self._events: deque[Callable[[], None]] = deque()
        self._lease = HeldLease(options.ttl_s)
        self._stale_lease: str | None = None  # an expired lease that the store may still have
        self._lease_requested = self._watching = False  # on this connection

    @property
    def is_connected(self) -> bool:
        return self._link.is_open and self._mirror.is_whole

    @property
    def disconnect_reason(self) -> str:
        return "" if self.is_connected else self._link.disconnect_reason

    @property
    def revision(self) -> int:
        return self._mirror.revision

    @property
    def held_until_s(self) -> float:
        return self._lease.held_until_s

    def snapshot(self) -> Mapping[str, StoreEntry]:
        return self._mirror.entries

    def cas(self, key: str, value: Json, revision: int, *, leased: bool = False, then: ThenEntry) -> None:
        check_below(key, self._options.prefix)
        check_revision(revision)
        value = copy_value(value)
        lease = self._lease.id if leased else None

        def result(done: bool, at: int) -> StoreEntry | None:
            return StoreEntry(value, at, lease) if done else None

        if leased and lease is None and self.is_connected:
            self._events.append(lambda: then(no_lease_error(key)))
        else:
            self._write("cas", then, result, key=key, value=value, revision=revision, lease=lease)

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        check_below(key, self._options.prefix)
        check_revision(revision)
        self._write("delete", then, lambda done, at: done, key=key, revision=revision)

    def _write(
        self, do: str, then: Callable[[Any], None], result: Callable[[bool, int], Any], **fields: Json
    ) -> None:  # fmt: skip
        """Send a request. `then` gets the error, or what `result` makes of the answer once the mirror shows it."""

        def on_answer(answer: Message | ControlError) -> None:
            if isinstance(answer, ControlError):
                self._events.append(lambda: then(answer))
                return
            done, at = read_field(answer, "done", bool), read_field(answer, "revision", int)
            self._pending_results.append((at, lambda: then(result(done, at))))

        if self.is_connected:
            self._link.request(do, on_answer, **fields)
        else:
            text = f"the control store was not asked to {do} {fields['key']!r}: {self.disconnect_reason}"
            on_answer(ControlError(text, may_have_happened=False))

    def tick(self, now_s: float) -> float:
        next_s = min(self._renew_lease(now_s), self._deliver_results(now_s))
        next_s = min(next_s, self._link.tick(now_s))  # last: it checks the timeouts of what the others sent
        for _ in range(len(self._events)):
            self._events.popleft()()
        return now_s if self._events else next_s

    def close(self) -> None:
        if self._lease.id is not None:
            self._link.request("revoke", lambda _: None, lease=self._lease.id)
        self._lease.clear()
        self._link.close()

    # ------------------------------------------------------------------------------------------------- the lease

    def _on_open(self) -> None:
        self._mirror.restart()
        self._lease_requested = self._watching = False

    def _renew_lease(self, now_s: float) -> float:
        """Returns the latest time for the next call."""
        held = self._lease
        if held.is_expired(now_s):
            self._stale_lease = held.id
            why = self.disconnect_reason or "the store does not answer"
            self._on_lease_lost(f"it was not renewed for {held.ttl_s:g} s; {why}")
        if self._link.is_open and not self._lease_requested and (now_s >= held.renew_at_s or not self._watching):
            self._request_lease(now_s)
        if self._link.is_open and not self._lease_requested:
            return held.renew_at_s
        return math.inf if held.id is None else held.held_until_s

    def _request_lease(self, now_s: float) -> None:
        self._lease_requested = True
        if self._stale_lease is not None:
            self._link.request("revoke", lambda _: None, lease=self._stale_lease)
            self._stale_lease = None
        lease = self._lease.id

        def on_answer(answer: Message | ControlError) -> None:
            self._lease_requested = False
            if isinstance(answer, ControlError):
                if self._link.is_open:
                    self._link.drop(f"it grants no lease: {answer}")
            elif lease is None:
                self._lease.renew(read_field(answer, "lease", str), now_s)
            elif lease == self._lease.id:
                if read_field(answer, "done", bool):
                    self._lease.renew(lease, now_s)
                else:
                    self._on_lease_lost("the store has ended it, or is another one than before")
            if not self._watching and self._lease.id is not None and self._link.is_open:
                self._watching = True
                self._link.request("watch", lambda _: None, prefix=self._options.prefix)

        if lease is None:
            self._link.request("grant", on_answer, ttl_s=self._lease.ttl_s)
        else:
            self._link.request("keep_alive", on_answer, lease=lease)

    def _on_lease_lost(self, why: str) -> None:
        self._lease.clear()
        self._events.append(lambda: self._on_lost(f"our lease at the control store has ended: {why}"))

    # ------------------------------------------------------------------------------------------------ the mirror

    def _on_push(self, message: Message) -> None:
        self._mirror.apply(message_as_push(message))
        self._progress.reset()
        if self._mirror.is_whole:
            self._link.reset_backoff()

    def _deliver_results(self, now_s: float) -> float:
        """Deliver the answers that the mirror shows by now; after the connection is lost, all: they did happen."""
        results = self._pending_results
        while results and (results[0][0] <= self._mirror.revision or not self.is_connected):
            self._events.append(results.popleft()[1])
        waiting = self._link.is_open and (bool(results) or not self._mirror.is_whole)
        end_s = self._progress.deadline_s(now_s, waiting=waiting)
        if now_s >= end_s:
            self._link.drop(f"it answers, but no records came for {self._progress.limit_s:g} s")
        return end_s
