"""The client of a store in another process: over TCP to server.py, over a socketpair to etcd.py.

It mirrors all keys below its prefix, and holds one lease across connections. Each connection first renews the lease and
then watches the keys; when it has both, the client is connected.
"""

from __future__ import annotations

import math
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from lockstep.control.frames import Message, WireError
from lockstep.control.messages import Push, message_as_push, read_field
from lockstep.control.reconnect import ProgressTimeout, ReconnectingLink
from lockstep.control.secret import new_secret
from lockstep.control.sockets import Dial, TcpDial, parse_addresses
from lockstep.control.store import Json, StoreEntry, check_revision, copy_value
from lockstep.control.store_client import (
    ClientOptions,
    ControlError,
    HeldLease,
    OnLost,
    StoreClient,
    ThenBool,
    ThenEntry,
    check_below,
    no_lease_error,
)


def connect_store(
    where: str, secret: bytes, selector: selectors.BaseSelector, *, options: ClientOptions, on_lost: OnLost
) -> StoreClient:  # fmt: skip
    """A client of the store at `where`: HOST:PORT of the host agent that has it, or etcd://HOST:PORT,HOST:PORT,..."""
    addresses = parse_addresses(where)
    dial: Dial
    if where.startswith("etcd://"):
        from lockstep.control.etcd import Bridge  # here, so that only its users import http.client

        secret = new_secret()  # for the two ends of the socketpair; etcd does not have the job's
        dial = Bridge(where, secret)
    elif len(addresses) == 1:
        dial = TcpDial(*addresses[0])
    else:
        raise ValueError(
            f"{where!r} names {len(addresses)} hosts, and only one can hold the store; or is it etcd://...?"
        )
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


@dataclass(frozen=True)
class _PendingResult:
    """An answer that is delivered when the mirror has reached its revision."""

    revision: int
    deliver: Callable[[], None]


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
        self._link = ReconnectingLink(
            dial,
            secret,
            selector,
            answer_timeout_s=options.answer_timeout_s,
            on_open=self._on_open,
            on_push=self._on_push,
        )
        self._progress = ProgressTimeout(options.answer_timeout_s)
        self._mirror = Mirror()
        self._pending_results: deque[_PendingResult] = deque()
        self._events: deque[Callable[[], None]] = deque()
        self._lease = HeldLease(options.ttl_s)
        self._stale_lease: str | None = None  # an expired lease that the store may still have
        self._lease_requested = self._watching = False  # on this connection

    def __enter__(self) -> RemoteStoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

        def on_answer(answer: Message | ControlError) -> None:
            if isinstance(answer, ControlError):
                self._events.append(lambda: then(answer))
                return
            at = read_field(answer, "revision", int)
            entry = StoreEntry(value, at, lease) if read_field(answer, "done", bool) else None
            self._pending_results.append(_PendingResult(at, lambda: then(entry)))

        if leased and lease is None and self.is_connected:
            on_answer(no_lease_error(key))
        else:
            self._request("cas", on_answer, key=key, value=value, revision=revision, lease=lease)

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        check_below(key, self._options.prefix)
        check_revision(revision)

        def on_answer(answer: Message | ControlError) -> None:
            if isinstance(answer, ControlError):
                self._events.append(lambda: then(answer))
                return
            done = read_field(answer, "done", bool)
            self._pending_results.append(_PendingResult(read_field(answer, "revision", int), lambda: then(done)))

        self._request("delete", on_answer, key=key, revision=revision)

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

    def _request(self, do: str, on_answer: Callable[[Message | ControlError], None], **fields: Json) -> None:
        if self.is_connected:
            self._link.request(do, on_answer, **fields)
        else:
            text = f"the control store was not asked to {do} {fields['key']!r}: {self.disconnect_reason}"
            on_answer(ControlError(text, may_have_happened=False))

    # ------------------------------------------------------------------------------------------------- the lease

    def _on_open(self) -> None:
        self._mirror.restart()
        self._lease_requested = self._watching = False

    def _renew_lease(self, now_s: float) -> float:
        """Returns the latest time for the next call."""
        held = self._lease
        if held.is_expired(now_s):
            self._stale_lease = held.id
            self._on_lease_lost(
                f"it was not renewed for {held.ttl_s:g} s; {self.disconnect_reason or 'the store does not answer'}"
            )
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
        while self._pending_results and (
            self._pending_results[0].revision <= self._mirror.revision or not self.is_connected
        ):
            self._events.append(self._pending_results.popleft().deliver)
        waiting = self._link.is_open and (bool(self._pending_results) or not self._mirror.is_whole)
        end_s = self._progress.deadline_s(now_s, waiting=waiting)
        if now_s >= end_s:
            self._link.drop(f"it answers, but no records came for {self._progress.limit_s:g} s")
        return end_s
