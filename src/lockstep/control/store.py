"""The control store of an elastic run, and the interface of its clients.

ControlStore keeps keys, revisions and leases in memory. It is pure: time is an argument. It is the single source of
truth: the state of a run is what compare-and-swap operations here have accepted, in the order of one revision number. A
key may be bound to a lease; if its holder does not renew it in time, the key is gone.

StoreClient is a host agent's interface to the store, wherever that is: in this process, on another host, or in etcd. A
client never blocks and starts no thread. Its owner runs a loop: `select`, then `key.data.ready(mask)` for each key that
is ready, then `tick` of every object, then `select` again, at most until the time that `tick` returned. All callbacks
run inside `tick`. Tick a LocalStoreClient before the Server of the same store, so that it renews its lease before the
server ends expired ones.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, final

from lockstep.errors import LockstepError

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of these

LONGEST_KEY_BYTES: Final = 256
LARGEST_VALUE_BYTES: Final = 1 << 20
DEEPEST_VALUE: Final = 32
MOST_KEYS: Final = 100_000
MOST_LEASES: Final = 10_000
MOST_DELETIONS: Final = 10_000
SHORTEST_LEASE_S: Final = 0.05
LONGEST_LEASE_S: Final = 86400.0
RENEWALS_PER_LEASE: Final = 3
EVENT_DELAY_S: Final = 0.01
PREFIX: Final = "lockstep/"  # all keys of all runs begin with it


@dataclass(frozen=True)
class StoreEntry:
    """The value of a key. The store owns `value`: do not change it."""

    value: Json
    revision: int
    lease: str | None = None


@dataclass(frozen=True)
class Change:
    """The last change of a key. `entry` is None if the key was deleted."""

    key: str
    revision: int
    entry: StoreEntry | None


@dataclass
class _Lease:
    ttl_s: float
    ends_s: float
    keys: set[str] = field(default_factory=set)


@final
class ControlStore:
    def __init__(self) -> None:
        # Random, so that a new store does not mistake a client's revision from another store for one of its own.
        self.revision = 1 + secrets.randbelow(2**40)
        self._entries: dict[str, StoreEntry] = {}  # in the order of revisions, like `_deleted`
        self._deleted: dict[str, int] = {}
        self._oldest_known = self.revision  # deletions up to this revision may be missing in _deleted
        self._leases: dict[str, _Lease] = {}

    def get(self, key: str) -> StoreEntry | None:
        return self._entries.get(check_key(key))

    def list(self, prefix: str) -> dict[str, StoreEntry]:
        return {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}

    def cas(self, key: str, value: Json, expected_revision: int, lease: str | None = None) -> StoreEntry | None:
        """Set the key if its revision is the expected one (0: the key must not exist). Returns None if it is not."""
        check_key(key)
        check_revision(expected_revision)
        value = copy_value(value)
        held = None if lease is None else self._leases.get(lease)
        if lease is not None and held is None:
            raise ValueError(f"key {key!r} should be bound to lease {lease[:8]}..., which has ended; ask for a new one")
        if self._revision_of(key) != expected_revision:
            return None
        if key not in self._entries and len(self._entries) >= MOST_KEYS:
            raise ValueError(f"key {key!r} would be one more than {MOST_KEYS} keys; delete some")
        self._remove_entry(key)
        self._deleted.pop(key, None)
        self.revision += 1
        self._entries[key] = entry = StoreEntry(value, self.revision, lease)
        if held is not None:
            held.keys.add(key)
        return entry

    def delete(self, key: str, expected_revision: int) -> bool:
        """Delete the key if it has the expected revision. Returns whether it was deleted."""
        check_key(key)
        check_revision(expected_revision)
        if key not in self._entries or self._revision_of(key) != expected_revision:
            return False
        self._delete(key)
        return True

    def grant(self, ttl_s: float, now_s: float) -> str:
        """Returns the id of a new lease. It is secret: a client needs it to renew or end the lease."""
        if not (isinstance(ttl_s, int | float) and SHORTEST_LEASE_S <= ttl_s <= LONGEST_LEASE_S):
            raise ValueError(f"a lease of {ttl_s!r} s: it must be {SHORTEST_LEASE_S} to {LONGEST_LEASE_S:g} s")
        if len(self._leases) >= MOST_LEASES:
            raise ValueError(f"there are {MOST_LEASES} leases already; end some, or wait until they expire")
        lease = secrets.token_hex(16)
        self._leases[lease] = _Lease(ttl_s, now_s + ttl_s)
        return lease

    def keep_alive(self, lease: str, now_s: float) -> bool:
        """Renew a lease. Returns False if it has ended. One that is late is renewed if `expire` has not ended it."""
        held = self._leases.get(lease)
        if held is None:
            return False
        held.ends_s = max(held.ends_s, now_s + held.ttl_s)
        return True

    def revoke(self, lease: str) -> bool:
        """End a lease and delete its keys. Returns False if it has ended already."""
        held = self._leases.pop(lease, None)
        if held is None:
            return False
        for key in sorted(held.keys):
            self._delete(key)
        return True

    def expire(self, now_s: float) -> None:
        """End the leases that were not renewed in time.

        Leases end only here and in `revoke`: a host that was stopped for a while first reads the renewals that wait in
        its sockets, and then ends the leases for which there was none.
        """
        for lease in [name for name, held in self._leases.items() if held.ends_s <= now_s]:
            self.revoke(lease)

    def next_end_s(self) -> float:
        """The earliest time at which `expire` has something to do."""
        return min((held.ends_s for held in self._leases.values()), default=math.inf)

    def changes_after(self, revision: int) -> Sequence[Change] | None:
        """The last change of every key that changed after `revision`, in order.

        None if the revision is too old, or from another store: then `list` everything.
        """
        if not self._oldest_known <= revision <= self.revision:
            return None
        changed = takewhile(lambda pair: pair[1].revision > revision, reversed(self._entries.items()))
        deleted = takewhile(lambda pair: pair[1] > revision, reversed(self._deleted.items()))
        changes = [Change(key, entry.revision, entry) for key, entry in changed]
        changes += [Change(key, at, None) for key, at in deleted]
        return sorted(changes, key=lambda change: change.revision)

    def changed_at(self, key: str) -> int:
        """The revision at which the key was last changed or deleted; 0 if never, or long ago."""
        return self._revision_of(key) or self._deleted.get(key, 0)

    def _revision_of(self, key: str) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry.revision

    def _remove_entry(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)

    def _delete(self, key: str) -> None:
        self._remove_entry(key)
        self.revision += 1
        self._deleted[key] = self.revision
        while len(self._deleted) > MOST_DELETIONS:
            self._oldest_known = self._deleted.pop(next(iter(self._deleted)))


def check_key(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"a key must be text of at least one character, not {key!r}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key[:40]!r} is not valid Unicode text: {error.reason}") from None
    if size > LONGEST_KEY_BYTES:
        raise ValueError(f"key {key[:40]!r}... has {size} bytes; at most {LONGEST_KEY_BYTES} are allowed")
    return key


def check_revision(revision: int) -> None:
    if type(revision) is not int or revision < 0:
        raise ValueError(f"an expected revision must be a whole number, 0 for a key that must not exist: {revision!r}")


def write_json(value: Json) -> str:
    """The JSON text that is sent, and whose length counts as the size of the value."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def copy_value(value: Json) -> Json:
    """A copy as readers will get it: tuples become lists, keys become text.

    Raises ValueError if the value is not plain JSON, or too large.
    """
    try:
        text = write_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value must be plain JSON, without NaN, infinities or cycles: {error}") from None
    if len(text) > LARGEST_VALUE_BYTES:
        raise ValueError(f"a value has {len(text)} bytes as JSON; at most {LARGEST_VALUE_BYTES} are allowed")
    copied = json.loads(text)
    level: list[Json] = [copied]
    for _ in range(DEEPEST_VALUE):
        level = [inner for outer in level for inner in _children(outer)]
    if level:
        raise ValueError(f"a value is nested more than {DEEPEST_VALUE} deep; make it flatter")
    return copied


def _children(value: Json) -> Iterable[Json]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# ------------------------------------------------------------------------------------------------------------ clients


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
@dataclass
class HeldLease:
    """A lease as its holder sees it. Time counts from before a renewal was sent, so it ends here before the store."""

    ttl_s: float
    id: str | None = None
    held_until_s: float = -math.inf

    def renew(self, lease: str, asked_at_s: float) -> None:
        self.id, self.held_until_s = lease, asked_at_s + self.ttl_s

    def clear(self) -> None:
        self.id, self.held_until_s = None, -math.inf

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

    is_connected: Final = True
    disconnect_reason: Final = ""

    def __init__(self, store: ControlStore, *, options: ClientOptions, on_lost: OnLost) -> None:
        self._store, self._options, self._on_lost = store, options, on_lost
        self._lease = HeldLease(options.ttl_s)
        self._events: deque[Callable[[], None]] = deque()
        self._snapshot: Mapping[str, StoreEntry] = {}
        self._snapshot_revision = 0

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
