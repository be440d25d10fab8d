"""The control store of an elastic run: keys, revisions and leases, in memory. Pure: time is an argument.

It is the single source of truth: the state of a run is what compare-and-swap operations here have accepted, in the
order of one revision number. A key may be bound to a lease; if its holder does not renew it in time, the key is gone.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, TypeAlias, final

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of these

LONGEST_KEY_BYTES: Final = 256
LARGEST_VALUE_BYTES: Final = 1 << 20
DEEPEST_VALUE: Final = 32
MOST_KEYS: Final = 100_000
MOST_LEASES: Final = 10_000
MOST_DELETIONS: Final = 10_000
SHORTEST_LEASE_S: Final = 0.05
LONGEST_LEASE_S: Final = 86400.0


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


class NoLease(ValueError):
    """A key was to be bound to a lease that has ended."""


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
            raise NoLease(f"key {key!r} should be bound to lease {lease[:8]}..., which has ended; ask for a new one")
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
