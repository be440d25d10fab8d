"""What a supervisor knows of the control store, wherever that is: in this process, on another host, or an etcd.

An arbiter never blocks and starts no thread. Its owner runs a loop: `select`, then `key.data.ready(mask)` for each key
that is ready, then `tick` of everything, then `select` again, no longer than until what `tick` returned. All callbacks
run inside `tick`. Tick a LocalClient before the Server of the same store, so that it renews before others expire.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias, final

from lockstep.control.store import (
    LONGEST_LEASE_S,
    SHORTEST_LEASE_S,
    Entry,
    Json,
    Store,
    check_key,
    check_revision,
    copy_value,
)
from lockstep.errors import LockstepError

RENEWALS_PER_LEASE: Final = 3
AGAIN_S: Final = 0.01
PREFIX: Final = "lockstep/"  # of the keys of all runs


class ControlError(LockstepError):
    """The control store did not do what it was asked. If `may_have_happened`, nobody knows: look at the snapshot when
    the arbiter is connected again."""

    def __init__(self, message: str, *, may_have_happened: bool) -> None:
        super().__init__(message)
        self.may_have_happened = may_have_happened


ThenEntry: TypeAlias = Callable[[Entry | ControlError | None], None]
ThenBool: TypeAlias = Callable[[bool | ControlError], None]
OnLost: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Terms:
    """What a supervisor wants of its arbiter. Its clock and the store's must run at the same speed, from then to now:
    one that stands still while the machine sleeps does not see its lease end."""

    prefix: str
    ttl_s: float = 10.0
    patience_s: float = 5.0  # how long an answer may take before the connection counts as lost

    def __post_init__(self) -> None:
        check_key(self.prefix)
        if not SHORTEST_LEASE_S <= self.ttl_s <= LONGEST_LEASE_S or not self.patience_s > 0:
            raise ValueError(f"a lease of {self.ttl_s} s (at least {SHORTEST_LEASE_S}, at most {LONGEST_LEASE_S}) and "
                             f"{self.patience_s} s of patience (more than 0) cannot be")  # fmt: skip


class Arbiter(Protocol):
    @property
    def is_connected(self) -> bool:
        """Whether `snapshot` is kept up to date. If not, it is what was true when the connection was lost."""

    @property
    def trouble(self) -> str:
        """Why it is not connected, in words; "" if it is."""

    @property
    def revision(self) -> int:
        """That of the snapshot: nothing has changed in it as long as this is the same."""

    @property
    def held_until_s(self) -> float:
        """Until then, on our monotonic clock, the store keeps what hangs on our lease. -inf without a lease."""

    def snapshot(self) -> Mapping[str, Entry]:
        """All keys below the prefix as they were at `revision`, all at once. Never changes: the next is another."""

    def cas(self, key: str, value: Json, revision: int, *, leased: bool = False, then: ThenEntry) -> None:
        """Set the key if it has that revision, 0 if it does not exist; `leased`: it goes when our lease does.

        `then` hears the new entry, None if the key has another revision, or what went wrong. If it hears the first or
        the second, the snapshot shows it (after a deletion in an etcd: soon). ValueError at once for bad input.
        """

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        """Like `cas`; `then` hears whether the key was deleted."""

    def tick(self, now_s: float) -> float:
        """Do what is due by now, and say when to come again at the latest."""

    def close(self) -> None:
        """End the lease if that is possible at once, and go."""


@final
class Hold:
    """A lease as its holder sees it. Time counts from before a renewal was asked for, so we stop before the store."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.lease: str | None = None
        self.held_until_s = -math.inf

    def renewed(self, lease: str, asked_at_s: float) -> None:
        self.lease = lease
        self.held_until_s = asked_at_s + self.ttl_s

    def lose(self) -> None:
        self.lease = None
        self.held_until_s = -math.inf

    @property
    def renew_at_s(self) -> float:
        """At once without a lease."""
        return self.held_until_s - self.ttl_s + self.ttl_s / RENEWALS_PER_LEASE

    def is_over(self, now_s: float) -> bool:
        return self.lease is not None and now_s >= self.held_until_s


def check_below(key: str, prefix: str) -> None:
    """Elsewhere, nobody would see the change."""
    if not check_key(key).startswith(prefix):
        raise ValueError(f"key {key!r} is not below {prefix!r}, which is all that this arbiter sees")


@final
class LocalClient:
    """The arbiter of the supervisor that holds the store itself."""

    def __init__(self, store: Store, *, terms: Terms, on_lost: OnLost) -> None:
        self._store, self._terms, self._on_lost = store, terms, on_lost
        self._hold = Hold(terms.ttl_s)
        self._events: deque[Callable[[], None]] = deque()
        self._seen: Mapping[str, Entry] = {}
        self._seen_at = 0

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def trouble(self) -> str:
        return ""

    @property
    def revision(self) -> int:
        return self._store.revision

    @property
    def held_until_s(self) -> float:
        return self._hold.held_until_s

    def snapshot(self) -> Mapping[str, Entry]:
        if self._seen_at != self._store.revision:
            self._seen = MappingProxyType(self._store.list(self._terms.prefix))
            self._seen_at = self._store.revision
        return self._seen

    def cas(self, key: str, value: Json, revision: int, *, leased: bool = False, then: ThenEntry) -> None:
        check_below(key, self._terms.prefix)
        check_revision(revision)
        value = copy_value(value)
        result: Entry | ControlError | None
        if leased and self._hold.lease is None:
            result = no_lease(key)
        else:
            try:
                result = self._store.cas(key, value, revision, self._hold.lease if leased else None)
            except ValueError as error:  # no lease, or too many keys: not this caller's mistake
                result = ControlError(str(error), may_have_happened=False)
        self._events.append(lambda: then(result))

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        check_below(key, self._terms.prefix)
        done = self._store.delete(key, revision)
        self._events.append(lambda: then(done))

    def tick(self, now_s: float) -> float:
        hold = self._hold
        if hold.lease is not None and now_s >= hold.renew_at_s:
            if self._store.keep_alive(hold.lease, now_s):
                hold.renewed(hold.lease, now_s)
            else:
                hold.lose()
                self._events.append(lambda: self._on_lost("the store on this host has ended our lease"))
        if hold.lease is None:
            with suppress(ValueError):  # too many leases: the next tick tries again
                hold.renewed(self._store.grant(hold.ttl_s, now_s), now_s)
        for _ in range(len(self._events)):
            self._events.popleft()()
        return now_s if self._events else max(hold.renew_at_s, now_s + AGAIN_S)

    def close(self) -> None:
        if self._hold.lease is not None:
            self._store.revoke(self._hold.lease)
            self._hold.lose()


def no_lease(key: str) -> ControlError:
    text = f"key {key!r} should hang on our lease, and we have none at the moment; try again when held_until_s says so"
    return ControlError(text, may_have_happened=False)
