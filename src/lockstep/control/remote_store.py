"""The arbiter of a supervisor whose store is elsewhere: over TCP to server.py, over a socketpair to etcd.py.

It mirrors all keys below its prefix, and holds one lease across connections. Each connection begins with the lease and
goes on with the records; when it has both, it is up.
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
from lockstep.control.messages import Push, message_as_push, take
from lockstep.control.reconnect import Link, Patience
from lockstep.control.secret import new_secret
from lockstep.control.sockets import Dial, TcpDial, parse_addresses
from lockstep.control.store import Entry, Json, check_revision, copy_value
from lockstep.control.store_client import (
    Arbiter,
    ControlError,
    Hold,
    OnLost,
    Terms,
    ThenBool,
    ThenEntry,
    check_below,
    no_lease,
)


def reach(
    where: str, secret: bytes, selector: selectors.BaseSelector, *, terms: Terms, on_lost: OnLost
) -> Arbiter:  # fmt: skip
    """`where`: HOST:PORT of the supervisor that has the store, or etcd://HOST:PORT,HOST:PORT,..."""
    addresses = parse_addresses(where)
    dial: Dial
    if where.startswith("etcd://"):
        from lockstep.control.etcd import Bridge  # only those who use it pay for importing http.client

        secret = new_secret()  # for the two ends of a socketpair; etcd does not know the job's
        dial = Bridge(where, secret)
    elif len(addresses) == 1:
        dial = TcpDial(*addresses[0])
    else:
        raise ValueError(
            f"{where!r} names {len(addresses)} hosts, and only one can hold the store; or is it etcd://...?"
        )
    return Client(dial, secret, selector, terms=terms, on_lost=on_lost)


@final
class Mirror:
    """What a store has below a prefix, as of one revision at a time. Pure."""

    def __init__(self) -> None:
        self.entries: Mapping[str, Entry] = MappingProxyType({})
        self.revision = 0
        self.is_whole = False  # since `begin`
        self._next: dict[str, Entry] | None = None

    def begin(self) -> None:
        """Another connection, perhaps another store: what we have is kept until all of the new is there."""
        self.is_whole, self._next = False, None

    def take(self, push: Push) -> None:
        if push.anew:
            self._next = {}
        elif self._next is None:
            if not self.is_whole:
                raise WireError("changes were pushed before that which they change")
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
class _Answered:
    """It is passed on when the mirror shows what it is about."""

    revision: int
    tell: Callable[[], None]


