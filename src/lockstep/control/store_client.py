"""The interface of a host agent to the control store, wherever that is: in this process, on another host, or in etcd.

A store client never blocks and starts no thread. Its owner runs a loop: `select`, then `key.data.ready(mask)` for each
key that is ready, then `tick` of every object, then `select` again, at most until the time that `tick` returned. All
callbacks run inside `tick`. Tick a LocalStoreClient before the Server of the same store, so that it renews its lease
before the server ends expired ones.
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
    ControlStore,
    Json,
    StoreEntry,
    check_key,
    check_revision,
    copy_value,
)
from lockstep.errors import LockstepError

RENEWALS_PER_LEASE: Final = 3
EVENT_DELAY_S: Final = 0.01
PREFIX: Final = "lockstep/"  # all keys of all runs begin with it


class ControlError(LockstepError):
    """The control store did not answer a request, or refused it. If `may_have_happened`, it may have been carried out:
    the snapshot shows whether, once the client is connected again."""

    def __init__(self, message: str, *, may_have_happened: bool) -> None:
        super().__init__(message)
        self.may_have_happened = may_have_happened


ThenEntry: TypeAlias = Callable[[StoreEntry | ControlError | None], None]
ThenBool: TypeAlias = Callable[[bool | ControlError], None]
OnLost: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class ClientOptions:
    """Options of a store client. The clocks of the client and the store must run at the same speed: a clock that stops
    while the machine sleeps does not see the lease end."""

    prefix: str  # the client sees the keys that begin with it
    ttl_s: float = 10.0  # of its lease
    answer_timeout_s: float = 5.0  # how long an answer may take before the connection counts as lost

    def __post_init__(self) -> None:
        check_key(self.prefix)
        if not SHORTEST_LEASE_S <= self.ttl_s <= LONGEST_LEASE_S or not self.answer_timeout_s > 0:
            raise ValueError(f"a lease of {self.ttl_s} s must be {SHORTEST_LEASE_S} to {LONGEST_LEASE_S} s, "
                             f"and an answer timeout of {self.answer_timeout_s} s more than 0")  # fmt: skip


class StoreClient(Protocol):
    @property
    def is_connected(self) -> bool:
        """Whether `snapshot` is kept up to date. If not, it is from before the connection was lost."""

    @property
    def disconnect_reason(self) -> str:
        """Why it is not connected, in words; "" if it is."""

    @property
    def revision(self) -> int:
        """The revision of the snapshot, which is unchanged as long as this is."""

    @property
    def held_until_s(self) -> float:
        """Until then, on the local monotonic clock, the store keeps the keys under the lease. -inf without a lease."""

    def snapshot(self) -> Mapping[str, StoreEntry]:
        """All keys below the prefix as of `revision`. Immutable: later snapshots are new objects."""

    def cas(self, key: str, value: Json, revision: int, *, leased: bool = False, then: ThenEntry) -> None:
        """Set the key if it has that revision (0: the key must not exist). `leased`: it is deleted with the lease.

        `then` is called with the new entry, with None if the key has another revision, or with the error. In the first
        two cases the snapshot shows it already (after a deletion in etcd: soon). Raises ValueError for bad input.
        """

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        """Like `cas`; `then` is called with whether the key was deleted."""

    def tick(self, now_s: float) -> float:
        """Do what is due by now. Returns the latest time for the next tick."""

    def close(self) -> None:
        """Close, and end the lease if that is possible at once."""


@final
class HeldLease:
    """A lease as its holder sees it. Time counts from before a renewal was sent, so it ends here before the store."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.id: str | None = None
        self.held_until_s = -math.inf

    def renew(self, lease: str, asked_at_s: float) -> None:
        self.id = lease
        self.held_until_s = asked_at_s + self.ttl_s

    def clear(self) -> None:
        self.id = None
        self.held_until_s = -math.inf

    @property
    def renew_at_s(self) -> float:
        """When to renew the lease; without one, at once."""
        return self.held_until_s - self.ttl_s + self.ttl_s / RENEWALS_PER_LEASE

    def is_expired(self, now_s: float) -> bool:
        return self.id is not None and now_s >= self.held_until_s


def check_below(key: str, prefix: str) -> None:
    """Raise ValueError unless the key is below the prefix: no client would see a change elsewhere."""
    if not check_key(key).startswith(prefix):
        raise ValueError(f"key {key!r} is not below {prefix!r}, which is all that this client sees")


@final
class LocalStoreClient:
    """The client of the process that has the store itself. Satisfies StoreClient."""

    def __init__(self, store: ControlStore, *, options: ClientOptions, on_lost: OnLost) -> None:
        self._store, self._options, self._on_lost = store, options, on_lost
        self._lease = HeldLease(options.ttl_s)
        self._events: deque[Callable[[], None]] = deque()
        self._snapshot: Mapping[str, StoreEntry] = {}
        self._snapshot_revision = 0

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def disconnect_reason(self) -> str:
        return ""

    @property
    def revision(self) -> int:
        return self._store.revision

    @property
    def held_until_s(self) -> float:
        return self._lease.held_until_s

    def snapshot(self) -> Mapping[str, StoreEntry]:
        if self._snapshot_revision != self._store.revision:
            self._snapshot = MappingProxyType(self._store.list(self._options.prefix))
            self._snapshot_revision = self._store.revision
        return self._snapshot

    def cas(self, key: str, value: Json, revision: int, *, leased: bool = False, then: ThenEntry) -> None:
        check_below(key, self._options.prefix)
        check_revision(revision)
        value = copy_value(value)
        result: StoreEntry | ControlError | None
        if leased and self._lease.id is None:
            result = no_lease_error(key)
        else:
            try:
                result = self._store.cas(key, value, revision, self._lease.id if leased else None)
            except ValueError as error:  # no lease, or too many keys: not a mistake of the caller
                result = ControlError(str(error), may_have_happened=False)
        self._events.append(lambda: then(result))

    def delete(self, key: str, revision: int, *, then: ThenBool) -> None:
        check_below(key, self._options.prefix)
        done = self._store.delete(key, revision)
        self._events.append(lambda: then(done))

    def tick(self, now_s: float) -> float:
        held = self._lease
        if held.id is not None and now_s >= held.renew_at_s:
            if self._store.keep_alive(held.id, now_s):
                held.renew(held.id, now_s)
            else:
                held.clear()
                self._events.append(lambda: self._on_lost("the store on this host has ended our lease"))
        if held.id is None:
            with suppress(ValueError):  # too many leases: the next tick tries again
                held.renew(self._store.grant(held.ttl_s, now_s), now_s)
        for _ in range(len(self._events)):
            self._events.popleft()()
        return now_s if self._events else max(held.renew_at_s, now_s + EVENT_DELAY_S)

    def close(self) -> None:
        if self._lease.id is not None:
            self._store.revoke(self._lease.id)
            self._lease.clear()


def no_lease_error(key: str) -> ControlError:
    text = f"key {key!r} needs a lease, and this client has none at the moment; try again when held_until_s says so"
    return ControlError(text, may_have_happened=False)