@final
class Client:
    """Satisfies Arbiter. Registers with `selector`, as data an object with `ready(mask)`.

    `on_lost` is told, in words, each time that our lease has ended, and with it what hung on it; it may not be gone
    from the store yet. A new lease follows by itself.
    """

    def __init__(
        self, dial: Dial, secret: bytes, selector: selectors.BaseSelector, *, terms: Terms, on_lost: OnLost
    ) -> None:
        self._terms, self._on_lost = terms, on_lost
        self._link = Link(
            dial, secret, selector, patience_s=terms.patience_s, on_open=self._begin, on_push=self._take_push
        )  # fmt: skip
        self._patience = Patience(terms.patience_s)
        self._mirror = Mirror()
        self._answered: deque[_Answered] = deque()
        self._events: deque[Callable[[], None]] = deque()
        self._hold = Hold(terms.ttl_s)
        self._given_up: str | None = None  # a lease that the store may still have
        self._lease_asked = self._watching = False  # on this connection

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_connected(self) -> bool:
        return self._link.is_open and self._mirror.is_whole

    @property
    def trouble(self) -> str:
        return "" if self.is_connected else self._link.trouble

    @property
    def revision(self) -> int:
        return self._mirror.revision

    @property
    def held_until_s(self) -> float:
        return self._hold.held_until_s

    def snapshot(self) -> Mapping[str, Entry]:
        return self._mirror.entries

    def cas(self, key: str, value: Json, revision: int, *, leased: bool = False, then: ThenEntry) -> None:
        check_below(key, self._terms.prefix)
        check_revision(revision)
        value = copy_value(value)
        lease = self._hold.lease if leased else None

        def hear(answer: Message | ControlError) -> None:
            if isinstance(answer, ControlError):
                self._events.append(lambda: then(answer))
                return
            at = take(answer, "revision", int)
            entry = Entry(value, at, lease) if take(answer, "done", bool) else None
            self._answered.append(_Answered(at, lambda: then(entry)))

        if leased and lease is None and self.is_connected:
            hear(no_lease(key))
        else:
            self._ask("cas", hear, key=key, value=value, revision=revision, lease=lease)

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        check_below(key, self._terms.prefix)
        check_revision(revision)

        def hear(answer: Message | ControlError) -> None:
            if isinstance(answer, ControlError):
                self._events.append(lambda: then(answer))
                return
            done = take(answer, "done", bool)
            self._answered.append(_Answered(take(answer, "revision", int), lambda: then(done)))

        self._ask("delete", hear, key=key, revision=revision)

    def tick(self, now_s: float) -> float:
        next_s = min(self._tend_lease(now_s), self._tend_mirror(now_s))
        next_s = min(next_s, self._link.tick(now_s))  # the last: it watches over what the others have asked
        for _ in range(len(self._events)):
            self._events.popleft()()
        return now_s if self._events else next_s

    def close(self) -> None:
        if self._hold.lease is not None:
            self._link.ask("revoke", lambda _: None, lease=self._hold.lease)
        self._hold.lose()
        self._link.close()

    def _ask(self, do: str, hear: Callable[[Message | ControlError], None], **fields: Json) -> None:
        if self.is_connected:
            self._link.ask(do, hear, **fields)
        else:
            text = f"the control store was not asked to {do} {fields['key']!r}: {self.trouble}"
            hear(ControlError(text, may_have_happened=False))

    # ------------------------------------------------------------------------------------------------- the lease

    def _begin(self) -> None:
        self._mirror.begin()
        self._lease_asked = self._watching = False

    def _tend_lease(self, now_s: float) -> float:
        """When to come again."""
        hold = self._hold
        if hold.is_over(now_s):
            self._given_up = hold.lease
            self._lose(f"it was not renewed for {hold.ttl_s:g} s; {self.trouble or 'the store does not answer'}")
        if self._link.is_open and not self._lease_asked and (now_s >= hold.renew_at_s or not self._watching):
            self._ask_for_lease(now_s)
        if self._link.is_open and not self._lease_asked:
            return hold.renew_at_s
        return math.inf if hold.lease is None else hold.held_until_s

    def _ask_for_lease(self, now_s: float) -> None:
        self._lease_asked = True
        if self._given_up is not None:
            self._link.ask("revoke", lambda _: None, lease=self._given_up)
            self._given_up = None
        lease = self._hold.lease

        def hear(answer: Message | ControlError) -> None:
            self._lease_asked = False
            if isinstance(answer, ControlError):
                if self._link.is_open:
                    self._link.drop(f"it gives us no lease: {answer}")
            elif lease is None:
                self._hold.renewed(take(answer, "lease", str), now_s)
            elif lease == self._hold.lease:
                if take(answer, "done", bool):
                    self._hold.renewed(lease, now_s)
                else:
                    self._lose("the store has ended it, or is another one than before")
            if not self._watching and self._hold.lease is not None and self._link.is_open:
                self._watching = True
                self._link.ask("watch", lambda _: None, prefix=self._terms.prefix)

        if lease is None:
            self._link.ask("grant", hear, ttl_s=self._hold.ttl_s)
        else:
            self._link.ask("keep_alive", hear, lease=lease)

    def _lose(self, why: str) -> None:
        self._hold.lose()
        self._events.append(lambda: self._on_lost(f"our lease at the control store has ended: {why}"))

    # ------------------------------------------------------------------------------------------------ the mirror

    def _take_push(self, message: Message) -> None:
        self._mirror.take(message_as_push(message))
        self._patience.progress()
        if self._mirror.is_whole:
            self._link.praise()

    def _tend_mirror(self, now_s: float) -> float:
        """Pass on what the mirror shows by now. When the connection is lost it will not show it, but it did happen."""
        while self._answered and (self._answered[0].revision <= self._mirror.revision or not self.is_connected):
            self._events.append(self._answered.popleft().tell)
        waiting = self._link.is_open and (bool(self._answered) or not self._mirror.is_whole)
        end_s = self._patience.ends_s(now_s, waiting=waiting)
        if now_s >= end_s:
            self._link.drop(f"it answers, but no records came for {self._patience.limit_s:g} s")
        return end_s
